"""Run under TRITON_INTERPRET=1 by `test_interpreter.py`: the trellis kernels, with `emulated_assembly.py`."""

import itertools
import math

import interpreter_fixes  # noqa: F401
import torch
import triton.language as tl
from case_selection import selected
from cases import multiplied_values, random_csr, random_trellis, relative_error, rotated
from emulated_assembly import ALLOCATED, allocate_poisoned, inline_asm_elementwise
from requant_kernels import TrellisLayout, pack_trellis
from requant_kernels.experts.stack import stack_experts
from requant_kernels.experts.step import experts_step, input_form
from requant_kernels.fallback import reference
from requant_kernels.trellis import gemv, gemv_kernel
from requant_kernels.trellis.dequantize import dequantize
from requant_kernels.trellis.gemv import activation_form, can_fuse, launch_gemv, rotate_activations
from requant_kernels.trellis.gemv_group import gemv_group, group_constants
from requant_kernels.trellis.gemv_kernel import gemv_constants
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig
from requant_kernels.trellis.operands import RotatedActivations, SplitAttention


def check_fused() -> None:
    """One token, rotated in the GEMV's own launch, by every CTA."""
    for code, n, k, launch in (
        ("pair", 48, 4096, (16, 2, 1)),  # tiles run out
        ("mul1", 16, 2048, (16, 1, 2)),
        ("mul1", 64, 1280, (16, 4, 1)),  # blocks of 256
        ("pair", 16, 256, (16, 1, 1)),
        ("mul1", 130, 512, (16, 7, 1)),  # seven tiles, then two and the last one five times
    ):
        ALLOCATED.clear()
        layout = pack_trellis(*random_trellis(n, k, 2, "cpu"), bits=2, code=code)
        config = TrellisGemvConfig(num_warps=launch[0], tiles_per_cta=launch[1], units_per_step=launch[2])
        x = torch.randn(1, k, dtype=torch.bfloat16 if n == 48 else torch.float16)
        ALLOCATED.extend((layout.packed_codes, layout.input_scales, x))
        assert can_fuse(x, layout, config)
        got = launch_gemv(x, layout, config)
        want = rotated(x.double() * layout.input_scales) @ reference.trellis_values(layout).T
        error = relative_error(got, want)
        assert error < 8e-4, f"{code} of {k} columns, fused, is off by {error:.1e}"


def check_split() -> None:
    """Attention in parts, combined by every CTA; one part has no positions."""
    for code, k, parts, d in (("mul1", 4096, 3, 128), ("pair", 768, 5, 64)):
        ALLOCATED.clear()
        layout = pack_trellis(*random_trellis(32, k, 3, "cpu"), bits=3, code=code)
        config = TrellisGemvConfig(num_warps=16, tiles_per_cta=2, units_per_step=1)
        assert gemv.rotates_itself(layout, config)
        values, logarithms = torch.randn(k // d, parts, d).to(torch.bfloat16), 3 * torch.randn(k // d, parts)
        values[:, -1], logarithms[:, -1] = 0, float("-inf")
        ALLOCATED.extend((layout.packed_codes, layout.input_scales, values, logarithms))
        got = launch_gemv(SplitAttention(values=values, logarithms=logarithms), layout, config)
        weights = torch.softmax(logarithms.double() * math.log(2), 1)
        x = (values.double() * weights[:, :, None]).sum(1).view(1, k)
        want = rotated(x * layout.input_scales) @ reference.trellis_values(layout).T
        error = relative_error(got, want)
        assert error < 8e-4, f"{code} of {k} columns in {parts} parts is off by {error:.1e}"


def check_unrotated() -> None:
    """Matrices that lack one rotation or both: the product is finished where it is computed."""
    for code, bits, n, k, m, rotates, launch in (
        ("mul1", 2, 50, 304, 1, (False, False), (2, 2, 2)),
        ("pair", 2, 32, 4224, 5, (False, False), (4, 2, 1)),
        ("3inst", 3, 20, 256, 3, (False, False), (2, 1, 1)),
        ("mul1", 4, 30, 300, 2, (True, False), (2, 1, 2)),
        ("mul1", 2, 33, 2048, 1, (True, False), (16, 1, 2)),  # rotated by every CTA
    ):
        ALLOCATED.clear()
        codes, input_scales, output_scales = random_trellis(n, k, bits, "cpu")
        layout = pack_trellis(
            codes, input_scales if rotates[0] else None, output_scales, bits=bits, code=code,
            rotates_output=rotates[1], sparse=random_csr(n, k, 0.02, False, "cpu") if m > 1 else None,
        )  # fmt: skip
        config = TrellisGemvConfig(num_warps=launch[0], tiles_per_cta=launch[1], units_per_step=launch[2])
        gemv_kernel.MAX_SUM_BYTES = 32768 if bits == 2 else 0
        x, bias = torch.randn(m, k).half(), torch.randn(n).half() if m != 5 else None
        ALLOCATED.extend(
            tensor for tensor in (layout.packed_codes, layout.input_scales, x) if tensor is not None
        )
        assert can_fuse(x, layout, config) == (k == 2048)
        got = gemv.gemv(x, layout, bias, config)
        assert got.dtype == x.dtype and got.shape == (m, n)
        error = relative_error(got, reference.linear(x, layout, bias))
        assert error < 6e-4, f"{code} of {k} columns, rotating {rotates}, is off by {error:.1e}"


def activations_of(x: torch.Tensor, layout: TrellisLayout) -> RotatedActivations:
    """x as the product reads it; float16 is not rotated here."""
    form = activation_form(layout, x.shape[0])
    if form.int8:
        return rotate_activations(x, layout, form, asm=False)
    padding = (0, form.columns - layout.k)
    return RotatedActivations(values=torch.nn.functional.pad(x, padding), scales=None)


GROUPS = [  # columns, tokens, warps, and of each matrix: code, bits, rows, row tiles of a CTA, units a step
    (1024, 1, 2, (("mul1", 1.75, 48, 2, 1), ("mul1", 2, 16, 2, 2), ("mul1", 2.75, 80, 2, 1))),
    (320, 9, 2, (("mul1", 2, 32, 1, 2), ("pair", 2, 48, 2, 1), ("3inst", 3, 16, 1, 1))),
    (4352, 2, 4, (("pair", 2.25, 32, 2, 1), ("mul1", 4, 48, 1, 1))),  # two Hadamard tiles
]


def check_groups() -> None:
    """Matrices of several widths and codes in one launch: bit for bit what a launch of each gives."""
    for k, m, num_warps, parts in selected(GROUPS, one_of=3):
        ALLOCATED.clear()
        layouts, configs, inputs = [], [], []
        x = torch.randn(m, k).half()
        for code, bits, n, tiles, units in parts:
            layouts.append(pack_trellis(*random_trellis(n, k, bits, "cpu"), bits=bits, code=code))
            configs.append(TrellisGemvConfig(num_warps=num_warps, tiles_per_cta=tiles, units_per_step=units))
            inputs.append(activations_of(x, layouts[-1]))
            ALLOCATED.extend((layouts[-1].packed_codes, inputs[-1].values))
        gemv_kernel.MAX_SUM_BYTES = 32768 if m != 2 else 0  # Triton's own sum too
        gemv_constants.cache_clear()
        group_constants.cache_clear()
        together = gemv_group(inputs, layouts, configs)
        for own, layout, config, got in zip(inputs, layouts, configs, together, strict=True):
            assert torch.equal(got, gemv.product(own, layout, config)), (
                f"{layout.code} {layout.bits} of {k} columns"
            )


EXPERTS = [
    ("mul1", (2,), 256, 48, 4, 1, 2, False),
    ("mul1", (2, 2.25, 3), 272, 32, 5, 3, 2, True),
    ("pair", (2, 1), 512, 256, 3, 2, 3, False),
    ("3inst", (2, 5), 64, 40, 3, 2, 1, False),  # gate and ups are finished by launches of their own
    ("pair", (2, 1.25), 64, 32, 3, 17, 2, False),  # many slots: two warps
]


def check_experts() -> None:
    """A step of a mixture beside its experts one by one: shapes, widths of codes, rotations fused or not, biases, gates; and
    of a rotated token, added to what is there."""
    for code, widths, h, f, experts, m, s, biased in selected(EXPERTS, one_of=4):
        ALLOCATED.clear()
        signs = {k: (torch.randint(0, 2, (k,)) * 2 - 1).half() for k in (h, f)}

        def matrix(n: int, k: int, index: int) -> TrellisLayout:
            codes, _, scales = random_trellis(n, k, widths[index % len(widths)], "cpu")  # noqa: B023
            return pack_trellis(codes, signs[k], scales, bits=widths[index % len(widths)], code=code)  # noqa: B023

        gates_and_ups, downs = (
            [matrix(f, h, i // 2) for i in range(2 * experts)],
            [matrix(h, f, i) for i in range(experts)],
        )
        biases = [torch.randn(f).half() for _ in gates_and_ups] if biased else None
        first = stack_experts(
            gates_and_ups, parts=2, biases=biases, widths=(1.5, *widths)
        )  # of another layer
        second = stack_experts(
            downs, parts=1, biases=[torch.randn(h).half() for _ in downs] if biased else None
        )
        x, chosen = torch.randn(m, h).half(), torch.stack([torch.randperm(experts)[:s] for _ in range(m)])
        weights = torch.rand(m, s)
        for stack in (first, second):
            ALLOCATED.extend(layout.packed_codes for layout in stack.by_bits.values())
        ALLOCATED.extend((x, *signs.values()))

        def silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            ALLOCATED.append(torch.nn.functional.silu(gate) * up)
            return ALLOCATED[-1]

        wanted = torch.zeros(m, h, dtype=torch.float64)
        for t, j in itertools.product(range(m), range(s)):
            e = int(chosen[t, j])
            parts = [
                reference.linear(x[t : t + 1], gates_and_ups[p * experts + e], None).double() for p in (0, 1)
            ]
            bias = (
                (0, 0, 0)
                if biases is None
                else (first.biases[e], first.biases[experts + e], second.biases[e])
            )
            hidden = silu_times(parts[0] + bias[0], parts[1] + bias[1])
            wanted[t] += weights[t, j] * (
                reference.linear(hidden.half(), downs[e], None)[0].double() + bias[2]
            )
        given = rotate_activations(x, first.layout, input_form(first), asm=False)
        ALLOCATED.extend((given.values, wanted, weights, chosen))
        for gated, rotated_x in ((None, True), (silu_times, False)):
            into = torch.randn(m, h).half() if rotated_x else None
            start = 0 if into is None else into.double()
            got = experts_step(
                given if rotated_x else x, first, second, chosen, weights, gated=gated, into=into, asm=False
            )
            error = relative_error(got - start, wanted)
            assert into is None or got is into
            assert error < 2e-3, f"experts of {code} {widths} are off by {error:.1e}"


CASES = [
    ("mul1", 2, 50, 300, 1, (2, 2, 2)),  # an odd number of tiles, a last step that is not full
    ("pair", 2, 32, 512, 5, (4, 2, 1)),
    ("mul1", 2.25, 32, 1200, 1, (2, 2, 1)),
    ("pair", 2.25, 32, 1200, 1, (2, 2, 1)),
    ("mul1", 3.5, 16, 512, 9, (2, 1, 2)),
    ("pair", 2.5, 16, 512, 3, (2, 1, 1)),
    ("mul1", 4, 16, 4352, 2, (4, 1, 4)),  # two Hadamard tiles
    ("mul1", 7.75, 16, 256, 1, (2, 1, 1)),
    ("pair", 1, 16, 128, 4, (2, 1, 1)),
    ("3inst", 2.5, 32, 300, 3, (2, 2, 1)),
    ("3inst", 6, 16, 256, 11, (2, 1, 1)),
    ("3inst", 2, 32, 128, 2, (2, 2, 1)),
    # most warps, or units of a warp, have no columns at all: what they load meets zeros
    ("mul1", 2, 20, 200, 1, (16, 1, 2)),
    ("mul1", 2.25, 16, 200, 5, (16, 1, 1)),  # a single unit
    ("mul1", 8, 16, 200, 16, (16, 1, 1)),
    ("pair", 2, 16, 256, 5, (8, 2, 2)),
    ("3inst", 3.25, 16, 200, 9, (8, 1, 1)),
    ("pair", 2, 130, 4200, 1, (16, 7, 1)),
    ("pair", 2, 16, 4200, 1, (8, 1, 4)),  # two units in the second Hadamard tile, the last one not full
]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tl.inline_asm_elementwise = inline_asm_elementwise
    torch.empty = allocate_poisoned
    for code, bits, n, k, m, launch in selected(CASES, one_of=3):
        ALLOCATED.clear()
        layout = pack_trellis(*random_trellis(n, k, bits, "cpu"), bits=bits, code=code)
        config = TrellisGemvConfig(num_warps=launch[0], tiles_per_cta=launch[1], units_per_step=launch[2])
        ALLOCATED.append(layout.packed_codes)
        values = reference.trellis_values(layout)
        assert torch.equal(dequantize(layout, asm=True).double(), values), f"{code} {bits}: dequantize"
        x, padded = torch.randn(m, k).half(), -(-k // 16) * 16
        gemv_kernel.MAX_SUM_BYTES = 32768 if bits != 2 or code == "pair" else 0  # Triton's own sum too
        given = activations_of(x, layout)
        ALLOCATED.append(given.values)
        got = launch_gemv(given, layout, config)
        high_bytes = m > 4 and given.scales is not None
        if given.scales is None:
            multiplied = given.values[:, :padded].double()
        elif high_bytes:
            multiplied = multiplied_values(given, code, high_bytes=True)[:, :padded]
        else:
            scaled = torch.nn.functional.pad(x.double() * layout.input_scales, (0, padded - k))
            multiplied = rotated(scaled)
            assert relative_error(multiplied_values(given, code)[:, :padded], multiplied) < 1e-4
        want = multiplied @ values.T
        error = relative_error(got, want)
        assert error < (1e-6 if high_bytes else 1e-4), f"{code} at {bits} bits is off by {error:.1e}"

    check_groups()
    gemv_kernel.MAX_SUM_BYTES = 32768
    check_fused()
    check_split()
    check_unrotated()
    check_experts()


if __name__ == "__main__":
    main()
