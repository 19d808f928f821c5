"""Run under TRITON_INTERPRET=1 by `test_interpreter.py`: every kernel, without assembly, against its twin."""

import torch
from cases import Case, random_layout, random_trellis, relative_error
from requant_kernels import naive, pack_trellis
from requant_kernels.decode import decode
from requant_kernels.dense import dequantize
from requant_kernels.tall import tall
from requant_kernels.trellis import expand, trellis_linear
from requant_kernels.tuning import DecodeConfig

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
]  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for case, config in CASES:
        layout = random_layout(case, "cpu")
        x = torch.randn(case.m, case.k).half()
        bias = torch.randn(case.n).half() if case.bias else None
        if config is None:
            y = tall(x, layout, bias, asm=False, split=2)
        else:
            y = decode(x, layout, bias, config, asm=False)
        error = relative_error(y, naive.linear(x, layout, bias))
        assert error < 3e-3, f"{case}: linear is off by {error:.1e}"
        error = relative_error(dequantize(layout, torch.float16, asm=False), naive.weight(layout))
        assert error < 2e-3, f"{case}: dequantize is off by {error:.1e}"
    for code, bits, n, k, m in (("mul1", 2, 30, 200, 1), ("pair", 2, 16, 96, 3), ("3inst", 3, 16, 64, 17)):
        layout = pack_trellis(*random_trellis(n, k, bits, "cpu"), bits=bits, code=code)
        x, bias = torch.randn(m, k).half(), torch.randn(n).half()
        want = x.double() @ naive.trellis_weight(layout).T + bias.double()
        error = relative_error(trellis_linear(x, layout, bias, asm=False), want)
        assert error < 3e-3, f"trellis {code} at {bits} bits is off by {error:.1e}"
        assert torch.equal(expand(layout, asm=False).double(), naive.trellis_values(layout))


if __name__ == "__main__":
    main()
