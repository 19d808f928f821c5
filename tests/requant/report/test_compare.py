"""`requant compare` shows what the files say, measures only when asked, and trusts nobody's report.json."""

import dataclasses
import errno
import json
import re
import shutil
from pathlib import Path

import pytest

import requant
from requant.checkpoint.sizes import byte_table
from requant.errors import CheckpointError, InputError
from requant.exporters.export import export
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Evaluation, Recipe
from requant.report.compare import (
    compare_checkpoints,
    kl_above_first,
    note,
    read_entry,
    render_comparison,
    same_text,
)

from .summaries import HOSTILE, Page


@pytest.fixture(scope="module")
def checkpoints(tiny_folder, tiny_text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """3 and 4 bits of one model, scored on one text."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made = []
    for bits in (3, 4):
        recipe = Recipe(
            mode="dense",
            method="rtn",
            quantizer=METHODS["rtn"].config(bits=bits),
            calibration=Calibration(num_samples=2, seq_len=32),
            evaluation=Evaluation(text=(str(tiny_text_file),), context=32, windows=5, samples=0),
        )
        result = requant.quantize(str(tiny_folder("llama")), recipe, tiny_text_file)
        made.append(str(requant.save(result, folder / f"{bits}bit")))
    return made


def test_entries_are_what_the_run_wrote(checkpoints: list[str]) -> None:
    entries = compare_checkpoints(checkpoints)
    for entry, folder in zip(entries, checkpoints, strict=True):
        report = json.loads((Path(folder) / "report.json").read_text())
        table = byte_table(folder)
        assert entry.bytes == table.bytes == sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
        assert entry.bits_per_weight == table.bits_per_weight
        assert (
            entry.perplexity == report["after"]["perplexity"] and entry.mean_kl == report["after"]["mean_kl"]
        )
        assert entry.original_perplexity == report["before"]["perplexity"]
        assert (
            entry.block_delta_loss == {int(b): v for b, v in report["block_delta_loss"].items()}
            and len(entry.block_delta_loss) == 2
        )
        assert sum(entry.spending.values()) == entry.bytes
        assert (entry.method, entry.mode, entry.delta_loss) == ("rtn", "dense", report["delta_loss"])
        weights = {m["kind"]: 0 for m in report["matrices"]}
        assert entry.kinds.keys() == weights.keys()
        assert entry.kinds["q_proj"] == pytest.approx(report["matrices"][0]["bits"])
    assert entries[0].mean_kl > entries[1].mean_kl and entries[0].bytes < entries[1].bytes
    assert entries[0].kl_error is not None and 0 < entries[0].kl_error < entries[0].mean_kl
    none, above = kl_above_first(entries)
    difference = entries[1].mean_kl - entries[0].mean_kl
    assert none is None and above is not None and above[0] == pytest.approx(difference) and above[1] > 0
    assert entries[0].to_dict()["kl_error"] == entries[0].kl_error
    elsewhere = dataclasses.replace(entries[1], protocol="another")
    assert kl_above_first([entries[0], elsewhere]) == [None, None]
    assert same_text(entries) and note(entries).startswith("scored on ") and "5 x 32 tokens" in note(entries)


def test_measured_again_on_request(checkpoints: list[str], tiny_folder, tiny_text_file: Path) -> None:
    settings = {"reference": str(tiny_folder("llama")), "text": [str(tiny_text_file)], "context": 32}
    same = compare_checkpoints(checkpoints, windows=5, **settings)
    assert [entry.mean_kl for entry in same] == [entry.mean_kl for entry in compare_checkpoints(checkpoints)]
    fewer = compare_checkpoints(checkpoints, windows=2, **settings)
    assert "2 x 32 tokens" in note(fewer) and fewer[0].mean_kl != same[0].mean_kl
    with pytest.raises(InputError, match="give --reference MODEL"):
        compare_checkpoints(checkpoints, windows=2)


def test_the_page(checkpoints: list[str]) -> None:
    entries = compare_checkpoints(checkpoints)
    page = Page(render_comparison(entries))
    words = " ".join("".join(page.words).split())
    assert "2 checkpoints side by side" in words and "3bit" in words and "4bit" in words
    assert (
        f"{entries[0].mean_kl:.4f}" in words
        and f"{entries[0].mean_kl:.4f} ± {entries[0].kl_error:.4f}" in words
        and "KL above the first, paired by window" in words
        and "All were scored on" in words
        and words.count("scored on") == 1
        and "svg" in page.tags
        and "not all scored" not in words
    )
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    other = dataclasses.replace(entries[1], protocol=None, mean_kl=None, block_delta_loss={}, method=None)
    words = "".join(Page(render_comparison([entries[0], other])).words)
    assert (
        "not all scored, or not on the same windows of one text" in words
        and "–" in words
        and "calibrated on" in words
    )
    legend = re.findall(r'class="key"[^>]*></i>([^<]+?)\s*(?:&nbsp;)?\s*</span>', render_comparison(entries))
    assert sorted(legend) == sorted(entries[0].spending)  # a part that no checkpoint has is not in the legend
    hostile = dataclasses.replace(
        entries[0], name=HOSTILE, model=HOSTILE, method=HOSTILE, kinds={HOSTILE: 3.0}
    )
    page = Page(render_comparison([hostile, entries[1]]))
    assert "script" not in page.tags and "{{ 7*7 }}" in "".join(page.words)


@pytest.mark.parametrize(
    "report",
    [
        "{",
        "[]",
        '{"after": 3, "before": [], "measured": "x", "model": {"a": 1}, "block_delta_loss": {"x": 1, "0": "y"}}',
        '{"after": {"perplexity": NaN, "mean_kl": true, "window_kl": [1, NaN], "protocol": {"text": 5}}, "method": null}',
        f'{{"delta_loss": 1{"0" * 400}, "after": {{"perplexity": -1{"0" * 400}}}}}',
    ],
)
def test_a_report_of_another_kind_counts_as_absent(
    checkpoints: list[str], tmp_path: Path, report: str
) -> None:
    folder = Path(shutil.copytree(checkpoints[0], tmp_path / "copy"))
    (folder / "report.json").write_text(report)
    entry = read_entry(str(folder))
    assert entry.bytes == byte_table(folder).bytes and entry.perplexity is None and entry.mean_kl is None
    assert (
        entry.protocol is None
        and entry.block_delta_loss == {}
        and entry.method is None
        and entry.delta_loss is None
    )
    assert "not all scored" in note([entry])
    Page(render_comparison([entry]))


def test_a_page_that_does_not_fit_the_disk_leaves_nothing(
    cli, checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a part of it either, which would be in the way of the next try."""

    def full(path: Path, text: str, **_: object) -> int:
        path.write_bytes(text.encode()[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    code, _, error = cli("compare", *checkpoints, "--output", tmp_path / "page.html")
    assert (
        code == 1 and f"{tmp_path / 'page.html'} cannot be written (No space left on device); free" in error
    )
    assert not (tmp_path / "page.html").exists()


def test_a_dense_export_is_for_eval_to_score(cli, checkpoints: list[str], tmp_path: Path) -> None:
    export(checkpoints[0], "dense", tmp_path / "dense")
    code, _, error = cli("compare", checkpoints[0], tmp_path / "dense")
    assert code == 2 and "is not quantized" in error and "`requant eval MODEL CHECKPOINT --reference" in error


def test_the_command(cli, checkpoints: list[str], tmp_path: Path, tiny_folder) -> None:
    code, out, error = cli("compare", *checkpoints, "--output", tmp_path / "deep" / "page.html")
    assert code == 0, error
    assert [line.split()[0] for line in out.splitlines()[2:4]] == checkpoints and "scored on" in out
    assert (tmp_path / "deep" / "page.html").read_text().strip().endswith("</html>")
    code, _, error = cli("compare", *checkpoints, "--output", tmp_path / "deep" / "page.html")
    assert code == 2 and "exists already" in error
    code, out, _ = cli("compare", *checkpoints, "--json")
    assert code == 0 and [entry["name"] for entry in json.loads(out)] == checkpoints
    code, _, error = cli("compare", tiny_folder("llama"))
    assert code == 2 and "is not quantized" in error
    with pytest.raises(CheckpointError):
        compare_checkpoints([str(tiny_folder("llama"))])
