"""Mixtures of experts through the whole path: quantize, save, load in transformers, export."""

import copy
import dataclasses
import re

import pytest
import torch
from requant_kernels import linear
from requant_kernels.trellis.gemm_sm90_launch import GROUP_TOKENS
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import requant
from requant.exporters.export import export
from requant.inference.convert import convert_to_kernels
from requant.inference.quant_linear import QuantLinear
from requant.inference.static_cache import SharedLengthCache, static_cache
from requant.models.experts import Experts, unfuse_experts
from requant.quantizers.rtn import RtnConfig
from requant.quantizers.trellis import TrellisConfig
from requant.recipe.schema import Budget, Calibration, Evaluation, Recipe

from ...architectures import EXPERTS

RECIPE = Recipe(
    mode="dense",
    method="rtn",
    quantizer=RtnConfig(bits=4, group_size=32),
    calibration=Calibration(num_samples=4, seq_len=32),
    evaluation=Evaluation(context=32, windows=2, samples=0),
)
TOKENS = torch.arange(80).view(2, 40) * 7 % 256


def names_of(folder) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.usefixtures("any_trellis_codes")
@pytest.mark.parametrize(
    "name",
    ["qwen3-moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-oss", "deepseek-v3"))],
)
def test_a_step_of_few_tokens_takes_the_stacks_of_all_experts(
    name: str, tiny_folder, tiny_text_file, tmp_path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """The kernels' step and prefill, their launches replaced by their reference: codes, scales, biases, gates and order are
    right."""
    pytest.importorskip("triton")
    from requant.inference import experts

    recipe = dataclasses.replace(
        RECIPE, method="trellis", quantizer=TrellisConfig(bits=4), budget=Budget(bits=4.5)
    )
    requant.save(requant.quantize(str(tiny_folder(name)), recipe, tiny_text_file), tmp_path / "checkpoint")
    model = convert_to_kernels(requant.load(tmp_path / "checkpoint", dtype=torch.float32), device="cpu")
    expected, alone = model(TOKENS[:, :8]).logits, model(TOKENS[:1, :1]).logits
    of_prompts = model(TOKENS).logits
    calls: list[int] = []
    prompts: list[tuple[int, int | None]] = []

    def product(x, stack, slots, part):
        y = x.new_empty(len(x), stack.n)
        for expert in slots.unique().tolist():
            index, own = part * stack.experts + expert, slots == expert
            layout = stack.by_bits[stack.index_of[index][0]]
            layout = dataclasses.replace(
                layout, packed_codes=stack.codes(index), output_scales=stack.output_scales[index]
            )
            y[own] = linear(x[own], layout, None if stack.biases is None else stack.biases[index])
        return y

    def step(x, gate_up, down, chosen, weights, *, gated):
        calls.append(len(x))
        repeated, slots = x.repeat_interleave(chosen.shape[1], 0), chosen.flatten()
        gate, up = (product(repeated, gate_up, slots, part) for part in (0, 1))
        h = torch.nn.functional.silu(gate) * up if gated is None else gated(gate, up)
        y = product(h, down, slots, 0).view(*chosen.shape, -1)
        return (y * weights[..., None]).sum(1).to(x.dtype)

    def prefill(x, gate_up, down, chosen, weights, *, gated, into, tokens_per_cta):
        prompts.append((len(x), tokens_per_cta))
        y = step(x, gate_up, down, chosen, weights, gated=gated)
        calls.pop()
        return y

    monkeypatch.setattr(experts, "supports", lambda _device: True)
    monkeypatch.setattr(experts, "experts_step", step)
    monkeypatch.setattr(experts, "experts_prefill", prefill)
    monkeypatch.setattr(experts, "router_of", lambda _mixture: None)  # it has a test of its own
    experts.group_experts(model)
    assert not prompts  # there is no Hopper
    model(TOKENS)  # 80 tokens go expert by expert
    monkeypatch.setattr(experts, "supports_prefill", lambda _device: True)
    experts.group_experts(model)
    assert {own for _, own in prompts} == set(GROUP_TOKENS)  # each was checked
    calls.clear()
    prompts.clear()
    torch.testing.assert_close(model(TOKENS[:, :8]).logits, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model(TOKENS[:1, :1]).logits, alone, rtol=1e-3, atol=1e-4)
    assert set(calls) == {16, 1}
    if name == "qwen3-moe":
        assert isinstance(static_cache(model, 64), SharedLengthCache)  # its step can be captured
    assert not prompts
    torch.testing.assert_close(model(TOKENS).logits, of_prompts, rtol=1e-3, atol=1e-4)
    assert set(calls) == {16, 1} and set(prompts) == {(80, None)}

    layers = [module for module in model.modules() if isinstance(module, Experts)]
    for part in ("gate_up", "down"):  # one program for all layers, whatever each has
        stacks = [getattr(own.step, part) for own in layers]
        (known,) = {stack.widths for stack in stacks}
        assert set(known) == {bits for stack in stacks for bits in stack.by_bits}
        for stack in stacks:
            locations = [(known[number], index) for number, index in stack.locations.tolist()]
            assert locations == list(stack.index_of)
    layer = layers[0]
    caplog.clear()  # what is wrong is not used, and said
    monkeypatch.setattr(experts, "experts_prefill", lambda x, *_arguments, **_options: x)
    experts.group_experts(model)
    assert layer.step is not None and layer.prefill is None
    said = {record.getMessage()[1:60] for record in caplog.records}
    assert said == {" prompts of layers of experts are served expert by expert, "}
    torch.testing.assert_close(model(TOKENS).logits, of_prompts, rtol=1e-3, atol=1e-4)
    monkeypatch.setattr(experts, "experts_step", lambda x, *_arguments, **_options: x)
    experts.group_experts(model)
    assert layer.step is None and layer.prefill is None


def test_a_gate_that_clamps_is_not_the_kernels_own(tiny_model) -> None:
    """DeepSeek-V4's is silu(gate) * up between limits, that of Qwen3 everywhere."""
    pytest.importorskip("triton")
    from requant.inference.experts import is_silu

    for name, plain in (("qwen3-moe", True), ("deepseek-v4", False)):
        model = tiny_model(name)
        unfuse_experts(model)
        layer = next(module for module in model.modules() if isinstance(module, Experts))
        assert is_silu(layer[0]) == plain, name


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v3",
        "gpt-oss",
        *(pytest.param(n, marks=pytest.mark.slow) for n in EXPERTS if n not in ("deepseek-v3", "gpt-oss")),
    ],
)
def test_round_trip_through_transformers_and_export(name: str, tiny_folder, tiny_text_file, tmp_path) -> None:
    source, folder = tiny_folder(name), tmp_path / "checkpoint"
    # of one expert a matrix stays as it is: transformers must not try to fuse what is left
    recipe = dataclasses.replace(RECIPE, skip=("*.1.*experts.2.up_proj", "*.1.*experts.2.w3"))
    recipe = dataclasses.replace(recipe, skip=recipe.skip[1:] if name == "mixtral" else recipe.skip[:1])
    result = requant.quantize(str(source), recipe, tiny_text_file)
    requant.save(result, folder)
    expected = result.model(TOKENS).logits

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(loaded(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
    floats = requant.load(folder, dtype=torch.float32, dequantize=True)
    assert torch.equal(floats(TOKENS).logits, expected)

    assert static_cache(loaded, 64) is None  # a step is not captured: the host asks which experts it needs
    served = convert_to_kernels(copy.deepcopy(loaded), device="cpu")
    assert not any(isinstance(module, QuantLinear) for module in served.modules())
    torch.testing.assert_close(served(TOKENS).logits, expected, rtol=1e-3, atol=1e-4)

    loaded.save_pretrained(tmp_path / "again")
    assert names_of(tmp_path / "again") == names_of(folder)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert torch.equal(again(TOKENS).logits, loaded(TOKENS).logits)

    floats_give(floats, tmp_path / "floats", source)
    if name != "gpt-oss":  # whose files hold all experts of a layer in one tensor
        weights = {
            re.sub(r"\.(codes|guard|scales|zero_points|weight)$", "", name) for name in names_of(folder)
        }
        assert weights == {name.removesuffix(".weight") for name in names_of(source)}
    dense_gives(folder, source, expected)


@pytest.mark.parametrize("name", ["mixtral", "nemotron-h"])
def test_a_checkpoint_saved_by_the_models_names_is_read_back(
    name: str, tiny_folder, tiny_text_file, tmp_path
) -> None:
    """`save_original_format=False`, and the other way round again: the tables name what the weight files name."""
    recipe = dataclasses.replace(RECIPE, skip=("*experts.2.w3",) if name == "mixtral" else ())
    folder = requant.save(
        requant.quantize(str(tiny_folder(name)), recipe, tiny_text_file), tmp_path / "checkpoint"
    )
    loaded = requant.load(folder)
    for original in (False, True):
        loaded.save_pretrained(tmp_path / str(original), save_original_format=original)
        again = requant.load(tmp_path / str(original))
        assert torch.equal(again(TOKENS).logits, loaded(TOKENS).logits)
        assert (names_of(tmp_path / str(original)) == names_of(folder)) == original
    again.dequantize().save_pretrained(tmp_path / "floats", save_original_format=False)
    floats = AutoModelForCausalLM.from_pretrained(tmp_path / "floats")
    assert torch.equal(floats(TOKENS).logits, again(TOKENS).logits)


@pytest.mark.parametrize(
    "name",
    ["granite-moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma4-moe", "llama4"))],
)
def test_experts_that_files_hold_fused_are_written_fused(
    name: str, tiny_folder, tiny_text_file, tmp_path
) -> None:
    """By an export, and by `save_pretrained` of the floats of a run or of a checkpoint."""
    source = tiny_folder(name)
    result = requant.quantize(str(source), RECIPE, tiny_text_file)
    requant.save(result, tmp_path / "checkpoint")
    dense_gives(tmp_path / "checkpoint", source, result.model(TOKENS).logits)
    floats_give(result.model, tmp_path / "of a run", source)
    floats = requant.load(tmp_path / "checkpoint", dtype=torch.float32, dequantize=True)
    floats_give(floats, tmp_path / "of a checkpoint", source)


def dense_gives(checkpoint, source, expected: torch.Tensor) -> None:
    """The export as floats has the source's tensors, and the logits that are expected in plain transformers."""
    folder = checkpoint.with_name("dense")
    export(checkpoint, "dense", folder, dtype="float32")
    plain_gives(folder, source, expected)


def floats_give(model, folder, source) -> None:
    """The same of a model that is saved as any other."""
    model.save_pretrained(folder)
    plain_gives(folder, source, model(TOKENS).logits)


def plain_gives(folder, source, expected: torch.Tensor) -> None:
    assert names_of(folder) == names_of(source)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(plain(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
