"""What the kernels' rounding costs: KL of checkpoints to their original, dequantized and through the kernels.

    python -m eval.kernel_rounding CHECKPOINT ... --reference ../shared/models/bench-32m --out FILE

Reports and `requant eval` score dequantized weights. Here the same windows go through the kernels: in float16 alone, as they
are by default (`kernels/requant_kernels/trellis/gemm_int8.py`), and with all matrices in int8; `max_bits` of a row is the
most bits of matrices that are. A window is one prompt, so its length decides which kernels multiply. For a GPU: on a CPU,
and on one that is no Hopper, all ways are the same but for the type.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from requant_kernels import dispatch
from requant_kernels.trellis import gemm_int8
from transformers import AutoModelForCausalLM, AutoTokenizer

import requant
from eval import options as opt
from eval.common import DATA, MODEL, environment, write_json
from requant.evaluation.perplexity import perplexity_and_kl
from requant.models.devices import pick_device
from requant.text.sources import Text, read_text
from requant.text.windows import token_windows

LENGTHS = (64, 1024, 2048)
WINDOWS = 100  # of each length, spread over the text


def ways(checkpoint: Path, device: str) -> dict[str, tuple[Any, float | None]]:
    """The checkpoint dequantized, and through kernels; with the limit of int8 for the latter."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    served = requant.load(checkpoint, device=device, dtype=dtype)
    dequantized = requant.load(checkpoint, device=device, dtype=torch.float32, dequantize=True)
    return {
        "dequantized": (dequantized, None),
        "float16": (served, 0.0),
        "default": (served, gemm_int8.MAX_BITS),
        "all in int8": (served, 9.0),
    }


def rows_of(
    checkpoint: Path, reference: Any, text: Text, windows_of: dict[int, torch.Tensor]
) -> list[dict[str, Any]]:
    usual, rows = gemm_int8.MAX_BITS, []
    for name, (model, most) in ways(checkpoint, str(reference.device)).items():
        gemm_int8.MAX_BITS = usual if most is None else most
        dispatch.forget()
        for length, windows in windows_of.items():
            found = perplexity_and_kl(model, windows, text=text, reference=reference)
            rows.append({
                "checkpoint": checkpoint.name, "way": name, "max_bits": most, "window": length, "windows": len(windows),
                "kl": found.mean_kl, "se": found.kl_error, "perplexity": found.perplexity,
            })  # fmt: skip
            print(f"{checkpoint.name} {name:12s} windows of {length:4d}  KL {found.mean_kl:.5f}", flush=True)
    gemm_int8.MAX_BITS = usual
    dispatch.forget()
    return rows


def main(
    checkpoints: Annotated[list[Path], typer.Argument(help="Folders of checkpoints.")],
    out: opt.OutFile,
    reference: Annotated[Path, typer.Option(help="Folder of the original.")] = MODEL,
    text: Annotated[Path, typer.Option(help="The text to score.")] = DATA / "wikitext2" / "wiki.test.raw",
    device: opt.Device = "auto",
) -> None:
    where = pick_device(device)
    original: Any = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    original.to(where).eval()
    tokenizer, source, rows = AutoTokenizer.from_pretrained(reference), read_text(text), []
    windows_of = {
        n: token_windows(source, tokenizer, num_samples=WINDOWS, seq_len=n).to(where) for n in LENGTHS
    }
    for checkpoint in checkpoints:
        rows += rows_of(checkpoint, original, source, windows_of)
        write_json(out, {"about": environment(torch.device(where)), "rows": rows})


if __name__ == "__main__":
    typer.run(main)
