"""Folders whose table of embedding and head lies, or that of its bands, are refused before anything is read by it."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import requant
from requant.errors import CheckpointError
from requant.formats.codebook import CodebookSpec
from requant.formats.packed_spec import PackedSpec

from .embeddings import check_refused

pytestmark = pytest.mark.usefixtures("any_trellis_codes")


HOSTILE_BANDS = [
    (lambda entry: entry.pop("parts"), "parts of model.embed_tokens are not a list of 2 to 16 bands"),
    (lambda entry: entry["parts"].pop(), "the bands of model.embed_tokens do not make its shape"),
    (lambda entry: entry["parts"].__setitem__(1, 3), "band 1 of model.embed_tokens is not a JSON object"),
    (lambda entry: entry["parts"][2].update(format="bands"), "band 2 of model.embed_tokens has format"),
    (
        lambda entry: entry["parts"][2].update(more=1),
        "band 2 of model.embed_tokens has the unknown key 'more'",
    ),
    (lambda entry: entry["parts"][0].pop("rotates_output"), "no trellis of unmixed rows"),
    (lambda entry: entry["parts"][0].update(bits=5.25), "model.embed_tokens has bits"),
    (lambda entry: entry["parts"][0]["shape"].__setitem__(1, 32), "do not make its shape"),
]


@pytest.fixture
def lying(make_banded, tmp_path: Path):
    """A copy of a checkpoint with bands, whose `quantization_config` a function has changed."""

    def of(change) -> Path:
        path = Path(shutil.copytree(make_banded("llama-tied")[1], tmp_path / "copy"))
        config = json.loads((path / "config.json").read_text())
        change(config["quantization_config"])
        (path / "config.json").write_text(json.dumps(config))
        return path

    return of


@pytest.mark.parametrize(("change", "message"), HOSTILE_BANDS)
def test_hostile_bands(lying, change, message: str) -> None:
    path = lying(lambda entry: change(entry["vocabulary"]["model.embed_tokens"]))
    for load in (requant.load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CheckpointError, match=message):
            load(path)


def test_matrices_of_the_blocks_have_no_bands(lying) -> None:
    def change(entry) -> None:
        entry["modules"]["model.layers.0.mlp.up_proj"] = entry["vocabulary"]["model.embed_tokens"]

    with pytest.raises(CheckpointError, match="up_proj in modules has bands"):
        requant.load(lying(change))


class TestHostile:
    """A folder whose table of embedding and head lies."""

    @pytest.fixture
    def refuse(self, make, tmp_path: Path):
        def run(change, message: str, name: str = "llama-tied", **budget) -> None:
            source = make(name, **(budget or {"head_bits": 8}))[1]
            check_refused(Path(source), tmp_path / "copy", change, message)

        return run

    def test_shapes(self, refuse) -> None:
        def larger(_config, entry) -> None:
            entry["vocabulary"]["model.embed_tokens"]["shape"] = [10**6, 64]

        refuse(larger, r"codes is torch.int32 \[264, 16\] .* asks for torch.int32 \[1000000, 16\]")

        def vocabulary(config, _entry) -> None:
            config["vocab_size"] = 300

        refuse(vocabulary, r"model.embed_tokens has shape \[264, 64\] in vocabulary, but .* \[300, 64\]")

    @pytest.mark.parametrize("value", [[], 3, "x", {"a": {}, "b": {}, "c": {}}])
    def test_no_table(self, refuse, value: object) -> None:
        def change(_config, entry) -> None:
            entry["vocabulary"] = value

        refuse(change, "vocabulary does not list an embedding and a head")

    def test_formats(self, refuse) -> None:
        spec = PackedSpec(dense=CodebookSpec(bits=4, shape=(264, 64))).to_json()
        sparse = {"sparse": 5, "sparse_values": "float16", "sparse_counts": "uint8"}
        for broken in (spec, sparse, {"column_scales": True}):

            def change(_config, entry, broken=broken) -> None:
                table = entry["vocabulary"]
                table["model.embed_tokens"] = (
                    broken if "format" in broken else table["model.embed_tokens"] | broken
                )

            refuse(
                change,
                "model.embed_tokens in vocabulary is not a plain grid, and no trellis of unmixed rows, of its own",
            )

    def test_trellises(self, refuse) -> None:
        def mixed(_config, entry) -> None:
            del entry["vocabulary"]["model.embed_tokens"]["rotates_output"]

        refuse(
            mixed,
            "is not a plain grid, and no trellis of unmixed rows",
            method="trellis",
            head_bits=8,
            embedding_bits=8,
        )

        def early(_config, entry) -> None:
            entry["format_version"] = 5

        message = "is not a grid, which needs format version 6, but version 5 is given"
        refuse(early, message, method="trellis", head_bits=8, embedding_bits=8)

    def test_names(self, refuse) -> None:
        def renamed(_config, entry) -> None:
            entry["vocabulary"] = {"model.norm": entry["vocabulary"]["model.embed_tokens"]}

        refuse(renamed, "model.norm.codes is missing")

        def doubled(_config, entry) -> None:
            name, spec = next(iter(entry["modules"].items()))
            entry["vocabulary"][name] = spec

        refuse(doubled, "in vocabulary is not a plain grid, and no trellis of unmixed rows, of its own")

        def elsewhere(_config, entry) -> None:
            name = next(iter(entry["modules"]))
            entry["vocabulary"] |= {name: entry["modules"].pop(name)}

        refuse(
            elsewhere,
            "lists model.layers.0.self_attn.q_proj in vocabulary, but the embedding of LlamaForCausalLM",
        )

    def test_ties(self, refuse) -> None:
        def tie(config, _entry) -> None:
            config["tie_word_embeddings"] = True

        refuse(tie, "ties lm_head to model.embed_tokens", name="llama", head_bits=6)

    def test_versions(self, refuse) -> None:
        def older(_config, entry) -> None:
            entry["format_version"] = 1

        refuse(older, "format version 1 has no vocabulary, but model.embed_tokens")
