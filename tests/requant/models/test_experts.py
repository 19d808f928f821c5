"""Experts as linears: the same function, the names of the weight files, and what is refused."""

import copy
import re

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, MambaConfig

from requant.errors import ModelError
from requant.models import experts
from requant.models.experts import (
    Experts,
    all_tokens_to_every_expert,
    grouped_products,
    routers,
    unfuse_experts,
)
from requant.models.targets import find_linears

TOKENS = torch.arange(80).view(2, 40) * 7 % 256


def unfused(model):
    unfuse_experts(model)
    return model


def test_experts_compute_what_the_fused_module_does(tiny_model, mixture: str) -> None:
    """In float64, where another order of summation would show in the last digits only."""
    model = tiny_model(mixture).double()
    model.set_experts_implementation("eager")
    expected = model(TOKENS).logits
    unfuse_experts(model)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=1e-13)
    with all_tokens_to_every_expert(model):
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(copy.deepcopy(model)(TOKENS).logits, expected, rtol=0, atol=1e-13)


def test_experts_of_a_transformers_without_norms_behind_experts(tiny_model, mixture: str) -> None:
    """As in 5.8 to 5.17, where no module says that it has none."""
    model = tiny_model(mixture)
    for module in model.modules():
        module.__dict__.pop("has_post_expert_norm", None)
    unfuse_experts(model)
    assert any(target.experts is not None for target in find_linears(model))


def test_norms_behind_experts_are_refused(tiny_model) -> None:
    model = tiny_model("mixtral")
    model.get_submodule("model.layers.0.mlp.experts").has_post_expert_norm = True
    with pytest.raises(ModelError, match="holds experts in a layout that requant does not know"):
        find_linears(unfused(model))


def test_gradients_are_those_of_the_fused_module(tiny_model) -> None:
    model = tiny_model("gpt-oss").double().requires_grad_(True)
    model.set_experts_implementation("eager")
    other = unfused(copy.deepcopy(model))
    for each in (model, other):
        each(TOKENS).logits.square().sum().backward()
    fused = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj").grad[2]
    up = other.get_parameter("model.layers.0.mlp.experts.2.up_proj.weight").grad
    torch.testing.assert_close(up, fused[:, 1::2].T, rtol=1e-10, atol=1e-12)
    bias = model.get_parameter("model.layers.0.mlp.experts.down_proj_bias").grad[2]
    torch.testing.assert_close(
        other.get_parameter("model.layers.0.mlp.experts.2.down_proj.bias").grad, bias, rtol=1e-10, atol=1e-12
    )


def test_grouped_products_are_those_of_single_experts(tiny_model, mixture: str) -> None:
    """Values and gradients, in bfloat16; the last expert is never chosen. Without autocast nothing changes."""
    model = unfused(tiny_model(mixture)).requires_grad_(True)
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    for layer in layers:
        last = len(layer) - 1
        layer.register_forward_pre_hook(lambda _m, x, last=last: (x[0], x[1] % last, x[2]))
    calls: list[object] = []
    for layer in layers:
        layer[0].register_forward_pre_hook(lambda *_: calls.append(None))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(TOKENS, use_cache=False).logits
        logits.float().square().sum().backward()
        return [logits.detach()] + [p.new_zeros(()) if p.grad is None else p.grad for p in model.parameters()]

    expected = gradients()
    assert calls
    calls.clear()
    with grouped_products(model):
        found = gradients()
        assert not calls
        model(TOKENS)
        assert calls
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def test_experts_without_gates(tiny_model) -> None:
    """One by one and in grouped products; the model's own adds them up in float32."""
    model = tiny_model("nemotron-h").double()
    model.set_experts_implementation("eager")
    expected = model(TOKENS).logits
    unfuse_experts(model)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=1e-6)
    names = {target.name for target in find_linears(model) if target.experts is not None}
    assert names == {
        f"model.layers.1.mixer.experts.{e}.{name}" for e in range(4) for name in ("up_proj", "down_proj")
    }
    model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = model(TOKENS).logits
        with grouped_products(model):
            together = model(TOKENS).logits
    assert (together - alone).norm() <= 0.02 * alone.norm()


def test_an_expert_without_tokens_has_no_gradient(tiny_model, monkeypatch) -> None:
    """Whatever the kernel of the GPU leaves in its place."""

    class Leaving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, ends):
            ctx.save_for_backward(x, weight, ends)
            return experts.grouped_mm_of_torch(x, weight, offs=ends)

        @staticmethod
        def backward(ctx, gradient):
            x, weight, ends = ctx.saved_tensors
            x, weight = (tensor.detach().requires_grad_() for tensor in (x, weight))
            with torch.enable_grad():
                experts.grouped_mm_of_torch(x, weight, offs=ends).backward(gradient)
            weight.grad[ends.diff(prepend=ends.new_zeros(1)) == 0] = torch.nan
            return x.grad, weight.grad, None

    model = unfused(tiny_model("qwen3-moe")).requires_grad_(True)
    layer = model.get_submodule("model.layers.0.mlp.experts")
    monkeypatch.setattr(experts, "grouped_mm_of_torch", experts.grouped_mm, raising=False)
    monkeypatch.setattr(experts, "grouped_mm", lambda x, weight, offs: Leaving.apply(x, weight, offs))
    layer.register_forward_pre_hook(lambda _m, x: (x[0], x[1] % 3, x[2]))
    with grouped_products(model), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(TOKENS, use_cache=False).logits.float().square().sum()
    loss.backward()
    for name, p in layer.named_parameters():
        assert (p.grad == 0).all() == name.startswith("3."), name


def test_no_fused_weights_are_left(tiny_model, mixture: str) -> None:
    model = tiny_model(mixture)
    weights = sum(parameter.numel() for parameter in model.parameters())
    unfuse_experts(model)
    assert sum(parameter.numel() for parameter in model.parameters()) == weights
    assert all(parameter.dim() < 3 for parameter in model.parameters())


def test_an_expert_sees_the_tokens_that_are_routed_to_it(tiny_model) -> None:
    model = unfused(tiny_model("qwen3-moe"))
    layer = model.get_submodule("model.layers.0.mlp.experts")
    seen, chosen = [0] * 4, torch.zeros(4, dtype=torch.long)

    def count_rows(expert: int):
        def hook(_module, inputs) -> None:
            seen[expert] += len(inputs[0])

        return hook

    def count_choices(_module, inputs) -> None:
        chosen.add_(inputs[1].flatten().bincount(minlength=4))

    layer.register_forward_pre_hook(count_choices)
    for e, expert in enumerate(layer):
        expert.up_proj.register_forward_pre_hook(count_rows(e))
    model(TOKENS)
    assert seen == chosen.tolist() and sum(seen) == 2 * TOKENS.numel()
    once = list(seen)
    with all_tokens_to_every_expert(model):
        model(TOKENS)
    assert seen == [count + TOKENS.numel() for count in once]


def test_targets_have_the_names_of_the_weight_files(tiny_model, tiny_folder, mixture: str) -> None:
    with safe_open(tiny_folder(mixture) / "model.safetensors", framework="pt") as file:
        stored = {re.sub(r"^.*\.(?=experts\.)", "", name) for name in file.keys()}  # noqa: SIM118
    targets = [target for target in find_linears(unfused(tiny_model(mixture))) if target.experts is not None]
    names = {re.sub(r"^.*\.(?=experts\.)", "", f"{target.name}.weight") for target in targets}
    assert len(names) == (24 if mixture == "deepseek-v3" else 12)
    if mixture == "gpt-oss":  # fused in the files too
        assert "experts.3.gate_proj.weight" in names
    else:
        assert names <= stored


def test_routers_and_gates_are_no_targets(tiny_model, mixture: str) -> None:
    model = unfused(tiny_model(mixture))
    gates = routers(model)
    layers = sum(isinstance(module, Experts) for module in model.modules())
    assert len(gates) == layers * (2 if mixture == "qwen2-moe" else 1)  # with the shared expert's gate
    assert not {f"{target.name}.weight" for target in find_linears(model)} & gates.keys()


def test_all_of_a_router_stays(tiny_model) -> None:
    model = unfused(tiny_model("zaya"))
    found = {name.partition(".mlp.")[2] for name in routers(model)}
    assert found == {
        "gate.down_proj.weight",
        *(f"gate.router_mlp.{name}.weight" for name in ("fc1", "fc2", "out_proj")),
    }
    assert not any(".mlp.gate." in target.name for target in find_linears(model))


def test_indexers_and_grouped_projections_are_no_targets(tiny_model) -> None:
    """The former have no gradients, and a matrix of the latter is not what its input is multiplied with."""
    for name, left in (
        ("deepseek-v32", ".indexer."),
        ("deepseek-v4", ".indexer."),
        ("deepseek-v4", ".o_a_proj."),
    ):
        model = unfused(tiny_model(name))
        assert any(left in f".{name}." for name, _ in model.named_modules())
        names = [target.name for target in find_linears(model)]
        assert not any(left in f"{name}." for name in names), name
        assert any("self_attn.q_b_proj" in name for name in names)


def test_unknown_layouts_are_refused(tiny_model) -> None:
    weight = r"ffn\.experts\.mlp\.w1 \[128, "
    with pytest.raises(ModelError, match=weight + r".* holds experts in a layout that requant does not know"):
        find_linears(unfused(tiny_model("dbrx")))


@pytest.mark.parametrize("top_k", [1, 2])
def test_experts_that_weigh_their_inputs(tiny_model, top_k: int) -> None:
    """Llama 4's, of which a token takes one; its code knows more."""
    model = tiny_model("llama4").double()
    layer = model.get_submodule("model.layers.1.feed_forward")
    layer.top_k = layer.router.top_k = top_k
    expected = model(TOKENS).logits
    unfuse_experts(model)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=1e-13)
    with all_tokens_to_every_expert(model):
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(copy.deepcopy(model)(TOKENS).logits, expected, rtol=0, atol=1e-13)
    names = [target.name for target in find_linears(model) if target.block == 1]
    assert "model.layers.1.feed_forward.experts.3.down_proj" in names
    assert "model.layers.1.feed_forward.shared_expert.up_proj" in names
    assert not any("router" in name for name in names)


def test_a_state_space_is_not_called_experts() -> None:
    config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=32)
    with pytest.raises(
        ModelError, match=r"A_log \[32, 32\] holds weights in a layout that requant does not know"
    ):
        find_linears(AutoModelForCausalLM.from_config(config))


def test_a_step_takes_fewer_tokens_where_prompts_have_launches_of_their_own(tiny_model) -> None:
    model = unfused(tiny_model("qwen3-moe"))
    layer = next(module for module in model.modules() if isinstance(module, Experts))
    took: list[str] = []

    def served(name: str):
        return lambda x, *_: (took.append(name), x)[1]

    layer.step = served("step")
    for prefill, counts in ((None, (1, 64)), (served("prefill"), (16, 17, 64, 65))):
        layer.prefill = prefill
        for count in counts:
            layer(torch.zeros(count, 4), torch.zeros(count, 2, dtype=torch.long), torch.ones(count, 2))
    assert took == ["step", "step", "step", "prefill", "prefill", "prefill"]
