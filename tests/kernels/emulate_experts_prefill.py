"""Run by `test_interpreter.py` with TRITON_INTERPRET=1: experts of prompts beside the experts one by one, and int8 products.

The trellis GEMM of sm_90 runs with its PTX; TMA copies at once, and wgmma multiplies at once, so only what is loaded,
multiplied and stored is tested, not when.
"""

import dataclasses
import itertools
from functools import partial
from typing import Any
from unittest import mock

import gluon_as_triton
import numpy as np
import torch
import triton.language as tl
from case_selection import ALL, selected
from cases import random_trellis, relative_error, rotated
from emulated_assembly import ALLOCATED, allocate_poisoned, inline_asm_elementwise
from requant_kernels import TrellisLayout, pack_trellis
from requant_kernels.experts import gemm, prefill
from requant_kernels.experts import route as route_module
from requant_kernels.experts.prefill import experts_prefill
from requant_kernels.experts.route import most_groups, route
from requant_kernels.experts.stack import stack_experts
from requant_kernels.fallback import reference
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config
from requant_kernels.trellis import gemm_int8, gemm_sm90, rotate
from requant_kernels.trellis.gemm_sm90_launch import group_cta
from requant_kernels.trellis.operands import PARTIAL_SUM_SCALE, sums_scale
from triton.runtime.interpreter import TensorHandle

CASES = [  # code, widths, hidden, intermediate, experts, tokens, experts a token, biases, rows of a CTA, bytes of a pass
    ("mul1", (2, 2.25, 3), 320, 80, 5, 23, 2, True, 32, 90000),
    ("3inst", (2, 4), 64, 48, 5, 9, 3, False, 64, 1 << 30),
    ("pair", (2,), 128, 48, 3, 40, 2, False, 32, 1 << 30),
    ("mul1", (4,), 272, 256, 130, 12, 2, True, 32, 1 << 30),  # most experts have no tokens
]


class Shared:
    """A buffer of shared memory, or of some of its dimensions."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def index(self, i: Any) -> "Shared":
        return Shared(self.data[int(i)])

    def slice(self, start: Any, length: int, dim: int) -> "Shared":
        return Shared(np.take(self.data, range(int(start), int(start) + length), dim))

    def permute(self, order: Any) -> "Shared":
        return Shared(self.data.transpose(order))


@dataclasses.dataclass
class Descriptor:
    """Of a matrix, as TMA copies boxes of it."""

    matrix: torch.Tensor
    layout: Any = None

    @classmethod
    def from_tensor(cls, matrix: torch.Tensor, box: list[int], layout: Any) -> "Descriptor":
        size = matrix.element_size()
        assert box[1] * size % 16 == 0 and matrix.stride(0) * size % 16 == 0
        assert layout.element_bitwidth == 8 * size
        return cls(matrix)

    @property
    def dtype(self) -> Any:
        return {torch.float16: tl.float16, torch.int8: tl.int8}[self.matrix.dtype]


class Tma:
    @staticmethod
    def async_copy_global_to_shared(
        desc: Descriptor, at: Any, _barrier: Any, stage: Shared, pred: Any
    ) -> None:
        if not bool(pred):
            return
        token, column = (int(i) for i in at)
        own = desc.matrix.numpy()[token : token + stage.data.shape[0], column : column + stage.data.shape[1]]
        stage.data[:] = 0
        stage.data[: own.shape[0], : own.shape[1]] = own


class Mbarrier:
    MBarrierLayout = staticmethod(lambda: None)
    init = expect = wait = staticmethod(lambda *_, **__: None)


def warpgroup_mma(weight: Any, x: Shared, acc: Any, is_async: bool) -> Any:
    own = acc.handle.data.dtype  # float32 or int32
    assert weight.handle.data.dtype == x.data.dtype == (np.int8 if own == np.int32 else np.float16)
    y = weight.handle.data.astype(own) @ x.data.astype(own) + acc.handle.data
    return tl.tensor(TensorHandle(y.astype(own), acc.handle.dtype), acc.type)


def allocate_shared_memory(dtype: Any, shape: list[int], _layout: Any) -> Shared:
    sizes = [int(size) for size in shape]
    return Shared(np.full(sizes, 99, np.int8) if dtype == tl.int8 else np.full(sizes, np.nan, np.float16))


def emulate() -> None:
    language = gluon_as_triton.language
    language.allocate_shared_memory = allocate_shared_memory
    language.convert_layout = lambda x, _layout, assert_trivial: x
    for name in ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout"):
        setattr(language, name, lambda *_, **__: None)
    module: Any = gemm_sm90
    module.tma, module.mbarrier, module.warpgroup_mma = Tma, Mbarrier, warpgroup_mma
    module.TensorDescriptor = gemm.TensorDescriptor = Descriptor  # pyright: ignore[reportAttributeAccessIssue]
    module.sums_layout = module.fence_async_shared = lambda *_: None
    module.warpgroup_mma_init = lambda x: x
    module.warpgroup_mma_wait = lambda _count, deps: deps[0]
    constants, program = module._launch_constants, gemm._program
    module._launch_constants = lambda *given: interpreted(constants(*given))
    gemm._program = lambda *given: (program(*given)[0], interpreted(program(*given)[1]))
    gemm_int8.quantized = partial(quantized_alone, gemm_int8.quantized)
    module.hadamard_transform = rotate.hadamard_transform = prefill.hadamard_transform = transform
    tl.inline_asm_elementwise = inline_asm_elementwise
    torch.empty = allocate_poisoned


def interpreted(constants: dict[str, Any]) -> dict[str, Any]:
    """Without options of launches, and without programmatic dependent launch."""
    options = ("num_warps", "launch_pdl", "maxnreg")
    return {name: value for name, value in constants.items() if name not in options} | {"PDL": ""}


def transform(
    x: torch.Tensor, y: torch.Tensor, *, in_width: int, columns: int, out_width: int,
    input_scales: torch.Tensor | None = None, pair: bool = False, permute: bool = False, factor: float = 1.0, **_: Any,
) -> None:  # fmt: skip
    """`hadamard_transform` without its kernel, which `interpret.py` tests: a program for each block takes long."""
    scaled = x.double() * factor if input_scales is None else x.double() * input_scales.double()
    own = rotated(torch.nn.functional.pad(scaled, (0, columns - in_width)))
    if pair:
        even, odd = own[:, ::2], own[:, 1::2]
        own = torch.stack([even + odd, even - odd], -1).flatten(1)
    own = torch.nn.functional.pad(own, (0, out_width - columns))
    y.copy_(own.view(len(x), -1, 4, 8, 2).transpose(2, 3).reshape(len(x), -1) if permute else own)


def quantized_alone(quantized: Any, rotated: torch.Tensor, *, permuted: bool, pdl: bool) -> Any:
    return quantized(rotated, permuted=permuted, pdl=False)


def check_int8() -> None:
    """Products of several CTAs and of split-K partial sums, from activations in both orders; `pair` as half sums and not."""
    for code, bits, m, splits in (("mul1", 2.25, 70, 2), ("pair", 2, 66, 1), ("pair", 2, 1026, 1)):
        layout = pack_trellis(*random_trellis(48, 320, bits, "cpu"), bits=bits, code=code)
        ALLOCATED.append(layout.packed_codes)
        x = torch.randn(m, 320).half() if m < 100 else torch.randn(3, 320).half().repeat(m // 3, 1)
        config = GemmSm90Config(tokens_per_cta=128 if m < 100 else 256, num_warps=2, split_k=splits)
        sums = gemm_int8.product(x, layout, config)
        got = sums.float().sum(0) * sums_scale(sums)
        values = reference.trellis_values(layout)
        error = relative_error(got[:3, :48], rotated_by_reference(x[:3], layout) @ values.T)
        assert 3e-3 < error < 1.2e-2, f"{code} at {bits} bits, {m} tokens, is off by {error:.1e}"


def check_few_tokens() -> None:
    """Fewer than a CTA has, in split-K partial sums; `pair` as half sums."""
    for code, bits, m in (("mul1", 4, 9), ("pair", 2, 16)):
        layout = pack_trellis(*random_trellis(48, 640, bits, "cpu"), bits=bits, code=code)
        ALLOCATED.append(layout.packed_codes)
        x = torch.randn(m, 640).half()
        sums = gemm_sm90.product(x, layout, GemmSm90Config(tokens_per_cta=32, num_warps=2, split_k=2))
        assert sums.shape == (2, m, 48)
        got = sums.float().sum(0) * sums_scale(sums)
        wanted = rotated_by_reference(x, layout) @ reference.trellis_values(layout).T
        error = relative_error(got, wanted)
        assert error < 1e-3, f"{code} at {bits} bits, {m} tokens, is off by {error:.1e}"


def rotated_by_reference(x: torch.Tensor, layout: TrellisLayout) -> torch.Tensor:
    assert layout.input_scales is not None
    return rotated(x.double() * layout.input_scales.double())


def check_routes() -> None:
    """Every slot is a row of its expert, and every row is in one group."""
    for m, s, experts, per_group, ctas in (
        (300, 4, 5, 32, 128), (1, 2, 9, 64, 128), (700, 1, 1, 256, 128), (40, 8, 128, 32, 128), (90, 8, 128, 32, 2),
    ):  # fmt: skip
        chosen = (torch.rand(m, experts) * torch.rand(experts)).argsort(1)[:, :s]
        stack: Any = type("Stack", (), {"experts": experts})
        with mock.patch.object(route_module, "MOST_CTAS", ctas):
            found = route(chosen, stack, per_group=per_group)
        rows, slots = found.rows.long(), chosen.flatten()
        assert torch.equal(rows.sort().values, torch.arange(m * s))
        assert torch.equal(found.experts[rows].long(), slots)
        assert torch.equal(found.tokens[rows].long(), torch.arange(m * s) // s)
        seen = torch.zeros(m * s, dtype=torch.int64)
        assert len(found.groups) == most_groups(m * s, experts, per_group)
        for expert, first, end in found.groups.tolist():
            assert expert >= 0 or end <= first
            if expert >= 0:
                assert 0 < end - first <= per_group
                assert (found.experts[first:end] == expert).all()
                seen[first:end] += 1
        assert (seen == 1).all()


def check_ends() -> None:
    """A group writes its own rows alone, of both parts, by its own expert's matrices."""
    ALLOCATED.clear()
    experts, rows = 3, 70
    signs = (torch.randint(0, 2, (64,)) * 2 - 1).half()
    matrices = [
        pack_trellis(random_trellis(32, 64, 2, "cpu")[0], signs, torch.ones(32).half(), bits=2, code="mul1")
        for _ in range(2 * experts)
    ]
    stack = stack_experts(matrices, parts=2)
    layout = stack.layout
    ALLOCATED.append(layout.packed_codes)
    rotated = gemm_sm90.rotated_activations(torch.randn(rows, 64).half(), layout).values
    config = dataclasses.replace(group_cta(32), num_warps=2)
    out = torch.full((2, rows, 32), torch.inf)
    groups = torch.tensor([[2, 17, 40], [-1, 0, 0]], dtype=torch.int32)
    gemm.experts_gemm(rotated, stack, out, groups, config)
    at = torch.arange(64)
    ordered = rotated[:, (at & ~63) | (at >> 1 & 7) << 3 | (at >> 4 & 3) << 1 | (at & 1)].double()
    for part in (0, 1):
        wanted = ordered[17:40] @ reference.trellis_values(matrices[part * experts + 2]).T
        assert relative_error(PARTIAL_SUM_SCALE * out[part, 17:40], wanted) < 1e-3
        assert out[part, :17].isinf().all() and out[part, 40:].isinf().all()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    emulate()
    check_routes()
    check_ends()
    check_int8()
    check_few_tokens()
    for code, widths, h, f, experts, m, s, biased, tokens, max_bytes in selected(CASES):
        ALLOCATED.clear()
        signs = {k: (torch.randint(0, 2, (k,)) * 2 - 1).half() for k in (h, f)}

        def matrix(n: int, k: int, index: int) -> TrellisLayout:
            bits = widths[index % len(widths)]  # noqa: B023
            codes, _, scales = random_trellis(n, k, bits, "cpu")
            return pack_trellis(codes, signs[k], scales, bits=bits, code=code)  # noqa: B023

        gates_and_ups, downs = (
            [matrix(f, h, i // 2) for i in range(2 * experts)],
            [matrix(h, f, i) for i in range(experts)],
        )
        biases = [[torch.randn(n).half() for _ in own] for n, own in ((f, gates_and_ups), (h, downs))]
        gate_up = stack_experts(gates_and_ups, parts=2, biases=biases[0] if biased else None)
        down = stack_experts(downs, parts=1, biases=biases[1] if biased else None)
        x = torch.randn(m, h).half()
        chosen = torch.stack([1 + torch.randperm(experts - 1)[:s] for _ in range(m)])  # none takes expert 0
        weights = torch.rand(m, s)
        for stack in (gate_up, down):
            ALLOCATED.extend(layout.packed_codes for layout in stack.by_bits.values())

        def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return gate.clamp(max=1) * torch.sigmoid(1.7 * gate) * (up + 1)

        def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(gate) * up

        for act in (silu, gated) if ALL else (gated if biased else silu,):
            wanted = torch.zeros(m, h, dtype=torch.float64)
            for t, j in itertools.product(range(m), range(s)):
                e = int(chosen[t, j])
                gate, up = (
                    reference.linear(
                        x[t : t + 1], gates_and_ups[i], biases[0][i] if biased else None
                    ).double()
                    for i in (e, experts + e)
                )
                y = reference.linear(act(gate, up).half(), downs[e], biases[1][e] if biased else None)
                wanted[t] += weights[t, j].double() * y[0].double()
            with mock.patch.object(prefill, "MAX_BYTES", max_bytes):
                got = experts_prefill(
                    x, gate_up, down, chosen, weights, gated=None if act is silu else gated,
                    tokens_per_cta=tokens, asm=False,
                )  # fmt: skip
            error = relative_error(got, wanted)
            assert error < 3e-3, f"experts of {code} {widths} are off by {error:.1e}"


if __name__ == "__main__":
    main()
