"""Residuals of `gemm_sm90` without a GPU: its PTX on 32 lanes that only its own barriers synchronize."""

import itertools
import random
import re
from collections.abc import Generator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from requant_kernels.common.fragment_dequant import scaled_activations
from requant_kernels.common.ptx import Ptx
from requant_kernels.common.sparse import fragment_index, pack_coo
from requant_kernels.fallback import reference
from requant_kernels.scalar import gemm_sm90
from requant_kernels.scalar import gemm_sm90_residuals as residuals_of
from requant_kernels.scalar.gemm_sm90_ptx import K64_STAGES

from .cases import Case, random_layout, relative_error

CLEAR_TILE, SCATTER = residuals_of.CLEAR_TILE.value, residuals_of.SCATTER.value
SCATTER_REST, SCATTER_REST_BF16 = residuals_of.SCATTER_REST.value, residuals_of.SCATTER_REST_BF16.value
VALUE_TO_BF16, LOAD_RESIDUALS = residuals_of.VALUE_TO_BF16.value, residuals_of.LOAD_RESIDUALS.value
TILE_BYTES, NO_ENTRY = residuals_of.TILE_BYTES.value, residuals_of.NO_ENTRY.value


@cache
def parse(text: str) -> tuple[list[tuple[str, str, list[str]]], dict[str, int]]:
    """Guard, opcode and operands of every instruction, `{l, h}` as `l|h`; where the labels are."""
    text = re.sub(r"\{([^{}.;]*)\}", lambda found: found[1].replace(", ", "|"), text)
    program: list[tuple[str, str, list[str]]] = []
    labels: dict[str, int] = {}
    for part in re.sub("[{}]", "", text).split(";"):
        found = re.match(r"\s*(?:(\w+):)?\s*(?:@(\w+) )?(\S*)\s*(.*)", part)
        assert found is not None
        if found[1]:
            labels[found[1]] = len(program)
        if found[3] and not found[3].startswith((".reg", ".pragma")):
            program.append((found[2] or "", found[3], found[4].split(", ")))
    return program, labels


def lane_steps(
    block: Ptx, operands: dict[str, int], shared: np.ndarray, memory: np.ndarray
) -> Generator[None, None, dict[str, int]]:
    """One lane; yields at every barrier. `shared` and `memory` in units of 16 and of 32 bits, from address 0."""
    program, labels = parse(block.text)
    registers, at = {f"${block.operands.index(name)}": value for name, value in operands.items()}, 0

    def read(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    def address(name: str) -> int:
        return sum(read(part) for part in name.strip("[]").split(" + "))

    while at < len(program):
        guard, opcode, names = program[at]
        at += 1
        if guard and not registers[guard]:
            continue
        target = names[0]
        match opcode:
            case "bar.warp.sync":
                yield
            case "bra":
                at = labels[target]
            case "mov.b32" if "|" in target:
                value = read(names[1])
                registers |= dict(zip(target.split("|"), (value & 0xFFFF, value >> 16 & 0xFFFF), strict=True))
            case "mov.b32" if "|" in names[1]:
                low, high = map(read, names[1].split("|"))
                registers[target] = high << 16 | low
            case "mov.b32":
                registers[target] = read(names[1])
            case "add.s32":
                registers[target] = read(names[1]) + read(names[2])
            case "mad.wide.s32":
                registers[target] = read(names[1]) * read(names[2]) + read(names[3])
            case "shr.s32" | "shr.u32":  # entries are positive
                registers[target] = read(names[1]) >> read(names[2])
            case "and.b32":
                registers[target] = read(names[1]) & read(names[2])
            case "setp.ge.s32":
                registers[target] = read(names[1]) >= read(names[2])
            case "setp.eq.s32":
                registers[target] = read(names[1]) == read(names[2])
            case "cvt.f32.f16":
                registers[target] = int(
                    np.uint16(read(names[1])).view(np.float16).astype(np.float32).view(np.uint32)
                )
            case "cvt.rn.bf16.f32":
                value = read(names[1])
                registers[target] = value + 0x7FFF + (value >> 16 & 1) >> 16
            case "ld.global.b32":
                registers[target] = int(memory[address(names[1]) // 4])
            case "st.shared.b16":
                shared[address(target) // 2] = read(names[1])
            case "st.shared.v4.b32":
                assert not any(map(read, names[1].split("|")))
                shared[address(target) // 2 : address(target) // 2 + 8] = 0
            case "ld.shared.v4.b32":
                held = shared[address(names[1]) // 2 : address(names[1]) // 2 + 8].view(np.uint32)
                registers |= dict(zip(target.split("|"), map(int, held), strict=True))
            case _:
                raise AssertionError(f"the model does not know {opcode}")
    return registers


def lane_of_a_k_tile(
    lane: int, bounds: tuple[int, int], base: int, bf16: bool, shared: np.ndarray, memory: np.ndarray
) -> Generator[None, None, list[list[int]]]:
    """What the kernel has a lane do with the entries of a k_tile: the 16 registers that it loads in every k64_stage."""
    begin, end = bounds
    rest, rounds, loaded = SCATTER_REST_BF16 if bf16 else SCATTER_REST, [], []

    def run(block: Ptx, operands: dict[str, int]) -> Generator[None, None, dict[str, int]]:
        return lane_steps(block, operands, shared, memory)

    for first in (begin + lane, begin + lane + 32):
        entry = int(memory[first]) if first < end else NO_ENTRY
        value = entry
        if bf16:
            value = (yield from run(VALUE_TO_BF16, {"entry": entry}))["$0"]
        rounds.append((base + (entry >> 15 & 0x7FE), entry >> 26, value))
    for q in range(K64_STAGES):
        for values in (True, False):
            for address, stage, value in rounds:
                operands = {
                    "address": address,
                    "entry_stage": stage,
                    "stage": q,
                    "entry": value if values else 0,
                }
                yield from run(SCATTER, operands)
            operands = {"entries": 0, "first": begin + lane, "end": end, "tile": base, "stage": q}
            yield from run(rest, operands | {"value_mask": 0xFFFFFFFF if values else 0})
            if values:
                registers = yield from run(LOAD_RESIDUALS, {"address": base + lane * 16})
                loaded.append([registers[f"${i}"] for i in range(16)])
    return loaded


def run_warp(lanes: list[Generator[None, None, Any]]) -> list[Any]:
    """All lanes to their ends: between two barriers one after the other, in random order."""
    waiting, done = dict(enumerate(lanes)), {}
    while waiting:
        for i in random.sample(list(waiting), len(waiting)):
            try:
                next(waiting[i])
            except StopIteration as result:
                done[i] = result.value
                del waiting[i]
    return [done[i] for i in range(len(lanes))]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp16", "bf16"])
@pytest.mark.parametrize("density", [0.004, 0.02, 0.1])
def test_every_residual_is_loaded_once(density: float, bf16: bool) -> None:
    """Up to 64 entries per k_tile, of which lanes hold two each, and more, which they read again in every k64_stage."""
    random.seed(0)
    torch.manual_seed(0)
    layout = random_layout(Case(format="grid", bits=3, n=32, k=400, m=1, density=density), "cpu")
    assert layout.sparse is not None and layout.row_perm is not None
    entries, bounds = layout.sparse.coo, layout.sparse.block_ptr
    assert entries is not None and bounds is not None
    residuals = torch.zeros(32, 512)
    residuals[:, :400] = reference.sparse(layout, torch.float32)[layout.row_perm.long()]
    row, column = torch.meshgrid(torch.arange(16), torch.arange(256), indexing="ij")
    base, sizes = 3 * TILE_BYTES, []
    shared, memory = np.zeros(5 * TILE_BYTES // 2, np.uint16), entries.numpy().view(np.uint32)
    shared[base // 2 : base // 2 + 1024] = 0x3C00  # whatever was there before
    run_warp([lane_steps(CLEAR_TILE, {"address": base + 16 * i}, shared, memory) for i in range(32)])
    for tile, block in itertools.product(range(2), range(2)):
        begin, end = (int(edge) for edge in bounds[tile, block : block + 2])
        sizes.append(end - begin)
        got = run_warp([lane_of_a_k_tile(i, (begin, end), base, bf16, shared, memory) for i in range(32)])
        assert not shared.any()
        own = residuals[16 * tile : 16 * tile + 16, 256 * block : 256 * block + 256]
        flat = torch.empty(4096)
        flat[fragment_index(row, column)] = own
        own = (flat.bfloat16() if bf16 else flat.half()).view(torch.int16).view(K64_STAGES, 4, 32, 8)
        want = own.permute(2, 0, 1, 3).contiguous().numpy().view(np.uint32)
        assert np.array_equal(np.array(got, np.uint32), want.reshape(32, K64_STAGES, 16))
    assert min(sizes) < 64 if density < 0.02 else max(sizes) > 128


@pytest.mark.parametrize("group", [64, 500])
@pytest.mark.parametrize("int8", [False, True])
def test_entries_meet_divided_activations(group: int, int8: bool) -> None:
    """y = (x / column scales) (dense + entries)^T, in the order of the rows as they are stored."""
    case = Case(
        format="grid", bits=3, n=40, k=500, m=8, group_size=group, zero_points=True, density=0.02,
        int8_residuals=int8, column_scales=True,
    )  # fmt: skip
    layout = random_layout(case, "cpu")
    assert layout.sparse is not None and layout.row_perm is not None
    entries, bounds = layout.sparse.coo, layout.sparse.block_ptr
    assert entries is not None and bounds is not None
    row, column = torch.meshgrid(torch.arange(16), torch.arange(256), indexing="ij")
    residuals = torch.zeros(48, 512, dtype=torch.float64)
    for tile, block in itertools.product(range(3), range(2)):
        own, flat = entries[bounds[tile, block] : bounds[tile, block + 1]], torch.zeros(4096).double()
        flat[(own >> 16).long()] = (own & 0xFFFF).to(torch.int16).view(torch.float16).double()
        residuals[16 * tile : 16 * tile + 16, 256 * block : 256 * block + 256] = flat[
            fragment_index(row, column)
        ]
    weight = reference.dense(layout)
    weight[layout.row_perm[:40].long()] += residuals[:40, :500]
    x = torch.randn(8, 500)
    got = scaled_activations(x, layout).double() @ weight.T
    assert relative_error(got, reference.linear(x, layout)) < 1e-4


def test_residuals_that_are_no_float16_have_no_entries() -> None:
    layout = random_layout(Case(format="grid", bits=3, n=32, k=256, m=1, density=0.02), "cpu")
    assert layout.sparse is not None
    assert gemm_sm90.supports(layout, 64, torch.device("cpu"))
    assert pack_coo(layout.sparse, 256, torch.full((256,), 2.0))[0] is not None
    assert pack_coo(layout.sparse, 256, torch.full((256,), 6e4)) == (None, None)
    without = replace(layout, sparse=replace(layout.sparse, coo=None, block_ptr=None))
    assert not gemm_sm90.supports(without, 64, torch.device("cpu"))
