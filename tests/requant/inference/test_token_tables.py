"""Per-layer embeddings in codes: what is measured, saved and loaded is one table, with its scale, at the bits promised."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import requant
from requant.allocation.embedding_and_head import QuantizedEmbeddingAndHead, embedding_and_head_of
from requant.checkpoint.sizes import byte_table
from requant.checkpoint.validate import read_header
from requant.errors import ModelError
from requant.inference.quant_embedding import QuantEmbedding
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Budget, Calibration, Evaluation, Finetune, Recipe

from .embeddings import check_refused

pytestmark = pytest.mark.usefixtures("any_trellis_codes")

IDS = torch.arange(3 * 20).view(3, 20) % 250
TABLE, EMBEDDING = "model.embed_tokens_per_layer", "model.embed_tokens"
NAMES = ["gemma3n", "gemma4-per-layer"]


@pytest.fixture(scope="module")
def make(any_trellis_codes, tiny_folder, tiny_text_file: Path, tmp_path_factory: pytest.TempPathFactory):
    """`make(name, method="rtn", steps=0, **budget)`: the result of a run and its folder, made once."""
    made: dict = {}

    def of(name: str, method: str = "rtn", steps: int = 0, **budget):
        key = (name, method, steps, *sorted(budget.items()))
        if key not in made:
            recipe = Recipe(
                mode="dense",
                method=method,
                quantizer=METHODS[method].config(bits=4),
                calibration=Calibration(num_samples=4, seq_len=32),
                evaluation=Evaluation(context=32, windows=2, samples=0),
                budget=Budget(**budget),
                finetune=Finetune(steps=steps, tokens_per_step=64, eval_every=2),
                skip=("*.self_attn.*", "*.gate_proj", "*.up_proj", "*.per_layer_*"),  # for time
            )
            result = requant.quantize(str(tiny_folder(name)), recipe, tiny_text_file)
            made[key] = result, requant.save(result, tmp_path_factory.mktemp("tables") / "out")
        return made[key]

    return of


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("trellis", "gemma3n"),
        pytest.param("rtn", "gemma4-per-layer", marks=pytest.mark.slow),
        pytest.param("rtn", "gemma3n", marks=pytest.mark.slow),
        pytest.param("trellis", "gemma4-per-layer", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_gives_the_logits_that_were_measured(
    make, name: str, method: str, tmp_path: Path
) -> None:
    result, path = make(name, method, head_bits=8, embedding_bits=8)
    header = read_header(path)
    assert list(header.embedding_and_head) == [EMBEDDING, TABLE]
    assert header.quantization["format_version"] == 7
    loaded = requant.load(path)
    table, original = loaded.get_submodule(TABLE), result.model.get_submodule(TABLE)
    assert isinstance(table, QuantEmbedding) and table.scale.factor == original.scalar_embed_scale != 1
    assert torch.equal(table(IDS), original(IDS))
    expected = logits(result.model)
    assert torch.equal(logits(loaded), expected)
    assert torch.equal(logits(requant.load(path, dequantize=True)), expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(path)), expected)
    loaded.save_pretrained(tmp_path / "again")
    first, again = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "again"))
    assert first.keys() == again.keys() and all(torch.equal(first[n], again[n]) for n in first)
    half, plain = (requant.load(path, dtype=torch.bfloat16, dequantize=d) for d in (False, True))
    assert torch.equal(logits(half), logits(plain))


@pytest.mark.parametrize("name", NAMES)
def test_it_gets_the_bits_of_the_promise(make, name: str) -> None:
    """`--bits` gives it the fewest that add little; its bytes are counted, and are those of the files."""
    result, path = make(name, bits=5.0)
    allocation = result.allocation
    assert allocation is not None
    bits = allocation.token_table_bits[TABLE]
    assert 3 <= bits <= 8 and read_header(path).embedding_and_head[TABLE].bits == bits
    table = byte_table(path)
    assert table.parts["token_tables"] == table.embedding_and_head[TABLE].bytes
    report = json.loads((path / "report.json").read_text())
    assert report["sizes"]["token_tables"] == table.parts["token_tables"]
    assert report["budget"]["token_table_bits"] == {TABLE: bits}
    assert f"{TABLE}: {bits} bits." in (path / "report.html").read_text(encoding="utf-8")
    whole = make(name, bits=5.0, embedding_bits=16)[1]
    rows, width = result.model.get_submodule(TABLE).weight.shape
    assert byte_table(whole).parts["token_tables"] == rows * width * 4
    assert read_header(whole).quantization["format_version"] == 1


def test_a_size_is_split_among_all_of_them(make) -> None:
    _, smallest = make("gemma3n", bits=5.0, embedding_bits=4)
    size = byte_table(smallest).bytes + 4000
    result, path = make("gemma3n", size=size)
    assert 0 <= size - byte_table(path).bytes < 0.02 * size
    assert set(result.allocation.bits_of_tables) == {"embedding", "head", TABLE}


@pytest.mark.slow
def test_training_leaves_it_as_it_is_coded(make) -> None:
    """It takes part with its codes, so that all else learns beside them."""
    plain, _ = make("gemma3n", embedding_bits=4, head_bits=4)
    result, path = make("gemma3n", steps=4, embedding_bits=4, head_bits=4)
    for field in ("codes", "scales", "zero_points"):
        before, after = (getattr(each.embedding_and_head[TABLE].dense, field) for each in (plain, result))
        assert torch.equal(before, after)
    before, after = (each.embedding_and_head[EMBEDDING].dense.scales for each in (plain, result))
    assert not torch.equal(before, after)
    assert torch.equal(logits(requant.load(path)), logits(result.model))
    stays, _ = make("gemma3n", steps=4)  # nor does it learn without codes
    source = load_file(Path(stays.prepared.source) / "model.safetensors")
    assert torch.equal(stays.model.get_submodule(TABLE).weight, source[f"{TABLE}.weight"])
    assert not torch.equal(stays.model.get_submodule(EMBEDDING).weight, source[f"{EMBEDDING}.weight"])


@pytest.mark.parametrize("method", ["rtn", "trellis"])
def test_a_large_table_is_written_in_parts(make, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    result, _ = make("gemma3n", method, head_bits=8, embedding_bits=8)
    tables = QuantizedEmbeddingAndHead(
        embedding_and_head=embedding_and_head_of(result.model), weights=result.embedding_and_head
    )
    table = tables.parameters[TABLE]
    whole = table.clone()
    table.zero_()
    monkeypatch.setattr("requant.allocation.embedding_and_head.WEIGHTS_AT_ONCE", 3 * 16 * 96)
    tables.apply_weights(quantized=True)
    assert torch.equal(table, whole)


def test_an_export_has_the_same_numbers(make, tmp_path: Path) -> None:
    result, path = make("gemma3n", head_bits=8, embedding_bits=8)
    requant.export(path, "dense", tmp_path / "dense")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "dense")), logits(result.model))


def test_new_tokens_are_refused(make) -> None:
    _, path = make("gemma3n", bits=5.0, embedding_bits=16)
    header = read_header(path)
    assert not header.embedding_and_head
    model = requant.load(make("gemma3n", head_bits=8, embedding_bits=8)[1])
    for coded in (model, copy.deepcopy(model)):
        with pytest.raises(
            ModelError, match=r"per-layer embeddings of this .* are codes, whose 264 rows cannot become"
        ):
            coded.resize_token_embeddings(300)


class TestHostile:
    """A folder whose list of tables lies."""

    @pytest.fixture
    def refuse(self, make, tmp_path: Path):
        def run(change, message: str, name: str = "gemma3n") -> None:
            source = make(name, head_bits=8, embedding_bits=8)[1]
            check_refused(Path(source), tmp_path / "copy", change, message)

        return run

    def test_versions(self, refuse) -> None:
        def older(_config, entry) -> None:
            entry["format_version"] = 6

        refuse(older, f"lists {TABLE} in vocabulary, but the embedding of")

        def three(_config, entry) -> None:
            entry["format_version"] = 6
            entry["vocabulary"]["lm_head"] = entry["vocabulary"][EMBEDDING]

        refuse(three, "vocabulary does not list an embedding and a head")

    def test_names_and_shapes(self, refuse) -> None:
        def elsewhere(_config, entry) -> None:
            name = next(iter(entry["modules"]))
            entry["vocabulary"] |= {name: entry["modules"].pop(name)}

        refuse(elsewhere, f"in vocabulary, but the embedding of .* and it has {TABLE}; download")

        def shorter(config, _entry) -> None:
            config["vocab_size_per_layer_input"] = 250

        refuse(shorter, rf"{TABLE} has shape \[257, 96\] in vocabulary, but .* \[250, 96\]")

        def gone(config, _entry) -> None:
            config["hidden_size_per_layer_input"] = 0

        refuse(gone, "in vocabulary, but the embedding of", name="gemma4-per-layer")

    def test_kinds(self, refuse) -> None:
        def scaled(_config, entry) -> None:
            entry["vocabulary"][TABLE]["column_scales"] = True

        refuse(scaled, f"{TABLE} in vocabulary is not a plain grid")
