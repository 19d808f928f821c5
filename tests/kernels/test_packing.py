"""Packing is exact: what comes out is what went in, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from requant_kernels import (
    pack_codebook,
    pack_grid,
    unpack_codebook,
    unpack_grid,
    unpack_sparse,
)
from requant_kernels.fallback import reference

from .cases import Case, random_csr, random_layout


@settings(max_examples=30, deadline=None)
@given(
    bits=st.integers(2, 8),
    n=st.integers(1, 40),
    k=st.integers(1, 900),
    group_size=st.sampled_from([32, 64, 96, 128, 160, 256, 320, 512, 1024]),
    zero_points=st.booleans(),
    density=st.sampled_from([0.0, 0.01, 0.3]),
    seed=st.integers(0, 2**31),
)
def test_grid_round_trip(
    bits: int, n: int, k: int, group_size: int, zero_points: bool, density: float, seed: int
) -> None:
    torch.manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)
    groups = -(-k // group_size)
    scales = torch.rand(n, groups).half()
    zeros = torch.randint(0, 1 << bits, (n, groups), dtype=torch.uint8) if zero_points else None
    sparse = random_csr(n, k, density, False, "cpu") if density else None
    layout = pack_grid(codes, scales, zeros, bits=bits, group_size=group_size, sparse=sparse)
    back_codes, back_scales, back_zeros = unpack_grid(layout)
    assert torch.equal(back_codes, codes) and torch.equal(back_scales, scales)
    assert back_zeros is None if zeros is None else torch.equal(back_zeros, zeros)
    if sparse is not None:
        for got, want in zip(unpack_sparse(layout)[:3], sparse[:3], strict=True):
            assert torch.equal(got, want)


@settings(max_examples=20, deadline=None)
@given(
    bits=st.integers(2, 8),
    n=st.integers(1, 40),
    k=st.integers(1, 600),
    int8=st.booleans(),
    seed=st.integers(0, 99),
)
def test_codebook_round_trip(bits: int, n: int, k: int, int8: bool, seed: int) -> None:
    torch.manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)
    levels = torch.randn(n, 1 << bits).half()
    sparse = random_csr(n, k, 0.05, int8, "cpu")
    layout = pack_codebook(codes, levels, bits=bits, sparse=sparse)
    back_codes, back_levels = unpack_codebook(layout)
    assert torch.equal(back_codes, codes) and torch.equal(back_levels, levels)
    for got, want in zip(unpack_sparse(layout), sparse, strict=True):
        assert got is None if want is None else torch.equal(got, want)


def test_reference_weight_is_the_equation() -> None:
    case = Case(format="grid", bits=3, n=20, k=300, m=1, zero_points=True, density=0.05, column_scales=True)
    torch.manual_seed(0)
    layout = random_layout(case, "cpu")
    codes, scales, zeros = unpack_grid(layout)
    assert zeros is not None and layout.column_scales is not None
    group = torch.arange(300) // 128
    want = (
        (codes.double() - zeros.double()[:, group])
        * scales.double()[:, group]
        / layout.column_scales.double()
    )
    indptr, indices, values, _ = unpack_sparse(layout)
    rows = torch.repeat_interleave(torch.arange(20), indptr.diff())
    want[rows, indices.long()] += values.double()
    assert torch.equal(reference.weight(layout), want)


def test_sorted_rows_keep_padding_small() -> None:
    """Rows of very different lengths: the slots stay within one slice per row of what is needed."""
    n, k = 256, 1024
    mask = torch.rand(n, k) < (torch.rand(n, 1) ** 4) * 0.2
    rows, columns = mask.nonzero(as_tuple=True)
    indptr = torch.zeros(n + 1, dtype=torch.int64)
    indptr[1:] = mask.sum(1).cumsum(0)
    sparse = (indptr, columns.int(), torch.randn(len(rows)).half(), None)
    layout = pack_codebook(
        torch.zeros(n, k, dtype=torch.uint8), torch.zeros(n, 4).half(), bits=2, sparse=sparse
    )
    assert layout.sparse is not None
    assert layout.sparse.values.numel() < 1.2 * len(rows) + 8 * n


def test_refusals_name_the_remedy() -> None:
    codes = torch.zeros(4, 100, dtype=torch.uint8)
    with pytest.raises(ValueError, match="not a multiple of 32"):
        pack_grid(codes, torch.zeros(4, 3).half(), None, bits=2, group_size=48)
    with pytest.raises(ValueError, match="does not fit into 2 bits"):
        pack_codebook(codes + 4, torch.zeros(4, 4).half(), bits=2)
    with pytest.raises(ValueError, match=r"scales have shape \(4, 2\)"):
        pack_grid(codes, torch.zeros(4, 2).half(), None, bits=2, group_size=100)
    with pytest.raises(ValueError, match="levels have shape"):
        pack_codebook(codes, torch.zeros(4, 8).half(), bits=2)
