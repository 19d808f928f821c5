"""Training after pruning: what learns, what moves, and what stays."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch

from requant.finetune.loss import loss_sum
from requant.finetune.masked_adam import EPSILON, MaskedDecay, MaskedDecayAdam
from requant.finetune.recovery import PrunedWeight, recover
from requant.finetune.step import BETAS
from requant.finetune.teacher import Teacher
from requant.pipeline.preparation.prepare import prepare, start
from requant.quantizers.registry import PRUNING_METHODS
from requant.quantizers.semi_structured import SemiStructuredConfig, on_mask
from requant.recipe.schema import Calibration, Evaluation, Finetune, Recipe, Recovery
from requant.run.context import RunContext, Weights
from requant.run.quantize_linears import quantize_linears
from requant.run.workspace import Workspace
from requant.sparsity.masks import keep2

TRAINING = Finetune(steps=12, tokens_per_step=128, warmup_steps=2, val_windows=1, eval_every=4)


def pruned_run(model, text: Path, bits: int = 16, tokenizer=None) -> tuple[RunContext, Weights]:
    recipe = Recipe(
        model="tiny",
        mode="sparse",
        method="magnitude",
        quantizer=PRUNING_METHODS["magnitude"].config(bits=bits),
        calibration=Calibration(text=(str(text),), num_samples=12, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=0),
        finetune=TRAINING,
    )
    run = start(prepare(model, recipe, tokenizer=tokenizer), recipe, workspace=Workspace(None), quiet=True)
    return run, quantize_linears(run, None, label="prune")


def divergence(run: RunContext, weights: Weights) -> float:
    run.apply_original_weights()
    tokens = run.windows.to(run.model.device)
    original = run.model(input_ids=tokens).logits.log_softmax(-1)
    run.apply_quantized_weights(weights)
    found = run.model(input_ids=tokens).logits.log_softmax(-1)
    run.apply_original_weights()
    return (original.exp() * (original - found)).sum().item()


def same(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name].dequantize(), other[name].dequantize()) for name in one)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("bits", [3, 16])
@pytest.mark.parametrize("method", ["fixed", "ast", "s-ste"])
def test_recovery_lowers_the_divergence(
    trained_model, tokenizer, tiny_text_file, method, bits, device, caplog
) -> None:
    run, pruned = pruned_run(trained_model.to(device), tiny_text_file, bits, tokenizer)
    before = divergence(run, pruned)
    if method == "s-ste":  # starts from more loss than the mask alone costs, beyond so short a training
        hardly = dataclasses.replace(TRAINING, steps=1)
        first, _ = recover(run, pruned, hardly, Recovery(method=method, lr=1e-9))
        before = divergence(run, first)
        run.finetuned_params.clear()
    recovered, rates = recover(run, pruned, TRAINING, Recovery(method=method, mask_every=3))
    assert divergence(run, recovered) < 0.97 * before
    for weight in recovered.values():
        floats = weight.dequantize()
        assert ((floats.view(len(floats), -1, 4) != 0).sum(2) <= 2).all() and weight.dense.bits == bits
    masks_moved = any(not torch.equal(recovered[n].dense.mask, pruned[n].dense.mask) for n in pruned)
    assert masks_moved == (method != "fixed")
    assert len(rates) == {"fixed": 0, "ast": 4, "s-ste": 12}[method]
    assert "cannot be captured" not in caplog.text and "is not used on this machine" not in caplog.text
    assert all(0 <= rate <= 1 for rate in rates) and (method == "fixed" or max(rates) > 0)


@pytest.mark.parametrize("bits", [pytest.param(3, marks=pytest.mark.slow), 16])
def test_ast_without_decay_and_with_frozen_masks_is_fixed(tiny_folder, tiny_text_file, bits) -> None:
    """Bit for bit: pruned weights have gradients there, and change nothing."""
    run, pruned = pruned_run(str(tiny_folder("llama")), tiny_text_file, bits)
    fixed, _ = recover(run, pruned, TRAINING, Recovery(method="fixed", lr=1e-3))
    norms = {name: pair[1] for name, pair in run.finetuned_params.items()}
    run.finetuned_params.clear()
    frozen, _ = recover(run, pruned, TRAINING, Recovery(method="ast", decay=0.0, mask_every=0, lr=1e-3))
    assert same(fixed, frozen) and not same(fixed, pruned)
    assert all(torch.equal(norms[name], pair[1]) for name, pair in run.finetuned_params.items())
    run.finetuned_params.clear()
    decayed, _ = recover(run, pruned, TRAINING, Recovery(method="ast", decay=5.0, mask_every=1, lr=1e-3))
    assert not same(fixed, decayed)


def test_the_loss_is_a_share_of_divergence_and_one_of_cross_entropy(trained_model, tiny_windows) -> None:
    """Against the loss that transformers computes."""
    teacher = Teacher(copy.deepcopy(trained_model), tiny_windows)
    with torch.no_grad():
        for parameter in trained_model.parameters():
            parameter *= 1.05
        divergence, mixed, text = (
            loss_sum(trained_model, teacher, tiny_windows, distillation=share) for share in (1.0, 0.25, 0.0)
        )
        mean = trained_model(input_ids=tiny_windows, labels=tiny_windows).loss
    count = tiny_windows[:, 1:].numel()
    torch.testing.assert_close(text, count * mean)
    torch.testing.assert_close(mixed, 0.25 * divergence + 0.75 * count * mean)
    assert divergence > 0


def test_distillation_lowers_the_divergence_more_than_the_text_does(
    trained_model, tokenizer, tiny_text_file
) -> None:
    run, pruned = pruned_run(trained_model, tiny_text_file, tokenizer=tokenizer)
    found = {}
    for share in (0.0, 1.0):
        recovered, _ = recover(run, pruned, TRAINING, Recovery(distillation=share))
        found[share] = divergence(run, recovered)
        run.finetuned_params.clear()
    assert found[1.0] < found[0.0] <= divergence(run, pruned)  # the start is kept where nothing is lower


def test_a_model_that_is_2_4_already_stays(tiny_folder, tiny_text_file) -> None:
    """Its divergence is zero, and the start is one of the candidates."""
    run, pruned = pruned_run(str(tiny_folder("llama")), tiny_text_file)
    sparse = dataclasses.replace(
        run, original={target.name: pruned[target.name].dequantize() for target in run.targets}
    )
    sparse.apply_original_weights()
    recovered, rates = recover(sparse, pruned, TRAINING, Recovery(method="ast", mask_every=4))
    assert same(recovered, pruned) and len(rates) == 3


def test_gpt2_matrices_are_transposed(tiny_folder, tiny_text_file) -> None:
    run, pruned = pruned_run(str(tiny_folder("gpt2")), tiny_text_file)
    before = divergence(run, pruned)
    recovered, _ = recover(run, pruned, TRAINING, Recovery(lr=1e-3))
    assert divergence(run, recovered) < before


def test_gradients_of_rounded_values() -> None:
    """LSQ's, by hand: weights and steps, inside and outside of the range."""
    weight = torch.tensor([[0.3, 0.0, -0.9, 0.0, 9.0, 0.0, 0.0, -7.0]])
    mask = keep2(weight.abs())
    matrix = PrunedWeight.start(on_mask(weight, mask, SemiStructuredConfig(bits=2, group_size=8)), weight)
    step = torch.tensor([[1.0]], requires_grad=True)
    leaf = weight.clone().requires_grad_(True)
    matrix = dataclasses.replace(matrix, weight=leaf, steps=step)
    rounded = matrix.rounded(leaf)
    assert rounded.tolist() == [[0.5, 0, -0.5, 0, 1.5, 0, 0, -1.5]]
    rounded[0, :3].sum().backward(retain_graph=True)
    assert leaf.grad[0].tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    assert step.grad.item() == pytest.approx((0.5 - 0.3) + (-0.5 + 0.9), abs=1e-6)
    step.grad = None
    rounded[0, 4:].sum().backward()
    assert leaf.grad[0, 4:].tolist() == [0, 0, 0, 0]
    assert step.grad.item() == pytest.approx(1.5 - 1.5, abs=1e-6)


def test_without_decay_it_is_adam_and_with_decay_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    values, gradients = torch.randn(4, 8, generator=generator), torch.randn(9, 4, 8, generator=generator)
    mask, strength = keep2(values.abs()), torch.tensor(2.0)

    def trained(optimizer_of) -> torch.Tensor:
        tensor = values.clone().requires_grad_(True)
        optimizer = optimizer_of([{"params": [tensor], "lr": 0.01}], tensor)
        for gradient in gradients:
            tensor.grad = gradient.clone()
            optimizer.step()
        return tensor.detach()

    adam = trained(lambda groups, _: torch.optim.Adam(groups, betas=BETAS, eps=EPSILON))
    torch.testing.assert_close(trained(lambda groups, _: MaskedDecayAdam(groups, {})), adam)
    decayed = trained(
        lambda groups, tensor: MaskedDecayAdam(groups, {tensor: MaskedDecay(mask=mask, strength=strength)})
    )
    first, second, expected = torch.zeros(4, 8), torch.zeros(4, 8), values.double()
    for t, gradient in enumerate(gradients.double(), 1):
        first = 0.9 * first + 0.1 * gradient
        unit = first.square().mean().sqrt() / expected.square().mean().sqrt()
        pull = 2 * unit * ~mask * expected
        second = 0.95 * second + 0.05 * (gradient + pull).square()
        expected = expected - 0.01 * (first + pull) / (1 - 0.9**t) / ((second / (1 - 0.95**t)).sqrt() + 1e-8)
    torch.testing.assert_close(decayed, expected.float(), rtol=1e-4, atol=1e-6)
    assert decayed[~mask].abs().sum() < adam[~mask].abs().sum()
