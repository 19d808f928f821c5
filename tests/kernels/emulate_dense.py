"""Run under TRITON_INTERPRET=1 by `test_dense.py`, the assembly emulated: what is between the products of many tokens,
beside whole matrices."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import emulated_assembly
import torch
from cases import rotated
from requant_kernels.experts import dense_combine
from requant_kernels.hadamard import warp
from requant_kernels.step import dense_gate, dense_rope
from requant_kernels.step.rotated_gate import rotated_gate
from requant_kernels.step.rotated_rope import rotated_rope
from requant_kernels.trellis.operands import PARTIAL_SUM_SCALE, ActivationForm, Product
from torch import Tensor
from torch.nn.functional import silu


def close(got: Tensor, wanted: Tensor) -> bool:
    return ((got.double() - wanted).norm() / wanted.norm()).item() < 1e-3


def check_rotation(m: int, k: int) -> None:
    whole, signs = torch.randn(m, k + 16).half(), torch.randn(k).sign().half()
    x, y = whole[:, 16:], torch.full((m + 1, k), 7.0).half()
    warp.rotate(x, signs, y[:m])
    assert close(y[:m], rotated(x.double() * signs.double())), f"rotation of {k}"
    assert (y[m] == 7).all(), "behind the last token"


def check_gate(m: int, k: int) -> None:
    """Products side by side, one with a bias; by cuBLAS, and sums with a scale."""
    whole, form = torch.randn(m, 2 * k).half(), ActivationForm(columns=k)
    scales, bias = [(torch.randn(k).sign() * 0.5).half() for _ in range(2)], torch.randn(k).half()
    gate = Product(values=whole[:, :k], output_scales=scales[0], bias=None)
    up = Product(values=whole[:, k:], output_scales=scales[1], bias=bias)
    signs = torch.randn(k).sign().half()
    g, u = (rotated(product.values) * product.output_scales.double() for product in (gate, up))
    sums = Product(values=(whole[None, :, :k] / PARTIAL_SUM_SCALE), output_scales=scales[0], bias=None)
    for own in (gate, sums):
        assert dense_gate.supports(own, up, form)
        got = rotated_gate(own, up, "silu", torch.float16, input_scales=signs, form=form)
        assert close(got.values, rotated(silu(g) * (u + bias.double()) * signs.double())), f"gate of {k}"


def check_gate_of_experts(m: int, k: int, *, pair: bool, biased: bool) -> None:
    """Rows of several experts, each with its own scales, in the order of the GEMM of up to 1024 tokens, and as `pair`."""
    form, count = ActivationForm(columns=k, permute=True, pair=pair), 3
    values = (torch.randn(2, m, k) / PARTIAL_SUM_SCALE).half()
    experts = torch.randint(0, count, (m,), dtype=torch.int16)
    scales, biases = (torch.rand(2, count, k) + 0.5).half(), torch.randn(2, count, k).half()
    gate, up = (
        Product(values=values[i : i + 1], output_scales=scales[i], bias=biases[i] if biased else None)
        for i in range(2)
    )
    signs, own = torch.randn(k).sign().half(), experts.long()
    with mock.patch.object(dense_gate, "MIN_TOKENS", 1):
        assert dense_gate.supports(gate, up, form)
        got = rotated_gate(
            gate, up, "silu", torch.float16, input_scales=signs, form=form, experts=experts
        ).values
    g, u = (
        PARTIAL_SUM_SCALE * rotated(values[i]) * scales[i, own].double() + biased * biases[i, own].double()
        for i in range(2)
    )
    h = rotated(silu(g) * u * signs.double())
    if pair:
        h = torch.stack([h[:, ::2] + h[:, 1::2], h[:, ::2] - h[:, 1::2]], -1).flatten(1)
    wanted = h.view(m, -1, 4, 8, 2).transpose(2, 3).reshape(m, k)
    assert close(got, wanted), f"gate of experts of {k}"


def check_combine(m: int, n: int, per_token: int, dtype: torch.dtype, *, biased: bool, adds: bool) -> None:
    """Rows in another order than slots."""
    slots, count, rows = m * per_token, 4, torch.randperm(m * per_token).int()
    z, scales = (torch.randn(slots, n) / PARTIAL_SUM_SCALE).half(), (torch.rand(count, n) + 0.5).half()
    biases = torch.randn(count, n).half() if biased else None
    weights, experts = torch.rand(m, per_token).to(dtype), torch.randint(0, count, (slots,)).short()
    stack: Any = SimpleNamespace(n=n, output_scales=scales, biases=biases)
    whole = torch.randn(m + 1, n).to(dtype)
    x, got = whole[:m].double(), whole[:m]
    assert dense_combine.supports(z, stack, got)
    dense_combine.dense_combine(z, stack, experts, weights, got, rows=rows, adds=adds)
    y = PARTIAL_SUM_SCALE * rotated(z) * scales[experts.long()].double()
    if biases is not None:
        y += biases[experts.long()].double()
    wanted = (weights.double()[..., None] * y[rows.long()].view(m, per_token, n)).sum(1) + adds * x
    error = ((got.double() - wanted).norm() / wanted.norm()).item()
    assert error < (1e-3 if dtype == torch.float16 else 4e-3), f"sum of experts of {n}: {error:.1e}"


def check_rope(
    texts: int, tokens: int, heads: int, key_heads: int, head_dim: int, *, norms: bool, splits: tuple[int, ...] = (1, 1, 1)
) -> None:  # fmt: skip
    """Into a cache whose last rows the texts do not reach, from a row that is not the first. `splits`: of each product."""
    m, length, position = texts * tokens, tokens + 5, 3
    widths = [count * head_dim for count in (heads, key_heads, key_heads)]
    values = [torch.randn(m, width).half() for width in widths]
    scales = [(torch.randn(width).sign() * 0.5).half() for width in widths]
    biases = [torch.randn(widths[0]).half(), None, torch.randn(widths[2]).half()]
    weights = [torch.rand(head_dim).half() if norms else None for _ in range(2)]
    angles = torch.rand(m, head_dim) * 6
    cos, sin = angles.cos().half(), angles.sin().half()
    cache = [torch.full((texts, key_heads, length, head_dim), 7.0).half() for _ in range(2)]
    parts = []
    for i, count in enumerate(splits):
        shares = torch.rand(count, 1, 1) if count > 1 else torch.ones(1, 1, 1)
        sums = (values[i].float() * shares / shares.sum() / PARTIAL_SUM_SCALE).half()
        own = values[i] if count == 1 else sums
        parts.append(Product(values=own, output_scales=scales[i], bias=biases[i]))
    with mock.patch.object(dense_rope, "MIN_TOKENS", 1):
        assert dense_rope.supports(parts, weights, cache[0], cos)
        queries = rotated_rope(
            *parts, cos, sin, torch.tensor([position]), *cache, q_norm=weights[0], k_norm=weights[1], eps=1e-5
        )  # fmt: skip
    wanted = []
    for i, product in enumerate(parts):
        sums = product.values.double()
        sums = sums if sums.dim() == 2 else PARTIAL_SUM_SCALE * sums.sum(0)
        y = rotated(sums) * product.output_scales.double()
        y = (y if product.bias is None else y + product.bias.double()).view(m, -1, head_dim)
        if i < 2:
            weight = weights[i]
            if weight is not None:
                y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
            turned = torch.cat([-y[..., head_dim // 2 :], y[..., : head_dim // 2]], -1)
            y = y * cos.double()[:, None] + turned * sin.double()[:, None]
        wanted.append(y)
    assert close(queries, wanted[0]), f"queries of {head_dim}"
    for got, own in zip(cache, wanted[1:], strict=True):
        own = own.view(texts, tokens, key_heads, head_dim).transpose(1, 2)
        assert close(got[:, :, position : position + tokens], own), f"cache of {head_dim}"
        rest = torch.cat([got[:, :, :position], got[:, :, position + tokens :]], 2)
        assert (rest == 7).all(), "other rows of the cache"


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    emulated_assembly.emulate_in_models()
    check_rotation(5, 1536)  # three blocks of 512
    check_rotation(2, 4096)
    check_rotation(6, 768)  # three of 256
    check_gate(5, 1536)
    check_gate(3, 2048)
    check_gate(5, 768)
    check_gate(2, 512)
    check_gate_of_experts(6, 768, pair=True, biased=False)
    check_gate_of_experts(3, 1536, pair=False, biased=True)
    check_gate_of_experts(2, 2048, pair=True, biased=True)
    check_combine(5, 768, 3, torch.bfloat16, biased=False, adds=True)
    check_combine(3, 2048, 2, torch.float16, biased=True, adds=False)
    check_rope(2, 5, 16, 8, 64, norms=False)
    check_rope(1, 3, 24, 8, 128, norms=True)  # three blocks of q
    check_rope(1, 2, 4, 2, 256, norms=True)
    check_rope(1, 3, 16, 4, 128, norms=False, splits=(2, 8, 1))


if __name__ == "__main__":
    main()
