"""What quantizing embedding and head costs by itself: KL with everything else at 16 bits, measured and predicted.

    python -m eval.embedding [--model FOLDER] [--data FOLDER] [--out FOLDER] [--num-samples 16] [--windows 10]

One row a width of `allocation/embedding_and_head.py`; losses of the blocks add to it, as far as losses add up.
"""

from typing import Annotated, Any

import torch
import typer

from eval import options as opt
from eval.common import DATA, MODEL, Study, against_original, header, open_study, write_json
from eval.markdown import RESULTS
from requant.allocation.embedding_and_head import (
    WIDTHS,
    embedding_and_head_curvature,
    embedding_and_head_of,
    embedding_and_head_spec,
    quantize_table,
    table_loss,
)


@torch.no_grad()
def measure(study: Study, bits: int) -> dict[str, Any]:
    """All tables at these bits; the model is left at the original."""
    found = embedding_and_head_of(study.prepared.model)
    with torch.enable_grad():
        curvature = embedding_and_head_curvature(study.base, found)
    originals = {role: part.weight.detach().clone() for role, part in found.parts.items()}
    predicted, stored = 0.0, 0
    for role, part in found.parts.items():
        codes = quantize_table(originals[role], curvature[role], bits=bits)
        predicted += table_loss(originals[role], codes, curvature[role])
        stored += embedding_and_head_spec(part.shape, bits).bytes
        part.weight.copy_(codes.dequantize())
    quality = against_original(study, study.prepared.eval_windows, study.prepared.evaluation)
    for role, part in found.parts.items():
        part.weight.copy_(originals[role])
    weights = sum(weight.numel() for weight in originals.values())
    return {
        "bits": bits,
        "bits_per_weight": 8 * stored / weights,
        "bytes": stored,
        "predicted": predicted,
        **quality,
    }


def main(
    model: opt.Model = MODEL,
    data: opt.Data = DATA,
    out: opt.Out = RESULTS,
    num_samples: Annotated[int, typer.Option(help="Calibration windows, for the prediction.")] = 16,
    seq_len: opt.SeqLen = 1024,
    windows: Annotated[int, typer.Option(help="Windows to score.")] = 10,
    device: opt.Device = "auto",
) -> None:
    study = open_study(model, data, num_samples=num_samples, seq_len=seq_len, windows=windows, device=device)
    results: dict[str, Any] = {**header(study), "rows": []}
    for bits in sorted(set(WIDTHS) - {16}, reverse=True):
        row = measure(study, bits)
        results["rows"].append(row)
        write_json(out / f"embedding-{model.name}.json", results)
        print(
            f"{bits} bits: {row['bits_per_weight']:.3f} real, KL {row['kl']:.5f}, predicted {row['predicted']:.5f}",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
