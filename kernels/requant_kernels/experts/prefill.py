"""The experts of prompts: one launch for all products of a kind, without the host learning where tokens go.

    rotate x                     one rotation serves all experts
    route                        sort tokens by expert, and copy x (`route.py`)
    multiply gates and ups       `gemm.py`
    rotate, scale, gate, rotate  `step/dense_gate.py`; launches of their own for other gates, and widths it does not take
    multiply downs               `gemm.py`
    rotate, scale, add           `dense_combine.py`; two launches for widths it does not take

A product is a trellis GEMM over groups of tokens of one expert, whatever the experts' bit widths. It decodes weights while
it multiplies, so there is no dequantized copy of the experts: for the gates and ups of a layer of Qwen3-30B-A3B that would
be 805 MB, to be written and read again. Torch's `grouped_mm`, which would multiply such a copy, is not used: it supports
only bfloat16, while this multiplies float16 for models of either type; and chunks of experts, which would bound the copy,
start at rows that the host does not know.

Every launch has a fixed grid, and their number does not depend on where tokens go, so a prompt's graph can contain them.
Only the number of passes depends on tokens: MAX_BYTES of activations limit the tokens per pass.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from requant_kernels.common.device import supports_pdl, supports_sm90
from requant_kernels.experts import dense_combine
from requant_kernels.experts.route import Route, gathered, route
from requant_kernels.experts.scale import combine, gate, gate_and_rotate, gate_and_up
from requant_kernels.experts.stack import ExpertStack
from requant_kernels.hadamard.transform import hadamard_transform
from requant_kernels.step import dense_gate
from requant_kernels.trellis.gemm_sm90_launch import group_cta, group_tokens
from requant_kernels.trellis.layout import TILE
from requant_kernels.trellis.operands import PARTIAL_SUM_SCALE

MAX_BYTES = 1 << 30  # of activations that a pass holds at once; for Qwen3-30B-A3B those of 9 k tokens


def supports(device: torch.device) -> bool:
    """Hopper, with Gluon."""
    return supports_sm90(device)


def experts_prefill(
    x: Tensor, gate_up: ExpertStack, down: ExpertStack, experts: Tensor, weights: Tensor, *,
    gated: Callable[[Tensor, Tensor], Tensor] | None = None, into: Tensor | None = None,
    tokens_per_cta: int | None = None, asm: bool = True,
) -> Tensor:  # fmt: skip
    """y [m, n] of x [m, k], contiguous, with the experts int [m, s] of each token, and their weights [m, s]; in the type of
    x, or added to `into`, contiguous, of that type, which is then returned.

    `gated`: h [rows, f] of gates and ups [rows, f]; None: silu(gate) * up. `tokens_per_cta`: one of GROUP_TOKENS
    (`trellis/gemm_sm90_launch.py`), instead of the rule's. `asm` False: outputs are rotated without PTX.
    """
    slots = MAX_BYTES // bytes_of_row(gate_up, down, x.dtype)
    tokens, weights = max(1, slots // experts.shape[1]), weights.contiguous()
    adds, y = into is not None, into
    if y is None:
        y = torch.empty(len(x), down.n, dtype=x.dtype, device=x.device)
    parts = zip(x.split(tokens), experts.split(tokens), weights.split(tokens), y.split(tokens), strict=True)
    for part in parts:
        _pass(*part, gate_up, down, gated, tokens_per_cta, adds=adds, asm=asm)
    return y


def bytes_of_row(gate_up: ExpertStack, down: ExpertStack, dtype: torch.dtype) -> int:
    """The most per row, while gates and ups or downs are multiplied and rotated: a row of float16, products, outputs."""
    output = outputs_in(dtype).itemsize
    return max(
        2 * gate_up.k + gate_up.parts * gate_up.n * (2 + output),
        2 * down.k + down.parts * down.n * (2 + output),
    )


def outputs_in(dtype: torch.dtype) -> torch.dtype:
    """The type of outputs before their scales are applied, for a type of activations: they may exceed float16."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _pass(
    x: Tensor, experts: Tensor, weights: Tensor, y: Tensor, gate_up: ExpertStack, down: ExpertStack,
    gated: Callable[[Tensor, Tensor], Tensor] | None, tokens_per_cta: int | None, *, adds: bool, asm: bool,
) -> None:  # fmt: skip
    """Write y, or add to it."""
    from requant_kernels.trellis.gemm_sm90 import activation_form, rotated_activations  # Gluon, of Triton 3.6

    pdl, slots = supports_pdl(x.device), experts.numel()
    if tokens_per_cta is None:
        tokens_per_cta = group_tokens(slots, gate_up.experts)
    where = route(experts, gate_up, per_group=tokens_per_cta)
    rotated = gathered(rotated_activations(x, gate_up.layout, tokens_per_cta).values, where.tokens, pdl=pdl)
    z = _product(rotated, gate_up, where, tokens_per_cta)
    form = activation_form(down.layout, tokens_per_cta)
    if gated is None and dense_gate.supports(*gate_and_up(z, gate_up), form):
        rotated = gate_and_rotate(z, gate_up, down, where.experts, x.dtype, form).values
    else:
        z = _rotated_back(z, gate_up, x.dtype, asm=asm)
        h = gate(z, gate_up, where.experts, x.dtype, silu=gated is None, pdl=pdl)
        if gated is not None:
            h = gated(h[0], h[1]).contiguous()
        rotated = rotated_activations(h, down.layout, tokens_per_cta).values
    z = _product(rotated, down, where, tokens_per_cta)
    if dense_combine.supports(z, down, y):
        dense_combine.dense_combine(z, down, where.experts, weights, y, rows=where.rows, adds=adds)
        return
    z = _rotated_back(z, down, x.dtype, asm=asm)
    combine(z, down, where.experts, weights, y, rows=where.rows, adds=adds, pdl=pdl)


def _product(rotated: Tensor, stack: ExpertStack, where: Route, tokens_per_cta: int) -> Tensor:
    """V H (input_scales * x), not rotated back, float16 [parts, rows of the route, n] over PARTIAL_SUM_SCALE
    (`trellis/operands.py`), of rotated activations [rows, columns]."""
    from requant_kernels.experts.gemm import experts_gemm

    columns = -(-stack.n // TILE) * TILE
    z = torch.empty(stack.parts, len(rotated), columns, dtype=torch.float16, device=rotated.device)
    experts_gemm(rotated, stack, z, where.groups, group_cta(tokens_per_cta))
    return z


def _rotated_back(z: Tensor, stack: ExpertStack, dtype: torch.dtype, *, asm: bool) -> Tensor:
    """H z, not scaled yet, [parts * rows, n], in the type given by `outputs_in` for `dtype`."""
    z = z.flatten(0, 1)
    y = torch.empty(len(z), stack.n, dtype=outputs_in(dtype), device=z.device)
    hadamard_transform(
        z, y, in_width=z.shape[1], columns=z.shape[1], out_width=stack.n, factor=PARTIAL_SUM_SCALE, asm=asm,
        pdl=supports_pdl(z.device),
    )  # fmt: skip
    return y
