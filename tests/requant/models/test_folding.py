"""Folded rotations: the model computes the same, and what is left to the quantizer is said."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from requant.errors import ModelError
from requant.formats.hadamard import hadamard
from requant.models.folding import fold, obstacle, rotated_targets, unfold
from requant.models.rotations import HEAD_SCALES, Rotation, rotation_of, stream_kept
from requant.models.targets import find_linears

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "pad_token_id": None,
}
FOLDING = ("llama", "mistral", "qwen2", "qwen3", "phi3", "granite")
TOKENS = torch.arange(40)[None] * 7 % 96


def random_model(kind: str, *, tied: bool = False, dtype: torch.dtype = torch.float32):
    """A tiny model whose norms and biases are random."""
    config = AutoConfig.for_model(kind, **SIZES, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", FOLDING)
def test_a_folded_model_gives_the_same_logits(kind: str, tied: bool) -> None:
    model = random_model(kind, tied=tied)
    original, table = logits(model), model.get_input_embeddings().weight.clone()
    weights = {target.name: target.weight() for target in find_linears(model)}
    assert obstacle(model) is None
    rotation = fold(model, seed=3)
    torch.testing.assert_close(logits(model), original, rtol=1e-3, atol=1e-4)
    assert rotation_of(model) == rotation_of(copy.deepcopy(model)) == rotation == Rotation(seed=3)
    torch.testing.assert_close(logits(copy.deepcopy(model)), logits(model), rtol=0, atol=0)
    assert torch.equal(model.get_input_embeddings().weight, table)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    for target in find_linears(model):  # every matrix is another one now
        assert (target.weight() - weights[target.name]).norm() > 0.5 * weights[target.name].norm()


def test_a_replaced_embedding_is_rotated_also_where_what_replaces_it_fails() -> None:
    model = random_model("llama")
    original = logits(model)
    fold(model, seed=3)
    embedding = nn.Embedding.from_pretrained(model.get_input_embeddings().weight)
    with pytest.raises(MemoryError), stream_kept(model):
        model.set_input_embeddings(embedding)
        raise MemoryError
    torch.testing.assert_close(logits(model), original, rtol=1e-3, atol=1e-4)


def test_the_stream_is_rotated_and_the_norms_wait_to_be_trained() -> None:
    model = random_model("llama")
    states = model.model(TOKENS, output_hidden_states=True).hidden_states[1]
    final = model.model.norm.weight.clone()
    fold(model, seed=0)
    rotated = model.model(TOKENS, output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(rotated, Rotation(seed=0).stream(states), rtol=1e-3, atol=1e-5)
    norms = {name: p for name, p in model.named_parameters() if "norm" in name}
    assert len(norms) == 4 and all((p == 1).all() for p in norms.values())  # the final one is not a parameter
    assert torch.equal(model.get_input_embeddings().get_parameter(HEAD_SCALES), final)
    assert (model.state_dict()["model.norm.weight"] == 1).all()


def test_matrices_meet_incoherent_weights() -> None:
    """An outlier of the stream, as large models have them, is spread over all columns."""
    model = random_model("llama")
    model.model.layers[0].input_layernorm.weight[5] = 100.0
    fold(model, seed=0)
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert weight.square().mean(0).max() < 4 * weight.square().mean()


@pytest.mark.parametrize("kind", FOLDING)
def test_unfolded_tensors_are_those_of_a_plain_model(kind: str) -> None:
    model = random_model(kind)
    original = logits(model)
    rotation = fold(model, seed=1)
    state = model.state_dict()
    plain = random_model(kind)
    found = {name: unfold(name, tensor, rotation, state.__getitem__) for name, tensor in state.items()}
    found["model.norm.weight"] = found.pop(f"model.embed_tokens.{HEAD_SCALES}")
    plain.load_state_dict(found)
    torch.testing.assert_close(logits(plain), original, rtol=1e-3, atol=1e-4)


def test_only_the_input_of_down_is_left_to_the_quantizer() -> None:
    targets = rotated_targets(find_linears(random_model("llama")))
    rotates = {target.kind: target.options["rotate_input"] for target in targets}
    assert [kind for kind, does in rotates.items() if does] == ["down_proj"]
    assert not any(target.options["rotate_output"] for target in targets)


@pytest.mark.parametrize(
    ("kind", "sizes", "why"),
    [
        ("gemma2", {}, "feedforward_layernorm is none of the modules"),
        ("gemma", {}, "input_layernorm is not an RMSNorm"),
        ("gpt2", {"n_embd": 64, "n_layer": 1, "n_head": 4}, "no `norm`"),
        ("olmo2", {}, "post_feedforward_layernorm is none"),
        ("stablelm", {}, "input_layernorm is not an RMSNorm"),
        ("llama", {"hidden_size": 72, "head_dim": 18}, "not multiples of 16"),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 32}, "none of the modules of a Llama"),
    ],
)
def test_other_architectures_are_told_apart(kind: str, sizes: dict, why: str) -> None:
    config = AutoConfig.for_model(kind, **(SIZES | sizes))
    found = obstacle(AutoModelForCausalLM.from_config(config).eval())
    assert found is not None and why in found


def test_a_model_that_computes_otherwise_is_refused() -> None:
    """Its modules are those of Llama, but what it does to the stream does not commute with a rotation."""
    model = random_model("llama")
    model.model.layers[1].register_forward_hook(lambda _module, _inputs, output: output.relu())
    assert obstacle(model) is None
    with pytest.raises(
        ModelError, match=r"changes the logits of LlamaForCausalLM by .*leave out --rotations folded"
    ):
        fold(model, seed=0)


def test_the_transform_of_the_kernels_is_that_of_the_format() -> None:
    from requant_kernels import rotate

    x, before, after = torch.randn(3, 5, 96), torch.randn(96), torch.randn(96)
    found = rotate(x, input_scales=before, output_scales=after)
    torch.testing.assert_close(found, hadamard(x * before) * after, rtol=1e-4, atol=1e-5)
