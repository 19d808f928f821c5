"""Launch settings: the rule for GPUs that nobody measured, the table, and the cache before it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from requant_kernels import autotune, pack_trellis, tuning
from requant_kernels.tuning import DecodeConfig, TallConfig

from .cases import Case, random_csr, random_layout, random_trellis

# multiprocessors, capability, shared memory of a program
GPUS = {"A100": (108, (8, 0), 166912), "4090": (128, (8, 9), 101376), "H100": (132, (9, 0), 232448)}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(tuning.CACHE_VARIABLE, str(tmp_path / "kernels.json"))
    tuning.forget()
    yield
    tuning.forget()


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
    decode = tuning._config("grid", 4, n, k, 1, device)
    assert decode.warps in (1, 2, 4, 8, 16) and decode.pdl == (name == "H100")
    wanted = 11 * GPUS[name][0]
    assert -(-n // 16) * decode.warps >= min(wanted, -(-n // 16) * 16) or 2 * decode.warps > -(-k // 256)
    tall = tuning.tall_config("grid", 4, n, k, 64, device)
    assert 1 <= tall.split <= max(1, -(-k // 256)) and (tall.stages + 1) * 64 * 512 <= GPUS[name][2]
    for width in (32, 64, 256):
        hopper = tuning._hopper_config("grid", 4, n, k, width, device)
        assert hopper.tokens == min(width, 128) and 1 <= hopper.split <= max(1, k // 1024)
        programs = -(-n // (16 * hopper.warps)) * -(-width // hopper.tokens) * hopper.split
        assert hopper.split == 1 or programs <= 1.5 * GPUS[name][0] * (
            16 // hopper.warps if width <= 64 else 1
        )


def test_only_hopper_has_the_kernel_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = random_layout(Case(kind="grid", bits=8, n=32, k=256, m=1), "cpu")
    memory = random_layout(Case(kind="codebook", bits=5, n=32, k=256, m=1), "cpu")
    sparse = random_csr(32, 256, 0.1, False, "cpu")
    trellis = pack_trellis(*random_trellis(32, 256, 2.25, "cpu"), bits=2.25, code="mul1", sparse=sparse)
    for name in GPUS:
        device = pretend(monkeypatch, name)
        tuning.forget()
        monkeypatch.delenv(tuning.HOPPER_VARIABLE, raising=False)
        assert tuning.runs_on_hopper(grid, device) == (name == "H100")
        assert tuning.runs_on_hopper(trellis, device) == (name == "H100")
        assert not tuning.runs_on_hopper(memory, device)  # its levels are looked up in memory
        monkeypatch.setenv(tuning.HOPPER_VARIABLE, "0")
        assert not tuning.runs_on_hopper(grid, device)


def test_the_cache_comes_before_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = pretend(monkeypatch, "H100")
    layout = random_layout(Case(kind="grid", bits=2, n=64, k=1024, m=1), "cpu")
    rule, several = (tuning.decode_config(layout, tokens, device) for tokens in (1, 3))
    table = {"H100": {"decode grid 2 64x1024 1": [2, 2, 1, 0, 96], "tall grid 2 64x1024 32": [4, 2, 3]}}
    autotune.write_table(tmp_path / "kernels.json", table)
    assert json.loads((tmp_path / "kernels.json").read_text()) == table
    assert tuning.decode_config(layout, 1, device) == rule  # read once in a process
    tuning.forget()
    assert tuning.decode_config(layout, 1, device) == DecodeConfig(
        warps=2, tiles=2, ahead=False, pdl=True, max_registers=96
    )
    assert tuning.decode_config(layout, 3, device) == several  # another width
    assert tuning.tall_config("grid", 2, 64, 1024, 32, device) == TallConfig(warps=4, split=2, stages=3)


def test_entries_are_multiplied_where_there_are_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A setting of `gathered.py` is taken for residuals that have entries, and on Hopper alone."""
    layout = random_layout(Case(kind="grid", bits=3, n=64, k=1024, m=8, density=0.02), "cpu")
    assert layout.sparse is not None and layout.sparse.entries is not None
    without = replace(layout, sparse=replace(layout.sparse, entries=None, bounds=None))
    setting = [4, 1, 1, tuning.GATHERED, 128]
    for name in GPUS:
        table = {
            name: {
                "decode grid+s 3 64x1024 8": setting,
                "decode grid+s 3 64x1024 1": [2, 1, 3, tuning.STAGED, 0],
            }
        }
        autotune.write_table(tmp_path / "kernels.json", table)
        device = pretend(monkeypatch, name)
        tuning.forget()
        assert tuning.decode_config(layout, 8, device).gathered == (name == "H100")
        assert not tuning.decode_config(without, 8, device).gathered
        with monkeypatch.context() as off:
            off.setenv(tuning.HOPPER_VARIABLE, "0")
            assert not tuning.decode_config(layout, 8, device).gathered
        assert not tuning.decode_config(layout, 9, device).gathered
        one = tuning.decode_config(layout, 1, device)
        assert one == DecodeConfig(warps=2, unroll=3, ahead=False, staged=True, pdl=name == "H100")
    copied = tuning.COPIED | tuning.STAGED
    for width, kinds in ((1, {0, tuning.STAGED, copied}), (8, {0, tuning.GATHERED}), (16, {0})):
        offered = autotune.candidates("decode", "grid+s", 3, 8192, 8192, width)
        assert {s[3] & ~tuning.AHEAD for s in offered} == kinds
    for kind, width in (("codebook", 1), ("codebook+s", 1), ("grid", 8)):  # copied words: one token of a grid
        assert not any(
            s[3] & tuning.COPIED for s in autotune.candidates("decode", kind, 3, 8192, 8192, width)
        )


def test_the_table_holds_settings() -> None:
    lengths = tuning.NUMBERS
    for table in json.loads(tuning.TABLE.read_text()).values():
        for name, setting in table.items():
            kernel, kind, bits, shape, width = name.split()
            n, k = map(int, shape.split("x"))
            assert tuning.setting_name(kernel, kind, float(bits), n, k, int(width)) == name
            assert len(setting) == lengths[kernel] and all(isinstance(value, int) for value in setting)
            assert setting[1 if kernel == "hopper" else 0] in (1, 2, 4, 8, 16)  # warps


def test_names_and_widths_are_those_of_the_lookup() -> None:
    plain = random_layout(Case(kind="grid", bits=3, n=32, k=256, m=1), "cpu")
    sparse = random_layout(Case(kind="codebook", bits=3, n=32, k=256, m=1, density=0.1), "cpu")
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
    for kernel, settings in autotune.CANDIDATES.items():
        tokens = {"tall": (64,), "hopper": (32, 64, 256)}.get(kernel, (1,))
        assert all(
            any(
                autotune.fits(kernel, n, k, m, s)
                for n, k in ((8192, 8192), (28672, 4096), (4096, 14336))
                for m in tokens
            )
            for s in settings
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
    monkeypatch.setenv(tuning.CACHE_VARIABLE, str(file))
    tuning.forget()
    whole = tuning.read_table(tuning.TABLE)
    assert tuning.measured("NVIDIA H200") == whole["NVIDIA H200"]
    assert "is damaged and not used" in caplog.text
    tuning.forget()
