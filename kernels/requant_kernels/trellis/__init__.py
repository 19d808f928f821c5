"""Linear layers whose weights are trellis codes (QTIP, arXiv 2406.11235) in a rotated basis.

`codes.py` defines the codes, `layout.py` their memory layout. `gemv.py` serves 1 to 16 tokens, `gemm_sm90.py` 9 to 1024 on
Hopper, `dequantize.py` more, with cuBLAS. README.md has the diagrams.
"""
