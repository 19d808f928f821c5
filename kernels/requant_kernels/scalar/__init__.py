"""Linear layers of scalar-quantized weights: uniform grids and codebooks of 2 to 8 bits, with sparse residuals.

GEMV kernels for 1 to 16 tokens, GEMM kernels above, then the dequantized weight for cuBLAS; README.md says when each runs.
"""
