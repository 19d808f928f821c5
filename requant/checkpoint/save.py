"""Write a checkpoint: packed matrices, plain tensors, config.json, checksums and the source's small files."""

import errno
import fnmatch
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from requant.checkpoint.header import CHECKSUMS_FILE
from requant.checkpoint.new_folder import check_output, new_folder
from requant.checkpoint.validate import version_of
from requant.checkpoint.writer import planned_bytes, write_bytes, write_shards
from requant.display import format_bytes
from requant.errors import NumericalError, RequantError, WriteError
from requant.formats.packed_spec import GUARD_TENSOR, PackedSpec
from requant.formats.quantized_weight import QuantizedWeight, pack
from requant.formats.tensor_spec import TensorSpec
from requant.models.file_names import disk_names, names_in_files
from requant.models.prequantized import FP8, float_view
from requant.models.rotations import rotation_of

logger = logging.getLogger(__name__)
MAX_SHARD_BYTES = 5_000_000_000
_WEIGHTS = ("safetensors", "bin", "pt", "pth", "ckpt", "pkl", "gguf", "msgpack", "h5", "onnx", "npz")
NOT_COPIED = (  # weights and what belongs to them, the lock of a run, hidden files
    *(f"*.{suffix}" for suffix in _WEIGHTS), "*.index.json", "config.json", CHECKSUMS_FILE, "*.partial.lock", ".*",
)  # fmt: skip
COPIED_FOLDERS = ("additional_chat_templates",)
# of one file; the largest tokenizers take half of that, and data sets lie beside models too
MOST_COPIED_BYTES = 64 << 20
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template*",
    *COPIED_FOLDERS,
)  # fmt: skip
_RESERVED = {"quant_method", "format_version", "modules", "vocabulary", "rotation"}
_GUARD = TensorSpec(dtype=torch.float16, shape=(0,))


def save_checkpoint(
    output: str | Path,
    *,
    source: str | Path | None,
    model: nn.Module,
    weights: Mapping[str, QuantizedWeight] | Iterable[tuple[str, QuantizedWeight]],
    manifest: Mapping[str, Any],
    embedding_and_head: Mapping[str, QuantizedWeight] | None = None,
    extra_files: Mapping[str, str | bytes] | None = None,
    changed_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    resumable: bool = False,
) -> Path:
    """Write `model`, with the matrices in `weights` quantized, to the new folder `output`.

    `source` is the folder the model was loaded from: its tokenizer and other small files are copied, its
    config.json is kept, and tensors that stay as they are go back to the dtype they have there; None takes
    all from the model. `weights` is consumed once, in order, and written as it comes. `embedding_and_head` holds the
    embedding and the head, where they are quantized too, by module; of tied ones the embedding alone. `manifest`
    (version, recipe hash, calibration, ...) joins `quantization_config`. A tokenizer among `extra_files` takes the place of
    the source's, `changed_config` that of keys in its config.json. `resumable`: the command has kept its work, so an error
    names --resume. Raises OutputError (WriteError in the middle), or NumericalError for a matrix that holds NaN or infinity.
    """
    if clash := sorted(_RESERVED & manifest.keys()):
        raise ValueError(f"manifest has the reserved key {clash[0]!r}")
    if wrong := [name for name in extra_files or {} if Path(name).name != name]:
        raise ValueError(f"extra file {wrong[0]!r} is not a plain file name")
    output = check_output(output)
    try:
        with new_folder(output) as partial:
            modules: dict[str, PackedSpec] = {}
            embedded: dict[str, PackedSpec] = {}
            pairs: Iterable[Any] = weights.items() if isinstance(weights, Mapping) else weights
            dtypes = _source_dtypes(source)
            renamed = names_in_files(model, dtypes)
            units = itertools.chain(
                _units(model, pairs, modules, renamed),
                _units(model, (embedding_and_head or {}).items(), embedded, renamed),
                # consumed last: it reads the tables that the two before it fill
                _plain_units(model, dtypes, modules, embedded),
            )
            checksums = write_shards(partial, units, max_shard_bytes=max_shard_bytes)
            if not modules:
                raise ValueError("weights is empty: nothing was quantized")
            if source is not None:
                own = TOKENIZER_FILES if "tokenizer_config.json" in (extra_files or {}) else ()
                copy_files(Path(source), partial, left_out=(*NOT_COPIED, *own))
            for name, content in (extra_files or {}).items():
                write_bytes(partial / name, content.encode() if isinstance(content, str) else content)
            entries = {renamed.get(name, name): spec for name, spec in modules.items()}
            _write_json(
                partial / "config.json",
                _config(source, model, entries, embedded, manifest, changed_config or {}),
            )
            _write_json(partial / CHECKSUMS_FILE, {"algorithm": "sha256", "files": checksums})
    except OSError as error:
        raise WriteError(_sentence(error, output, resumable=resumable)) from error
    return output


def checkpoint_bytes(
    model: nn.Module,
    *,
    source: str | Path | None,
    modules: Mapping[str, Mapping[str, TensorSpec]],
    embedding_and_head: Mapping[str, Mapping[str, TensorSpec]] | None = None,
) -> int:
    """Bytes of the weight files that `save_checkpoint` would write, headers included; matrices are given by tensors."""
    embedded, dtypes = embedding_and_head or {}, _source_dtypes(source)
    renamed = names_in_files(model, dtypes)
    units: list[dict[str, TensorSpec]] = [
        {
            f"{renamed.get(name, name)}.{suffix}": spec
            for suffix, spec in {**tensors, GUARD_TENSOR: _GUARD}.items()
        }
        for name, tensors in (*modules.items(), *embedded.items())
    ]
    plain = plain_specs(model, source=source, modules=modules, embedding_and_head=embedded)
    units += [{name: spec} for name, spec in plain.items()]
    return planned_bytes(units, max_shard_bytes=MAX_SHARD_BYTES)


def plain_specs(
    model: nn.Module,
    *,
    source: str | Path | None,
    modules: Collection[str],
    embedding_and_head: Collection[str],
) -> dict[str, TensorSpec]:
    """What `save_checkpoint` stores as it is, beside quantized matrices and tables of these names; by names in the files."""
    plain = _plain_tensors(model, _source_dtypes(source), modules, embedding_and_head)
    return {name: TensorSpec(dtype=dtype, shape=tuple(tensor.shape)) for name, tensor, dtype in plain}


def disk_dtype(model: nn.Module, source: str | Path | None, tensor: Tensor) -> torch.dtype:
    """The dtype in which a tensor of the model is stored where it is not quantized."""
    return disk_dtypes(model, source).get(tensor.data_ptr(), tensor.dtype)


def disk_dtypes(model: nn.Module, source: str | Path | None) -> dict[int, torch.dtype]:
    """`data_ptr` of every tensor of the model -> `disk_dtype`."""
    return {
        stored.data_ptr(): dtype for _, stored, dtype in _plain_tensors(model, _source_dtypes(source), {}, {})
    }


def _units(
    model: nn.Module,
    weights: Iterable[tuple[str, QuantizedWeight]],
    modules: dict[str, PackedSpec],
    renamed: Mapping[str, str],
) -> Iterator[dict[str, Tensor]]:
    """The tensors of each quantized matrix, in order; fills `modules` with their entries."""
    state = model.state_dict()
    for name, weight in weights:
        original = state.get(f"{name}.weight")
        if original is None or sorted(original.shape) != sorted(weight.shape):
            have = "no such matrix" if original is None else f"shape {list(original.shape)}"
            raise ValueError(f"{name}: quantized to {list(weight.shape)}, but the model has {have}")
        spec, tensors = pack(weight)
        if what := spec.flaw(tensors):
            raise NumericalError(
                f"{name}: {what} after quantization; use another method or more bits for this matrix."
            )
        modules[name] = spec
        guard = torch.empty(_GUARD.shape, dtype=_GUARD.dtype)
        stored = renamed.get(name, name)
        yield {f"{stored}.{suffix}": tensor for suffix, tensor in {**tensors, GUARD_TENSOR: guard}.items()}


def _plain_units(
    model: nn.Module,
    dtypes: Mapping[str, torch.dtype],
    modules: Mapping[str, PackedSpec],
    embedding_and_head: Mapping[str, PackedSpec],
) -> Iterator[dict[str, Tensor]]:
    for name, tensor, dtype in _plain_tensors(model, dtypes, modules, embedding_and_head):
        yield {name: tensor.to(dtype)}


def _plain_tensors(
    model: nn.Module,
    dtypes: Mapping[str, torch.dtype],
    modules: Collection[str],
    embedding_and_head: Collection[str],
) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """Tensors that stay as they are, with name and dtype on disk; of those that share memory (tied heads) only the
    one the others are tied to, and none that is tied to a quantized embedding."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    tied = _ties(model)
    quantized = {f"{name}.weight" for name in (*modules, *embedding_and_head)}
    quantized |= {
        name for name, source in tied.items() if source.removesuffix(".weight") in embedding_and_head
    }
    rest = {name: tensor for name, tensor in model.state_dict().items() if name not in quantized}
    # of a tensor that is part of another one in the source (biases of experts that are fused there)
    common = next((dtype for dtype, _ in Counter(dtypes.values()).most_common(1)), None)
    names = disk_names(model, rest)
    seen: set[tuple[Any, ...]] = set()
    # the sources of ties first, else the model's order
    for name in sorted(rest, key=lambda name: name in tied):
        tensor = rest[name]
        storage = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        # on the meta device (a plan from config.json alone) no tensor has memory that would tell
        shared = tied.get(name) in rest if tensor.is_meta else storage in seen
        if tensor.numel() and shared:
            continue
        seen.add(storage)
        stored = names[name]
        # Some checkpoints name the tensors of the body without its prefix ("h.0..." of GPT-2).
        found = dtypes.get(stored) or dtypes.get(stored.removeprefix(prefix))
        yield stored, tensor, found or (common if tensor.is_floating_point() else None) or tensor.dtype


def _source_dtypes(source: str | Path | None) -> dict[str, torch.dtype]:
    """Dtype of every tensor in the source's safetensors files, of floats where they hold FP8 or MXFP4; a model computed in
    float32 is saved as it came. Float8 without scales is saved as bfloat16: a norm or embedding may have been trained."""
    view = {} if source is None else float_view(source)
    return {name: torch.bfloat16 if each.dtype in FP8 else each.dtype for name, each in view.items()}


def _config(
    source: str | Path | None,
    model: nn.Module,
    modules: Mapping[str, PackedSpec],
    embedding_and_head: Mapping[str, PackedSpec],
    manifest: Mapping[str, Any],
    changed: Mapping[str, Any],
) -> dict[str, Any]:
    if source is not None:
        config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8")) | dict(changed)
    else:
        config = json.loads(model.config.to_json_string())  # type: ignore[union-attr]
    config = _without_code(config)
    # DeepSeek-V4 says beside its quantization_config that experts have 4 bits
    config.pop("expert_dtype", None)
    tied = _ties(model)
    # a quantized head no longer shares the embedding's memory
    untied = any(name.removesuffix(".weight") in modules for pair in tied.items() for name in pair)
    if untied or _is_tied_by_config_alone(model, tied):
        config["tie_word_embeddings"] = False
    rotation = rotation_of(model)
    config["quantization_config"] = {
        "quant_method": "requant",
        "format_version": version_of(
            modules, embedding_and_head, rotation, token_tables=has_token_tables(model, embedding_and_head)
        ),
        **manifest,
        "modules": {name: spec.to_json() for name, spec in modules.items()},
    }
    if rotation is not None:
        config["quantization_config"]["rotation"] = {"seed": rotation.seed}
    if embedding_and_head:
        config["quantization_config"]["vocabulary"] = {
            name: spec.to_json() for name, spec in embedding_and_head.items()
        }
    return config


def _ties(model: Any) -> dict[str, str]:
    """The tensors that the model ties to others, without those that are tensors of their own all the same."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    parameters = dict(model.named_parameters(remove_duplicate=False)) if tied else {}
    return {
        name: source
        for name, source in tied.items()
        if parameters.get(name) is parameters.get(source) or not {name, source} <= parameters.keys()
    }


def _is_tied_by_config_alone(model: Any, tied: Collection[str]) -> bool:
    """Whether the configuration ties a head that has weights of its own: transformers leaves a head apart whose weights in
    the files differ from the embedding's, whatever config.json says."""
    from requant.models.targets import embedding_and_head_modules  # late, as above

    if not hasattr(model, "get_expanded_tied_weights_keys") or model.get_output_embeddings() is None:
        return False
    _, (head, _) = embedding_and_head_modules(model)
    by_config = model.get_expanded_tied_weights_keys(all_submodels=True)
    return f"{head}.weight" in by_config and f"{head}.weight" not in tied


def has_token_tables(model: Any, embedding_and_head: Mapping[str, PackedSpec]) -> bool:
    """Whether one of these is neither the model's embedding nor its head."""
    own = [model.get_input_embeddings(), model.get_output_embeddings()] if embedding_and_head else []
    return any(model.get_submodule(name) not in own for name in embedding_and_head)


def _without_code(value: Any) -> Any:
    """A config that names no Python code: it was transformers' own class that was quantized, and no code is copied."""
    if isinstance(value, dict):
        return {key: _without_code(each) for key, each in value.items() if key != "auto_map"}
    return value


def copy_files(source: Path, target: Path, *, left_out: Sequence[str] = NOT_COPIED) -> None:
    """Copy tokenizer, templates, generation config, licence: the small files that lie beside a model's weights.

    `left_out` are patterns of lower-case names of files, and of COPIED_FOLDERS. What `target` has already is kept; a file
    above MOST_COPIED_BYTES is left, with a warning. Raises RequantError for one that cannot be read.
    """
    for folder in (source, *(source / name for name in COPIED_FOLDERS)):
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            inside = file.relative_to(source)
            copy = target / inside
            names = [part.lower() for part in inside.parts]
            if (
                not file.is_file()
                or copy.exists()
                or any(fnmatch.fnmatch(name, pattern) for name in names for pattern in left_out)
            ):
                continue
            if (size := file.stat().st_size) > MOST_COPIED_BYTES:
                logger.warning(
                    "%s is not copied: it has %s; copy it yourself if the model needs it",
                    file,
                    format_bytes(size),
                )
                continue
            try:
                content = file.read_bytes()
            except OSError as error:  # not the output's, as those of writing are
                raise RequantError(
                    f"{file} cannot be read ({error.strerror or error}), so it cannot be copied; make it readable or remove "
                    "it, and repeat the command, a run with --resume."
                ) from error
            copy.parent.mkdir(exist_ok=True)
            write_bytes(copy, content)


def _write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _sentence(error: OSError, output: Path, *, resumable: bool) -> str:
    """Another output would begin again; --resume only writes what the run has kept."""
    remedy = "and run again with --resume" if resumable else "or choose another --output"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            said = error.strerror or ""  # by the system, or by the writer, which knows how much is missing
            reason = "the disk is full" if said in ("", os.strerror(error.errno)) else said
            return f"{output}: {reason}; free some space {remedy}."
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"{output}: no permission to write here; change that {remedy}."
        case errno.EEXIST | errno.ENOTEMPTY:
            return f"{output} appeared while the checkpoint was written; remove it {remedy}."
    return f"{output} cannot be written ({error.strerror or error}); fix that {remedy}."
