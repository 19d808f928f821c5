"""What quantizing embedding and head alone costs: KL with everything else at 16 bits, measured and predicted.

    python -m eval.embedding [--model FOLDER] [--data FOLDER] [--out FOLDER] [--num-samples 16] [--windows 10]

One row per whole number of bits, on grids (`quantizers/table_grid.py`) and in trellis codes (`quantizers/table_trellis.py`).
The losses of the blocks come on top, as far as losses are additive.
"""

from typing import Annotated, Any

import torch
import typer

from eval import options as opt
from eval.common import DATA, MODEL, Study, against_original, header, open_study, write_json
from eval.markdown import RESULTS
from requant.allocation.embedding_and_head import embedding_and_head_curvature, embedding_and_head_of
from requant.quantizers.table_grid import GRID
from requant.quantizers.table_trellis import TRELLIS
from requant.quantizers.tables import TableMethod


@torch.no_grad()
def measure(study: Study, method: TableMethod, bits: int | float) -> dict[str, Any]:
    """Embedding and head at these bits; the model keeps its original weights."""
    found = embedding_and_head_of(study.prepared.model)
    with torch.enable_grad():
        curvature = embedding_and_head_curvature(study.base, found)
    originals = {role: part.weight.detach().clone() for role, part in found.parts.items()}
    predicted, stored = 0.0, 0
    for role, part in found.parts.items():
        codes = method.quantize(originals[role], curvature[role], bits)
        predicted += method.predicted_losses(originals[role], curvature[role], [bits])[bits]
        stored += method.packed_spec(part.shape, bits).bytes
        part.weight.copy_(codes.dequantize())
    quality = against_original(study, study.prepared.eval_windows, study.prepared.evaluation)
    for role, part in found.parts.items():
        part.weight.copy_(originals[role])
    weights = sum(weight.numel() for weight in originals.values())
    return {
        "method": method.name,
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
    for method in (GRID, TRELLIS):
        for bits in [bits for bits in method.bits if not bits % 1]:
            row = measure(study, method, bits)
            results["rows"].append(row)
            write_json(out / f"embedding-{model.name}.json", results)
            print(
                f"{method.name}, {bits} bits: {row['bits_per_weight']:.3f} real, KL {row['kl']:.5f}, "
                f"predicted {row['predicted']:.5f}",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
