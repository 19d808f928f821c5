"""A dense folder holds the floats of the checkpoint and needs no requant."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from requant.checkpoint.read import load_weights
from requant.errors import CheckpointError, InputError, NumericalError, OutputError, WriteError
from requant.exporters import dense
from requant.exporters.export import export
from requant.exporters.source import open_source
from requant.inference.load import load

KINDS = ("awq", "codebook-int8", "trellis-int8", "semi_structured")
FAST_KIND = {
    "llama-tied": "awq",
    "gpt2": "trellis-int8",
    "gpt-neox": "codebook-int8",
    "qwen2": "semi_structured",
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama", kind) for kind in KINDS),
        *(
            pytest.param(name, kind, marks=() if kind == fast else pytest.mark.slow)
            for name, fast in FAST_KIND.items()
            for kind in KINDS
        ),
    ],
)
def test_the_logits_are_those_of_the_checkpoint(
    make_checkpoint, tmp_path: Path, name: str, kind: str
) -> None:
    """Sparse parts and every container, transposed layers, tied heads, names that differ on disk."""
    checkpoint, _ = make_checkpoint(name, kind=kind)
    written = export(checkpoint, "dense", tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = load(checkpoint, dequantize=True)
    tokens = torch.arange(40)[None]
    assert torch.equal(plain(tokens).logits, ours(tokens).logits)
    assert plain.dtype == torch.float32 and not hasattr(plain.config, "quantization_config")
    assert written.matrices == len(list(load_weights(checkpoint))) and written.dtype == "float32"
    assert written.files == {"model.safetensors": (tmp_path / "out" / "model.safetensors").stat().st_size}


def test_it_is_rounded_once(make_checkpoint, tmp_path: Path) -> None:
    checkpoint, _ = make_checkpoint("llama")
    export(checkpoint, "dense", tmp_path / "out", dtype="bfloat16")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    for name, weight in load_weights(checkpoint):
        assert torch.equal(stored[f"{name}.weight"], weight.dequantize().bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_it_loads_where_requant_is_not_imported(make_checkpoint, tmp_path: Path) -> None:
    checkpoint, _ = make_checkpoint("llama")
    export(checkpoint, "dense", tmp_path / "out")
    script = (
        "import sys, torch; from transformers import AutoModelForCausalLM as A;"
        f"m = A.from_pretrained({str(tmp_path / 'out')!r}); assert 'requant' not in sys.modules;"
        "print(m(torch.arange(9)[None]).logits.double().sum().item())"
    )
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    ours = load(checkpoint, dequantize=True)(torch.arange(9)[None]).logits.double().sum().item()
    assert float(found.stdout.splitlines()[-1]) == pytest.approx(ours, rel=1e-6), found.stderr


def test_shards(make_checkpoint, tmp_path: Path) -> None:
    checkpoint, _ = make_checkpoint("llama")
    (tmp_path / "out").mkdir()
    written = dense.write(open_source(checkpoint, dtype="auto"), tmp_path / "out", max_shard_bytes=100_000)
    assert len(written.files) > 2 and written.files[0].startswith("model-00001-of-0000")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(40)[None]
    assert torch.equal(plain(tokens).logits, load(checkpoint, dequantize=True)(tokens).logits)


def test_files_beside_the_weights(grid_checkpoint, tmp_path: Path) -> None:
    checkpoint = grid_checkpoint()
    (checkpoint / "report.html").write_text("<p>ours</p>")
    (checkpoint / "model.safetensors.index.json.bak.bin").write_text("")
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
    export(checkpoint, "dense", tmp_path / "out")
    names = {
        str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()
    }
    assert names >= {
        "tokenizer.json",
        "generation_config.json",
        "recipe.yaml",
        "additional_chat_templates/tool.jinja",
    }
    assert not names & {"report.html", "checksums.json", "model.safetensors.index.json.bak.bin"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: org/Base" in card and "license: mit" in card
    assert "ours" not in card and "exported as dense" in card
    assert (tmp_path / "out").stat().st_mode & 0o055 == 0o055
    assert {entry.name for entry in tmp_path.iterdir()} == {"source", "checkpoint", "out"}


def test_a_large_file_beside_the_weights_is_left(
    grid_checkpoint, tmp_path: Path, monkeypatch, caplog
) -> None:
    """As where a checkpoint is written: data sets lie beside models too."""
    checkpoint = grid_checkpoint()
    monkeypatch.setattr("requant.checkpoint.save.MOST_COPIED_BYTES", 100_000)
    (checkpoint / "train.jsonl").write_bytes(b"x" * 100_001)
    export(checkpoint, "dense", tmp_path / "out")
    assert not (tmp_path / "out" / "train.jsonl").exists() and (tmp_path / "out" / "recipe.yaml").is_file()
    assert "train.jsonl is not copied: it has 97.7 KiB" in caplog.text


def test_what_cannot_be_done_leaves_nothing(grid_checkpoint, tmp_path: Path, monkeypatch) -> None:
    checkpoint = grid_checkpoint()
    with pytest.raises(InputError, match=r"--to denze is unknown \(did you mean 'dense'\?\)"):
        export(checkpoint, "denze", tmp_path / "out")
    with pytest.raises(InputError, match="--dtype int8 is unknown"):
        export(checkpoint, "dense", tmp_path / "out", dtype="int8")
    with pytest.raises(OutputError, match="exists already"):
        export(checkpoint, "dense", tmp_path / "source")
    with pytest.raises(CheckpointError, match="is not quantized"):
        export(tmp_path / "source", "dense", tmp_path / "out")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dense, "write_shards", full)
    with pytest.raises(WriteError, match=r"\(No space left on device\); free some space"):
        export(checkpoint, "dense", tmp_path / "out")
    with pytest.raises(WriteError):
        export(checkpoint, "dense", tmp_path / "new" / "deeper" / "out")
    assert {entry.name for entry in tmp_path.iterdir()} == {"source", "checkpoint"}


def test_a_weight_beyond_float16_is_refused(make_checkpoint, tmp_path: Path) -> None:
    checkpoint, _ = make_checkpoint("llama")
    source = open_source(checkpoint, dtype="float16")
    with pytest.raises(
        NumericalError, match=r"x holds values beyond torch\.float16; export with --dtype bfloat16"
    ):
        source.cast("x", torch.tensor([1e6]))


def test_a_config_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["num_hidden_layers"] = 1
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="describes no model with these matrices"):
        export(checkpoint, "dense", tmp_path / "out")


def test_a_checkpoint_that_was_changed_is_refused(grid_checkpoint, tmp_path: Path) -> None:
    """Its export would be a model that nothing shows to be damaged; of a folder without checksums nothing is known."""
    checkpoint = grid_checkpoint()
    sums = json.dumps({"files": {"model.safetensors": "0" * 64}})
    (checkpoint / "checksums.json").write_text(sums)
    with pytest.raises(CheckpointError, match=r"but checksums\.json says 0000.* download it again"):
        export(checkpoint, "dense", tmp_path / "out")
    assert {entry.name for entry in tmp_path.iterdir()} == {"source", "checkpoint"}
    (checkpoint / "checksums.json").unlink()
    export(checkpoint, "dense", tmp_path / "out")


def test_the_command(cli, grid_checkpoint, tmp_path: Path) -> None:
    checkpoint = grid_checkpoint()
    code, out, error = cli("export", checkpoint, "--to", "dense", "--output", tmp_path / "out", "--json")
    assert code == 0, error
    found = json.loads(out)
    assert (found["target"], found["matrices"], found["dtype"]) == ("dense", 14, "float16")
    assert found["bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    code, out, error = cli("export", checkpoint, "--to", "dense", "--output", tmp_path / "again")
    assert code == 0 and "weight files" in out and str(tmp_path / "again") in out
    code, _, error = cli("export", checkpoint, "--to", "dense", "--output", tmp_path / "again")
    assert code == 2 and "exists already" in error
