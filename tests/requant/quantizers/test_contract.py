"""What every registered method promises (`requant.quantizers.method`); a row a method in `cases.py`."""

import dataclasses
import itertools

import pytest
import torch
import yaml

from requant.calibration.stats import LinearStats
from requant.errors import InputError, NumericalError, RecipeError
from requant.formats.quantized_weight import pack, unpack
from requant.quantizers.method import Method
from requant.quantizers.registry import METHODS
from requant.recipe.defaults import default_recipe
from requant.recipe.schema import Detach, Recipe
from requant.recipe.shipped import available_recipes
from requant.recipe.yaml_files import dump_recipe, from_dict, load_recipe

from .cases import CASES, PARAMS, Case

STATISTICS = {field.name for field in dataclasses.fields(LinearStats)} - {"tokens"}


@pytest.fixture(params=PARAMS)
def case(request) -> Case:
    return request.param


@pytest.fixture
def method(case: Case) -> Method:
    return METHODS[case.method]


def every_tensor(stats: LinearStats) -> list[torch.Tensor]:
    return [getattr(stats, name) for name in sorted(STATISTICS - {"cross_hessian"})]


def test_every_method_has_a_row_and_a_recipe() -> None:
    assert sorted(case.method for case in CASES) == sorted(METHODS)
    assert {load_recipe(name).method for name in available_recipes()} == set(METHODS)


# what it says of itself


def test_what_it_owns_is_complete(method: Method) -> None:
    assert method.needs | method.predictor_needs <= STATISTICS
    assert method.seconds_per_weight.keys() == {"cpu", "cuda"} and min(method.seconds_per_weight.values()) > 0
    assert method.bits == tuple(sorted(set(method.bits))) and 2 <= max(method.bits) <= 8
    assert Detach(**method.detach).outlier_fraction <= 0.01
    has_outliers = "outlier_fraction" in {field.name for field in dataclasses.fields(method.config)}
    assert has_outliers == (method.outlier_cost is not None)


def test_recipes_round_trip(case: Case, method: Method) -> None:
    recipe = default_recipe("demo", case.method)
    assert recipe.quantizer == method.config() and recipe.detach == Detach(**method.detach)
    changed = dataclasses.replace(recipe, quantizer=method.config(bits=method.bits[-1], **case.options))
    for each in (recipe, changed, Recipe(method=case.method, quantizer=method.config())):
        assert from_dict(yaml.safe_load(dump_recipe(each))) == each


def test_bits_out_of_range(method: Method) -> None:
    for bits in (-1, 0, method.bits[0] - 1, method.bits[-1] + 1, 64):
        with pytest.raises(RecipeError, match=rf"bits is {bits}, but "):
            method.config(bits=bits)


def test_the_packed_spec_is_what_pack_writes(case: Case, method: Method, layer) -> None:
    made = layer(12, 300)
    for bits in method.bits:
        config = method.config(bits=bits, **case.options)
        quantized = method.quantize(made.weight, made.stats, config)
        spec, tensors = pack(quantized)
        assert spec == method.packed_spec(config, (12, 300), finetuned=False)
        assert spec.bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert torch.equal(unpack(spec, tensors).dequantize(), quantized.dequantize())


def test_more_bits_lower_the_predicted_loss(case: Case, method: Method, layer) -> None:
    made = layer(64, 256)
    widths = [bits for bits in method.bits if bits <= 6]  # of a codebook, 8 bits are a level per weight here
    config = method.config(**case.options)
    losses = method.predicted_losses(made.weight, made.stats, config, widths)
    assert list(losses) == widths and losses[6] > 0
    steps = [(right - left, losses[left] / losses[right]) for left, right in itertools.pairwise(losses)]
    assert all(1.5**step < ratio < 25**step for step, ratio in steps)


@pytest.mark.parametrize("smaller", [0.0, 1e-9])
def test_rows_of_zeros_cost_nothing(case: Case, method: Method, layer, smaller: float) -> None:
    """Of a model with padded heads, or almost."""
    made, config = layer(16, 256), method.config(**case.options)
    whole = method.predicted_losses(made.weight, made.stats, config, [4])[4]
    made.weight[[3, 8]] *= smaller
    assert 0 < method.predicted_losses(made.weight, made.stats, config, [4])[4] < whole


def test_a_matrix_without_inputs_costs_nothing(case: Case, method: Method, layer) -> None:
    made = layer(16, 64)
    zeros = {name: torch.zeros_like(getattr(made.stats, name)) for name in ("hessian", "fisher")}
    unused = dataclasses.replace(made.stats, **zeros)
    losses = method.predicted_losses(made.weight, unused, method.config(**case.options), [4])
    assert losses[4] < 1e-20


# what it computes


@pytest.mark.parametrize("k", [64, 172, 520, 1216])
def test_any_width(case: Case, method: Method, layer, k: int) -> None:
    made = layer(5, k)
    quantized = method.quantize(made.weight, made.stats, method.config(bits=4, **case.options))
    assert quantized.shape == (5, k)
    assert quantized.sparse is None
    assert quantized.dense.codes.max() < 16
    assert made.output_error(quantized) < case.finer_than


def test_every_width_of_code_uses_its_range_and_not_more(case: Case, method: Method, layer) -> None:
    made = layer(3, 300)
    for bits in method.bits:
        config = method.config(bits=bits, **case.options)
        codes = method.quantize(made.weight, made.stats, config).dense.codes
        assert int(codes.max()) < 2 ** -(-bits // 1)
        assert codes.unique().numel() > 2 ** (bits - 2)


def test_more_bits_less_error(case: Case, method: Method, layer) -> None:
    made = layer(4, 256)
    errors = [
        made.output_error(method.quantize(made.weight, made.stats, method.config(bits=bits, **case.options)))
        for bits in (2, 3, 4, 6, 8)
    ]
    assert errors == sorted(errors, reverse=True)


def test_pure(case: Case, method: Method, layer) -> None:
    made, config = layer(4, 172), method.config(bits=3, **case.options)
    arguments = [made.weight, made.detached, *every_tensor(made.stats)]
    before = [tensor.clone() for tensor in arguments]
    results = [method.quantize(made.weight, made.stats, config, detached=made.detached) for _ in range(2)]
    method.predicted_losses(made.weight, made.stats, config, [3])
    assert all(torch.equal(old, new) for old, new in zip(before, arguments, strict=True))
    assert torch.equal(results[0].dense.codes, results[1].dense.codes)
    assert torch.equal(results[0].dequantize(), results[1].dequantize())


def test_detached_weights_are_the_sparse_part(case: Case, method: Method, layer) -> None:
    made, config = layer(6, 172), method.config(bits=3, **case.options)
    quantized = method.quantize(made.weight, made.stats, config, detached=made.detached)
    assert torch.equal(quantized.sparse.dequantize() != 0, made.detached)
    if case.restores_detached:
        restored = quantized.dequantize()[made.detached]
        assert torch.allclose(restored, made.weight[made.detached], atol=1e-4)


def test_detached_outliers_do_not_cost_the_others(case: Case, method: Method, layer) -> None:
    made, config = layer(4, 172), method.config(bits=3, **case.options)
    outliers = torch.where(made.detached, 100 * torch.ones_like(made.weight), made.weight)
    quantized = method.quantize(outliers, made.stats, config, detached=made.detached).dense
    plain = method.quantize(made.weight, made.stats, config, detached=made.detached).dense
    kept = ~made.detached
    assert torch.equal(quantized.dequantize()[kept], plain.dequantize()[kept])


def test_everything_detached(case: Case, method: Method, layer) -> None:
    made, config = layer(2, 64), method.config(bits=3, **case.options)
    everything = torch.ones_like(made.detached)
    quantized = method.quantize(made.weight, made.stats, config, detached=everything)
    assert torch.allclose(quantized.dequantize(), made.weight, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.375, -2.0])
def test_constant_weights_stay(case: Case, method: Method, layer, value: float) -> None:
    if case.constant_within is None and value:
        pytest.skip(f"{case.method} promises nothing of equal weights")
    made, config = layer(3, 172), method.config(bits=3, **case.options)
    constant = torch.full_like(made.weight, value)
    quantized = method.quantize(constant, made.stats, config)
    assert torch.allclose(quantized.dequantize(), constant, rtol=case.constant_within or 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_bad_weight(case: Case, method: Method, layer, bad: float) -> None:
    made = layer(3, 64)
    made.weight[1, 2] = bad
    with pytest.raises(NumericalError, match="1 of 192 weights are NaN, infinite or larger than 65504"):
        method.quantize(made.weight, made.stats, method.config(**case.options))


def test_statistics_are_checked(case: Case, method: Method, layer) -> None:
    made, config = layer(3, 64), method.config(**case.options)
    only = {name: getattr(made.stats, name) for name in method.needs}
    method.quantize(made.weight, LinearStats(**only), config)  # it reads nothing else
    for field in method.needs:
        with pytest.raises(InputError, match=f"stats.{field} is missing"):
            method.quantize(made.weight, LinearStats(**(only | {field: None})), config)
        other = getattr(layer(5, 172).stats, field)
        with pytest.raises(InputError, match=rf"stats.{field} has shape .*, but this matrix needs"):
            stats = LinearStats(**only)
            object.__setattr__(stats, field, other)  # the constructor's own types would refuse it first
            method.quantize(made.weight, stats, config)
        bad = only[field].clone()
        bad.view(-1)[0] = float("nan")
        with pytest.raises(
            NumericalError, match=f"stats.{field} holds NaN or infinity: calibrate in float32"
        ):
            method.quantize(made.weight, LinearStats(**(only | {field: bad})), config)


@pytest.mark.parametrize("group_size", [-2, 0, 7])
def test_group_size_out_of_range(method: Method, group_size: int) -> None:
    if "group_size" not in {field.name for field in dataclasses.fields(method.config)}:
        pytest.skip("has no groups")
    with pytest.raises(RecipeError, match=f"group_size is {group_size}, but a group has at least 8 columns"):
        method.config(group_size=group_size)


def test_order_of_the_methods(layer) -> None:
    """Scaling and compensation both beat rounding to nearest, under the measure that they share."""
    made = layer(32, 512)
    rtn, awq, gptq = (
        made.output_error(METHODS[name].quantize(made.weight, made.stats, METHODS[name].config(bits=3)))
        for name in ("rtn", "awq", "gptq")
    )
    assert max(awq, gptq) < 0.8 * rtn


@pytest.mark.gpu
def test_codes_are_unpacked_on_cuda(case: Case, method: Method, layer) -> None:
    made = layer(12, 300)
    for bits in method.bits:
        config = method.config(bits=bits, **case.options)
        quantized = method.quantize(made.weight, made.stats, config, detached=made.detached)
        there = unpack(*pack(quantized), device=torch.device("cuda"))
        assert there.dequantize().is_cuda
        for name, tensor in pack(there)[1].items():
            assert torch.equal(tensor, pack(quantized)[1][name])


@pytest.mark.gpu
def test_same_on_cuda(case: Case, method: Method, layer) -> None:
    if case.method == "trellis":
        pytest.skip("near ties fall either way: test_trellis.py compares the losses")
    made, config = layer(40, 520), method.config(bits=3, **case.options)
    stats = LinearStats(**{name: getattr(made.stats, name).cuda() for name in method.needs})
    here = method.quantize(made.weight, made.stats, config, detached=made.detached)
    there = method.quantize(made.weight.cuda(), stats, config, detached=made.detached.cuda()).dequantize()
    assert there.is_cuda
    # A rounding that falls the other way is passed on, so a few codes may differ.
    assert (there.cpu() != here.dequantize()).float().mean() < 0.05
