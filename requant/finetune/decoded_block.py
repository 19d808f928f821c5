"""Weights of coded matrices whose codes stay packed on the host, for models larger than the GPU (`models/hosted.py`).

    at rest     packed codes on the host, bits / 8 bytes per weight; with several ranks each has those that it decodes
    block(h)    the codes go to the GPU and are decoded to what they stand for before the scales, which every rank sends to
                the others; that stays until a matrix of another block is asked for

So a step of training block by block decodes every block twice, forward and backward, and the last one once. Copying the
codes is cheap: at 2 bits a block of a 70B shape is 0.2 GB. With N ranks each decodes about an Nth of a block's weights, in
whole matrices, because sending a decoded matrix over NVLink takes a thirtieth of the time of decoding trellis codes, and
over PCIe still less than decoding. What is sent is received where it stays, and decoding is exact: each rank has the bytes
that it would have decoded itself.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from requant import ranks
from requant.formats.quantized_weight import QuantizedWeight, decode, pack, unpack, weight_of
from requant.models.targets import QuantTarget, by_block

Decoded = dict[str, Tensor]  # of one matrix (`formats/contract.py`)


class DecodedBlock:
    """The matrices of one block: the last one that was asked for. All ranks ask for the same blocks, in the same order."""

    def __init__(self, targets: Sequence[QuantTarget], weights: Mapping[str, QuantizedWeight]) -> None:
        self.block: int | None = None
        self.decoded: dict[str, Decoded] = {}
        self.packed: dict[int, dict[str, _Packed]] = {}
        for members in by_block(targets):
            decoding = decoding_ranks(members, ranks.world_size())
            self.packed[members[0].block] = {
                target.name: _Packed(target, weights[target.name], decoding[target.name])
                for target in members
            }

    def weight_function(
        self, target: QuantTarget, weight: QuantizedWeight
    ) -> Callable[[Mapping[str, Tensor]], Float[Tensor, "n k"]]:
        """`weight_function` in the dtype that the parameter has now."""

        def floats(params: Mapping[str, Tensor]) -> Float[Tensor, "n k"]:
            self.load(target.block)
            return weight_of(weight, self.decoded[target.name], params)

        return floats

    def load(self, block: int) -> None:
        """Decode a block in the place of another."""
        if self.block == block:
            return
        self.block = None
        self.decoded.clear()
        packed = self.packed[block]
        # all of this rank's before the first is sent: to wait for those of another is to decode after it
        self.decoded |= {name: each.decoded() for name, each in packed.items() if each.rank == ranks.rank()}
        if ranks.world_size() > 1:
            self._exchange(packed)
        self.block = block

    def _exchange(self, packed: Mapping[str, "_Packed"]) -> None:
        if any(each.layout is None for each in packed.values()):  # the first time
            own = {name: _layout(decoded) for name, decoded in self.decoded.items()}
            layouts = {name: layout for value, _ in ranks.gathered(own, {}) for name, layout in value.items()}
            for name, each in packed.items():
                each.layout = layouts[name]
        for name, each in packed.items():
            if each.rank != ranks.rank():
                self.decoded[name] = each.empty()
            ranks.copy_from(each.rank, list(self.decoded[name].values()))


class _Packed:
    """A matrix of the block; its packed codes at the rank that decodes it."""

    def __init__(self, target: QuantTarget, weight: QuantizedWeight, rank: int) -> None:
        self.rank, self.device = rank, target.device
        self.dtype = target.parameter.dtype  # training has float32 placeholders
        self.layout: dict[str, tuple[str, list[int]]] | None = None  # of what it decodes to: dtype and shape
        if rank != ranks.rank():
            return
        self.spec, self.stored = pack(weight.to(self.device))  # bits are packed faster on a GPU
        if self.device.type == "cuda":
            self.stored = {suffix: tensor.pin_memory() for suffix, tensor in self.stored.items()}

    @torch.no_grad()
    def decoded(self) -> Decoded:
        tensors = {suffix: each.to(self.device, non_blocking=True) for suffix, each in self.stored.items()}
        return decode(unpack(self.spec, tensors), self.dtype)

    def empty(self) -> Decoded:
        """Room for what another rank decodes."""
        assert self.layout is not None
        return {
            suffix: torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            for suffix, (dtype, shape) in self.layout.items()
        }


def decoding_ranks(members: Sequence[QuantTarget], count: int) -> dict[str, int]:
    """Which of `count` ranks decodes each matrix of a block: the largest first, by the rank with the fewest weights."""
    largest_first = sorted(members, key=lambda target: -target.size)
    # a kind of its own each: weights are what is divided evenly
    found = ranks.owners([(target.name, target.size) for target in largest_first], count)
    return {target.name: rank for target, rank in zip(largest_first, found, strict=True)}


def weights_to_decode(targets: Sequence[QuantTarget], count: int) -> int:
    """The weights that are decoded one after the other: of every block those of the rank that decodes most, for which the
    others wait."""

    def most(members: Sequence[QuantTarget]) -> int:
        sums: Counter[int] = Counter()
        decoding = decoding_ranks(members, count)
        for target in members:
            sums[decoding[target.name]] += target.size
        return max(sums.values())

    return sum(map(most, by_block(targets)))


def _layout(decoded: Decoded) -> dict[str, tuple[str, list[int]]]:
    return {
        suffix: (str(each.dtype).removeprefix("torch."), list(each.shape)) for suffix, each in decoded.items()
    }
