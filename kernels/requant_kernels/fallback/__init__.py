"""The layers without Triton: `torch_fallback.py` runs on any device, `reference.py` is the reference for testing kernels."""
