"""KL through the kernels, on a CPU, where they are the dequantized weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from requant_kernels.trellis import rounding

import requant
from eval import kernel_rounding


@pytest.mark.slow
def test_every_way_of_a_checkpoint_is_scored(
    tiny_folder: Any, tiny_text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out, usual = tiny_folder("llama"), tmp_path / "rounding.json", rounding.MAX_BITS
    result = requant.quantize(
        folder, bits=3, mode="dense", method="rtn", calibration=tiny_text_file, seq_len=16, num_samples=4,
        device="cpu",
    )  # fmt: skip
    requant.save(result, tmp_path / "three")
    monkeypatch.setattr(kernel_rounding, "LENGTHS", (8, 16))
    monkeypatch.setattr(kernel_rounding, "WINDOWS", 3)
    monkeypatch.setattr(kernel_rounding, "STEPS", 16)
    kernel_rounding.main([tmp_path / "three"], out, reference=Path(folder), text=tiny_text_file, device="cpu")
    rows = json.loads(out.read_text())["rows"]
    prompts = [(8, 1), (16, 1)]
    assert [(row["way"], row["window"], row["sequences"]) for row in rows] == [
        ("dequantized", *of) for of in prompts
    ] + [(way, *of) for way in ("16 bits", "default", "all in int8") for of in [*prompts, (16, 8)]]
    for row in rows:
        exact = next(r for r in rows if r["way"] == "dequantized" and r["window"] == row["window"])
        assert row["windows"] == 3 and row["kl"] > 0 and row["kl"] == pytest.approx(exact["kl"], rel=1e-3)
    assert usual == rounding.MAX_BITS
