"""Launches of trellis products, timed where they matter: as parts of a step of a whole model.

    python -m eval.step_launches --shape llama-3.1-8b --format mul1:3 --sequences 8 --out FILE

`kernels/bench/products.py` times one launch after another like it. In a step a product follows a norm, a gate or attention,
whose CTAs may still hold an SM when its own start, so the best launch there can be another one here. For every product of a
block (q, k and v; o; gates and ups; down), and for a head in bands, a step is captured with each launch, all steps are
replayed in turn, and a row has the least time of each, with the rule's (`trellis/gemv_launch.py`). All blocks have the
widths of a model's middle third, so that few kernels are compiled.

Run it on a GPU that nothing else uses: what other processes do shows in some launches and not in others.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from requant_kernels import TrellisLayout
from requant_kernels.common.occupancy import ctas_per_sm
from requant_kernels.launch_config import Shape, m_bucket
from requant_kernels.ops import combines_parts
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig, launch_of
from requant_kernels.trellis.layout import TILE
from torch import Tensor

from eval import end_to_end
from eval import options as opt
from eval.common import environment, write_json
from requant.inference.decode import Decoder
from requant.inference.kernel_check import TritonError

PRODUCTS = ("qkv", "o", "gates", "down", "head")
LAUNCHES = [  # warps, tiles a CTA, k64 a step
    (2, 2, 2), (4, 1, 4), (4, 2, 2), (4, 2, 4), (4, 4, 2), (8, 1, 2), (8, 1, 4), (8, 2, 2), (8, 2, 4), (16, 1, 2),
    (16, 1, 4), (16, 2, 1), (16, 2, 2), (16, 2, 4), (16, 4, 1),
]  # fmt: skip
PROMPT, LENGTH = 64, 640  # tokens, and rows of the cache
ROUNDS, STEPS = 4, 15  # steps of a round follow one another

Launch = tuple[int, int, int, bool]  # the last: no more CTAs an SM than an even share


def product_of(layouts: Sequence[TrellisLayout], hidden: int) -> str:
    """Which product of a block a launch multiplies."""
    first = layouts[0]
    if first.k != hidden:
        return "down"
    if len(layouts) == 1 and not first.parts and first.n == hidden:
        return "o"
    return "gates" if len(layouts) == 2 or first.n > 3 * hidden else "qkv"


@dataclass(kw_only=True)
class ChosenLaunches:
    """Replaces the launches of products of so many sequences."""

    hidden: int
    sequences: int
    device: torch.device
    of: dict[str, Launch] = field(default_factory=dict)

    def configs(
        self,
        layouts: Sequence[TrellisLayout],
        configs: Sequence[TrellisGemvConfig],
        sequences: int,
        product: str,
    ) -> list[TrellisGemvConfig]:
        chosen = self.of.get(product)
        if chosen is None or sequences != self.sequences:
            return list(configs)
        *launch, even = chosen
        cap = None
        if even:
            cap = ctas_per_sm(sum(-(-own.n // (TILE * launch[1])) for own in layouts), self.device)
        return [
            launch_of(
                Shape(own.code, own.bits, own.n, own.k, m_bucket(sequences)), launch[0], launch[1], launch[2],
                max_ctas_per_sm=cap,
            )
            for own in layouts
        ]  # fmt: skip

    @contextmanager
    def applied(self) -> Iterator[None]:
        from requant_kernels.trellis import gemv, gemv_group  # need Triton

        from requant.inference import trellis_block, trellis_ends

        product, group, bands = gemv.product, gemv_group.gemv_group, gemv_group.multiply_bands

        def one(x: Any, layout: TrellisLayout, config: TrellisGemvConfig, **options: Any) -> Tensor:
            sequences = x.shape[0] if isinstance(x, Tensor) else x.num_tokens
            own = self.configs([layout], [config], sequences, product_of([layout], self.hidden))
            return product(x, layout, own[0], **options)

        def several(inputs: Any, layouts: Any, configs: Any) -> list[Tensor]:
            name = product_of(layouts, self.hidden)
            return group(inputs, layouts, self.configs(layouts, configs, inputs[0].num_tokens, name))

        def head(y: Any, layouts: Any, configs: Any, dtype: torch.dtype) -> Tensor:
            return bands(y, layouts, self.configs(layouts, configs, y.num_tokens, "head"), dtype)

        with (
            mock.patch.object(gemv, "product", one),
            mock.patch.object(gemv_group, "gemv_group", several),
            mock.patch.object(trellis_ends, "multiply_bands", head),
            mock.patch.object(trellis_block, "combines_parts", self.combines_parts),
        ):
            yield

    def combines_parts(self, layout: TrellisLayout) -> bool:
        """Whether o combines the parts of the attention, by the launch that it has here."""
        from requant_kernels.trellis import fused_hadamard

        chosen = self.of.get("o")
        return combines_parts(layout) and (chosen is None or chosen[0] == fused_hadamard.NUM_WARPS)


def captured(model: Any, prompts: Tensor) -> Decoder:
    """After a prompt and the steps that capture a graph. Raises RuntimeError if the step is not fused."""
    complaints: list[str] = []
    keep = logging.Handler(logging.WARNING)
    keep.emit = lambda record: complaints.append(record.getMessage())
    logging.getLogger("requant").addHandler(keep)
    try:
        decoder = Decoder(model, length=LENGTH)
        decoder.prefill(prompts)
        for _ in range(3):
            decoder.step()
        torch.cuda.synchronize()
    finally:
        logging.getLogger("requant").removeHandler(keep)
    if complaints:
        raise RuntimeError(complaints[0])
    return decoder


def step_times(decoders: Sequence[Decoder]) -> list[float]:
    """Microseconds a step of each: the least of ROUNDS, in which they take turns."""
    least = [float("inf")] * len(decoders)
    for _ in range(ROUNDS):
        for i, decoder in enumerate(decoders):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(STEPS):
                decoder.step()
            end.record()
            torch.cuda.synchronize()
            least[i] = min(least[i], 1000 * start.elapsed_time(end) / STEPS)
    return [round(own, 1) for own in least]


def main(
    out: opt.OutFile,
    shape: Annotated[str, typer.Option(help="As in `eval.end_to_end`.")] = "llama-3.1-8b",
    format: Annotated[str, typer.Option(help="CODE:BITS.")] = "mul1:3",
    sequences: Annotated[int, typer.Option(help="Of a step.", min=1, max=16)] = 8,
    product: Annotated[list[str] | None, typer.Option(help="Repeatable; all by default.")] = None,
    blocks: Annotated[int, typer.Option(help="Of the model.", min=1)] = 3,
) -> None:
    code, _, bits = format.partition(":")
    if shape not in end_to_end.SHAPES or code not in CODES or bits not in map(str, end_to_end.WIDTHS):
        raise typer.BadParameter(
            f"{shape} and {format} must be one of {', '.join(end_to_end.SHAPES)}, "
            f"and {', '.join(CODES)} with 2, 3 or 4 bits."
        )
    if unknown := set(product or ()) - set(PRODUCTS):
        raise typer.BadParameter(f"{', '.join(unknown)} is not a product; give {', '.join(PRODUCTS)}.")
    middle = {name: (own[1],) * 3 for name, own in end_to_end.WIDTHS[float(bits)].items()}
    with mock.patch.dict(end_to_end.WIDTHS, {float(bits): middle}):
        model = end_to_end.build(
            shape, code, float(bits), widths="best", tables="bands", num_hidden_layers=blocks
        )
    prompts = torch.randint(model.config.vocab_size, (sequences, PROMPT), device="cuda")
    rows: list[dict[str, Any]] = []
    for name in product or PRODUCTS:
        decoders, names, failed = [captured(model, prompts)], ["rule"], {}
        for launch in itertools.product(LAUNCHES, (False, True)):
            own: Launch = (*launch[0], launch[1])
            chosen = ChosenLaunches(
                hidden=model.config.hidden_size, sequences=sequences, device=prompts.device, of={name: own}
            )
            label = f"{own[0]} warps, {own[1]} tiles, {own[2]} k64" + ", spread" * own[3]
            try:
                with chosen.applied():
                    decoders.append(captured(model, prompts))
                names.append(label)
            except (
                RuntimeError,
                ValueError,
                TritonError,
            ) as error:  # a launch that the kernel refuses: its row says so
                failed[label] = str(error)[:200]
        times = dict(sorted(zip(names, step_times(decoders), strict=True), key=lambda pair: pair[1]))
        rows.append(
            {"shape": shape, "format": format, "sequences": sequences, "blocks": blocks, "product": name}
            | {"us_per_step": times, "failed": failed}
        )
        typer.echo(f"{name}: rule {times['rule']}, best {list(times.items())[:3]}")
        write_json(out, {"about": environment(torch.device("cuda")), "rows": rows})


if __name__ == "__main__":
    typer.run(main)
