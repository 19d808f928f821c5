"""The dequantization PTX of `gemm_sm90`, run by `ptx_model`, and residuals in the order of the left operand."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from requant_kernels.common.dequant_ptx import GRID_STEP, zero_bias
from requant_kernels.common.packing import CodebookLayout, unpack_codes
from requant_kernels.common.ptx import broadcast_pair_ptx
from requant_kernels.common.sparse import fragment_index, unpack_residuals
from requant_kernels.scalar.gemm_sm90_ptx import K64_STAGES, MMA_PER_STAGE, dequant, dequant_k64_ptx

from .cases import Case, random_layout
from .ptx_model import floats, pair_of, run_block
from .test_bit_layout import fragments_of, random_k_tile

ROW_OF = (
    np.arange(2)[None, None, None, :] * 8 + np.arange(8)[:, None, None, None] + np.zeros((1, 4, 2, 1), int)
)


def by_row(values: np.ndarray, dtype: str) -> np.ndarray:
    """A value per row (of 16), twice, as the register of every (g, t, kh, rh)."""
    return pair_of(np.stack([values[ROW_OF]] * 2, -1), dtype)


def named(name: str, registers: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}{i}": register for i, register in enumerate(registers)}


def residual_registers(residuals: np.ndarray, dtype: str) -> np.ndarray:
    """Residuals [16, 256] -> the addend registers of 16 mma_k16."""
    rows, columns = (torch.from_numpy(i) for i in residuals.nonzero())
    flat = np.zeros(4096)
    flat[fragment_index(rows, columns).numpy()] = residuals[residuals.nonzero()]
    # mma_k16, g, t, kh, rh, e: a lane reads 16 bytes per mma_k16
    return pair_of(flat.reshape(16, 8, 4, 2, 2, 2), dtype)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("sparse", [False, True])
def test_k64_stages_of_a_grid_are_exact(bits: int, dtype: str, sparse: bool) -> None:
    codes, words = random_k_tile(bits, "grid")
    for groups in (0, 1, 2, 4, 8):
        for zeros in (False, True):
            many, own = max(1, groups), max(1, groups // K64_STAGES)
            zero = (
                np.random.randint(0, 1 << bits, (many, 16)) if zeros else np.full((many, 16), 1 << bits - 1)
            )
            scale = (
                2.0 ** np.random.randint(-3, 3, (many, 16)) if groups else np.full((1, 16), GRID_STEP[dtype])
            )
            residuals = np.where(
                np.random.rand(16, 256) < 0.02, 2.0 ** np.random.randint(3, 8, (16, 256)), 0.0
            )
            if not groups or not sparse:  # a row that is scaled at the end has no residuals in its weights
                residuals[:] = 0.0
            held, weights = residual_registers(residuals, dtype), []
            for stage in range(K64_STAGES):
                inputs = named("code", words)
                mine = range(stage * groups // K64_STAGES, stage * groups // K64_STAGES + own)
                if groups:
                    inputs |= named("scale", [by_row(scale[g] / GRID_STEP[dtype], dtype) for g in mine])
                if zeros:
                    biased = -(zero + zero_bias(bits, dtype)) * GRID_STEP[dtype]
                    inputs |= named("zero", [by_row(biased[g], dtype) for g in mine])
                if sparse:
                    inputs |= named("residual", held[MMA_PER_STAGE * stage : MMA_PER_STAGE * (stage + 1)])
                block = dequant_k64_ptx("grid", bits, dtype, groups, stage, zeros=zeros, sparse=sparse)
                weights += run_block(block, inputs, words[0].shape)
            got = np.stack([floats(register, dtype) for register in weights])
            weight = (codes.astype(float) - zero.repeat(256 // many, 0).T) * scale.repeat(
                256 // many, 0
            ).T + residuals
            want = fragments_of(weight)
            assert np.array_equal(got, floats(pair_of(want, dtype), dtype))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_k64_stages_of_a_codebook(bits: int) -> None:
    layout = random_layout(Case(format="codebook", bits=bits, n=16, k=256, m=1, density=0.02), "cpu")
    assert isinstance(layout, CodebookLayout)
    words = layout.packed_codes.view(bits, 8, 4, 2, 2).numpy().view(np.uint32)
    assert layout.tables is not None
    tables = layout.tables[0].view(-1, 8, 2).numpy().view(np.uint32)
    residuals = np.zeros((16, 256))
    rows, columns, values = unpack_residuals(layout)
    assert layout.row_perm is not None
    position = torch.argsort(layout.row_perm.long())[rows]
    residuals[position, columns] = values
    held, weights = residual_registers(residuals, "fp16"), []
    for stage in range(K64_STAGES):
        inputs = named("code", words)
        inputs |= named("table", [np.broadcast_to(t[:, None, None, :], words[0].shape) for t in tables])
        inputs |= named("residual", held[MMA_PER_STAGE * stage : MMA_PER_STAGE * (stage + 1)])
        block = dequant_k64_ptx("codebook", bits, "fp16", 0, stage, sparse=True)
        weights += run_block(block, inputs, words[0].shape)
    got = np.stack([floats(register, "fp16") for register in weights])
    codes = unpack_codes(layout.packed_codes, format="codebook", bits=bits, k=256).long()
    weight = torch.gather(layout.levels.double(), 1, codes).numpy() + residuals
    assert np.array_equal(got, floats(pair_of(fragments_of(weight), "fp16"), "fp16"))


@pytest.mark.parametrize("factor,addend", [(512.0, 0.0), (-(2.0**-9), -2.0)])
def test_broadcast_pairs(factor: float, addend: float) -> None:
    values = np.random.randint(1, 255, (50, 2)) * 2.0**-5
    low, high = run_block(
        broadcast_pair_ptx("fp16", factor, addend), {"pair": pair_of(values, "fp16")}, (50,)
    )
    for row, pair in enumerate((low, high)):
        want = floats(pair_of(np.stack([values[:, row] * factor + addend] * 2, -1), "fp16"), "fp16")
        assert np.array_equal(floats(pair, "fp16"), want)


def test_coo_entries_are_sorted_by_their_index() -> None:
    layout = random_layout(
        Case(format="grid", bits=2, n=40, k=600, m=1, density=0.05, int8_residuals=True), "cpu"
    )
    assert layout.sparse is not None and layout.row_perm is not None
    entries, bounds = layout.sparse.coo, layout.sparse.block_ptr
    assert entries is not None and bounds is not None
    assert bounds.shape == (3, 4) and bounds[0, 0] == 0 and bounds[-1, -1] == len(entries)
    rows, columns, values = unpack_residuals(layout)
    position = torch.argsort(layout.row_perm.long())[rows]
    want = torch.zeros(3, 3, 4096)
    want[position // 16, columns // 256, fragment_index(position % 16, columns % 256)] = values
    got = torch.zeros(3, 3, 4096)
    for tile in range(3):
        for k_tile in range(3):
            own = entries[bounds[tile, k_tile] : bounds[tile, k_tile + 1]]
            index = own >> 16
            assert (index.diff() > 0).all()
            got[tile, k_tile, index.long()] = (own & 0xFFFF).to(torch.int16).view(torch.float16).float()
    assert torch.allclose(got, want, rtol=1e-3)


def test_every_index_is_one_weight() -> None:
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(256), indexing="ij")
    assert torch.equal(fragment_index(rows, columns).flatten().sort().values, torch.arange(4096))


def test_with_residuals_a_row_scale_is_applied_to_the_weights() -> None:
    without, with_residuals = (
        dequant("grid", 3, "fp16", 0, sparse=sparse).stages[0] for sparse in (False, True)
    )
    assert "mul.rn" not in without.text and "fma.rn.f16x2 $0, unscaled0" in with_residuals.text
    assert len(with_residuals.operands) - len(without.operands) == 1 + MMA_PER_STAGE
