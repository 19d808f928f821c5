"""How a quantized matrix is represented: one file per format, each with its container, packed spec, slicing, trainable
parameters and conversion for the kernels. `contract.py` says what a format is, `registry.py` lists them, and
`quantized_weight.py` works on any of them.
"""
