"""What every method of 2:4 sparsity promises, and what each of them computes."""

import itertools

import pytest
import torch

from requant.calibration.stats import LinearStats
from requant.errors import InputError, NumericalError, RecipeError
from requant.formats.quantized_weight import pack, unpack
from requant.quantizers.alps import conjugate_gradients
from requant.quantizers.gptq import group_of, hessian_inv_cholesky, round_columns
from requant.quantizers.registry import PRUNING_METHODS
from requant.quantizers.rtn import fit_grid, nearest_codes, zero_points_as_floats
from requant.quantizers.semi_structured import CLIPS, SemiStructuredConfig, on_mask
from requant.quantizers.sparsegpt import compensate, prune
from requant.sparsity.masks import keep2

every_method = pytest.mark.parametrize("name", PRUNING_METHODS)


@every_method
@pytest.mark.parametrize("bits", [2, 4, 16])
def test_two_of_four_are_kept_and_the_packed_spec_is_what_pack_writes(name: str, bits: int, layer) -> None:
    made, method = layer(12, 300), PRUNING_METHODS[name]
    config = method.config(bits=bits)
    before = made.weight.clone(), made.stats.hessian.clone()
    found = method.quantize(made.weight, made.stats, config)
    assert torch.equal(before[0], made.weight) and torch.equal(before[1], made.stats.hessian)
    assert ((found.dequantize().view(12, -1, 4) != 0).sum(2) == 2).all()
    spec, tensors = pack(found)
    assert spec == method.packed_spec(config, (12, 300), finetuned=False)
    assert torch.equal(unpack(spec, tensors).dequantize(), found.dequantize())
    again = method.quantize(made.weight, made.stats, config)
    assert all(
        torch.equal(one, other) for one, other in zip(pack(again)[1].values(), tensors.values(), strict=True)
    )


@pytest.mark.parametrize("bits", [3, 16])
def test_order_of_the_methods(bits: int, layer) -> None:
    """Each does better than the one before, under the measure they share."""
    made = layer(48, 256)
    errors = [
        made.output_error(method.quantize(made.weight, made.stats, method.config(bits=bits)))
        for method in PRUNING_METHODS.values()
    ]
    assert list(PRUNING_METHODS) == ["magnitude", "wanda", "sparsegpt", "alps"]
    assert all(later < 0.97 * earlier for earlier, later in itertools.pairwise(errors))


@pytest.mark.parametrize(("bits", "scale"), [(4, 1e-4), (8, 1e-3)])
def test_small_weights_lose_no_more_than_others(bits: int, scale: float, layer) -> None:
    """Their steps are below float16's normal numbers."""
    weight, config = layer(8, 64).weight, SemiStructuredConfig(bits=bits, group_size=32)
    mask = keep2(weight.abs())
    usual, small = (on_mask(each, mask, config).dequantize() for each in (weight, scale * weight))
    errors = [((found - weight) * mask).norm().item() for found in (usual, small / scale)]
    assert errors[1] < 2 * errors[0]  # steps there have fewer digits


@every_method
def test_more_bits_less_error(name: str, layer) -> None:
    made, method = layer(16, 128), PRUNING_METHODS[name]
    errors = [
        made.output_error(method.quantize(made.weight, made.stats, method.config(bits=bits)))
        for bits in (2, 3, 4, 6, 16)
    ]
    assert errors == sorted(errors, reverse=True)


@every_method
def test_dead_inputs_and_zeros_stay_finite(name: str, layer) -> None:
    made, method = layer(8, 64), PRUNING_METHODS[name]
    hessian = made.stats.hessian.clone()
    hessian[:9], hessian[:, :9] = 0, 0
    weight = made.weight.clone()
    weight[0], weight[1, :5] = 0, 0
    for stats in (LinearStats(hessian=hessian), LinearStats(hessian=torch.zeros(64, 64))):
        for bits in (4, 16):
            assert method.quantize(weight, stats, method.config(bits=bits)).dequantize().isfinite().all()


@every_method
def test_what_cannot_be_pruned_is_refused(name: str, layer) -> None:
    made, method = layer(3, 64), PRUNING_METHODS[name]
    with pytest.raises(InputError, match="62 columns has no groups of four"):
        method.packed_spec(method.config(), (3, 62))
    for bits in (1, 9, 15, 17):
        with pytest.raises(RecipeError, match=f"bits is {bits}, but the values of a 2:4 matrix"):
            method.config(bits=bits)
    for size in (2, 10):
        with pytest.raises(RecipeError, match=f"group_size is {size}, but"):
            method.config(group_size=size)
    bad = made.weight.clone()
    bad[1, 2] = float("nan")
    with pytest.raises(NumericalError, match="1 of 192 weights"):
        method.quantize(bad, made.stats, method.config())
    if method.needs:
        with pytest.raises(InputError, match=r"stats.hessian is missing"):
            method.quantize(made.weight, LinearStats(), method.config())


def test_sparsegpt_that_keeps_all_weights_is_gptq(layer) -> None:
    made, bits, size = layer(6, 256), 3, 64
    upper = hessian_inv_cholesky(made.stats.hessian, damp=0.01)
    whole = fit_grid(made.weight, bits=bits, group_size=size, symmetric=True)
    fits = [group_of(whole, group) for group in range(256 // size)]

    def nearest(j: int, column: torch.Tensor) -> torch.Tensor:
        scales, zero = fits[j // size].scales.float(), zero_points_as_floats(fits[j // size], bits)
        return ((nearest_codes(column[:, None], scales, zero, bits=bits) - zero) * scales)[:, 0]

    found, mask = compensate(
        made.weight,
        upper,
        lambda _j, left: torch.ones_like(left[:, :4], dtype=torch.bool),
        nearest,
        block_of=size,
    )
    groups = [j // size for j in range(256)]
    gptq = round_columns(
        made.weight, upper, fits, groups=groups, bits=bits, group_size=size, symmetric=True, detached=None
    )
    scales = whole.scales.float().repeat_interleave(size, 1)
    assert mask.all()
    torch.testing.assert_close(found, (gptq.codes.float() - 4) * scales)


def test_one_pass_beats_pruning_and_then_rounding(layer) -> None:
    made, method = layer(24, 256), PRUNING_METHODS["sparsegpt"]
    joint = method.quantize(made.weight, made.stats, method.config(bits=3))
    pruned = method.quantize(made.weight, made.stats, method.config(bits=16))
    rounded = on_mask(pruned.dequantize(), pruned.dense.mask, SemiStructuredConfig(bits=3))
    assert made.output_error(joint) < made.output_error(rounded)


def test_nothing_outside_a_given_mask_is_kept(layer) -> None:
    made, config = layer(8, 64), PRUNING_METHODS["sparsegpt"].config()
    mask = keep2(torch.rand(8, 64, generator=torch.Generator().manual_seed(0)))
    upper = hessian_inv_cholesky(made.stats.hessian, damp=0.01)
    found = prune(made.weight, upper, lambda j, _left: mask[:, j : j + 4], config)
    assert torch.equal(found.dequantize() != 0, mask)
    masked = on_mask(made.weight, mask, config)
    assert made.output_error(found) < made.output_error(masked)


def test_conjugate_gradients_solve_for_the_kept_weights(layer) -> None:
    """In a row with at most ten kept weights ten steps are exact: the equations on the mask hold."""
    made = layer(5, 20)
    hessian = made.stats.hessian.double()
    hessian = hessian / hessian.diagonal().sqrt() / hessian.diagonal().sqrt()[:, None] + 0.1 * torch.eye(20)
    weight, mask = made.weight.double(), keep2(made.weight.abs())
    found = conjugate_gradients(weight, hessian, mask)
    assert torch.equal(found != 0, mask)
    for row in range(5):
        kept = mask[row]
        solved = torch.linalg.solve(hessian[kept][:, kept], hessian[kept] @ weight[row])
        torch.testing.assert_close(found[row, kept], solved, rtol=1e-4, atol=1e-6)


def test_steps_minimize_the_error_among_the_clips(layer) -> None:
    """No step that clips another share of the range is better."""
    weight = layer(4, 128).weight
    mask = keep2(weight.abs())
    best = on_mask(weight, mask, SemiStructuredConfig(bits=2)).dense
    error = ((best.dequantize() - weight) * mask).square().sum(1)
    for clip in CLIPS:
        step = (clip * (weight * mask).abs().amax(1, keepdim=True) / 1.5).half().float()
        levels = ((weight / step).floor().clamp(-2, 1) + 0.5) * step
        assert (error <= ((levels - weight) * mask).square().sum(1) + 1e-9).all()
