"""The containers of a quantized matrix and everything that depends on which one it is: packed tensors, slicing, training."""
