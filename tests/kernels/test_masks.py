"""The mask kernels: interpreted, compiled for Hopper, and on a GPU, where `requant.sparsity` uses them."""

import pytest
import torch

pytest.importorskip("triton")

from requant_kernels.sparsity import masks as kernels

from requant.sparsity import gpu, masks

from .compile_offline import compile_kernel
from .mask_cases import CASES, same, with_ties

NAMES = tuple(dict.fromkeys(name for name, _ in CASES))


def test_the_patterns_are_those_of_torch() -> None:
    assert kernels.BLOCK_PATTERNS == masks.PAIRS_OF_ROWS
    for bits, mask in zip(kernels.BITS, masks.TRANSPOSABLE.flatten(1).tolist(), strict=True):
        assert [bool(bits >> i & 1) for i in range(16)] == mask


def test_interpreted_kernels_equal_torch(interpreted) -> None:
    interpreted("masks_interpreted.py")


KERNELS = {
    "keep2": (kernels.keep2_kernel, {"LARGEST": 1e30, "SIZE": kernels.GROUPS_PER_CTA}),
    "keep2_transposable": (
        kernels.keep2_transposable_kernel,
        {"LARGEST": 1e30, "SIZE": kernels.BLOCKS_PER_CTA},
    ),
    "soft_threshold": (kernels.soft_threshold_kernel, {"FITS": False, "SIZE": kernels.GROUPS_PER_CTA}),
    "least_squares_scale": (kernels.soft_threshold_kernel, {"FITS": True, "SIZE": kernels.GROUPS_PER_CTA}),
}


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KERNELS)
def test_compiled_for_hopper_nothing_spills_and_groups_stay_in_their_thread(name: str, dtype: str) -> None:
    kernel, constants = KERNELS[name]
    absent = {"soft_threshold": ("sums_ptr",), "least_squares_scale": ("projected_ptr",)}.get(name, ())
    machine = compile_kernel(
        kernel, constants, capability=90, dtype=dtype, warps=4, absent=absent,
        pointers={"scores_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}", "mask_ptr": "*i8", "projected_ptr": f"*{dtype}",
                  "sums_ptr": "*fp64", "numel": "i32", "k": "i32"}, aligned=("numel", "k"),
    )  # fmt: skip
    assert machine.stack == 0 and machine.registers <= 128
    if name != "least_squares_scale":  # which sums over the CTA
        assert machine.opcodes["SHFL"] == machine.opcodes["STS"] == machine.opcodes["BAR"] == 0
    loads = machine.opcodes["LDG"]
    assert 0 < loads <= (8 if name == "keep2_transposable" else 4)  # of four values or more


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_they_equal_torch(name: str) -> None:
    for function, values in CASES:
        if function == name:
            found, expected = getattr(kernels, name)(values.cuda()), getattr(masks, name)(values)
            assert same(found.cpu(), expected), (values.shape, values.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", gpu.DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_product_uses_the_kernel_and_torch_where_it_is_wrong(
    name: str, dtype, monkeypatch, caplog
) -> None:
    values = with_ties((64, 128), dtype).abs().cuda()
    kernel, formula = getattr(kernels, name), getattr(masks, f"_{name}")
    calls: list[str] = []
    monkeypatch.setattr(kernels, name, lambda v: (calls.append(name), kernel(v))[1])
    gpu._chosen.cache_clear()
    assert same(getattr(masks, name)(values).cpu(), formula(values.cpu())) and len(calls) == 2  # one to check
    monkeypatch.setattr(
        kernels, name, lambda v: ~kernel(v) if kernel(v).dtype == torch.bool else 2 * kernel(v)
    )
    gpu._chosen.cache_clear()
    assert same(getattr(masks, name)(values).cpu(), formula(values.cpu()))
    assert f"the kernel `{name}` is not used on this machine" in caplog.text
    gpu._chosen.cache_clear()


@pytest.mark.gpu
def test_a_captured_graph_replays_the_masks() -> None:
    scores = with_ties((256, 512), torch.float32).abs().cuda()
    masks.keep2(scores)  # checked before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = masks.keep2(scores)
    scores.copy_(scores.flip(0))
    graph.replay()
    assert torch.equal(mask.cpu(), masks.keep2(scores.cpu()))
