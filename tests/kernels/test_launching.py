"""What `launch` remembers a kernel by is never coarser than what Triton chooses it by."""

import itertools
import json
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from requant_kernels.common.launch import _tag, declared, with_smem_bytes  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402


def declaration(size: int) -> str:
    return f"{{ .shared .align 128 .b8 buffer[{size}];\n mov.u32 $0, buffer; }}"


def arguments():
    buffer = torch.empty(64, dtype=torch.uint8)
    for dtype, offset in itertools.product(
        (torch.float16, torch.bfloat16, torch.int32, torch.float32), (0, 8, 16)
    ):
        yield buffer[offset : offset + 16].view(dtype)
    yield from (0, 1, 2, 3, 15, 16, 17, 32, 4096, 4097, 2**31 - 1, 2**31, 2**31 + 16, 2**40, -16, -1)
    yield None
    yield from ((1, 16), (2, 32), (2, 33), (buffer[:16], None), (buffer[16:32], None), (buffer[8:24], None))


def test_equal_tags_mean_an_equal_specialization() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import native_specialize_impl

    def triton_sees(value):
        return native_specialize_impl(type(CUDABackend(GPUTarget("cuda", 90, 32))), value, False, True, True)

    by_tag: dict = {}
    for value in arguments():
        by_tag.setdefault(_tag(value), []).append(triton_sees(value))
    assert len(by_tag) > 12
    for tag, seen in by_tag.items():
        assert all(one == seen[0] for one in seen), (tag, seen)


class Compiled:
    """In place of a compiled kernel: what it is launched with directly has to be what Triton would have bound."""

    def __init__(self, bound: dict) -> None:
        self.bound = bound

    def __getitem__(self, grid: tuple) -> object:
        assert len(grid) == 3

        def launched(*args) -> None:
            LAUNCHED.append(args)
            assert len(args) == len(self.bound)
            for given, (name, first) in zip(args, self.bound.items(), strict=True):
                assert alike(given, first), name

        return launched


def alike(given: Any, first: Any) -> bool:
    """The same type, and the same value of what is not a tensor."""
    if isinstance(given, tuple) and isinstance(first, tuple) and len(given) == len(first):
        return all(alike(*pair) for pair in zip(given, first, strict=True))
    if isinstance(given, torch.Tensor) or type(given).__name__ == "TensorDescriptor":
        return type(given) is type(first)
    return type(given) is type(first) and given == first


def bound(kernel: JITFunction, args: tuple, kwargs: dict) -> dict[str, Any]:
    """A launch's arguments by name, without its options."""
    from requant_kernels.common.launch import OPTIONS

    own = {name: value for name, value in kwargs.items() if name not in OPTIONS}
    found = kernel.signature.bind(*args, **own)
    found.apply_defaults()
    return dict(found.arguments)


LAUNCHED: list[tuple] = []


def every_way() -> None:
    """Products by every kernel whose launches are remembered, on the CPU, where nothing runs."""
    from requant_kernels import pack_trellis
    from requant_kernels.scalar.gemm_sm90 import gemm_sm90
    from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config
    from requant_kernels.scalar.gemv import gemv
    from requant_kernels.scalar.gemv_launch import GemvConfig
    from requant_kernels.trellis import dequantize as trellis_dequantize
    from requant_kernels.trellis import gemm_sm90 as trellis_gemm_sm90
    from requant_kernels.trellis import gemv as trellis_gemv
    from requant_kernels.trellis.gemm_int8 import gemm_int8
    from requant_kernels.trellis.gemv_group import gemv_group
    from requant_kernels.trellis.gemv_launch import TrellisGemvConfig

    from .cases import Case, random_layout, random_trellis

    for case in (
        Case(format="grid", bits=3, n=48, k=512, m=1, zero_points=True),
        Case(format="grid", bits=2, n=48, k=512, m=8, density=0.05, column_scales=True),
        Case(format="codebook", bits=3, n=48, k=512, m=16, density=0.05),
    ):
        layout = random_layout(case, "cpu")
        for m in (1, case.m):
            for staged in (False, True):
                config = GemvConfig(
                    num_warps=2, stage_activations=staged, max_registers=128 if m == 1 else None
                )
                gemv(torch.randn(m, case.k).half(), layout, None, config, asm=True)
        for split in (1, 2):
            x = torch.randn(40, case.k).half()
            gemm_sm90(x, layout, None, GemmSm90Config(prefetch_at=1, split_k=split))
    for code, bits, k in (("mul1", 2.25, 512), ("pair", 2, 512), ("3inst", 3, 512), ("mul1", 2, 80)):
        layout = pack_trellis(*random_trellis(48, k, bits, "cpu"), bits=bits, code=code)
        for m in (1, 8):
            config = TrellisGemvConfig(num_warps=16, tiles_per_cta=1, units_per_step=1)
            trellis_gemv.gemv(torch.randn(m, k).half(), layout, None, config)
            own = trellis_gemv.activation_form(layout, m).empty(m, torch.device("cpu"))
            gemv_group([own, own], [layout, layout], [config, config])
        for split in (1, 2):
            config = GemmSm90Config(split_k=split)
            trellis_gemm_sm90.gemm_sm90(torch.randn(40, k).half(), layout, None, config)
            if code != "3inst":
                gemm_int8(torch.randn(100, k).half(), layout, None, config)
        trellis_dequantize.dequantize(layout, asm=True)


def test_what_is_launched_directly_is_what_triton_would_bind(monkeypatch) -> None:
    from requant_kernels.common import launch
    from requant_kernels.trellis import gemv as trellis_gemv

    def run(self, *args, grid, warmup, **kwargs):
        return Compiled(bound(self, args, kwargs))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_chosen", {})
    monkeypatch.setattr(trellis_gemv, "num_sms", lambda device: 132)
    every_way()
    known, before = len(launch._chosen), len(LAUNCHED)
    every_way()
    assert len(launch._chosen) == known >= 20, "the second time every launch is known"
    assert len(LAUNCHED) - before > known
    assert len({kernel for kernel, *_ in launch._chosen}) >= 8


def other_ways() -> None:
    """Launches that are not remembered, or not in `every_way`."""
    from requant_kernels import pack_trellis
    from requant_kernels.scalar import dequantize, embedding
    from requant_kernels.scalar.gemm import gemm
    from requant_kernels.scalar.gemm_launch import GemmConfig
    from requant_kernels.trellis import lookup, portable

    from .cases import Case, random_layout, random_trellis

    for case in (
        Case(format="grid", bits=3, n=48, k=512, m=20, zero_points=True, density=0.05),
        Case(format="codebook", bits=3, n=48, k=512, m=20),
    ):
        layout = random_layout(case, "cpu")
        gemm(torch.randn(case.m, case.k).half(), layout, None, GemmConfig(), asm=True)
        dequantize.dequantize(layout, torch.float16, asm=True)
        if case.format == "grid":
            embedding.lookup(torch.arange(4), layout, torch.float16)
    trellis = pack_trellis(*random_trellis(48, 512, 2, "cpu"), bits=2, code="mul1")
    lookup.lookup(torch.arange(4), [trellis], torch.float16)
    portable.portable_gemv(torch.randn(2, 512).half(), trellis)
    portable.portable_dequantize(trellis, torch.empty(48, 512, dtype=torch.float16))


def test_hooks_are_not_told_of_constants_that_json_cannot_hold(monkeypatch) -> None:
    """Triton writes a kernel's constants as JSON before it calls a hook, such as vLLM's on compilations, and raises."""
    from requant_kernels.common import launch
    from requant_kernels.trellis import gemv as trellis_gemv
    from triton import knobs

    kernels = []

    def run(self, *args, grid, warmup, **kwargs):
        kernels.append(self.fn.__name__)
        found = bound(self, args, kwargs)
        if knobs.runtime.jit_cache_hook is not None or knobs.runtime.jit_post_compile_hook is not None:
            json.dumps([found[parameter.name] for parameter in self.params if parameter.is_constexpr])
        return Compiled(found)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_chosen", {})
    monkeypatch.setattr(trellis_gemv, "num_sms", lambda device: 132)
    hook = lambda **compiled: None  # noqa: E731
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(knobs.runtime, name, hook)
    every_way()
    other_ways()
    assert len(set(kernels)) >= 14
    assert knobs.runtime.jit_cache_hook is hook and knobs.runtime.jit_post_compile_hook is hook


def takes_a_tensor(x_ptr, n, absent, BLOCK):
    """What a kernel is made of."""


class Started(CompiledKernel):
    """A compiled kernel that notes how it is started."""

    def __init__(self) -> None:
        self.started: list[tuple] = []

    function, packed_metadata = 7, (4, 1)

    @property
    def run(self) -> object:
        return lambda *args: self.started.append(args)

    def __getitem__(self, grid: tuple) -> object:
        return lambda *args: self.started.append((grid, *args))


def test_known_kernels_are_started_with_addresses(monkeypatch) -> None:
    """Without Triton's hooks, unless there are any."""
    from requant_kernels.common import launch
    from triton import knobs

    compiled, x, constants = Started(), torch.zeros(16), {"BLOCK": 8, "num_warps": 4}
    kernel = JITFunction(takes_a_tensor)
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **options: compiled)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    monkeypatch.setattr(launch, "_chosen", {})
    for _ in range(2):
        launch.launch(kernel, (3, 2, 1), (x, 5, None), constants)
    assert compiled.started == [(3, 2, 1, 99, 7, (4, 1), None, None, None, x.data_ptr(), 5, None, 8)]
    hook = lambda metadata: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch.launch(kernel, (3, 2, 1), (x, 5, None), constants)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert compiled.started[1][0] == (3, 2, 1) and compiled.started[1][1] is x


def test_shared_memory_that_a_text_declares() -> None:
    assert declared(".extern .shared .align 16 .b8 global_smem[];\n" + declaration(5120)) == 5120
    assert declared(".shared .b32 most[16];\n.shared .align 16 .b32 values[96];") == 4 * 112


def test_a_launch_takes_more_shared_memory_than_is_declared() -> None:
    """A compiled kernel of Triton's, as far as its copy is made of it."""
    from triton.backends.compiler import GPUTarget

    metadata = namedtuple("Metadata", "num_warps num_ctas shared target")(
        4, 1, 512, GPUTarget("cuda", 90, 32)
    )
    compiled = SimpleNamespace(
        metadata=metadata,
        packed_metadata=(4, 1, 512),
        module=1,
        function=2,
        _run=3,
        asm={"ptx": declaration(4096)},
    )
    padded = with_smem_bytes(compiled, 100_000)
    assert padded.metadata.shared == 95_904 and padded.packed_metadata == (4, 1, 95_904)
    assert padded.module is None and padded.function is None and padded._run is None
    assert compiled.metadata is metadata and compiled.module == 1
    assert with_smem_bytes(compiled, 4608) is compiled


def test_a_triton_that_keeps_kernels_otherwise_costs_a_warning(caplog) -> None:
    for compiled in (SimpleNamespace(asm={}), SimpleNamespace(asm={"ptx": ""}, metadata={"shared": 1})):
        assert with_smem_bytes(compiled, 100_000) is compiled
    assert len(caplog.records) == 2 and "slower for it" in caplog.text
    with_smem_bytes(SimpleNamespace(asm={}), 100_000)
    assert len(caplog.records) == 2  # once
