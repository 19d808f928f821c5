import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from requant.checkpoint import writer
from requant.checkpoint.inspect import inspection
from requant.checkpoint.new_folder import check_output, new_folder
from requant.checkpoint.read import load_weights
from requant.checkpoint.save import save_checkpoint
from requant.checkpoint.sizes import byte_table
from requant.checkpoint.validate import read_header
from requant.errors import NumericalError, OutputError, RequantError
from requant.formats.grid import Grid
from requant.formats.quantized_weight import QuantizedWeight, pack
from requant.formats.tensor_spec import TensorSpec
from requant.inference.load import load
from requant.models.targets import find_linears


def save(model, output: Path, weights, **kwargs) -> Path:
    return save_checkpoint(
        output, **{"source": None, "model": model, "weights": weights, "manifest": {}} | kwargs
    )


@pytest.fixture
def parts(make_checkpoint, random_weight):
    """A plain model and quantized weights for it."""
    _, model = make_checkpoint("llama-tied")
    return model, {target.name: random_weight(*target.shape) for target in find_linears(model)}


def test_files_of_the_folder(pristine: Path) -> None:
    names = {file.name for file in pristine.iterdir()}
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    copied = {"generation_config.json", "tokenizer.json"}
    ours = {"config.json", "checksums.json", "recipe.yaml", "model.safetensors.index.json"}
    assert names == shards | copied | ours
    sums = json.loads((pristine / "checksums.json").read_text())["files"]
    assert sums == {name: hashlib.sha256((pristine / name).read_bytes()).hexdigest() for name in shards}
    config = json.loads((pristine / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] is True
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "requant" and quantization["format_version"] == 1
    assert quantization["recipe_hash"] == "abc" and len(quantization["modules"]) == 14


def test_shards_are_plain_safetensors_with_every_tensor_once(pristine: Path) -> None:
    tensors = {}
    for file in sorted(pristine.glob("*.safetensors")):
        shard = load_file(file)
        assert not tensors.keys() & shard.keys()
        tensors |= shard
    assert "model.embed_tokens.weight" in tensors and "lm_head.weight" not in tensors
    assert tensors.keys() == read_header(pristine).tensors.keys()
    index = json.loads((pristine / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_weights_come_back(make_checkpoint, random_weight) -> None:
    path, model = make_checkpoint("llama", kind="codebook", shard=50_000)
    targets = {target.name: target for target in find_linears(model)}
    loaded = dict(load_weights(path))
    assert loaded.keys() == targets.keys()
    for name, weight in loaded.items():
        assert torch.equal(weight.dequantize(), targets[name].weight())


def test_one_matrix_is_in_one_shard_and_shards_keep_their_size(make_checkpoint) -> None:
    path, _ = make_checkpoint("llama", shard=30_000)
    header = read_header(path)
    assert len(header.files) > 2
    for name, layout in header.modules.items():
        assert len({header.tensors[f"{name}.{suffix}"].file for suffix in layout.tensors()}) == 1
    assert all(file.stat().st_size < 30_000 + 8_000 for file in header.files)


def test_weights_are_consumed_one_at_a_time(parts, tmp_path: Path, monkeypatch) -> None:
    model, weights = parts
    waiting = []
    written = []
    original = writer.write_safetensors

    def watch(path, tensors):
        written.append(len(waiting))
        return original(path, tensors)

    def stream():
        for pair in weights.items():
            waiting.append(pair[0])
            yield pair

    monkeypatch.setattr(writer, "write_safetensors", watch)
    save(model, tmp_path / "streamed", stream(), max_shard_bytes=10_000)
    assert written[0] <= 5 < len(weights)  # the first shard was on disk before later matrices were asked for


def test_same_input_gives_the_same_bytes(parts, tmp_path: Path) -> None:
    model, weights = parts
    for name in ("a", "b"):
        save(model, tmp_path / name, weights, max_shard_bytes=40_000)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_tensors_that_stay_return_to_the_dtype_of_the_source(
    make_checkpoint, random_weight, tmp_path: Path
) -> None:
    make_checkpoint("llama", dtype=torch.bfloat16)
    source = tmp_path / "source"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)  # computed in float32
    weights = {target.name: random_weight(*target.shape) for target in find_linears(model)}
    path = save(model, tmp_path / "again", weights, source=source)
    stored = read_header(path).tensors
    assert stored["model.norm.weight"].dtype == stored["lm_head.weight"].dtype == torch.bfloat16
    assert load(path).dtype == torch.bfloat16
    original = load_file(source / "model.safetensors")
    assert torch.equal(load_file(path / "model.safetensors")["lm_head.weight"], original["lm_head.weight"])


def test_a_quantized_tied_head_is_untied(parts, random_weight, tmp_path: Path) -> None:
    model, weights = parts
    path = save(model, tmp_path / "head", {**weights, "lm_head": random_weight(96, 64)})
    assert read_header(path).config["tie_word_embeddings"] is False
    loaded = load(path, dequantize=True)
    assert torch.equal(loaded.lm_head.weight, random_weight(96, 64).dequantize())
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_code_of_the_original_is_not_named(parts, tmp_path: Path) -> None:
    """A checkpoint that asks for code would be refused by every command, and none of it was run or copied."""
    model, weights = parts
    source = tmp_path / "source"
    file = source / "config.json"
    config = json.loads(file.read_text())
    file.write_text(
        json.dumps({**config, "auto_map": {"AutoConfig": "x.Y"}, "sub": {"auto_map": {}, "kept": 1}})
    )
    found = read_header(save(model, tmp_path / "plain", weights, source=source)).config
    assert "auto_map" not in found and found["sub"] == {"kept": 1}


def test_an_inspection_without_checksums(pristine: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(pristine, tmp_path / "copy"))
    (copy / "checksums.json").unlink()  # as after `save_pretrained`
    found = inspection(copy)
    assert found.checksums is None and "without checksums to verify" in found.text()


def test_weight_files_and_hidden_files_of_the_source_are_not_copied(parts, tmp_path: Path) -> None:
    model, weights = parts
    source = tmp_path / "source"
    for name in ("pytorch_model.bin", "x.gguf", "old.onnx", "pytorch_model.bin.index.json", ".gitattributes"):
        (source / name).write_text("no")
    # of the run itself, whose output may lie in the model's folder
    (source / "copied.partial.lock").write_text("")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("yes")
    path = save(model, tmp_path / "copied", weights, source=source)
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert names == {
        "config.json",
        "checksums.json",
        "model.safetensors",
        "generation_config.json",
        "tokenizer.json",
        "additional_chat_templates/tool.jinja",
    }


def test_a_large_file_beside_the_weights_is_not_copied(
    parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, weights = parts
    source = tmp_path / "source"
    monkeypatch.setattr("requant.checkpoint.save.MOST_COPIED_BYTES", 100_000)
    (source / "train.jsonl").write_bytes(b"x" * 100_001)
    (source / "LICENSE").write_bytes(b"x" * 100_000)
    path = save(model, tmp_path / "copied", weights, source=source)
    assert (path / "LICENSE").is_file() and not (path / "train.jsonl").exists()
    assert "train.jsonl is not copied: it has 97.7 KiB; copy it yourself" in caplog.text


def test_a_file_of_the_source_that_cannot_be_read_is_named(parts, tmp_path: Path) -> None:
    model, weights = parts
    (tmp_path / "source" / "LICENSE").symlink_to("/proc/self/mem")  # an error to read, for root too
    with pytest.raises(RequantError, match=r"source/LICENSE cannot be read \(.*, a run with --resume"):
        save(model, tmp_path / "copied", weights, source=tmp_path / "source")


def test_an_existing_output_is_kept(parts, tmp_path: Path) -> None:
    model, weights = parts
    (tmp_path / "there").mkdir()
    with pytest.raises(OutputError, match="there exists already; remove it, or choose another --output"):
        save(model, tmp_path / "there", weights)
    with pytest.raises(OutputError, match="exists already"):
        check_output(tmp_path / "there")
    assert check_output(tmp_path / "new" / "deeper") == tmp_path / "new" / "deeper"


@pytest.mark.parametrize(
    ("code", "sentence"),
    [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "no permission"), (errno.EIO, "cannot be written")],
)
def test_a_failed_write_leaves_nothing(parts, tmp_path: Path, monkeypatch, code: int, sentence: str) -> None:
    model, weights = parts
    calls = iter([False, True])

    def fsync(handle: int) -> None:
        if next(calls, True):
            raise OSError(code, os.strerror(code))

    before = set(tmp_path.iterdir())
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OutputError, match=f"{sentence}.* or choose another --output"):
        save(model, tmp_path / "out", weights, max_shard_bytes=20_000)
    calls = iter([False, True])
    with pytest.raises(OutputError, match=f"{sentence}.* and run again with --resume"):
        save(model, tmp_path / "out", weights, max_shard_bytes=20_000, resumable=True)
    assert set(tmp_path.iterdir()) == before


def test_too_little_space_is_said_before_the_shard_is_written(parts, tmp_path: Path, monkeypatch) -> None:
    model, weights = parts
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(OutputError, match="has 10 bytes free, but the next weight file needs"):
        save(model, tmp_path / "out", weights)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("parent", ["/proc", "/proc/version", "/dev/null"])
def test_an_unwritable_parent_is_named_before_any_work(parent: str) -> None:
    """Also to root, who can make nothing there either."""
    if not Path(parent).exists():
        pytest.skip(f"needs {parent}")
    with pytest.raises(OutputError, match=rf"^{parent} cannot be written to \(.+\); choose another --output"):
        check_output(Path(parent, "out"))


def test_a_disk_that_is_full_is_said_with_the_remedy_of_a_run(parts, tmp_path: Path, monkeypatch) -> None:
    """Also where not even an empty folder can be made: another --output would begin again."""
    model, weights = parts

    def full(**_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(OutputError, match="the disk is full; free some space and run again with --resume"):
        save(model, tmp_path / "out", weights, resumable=True)


def test_looking_whether_an_output_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    check_output(tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == []


def test_interruption_leaves_nothing(parts, tmp_path: Path) -> None:
    model, weights = parts

    def interrupted():
        yield next(iter(weights.items()))
        raise KeyboardInterrupt

    before = set(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        save(model, tmp_path / "out", interrupted())
    assert set(tmp_path.iterdir()) == before


KILLED = """
import os, pathlib, signal, sys
from requant.checkpoint.new_folder import new_folder
with new_folder(pathlib.Path(sys.argv[1])) as folder:
    (folder / "part-00000").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "call", ["os.open", "fcntl.flock"], ids=["before it is opened", "before it is locked"]
)
def test_a_folder_that_another_run_removes_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As it may where two runs write one output: until then it looks like one that a killed run left."""
    module, _, name = call.partition(".")
    plain, removed = getattr(sys.modules[module], name), []

    def interrupted(*arguments: Any, **named: Any) -> Any:
        if not removed:
            removed.extend(tmp_path.glob(".out.partial-*"))
            shutil.rmtree(removed[0])
        return plain(*arguments, **named)

    monkeypatch.setattr(call, interrupted)
    with new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("whole")
    assert len(removed) == 1 and (tmp_path / "out" / "file").read_text() == "whole"


def test_what_a_killed_run_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    output, other = tmp_path / "out", tmp_path / ".out.partially"
    other.mkdir()
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", KILLED, output]).returncode == -signal.SIGKILL
        assert len(list(tmp_path.glob(".out.partial-*"))) == 1  # the second run has removed the first one's
    with new_folder(tmp_path / "out") as living:
        with new_folder(output):
            assert living.is_dir()
        output.rmdir()
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.partially"}


def test_a_folder_is_written_where_files_cannot_be_locked(tmp_path: Path, monkeypatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", unsupported)
    for name in ("one", "two"):
        with new_folder(tmp_path / name) as folder:
            (folder / "file").touch()
    assert {path.name for path in tmp_path.rglob("*")} == {"one", "two", "file"}


def test_infinite_scales_are_refused_with_the_name_of_the_matrix(parts, tmp_path: Path) -> None:
    model, weights = parts
    name = "model.layers.1.mlp.up_proj"
    dense = weights[name].dense
    scales = dense.scales.clone()
    scales[3, 0] = float("inf")
    bad = Grid(
        codes=dense.codes,
        scales=scales,
        zero_points=dense.zero_points,
        column_scales=None,
        bits=dense.bits,
        group_size=dense.group_size,
    )
    with pytest.raises(NumericalError, match=r"model\.layers\.1\.mlp\.up_proj: scales holds NaN or infinity"):
        save(model, tmp_path / "out", weights | {name: QuantizedWeight(dense=bad, sparse=None)})


def test_byte_table_accounts_for_every_byte(pristine: Path) -> None:
    table = byte_table(pristine)
    assert table.bytes == sum(file.stat().st_size for file in pristine.glob("*.safetensors"))
    header = read_header(pristine)
    for name, matrix in table.matrices.items():
        stored = sum(header.tensors[f"{name}.{suffix}"].bytes for suffix in header.modules[name].tensors())
        n, k = header.modules[name].shape
        assert matrix.bytes == stored and matrix.bits_per_weight == 8 * stored / (n * k)
    assert table.parts["embedding"] == 96 * 64 * 4 and table.parts["head"] == 0
    assert table.parts["codes"] == sum(-(-3 * m.weights // 8) for m in table.matrices.values())
    norms = 5 * 64 * 4
    assert table.parts["other"] == norms


@pytest.mark.parametrize("kind", ["symmetric", "codebook", "trellis"])
def test_bits_per_weight_in_closed_form(random_weight, kind: str) -> None:
    from requant.checkpoint.sizes import matrix_parts

    n, k, bits = 32, 512, 2
    layout, _ = pack(random_weight(n, k, kind=kind, bits=bits, density=0))
    scales = {"symmetric": 16 * 11 * n, "codebook": 16 * 4 * n, "trellis": 16 * n + 16 + k}[kind]
    assert 8 * sum(matrix_parts(layout).values()) == bits * n * k + scales


def test_many_matrices_are_planned_and_written_in_linear_time(tmp_path: Path, monkeypatch) -> None:
    """Mixtures have 18,000: sizes are asked for a few times a tensor, not once for every pair of matrices."""
    asked = []
    size_of = TensorSpec.bytes.fget
    assert size_of is not None
    monkeypatch.setattr(TensorSpec, "bytes", property(lambda spec: asked.append(spec) or size_of(spec)))
    sizes = writer._size
    monkeypatch.setattr(writer, "_size", lambda tensors: asked.extend(tensors) or sizes(tensors))
    units = [{f"{i}": torch.zeros(8)} for i in range(300)]
    specs = [
        {name: TensorSpec(dtype=t.dtype, shape=tuple(t.shape)) for name, t in unit.items()} for unit in units
    ]
    shard = 100 * 32  # three files
    planned = writer.planned_bytes(specs, max_shard_bytes=shard)
    writer.write_shards(tmp_path, units, max_shard_bytes=shard)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 3 and sum(file.stat().st_size for file in files) == planned
    assert len(asked) < 10 * len(units)
