"""Linear layers whose weights are trellis codes (QTIP, arXiv 2406.11235) in a rotated basis.

`codes.py` defines the codes, `layout.py` their format in memory; `gemv.py` is for 1 to 16 tokens, `gemm_sm90.py` for 17 to
1024 on Hopper, `dequantize.py` for cuBLAS beyond; README.md has the diagrams.
"""
