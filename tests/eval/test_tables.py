"""README and the pages show what the results say."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from eval.baseline_tables import baselines_table
from eval.markdown import PEERS, RESULTS, ROOT, markdown
from eval.pqi_tables import nodes_table
from eval.tables import PAGES, REFERENCE, TABLES, render

QUALITY = {"bits": 3, "bits_per_weight": 3.2104, "perplexity": 27.421, "kl": 0.27551, "second": {"kl": 0.2}}


def write(folder: Path, name: str, data: object) -> None:
    (folder / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert render(text) == text, "run `python -m eval.tables`"


def test_results_hold_names_and_no_folders() -> None:
    for file in [*RESULTS.glob("*.json"), PEERS]:
        text = file.read_text(encoding="utf-8")
        assert '"/' not in text and "\\\\" not in text, file.name


def test_the_readme_says_where_every_result_comes_from() -> None:
    """MODEL stands for a model's name."""
    named = re.findall(r"`([\w-]+)\.json`", (RESULTS.parent / "README.md").read_text(encoding="utf-8"))
    patterns = [re.compile(name.replace("MODEL", "(demo-4m|bench-32m|moe-3m|moe-31m)")) for name in named]
    files = [file.stem for file in RESULTS.glob("*.json")]
    assert [name for name in files if not any(pattern.fullmatch(name) for pattern in patterns)] == []


def test_a_block_without_results_is_empty(tmp_path: Path) -> None:
    text = "a\n<!-- results:speed -->\nold\n<!-- /results -->\nb\n"
    assert render(text, tmp_path) == "a\n<!-- results:speed -->\n<!-- /results -->\nb\n"


def test_an_unknown_block_is_named() -> None:
    with pytest.raises(KeyError, match="results:sped"):
        render("<!-- results:sped -->\n<!-- /results -->")


@pytest.mark.parametrize("name", sorted(TABLES.keys() - REFERENCE.keys()))
def test_every_table_survives_missing_results(name: str, tmp_path: Path) -> None:
    assert TABLES[name](tmp_path) == ""


def test_a_row_stands_beside_its_peer_and_the_best_of_the_width(tmp_path: Path) -> None:
    rows = [{"label": "SqueezeLLM dense", **QUALITY}, {"label": "ours alone", **QUALITY}]
    write(tmp_path, "baselines-bench-32m", {"original": {"perplexity": 24.347}, "rows": rows})
    lines = baselines_table(tmp_path).splitlines()
    assert lines[3] == "| SqueezeLLM dense | 3.210 | 27.42 | 0.2755 | 0.2000 | 27.42 | 0.2755 |"
    assert lines[4].endswith("| 0.2000 |  |  |")
    assert "EXL3-like (peer, 3.051 bits)" in lines[5] and "0.1145" in lines[5]


def test_nodes_stand_beside_the_papers_error(tmp_path: Path) -> None:
    rules = ("midpoint", "gauss2", "gauss4", "simpson", "plain4", "plain8", "plain16", "plain32")
    nodes = [{"nodes": name, "passes": 1, "error_percent": 0.5} for name in rules]
    write(tmp_path, "paper_tables-bench-32m", {"bits": {"4": {"nodes": nodes}}})
    assert "| plain 32 (the paper's) | 1 | +0.500 | +0.16 |" in nodes_table(tmp_path)


def test_a_timed_run_says_how_often_it_trained(tmp_path: Path) -> None:
    """Rows from before recipes had `rounds` trained four times."""
    recipe = {"calibration": {"num_samples": 512}, "budget": {"bits": 2.0}}
    runs = {
        f"best_run_{name}": {"seconds": 80.0, "recipe": {**recipe, "finetune": finetune}, "peak_bytes": 2**30}
        for name, finetune in (("a", {"steps": 450}), ("b", {"steps": 300, "rounds": 6}))
    }
    runs["best_run_c"] = runs["best_run_b"] | {
        "steps": 1000,
        "recipe": {**recipe, "finetune": {"steps": None, "rounds": 6}},
    }
    write(tmp_path, "speed-cuda", {"device": "a GPU", **runs})
    table = TABLES["speed"](tmp_path)
    assert "tokens, 4 x 450 steps |" in table and "tokens, 6 x 300 steps |" in table
    assert "tokens, 6 x 1000 steps |" in table


def test_decoding_stands_beside_bf16_of_the_same_setup(tmp_path: Path) -> None:
    row = {"shape": "8b", "name": "2-bit", "batch": 1, "compiled": True, "attention": "kernel"}
    row |= {"decode_tokens_per_s": 600.0, "times_bf16": 3.0}
    failed = {"shape": "8b", "name": "2-bit", "batch": 8, "failed": "OutOfMemoryError"}
    write(tmp_path, "end-to-end-compiled-h200", {"rows": [{**row, "name": "bf16"}, row, failed]})
    assert TABLES["decoding-earlier"](tmp_path).splitlines()[2:] == [
        "| 8b | 2-bit | 1 | torch.compile | requant's | 200 | 600 | 3.00 |"
    ]
    base = {"shape": "8b", "name": "bf16", "batch": 1}
    numbers = {"decode_tokens_per_s": 200.0, "prefill_tokens_per_s": 5000.0}
    ratios = {"decode_tokens_per_s_ratio": 3.0, "prefill_tokens_per_s_ratio": 0.9}
    ours = {
        **base,
        "name": "mul1 2-bit, widths of mode best",
        "decode_tokens_per_s": 600.0,
        "prefill_tokens_per_s": 4500.0,
        **ratios,
    }
    rows = [
        {**base, **numbers},
        {**base, **numbers, "batch": 8},
        ours,
        {**base, "name": "grid 2-bit", "failed": "?"},
    ]
    write(tmp_path, "end-to-end-h200", {"rows": rows})
    assert TABLES["decoding"](tmp_path).splitlines()[2:] == [
        "| 8b | bf16 | 200 | 200 | 5,000 | 5,000 |",
        "| 8b | mul1 2-bit | 600 (3.00) |  | 4,500 (0.90) |  |",
    ]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("kernels-h200", "| requant grid 2-bit | 2.12 | "),
        ("end-to-end-h200", "| llama-3.1-8b | bf16 | 1 | fused | "),
        ("end-to-end-compiled-h200", "| llama-3.1-8b | bf16 | 1 | compiled | 191 | 1.00 | 5.241 | "),
        ("ncu-h200", "| launch | us | DRAM | "),
    ],
)
def test_the_tables_of_the_kernels_are_printed(name: str, line: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["table.py", str(RESULTS / f"{name}.json")])
    runpy.run_path(str(ROOT / "kernels" / "bench" / "table.py"), run_name="__main__")
    assert line in capsys.readouterr().out


def test_vllms_rows_are_compared_with_bf16_in_the_same_engine(tmp_path: Path) -> None:
    def row(name: str, served: bool, speed: float, fused: bool | None = None) -> dict[str, Any]:
        speeds = {"batch": 1, "decode_tokens_per_s": speed}
        return {"name": name, "served": served, "fused_layers": fused} | speeds

    rows = [{"checkpoint": "demo-2"}, row("bf16", False, 200.0, False), row("pair:2", False, 500.0, True)]
    rows += [row("pair:2", False, 400.0, False)]
    rows += [row("bf16", True, 250.0), row("gptq:4", True, 300.0), row("pair:2", True, 550.0)]
    write(tmp_path, "vllm-h200", {"rows": rows})
    assert TABLES["vllm"](tmp_path).splitlines()[2:] == [
        "| bf16 | 250 (1.00) |",
        "| vLLM's int4 (GPTQ, groups of 128) | 300 (1.20) |",
        "| pair 2-bit | 550 (2.20) |",
        "| bf16, no torch.compile | 200 (1.00) |",
        "| pair 2-bit, no torch.compile | 500 (2.50) |",
        "| pair 2-bit, `REQUANT_VLLM_FUSE=0`, no torch.compile | 400 (2.00) |",
    ]


def test_the_ablation_crosses_masks_with_losses(tmp_path: Path) -> None:
    labels = [f"magnitude, {masks}{loss}" for masks in ("fixed", "ast") for loss in ("", ", not distilled")]
    rows = [{"label": label, "kl": i / 10, "second": {"kl": i}} for i, label in enumerate(labels)]
    write(tmp_path, "sparsity-bench-32m", {"rows": rows})
    lines = TABLES["sparsity-ablation"](tmp_path).splitlines()
    assert lines[2] == "| KL to the original | 0.000 (0.000) | 0.200 (2.000) |"
    assert lines[3] == "| cross-entropy of the text | 0.100 (1.000) | 0.300 (3.000) |"
    write(tmp_path, "sparsity-bench-32m", {"rows": rows[1:]})
    assert TABLES["sparsity-ablation"](tmp_path) == ""


def test_training_from_scratch_stands_beside_dense(tmp_path: Path) -> None:
    losses = {"dense": (3.0, 3.2), "s-ste": (3.1, 3.5)}
    rows = [
        {
            "label": label,
            "seed": seed,
            "val_loss": loss,
            "flip_rates": [0.1 if label == "dense" else 0.05] * 2,
        }
        for label, both in losses.items()
        for seed, loss in enumerate(both)
    ]
    write(tmp_path, "sparse-pretraining", {"rows": rows})
    lines = TABLES["sparse-pretraining"](tmp_path).splitlines()
    assert lines[2:] == [
        "| dense | 3.1000 | 3.0000 to 3.2000 | +0.0000 | 1.00 |",
        "| s-ste | 3.3000 | 3.1000 to 3.5000 | +0.2000 | 0.50 |",
    ]


def test_products_are_listed_by_shape_and_tokens(tmp_path: Path) -> None:
    row = {"n": 8, "k": 16, "tokens": 64, "ratio": 0.9, "ratio_default": 0.8}
    rows = [row, {**row, "tokens": 8, "failed": {}, "ratio": 0.5}, {"n": 32, "k": 16, "tokens": 64}]
    del rows[1]["ratio_default"]
    write(tmp_path, "semi-structured-h100", {"rows": rows})
    lines = TABLES["sparse-products"](tmp_path).splitlines()
    assert lines[0] == "| out x in | 8 | 64 |"
    assert lines[2:4] == ["| 8 x 16 | 0.50 | 0.80, 0.90 |", "| 32 x 16 |  |  |"]
    assert lines[-1].endswith("(figures/sparse-products.svg)")


def test_markdown() -> None:
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
