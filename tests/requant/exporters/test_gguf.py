"""Every weight in the file is the checkpoint's; transformers' own GGUF reader computes the same logits."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from requant.checkpoint.read import load_weights
from requant.errors import InputError
from requant.exporters.export import export
from requant.exporters.gguf import paired_rows
from requant.exporters.gguf_blocks import bytes_of_row, encode
from requant.exporters.gguf_metadata import rope_factors
from requant.exporters.gguf_tokenizer import pre_tokenizer, starts_with_space
from requant.formats.grid import GridSpec
from requant.formats.other_programs import block_type
from requant.inference.load import load

from .conftest import LLAMA3_ROPE, grid, sentencepiece

gguf = pytest.importorskip("gguf")
TOKENS = torch.arange(60)[None]
EXACT = {
    **{(bits, True): "Q4_0" for bits in (2, 3, 4)},
    (5, True): "Q5_0",
    **{(bits, True): "Q8_0" for bits in (6, 7, 8)},
    (2, False): "Q4_0",
    (3, False): "Q4_0",
    (4, False): "Q5_0",
    **{(bits, False): "Q8_0" for bits in (5, 6, 7)},
    (8, False): None,
}


@pytest.mark.parametrize(("bits", "symmetric"), EXACT)
@pytest.mark.parametrize("group_size", [32, 96])
def test_blocks_hold_the_grid_exactly(bits: int, symmetric: bool, group_size: int) -> None:
    spec = GridSpec(bits=bits, shape=(5, 192), group_size=group_size, zero_points=not symmetric)
    name = block_type(spec)
    assert name == EXACT[bits, symmetric]
    if name is not None:
        values = grid(5, 192, bits=bits, group_size=group_size, symmetric=symmetric)
        data = encode(values, name)
        assert data.shape == (5, bytes_of_row(name, 192))
        read = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[name])
        assert np.array_equal(read, values.dequantize().numpy())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 128}),  # transformers' reader assumes 128
    ],
)
@pytest.mark.parametrize("symmetric", [pytest.param(True, marks=pytest.mark.slow), False])
def test_transformers_reads_it_back(grid_checkpoint, tmp_path: Path, kind, changes, symmetric) -> None:
    checkpoint = grid_checkpoint(kind, symmetric=symmetric, **changes)
    written = export(checkpoint, "gguf", tmp_path / "out")
    assert list(written.files) == ["model.gguf"] and "14 x Q" in written.notes[0]
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32
    ).eval()
    ours = load(checkpoint, dtype=torch.float32, dequantize=True)
    for name, weight in load_weights(checkpoint):
        assert torch.equal(theirs.get_submodule(name).weight, weight.dequantize())
    if changes.get("attention_bias"):  # transformers' reader leaves these biases out; the file has them
        reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
        bias = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.attn_k.bias")
        own = ours.model.layers[1].self_attn.k_proj.bias
        assert torch.equal(torch.from_numpy(bias.data.copy()), own[paired_rows(32, 2)])
        return
    assert torch.equal(theirs(TOKENS).logits, ours(TOKENS).logits)


def test_the_file_is_whole(grid_checkpoint, tmp_path: Path) -> None:
    checkpoint = grid_checkpoint(
        bits=8, group_size=64, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    export(checkpoint, "gguf", tmp_path / "out")
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama" and fields["llama.rope.freq_base"] == 5e5
    assert fields["llama.attention.head_count_kv"] == 2 and fields["llama.rope.dimension_count"] == 16
    assert fields["tokenizer.ggml.pre"] == "gpt-2" and fields["tokenizer.ggml.add_bos_token"] is False
    tokens = fields["tokenizer.ggml.tokens"]
    vocabulary = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    assert all(tokens[index] == token for token, index in vocabulary.items()) and len(tokens) == 264
    assert (
        tokens[256] == "<end>" and fields["tokenizer.ggml.token_type"][256] == 3 and tokens[-1] == "[PAD263]"
    )
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.attn_norm.weight"] == "F32" and kinds["token_embd.weight"] == "F16"
    assert kinds["blk.1.ffn_down.weight"] == "Q8_0" and kinds["output.weight"] == "F16" and len(kinds) == 21


def test_rows_of_q_change_places_as_llama_cpp_wants() -> None:
    assert paired_rows(8, 2).tolist() == [
        0,
        2,
        1,
        3,
        4,
        6,
        5,
        7,
    ]  # two heads: halves (0, 1) and (2, 3) interleave


def test_llama3_frequencies(grid_checkpoint, tmp_path: Path) -> None:
    """The file's divisors are those by which transformers divides."""
    checkpoint = grid_checkpoint(rope_parameters=LLAMA3_ROPE)
    export(checkpoint, "gguf", tmp_path / "out")
    model = load(checkpoint)
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    factors = next(tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight").data
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    assert torch.allclose(
        plain / torch.from_numpy(factors.copy()), model.model.rotary_emb.inv_freq, rtol=1e-5
    )
    assert factors.min() == 1 and factors.max() == 8 and len(set(factors.tolist())) > 2
    assert torch.equal(rope_factors(model.config), torch.from_numpy(factors.copy()))


def test_what_llama_cpp_cannot_hold(make_checkpoint, grid_checkpoint, tmp_path: Path) -> None:
    for kind, reason in (
        ("codebook", "has codebook codes"),
        ("trellis", "has trellis codes"),
        ("symmetric", "has a sparse part"),
    ):
        (tmp_path / kind).mkdir()
        checkpoint, _ = make_checkpoint("llama", kind=kind)
        with pytest.raises(
            InputError, match=f"q_proj {reason}.*no type of llama.cpp holds exactly; export --to dense"
        ):
            export(checkpoint, "gguf", tmp_path / "out")
        for name in ("source", "checkpoint"):
            (tmp_path / name).rename(tmp_path / kind / name)
    with pytest.raises(InputError, match="8 bits with zero points"):
        export(grid_checkpoint(bits=8, symmetric=False), "gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_floats_that_llama_cpp_has_no_type_for(grid_checkpoint, tmp_path: Path) -> None:
    checkpoint = grid_checkpoint(dtype=torch.float64)
    with pytest.raises(InputError, match=r"embed_tokens.weight is torch.float64.*give --dtype float16"):
        export(checkpoint, "gguf", tmp_path / "out")
    assert list(export(checkpoint, "gguf", tmp_path / "out", dtype="float16").files) == ["model.gguf"]


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("gemma3_text", {}, "knows llama, mistral, qwen2, qwen3, not gemma3_text"),
        ("mistral", {"sliding_window": 16}, "sliding_window 16"),
        ("llama", {"hidden_act": "gelu"}, "computes silu, not gelu"),
        ("llama", {"intermediate_size": 176}, "176 columns in groups of 32, not in multiples of 32"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_models_that_llama_cpp_would_compute_otherwise(
    grid_checkpoint, tmp_path: Path, kind, changes, reason
) -> None:
    checkpoint = grid_checkpoint(kind, **changes)
    with pytest.raises(InputError, match=reason):
        export(checkpoint, "gguf", tmp_path / "out")


def test_a_tokenizer_that_llama_cpp_has_no_name_for(grid_checkpoint, tmp_path: Path) -> None:
    checkpoint = grid_checkpoint()
    description = json.loads((checkpoint / "tokenizer.json").read_text())
    description["pre_tokenizer"] = {"type": "Whitespace"}
    (checkpoint / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(InputError, match=r"splits text \(Whitespace\) in a way"):
        export(checkpoint, "gguf", tmp_path / "out")
    for damaged in ('{"model": 3}', '{"model": {"byte_fallback": true}}', '{"pre_tokenizer": 5}'):
        (checkpoint / "tokenizer.json").write_text(damaged)
        with pytest.raises(InputError, match=r"tokenizer\.json"):
            export(checkpoint, "gguf", tmp_path / "out")


@pytest.mark.parametrize("model", ["demo-4m", "bench-32m"])
def test_the_pre_tokenizer_of_a_shipped_kind(model: str, shared: Callable[[str], Path]) -> None:
    file = shared(f"models/{model}/tokenizer.json")
    assert pre_tokenizer(json.loads(file.read_text())) == "llama-bpe"


def test_llama3s_pattern_is_known() -> None:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    steps = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ]
    description = {"model": {"type": "BPE"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    assert pre_tokenizer(description) == "llama-bpe"
    steps[0]["pattern"]["Regex"] = pattern.replace(r"\p{N}{1,3}", r"\p{N}")
    assert pre_tokenizer(description) == "qwen2"
    steps[0]["pattern"]["Regex"] = pattern.replace(r"\p{N}{1,3}", r"\p{N}{1,2}")
    with pytest.raises(InputError, match=r"Split \+ ByteLevel"):
        pre_tokenizer(description)


def test_without_the_package_it_says_what_to_install(grid_checkpoint, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(InputError, match=r"pip install .*\[gguf\]"):
        export(grid_checkpoint(), "gguf", tmp_path / "out")


def test_a_sentencepiece_model(grid_checkpoint, tmp_path: Path, tiny_text) -> None:
    checkpoint = grid_checkpoint(vocab_size=640)
    tokenizer = sentencepiece(tiny_text.text)
    tokenizer.save_pretrained(checkpoint)
    export(checkpoint, "gguf", tmp_path / "out")
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["tokenizer.ggml.model"] == "llama" and fields["tokenizer.ggml.add_space_prefix"] is True
    kinds = fields["tokenizer.ggml.token_type"]
    assert kinds[:4] == [2, 3, 3, 6] and kinds[258:260] == [6, 1] and kinds[-1] == 5
    assert fields["tokenizer.ggml.tokens"][3:5] == ["<0x00>", "<0x01>"]
    assert fields["tokenizer.ggml.scores"][:3] == [0, -1, -2] and "tokenizer.ggml.merges" not in fields
    assert fields["tokenizer.ggml.unknown_token_id"] == 0 and fields["tokenizer.ggml.bos_token_id"] == 1
    description = json.loads((checkpoint / "tokenizer.json").read_text())
    description["model"]["merges"].reverse()
    with pytest.raises(InputError, match="not a SentencePiece model"):
        starts_with_space(description)
