"""Linear layers whose weights are trellis codes (QTIP, arXiv 2406.11235) in a rotated basis.

`layout.py` is the format in memory, `gemv.py` the kernel for 1 to 16 tokens, `gemm_sm90.py` that for 17 to 1024 on Hopper,
`dequantize.py` the way to cuBLAS beyond, `rotate.py` what they share; README.md draws all of it.
"""
