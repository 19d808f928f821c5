"""Launch settings: the rule for GPUs that nobody measured, the table, and the cache before it."""

import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from requant_kernels import autotune, heuristics, launch_config, pack_trellis
from requant_kernels.common import occupancy
from requant_kernels.hadamard.tile_kernel import HADAMARD_TILE
from requant_kernels.launch_config import DecodeConfig, TallConfig
from requant_kernels.trellis.layout import k64_per_unit

from .cases import Case, random_csr, random_layout, random_trellis

# multiprocessors, capability, shared memory of a program
GPUS = {"A100": (108, (8, 0), 166912), "4090": (128, (8, 9), 101376), "H100": (132, (9, 0), 232448)}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(heuristics.CACHE_VARIABLE, str(tmp_path / "kernels.json"))
    heuristics.forget()
    yield
    heuristics.forget()


def pretend(monkeypatch: pytest.MonkeyPatch, name: str) -> torch.device:
    multiprocessors, capability, shared = GPUS[name]
    properties = SimpleNamespace(
        name=name, multi_processor_count=multiprocessors, major=capability[0], minor=capability[1],
        shared_memory_per_block_optin=shared,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize(("n", "k"), [(28672, 8192), (4096, 4096), (2048, 2048), (16, 100)])
def test_the_rule_fills_every_gpu(monkeypatch: pytest.MonkeyPatch, name: str, n: int, k: int) -> None:
    device = pretend(monkeypatch, name)
    decode = heuristics._config("grid", 4, n, k, 1, device)
    assert decode.warps in (1, 2, 4, 8, 16) and decode.pdl == (name == "H100")
    wanted = 11 * GPUS[name][0]
    assert -(-n // 16) * decode.warps >= min(wanted, -(-n // 16) * 16) or 2 * decode.warps > -(-k // 256)
    tall = heuristics.tall_config("grid", 4, n, k, 64, device)
    assert 1 <= tall.split <= max(1, -(-k // 256)) and (tall.stages + 1) * 64 * 512 <= GPUS[name][2]
    for width in (32, 64, 256):
        hopper = heuristics._hopper_config("grid", 4, n, k, width, device)
        assert hopper.tokens == min(width, 128) and 1 <= hopper.split <= max(1, k // 1024)
        programs = -(-n // (16 * hopper.warps)) * -(-width // hopper.tokens) * hopper.split
        assert hopper.split == 1 or programs <= 1.5 * GPUS[name][0] * (
            16 // hopper.warps if width <= 64 else 1
        )


def test_only_hopper_has_the_kernel_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = random_layout(Case(format="grid", bits=8, n=32, k=256, m=1), "cpu")
    memory = random_layout(Case(format="codebook", bits=5, n=32, k=256, m=1), "cpu")
    sparse = random_csr(32, 256, 0.1, False, "cpu")
    trellis = pack_trellis(*random_trellis(32, 256, 2.25, "cpu"), bits=2.25, code="mul1", sparse=sparse)
    for name in GPUS:
        device = pretend(monkeypatch, name)
        heuristics.forget()
        monkeypatch.delenv(heuristics.HOPPER_VARIABLE, raising=False)
        assert heuristics.runs_on_hopper(grid, device) == (name == "H100")
        assert heuristics.runs_on_hopper(trellis, device) == (name == "H100")
        assert not heuristics.runs_on_hopper(memory, device)  # its levels are looked up in memory
        monkeypatch.setenv(heuristics.HOPPER_VARIABLE, "0")
        assert not heuristics.runs_on_hopper(grid, device)


def test_the_cache_comes_before_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = pretend(monkeypatch, "H100")
    layout = random_layout(Case(format="grid", bits=2, n=64, k=1024, m=1), "cpu")
    rule, several = (heuristics.decode_config(layout, tokens, device) for tokens in (1, 3))
    table = {"H100": {"decode grid 2 64x1024 1": [2, 2, 1, 0, 96], "tall grid 2 64x1024 32": [4, 2, 3]}}
    autotune.write_table(tmp_path / "kernels.json", table)
    assert json.loads((tmp_path / "kernels.json").read_text()) == table
    assert heuristics.decode_config(layout, 1, device) == rule  # read once in a process
    heuristics.forget()
    assert heuristics.decode_config(layout, 1, device) == DecodeConfig(
        warps=2, tiles=2, ahead=False, pdl=True, max_registers=96
    )
    assert heuristics.decode_config(layout, 3, device) == several  # another width
    assert heuristics.tall_config("grid", 2, 64, 1024, 32, device) == TallConfig(warps=4, split=2, stages=3)


def test_bytes_go_first_where_they_may(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row of `byte_grid.py` is for layouts that it knows, on Hopper; for all others there is one of the other kernel."""
    plain, zeros, residuals, odd, row = (
        random_layout(Case(format="grid", bits=2, n=64, m=1, **given), "cpu")
        for given in (
            {"k": 1024}, {"k": 1024, "zero_points": True}, {"k": 1024, "density": 0.01}, {"k": 1000},
            {"k": 1024, "zero_points": True, "group_size": 1024},
        )
    )  # fmt: skip
    rows = {"masked grid 2 64x1024 1": [8, 2, 2, launch_config.BYTES + launch_config.SHARE, 0]}
    rows |= {"decode grid 2 64x1024 1": [2, 1, 3, 0, 64], "decode grid+s 2 64x1024 1": [4, 1, 1, 0, 128]}
    for name in GPUS:
        autotune.write_table(tmp_path / "kernels.json", {name: rows})
        device = pretend(monkeypatch, name)
        heuristics.forget()
        for layout in (plain, zeros):
            found = heuristics.decode_config(layout, 1, device)
            assert (found.bytes, found.tiles, found.shares) == (
                (True, 2, 1) if name == "H100" else (False, 1, 0)
            )
            assert heuristics.decode_config(layout, 1, device, masked=False).max_registers == 64
            assert not heuristics.decode_config(layout, 2, device).bytes
        assert heuristics.decode_config(row, 1, device).max_registers == 64  # its zero points are one a row
        assert (
            heuristics.decode_config(residuals, 1, device).max_registers == 128
        )  # measured, and this kernel was behind
        assert not heuristics.decode_config(odd, 1, device).bytes


def test_what_the_table_holds_of_some_times() -> None:
    def names(found: dict) -> list[tuple[str, int]]:
        best = autotune.winners(
            "decode", "grid", 2, 64, 1024, 1, {(w, 1, 2, bits, 0): t for (w, bits), t in found.items()}
        )
        return [(name.split(" ")[0], setting[0]) for name, setting in best.items()]

    integer = launch_config.BYTES
    assert names({(1, 0): 3.0, (2, integer): 2.0, (4, integer): 1.0, (8, 0): 4.0}) == [
        ("masked", 4),
        ("decode", 1),
    ]
    assert names({(1, 0): 1.0, (2, integer): 2.0}) == [("decode", 1)]
    assert names({(2, integer): 2.0}) == [("masked", 2)] and names({}) == []


@pytest.mark.parametrize(
    ("n", "k", "one", "several"),
    [
        (8192, 8192, (8, 2, 1), (8, 4, 1)), (4096, 4096, (8, 1, 1), (8, 2, 1)), (28672, 8192, (4, 7, 1), (4, 7, 2)),
        (14336, 4096, (8, 4, 1), (4, 7, 1)), (2048, 2048, (4, 1, 1), (8, 1, 1)), (4096, 14336, (16, 1, 1), (8, 2, 1)),
        (128256, 4096, None, None), (2048, 512, (4, 1, 1), (2, 1, 1)),
    ],
)  # fmt: skip
def test_the_rules_of_masks(monkeypatch: pytest.MonkeyPatch, n: int, k: int, one: Any, several: Any) -> None:
    """For one token two programs of bytes a multiprocessor at most, or for 4 bits, and for several tokens, one of halves;
    what the tables of an H200 hold is not far from it."""
    device = pretend(monkeypatch, "H100")
    heuristics.forget()
    for bits, width in ((2, 1), (3, 1), (4, 1), (2, 8), (4, 8)):
        found = heuristics.masked_config("grid", bits, n, k, width, device)
        halves = width == 8 or bits == 4
        launch = several if halves else one
        assert (None if found is None else (found.warps, found.tiles, found.teams)) == launch
        if found is not None:
            assert (found.halves, found.bytes, found.shares) == (halves, not halves, 1)
            assert -(-n // (16 * found.tiles * found.teams)) <= (1 if halves else 2) * 132
    assert heuristics.masked_config("grid+s", 4, 8192, 8192, 8, device) is None


def test_shares_are_offered_where_programs_are_few() -> None:
    """132 multiprocessors, at most eight programs each that shared memory keeps apart."""

    def shares(kernel: str, kind: str, n: int, launch: tuple[int, int]) -> list[int]:
        offered = autotune.candidates(kernel, kind, 2, n, 4096, 1)
        return sorted(
            {
                s[3] // launch_config.SHARE
                for s in offered
                if s[:2] == launch and not s[3] & launch_config.HALVES
            }
        )

    assert shares("decode", "grid", 4096, (8, 1)) == [0, 1, 2]  # two programs each
    assert shares("decode", "grid", 132 * 16 * 8, (2, 1)) == [0, 1]
    assert shares("decode", "grid", 132 * 16 * 9, (2, 1)) == [0]
    assert shares("trellis", "mul1", 14336, (16, 7)) == [0, 1, 2]


def test_a_share_is_what_keeps_others_away() -> None:
    gpu = torch.device("cuda")
    for programs, shares, fit in ((128, 1, 1), (128, 2, 2), (256, 1, 2), (512, 1, 4), (500, 2, 8)):
        config = DecodeConfig(warps=4, shares=shares)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(occupancy, "multiprocessors", lambda _: 132)
            patch.setattr(occupancy, "shared_memory", lambda _: 227 << 10)
            room = occupancy.shared_room(programs, config, gpu)
        assert (228 << 10) // (room + 1024) == fit  # a program costs 1024 bytes beside its own
    assert occupancy.shared_room(128, DecodeConfig(warps=4), gpu) == 0


def test_entries_are_multiplied_where_there_are_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A setting of `gathered.py` is taken for residuals that have entries, and on Hopper alone."""
    layout = random_layout(Case(format="grid", bits=3, n=64, k=1024, m=8, density=0.02), "cpu")
    assert layout.sparse is not None and layout.sparse.coo is not None
    without = replace(layout, sparse=replace(layout.sparse, coo=None, block_ptr=None))
    setting = [4, 1, 1, launch_config.GATHERED, 128]
    for name in GPUS:
        table = {
            name: {
                "decode grid+s 3 64x1024 8": setting,
                "decode grid+s 3 64x1024 1": [2, 1, 3, launch_config.STAGED, 0],
            }
        }
        autotune.write_table(tmp_path / "kernels.json", table)
        device = pretend(monkeypatch, name)
        heuristics.forget()
        assert heuristics.decode_config(layout, 8, device).gathered == (name == "H100")
        assert not heuristics.decode_config(without, 8, device).gathered
        with monkeypatch.context() as off:
            off.setenv(heuristics.HOPPER_VARIABLE, "0")
            assert not heuristics.decode_config(layout, 8, device).gathered
        assert not heuristics.decode_config(layout, 9, device).gathered
        one = heuristics.decode_config(layout, 1, device)
        assert one == DecodeConfig(warps=2, unroll=3, ahead=False, staged=True, pdl=name == "H100")
    for width, kinds in (
        (1, {0, launch_config.STAGED, launch_config.BYTES}),
        (8, {0, launch_config.GATHERED}),
        (16, {0}),
    ):
        offered = autotune.candidates("decode", "grid+s", 3, 8192, 8192, width)
        assert {s[3] & ~(launch_config.AHEAD | launch_config.SHARES) for s in offered} == kinds


def test_residuals_are_cold_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy that is timed has them at another place."""
    monkeypatch.setattr(autotune, "copies_needed", lambda stored: 3)
    copies = autotune.copies_of(
        random_layout(Case(format="grid", bits=3, n=32, k=256, m=1, density=0.1), "cpu")
    )
    for place in ("packed_codes", "sparse.columns", "sparse.values", "sparse.slice_ptr"):
        held = [attrgetter(place)(layout) for layout in copies]
        assert len({tensor.data_ptr() for tensor in held}) == 3 and torch.equal(held[0], held[2])


def test_the_table_holds_settings() -> None:
    lengths = launch_config.NUMBERS
    for table in json.loads(heuristics.TABLE.read_text()).values():
        for name, setting in table.items():
            kernel, kind, bits, shape, width = name.split()
            n, k = map(int, shape.split("x"))
            assert heuristics.setting_name(kernel, kind, float(bits), n, k, int(width)) == name
            assert len(setting) == lengths[kernel] and all(isinstance(value, int) for value in setting)
            assert setting[1 if kernel == "hopper" else 0] in (1, 2, 4, 8, 16)  # warps


def test_names_and_widths_are_those_of_the_lookup() -> None:
    plain = random_layout(Case(format="grid", bits=3, n=32, k=256, m=1), "cpu")
    sparse = random_layout(Case(format="codebook", bits=3, n=32, k=256, m=1, density=0.1), "cpu")
    assert (autotune.kind_of(plain), autotune.kind_of(sparse)) == ("grid", "codebook+s")
    trellis = pack_trellis(
        *random_trellis(32, 256, 2, "cpu"), bits=2, code="pair", sparse=random_csr(32, 256, 0.1, False, "cpu")
    )
    assert autotune.kind_of(trellis) == "pair"
    kernels = [autotune.kernel_of(plain, m) for m in (1, 16, 17, 128, 129)]
    assert kernels == ["decode", "decode", "tall", "tall", None]
    assert [autotune.kernel_of(trellis, m) for m in (16, 17)] == ["trellis", None]
    assert [autotune.width_of("decode", m) for m in (1, 2, 8, 9)] == [1, 8, 8, 16]
    assert [autotune.width_of("tall", m) for m in (17, 64, 65)] == [32, 64, 128]
    assert [autotune.width_of("hopper", m) for m in (17, 64, 65, 512)] == [32, 64, 128, 512]


def test_every_candidate_is_a_launch_for_some_shape() -> None:
    for kernel, offered in autotune.CANDIDATES.items():
        tokens = {"tall": (64,), "hopper": (32, 64, 256)}.get(kernel, (1,))
        assert all(
            any(
                autotune.fits(kernel, n, k, m, s)
                for n, k in ((8192, 8192), (28672, 4096), (4096, 14336))
                for m in tokens
            )
            for s in offered
        )


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"H100": 3}',
        "",
        '{"H100": {"decode grid 2 8x8 1": [1, 1, 1, 1, 128, 1]}}',
        '{"H100": {"tall a": "abc"}}',
    ],
)
def test_a_damaged_cache_is_said_and_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    file = tmp_path / "kernels.json"
    file.write_text(text)
    monkeypatch.setenv(heuristics.CACHE_VARIABLE, str(file))
    heuristics.forget()
    whole = heuristics.read_table(heuristics.TABLE)
    assert heuristics.measured("NVIDIA H200") == whole["NVIDIA H200"]
    assert "is damaged and not used" in caplog.text
    heuristics.forget()


@pytest.mark.parametrize(
    ("n", "k", "bits", "launch"),
    [
        (4096, 4096, 2.25, (16, 2, 1)), (4096, 4096, 2, (16, 2, 4)), (14336, 4096, 2.5, (16, 7, 1)),
        (2048, 2048, 2, (16, 1, 2)), (8192, 8192, 2.25, (8, 2, 2)), (28672, 8192, 1.75, (4, 2, 2)),
        (28672, 8192, 2, (8, 2, 2)), (4096, 14336, 2, (16, 2, 2)), (128256, 4096, 3.75, (4, 2, 2)),
        (8192, 2048, 2.25, (8, 2, 1)), (8192, 2048, 2, (16, 4, 1)), (3072, 2048, 2, (16, 2, 2)),
    ],
)  # fmt: skip
def test_the_rule_of_one_token_of_a_trellis(n: int, k: int, bits: float, launch: tuple[int, ...]) -> None:
    """Of `mul1`, what was measured on an H200, or within 6 % of it."""
    found = heuristics.one_token_rule(bits, n, k, 132)
    assert (found.warps, found.tiles, found.unroll) == launch


def test_steps_of_the_rule_are_parts_of_a_section() -> None:
    for four in range(4, 17):
        for n in (512, 2048, 4096, 8192, 14336, 28672, 128256):
            for k in (512, 2048, 4096, 8192, 14336):
                found = heuristics.one_token_rule(four / 4, n, k, 132)
                assert HADAMARD_TILE % (64 * k64_per_unit(four) * found.warps * found.unroll) == 0
