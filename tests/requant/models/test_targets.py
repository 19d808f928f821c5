"""The linears of every architecture: their names and shapes, what is left, what is skipped."""

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from requant.errors import ModelError
from requant.models.experts import unfuse_experts
from requant.models.targets import find_blocks, find_linears

LLAMA_KINDS = {
    "q_proj": (64, 64),
    "k_proj": (32, 64),
    "v_proj": (32, 64),
    "o_proj": (64, 64),
    "gate_proj": (172, 64),
    "up_proj": (172, 64),
    "down_proj": (64, 172),
}


KINDS = {
    "llama-520": LLAMA_KINDS | {"gate_proj": (520, 64), "up_proj": (520, 64), "down_proj": (64, 520)},
    "llama-1216": LLAMA_KINDS | {"gate_proj": (1216, 64), "up_proj": (1216, 64), "down_proj": (64, 1216)},
    "phi3": {"qkv_proj": (128, 64), "o_proj": (64, 64), "gate_up_proj": (344, 64), "down_proj": (64, 172)},
    "opt": {kind: (64, 64) for kind in ("q_proj", "k_proj", "v_proj", "out_proj")}
    | {"fc1": (172, 64), "fc2": (64, 172)},
    "gpt-neox": {
        "query_key_value": (192, 64),
        "dense": (64, 64),
        "dense_h_to_4h": (172, 64),
        "dense_4h_to_h": (64, 172),
    },
}


def test_linears_of(tiny_model, architecture: str) -> None:
    model = tiny_model(architecture)
    targets = find_linears(model)
    blocks = model.config.num_hidden_layers
    if architecture == "gpt2":  # two projections of one name
        assert [target.name.removeprefix("transformer.h.0.") for target in targets[:4]] == [
            "attn.c_attn",
            "attn.c_proj",
            "mlp.c_fc",
            "mlp.c_proj",
        ]
        assert [target.shape for target in targets[:4]] == [(192, 64), (64, 64), (172, 64), (64, 172)]
        assert all(target.transposed and isinstance(target.module, Conv1D) for target in targets)
    else:
        kinds = KINDS.get(architecture, LLAMA_KINDS)
        assert len(targets) == blocks * len(kinds)
        assert all(target.shape == kinds[target.kind] and not target.transposed for target in targets)
    for target in targets:
        assert model.get_submodule(target.name) is target.module
        assert (
            target.size == target.shape[0] * target.shape[1] and tuple(target.weight().shape) == target.shape
        )
    assert [target.block for target in targets] == sorted(target.block for target in targets)
    assert {target.block for target in targets} == set(range(blocks))
    assert len({target.name for target in targets}) == len(targets)


def test_the_body_is_covered_and_the_rest_left(tiny_model, architecture: str) -> None:
    """What is not a target is an embedding, a head, a norm or a bias."""
    model = tiny_model(architecture)
    names = {f"{target.name}.weight" for target in find_linears(model)}
    for name, parameter in model.named_parameters():
        if name not in names and parameter.dim() > 1:
            assert any(part in name for part in ("embed", "wte", "wpe", "lm_head")), name


def test_set_weight_is_seen_by_the_forward_pass(tiny_model, architecture: str) -> None:
    model = tiny_model(architecture)
    target = find_linears(model)[0]
    x = torch.randn(3, target.shape[1])
    weight = torch.randn(target.shape)
    target.set_weight(weight)
    assert torch.equal(target.weight(), weight)
    bias = getattr(target.module, "bias", None)
    assert torch.allclose(target.module(x), x @ weight.T + (0 if bias is None else bias), atol=1e-5)


@pytest.mark.parametrize("pattern", ["down_proj", "*.mlp.down_proj", "model.layers.0.*"])
def test_skip(tiny_model, pattern: str) -> None:
    model = tiny_model("llama")
    kept = {target.name for target in find_linears(model, skip=[pattern])}
    gone = {target.name for target in find_linears(model)} - kept
    expected = 7 if "layers.0" in pattern else 2
    assert len(gone) == expected and all("layers.0." in name or "down_proj" in name for name in gone)


@pytest.mark.parametrize(
    ("family", "pattern", "name"),
    [
        (
            "mixtral",
            "model.layers.0.block_sparse_moe.experts.3.w1",
            "model.layers.0.mlp.experts.3.w1",
        ),
        ("nemotron-h", "backbone.layers.0.mixer.in_proj", "model.layers.0.mixer.in_proj"),
        ("deepseek-v4", "*.layers.1.ffn.experts.0.w2", "model.layers.1.mlp.experts.0.w2"),
    ],
)
def test_names_in_weight_files_are_names_too(tiny_model, family: str, pattern: str, name: str) -> None:
    """`requant inspect` lists them, so they are what is copied into a command."""
    model = tiny_model(family)
    unfuse_experts(model)
    every = {target.name: target for target in find_linears(model)}
    assert every.keys() - {target.name for target in find_linears(model, skip=[pattern])} == {name}
    own = {
        target.name: dict(target.options) for target in find_linears(model, options={pattern: {"bits": 3}})
    }
    assert own == {each: {"bits": 3} if each == name else {} for each in every}


@pytest.mark.parametrize(
    ("family", "pattern", "said"),
    [
("mixtral", "*.block_sparse_moe.gate", "model.layers.0.mlp.gate is never quantized; leave it out"),
        ("gpt-oss", "*.router", "model.layers.0.mlp.router is never quantized"),
        ("llama", "lm_head", "lm_head has an option of its own, --head-bits; 16 leaves it as it is"),
        ("llama-tied", "lm_head", "lm_head has an option of its own"),
        ("gemma3n", "*_per_layer", "model.embed_tokens_per_layer has an option of its own"),
        ("gpt-oss", "model.layers.0.mlp.experts.gate_up_proj", r"names look like model\.layers\.0\.mlp\.experts\.\d\.gate"),
    ],
)  # fmt: skip
def test_a_pattern_for_what_is_never_quantized_says_so(
    tiny_model, family: str, pattern: str, said: str
) -> None:
    model = tiny_model(family)
    unfuse_experts(model)
    with pytest.raises(ModelError, match=rf"matches no matrix; {said}"):
        find_linears(model, skip=[pattern])
    with pytest.raises(ModelError, match=rf"modules: .* matches no matrix; {said}"):
        find_linears(model, options={pattern: {"bits": 3}})


def test_options_for_matrices_that_are_skipped_are_refused(tiny_model) -> None:
    with pytest.raises(ModelError, match=r"modules: '\*\.up_proj' matches only matrices that are skipped"):
        find_linears(tiny_model("llama"), skip=["*.mlp.*"], options={"*.up_proj": {"bits": 3}})


def test_skip_that_matches_nothing_or_everything_is_refused(tiny_model) -> None:
    with pytest.raises(
        ModelError, match=r"--skip donw_proj matches no matrix; names look like model\.layers\.0"
    ):
        find_linears(tiny_model("llama"), skip=["donw_proj"])
    with pytest.raises(ModelError, match="every matrix is skipped"):
        find_linears(tiny_model("llama"), skip=["*"])


def test_a_module_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="Sequential has no list of transformer blocks"):
        find_blocks(torch.nn.Sequential(torch.nn.Linear(4, 4)))
