"""Containers to stored tensors and back, exactly.

Codes are a dense little-endian bitstream a row: code j takes bits `j*b .. j*b + b - 1`, across bytes and
words, and a row ends on a 32-bit word. Eight codes fill `b` bytes whatever b is, so packing works on octets
of codes, with one or two byte operations a code. The view of four bytes as one int32 assumes a little-endian
machine, as safetensors does.

A trellis has tiles of 16 by 16 in place of rows: each is a row of 256 codes, in the order in which it is
decoded. At quarters of a bit (`trellis_codes.step_bits`) the bits that all codes have come first, then, in the
same order, the highest bit of the codes that have one more. A sparse index is one byte, the column within its
256-column tile; a count a (row, tile) replaces row pointers. Levels and output scales that lie on a grid of
8 bits are stored in those (`requant.int8`).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float16, Int32, Int64, UInt8
from torch import Tensor

from requant.formats.containers import (
    INDEX_TILE,
    Codebook,
    Dense,
    Grid,
    QuantizedWeight,
    Sparse,
    Trellis,
    group_count,
)
from requant.formats.hadamard import TILE
from requant.formats.int8 import decode, encode, fits
from requant.formats.packed_spec import PackedSpec, words
from requant.formats.trellis_codes import PERIOD, TILE_WEIGHTS, from_tiles, step_bits, to_tiles


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
    stream = codes.new_zeros((n, 4 * words(k, bits)))
    used = min(
        row.shape[1], stream.shape[1]
    )  # the octet's padding may need more or fewer bytes than the word's
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


def pack_tiles(tiles: UInt8[Tensor, "b 256"], *, bits: int | float) -> Int32[Tensor, "b w"]:
    """The tiles of a trellis at `bits` bits a weight, a quarter or whole."""
    whole, more = _longer_codes(bits)
    rows = pack_bits(tiles & ((1 << whole) - 1), bits=whole)
    if not more:
        return rows
    highest = tiles.unflatten(1, (-1, PERIOD))[:, :, more].flatten(1) >> whole
    return torch.cat([rows, pack_bits(highest, bits=1)], dim=1)


def unpack_tiles(packed: Int32[Tensor, "b w"], *, bits: int | float) -> UInt8[Tensor, "b 256"]:
    """The inverse of `pack_tiles`."""
    whole, more = _longer_codes(bits)
    split = words(TILE_WEIGHTS, whole)
    tiles = unpack_bits(packed[:, :split], bits=whole, k=TILE_WEIGHTS)
    if more:
        highest = unpack_bits(packed[:, split:], bits=1, k=TILE_WEIGHTS // PERIOD * len(more))
        tiles.unflatten(1, (-1, PERIOD))[:, :, more] |= highest.unflatten(1, (-1, len(more))) << whole
    return tiles


def _longer_codes(bits: int | float) -> tuple[int, list[int]]:
    """The bits that every code has, and which of PERIOD codes have one more."""
    whole = int(bits)
    return whole, [] if bits == whole else [i for i, own in enumerate(step_bits(bits)) if own > whole]


def pack(weight: QuantizedWeight) -> tuple[PackedSpec, dict[str, Tensor]]:
    """The layout of a matrix and its tensors by suffix, on the device of the codes."""
    fields, tensors = _pack_dense(weight.dense)
    sparse = weight.sparse
    if sparse is not None and sparse.values.numel():
        counts = tile_counts(sparse)
        fields["sparse"] = sparse.values.numel()
        fields["sparse_values"] = "float16" if sparse.row_scales is None else "int8"
        # A full tile has 256 entries, one more than a byte counts.
        fields["sparse_counts"] = "uint16" if (counts == INDEX_TILE).any() else "uint8"
        tensors["sparse_counts"] = counts.to(getattr(torch, fields["sparse_counts"]))
        tensors["sparse_indices"] = (sparse.indices % INDEX_TILE).to(torch.uint8)
        tensors["sparse_values"] = sparse.values
        if sparse.row_scales is not None:
            tensors["sparse_scales"] = sparse.row_scales
            if len(sparse.row_scales) > 1 and (sparse.row_scales == sparse.row_scales[0]).all():
                fields["sparse_scales"] = "matrix"
                tensors["sparse_scales"] = sparse.row_scales[:1]
    return PackedSpec(bits=weight.dense.bits, shape=weight.shape, **fields), tensors


def unpack(layout: PackedSpec, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    """The inverse of `pack`; `tensors` have the dtypes and shapes of `layout.tensors()`."""
    return QuantizedWeight(dense=_unpack_dense(layout, tensors), sparse=_unpack_sparse(layout, tensors))


def tile_counts(sparse: Sparse) -> Int64[Tensor, "n t"]:
    """Entries of every (row, 256-column tile)."""
    n, k = sparse.shape
    tiles = -(-k // INDEX_TILE)
    place = sparse.rows * tiles + sparse.indices.long() // INDEX_TILE
    return torch.bincount(place, minlength=n * tiles).view(n, tiles)


def entry_tiles(counts: Int64[Tensor, "n t"]) -> Int64[Tensor, " z"]:
    """For every entry in stored order, the running number `row * tiles + tile` of its tile."""
    return torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts.flatten())


def _pack_dense(dense: Dense) -> tuple[dict[str, Any], dict[str, Tensor]]:
    match dense:
        case Codebook():
            tensors = {"codes": pack_bits(dense.codes, bits=dense.bits), "levels": dense.levels}
            if not fits(dense.levels):
                return {"format": "codebook"}, tensors
            tensors["levels"], scales = encode(dense.levels)
            return {"format": "codebook", "levels": "int8"}, {**tensors, "level_scales": scales[:, 0]}
        case Grid():
            tensors = {"codes": pack_bits(dense.codes, bits=dense.bits), "scales": dense.scales}
            if dense.zero_points is not None:
                tensors["zero_points"] = pack_bits(dense.zero_points, bits=dense.bits)
            if dense.column_scales is not None:
                tensors["column_scales"] = dense.column_scales
            fields = {
                "zero_points": dense.zero_points is not None,
                "column_scales": dense.column_scales is not None,
            }
            return {"format": "grid", "group_size": dense.group_size, **fields}, tensors
        case Trellis():
            r, c = dense.codes.shape
            tiles = pack_tiles(to_tiles(dense.codes), bits=dense.bits)
            inputs, outputs = (
                _pack_signed("input", dense.input_scales),
                _pack_signed("output", dense.output_scales),
            )
            fields: dict[str, Any] = {
                "input_signs": "input_signs" in inputs,
                "output_signs": "output_signs" in outputs,
            }
            if not fields["output_signs"] and fits(dense.output_scales):
                numbers, magnitude = encode(dense.output_scales)
                outputs = {"output_scales": numbers, "output_magnitude": magnitude}
                fields["output_scales"] = "int8"
            tensors = {"codes": tiles.view(r // TILE, c // TILE, -1), **inputs, **outputs}
            return {"format": "trellis", "code": dense.code, **fields}, tensors


def _unpack_dense(layout: PackedSpec, tensors: Mapping[str, Tensor]) -> Dense:
    n, k = layout.shape
    bits = int(layout.bits)  # whole but for a trellis
    match layout.format:
        case "codebook":
            levels = tensors["levels"]
            if layout.levels == "int8":
                levels = decode(levels, tensors["level_scales"][:, None])
            return Codebook(codes=unpack_bits(tensors["codes"], bits=bits, k=k), levels=levels, bits=bits)
        case "grid":
            zero_points = None
            if layout.zero_points:
                groups = group_count(k, layout.group_size)
                zero_points = unpack_bits(tensors["zero_points"], bits=bits, k=groups)
            return Grid(
                codes=unpack_bits(tensors["codes"], bits=bits, k=k),
                scales=tensors["scales"],
                zero_points=zero_points,
                column_scales=tensors["column_scales"] if layout.column_scales else None,
                bits=bits,
                group_size=layout.group_size,
            )
        case "trellis":
            rows, columns, width = tensors["codes"].shape
            tiles = unpack_tiles(tensors["codes"].reshape(-1, width), bits=layout.bits)
            return Trellis(
                codes=from_tiles(tiles, (rows * TILE, columns * TILE)),
                input_scales=_unpack_signed("input", tensors, k),
                output_scales=_unpack_signed("output", tensors, n),
                bits=layout.bits,
                code=layout.code,
            )


def _pack_signed(side: str, scales: Float16[Tensor, " k"]) -> dict[str, Tensor]:
    """Scales of one magnitude as a bit each; others as they are."""
    magnitude = scales.abs()
    if (magnitude != magnitude[0]).any():
        return {f"{side}_scales": scales}
    signs = torch.signbit(scales).to(torch.uint8)
    return {f"{side}_signs": pack_bits(signs[None], bits=1), f"{side}_magnitude": magnitude[:1]}


def _unpack_signed(side: str, tensors: Mapping[str, Tensor], count: int) -> Float16[Tensor, " k"]:
    scales, magnitude = tensors.get(f"{side}_scales"), tensors.get(f"{side}_magnitude")
    if scales is not None:
        return scales if magnitude is None else decode(scales, magnitude)
    assert magnitude is not None
    negative = unpack_bits(tensors[f"{side}_signs"], bits=1, k=count)[0].bool()
    return torch.where(negative, -magnitude, magnitude)


def _unpack_sparse(layout: PackedSpec, tensors: Mapping[str, Tensor]) -> Sparse | None:
    if not layout.sparse:
        return None
    counts = tensors["sparse_counts"].long()
    scales = tensors.get("sparse_scales")
    indptr = F.pad(counts.sum(1).cumsum(0), (1, 0))
    offset = entry_tiles(counts) % layout.tiles * INDEX_TILE
    return Sparse(
        indptr=indptr,
        indices=(offset + tensors["sparse_indices"].long()).int(),
        values=tensors["sparse_values"],
        row_scales=None if scales is None else scales.expand(layout.shape[0]).contiguous(),
        shape=layout.shape,
    )
