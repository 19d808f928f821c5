"""Packed layouts: what the kernels read, packed from plain tensors when a model is loaded, and their exact inverses.

A matrix `[n, k]` becomes tiles of 16 rows and k_tiles of 256 columns, both padded with zero codes; `bit_layout.py` draws the
bits of a k_tile. Rows are stored in the order `row_perm`: a matrix with residuals has its rows sorted by their number
(`sparse.py`).

| tensor | shape | |
| --- | --- | --- |
| packed_codes | int32 [tiles, k_tiles, bits, 32, 4] | lane 4 g + t holds (kh, rh) |
| scales, zero_points | float16 [tiles, groups, 8, 2] | (g, rh) |
| tables | int32 [2, tiles, 2^(bits-1), 8, 2] | bytes of the levels for PRMT, in fp16 and in bf16; 2 to 4 bits |
| levels | float16 [16 tiles, 2^bits] | |
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from requant_kernels.common.bit_layout import K_TILE, MMA_STEPS, ROW_TILE, bit_positions
from requant_kernels.common.sparse import (
    Csr,
    SlicedEll,
    pack_sparse,
    padded_row_perm,
    sort_rows,
    stored_residuals,
)

FINEST_GROUP = 32  # columns of an mma_k32


@dataclass(frozen=True, kw_only=True, slots=True)
class GridLayout:
    """A uniform grid. `group_size` is the user's, `kernel_group` what the kernels use (0: one scale per row)."""

    format: ClassVar[str] = "grid"
    packed_codes: Tensor
    scales: Tensor
    zero_points: Tensor | None
    column_scales: Tensor | None  # float16 [k]; the activations are divided by them
    row_perm: Tensor | None  # int32 [16 tiles], position -> row; n at padding
    sparse: SlicedEll | None
    n: int
    k: int
    bits: int
    group_size: int
    kernel_group: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CodebookLayout:
    """A codebook: every row has its own 2^bits levels. The shapes are those of the table above."""

    format: ClassVar[str] = "codebook"
    zero_points: ClassVar[None] = None
    column_scales: ClassVar[None] = None
    kernel_group: ClassVar[int] = 0
    packed_codes: Tensor
    levels: Tensor
    tables: Tensor | None
    row_perm: Tensor | None
    sparse: SlicedEll | None
    n: int
    k: int
    bits: int


Layout = GridLayout | CodebookLayout


def scales_per_k_tile(group: int) -> int:
    """Scales per row and k_tile, for `group` columns per scale: also 1 if a group spans several k_tiles, 0 for one per
    row."""
    return max(1, K_TILE // group) if group else 0


def k_tiles_per_scale(group: int) -> int:
    """k_tiles that share a scale."""
    return max(1, group // K_TILE)


def pack_grid(
    codes: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    *,
    bits: int,
    group_size: int,
    column_scales: Tensor | None = None,
    sparse: Csr | None = None,
) -> GridLayout:
    """Pack `(code - zero) * scale`: codes uint8 [n, k], scales [n, g], zero points uint8 [n, g] or None (2^(bits-1)).

    `group_size` is a multiple of 32, or at least k. `sparse` is CSR: indptr [n + 1], indices [z], values fp16 or int8
    [z], row scales fp16 [n] or None. Raises ValueError with the remedy.
    """
    n, k = codes.shape
    _check(codes, bits)
    groups = -(-k // group_size)
    if scales.shape != (n, groups):
        raise ValueError(
            f"scales have shape {tuple(scales.shape)}; {n} rows and {groups} groups of {group_size} columns are expected"
        )
    kernel_group = _kernel_group(k, group_size)
    order = None if sparse is None else sort_rows(sparse[0].to(codes.device))
    return GridLayout(
        packed_codes=pack_codes(_take(codes, order), format="grid", bits=bits),
        scales=_pack_groups(_take(scales, order).half(), k, group_size, kernel_group),
        zero_points=None
        if zero_points is None
        else _pack_groups(_take(zero_points, order).half(), k, group_size, kernel_group),
        column_scales=column_scales,
        row_perm=padded_row_perm(order, n),
        sparse=pack_sparse(sparse, order, k, coo=True, column_scales=column_scales),
        n=n,
        k=k,
        bits=bits,
        group_size=group_size,
        kernel_group=kernel_group,
    )


def pack_codebook(
    codes: Tensor,
    levels: Tensor,
    *,
    bits: int,
    sparse: Csr | None = None,
) -> CodebookLayout:
    """Pack `levels[row, code]`: codes uint8 [n, k], levels fp16 [n, 2^bits]; `sparse` as in `pack_grid`."""
    n, k = codes.shape
    _check(codes, bits)
    if levels.shape != (n, 1 << bits):
        raise ValueError(
            f"levels have shape {tuple(levels.shape)}; {bits} bits and {n} rows need {(n, 1 << bits)}"
        )
    order = None if sparse is None else sort_rows(sparse[0].to(codes.device))
    padded = _pad_rows(_take(levels, order).half()).contiguous()
    return CodebookLayout(
        packed_codes=pack_codes(_take(codes, order), format="codebook", bits=bits),
        levels=padded,
        tables=torch.stack([_byte_tables(padded), _byte_tables(padded.bfloat16())]) if bits <= 4 else None,
        row_perm=padded_row_perm(order, n),
        sparse=pack_sparse(sparse, order, k, coo=True),
        n=n,
        k=k,
        bits=bits,
    )


def unpack_grid(layout: GridLayout) -> tuple[Tensor, Tensor, Tensor | None]:
    """codes uint8 [n, k], scales fp16 [n, g], zero points uint8 [n, g] or None: the inverse of `pack_grid`."""
    codes = unpack_codes(layout.packed_codes, format="grid", bits=layout.bits, k=layout.k)
    step = layout.group_size // layout.kernel_group if layout.kernel_group else 1
    groups = -(-layout.k // layout.group_size)

    def plain(packed: Tensor) -> Tensor:
        flat = packed.permute(0, 3, 2, 1).reshape(-1, packed.shape[1])[:, ::step][:, :groups]
        return _untake(flat, layout.row_perm, layout.n)

    zeros = None if layout.zero_points is None else plain(layout.zero_points).to(torch.uint8)
    return _untake(codes, layout.row_perm, layout.n), plain(layout.scales), zeros


def unpack_codebook(layout: CodebookLayout) -> tuple[Tensor, Tensor]:
    """codes uint8 [n, k] and levels fp16 [n, 2^bits]: the inverse of `pack_codebook`."""
    codes = unpack_codes(layout.packed_codes, format="codebook", bits=layout.bits, k=layout.k)
    return _untake(codes, layout.row_perm, layout.n), _untake(layout.levels, layout.row_perm, layout.n)


def unpack_sparse(layout: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """CSR of the residuals of any layout as they were packed: indptr int64, indices int32, values, row scales."""
    sparse, row_perm = layout.sparse, layout.row_perm
    if sparse is None or row_perm is None:
        raise ValueError("this layout has no sparse part to unpack")
    position, column, value = stored_residuals(sparse)
    row = row_perm.long()[position]
    order = torch.argsort(row, stable=True)
    indptr = torch.zeros(layout.n + 1, dtype=torch.int64, device=row.device)
    indptr[1:] = torch.bincount(row, minlength=layout.n)[: layout.n].cumsum(0)
    scales = None if sparse.row_scales is None else _untake(sparse.row_scales, row_perm, layout.n)
    return indptr, column[order].int(), value[order], scales


def pack_codes(codes: Tensor, *, format: str, bits: int) -> Tensor:
    """codes uint8 [n, k] -> packed codes int32 [tiles, k_tiles, bits, 32, 4]; bits beyond the matrix are zero."""
    k_tiles = -(-codes.shape[1] // K_TILE)
    padded = torch.nn.functional.pad(_pad_rows(codes), (0, k_tiles * K_TILE - codes.shape[1]))
    # row = 16 tile + 8 rh + g;  column = 256 k_tile + 32 (step // 2) + 8 t + 4 (step % 2) + 2 kh + e
    parts = padded.view(-1, 2, 8, k_tiles, 8, 4, 2, 2, 2)
    parts = parts.permute(8, 4, 6, 0, 3, 2, 5, 7, 1)  # e step, tile k_tile g t kh rh
    parts = parts.reshape(2 * MMA_STEPS, -1)
    words = torch.zeros(bits, parts.shape[1], dtype=torch.int32, device=codes.device)
    for word in range(bits):
        for index, lsb, mask, bit in _fields(format, bits, word, codes.device):
            field = (parts[index].int() >> lsb & mask) << bit
            words[word] |= field.sum(0, dtype=torch.int32)  # fields share no bits, so a sum combines them
    return words.view(bits, -1, k_tiles, 32, 4).permute(1, 2, 0, 3, 4).contiguous()


def unpack_codes(packed_codes: Tensor, *, format: str, bits: int, k: int) -> Tensor:
    """The inverse of `pack_codes`, with the rows still padded: uint8 [16 tiles, k]."""
    tiles, k_tiles = packed_codes.shape[:2]
    parts = _unpack_words(packed_codes, format, bits)
    parts = parts.view(2, 8, 2, tiles, k_tiles, 8, 4, 2, 2).permute(3, 8, 5, 4, 1, 6, 2, 7, 0)
    return parts.reshape(tiles * ROW_TILE, k_tiles * K_TILE)[:, :k]


def unpack_row_codes(words: Tensor, *, format: str, bits: int) -> Tensor:
    """The codes of single rows, uint8 [m, 256 k_tiles], from their words int32 [m, k_tiles, bits, t, kh]."""
    m, k_tiles = words.shape[:2]
    parts = _unpack_words(words, format, bits)
    parts = parts.view(2, 8, 2, m, k_tiles, 4, 2).permute(3, 4, 1, 5, 2, 6, 0)  # -> m k_tile k32 t j kh e
    return parts.reshape(m, k_tiles * K_TILE)


def _unpack_words(words: Tensor, format: str, bits: int) -> Tensor:
    """words [a, b, bits, c, d] -> codes uint8 [(e, step), (a, b, c, d)]."""
    flat = words.permute(2, 0, 1, 3, 4).reshape(bits, -1)
    parts = torch.zeros(2 * MMA_STEPS, flat.shape[1], dtype=torch.uint8, device=words.device)
    for word in range(bits):
        for index, lsb, mask, bit in _fields(format, bits, word, words.device):
            parts[index] |= ((flat[word] >> bit & mask) << lsb).to(torch.uint8)
    return parts


def _fields(
    format: str, bits: int, word: int, device: torch.device
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The fields of a word: indices (16 e + step), lowest code bit, mask and bit; an index occurs once per entry."""
    rounds: list[list[tuple[int, int, int, int]]] = []
    for e, steps in enumerate(bit_positions(format, bits)):
        for step, positions in enumerate(steps):
            runs: list[list[int]] = []
            for c, (own_word, bit) in enumerate(positions):
                if own_word == word and runs and runs[-1][2] + runs[-1][1] == bit:
                    runs[-1][1] += 1
                elif own_word == word:
                    runs.append([c, 1, bit])
            for i, (lsb, width, bit) in enumerate(runs):
                if i == len(rounds):
                    rounds.append([])
                rounds[i].append((MMA_STEPS * e + step, lsb, (1 << width) - 1, bit))
    table = [torch.tensor(entry, device=device).T for entry in rounds]
    return [(i, lsb.int()[:, None], mask.int()[:, None], bit.int()[:, None]) for i, lsb, mask, bit in table]


def _check(codes: Tensor, bits: int) -> None:
    if not 2 <= bits <= 8:
        raise ValueError(f"the kernels hold 2 to 8 bits a code, not {bits}")
    if codes.dtype != torch.uint8 or codes.dim() != 2:
        raise ValueError(f"codes must be a uint8 matrix, not {codes.dtype} with shape {tuple(codes.shape)}")
    if codes.numel() and int(codes.max()) >= 1 << bits:
        raise ValueError(f"a code is {int(codes.max())}, which does not fit into {bits} bits")


def _kernel_group(k: int, group_size: int) -> int:
    """The largest supported group size that divides `group_size`; 0: one scale per row."""
    if group_size >= k:
        return 0
    group = (
        group_size
        if group_size % K_TILE == 0
        else torch.gcd(torch.tensor(group_size), torch.tensor(K_TILE)).item()
    )
    if group < FINEST_GROUP:
        raise ValueError(
            f"group_size {group_size} is not a multiple of {FINEST_GROUP}, the finest group of the kernels: "
            "quantize with 32, 64, 128 or 256, or serve the dequantized matrix"
        )
    return int(group)


def _pad_rows(matrix: Tensor) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, 0, 0, -matrix.shape[0] % ROW_TILE))


def _pack_groups(values: Tensor, k: int, group_size: int, kernel_group: int) -> Tensor:
    """[n, g] -> [tiles, kernel groups, 8, 2], zero beyond the matrix, so padded columns contribute nothing."""
    if kernel_group:
        values = values.repeat_interleave(group_size // kernel_group, dim=1)
        k_tiles = -(-k // K_TILE)
        groups = k_tiles * (K_TILE // kernel_group) if kernel_group <= K_TILE else -(-k // kernel_group)
        values = torch.nn.functional.pad(values, (0, max(0, groups - values.shape[1])))[:, :groups]
    values = _pad_rows(values)
    return values.view(-1, 2, 8, values.shape[1]).permute(0, 3, 2, 1).contiguous()


def _byte_tables(levels: Tensor) -> Tensor:
    """[16 tiles, c] of 16-bit floats -> int32 [tiles, c / 2, 8, 2]: all high bytes, four per word, then all low bytes."""
    bits = levels.view(torch.int16).int() & 0xFFFF
    split = torch.cat([bits >> 8, bits & 0xFF], 1).view(-1, 2, 8, levels.shape[1] // 2, 4)
    packed = split[..., 0] | split[..., 1] << 8 | split[..., 2] << 16 | split[..., 3] << 24
    return packed.permute(0, 3, 2, 1).contiguous()


def _take(matrix: Tensor, order: Tensor | None) -> Tensor:
    return matrix if order is None else matrix[order]


def _untake(matrix: Tensor, row_perm: Tensor | None, n: int) -> Tensor:
    """Undo the row permutation, drop the padding."""
    if row_perm is None:
        return matrix[:n].contiguous()
    out = torch.empty_like(matrix[:n])
    out[row_perm[:n].long()] = matrix[:n]
    return out
