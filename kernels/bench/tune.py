"""Measure launch shapes of the decode kernel and print the rows of `requant_kernels.tuning.MEASURED` that win.

python kernels/bench/tune.py 8192x8192 4096x14336
"""

import sys

import torch
from requant_kernels.decode import decode
from requant_kernels.tuning import DecodeConfig
from run import clone, random_layout  # pyright: ignore[reportMissingImports]
from timing import cold_time, copies_needed  # pyright: ignore[reportMissingImports]

SHAPES = [
    (4, 1, 1),
    (4, 2, 1),
    (8, 1, 1),
    (8, 1, 2),
    (4, 1, 2),
    (16, 1, 1),
    (2, 1, 2),
]  # warps, tiles, unroll


def main() -> None:
    for text in sys.argv[1:]:
        n, k = map(int, text.split("x"))
        for kind in ("grid", "codebook"):
            for bits in (2, 3, 4):
                layout = random_layout(kind, bits, n, k, 0.0)
                copies = [layout] + [clone(layout) for _ in range(copies_needed(n * k * bits // 8) - 1)]
                x = torch.randn(1, k, device="cuda", dtype=torch.float16)
                times = {}
                for shape in SHAPES:
                    warps, tiles, unroll = shape
                    if warps * unroll * 256 > k:
                        continue
                    config = DecodeConfig(
                        warps=warps, tiles=tiles, unroll=unroll, pdl=True, max_registers=128
                    )
                    calls = [lambda c=c, f=config, x=x: decode(x, c, None, f, asm=True) for c in copies]
                    times[shape] = cold_time(calls, replays=5).median
                best = min(times, key=times.__getitem__)
                print(f'("{kind}", {bits}, {n}, {k}): {best},  # {times[best]:.2f} us', flush=True)


if __name__ == "__main__":
    main()
