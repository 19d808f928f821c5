"""Weights of coded matrices whose codes stay packed on the host, for models larger than the GPU (`models/hosted.py`).

    at rest     packed codes on the host, bits / 8 bytes a weight
    block(h)    its codes go to the GPU and are decoded to what they stand for before the scales; that stays until a matrix
                of another block is asked for

So a step of training block by block decodes every block twice, forward and backward, and the last one once. Copying the
codes is the least of it: at 2 bits a block of a 70B shape is 0.2 GB.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from requant.formats.quantized_weight import QuantizedWeight, pack, unpack, weight_function
from requant.models.targets import QuantTarget

WeightFunction = Callable[[Mapping[str, Tensor]], Float[Tensor, "n k"]]


class DecodedBlock:
    """The weight functions of the matrices of one block: the last one that was asked for."""

    def __init__(self) -> None:
        self.block: int | None = None
        self.functions: dict[str, WeightFunction] = {}

    def weight_function(self, target: QuantTarget, weight: QuantizedWeight) -> WeightFunction:
        """`weight_function` in the parameter's dtype, decoded whenever its block is not the last one asked for."""
        dtype = target.parameter.dtype  # training has float32 placeholders
        spec, stored = pack(weight.to(target.device))  # bits are packed faster on a GPU
        if target.device.type == "cuda":
            stored = {suffix: tensor.pin_memory() for suffix, tensor in stored.items()}

        @torch.no_grad()
        def decoded() -> WeightFunction:
            tensors = {
                suffix: tensor.to(target.device, non_blocking=True) for suffix, tensor in stored.items()
            }
            return weight_function(unpack(spec, tensors), dtype)

        def floats(params: Mapping[str, Tensor]) -> Float[Tensor, "n k"]:
            if self.block != target.block:
                self.functions.clear()
                self.block = target.block
            if target.name not in self.functions:
                self.functions[target.name] = decoded()
            return self.functions[target.name](params)

        return floats
