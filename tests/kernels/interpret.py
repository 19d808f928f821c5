"""Run under TRITON_INTERPRET=1 by `test_interpreter.py`: every kernel, without assembly, against its twin."""

from typing import Any

import torch
from cases import Case, random_csr, random_layout, random_trellis, relative_error
from requant_kernels import naive, pack_trellis
from requant_kernels.attention import attend
from requant_kernels.decode import decode
from requant_kernels.dense import dequantize
from requant_kernels.hadamard import rotate
from requant_kernels.rows import lookup
from requant_kernels.tall import tall
from requant_kernels.trellis import expand, trellis_linear
from requant_kernels.tuning import DecodeConfig, TallConfig
from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _with_index(tensor: Any, scope: Any) -> None:
    """A run-time bound of `range`: Triton 3.6 converts it in a way that numpy 2.4 refuses."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _with_index

CASES = [
    (Case(kind="codebook", bits=3, n=37, k=300, m=1), DecodeConfig(warps=2)),
    (Case(kind="grid", bits=2, n=37, k=600, m=3, density=0.02), DecodeConfig(warps=2, tiles=2)),
    (Case(kind="grid", bits=3, n=20, k=1100, m=1, zero_points=True, bias=True), DecodeConfig(warps=2, unroll=2)),
    (
        Case(kind="grid", bits=5, n=33, k=700, m=9, group_size=700, zero_points=True, density=0.01, int8_residuals=True),
        DecodeConfig(warps=2),
    ),
    (Case(kind="grid", bits=8, n=16, k=301, m=1, group_size=64, column_scales=True), DecodeConfig(warps=2)),
    (Case(kind="codebook", bits=6, n=16, k=300, m=2, density=0.1), DecodeConfig(warps=2, slots=2)),
    (Case(kind="grid", bits=4, n=16, k=900, m=2, group_size=512, zero_points=True), DecodeConfig(warps=2)),
    (Case(kind="grid", bits=4, n=140, k=600, m=17, group_size=600, zero_points=True, density=0.02, bias=True), None),
    (Case(kind="codebook", bits=2, n=40, k=300, m=20, column_scales=True), None),
    (Case(kind="grid", bits=3, n=20, k=300, m=18, group_size=32, zero_points=True, bias=True), None),
    (Case(kind="grid", bits=2, n=20, k=300, m=18, group_size=64), None),
]  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    q, k, v = (torch.randn(2, h, n, 24).half() for h, n in ((6, 1), (2, 150), (2, 150)))
    for mask in (None, torch.arange(150).expand(2, -1) < torch.tensor([[70], [1]])):
        want = torch.ops.requant.attend(q, k, v, mask, 0.2).double()
        error = relative_error(attend(q, k, v, mask, 0.2), want)
        assert error < 2e-3, f"attention is off by {error:.1e}"
    for width in (2048, 6144):
        x, before = torch.randn(2, width).half(), torch.rand(width).half()
        y = torch.empty_like(x)
        sums = rotate(x, y, width=width, out_width=width, pdl=False, before=before)
        error = relative_error(y, (x.double() * before.double()) @ naive.hadamard(width))
        assert error < 1e-3, f"the rotation of {width} is off by {error:.1e}"
        assert torch.allclose(sums.sum(1), y.float().sum(1), atol=1e-2)
    for case, config in CASES:
        layout = random_layout(case, "cpu")
        x = torch.randn(case.m, case.k).half()
        bias = torch.randn(case.n).half() if case.bias else None
        if config is None:
            y = tall(x, layout, bias, asm=False, config=TallConfig(warps=4, split=2))
        else:
            y = decode(x, layout, bias, config, asm=False)
        error = relative_error(y, naive.linear(x, layout, bias))
        assert error < 3e-3, f"{case}: linear is off by {error:.1e}"
        error = relative_error(dequantize(layout, torch.float16, asm=False), naive.weight(layout))
        assert error < 2e-3, f"{case}: dequantize is off by {error:.1e}"
    grid = random_layout(
        Case(kind="grid", bits=5, n=37, k=300, m=1, group_size=64, zero_points=True, column_scales=True),
        "cpu",
    )
    tokens = torch.tensor([0, 36, 8, 17])
    error = relative_error(lookup(tokens, grid, torch.float16), naive.weight(grid)[tokens])
    assert error < 2e-3, f"rows are off by {error:.1e}"
    for code, bits, n, k, m, density in (
        ("mul1", 2, 30, 200, 1, 0.02),
        ("pair", 2, 16, 96, 3, 0.0),
        ("3inst", 3, 16, 64, 17, 0.05),
    ):
        sparse = random_csr(n, k, density, m > 1, "cpu") if density else None
        layout = pack_trellis(*random_trellis(n, k, bits, "cpu"), bits=bits, code=code, sparse=sparse)
        x, bias = torch.randn(m, k).half(), torch.randn(n).half()
        want = naive.linear(x, layout, bias)
        error = relative_error(trellis_linear(x, layout, bias, asm=False), want)
        assert error < 3e-3, f"trellis {code} at {bits} bits is off by {error:.1e}"
        assert torch.equal(expand(layout, asm=False).double(), naive.trellis_values(layout))


if __name__ == "__main__":
    main()
