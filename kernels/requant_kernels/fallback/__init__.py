"""The layers without Triton: `torch_fallback.py` serves on any device, `reference.py` is what kernels are tested against."""
