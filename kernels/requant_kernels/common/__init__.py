"""What the kernels share: packed layouts, the bit layout, device functions, inline PTX, launches.

README.md follows a code from a quantizer's output to the tensor core.
"""
