"""Squared error of computed trellis codes, on Gaussians and on the matrices of a model, by bits and by size of the state.

    python -m eval.trellis_codes --tiles 100

A code is a table of 2**L states, for which a kernel computes one hash per step, however many weights a step has. So a code
with two weights per step needs half the hashes and matrix products of a code with one. Decoding takes 1.6 instructions per
weight with `pair` and 3.0 with `mul1` (`kernels/requant_kernels/trellis/README.md`). The question is what error that costs:

    error = mean (w - w~)^2 / variance * 4**bits        1 is the bound of any code (rate distortion)

The registered codes (`requant/formats/trellis_codes.py`) are compared with true Gaussian draws, which show what a state of L
bits allows, and with a candidate that no kernel decodes yet:

    octagon   h as in `pair`, bytes b0 .. b3 minus their mean 127.5;   (x, y) = sum of b_i d_i,
              d = (3, 0), (-2, 2), (0, 3), (2, 2): nearly the directions of a regular octagon

`pair` adds its four bytes along only two directions, so its values fill a square whose sides are 2.45 standard deviations
from the centre; four directions fill an octagon, 2.96 to 3.2 deviations wide. In a product with activations the directions
can be folded into the activations, so decoding costs as much as for `pair`. Values are integers up to 1785, divided by 2:
exact in float16.

The spread of each code is the best of a few, chosen on Gaussians other than those that are reported.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForCausalLM

from eval import options as opt
from eval.common import MODEL, environment, write_json
from eval.markdown import RESULTS
from requant.formats.hadamard import incoherence_process, random_signs
from requant.formats.trellis_codes import CODES, STATE_BITS, code_values, to_tiles
from requant.models.targets import find_linears
from requant.quantizers.viterbi import tail_biting_states

OCTAGON = torch.tensor([[3.0, 0.0], [-2.0, 2.0], [0.0, 3.0], [2.0, 2.0]])
SPREADS = (0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3)
BITS = (2, 3, 4)
STATE_SIZES = (16, 18)
FITTING_TILES = 32


def octagon(state_bits: int) -> Float[Tensor, "s 2"]:
    h = (torch.arange(1 << state_bits) * 0x4E6DA66B + 0x3C6EF35F) & 0xFFFFFFFF
    return torch.stack([(h >> shift & 0xFF) - 127.5 for shift in (0, 8, 16, 24)], dim=1) @ OCTAGON


def gaussian(weights_per_step: int) -> Callable[[int], Float[Tensor, "s v"]]:
    def draw(state_bits: int) -> Float[Tensor, "s v"]:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(1 << state_bits, weights_per_step, generator=generator)

    return draw


# name -> the values of the 2**L states; registered codes have only one L
CANDIDATES: dict[str, Callable[[int], Tensor]] = {
    **{name: lambda _, name=name: code_values(name) for name in CODES},
    "octagon": octagon,
    "Gaussian": gaussian(1),
    "Gaussian pairs": gaussian(2),
}


def gaussian_tiles(count: int, *, seed: int) -> Float[Tensor, "b 256"]:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed))


def model_tiles(folder: Path, count: int) -> Float[Tensor, "b 256"]:
    """`count` evenly spaced tiles of the rotated matrices of the blocks, each matrix scaled to variance 1."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tiles: list[Tensor] = []
    for i, linear in enumerate(find_linears(model)):
        n, k = linear.shape
        rotated = incoherence_process(
            linear.weight(), rows=random_signs(n, seed=2 * i + 1), columns=random_signs(k, seed=2 * i)
        )
        tiles.append(to_tiles(rotated / rotated.square().mean().sqrt()))
    everything = torch.cat(tiles)
    return everything[:: len(everything) // count][:count]


def errors(tiles: Float[Tensor, "b 256"], values: Float[Tensor, "s v"], bits: int) -> Float[Tensor, " b"]:
    """Mean squared error of each tile, multiplied by 4**bits."""
    states = tail_biting_states(tiles.view(len(tiles), -1, values.shape[1]), values, bits=bits)
    return (values[states].flatten(1) - tiles).square().mean(1) * 4.0**bits


def rows(tiles: dict[str, Float[Tensor, "b 256"]]) -> Iterator[dict[str, Any]]:
    """One row per code, size of the state and number of bits: error on each kind of tile, with its standard error."""
    fitting = gaussian_tiles(FITTING_TILES, seed=1)
    for name, table in CANDIDATES.items():
        spreads: dict[int, float] = {}
        for state_bits in (STATE_BITS,) if name in CODES else STATE_SIZES:
            values = table(state_bits)
            values = values / values.square().mean().sqrt()
            for bits in BITS:
                if bits not in spreads:  # the spread that suits the smallest state suits the others
                    spreads[bits] = best_spread(fitting, values, bits)
                row = {"code": name, "state_bits": state_bits, "bits": bits, "spread": spreads[bits]}
                for kind, chosen in tiles.items():
                    error = errors(chosen, values * spreads[bits], bits)
                    row[kind] = error.mean().item()
                    row[f"{kind}_standard_error"] = (error.std() / len(error) ** 0.5).item()
                yield row | {"hashes_per_weight": 1 / values.shape[1]}


def best_spread(tiles: Float[Tensor, "b 256"], values: Float[Tensor, "s v"], bits: int) -> float:
    return min(SPREADS, key=lambda spread: errors(tiles, values * spread, bits).mean().item())


def main(
    model: opt.Model = MODEL,
    out: opt.Out = RESULTS,
    tiles: Annotated[int, typer.Option(help="Tiles of 256 weights of each kind.")] = 200,
) -> None:
    results = environment(torch.device("cpu")) | {"model": model.name, "tiles": tiles, "rows": []}
    for row in rows({"gaussian": gaussian_tiles(tiles, seed=2), "model": model_tiles(model, tiles)}):
        results["rows"].append(row)
        write_json(out / "trellis-codes.json", results)
        print(row, flush=True)


if __name__ == "__main__":
    typer.run(main)
