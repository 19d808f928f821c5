"""Runtime layouts: what the kernels read, packed from plain tensors when a model is loaded, and unpacked exactly.

A matrix `[n, k]` becomes tiles of 16 rows and blocks of 256 columns, both padded with zero codes; `words.py` draws the
bits of one block. Rows are stored in the order `rows`: where a matrix has residuals, rows are sorted by their number,
most first, so that the 16 rows of a tile share a rectangle of slots with little padding.

| tensor | shape | |
| --- | --- | --- |
| packed_codes | int32 [tiles, blocks, bits, 32, 4] | lane 4 g + t holds (kh, rh) |
| scales, zero_points | float16 [tiles, groups, 8, 2] | (g, rh) |
| tables | int32 [2, tiles, 2^(bits-1), 8, 2] | bytes of the levels for PRMT, in fp16 and in bf16; 2 to 4 bits |
| levels | float16 [16 tiles, 2^bits] | |
| slots | int16 and values [chunks, 16, 8] | a chunk is 8 slots of each of the 16 rows |
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from requant_kernels.common.bit_layout import BLOCK, PLANES, ROWS, bit_positions
from requant_kernels.common.sparse import pack_entries, slot_entries

Csr = tuple[Tensor, Tensor, Tensor, Tensor | None]  # indptr, indices, values, row scales
SLOTS = 8  # slots of one row in a chunk
FINEST_GROUP = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicedEll:
    """Residuals of a matrix in chunks of 16 rows x 8 slots; `slice_ptr[tile]` is the tile's first chunk."""

    slice_ptr: Tensor  # int32 [tiles + 1]
    columns: Tensor  # int16 [chunks, 16, 8], read as unsigned
    values: Tensor  # float16 or int8 [chunks, 16, 8], zero where a slot is empty
    row_scales: Tensor | None  # float16 [16 tiles], beside int8 values
    row_nnz: Tensor  # int32 [16 tiles], filled slots of each row
    coo: Tensor | None = (
        None  # int32 [z] and [tiles, blocks + 1]: the same residuals as `entries.py` orders them
    )
    block_ptr: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GridLayout:
    """A uniform grid; `kernel_group` is the group the kernels see (0: one a row), `group_size` the user's."""

    packed_codes: Tensor
    scales: Tensor
    zero_points: Tensor | None
    column_scales: Tensor | None  # float16 [k], the activations are divided by them
    row_perm: Tensor | None  # int32 [16 tiles], position -> row; padding has n
    sparse: SlicedEll | None
    n: int
    k: int
    bits: int
    group_size: int
    kernel_group: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CodebookLayout:
    """A row's own levels."""

    packed_codes: Tensor
    levels: Tensor
    tables: Tensor | None
    row_perm: Tensor | None
    sparse: SlicedEll | None
    n: int
    k: int
    bits: int


Layout = GridLayout | CodebookLayout


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
    order = None if sparse is None else row_order(sparse[0].to(codes.device))
    return GridLayout(
        packed_codes=pack_words(_take(codes, order), kind="grid", bits=bits),
        scales=_pack_groups(_take(scales, order).half(), k, group_size, kernel_group),
        zero_points=None
        if zero_points is None
        else _pack_groups(_take(zero_points, order).half(), k, group_size, kernel_group),
        column_scales=column_scales,
        row_perm=stored_rows(order, n),
        sparse=pack_sparse(sparse, order, k, entries=True, column_scales=column_scales),
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
    order = None if sparse is None else row_order(sparse[0].to(codes.device))
    padded = _pad_rows(_take(levels, order).half()).contiguous()
    return CodebookLayout(
        packed_codes=pack_words(_take(codes, order), kind="codebook", bits=bits),
        levels=padded,
        tables=torch.stack([_byte_tables(padded), _byte_tables(padded.bfloat16())]) if bits <= 4 else None,
        row_perm=stored_rows(order, n),
        sparse=pack_sparse(sparse, order, k, entries=True),
        n=n,
        k=k,
        bits=bits,
    )


def unpack_grid(layout: GridLayout) -> tuple[Tensor, Tensor, Tensor | None]:
    """codes uint8 [n, k], scales fp16 [n, g], zero points uint8 [n, g] or None: the inverse of `pack_grid`."""
    codes = unpack_words(layout.packed_codes, kind="grid", bits=layout.bits, k=layout.k)
    step = layout.group_size // layout.kernel_group if layout.kernel_group else 1
    groups = -(-layout.k // layout.group_size)

    def plain(packed: Tensor) -> Tensor:
        flat = packed.permute(0, 3, 2, 1).reshape(-1, packed.shape[1])[:, ::step][:, :groups]
        return _untake(flat, layout.row_perm, layout.n)

    zeros = None if layout.zero_points is None else plain(layout.zero_points).to(torch.uint8)
    return _untake(codes, layout.row_perm, layout.n), plain(layout.scales), zeros


def unpack_codebook(layout: CodebookLayout) -> tuple[Tensor, Tensor]:
    """codes uint8 [n, k] and levels fp16 [n, 2^bits]: the inverse of `pack_codebook`."""
    codes = unpack_words(layout.packed_codes, kind="codebook", bits=layout.bits, k=layout.k)
    return _untake(codes, layout.row_perm, layout.n), _untake(layout.levels, layout.row_perm, layout.n)


def unpack_sparse(layout: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """CSR of the residuals of any layout as it was packed: indptr int64, indices int32, values, row scales."""
    sparse, row_perm = layout.sparse, layout.row_perm
    if sparse is None or row_perm is None:
        raise ValueError("this layout has no sparse part to unpack")
    position, column, value = slot_entries(sparse)
    row = row_perm.long()[position]
    order = torch.argsort(row, stable=True)
    indptr = torch.zeros(layout.n + 1, dtype=torch.int64, device=row.device)
    indptr[1:] = torch.bincount(row, minlength=layout.n)[: layout.n].cumsum(0)
    scales = None if sparse.row_scales is None else _untake(sparse.row_scales, row_perm, layout.n)
    return indptr, column[order].int(), value[order], scales


def pack_words(codes: Tensor, *, kind: str, bits: int) -> Tensor:
    """codes uint8 [n, k] -> words int32 [tiles, blocks, bits, 32, 4]; bits beyond the matrix are zero."""
    blocks = -(-codes.shape[1] // BLOCK)
    padded = torch.nn.functional.pad(_pad_rows(codes), (0, blocks * BLOCK - codes.shape[1]))
    # row = 16 tile + 8 rh + g;  column = 256 block + 32 pair + 8 t + 4 j + 2 kh + e
    parts = padded.view(-1, 2, 8, blocks, 8, 4, 2, 2, 2)
    parts = parts.permute(8, 4, 6, 0, 3, 2, 5, 7, 1)  # e pair j, tile block g t kh rh
    parts = parts.reshape(2 * PLANES, -1)
    words = torch.zeros(bits, parts.shape[1], dtype=torch.int32, device=codes.device)
    for word in range(bits):
        for index, lsb, mask, bit in _fields(kind, bits, word, codes.device):
            field = (parts[index].int() >> lsb & mask) << bit
            words[word] |= field.sum(0, dtype=torch.int32)  # no two fields share a bit, so a sum joins them
    return words.view(bits, -1, blocks, 32, 4).permute(1, 2, 0, 3, 4).contiguous()


def unpack_words(words: Tensor, *, kind: str, bits: int, k: int) -> Tensor:
    """The inverse of `pack_words`, with the rows still padded: uint8 [16 tiles, k]."""
    tiles, blocks = words.shape[:2]
    flat = words.permute(2, 0, 1, 3, 4).reshape(bits, -1)
    parts = torch.zeros(2 * PLANES, flat.shape[1], dtype=torch.uint8, device=words.device)
    for word in range(bits):
        for index, lsb, mask, bit in _fields(kind, bits, word, words.device):
            parts[index] |= ((flat[word] >> bit & mask) << lsb).to(torch.uint8)
    parts = parts.view(2, 8, 2, tiles, blocks, 8, 4, 2, 2).permute(3, 8, 5, 4, 1, 6, 2, 7, 0)
    return parts.reshape(tiles * ROWS, blocks * BLOCK)[:, :k]


def codes_of_words(words: Tensor, *, kind: str, bits: int) -> Tensor:
    """The codes of single rows, uint8 [m, 256 blocks], from their words int32 [m, blocks, bits, t, kh]."""
    m, blocks = words.shape[:2]
    flat = words.permute(2, 0, 1, 3, 4).reshape(bits, -1)
    parts = torch.zeros(2 * PLANES, flat.shape[1], dtype=torch.uint8, device=words.device)
    for word in range(bits):
        for index, lsb, mask, bit in _fields(kind, bits, word, words.device):
            parts[index] |= ((flat[word] >> bit & mask) << lsb).to(torch.uint8)
    parts = parts.view(2, 8, 2, m, blocks, 4, 2).permute(3, 4, 1, 5, 2, 6, 0)  # -> m block pair t j kh e
    return parts.reshape(m, blocks * BLOCK)


def _fields(
    kind: str, bits: int, word: int, device: torch.device
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What a word holds: columns of (16 e + plane), lowest code bit, mask and bit; a plane comes once in each entry."""
    rounds: list[list[tuple[int, int, int, int]]] = []
    for e, planes in enumerate(bit_positions(kind, bits)):
        for plane, places in enumerate(planes):
            runs: list[list[int]] = []
            for c, (held, bit) in enumerate(places):
                if held == word and runs and runs[-1][2] + runs[-1][1] == bit:
                    runs[-1][1] += 1
                elif held == word:
                    runs.append([c, 1, bit])
            for i, (lsb, width, bit) in enumerate(runs):
                if i == len(rounds):
                    rounds.append([])
                rounds[i].append((PLANES * e + plane, lsb, (1 << width) - 1, bit))
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
    """The coarsest group that the kernels can follow; 0 means one scale a row."""
    if group_size >= k:
        return 0
    group = (
        group_size
        if group_size % BLOCK == 0
        else torch.gcd(torch.tensor(group_size), torch.tensor(BLOCK)).item()
    )
    if group < FINEST_GROUP:
        raise ValueError(
            f"group_size {group_size} is not a multiple of {FINEST_GROUP}, the finest group of the kernels: "
            "quantize with 32, 64, 128 or 256, or serve the dequantized matrix"
        )
    return int(group)


def _pad_rows(matrix: Tensor) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, 0, 0, -matrix.shape[0] % ROWS))


def _pack_groups(values: Tensor, k: int, group_size: int, kernel_group: int) -> Tensor:
    """[n, g] -> [tiles, kernel groups, 8, 2], zero beyond the matrix, so padded columns count nothing."""
    if kernel_group:
        values = values.repeat_interleave(group_size // kernel_group, dim=1)
        blocks = -(-k // BLOCK)
        groups = blocks * (BLOCK // kernel_group) if kernel_group <= BLOCK else -(-k // kernel_group)
        values = torch.nn.functional.pad(values, (0, max(0, groups - values.shape[1])))[:, :groups]
    values = _pad_rows(values)
    return values.view(-1, 2, 8, values.shape[1]).permute(0, 3, 2, 1).contiguous()


def _byte_tables(levels: Tensor) -> Tensor:
    """[16 tiles, c] of 16-bit floats -> int32 [tiles, c / 2, 8, 2]: all high bytes four a word, then all low bytes."""
    bits = levels.view(torch.int16).int() & 0xFFFF
    planes = torch.cat([bits >> 8, bits & 0xFF], 1).view(-1, 2, 8, levels.shape[1] // 2, 4)
    packed = planes[..., 0] | planes[..., 1] << 8 | planes[..., 2] << 16 | planes[..., 3] << 24
    return packed.permute(0, 3, 2, 1).contiguous()


def row_order(indptr: Tensor) -> Tensor:
    """Rows by falling number of residuals, equal ones in their own order."""
    return torch.argsort(indptr.diff(), descending=True, stable=True)


def stored_rows(order: Tensor | None, n: int) -> Tensor | None:
    return None if order is None else torch.nn.functional.pad(order.int(), (0, -n % ROWS), value=n)


def _take(matrix: Tensor, order: Tensor | None) -> Tensor:
    return matrix if order is None else matrix[order]


def _untake(matrix: Tensor, rows: Tensor | None, n: int) -> Tensor:
    """Positions -> rows, padding dropped."""
    if rows is None:
        return matrix[:n].contiguous()
    out = torch.empty_like(matrix[:n])
    out[rows[:n].long()] = matrix[:n]
    return out


def pack_sparse(
    sparse: Csr | None,
    order: Tensor | None,
    k: int,
    *,
    entries: bool = False,
    column_scales: Tensor | None = None,
) -> SlicedEll | None:
    """Slots of the residuals, and with `entries` the second order of them that many tokens take, by `column_scales`."""
    if sparse is None or order is None:
        return None
    if k > 1 << 16:
        raise ValueError(
            f"the sparse kernels address 65536 columns, the matrix has {k}: drop the sparse part"
        )
    indptr, indices, values, row_scales = sparse
    device, n = order.device, len(order)
    counts = torch.nn.functional.pad(indptr.to(device).diff()[order], (0, -n % ROWS))
    chunks = -(-counts.view(-1, ROWS).amax(1) // SLOTS)
    starts = torch.nn.functional.pad(chunks.cumsum(0), (1, 0))
    total = int(starts[-1])
    position = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
    slot = torch.arange(len(position), device=device) - (counts.cumsum(0) - counts)[position]
    source = indptr.to(device)[order[position]] + slot
    at = (starts[position // ROWS] + slot // SLOTS) * (ROWS * SLOTS) + position % ROWS * SLOTS + slot % SLOTS
    columns = torch.zeros(total * ROWS * SLOTS, dtype=torch.int32, device=device)
    columns[at] = indices.to(device)[source].int()
    packed = torch.zeros(total * ROWS * SLOTS, dtype=values.dtype, device=device)
    packed[at] = values.to(device)[source]
    slots = SlicedEll(
        slice_ptr=starts.int(),
        columns=columns.to(torch.int16).view(total, ROWS, SLOTS),
        values=packed.view(total, ROWS, SLOTS),
        row_scales=None if row_scales is None else torch.nn.functional.pad(row_scales[order], (0, -n % ROWS)),
        row_nnz=counts.int(),
    )
    if not entries:
        return slots
    packed_entries, bounds = pack_entries(slots, k, column_scales)
    return replace(slots, coo=packed_entries, block_ptr=bounds)


def sparse_entries(layout: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and residual (float32) of every sparse entry."""
    if layout.sparse is None or layout.row_perm is None:
        raise ValueError("this layout has no sparse part")
    position, column, value = slot_entries(layout.sparse)
    residual = value.float()
    if layout.sparse.row_scales is not None:
        residual *= layout.sparse.row_scales.float()[position]
    return layout.row_perm.long()[position], column, residual
