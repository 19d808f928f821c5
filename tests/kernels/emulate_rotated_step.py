"""Run under TRITON_INTERPRET=1 by `test_rotated_step.py`: the kernels between trellis matrices, with their assembly, beside
what they replace, in float64."""

import torch
import triton.language as tl
from case_selection import selected
from cases import rotated
from emulated_assembly import ALLOCATED, allocate_poisoned, inline_asm_elementwise
from requant_kernels.step.rotated_gate import rotated_gate
from requant_kernels.step.rotated_norm import rotated_norm
from requant_kernels.step.rotated_rope import rotated_rope, rotated_rope_apart
from requant_kernels.trellis.operands import (
    PARTIAL_SUM_SCALE,
    ActivationForm,
    Product,
    RotatedActivations,
    sums_scale,
)
from torch import Tensor

HALF = 2e-3  # a few roundings to float16


def random_product(
    m: int, n: int, *, splits: int = 1, biased: bool = False, beside: int = 0
) -> tuple[Product, Tensor]:
    """A product, rows of other matrices beside it, and the layer's output. No splits: float16 with its scale, as
    `trellis/gemm_sm90.py` gives it."""
    values = torch.randn(max(1, splits), m, n + beside)[..., beside:]
    values = values if splits else (values / PARTIAL_SUM_SCALE).half()
    scales, bias = torch.randn(n).half(), torch.randn(n).half() if biased else None
    ALLOCATED.extend((values, scales))
    y = rotated(values.float().sum(0) * sums_scale(values)) * scales.double()
    y = y if bias is None else y + bias.double()
    return Product(values=values[0] if splits == 1 else values, output_scales=scales, bias=bias), y


def check_activations(found: RotatedActivations, form: ActivationForm, wanted: Tensor, what: str) -> None:
    """Against float64 activations before their rotation."""
    m, k = wanted.shape
    wanted = rotated(wanted)
    if form.pair:
        wanted = torch.stack(
            [wanted[:, ::2] + wanted[:, 1::2], wanted[:, ::2] - wanted[:, 1::2]], -1
        ).flatten(1)
    if found.scales is not None:
        high, low = found.values.view(m, 2, -1).long().unbind(1)
        q = 256 * high + low
        for values, at in ((q, 1), (high, 3)):
            sums = torch.nn.functional.pad(values, (0, -q.shape[1] % 4096)).view(m, -1, 4096).sum(2)
            assert torch.equal(sums.float(), found.scales[..., at]), f"{what}: sums"
        assert torch.equal(found.scales[..., 2], 256 * found.scales[..., 0]), f"{what}: scales"
        got = (q.view(m, -1, 4096) * found.scales[:, :, :1].double()).flatten(1)
    else:
        got = found.values.double()
        if form.permute:
            at = torch.arange(got.shape[1])
            got = got[:, (at & ~63) | (at >> 1 & 7) << 3 | (at >> 4 & 3) << 1 | (at & 1)]
    assert not got[:, k:].any(), f"{what}: padding"
    error = ((got[:, :k] - wanted).norm() / wanted.norm()).item()
    assert error < HALF, f"{what} is off by {error:.1e}"


def form_of(kind: str, width: int) -> ActivationForm:
    if kind in ("int8", "pair"):
        return ActivationForm(columns=-(-width // 4096) * 4096, int8=True, pair=kind == "pair")
    unit = 4096 if kind == "wide" else 64
    return ActivationForm(
        columns=-(-width // unit) * unit, pair=kind == "sums", permute=kind in ("permuted", "sums")
    )


NORMS = [  # width, tokens, form, split-K sums, a bias, the first of a model
    (4096, 1, "int8", 1, False, False),
    (5120, 1, "permuted", 2, False, False),  # two tiles, the second one not full
    (768, 2, "pair", 1, True, False),
    (2048, 1, "int8", 1, False, True),
    (8192, 1, "int8", 1, False, False),  # a block of two tiles
    (5120, 1, "wide", 1, False, False),  # with zeros to the end of a tile
    (512, 1, "plain", 1, False, False),
    (176, 1, "permuted", 3, False, False),
    (768, 1, "permuted", 0, True, False),
    (512, 2, "sums", 2, False, False),
]


def check_norms() -> None:
    for width, m, kind, splits, biased, first in selected(NORMS):
        ALLOCATED.clear()
        what = f"norm of {width}, {kind}"
        product, delta = random_product(m, width, splits=splits, biased=biased)
        x, weight = torch.randn(m, width).half(), (1 + 0.3 * torch.randn(width)).half()
        signs = torch.randn(width).sign().half()
        total = x.double() if first else (x.double() + delta.half().double()).half().double()
        wanted = total * (total.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight
        given = None if first else product
        if kind == "plain":
            got = rotated_norm(x, given, weight, 1e-5)
            assert isinstance(got, Tensor)
            assert ((got - wanted).norm() / wanted.norm()).item() < HALF, what
        else:
            form = form_of(kind, width)
            plain = torch.empty_like(x) if first or biased else None
            got = rotated_norm(x, given, weight, 1e-5, input_scales=signs, form=form, plain=plain)
            assert isinstance(got, RotatedActivations)
            check_activations(got, form, wanted * signs.double(), what)
            assert plain is None or ((plain - wanted).norm() / wanted.norm()).item() < HALF, what
        assert ((x - total).norm() / total.norm()).item() < HALF, f"{what}: the stream"


GATES = [  # width, tokens, form, split-K sums, activation
    (6144, 1, "int8", 1, "silu"),  # blocks of 2048, the second tile not full
    (48, 1, "float16", 1, "silu"),
    (1408, 2, "permuted", 2, "gelu_tanh"),
    (6144, 1, "wide", 1, "silu"),
    (8192, 1, "int8", 1, "silu"),
    (768, 2, "sums", 0, "silu"),
]


def check_gates() -> None:
    for width, m, kind, splits, activation in selected(GATES):
        ALLOCATED.clear()
        (gate, g), (up, u) = (
            random_product(m, width, splits=splits, biased=b, beside=16 * b) for b in (False, True)
        )
        signs, form = torch.randn(width).sign().half(), form_of(kind, width)
        act = torch.nn.functional.silu(g.half().double())
        if activation != "silu":
            act = torch.nn.functional.gelu(g.half().double(), approximate="tanh")
        got = rotated_gate(gate, up, activation, torch.float16, input_scales=signs, form=form)
        check_activations(got, form, act * u.half().double() * signs.double(), f"gate of {width}, {kind}")


ROPES = [  # size and number of heads, tokens, split-K sums, norms
    (64, 12, 2, 2, 2, True),  # blocks of 256 and 128
    (128, 32, 8, 1, 1, False),
    (128, 40, 2, 1, 1, True),  # two tiles of q
    (16, 4, 2, 1, 1, False),
    (256, 2, 1, 1, 1, True),
]


def check_ropes() -> None:
    for head_dim, q_heads, k_heads, m, splits, normed in selected(ROPES):
        ALLOCATED.clear()
        what = f"{q_heads} heads of {head_dim}"
        parts = [
            random_product(m, heads * head_dim, splits=splits, beside=16)
            for heads in (q_heads, k_heads, k_heads)
        ]
        angle = torch.rand(1, head_dim // 2).repeat(1, 2) * 6
        cos, sin = (part.half().expand(m, -1) for part in (angle.cos(), angle.sin()))
        norms = [(1 + 0.3 * torch.randn(head_dim)).half() for _ in range(2)] if normed else [None, None]
        keys, values = (torch.zeros(m, k_heads, 5, head_dim).half() for _ in range(2))

        def turned(x: Tensor, norm: Tensor | None) -> Tensor:
            x = x.half().double().unflatten(1, (-1, head_dim))  # noqa: B023
            if norm is not None:
                x = x * (x.square().mean(2, keepdim=True) + 1e-5).rsqrt() * norm
            low, high = x.chunk(2, 2)
            return x * cos[:1].double() + torch.cat([-high, low], 2) * sin[:1].double()  # noqa: B023

        for position in (3, 5):  # the second one is behind the end
            y = rotated_rope(
                *(part for part, _ in parts), cos, sin, torch.tensor(position), keys, values, q_norm=norms[0],
                k_norm=norms[1], eps=1e-5,
            )  # fmt: skip
            wanted = turned(parts[0][1], norms[0])
            assert ((y - wanted).norm() / wanted.norm()).item() < HALF, f"{what}: queries"
            for held, wanted in (
                (keys, turned(parts[1][1], norms[1])), (values, parts[2][1].unflatten(1, (-1, head_dim)))
            ):  # fmt: skip
                assert ((held[:, :, 3] - wanted).norm() / wanted.norm()).item() < HALF, f"{what}: cache"
                assert not held[:, :, [0, 1, 2, 4]].any(), f"{what}: other rows of the cache"

        table = torch.randn(7, head_dim).half()
        table[3] = torch.cat([part[0, : head_dim // 2] for part in (cos, sin)])
        found = rotated_rope_apart(
            *(part for part, _ in parts), table, torch.full((m,), 3), torch.float16, q_norm=norms[0], k_norm=norms[1],
            eps=1e-5,
        )  # fmt: skip
        wanted = turned(parts[0][1], norms[0]), turned(parts[1][1], norms[1]), parts[2][1]
        for name, got, want in zip("qkv", found, wanted, strict=True):
            assert ((got - want.flatten(1)).norm() / want.norm()).item() < HALF, f"{what}: {name} apart"


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tl.inline_asm_elementwise = inline_asm_elementwise
    torch.empty = allocate_poisoned
    check_norms()
    check_gates()
    check_ropes()


if __name__ == "__main__":
    main()
