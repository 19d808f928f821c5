"""Which kernel multiplies, and how it is launched: the order of kernels, tables and cache, and the rules."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from requant_kernels import Layout, TrellisLayout, dispatch, launch_tables, pack_trellis
from requant_kernels.autotune import kernels_to_tune
from requant_kernels.common import occupancy
from requant_kernels.common.device import SM90_VARIABLE, supports_pdl
from requant_kernels.launch_config import LaunchConfig, Shape, m_bucket
from requant_kernels.launch_tables import read_table, write_table
from requant_kernels.registry import LAUNCHES, TRELLIS_KERNELS, module_of
from requant_kernels.scalar import gemm_launch, gemm_sm90_launch, gemv_launch
from requant_kernels.scalar.gemm_launch import GemmConfig
from requant_kernels.scalar.gemv_fp16_mma_launch import fp16_mma
from requant_kernels.scalar.gemv_int8_mma_launch import Int8MmaConfig, int8_mma
from requant_kernels.scalar.gemv_launch import GemvConfig
from requant_kernels.scalar.gemv_sparse_mma_launch import SparseMmaConfig
from requant_kernels.trellis import gemv
from requant_kernels.trellis import gemv_launch as trellis_gemv_launch
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.gemv_kernel import gemv_constants
from requant_kernels.trellis.layout import k64_per_unit
from requant_kernels.trellis.operands import common_form

from .cases import Case, random_csr, random_layout, random_trellis

# SMs, capability, shared memory of a CTA
GPUS = {"A100": (108, (8, 0), 166912), "4090": (128, (8, 9), 101376), "H100": (132, (9, 0), 232448)}
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(launch_tables.CACHE_VARIABLE, str(tmp_path / "kernels.json"))
    monkeypatch.delenv(SM90_VARIABLE, raising=False)
    dispatch.forget()
    yield
    dispatch.forget()


def pretend(monkeypatch: pytest.MonkeyPatch, name: str) -> torch.device:
    """A device that has the sizes of a GPU."""
    num_sms, capability, smem_bytes = GPUS[name]
    properties = SimpleNamespace(
        name=name, multi_processor_count=num_sms, shared_memory_per_block_optin=smem_bytes
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    dispatch.forget()
    return CUDA


def write_cache(tmp_path: Path, device: str, rows: dict[Shape, dict[str, LaunchConfig]]) -> None:
    write_table(tmp_path / "kernels.json", {device: rows})
    dispatch.forget()


def chosen(layout: Layout | TrellisLayout, num_tokens: int) -> tuple[str, Any]:
    kernel, config = dispatch.dispatch(layout, num_tokens, CUDA)
    return kernel.name, config


def grid(bits: int = 2, **given: Any) -> Layout:
    return random_layout(Case(format="grid", bits=bits, **({"n": 64, "k": 1024, "m": 1} | given)), "cpu")


def test_the_tuner_tries_the_kernel_that_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper the GEMM takes a trellis from nine tokens on."""
    device = pretend(monkeypatch, "H100")
    layout = pack_trellis(*random_trellis(512, 4096, 2, "cpu"), bits=2, code="mul1")
    for tokens in (1, 8, 9, 12, 16, 64):
        assert chosen(layout, tokens)[0] in kernels_to_tune(layout, tokens, device)
    assert "trellis_gemv" not in kernels_to_tune(layout, 12, device)


def test_codes_that_are_not_aligned_have_a_choice_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that copy 16 bytes at a time take no view that begins elsewhere, whatever was chosen before."""
    pretend(monkeypatch, "H100")
    layout = grid(k=4096, n=4096)
    words = torch.empty(layout.packed_codes.numel() + 1, dtype=layout.packed_codes.dtype)
    words[1:] = layout.packed_codes.flatten()
    shifted = replace(layout, packed_codes=words[1:].view_as(layout.packed_codes))
    names = [chosen(each, 1)[0] for each in (layout, shifted, layout)]
    assert names == ["int8_mma", "gemv", "int8_mma"]


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize(("n", "k"), [(28672, 8192), (4096, 4096), (2048, 2048), (16, 100)])
def test_the_rules_fill_every_gpu(monkeypatch: pytest.MonkeyPatch, name: str, n: int, k: int) -> None:
    device, (num_sms, _, smem_bytes) = pretend(monkeypatch, name), GPUS[name]
    gemv = gemv_launch.gemv(Shape("grid", 4, n, k, 1), device)
    assert gemv.num_warps in (1, 2, 4, 8, 16) and supports_pdl(device) == (name == "H100")
    tiles = -(-n // 16)
    assert tiles * gemv.num_warps >= min(11 * num_sms, tiles * 16) or 2 * gemv.num_warps > -(-k // 256)
    gemm = gemm_launch.gemm(Shape("grid", 4, n, k, 64), device)
    assert 1 <= gemm.split_k <= max(1, -(-k // 256)) and (gemm.num_stages + 1) * 64 * 512 <= smem_bytes
    for tokens in (32, 64, 256):
        sm90 = gemm_sm90_launch.gemm_sm90(Shape("grid", 4, n, k, tokens), device)
        assert sm90.tokens_per_cta == min(tokens, 128) and 1 <= sm90.split_k <= max(1, k // 1024)
        ctas = -(-n // (16 * sm90.num_warps)) * -(-tokens // sm90.tokens_per_cta) * sm90.split_k
        assert sm90.split_k == 1 or ctas <= 1.5 * num_sms * (16 // sm90.num_warps if tokens <= 64 else 1)


@pytest.mark.parametrize("k", [896, 1536, 2048, 2304, 2560, 3072, 3584, 4096, 5120, 8960, 9728, 14336])
def test_trellis_steps_divide_a_hadamard_tile(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """Widths of models that people have; where a step does not divide the tile, the kernel refuses the matrix."""
    device = pretend(monkeypatch, "H100")
    for code, quarters, n, tokens in itertools.product(
        ("mul1", "pair"), range(4, 17), (256, 1024, 3072, 4096, 8192, 28672), (1, 8, 16)
    ):
        units = -(-k // (64 * k64_per_unit(quarters)))
        config = trellis_gemv_launch.trellis_gemv(Shape(code, quarters / 4, n, k, tokens), device)
        gemv_constants(code, quarters, 1, config, tokens, units)


def test_the_kernel_of_every_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    eight, four = grid(8, k=256), random_layout(Case(format="codebook", bits=4, n=32, k=256, m=1), "cpu")
    from_memory = random_layout(Case(format="codebook", bits=5, n=32, k=256, m=1), "cpu")
    trellis = pack_trellis(
        *random_trellis(32, 256, 2.25, "cpu"), bits=2.25, code="mul1", sparse=random_csr(32, 256, 0.1, False, "cpu")
    )  # fmt: skip
    for name in GPUS:
        pretend(monkeypatch, name)
        for sm90 in (True, False):
            monkeypatch.setenv(SM90_VARIABLE, "1" if sm90 else "0")
            dispatch.forget()
            sm90 = sm90 and name == "H100"
            names = {m: chosen(eight, m)[0] for m in (1, 16, 17, 128, 129, 512, 513)}
            many = "gemm_sm90" if sm90 else None
            assert names == {
                1: "gemv", 16: "gemv", 17: many or "gemm", 128: many or "gemm", 129: many or "dense", 512: many or "dense",
                513: "dense",
            }  # fmt: skip
            assert chosen(four, 17)[0] == (many or "gemm") and chosen(from_memory, 17)[0] == "gemm"
            names = [chosen(trellis, m)[0] for m in (1, 8, 9, 16, 17, 64, 65, 1025)]
            many = ("trellis_gemm_sm90", "trellis_gemm_int8") if sm90 else ("trellis_dense",) * 2
            few = many[0] if sm90 else "trellis_gemv"
            assert names == ["trellis_gemv"] * 2 + [few] * 2 + [many[0]] * 2 + [many[1]] * 2
            for exact in (
                replace(trellis, bits=3.5), replace(trellis, rotates_output=False), replace(trellis, input_scales=None),
                pack_trellis(*random_trellis(32, 16 * 67, 2.25, "cpu"), bits=2.25, code="mul1"),  # 67 blocks of a transform
            ):  # fmt: skip
                names = [chosen(exact, m)[0] for m in (17, 1024, 1025)]
                assert names == [many[0]] * 2 + ["trellis_dense"]


def test_int8_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "H100")
    layout = pack_trellis(*random_trellis(32, 256, 2, "cpu"), bits=2, code="pair")
    assert chosen(layout, 100)[0] == chosen(layout, 2000)[0] == "trellis_gemm_int8"
    monkeypatch.setenv("REQUANT_INT8_ACTIVATIONS", "0")
    dispatch.forget()
    assert (chosen(layout, 100)[0], chosen(layout, 2000)[0]) == ("trellis_gemm_sm90", "trellis_dense")


def test_who_reads_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to four tokens, whose bytes fit in the columns of one MMA; above, where codes are coarser than 8 bits."""

    def reads_bytes(layout: TrellisLayout) -> list[bool]:
        return [gemv.activation_form(layout, m).int8 for m in (1, 4, 5, 16)]

    coarse = pack_trellis(*random_trellis(32, 256, 3.25, "cpu"), bits=3.25, code="mul1")
    assert reads_bytes(coarse) == [True] * 4
    for exact in (
        replace(coarse, bits=3.5), replace(coarse, rotates_output=False), replace(coarse, input_scales=None),
        pack_trellis(*random_trellis(32, 16 * 67, 2, "cpu"), bits=2, code="mul1"),
    ):  # fmt: skip
        assert reads_bytes(exact) == [True, True, False, False]
    other = pack_trellis(*random_trellis(32, 256, 2, "cpu"), bits=2, code="3inst")
    assert reads_bytes(other) == [False] * 4
    monkeypatch.setenv("REQUANT_INT8_ACTIVATIONS", "0")
    assert reads_bytes(coarse) == [True, True, False, False]


@pytest.mark.parametrize("code", ["mul1", "pair"])
def test_matrices_of_more_bits_read_the_same_activations(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """q, k and v have bits of their own, some multiplied in int8 and some not, and share what a norm wrote. From five to 16
    they read what suits all."""
    pretend(monkeypatch, "H100")
    coarse, fine = (
        pack_trellis(*random_trellis(32, 256, bits, "cpu"), bits=bits, code=code) for bits in (2, 3.5)
    )
    for m in (4, 64, 65, 128, 129, 1024, 1025):
        forms = []
        for layout in (coarse, fine):
            name = chosen(layout, m)[0]
            module = module_of(next(k for k in TRELLIS_KERNELS if k.name == name))
            forms.append(module.activation_form(layout, m))
        assert forms[0] == forms[1], m
    for m in (5, 16):
        own, other = (gemv.activation_form(layout, m) for layout in (coarse, fine))
        assert own.int8 and not other.int8
        assert common_form([own, other]) == common_form([other, own]) == other
        assert common_form([own, own]) == own


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bits", [2, 3.5])
@pytest.mark.parametrize("rows", [32, 528])
@pytest.mark.parametrize("gpu", ["H100", "A100"])
def test_between_bounds_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, code: str, bits: float, rows: int, gpu: str
) -> None:
    """Who rotates activations for one number of tokens may do so for all up to the next bound."""
    pretend(monkeypatch, gpu)
    layout = pack_trellis(*random_trellis(rows, 256, bits, "cpu"), bits=bits, code=code)
    bounds = (0, *dispatch.TRELLIS_BOUNDS, 1 << 15)
    for first, last in itertools.pairwise(bounds):
        found = set()
        for m in {first + 1, first + 2, (first + last) // 2, last - 1, last}:
            name = chosen(layout, m)[0]
            module = module_of(next(k for k in TRELLIS_KERNELS if k.name == name))
            found.add((name, module.activation_form(layout, m)))
        assert len(found) == 1, (first, last)


def test_every_layout_has_a_kernel_without_a_gpu() -> None:
    for layout in (grid(), pack_trellis(*random_trellis(16, 64, 2, "cpu"), bits=2, code="pair")):
        for m in (1, 17, 600):
            kernel, config = dispatch.dispatch(layout, m, torch.device("cpu"))
            assert kernel.name == "torch_fallback" and config is None


def test_the_cache_comes_before_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, "A100")
    layout = grid()
    rule, several = (chosen(layout, m) for m in (1, 3))
    one, many = GemvConfig(num_warps=2, tiles_per_cta=2, max_registers=96), GemmConfig(num_warps=4, split_k=2)
    rows = {Shape("grid", 2, 64, 1024, 1): {"gemv": one}, Shape("grid", 2, 64, 1024, 32): {"gemm": many}}
    write_table(tmp_path / "kernels.json", {"A100": rows})
    assert read_table(tmp_path / "kernels.json") == {"A100": rows}
    assert chosen(layout, 1) == rule  # read once in a process
    dispatch.forget()
    assert chosen(layout, 1) == ("gemv", one) and chosen(layout, 20) == ("gemm", many)
    assert chosen(layout, 3) == several  # another number of tokens


def test_a_row_of_a_tensor_core_kernel_is_for_what_it_supports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain, zeros, residuals, odd, row = (
        grid(), grid(zero_points=True), grid(density=0.01), grid(k=1000), grid(zero_points=True, group_size=1024),
    )  # fmt: skip
    int8 = Int8MmaConfig(num_warps=8, tiles_per_cta=2, max_ctas_per_sm=1)
    gemv = GemvConfig(num_warps=2, num_stages=3, prefetch=False, max_registers=64)
    measured = GemvConfig(num_warps=4, prefetch=False, max_registers=128)
    for name in GPUS:
        write_cache(tmp_path, name, {
            Shape("grid", 2, 64, 1024, 1): {"int8_mma": int8, "gemv": gemv},
            Shape("grid+s", 2, 64, 1024, 1): {"gemv": measured},
        })  # fmt: skip
        pretend(monkeypatch, name)
        for layout in (plain, zeros):
            assert chosen(layout, 1) == (("int8_mma", int8) if name == "H100" else ("gemv", gemv))
            assert chosen(layout, 2)[0] == ("fp16_mma" if name == "H100" else "gemv")  # by the rule
        assert chosen(row, 1) == ("gemv", gemv)  # its zero points are one a row
        assert chosen(residuals, 1) == ("gemv", measured)  # measured, and int8_mma was behind
        assert chosen(odd, 1)[0] == "gemv"
    too_large = {"int8_mma": Int8MmaConfig(num_warps=8, tiles_per_cta=40), "gemv": gemv}
    write_cache(tmp_path, "H100", {Shape("grid", 2, 64, 1024, 1): too_large})
    assert chosen(plain, 1) == ("gemv", gemv)


def test_sparse_mma_is_taken_where_it_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For residuals that have their second order, on Hopper alone."""
    layout = grid(3, density=0.02)
    assert layout.sparse is not None and layout.sparse.coo is not None
    without = replace(layout, sparse=replace(layout.sparse, coo=None, block_ptr=None))
    sparse, staged = SparseMmaConfig(num_warps=4), GemvConfig(num_warps=2, stage_activations=True)
    for name in GPUS:
        rows: dict[Shape, dict[str, LaunchConfig]] = {
            Shape("grid+s", 3, 64, 1024, 8): {"sparse_mma": sparse},
            Shape("grid+s", 3, 64, 1024, 1): {"gemv": staged},
        }
        write_cache(tmp_path, name, rows)
        pretend(monkeypatch, name)
        assert (chosen(layout, 8) == ("sparse_mma", sparse)) == (name == "H100")
        assert chosen(without, 8)[0] == chosen(layout, 9)[0] == "gemv"
        assert chosen(layout, 1) == ("gemv", staged)
        monkeypatch.setenv(SM90_VARIABLE, "0")
        dispatch.forget()
        assert chosen(layout, 8)[0] == "gemv"
        monkeypatch.delenv(SM90_VARIABLE)


@pytest.mark.parametrize(
    ("n", "k", "one", "several"),
    [
        (8192, 8192, (8, 2, 1), (8, 4, 1)), (4096, 4096, (8, 1, 1), (8, 2, 1)), (28672, 8192, (4, 7, 1), (4, 7, 2)),
        (14336, 4096, (8, 4, 1), (4, 7, 1)), (2048, 2048, (4, 1, 1), (8, 1, 1)), (4096, 14336, (16, 1, 1), (8, 2, 1)),
        (128256, 4096, None, None), (2048, 512, (4, 1, 1), (2, 1, 1)),
    ],
)  # fmt: skip
def test_the_rules_of_int8_and_fp16_mma(
    monkeypatch: pytest.MonkeyPatch, n: int, k: int, one: Any, several: Any
) -> None:
    """For one token int8 with two CTAs an SM at most; for 4 bits, and for several tokens, fp16 with one: warps, tiles and
    warp groups. What the table of an H200 holds is not far from it."""
    device = pretend(monkeypatch, "H100")
    for bits, tokens in ((2, 1), (3, 1), (4, 1), (2, 8), (4, 8)):
        shape = Shape("grid", bits, n, k, tokens)
        int8, fp16 = int8_mma(shape, device), fp16_mma(shape, device)
        if tokens == 1 and bits < 4:
            assert fp16 is None and (int8 is None) == (one is None)
            if int8 is not None:
                ctas = -(-n // (16 * int8.tiles_per_cta))
                assert (int8.num_warps, int8.tiles_per_cta, 1) == one and ctas <= 2 * 132
                assert int8.max_ctas_per_sm == -(-ctas // 132)
        else:
            assert int8 is None and (fp16 is None) == (several is None)
            if fp16 is not None:
                ctas = -(-n // (16 * fp16.tiles_per_warp_group * fp16.warp_groups))
                assert (fp16.num_warps, fp16.tiles_per_warp_group, fp16.warp_groups) == several
                assert fp16.max_ctas_per_sm == 1 and ctas <= 132
    assert fp16_mma(Shape("grid+s", 4, 8192, 8192, 8), device) is None


def test_a_cap_keeps_more_ctas_away(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pretend(monkeypatch, "H100")
    for cap in (1, 2, 3, 4, 8):
        padded = occupancy.padded_smem_bytes(cap, device)
        assert (228 << 10) // (padded + 1024) == cap  # a CTA costs 1024 bytes beside its own
    assert occupancy.padded_smem_bytes(None, device) == 0
    assert occupancy.padded_smem_bytes(1, torch.device("cpu")) == 0


def test_ctas_apart_leave_memory_for_other_launches_unless_they_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = pretend(monkeypatch, "H100")
    for ctas, share in ((34, 1), (132, 1), (133, 2), (512, 4)):
        padded = occupancy.apart_smem_bytes(ctas, device) + 1024
        assert (228 << 10) // padded == share and (228 << 10) - share * padded > (227 << 10) // (
            share + 1
        ) - 1024 * share
    for few in (1, 33):
        assert (228 << 10) - (occupancy.apart_smem_bytes(few, device) + 1024) <= 1024
    assert occupancy.apart_smem_bytes(4 * 132 + 1, device) == 0
    assert occupancy.apart_smem_bytes(1, torch.device("cpu")) == 0


def test_the_table_reads_back_as_it_is(tmp_path: Path) -> None:
    table = read_table(launch_tables.TABLE)
    write_table(tmp_path / "table.json", table)
    assert (tmp_path / "table.json").read_text() == launch_tables.TABLE.read_text()
    for shape, configs in (pair for rows in table.values() for pair in rows.items()):
        assert shape.m_bucket == m_bucket(shape.m_bucket) and all(
            type(c) is LAUNCHES[n].config for n, c in configs.items()
        )
        assert len(configs.keys() & {"int8_mma", "fp16_mma"}) <= 1  # else the order of kernels would choose


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"H100": 3}', "", '{"H100": {"decode grid 2 8x8 1": [1, 1, 1, 1, 128]}}', '{"H100": [3]}',
        '{"H100": [{"format": "grid", "bits": 2, "n": 8, "k": 8, "m_bucket": 1, "kernel": "gemv", "warps": 1}]}',
        '{"H100": [{"format": "grid", "bits": 2, "n": 8, "k": 8, "m_bucket": 1, "kernel": "gemv", "num_warps": "1"}]}',
        '{"H100": [{"format": "grid", "bits": 2, "n": 8, "k": 8, "m_bucket": 1, "kernel": "tall", "num_warps": 1}]}',
    ],
)  # fmt: skip
def test_a_damaged_or_old_cache_is_said_once_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / "kernels.json").write_text(text)
    for _ in range(2):
        assert launch_tables.measured("NVIDIA H200") == read_table(launch_tables.TABLE)["NVIDIA H200"]
    assert len(caplog.records) == 1 and "not used" in caplog.text


@pytest.mark.parametrize("name", GPUS)
def test_several_trellis_matrices_of_few_tokens_are_one_launch(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pretend(monkeypatch, name)
    layouts = [
        pack_trellis(*random_trellis(n, 256, bits, "cpu"), bits=bits, code="mul1")
        for n, bits in ((48, 2), (16, 2.25))
    ]
    most = 8 if name == "H100" else 16
    for tokens in (1, 5, most):
        configs = dispatch.dispatch_group(layouts, tokens, CUDA)
        assert configs is not None and len(configs) == 2
        assert dispatch.dispatch_group(layouts[:1], tokens, CUDA) is None
        assert dispatch.dispatch_group(layouts, tokens, torch.device("cpu")) is None
    assert dispatch.dispatch_group(layouts, most + 1, CUDA) is None
