"""Embedding and head on grids and in trellis codes: what is measured, saved and loaded is the same table, held once."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import requant
from requant.checkpoint.sizes import byte_table
from requant.checkpoint.validate import read_header
from requant.errors import ModelError
from requant.formats.bands import BandsSpec
from requant.formats.grid import GridSpec
from requant.formats.packed_spec import PackedSpec
from requant.formats.trellis import TrellisSpec
from requant.inference.quant_embedding import QuantEmbedding
from requant.inference.quant_linear import QuantLinear
from requant.models.targets import embedding_and_head_modules

from ...architectures import whole_runs
from .embeddings import IDS, logits, recipe_of

pytestmark = pytest.mark.usefixtures("any_trellis_codes")

METHOD_NAMES = ["rtn", "trellis"]  # of the matrices; that of embedding and head follows


@pytest.mark.parametrize("name", whole_runs())
def test_a_checkpoint_gives_the_logits_that_were_measured(make, name: str) -> None:
    gives_the_logits_that_were_measured(make, name, "rtn", GridSpec)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_checkpoint_of_trellis_codes_does_too(make, name: str) -> None:
    gives_the_logits_that_were_measured(make, name, "trellis", TrellisSpec)


def gives_the_logits_that_were_measured(make, name: str, method: str, kind: type) -> None:
    result, path = make(name, method=method, head_bits=8, embedding_bits=8)
    (embedding_name, embedding), (head_name, head) = embedding_and_head_modules(requant.load(path))
    assert isinstance(embedding, QuantEmbedding) and isinstance(head, QuantLinear)
    tied = result.prepared.model.get_output_embeddings().weight is (
        result.prepared.model.get_input_embeddings().weight
    )
    assert set(read_header(path).embedding_and_head) == (
        {embedding_name} if tied else {embedding_name, head_name}
    )
    assert all(isinstance(spec.dense, kind) for spec in read_header(path).embedding_and_head.values())
    expected = logits(result.model)
    assert torch.equal(logits(requant.load(path)), expected)
    assert torch.equal(logits(requant.load(path, dequantize=True)), expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(path)), expected)


@pytest.mark.parametrize("name", ["xglm", "biogpt"])
def test_rows_that_are_scaled_in_another_way_than_gemmas(make, name: str) -> None:
    gives_the_logits_that_were_measured(make, name, "rtn", GridSpec)
    path = make(name, method="rtn", head_bits=8, embedding_bits=8)[1]
    assert requant.load(path).get_input_embeddings().scale.factor == 8.0


@pytest.mark.parametrize("name", ["llama-tied", "llama"])
@pytest.mark.parametrize(
    ("method", "bits"),
    [
        ("rtn", 4),
        *(pytest.param("rtn", bits, marks=pytest.mark.slow) for bits in (5, 6)),
        pytest.param("trellis", 2, marks=pytest.mark.slow),
        ("trellis", 4.75),
    ],
)
def test_every_width(make, name: str, method: str, bits: float) -> None:
    result, path = make(name, method=method, head_bits=bits, embedding_bits=bits)
    assert torch.equal(logits(requant.load(path)), logits(result.model))
    assert {spec.bits for spec in read_header(path).embedding_and_head.values()} == {bits}


def test_one_of_two_may_stay(make) -> None:
    for part, kind in (("head_bits", "lm_head"), ("embedding_bits", "model.embed_tokens")):
        result, path = make("llama", **{part: 6})
        assert list(read_header(path).embedding_and_head) == [kind]
        assert torch.equal(logits(requant.load(path)), logits(result.model))


@pytest.mark.parametrize("bits", [8, 16])
def test_a_head_of_its_own_beside_a_configuration_that_ties_it(
    tiny_folder, tiny_text_file: Path, tmp_path: Path, bits: int
) -> None:
    """transformers keeps both tensors of such files, whatever config.json says; so does a checkpoint."""
    source = shutil.copytree(tiny_folder("llama"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    recipe = recipe_of(head_bits=bits, embedding_bits=bits)
    result = requant.quantize(str(source), recipe, tiny_text_file)
    path = requant.save(result, tmp_path / "checkpoint")
    assert read_header(path).config["tie_word_embeddings"] is False
    expected = logits(result.model)
    assert torch.equal(logits(requant.load(path)), expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(path)), expected)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_tied_tables_are_one_on_disk_and_in_memory(make, tmp_path: Path, method: str) -> None:
    _, path = make("llama-tied", method=method, head_bits=8, embedding_bits=8)
    tensors = load_file(path / "model.safetensors")
    assert "model.embed_tokens.codes" in tensors and not any(name.startswith("lm_head") for name in tensors)
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] is True
    model = requant.load(path)

    def shared(model) -> bool:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        return all(head.get_buffer(n) is b for n, b in embedding.named_buffers())

    assert shared(model) and shared(copy.deepcopy(model)) and shared(model.to(torch.bfloat16))
    model.to("meta")
    assert shared(model) and model.get_output_embeddings().codes.is_meta
    plain = requant.load(path, dequantize=True)
    assert plain.get_output_embeddings().weight is plain.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("llama-tied", "rtn"),
        ("llama", "rtn"),
        ("gemma3", "rtn"),
        ("llama-tied", "trellis"),
        ("llama", "trellis"),
    ],
)
def test_a_loaded_model_can_be_saved_again(make, tmp_path: Path, name: str, method: str) -> None:
    result, path = make(name, method=method, head_bits=8, embedding_bits=8)
    requant.load(path).save_pretrained(tmp_path / "again")
    first, again = load_file(path / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert first.keys() == again.keys() and all(torch.equal(first[n], again[n]) for n in first)
    assert torch.equal(logits(requant.load(tmp_path / "again")), logits(result.model))
    requant.load(path, dequantize=True).save_pretrained(tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits(plain), logits(result.model))


def test_the_output_follows_the_dtype_of_the_model(make) -> None:
    _, path = make("gemma3", head_bits=8, embedding_bits=8)
    half, plain = (requant.load(path, dtype=torch.bfloat16, dequantize=d) for d in (False, True))
    assert half.get_input_embeddings()(IDS).dtype == torch.bfloat16
    assert torch.equal(logits(half), logits(plain))
    cast = requant.load(path).to(torch.bfloat16)
    assert torch.equal(cast.get_input_embeddings()(IDS), half.get_input_embeddings()(IDS))


@pytest.mark.parametrize(
    ("method", "codes"), [("rtn", 6), ("trellis", 4)]
)  # of 6 rows, or of 4 rows of tiles
def test_only_the_rows_asked_for_are_dequantized(
    make, monkeypatch: pytest.MonkeyPatch, method: str, codes: int
) -> None:
    _, path = make("llama-tied", method=method, head_bits=8, embedding_bits=8)
    embedding = requant.load(path).get_input_embeddings()
    whole = embedding.quantized().dequantize()
    kind, seen = type(embedding.spec.dense), []
    original = kind.unpack
    monkeypatch.setattr(kind, "unpack", lambda own, t: seen.append(len(t["codes"])) or original(own, t))
    rows = torch.tensor([[3, 5, 263], [3, 100, 255]])
    assert torch.equal(embedding(rows), whole[rows])
    assert seen == [codes]
    if method == "trellis":  # and so many at a time
        monkeypatch.setattr("requant.formats.quantized_weight.ROW_WEIGHTS", 2 * 16 * 64)
        assert torch.equal(embedding(rows), whole[rows])
        assert seen == [codes, 2, 2]
    for outside in (len(whole), -1):
        with pytest.raises(IndexError):
            embedding(torch.tensor([outside]))


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_a_model_may_read_rows_of_an_embedding_in_codes(make, method: str) -> None:
    """Gemma 4 beside its encoders reads that of the padding."""
    _, path = make("gemma3", method=method, head_bits=8, embedding_bits=8)
    embedding = requant.load(path).get_input_embeddings()
    whole = embedding.quantized().dequantize()
    weight = embedding.weight
    assert (weight.shape, weight.dtype, weight.device) == (whole.shape, torch.float32, whole.device)
    for index in (3, -1, slice(2, 9), torch.tensor([[1, 5], [7, 7]]), (3, slice(None)), (slice(1, 3), 4)):
        assert torch.equal(weight[index], whole[index])
    for own in (copy.deepcopy(embedding), copy.deepcopy(embedding).to(torch.bfloat16)):
        assert own.weight.embedding is own and own.weight.dtype == own.dtype
        assert torch.equal(own.weight[3], whole[3].to(own.dtype))
    assert embedding.state_dict()["weight"].shape == (0,)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_a_head_is_dequantized_in_bands(make, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    result, path = make("llama", method=method, head_bits=8, embedding_bits=8)
    monkeypatch.setattr("requant.inference.quant_linear.BAND_WEIGHTS", 50 * 64)
    torch.testing.assert_close(logits(requant.load(path)), logits(result.model), rtol=1e-5, atol=1e-5)


def test_generation_goes_on_from_a_prompt(make) -> None:
    result, path = make("llama-tied", head_bits=8)
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    written = requant.load(path).generate(IDS[:, :4], **arguments)
    assert torch.equal(written, result.model.generate(IDS[:, :4], **arguments))


def test_quality_and_sizes_are_of_what_is_stored(make, tmp_path: Path) -> None:
    plain, coarse = make("llama-tied")[0], make("llama-tied", head_bits=4)[0]
    assert coarse.after.mean_kl > plain.after.mean_kl and coarse.before == plain.before
    assert plain.diagnosis.embedding_and_head_delta == 0 != coarse.diagnosis.embedding_and_head_delta
    assert coarse.diagnosis.delta_loss == pytest.approx(plain.diagnosis.delta_loss, rel=0.2)
    table, whole = byte_table(make("llama-tied", head_bits=4)[1]), byte_table(make("llama-tied")[1])
    assert table.bits_per_weight == whole.bits_per_weight  # of the matrices alone
    part = table.embedding_and_head["model.embed_tokens"]
    assert part.bits_per_weight == pytest.approx(
        4 + 16 / 64 + 32 / 64
    )  # scale; zero point, a word a row of 64
    assert table.parts["embedding"] == part.bytes < whole.parts["embedding"] / 3
    page = (make("llama-tied", head_bits=4)[1] / "report.html").read_text()
    assert "measured, embedding and head" in page


def test_inspect_lists_them_apart(make, cli) -> None:
    _, path = make("llama", head_bits=6, embedding_bits=6)
    code, out, _ = cli("inspect", path)
    assert code == 0 and "of the matrices" in out and "of the whole file" in out
    assert "of model.embed_tokens" in out and "of lm_head" in out
    code, out, _ = cli("inspect", path, "--json")
    found = json.loads(out)
    assert [row["matrix"] for row in found["vocabulary"]] == ["model.embed_tokens", "lm_head"]
    assert len(found["matrices"]) == 14 and "vocabulary" not in found["quantization_config"]


def test_old_checkpoints_keep_their_version(make) -> None:
    assert read_header(make("llama")[1]).quantization["format_version"] == 1
    assert read_header(make("llama", head_bits=6)[1]).quantization["format_version"] == 2
    _, path = make("llama", method="trellis", head_bits=8, embedding_bits=8)
    assert read_header(path).quantization["format_version"] == 6


@pytest.mark.parametrize("name", ["llama-tied", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_bands_are_saved_and_loaded(make_banded, tmp_path: Path, name: str) -> None:
    result, path = make_banded(name)
    header = read_header(path)
    assert header.quantization["format_version"] == 6
    for spec in header.embedding_and_head.values():
        assert isinstance(spec.dense, BandsSpec)
        assert [part.bits for part in spec.dense.parts] == [5.5, 4.5, 4, 3.5]
    expected = logits(result.model)
    for model in (
        requant.load(path), requant.load(path, dequantize=True), AutoModelForCausalLM.from_pretrained(path)
    ):  # fmt: skip
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    embedding = requant.load(path).get_input_embeddings()
    rows = torch.tensor([[0, 31, 32], [63, 64, 263]])
    floats = embedding.quantized().dequantize()[rows]
    torch.testing.assert_close(
        embedding(rows), floats if embedding.scale is None else embedding.scale(floats)
    )
    with pytest.raises(IndexError):
        embedding(torch.tensor([264]))
    requant.load(path).save_pretrained(tmp_path / "again")
    first, again = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "again"))
    assert first.keys() == again.keys() and all(torch.equal(first[n], again[n]) for n in first)
    table = byte_table(path)
    part = table.embedding_and_head["model.embed_tokens"]
    assert part.bits_per_weight == pytest.approx(4.1, abs=0.2)


def test_the_layer_says_what_it_is(make) -> None:
    _, path = make("llama-tied", head_bits=8)
    assert "QuantEmbedding(264, 64, bits=8)" in repr(requant.load(path))


def test_a_layer_before_its_weights_come() -> None:
    plain = torch.nn.Embedding(10, 32, dtype=torch.bfloat16)
    spec = PackedSpec(dense=GridSpec(bits=4, shape=(10, 32), group_size=16, zero_points=True))
    layer = QuantEmbedding(spec, plain)
    assert layer.dtype == torch.bfloat16 and layer.codes.shape == (10, 4)
    assert not list(layer.parameters()) and set(layer.state_dict()) == {*spec.tensors(), "weight"}


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("llama-tied", {"head_bits": 8, "embedding_bits": 8}),
        ("llama", {"head_bits": 8, "embedding_bits": 16}),
        ("llama", {"head_bits": 16, "embedding_bits": 8}),
    ],
)
def test_new_tokens_are_refused_where_rows_are_codes(make, name: str, budget: dict) -> None:
    _, path = make(name, **budget)
    model = requant.load(path)
    before, size = logits(model), model.config.vocab_size
    for same in ({}, {"new_num_tokens": size}, {"pad_to_multiple_of": 2}):  # scripts ask for it in any case
        assert model.resize_token_embeddings(**same) is model.get_input_embeddings()
    for coded in (model, copy.deepcopy(model), AutoModelForCausalLM.from_pretrained(path)):
        for other in ({"new_num_tokens": size + 1}, {"pad_to_multiple_of": size + 1}):
            with pytest.raises(
                ModelError, match=rf"whose {size} rows cannot become {size + 1}: resize the or"
            ):
                coded.resize_token_embeddings(**other)
        assert torch.equal(logits(coded), before)
    plain = requant.load(path, dequantize=True)
    plain.resize_token_embeddings(size + 1, mean_resizing=False)
    assert torch.equal(logits(plain)[..., :size], before)


def test_new_tokens_of_a_plain_embedding(make, tmp_path: Path) -> None:
    _, path = make("llama-tied", head_bits=16, embedding_bits=16)
    model = requant.load(path)
    before, size = logits(model), model.config.vocab_size
    model.resize_token_embeddings(size + 3)
    torch.testing.assert_close(logits(model)[..., :size], before)
    model.save_pretrained(tmp_path / "more")
    assert torch.equal(logits(requant.load(tmp_path / "more")), logits(model))
