"""The computed codes of a trellis, one row each: how a 16-bit state becomes weights without a table.

    h = multiplier * state + addend   mod 2^32

The weights are read from the hash h, with bytes b0 (lowest) to b3, in one of three ways:

    byte sum       (b0 + b1 + b2 + b3 - 510) / 128
    two weights    (b0 + b1 + b2 + b3 - 510) / 128 and (b0 - b1 - b2 + b3) / 128
    halves         (h & 0x8FFF8FFF) ^ 0x3B603B60 is two float16, which are added

Hashes with byte sums feed the integer tensor cores directly (`gemv_ptx.py`). `3inst` is QTIP's (arXiv 2406.11235), `mul1`
ExLlamaV3's, `pair` is ours. `requant/formats/trellis_codes.py` holds what quantizers know of each.
"""

from dataclasses import dataclass

MAX_BITS = 8  # per weight, in steps of a quarter bit


@dataclass(frozen=True, kw_only=True, slots=True)
class TrellisCode:
    """A hash, and how weights are read from it."""

    multiplier: int
    addend: int
    byte_sums: bool
    weights_per_hash: int = 1

    @property
    def byte_sum_mean(self) -> float:
        """The unsigned-byte MMA exceeds the product by this times the sum of the activations; 0 without byte sums."""
        return 510.0 / self.weights_per_hash if self.byte_sums else 0.0

    @property
    def scale(self) -> float:
        """The factor that byte sums, or sums of halves, are multiplied by at the end."""
        return 1 / 128 if self.byte_sums else 1.0


CODES = {
    "mul1": TrellisCode(multiplier=0x83DCD12D, addend=0, byte_sums=True),
    "3inst": TrellisCode(multiplier=89226354, addend=64248484, byte_sums=False),
    "pair": TrellisCode(multiplier=0x4E6DA66B, addend=0x3C6EF35F, byte_sums=True, weights_per_hash=2),
}
