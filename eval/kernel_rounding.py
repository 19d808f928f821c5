"""What the kernels' rounding costs: KL of checkpoints to their original, dequantized and through the kernels.

    python -m eval.kernel_rounding CHECKPOINT ... --reference ../shared/models/bench-32m --out FILE

Reports and `requant eval` score dequantized weights. Here the same windows go through the kernels: with activations in 16
bits alone, as they are by default (`kernels/requant_kernels/trellis/rounding.py`), and with all matrices in int8; `max_bits`
of a row is the most bits of matrices that are. A window is one prompt, so its length decides which kernels multiply; or it
is read token by token, beside seven others, as steps of eight sequences are (`sequences`). For a GPU: on a CPU, and on
one that is not a Hopper, all ways are the same but for the type.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from requant_kernels import dispatch
from requant_kernels.trellis import rounding
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import requant
from eval import options as opt
from eval.common import DATA, MODEL, environment, write_json
from requant.evaluation.perplexity import perplexity_and_kl
from requant.inference.decode import Decoder
from requant.models.devices import pick_device
from requant.text.sources import Text, read_text
from requant.text.windows import token_windows

LENGTHS = (64, 512, 2048)
WINDOWS = 96  # of each length, spread over the text
SEQUENCES, STEPS = 8, 512  # of the windows that are read token by token


class InSteps(nn.Module):
    """A model that reads its windows token by token, by the steps of `Decoder`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config, self.device = model, model.config, model.device
        self.decoder: Decoder | None = None

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, tokens: Tensor, **_: Any) -> SimpleNamespace:
        if self.decoder is None or len(self.decoder.tokens) != len(tokens):
            self.decoder = Decoder(self.model, length=tokens.shape[1])
        self.decoder.reset()
        logits = [self.decoder.prefill(tokens[:, :1]).clone()]
        logits += [self.decoder.step(tokens[:, i : i + 1]).clone() for i in range(1, tokens.shape[1])]
        return SimpleNamespace(logits=torch.stack(logits, 1))


def ways(checkpoint: Path, device: str) -> dict[str, tuple[Any, float | None]]:
    """The checkpoint dequantized, and through kernels; with the limit of int8 for the latter."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    served = requant.load(checkpoint, device=device, dtype=dtype)
    dequantized = requant.load(checkpoint, device=device, dtype=torch.float32, dequantize=True)
    return {
        "dequantized": (dequantized, None),
        "16 bits": (served, 0.0),
        "default": (served, rounding.MAX_BITS),
        "all in int8": (served, 9.0),
    }


def rows_of(
    checkpoint: Path, reference: Any, text: Text, windows_of: dict[int, torch.Tensor]
) -> list[dict[str, Any]]:
    usual, rows = rounding.MAX_BITS, []
    for name, (model, most) in ways(checkpoint, str(reference.device)).items():
        rounding.MAX_BITS = usual if most is None else most
        dispatch.forget()
        passes = [(length, 1, model) for length in windows_of]
        if most is not None:
            passes.append((STEPS, SEQUENCES, InSteps(model)))
        for length, sequences, reader in passes:
            windows = windows_of[length]
            found = perplexity_and_kl(reader, windows, text=text, reference=reference, batch_size=sequences)
            rows.append({
                "checkpoint": checkpoint.name, "way": name, "max_bits": most, "window": length, "windows": len(windows),
                "sequences": sequences, "kl": found.mean_kl, "se": found.kl_error, "perplexity": found.perplexity,
            })  # fmt: skip
            print(
                f"{checkpoint.name} {name:12s} {sequences} x {length:4d}  KL {found.mean_kl:.5f}", flush=True
            )
    rounding.MAX_BITS = usual
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
