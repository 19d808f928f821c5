"""The gate of an MLP in one launch: y = act(gate) * up, act SiLU or the tanh form of GELU, rounded before the product."""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportAttributeAccessIssue=none

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from requant_kernels.common.device import supports_pdl
from requant_kernels.common.launch import launch
from requant_kernels.common.pdl import pdl_option, wait_for_previous_launch

BLOCK = 1024
ACTIVATIONS = ("silu", "gelu_tanh")


@triton.jit
def logit_of(x, ACTIVATION: tl.constexpr):
    """The activation of x is x times the sigmoid of this."""
    if ACTIVATION == "silu":
        z = x
    else:  # (1 + tanh(z / 2)) / 2 is the sigmoid of z
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return z


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """The activation of a gate, rounded to its type, as float32."""
    x = gate.to(tl.float32)
    z = logit_of(x, ACTIVATION)
    return (x / (1.0 + tl.exp(-z))).to(gate.dtype).to(tl.float32)


@triton.jit
def gated_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    n,
    gate_row,
    up_row,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK values of one token."""
    token, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous_launch(PDL, True)
    gate = tl.load(gate_ptr + token * gate_row + at, mask=at < n, other=0.0)
    up = tl.load(up_ptr + token * up_row + at, mask=at < n, other=0.0)
    y = (activated(gate, ACTIVATION) * up.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token * n + at, y, mask=at < n)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`activation`, one of ACTIVATIONS, of gate [m, n] times up [m, n], each row contiguous."""
    m, n = gate.shape
    y = torch.empty(m, n, dtype=gate.dtype, device=gate.device)
    launch(
        gated_kernel,
        (triton.cdiv(n, BLOCK), m, 1),
        (gate, up, y, n, gate.stride(0), up.stride(0)),
        _constants(activation, supports_pdl(gate.device)),
    )
    return y


@cache
def _constants(activation: str, pdl: bool) -> dict[str, object]:
    return {"ACTIVATION": activation, "BLOCK": BLOCK, "PDL": pdl, "num_warps": 4, **pdl_option(pdl)}
