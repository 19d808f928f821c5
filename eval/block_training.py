"""Peers that train, as their papers describe it: every block is trained to reproduce the original block's output.

    qtip           codes one kind of matrix at a time within a block; after each, its matrices without codes are trained
    efficient_qat  every matrix on a uniform grid, trained together with it: weights, scales and zero points

    minimize   mean_t |block~(x_t) - block(x*_t)|^2

Tseng et al., "QTIP" (2024, arXiv 2406.11235), who take this from QuIP# (2402.04396): x and x* are both the original's
hidden states, so blocks do not depend on each other. Chen et al., "EfficientQAT" (2024, arXiv 2407.11062), Block-AP: x are
the outputs of the quantized blocks before, and rounding has a straight-through gradient,

    w~ = (clamp(round(w / s) + round(z), 0, 2^bits - 1) - round(z)) s          s, z: one per group of columns

What follows in both papers, end-to-end training of everything that is not a code, is requant's own last phase in every row
(`finetune/final.py`), with the same optimizer: Adam, with learning rates in units of each tensor's root mean square, halved
with every bit. So peers and mode `best` differ in what is trained and when, but not in text, steps or learning rates. This
is a re-implementation from the papers; the authors tune learning rates by model and train on 4 to 25 times as many tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from requant.calibration.hidden_states import StopForward
from requant.finetune.compile_blocks import fused
from requant.finetune.final import split_windows
from requant.finetune.loop import lr_schedule, single_precision, windows_of_step
from requant.finetune.reparametrized import reparametrized_weights
from requant.finetune.step import ReparametrizedWeight, TrainableTensor, TrainingStep
from requant.finetune.trainables import learning_rate, trainable_tensors
from requant.formats.contract import TrainableParams
from requant.formats.grid import Grid
from requant.formats.quantized_weight import QuantizedWeight, trainable_params, with_trainable_params
from requant.models.mixed_precision import mixed_precision
from requant.models.targets import QuantTarget, find_blocks
from requant.quantizers.registry import METHODS
from requant.quantizers.rtn import columns_of_group, fit_grid, zero_points_as_floats
from requant.run.context import RunContext, Weights
from requant.run.rounds import rounds_of
from requant.run.statistics import gather


@dataclass(frozen=True, kw_only=True)
class Block:
    """One transformer block, with the original's hidden states before and after it for every training window."""

    module: nn.Module
    options: Mapping[str, Any]  # what the model passes to the block besides the hidden states
    targets: Sequence[QuantTarget]
    inputs: Float[Tensor, "b t d"]
    outputs: Float[Tensor, "b t d"]

    def __call__(self, states: Float[Tensor, "c t d"]) -> Float[Tensor, "c t d"]:
        output = self.module(states, **self.options)
        return output if isinstance(output, Tensor) else output[0]


def qtip(run: RunContext) -> Weights:
    """Codes of every matrix, with training on the block's output between its kinds. The model keeps its original weights."""
    method, lr = METHODS[run.recipe.method], learning_rate(run, run.recipe.finetune)
    statistics = gather(run, run.targets, method.needs)
    weights: Weights = {}
    for block in blocks(run):
        trainable: dict[str, TrainableParams] = {}
        kinds = rounds_of(block.targets)
        for index, members in enumerate(kinds):
            with run.stage("quantize"):
                for target in members:
                    weights[target.name] = method.quantize(
                        target.weight(), statistics[target.name], run.config_of(target)
                    )
                    trainable[target.name] = trainable_params(weights[target.name])
            later = [target for following in kinds[index + 1 :] for target in following]
            if later:
                own = {
                    target.name: weights[target.name] for target in block.targets if target.name in weights
                }
                derived = reparametrized_weights(run, own, trainable)
                train(run, block, block.inputs, trainable_tensors(trainable, later, (), lr), derived)
        for target in block.targets:
            weights[target.name] = with_trainable_params(weights[target.name], trainable[target.name])
            target.set_weight(run.original[target.name].to(target.parameter.device))
    return weights


def efficient_qat(run: RunContext) -> Weights:
    """Grids trained together with their weights, block by block (Block-AP). The model keeps its original weights."""
    lr = learning_rate(run, run.recipe.finetune)
    weights: Weights = {}
    states: Tensor | None = None
    for block in blocks(run):
        states = block.inputs.clone() if states is None else states
        grids = {
            target.name: TrainedGrid.fitted(target.weight(), run.config_of(target))
            for target in block.targets
        }
        trainables = [TrainableTensor(tensor=t, lr=lr) for grid in grids.values() for t in grid.tensors]
        derived = [
            ReparametrizedWeight(
                parameter=target.parameter,
                value=lambda grid=grids[target.name], target=target: target.oriented(grid.weight()),
            )
            for target in block.targets
        ]
        train(run, block, states, trainables, derived)
        for target in block.targets:
            weights[target.name] = QuantizedWeight(dense=grids[target.name].rounded(), sparse=None)
            target.set_weight(weights[target.name].dequantize())
        advance(block, states, states, batch_of(run))
    run.apply_original_weights()
    return weights


@dataclass(frozen=True, kw_only=True)
class TrainedGrid:
    """A grid whose weights, scales and zero points are all trained, in float32."""

    latent: Float[Tensor, "n k"]
    scales: Float[Tensor, "n g"]
    zero_points: Float[Tensor, "n g"]
    bits: int
    group_size: int

    @classmethod
    def fitted(cls, weight: Float[Tensor, "n k"], config: Any) -> "TrainedGrid":
        """The min/max grid of every group, with zero points; `config` is that of `rtn`."""
        group_size = columns_of_group(config.group_size, weight.shape[1])
        fit = fit_grid(weight, bits=config.bits, group_size=group_size, symmetric=False)
        return cls(
            latent=weight,
            scales=fit.scales.float(),
            zero_points=zero_points_as_floats(fit, config.bits),
            bits=config.bits,
            group_size=group_size,
        )

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.latent, self.scales, self.zero_points

    def of_columns(self, values: Float[Tensor, "n g"]) -> Float[Tensor, "n k"]:
        """A group's value for each of its columns. The gradient is a plain sum over them; indexing would need a sort."""
        columns = self.latent.shape[1]
        spread = values.repeat_interleave(self.group_size, 1)
        return spread if spread.shape[1] == columns else spread[:, :columns]  # the last group may be smaller

    def codes(self, scales: Float[Tensor, "n k"]) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n k"]]:
        """The codes as floats, and the zero point of every weight."""
        zeros = self.of_columns(straight_through_round(self.zero_points).clamp(0, 2**self.bits - 1))
        steps = straight_through_round(self.latent / scales)
        return (steps + zeros).clamp(0, 2**self.bits - 1), zeros

    def weight(self) -> Float[Tensor, "n k"]:
        """The weights rounded to the grid, differentiable in all three tensors."""
        scales = self.of_columns(self.scales)
        codes, zeros = self.codes(scales)
        return (codes - zeros) * scales

    @torch.no_grad()
    def rounded(self) -> Grid:
        """The grid as stored: codes made for scales in 16 bits."""
        scales = self.scales.half()
        zero_points = self.zero_points.round().clamp(0, 2**self.bits - 1).to(torch.uint8)
        return Grid(
            codes=self.codes(self.of_columns(scales.float()))[0].to(torch.uint8),
            scales=scales,
            zero_points=zero_points,
            column_scales=None,
            bits=self.bits,
            group_size=self.group_size,
        )


def straight_through_round(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Round to nearest, with the gradient of the identity."""
    return x + (x.round() - x).detach()


def blocks(run: RunContext) -> Iterator[Block]:
    """Every block in order, in single precision; inputs and outputs are the original's, whatever the caller does to it.

    Training windows that do not fill a whole batch are left out. On a GPU, blocks are compiled as in `finetune/loop.py`.
    """
    windows, batch = split_windows(run, run.recipe.finetune)[0], batch_of(run)
    windows = windows[: len(windows) // batch * batch]
    run.apply_original_weights()
    inputs, options = first_states(run.model, windows, batch)
    outputs = torch.empty_like(inputs)
    with fused((run.model,), run.recipe.finetune.num_steps):
        for index, module in enumerate(find_blocks(run.model)[1]):
            targets = [target for target in run.targets if target.block == index]
            block = Block(
                module=module, options=options[index], targets=targets, inputs=inputs, outputs=outputs
            )
            advance(block, inputs, outputs, batch)
            with single_precision(module.parameters()):
                yield block
            inputs, outputs = outputs, inputs


def batch_of(run: RunContext) -> int:
    """The number of windows in a step."""
    settings = run.recipe.finetune
    count, length = split_windows(run, settings)[0].shape
    return len(windows_of_step(count, length, 0, settings, run.recipe.seed))


@torch.no_grad()
def first_states(
    model: PreTrainedModel, windows: Int64[Tensor, "b t"], batch: int
) -> tuple[Float[Tensor, "b t d"], list[Mapping[str, Any]]]:
    """The hidden states before the first block, and for every block what else the model passes to it with a batch."""
    states: list[Tensor] = []
    options: list[Mapping[str, Any]] = []

    def note(_module: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
        options.append(given)
        if len(options) == 1:
            states.append(arguments[0].float())

    def stop(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
        states.append(arguments[0].float())
        raise StopForward

    first, *_ = modules = find_blocks(model)[1]
    chunks = [chunk.to(model.device) for chunk in windows.split(batch)]
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    model(input_ids=chunks[0], use_cache=False)
    for handle in handles:
        handle.remove()
    handle = first.register_forward_pre_hook(stop)
    for chunk in chunks[1:]:
        with suppress(StopForward):
            model(input_ids=chunk, use_cache=False)
    handle.remove()
    return torch.cat(states), options


@torch.no_grad()
def advance(block: Block, states: Float[Tensor, "b t d"], into: Float[Tensor, "b t d"], batch: int) -> None:
    """Write the block's outputs for `states`, with its current weights, to `into`, which may be the same tensor."""
    for before, after in zip(states.split(batch), into.split(batch), strict=True):
        with mixed_precision(before):
            after.copy_(block(before))


def train(
    run: RunContext,
    block: Block,
    states: Float[Tensor, "b t d"],
    trainables: Sequence[TrainableTensor],
    derived: Sequence[ReparametrizedWeight],
) -> None:
    """Train for `finetune.steps` steps towards the block's original outputs, from these inputs."""
    settings = run.recipe.finetune
    if not settings.steps:
        return
    count, length = states.shape[:2]
    order = torch.stack(
        [windows_of_step(count, length, step, settings, run.recipe.seed) for step in range(settings.steps)]
    ).to(states.device)  # all at once: a copy in every step would make the host wait

    def loss(x: Tensor, wanted: Tensor) -> Tensor:
        with mixed_precision(x):
            return functional.mse_loss(block(x).float(), wanted)

    with run.stage("block training"):
        step = TrainingStep(loss, trainables, derived)
        for number, chosen in enumerate(order):
            step([(states[chosen], block.outputs[chosen])], lr_schedule(number, settings))
        step.close()
