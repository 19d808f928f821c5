"""A sweep gives the bytes of single runs, collects statistics once, and says which budget to take."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import requant
from requant.errors import OutputError, RecipeError
from requant.report.compare import Entry
from requant.report.sweep import answer, sweep

from .summaries import Page

TINY = {"method": "gptq", "mode": "dense", "num_samples": 2, "seq_len": 32}


def test_a_sweep_is_single_runs_with_shared_statistics(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from requant.run import statistics

    passes: list[int] = []
    collect = statistics.collect
    monkeypatch.setattr(statistics, "collect", lambda *args, **kw: passes.append(1) or collect(*args, **kw))
    folder, options = str(tiny_folder("llama")), {**TINY, "calibration": str(tiny_text_file)}
    found = sweep(folder, [4, 3], tmp_path / "out", **options)
    assert len(passes) == 1
    assert [Path(entry.name).name for entry in found.entries] == ["3bit", "4bit"]  # by size
    assert found.entries[0].mean_kl > found.entries[1].mean_kl > 0
    alone = requant.save(requant.quantize(folder, bits=3, **options), tmp_path / "alone")
    for name in ("model.safetensors", "recipe.yaml"):
        assert (alone / name).read_bytes() == (tmp_path / "out" / "3bit" / name).read_bytes()
    page = Page((tmp_path / "out" / "index.html").read_text())
    assert found.answer in " ".join("".join(page.words).split()) and "svg" in page.tags
    saved = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [entry["bytes"] for entry in saved["checkpoints"]] == [entry.bytes for entry in found.entries]

    passes.clear()
    again = sweep(folder, [3, 4, 5], tmp_path / "out", resume=True, **options)
    assert len(again.entries) == 3 and again.entries[0] == found.entries[0]
    with pytest.raises(OutputError, match="exists already"):
        sweep(folder, [3, 4], tmp_path / "out", **options)
    with pytest.raises(OutputError, match="3bit was made by another recipe; remove it, or choose another"):
        sweep(folder, [3, 4], tmp_path / "out", resume=True, **{**options, "num_samples": 3})
    assert len(passes) == 1  # for the 5 bits


@pytest.mark.parametrize("left", ["3bit.partial/run.json", "run.json"])
def test_a_sweep_that_is_not_finished_is_not_to_be_removed(tiny_folder, tmp_path: Path, left: str) -> None:
    """It may be at work: its folder is there from its first stage on."""
    (tmp_path / "out" / left).parent.mkdir(parents=True)
    (tmp_path / "out" / left).write_text("{}")
    with pytest.raises(OutputError, match="holds a sweep that is not finished; --resume goes on") as refused:
        sweep(str(tiny_folder("llama")), [3, 4], tmp_path / "out", **TINY)
    assert "remove" not in str(refused.value)


@pytest.mark.slow
def test_what_a_model_limits_is_not_quantized_again(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint's recipe has a number of steps where the command's has none, and says of a model whose blocks need each
    other that it is trained as a whole."""
    folder = str(tiny_folder("llama"))
    options = {**TINY, "method": "rtn", "calibration": str(tiny_text_file)}
    monkeypatch.setattr("requant.pipeline.preparation.completion.finetune_steps", lambda parameters: 0)
    recipe = {"finetune": {"steps": None}}
    sweep(folder, [4, 5], tmp_path / "out", recipe, **options)
    file = tmp_path / "out" / "4bit" / "recipe.yaml"
    before = file.read_text()
    file.write_text(before.replace("blockwise: null", "blockwise: false"))
    assert file.read_text() != before
    monkeypatch.setattr("requant.report.sweep.quantize", lambda *_, **__: pytest.fail("once more"))
    assert len(sweep(folder, [4, 5], tmp_path / "out", recipe, resume=True, **options).entries) == 2


def test_wrong_bits_are_refused_before_the_first_run(tiny_folder, tmp_path: Path) -> None:
    for bits in ([3], [3, 3], []):
        with pytest.raises(RecipeError, match="two or more different"):
            sweep(str(tiny_folder("llama")), bits, tmp_path / "out", **TINY)
    with pytest.raises(RecipeError, match="--bits 9 is out of range"):
        sweep(str(tiny_folder("llama")), [3, 9], tmp_path / "out", **TINY)
    assert not (tmp_path / "out").exists()


def entry(name: str, size: int, kl: float, agreement: float) -> Entry:
    return Entry(
        name=f"x/{name}", bytes=size << 20, bits_per_weight=3.0, spending={}, kinds={}, mean_kl=kl,
        top1_agreement=agreement,
    )  # fmt: skip


def test_the_answer() -> None:
    entries = [entry("2bit", 3, 1.9, 0.3), entry("3bit", 4, 0.3, 0.7), entry("4bit", 5, 0.06, 0.9)]
    assert answer(entries) == (
        "2bit is damaged (3.0 MiB, KL 1.90, 30% of the top tokens). 3bit is the smallest that is not damaged: 4.0 MiB, "
        "KL 0.300, 70% of the top tokens. 4bit takes 1.0 MiB more and has 0.20 times its KL (0.060)."
    )
    assert "None of them is worth using" in answer(entries[:1])
    small = [replace(each, bytes=each.bytes >> 10) for each in entries]
    exact = [replace(each, mean_kl=0.0) for each in entries[1:]]
    assert answer(exact).endswith("4bit takes 1.0 MiB more and has a KL of 0.000.")
    assert "4.0 KiB, KL 0.300" in answer(small) and "4bit takes 1.0 KiB more" in answer(small)


def test_the_command(cli, tiny_folder, tiny_text_file: Path, tmp_path: Path) -> None:
    code, out, error = cli(
        "sweep", "--model", tiny_folder("llama"), "--bits", "3, 8", "--method", "rtn", "--mode", "dense",
        "--calibration", tiny_text_file, "--num-samples", 2, "--seq-len", 32, "--output", tmp_path / "s", "-q"
    )  # fmt: skip
    assert code == 0, error
    lines = out.splitlines()
    assert (
        lines[2].startswith(str(tmp_path / "s" / "3bit"))
        and lines[-1] == f"page: {tmp_path / 's' / 'index.html'}"
    )
    assert not list((tmp_path / "s").glob("*.partial*"))
