"""Hadamard transforms of activations and outputs: y = output_scales * H (input_scales * x), in power-of-two blocks.

`transform.py` is the entry point. `tile_kernel.py` and `batched.py` run on tensor cores, for few and for many tokens, with
the PTX of `tile_ptx.py`; `butterfly.py` is plain Triton for the rest.
"""
