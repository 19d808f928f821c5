"""Codes of 1 to 8 bits as a dense bitstream, exactly.

Little-endian: code j of a row takes bits `j*b .. j*b + b - 1`, across bytes and words, and a row ends on a 32-bit word.
Eight codes fill `b` bytes whatever b is, so packing works on groups of eight codes, with one or two byte operations per
code. Viewing four bytes as one int32 assumes a little-endian machine, as safetensors does.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Int32, UInt8
from torch import Tensor


def word_count(num_codes: int, bits: int | float) -> int:
    """32-bit words of a row of `num_codes` codes."""
    return math.ceil(num_codes * bits / 32)


def pack_bits(codes: UInt8[Tensor, "n k"], *, bits: int) -> Int32[Tensor, "n w"]:
    """Codes below `2**bits` -> rows of `ceil(k * bits / 32)` words; the bits after the last code are zero."""
    n, k = codes.shape
    octets = F.pad(codes, (0, -k % 8)).view(n, -1, 8)
    packed = codes.new_zeros((n, octets.shape[1], bits))
    for j in range(8):
        byte, shift = divmod(j * bits, 8)
        packed[:, :, byte] |= octets[:, :, j] << shift  # bits above the byte fall off ...
        if shift + bits > 8:
            packed[:, :, byte + 1] |= octets[:, :, j] >> (8 - shift)  # ... and go to the next one
    row = packed.view(n, -1)
    stream = codes.new_zeros((n, 4 * word_count(k, bits)))
    used = min(row.shape[1], stream.shape[1])  # octets and words are padded differently
    stream[:, :used] = row[:, :used]
    return stream.view(torch.int32)


def unpack_bits(packed: Int32[Tensor, "n w"], *, bits: int, k: int) -> UInt8[Tensor, "n k"]:
    """The first k codes of every row."""
    n = packed.shape[0]
    octets = -(-k // 8)
    row = packed.contiguous().view(torch.uint8)[:, : octets * bits]
    row = F.pad(row, (0, octets * bits - row.shape[1])).view(n, octets, bits)
    codes = row.new_empty((n, octets, 8))
    mask = (1 << bits) - 1
    for j in range(8):
        byte, shift = divmod(j * bits, 8)
        code = row[:, :, byte] >> shift
        if shift + bits > 8:
            code = code | (row[:, :, byte + 1] << (8 - shift))
        codes[:, :, j] = code & mask
    return codes.view(n, -1)[:, :k].contiguous()
