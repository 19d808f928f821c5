"""The search for trellis codes: the Viterbi algorithm over the 2^16 states of the bitshift trellis (QTIP, arXiv 2406.11235).

`gpu.py` is a Triton kernel, `cpu.py` loops compiled by numba; `requant/quantizers/viterbi.py` chooses between them.
"""
