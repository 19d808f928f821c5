"""The experts of prompts: one launch for all products of a kind, without the host learning where tokens go.

    rotate x                     one rotation serves all experts
    route                        sort tokens, and x, by expert (`route.py`)
    multiply gates and ups       one launch per bit width, rotate, scale and gate
    multiply downs               rotate h, multiply, rotate
    scale and add                the rows of each token

A product is the trellis GEMM of sm_90 (`trellis/gemm_sm90.py`) over groups of tokens of one expert. It decodes weights while
it multiplies, so there is no dequantized copy of the experts: for the gates and ups of a layer of Qwen3-30B-A3B that would
be 805 MB, to be written and read again. Torch's `grouped_mm`, which would multiply such a copy, is not used: it supports
only bfloat16, while this multiplies float16 for models of either type; and chunks of experts, which would bound the copy,
start at rows that the host does not know.

Every launch has a fixed grid, and the number of launches depends only on the bit widths of the codes, so a prompt's graph
can contain them. Only the number of passes depends on tokens: MAX_BYTES of activations limit the tokens per pass.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from requant_kernels.common.device import supports_pdl, supports_sm90
from requant_kernels.experts.route import Route, gathered, route
from requant_kernels.experts.scale import combine, gate
from requant_kernels.experts.stack import ExpertStack
from requant_kernels.hadamard.transform import hadamard_transform
from requant_kernels.trellis.gemm_sm90_launch import group_cta, trellis_groups
from requant_kernels.trellis.layout import TILE

MAX_BYTES = 1 << 30  # of activations that a pass holds at once; for Qwen3-30B-A3B those of 9 k tokens


def supports(device: torch.device) -> bool:
    """Hopper, with Gluon."""
    return supports_sm90(device)


def experts_prefill(
    x: Tensor, gate_up: ExpertStack, down: ExpertStack, experts: Tensor, weights: Tensor, *,
    gated: Callable[[Tensor, Tensor], Tensor] | None = None, tokens_per_cta: int | None = None,
    asm: bool = True,
) -> Tensor:  # fmt: skip
    """y [m, n] of x [m, k], contiguous, with the experts int64 [m, s] of each token, and their weights [m, s].

    `gated`: h [rows, f] of gates and ups [rows, f]; None: silu(gate) * up. `tokens_per_cta`: one of GROUP_TOKENS
    (`trellis/gemm_sm90_launch.py`), instead of the rule's. `asm` False: outputs are rotated without PTX.
    """
    slots = MAX_BYTES // bytes_of_row(gate_up, down, x.dtype)
    tokens, weights = max(1, slots // experts.shape[1]), weights.contiguous()
    parts = [
        _pass(own, gate_up, down, chosen, weighted, gated, tokens_per_cta, asm)
        for own, chosen, weighted in zip(
            x.split(tokens), experts.split(tokens), weights.split(tokens), strict=True
        )
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def bytes_of_row(gate_up: ExpertStack, down: ExpertStack, dtype: torch.dtype) -> int:
    """The most per row, while gates and ups or downs are multiplied and rotated: a row of float16, products, outputs."""
    output = outputs_in(dtype).itemsize
    return max(
        2 * gate_up.k + gate_up.parts * gate_up.n * (2 + output),
        2 * down.k + down.parts * down.n * (4 + output),
    )


def outputs_in(dtype: torch.dtype) -> torch.dtype:
    """The type of outputs before their scales are applied, for a type of activations: they may exceed float16."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _pass(
    x: Tensor, gate_up: ExpertStack, down: ExpertStack, experts: Tensor, weights: Tensor,
    gated: Callable[[Tensor, Tensor], Tensor] | None, tokens_per_cta: int | None, asm: bool,
) -> Tensor:  # fmt: skip
    from requant_kernels.trellis.gemm_sm90 import rotated_activations  # Gluon, of Triton 3.6

    pdl, slots = supports_pdl(x.device), experts.numel()
    if tokens_per_cta is None:
        tokens_per_cta = trellis_groups(gate_up.layout.bits, slots, gate_up.experts).tokens_per_cta
    where = route(experts, gate_up, per_group=tokens_per_cta)
    rotated = gathered(rotated_activations(x, gate_up.layout, tokens_per_cta).values, where.tokens, pdl=pdl)
    # gates and ups read the output of a norm: float16 holds their sums
    z = product(rotated, gate_up, where, tokens_per_cta, product_type=torch.float16, dtype=x.dtype, asm=asm)
    h = gate(z, gate_up, where.experts, x.dtype, silu=gated is None, pdl=pdl)
    del z, rotated
    if gated is not None:
        h = gated(h[0], h[1]).contiguous()
    rotated = rotated_activations(h, down.layout, tokens_per_cta).values
    z = product(rotated, down, where, tokens_per_cta, product_type=torch.float32, dtype=x.dtype, asm=asm)
    return combine(z, down, where.experts, weights, x.dtype, rows=where.rows, pdl=pdl)


def product(
    rotated: Tensor, stack: ExpertStack, where: Route, tokens_per_cta: int, *, product_type: torch.dtype,
    dtype: torch.dtype, asm: bool,
) -> Tensor:  # fmt: skip
    """V H (input_scales * x), rotated back and not yet scaled, [parts * rows, n] of rotated activations [rows, columns], in
    the type given by `outputs_in` for `dtype`."""
    from requant_kernels.trellis.gemm_sm90 import group_product

    slots, rows = len(rotated), -(-stack.n // TILE) * TILE
    z = torch.empty(stack.parts, slots, rows, dtype=product_type, device=rotated.device)
    for layout, matrices in stack.by_bits.values():
        config = group_cta(layout.bits, tokens_per_cta)
        group_product(rotated, layout, z, where.groups, matrices, config)
    total = stack.parts * slots
    y = torch.empty(total, stack.n, dtype=outputs_in(dtype), device=z.device)
    hadamard_transform(
        z.view(total, rows), y, in_width=rows, columns=rows, out_width=stack.n, asm=asm,
        pdl=supports_pdl(z.device),
    )  # fmt: skip
    return y
