"""Export a checkpoint to a format that other programs read without requant.

| target | what is written | exact? |
| --- | --- | --- |
| `dense` | plain weights, as the original model's folder | rounded once, to the dtype of the folder |
| `compressed-tensors` | `pack-quantized`: vLLM and transformers read it | codes and scales bit for bit |
| `gguf` | one file of llama.cpp's own types | every weight bit for bit |

`dense` takes every checkpoint. The others take what their format can express exactly, and refuse the rest:
an approximation would not have the quality that was measured.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from requant.checkpoint.new_folder import check_output, new_folder
from requant.checkpoint.read import provenance
from requant.checkpoint.save import NOT_COPIED, copy_files
from requant.display import format_bytes
from requant.errors import InputError, WriteError, did_you_mean
from requant.exporters import compressed_tensors, dense, gguf
from requant.exporters.folder import OURS, Written, write_card
from requant.exporters.source import Source, open_source
from requant.recipe.readers import READERS

TARGETS: dict[str, Callable[[Source, Path], Written]] = {
    "dense": dense.write,
    "compressed-tensors": compressed_tensors.write,
    "gguf": gguf.write,
}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    checkpoint: str
    target: str
    output: str
    dtype: str  # of what is not quantized, and of all in a dense folder
    matrices: int
    files: dict[str, int]  # weight file -> bytes
    notes: list[str]

    @property
    def bytes(self) -> int:
        return sum(self.files.values())

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bytes": self.bytes}

    def rows(self) -> list[dict[str, object]]:
        """The rows of the final table."""
        values = {
            "target": self.target,
            "folder": self.output,
            "weight files": f"{len(self.files)}, {format_bytes(self.bytes)}",
            "matrices": str(self.matrices),
            "dtype": self.dtype,
        }
        return [{"": name, "export": value} for name, value in values.items()]


def export(checkpoint: str | Path, target: str, output: str | Path, *, dtype: str = "auto") -> Exported:
    """Write `checkpoint` to the new folder `output` as `target`; the folder appears completely or not at all.

    `target` may also be a program: vllm, transformers, llama.cpp (`recipe/readers.py`).
    `dtype` is that of all floats in a dense folder (and of what is not quantized in the others); `auto` keeps
    the model's own. Matrices pass through memory one at a time, with at most one shard of them.

    Raises:
        InputError: an unknown target, or a checkpoint that the target cannot express.
        CheckpointError: a folder that is damaged or is not a requant checkpoint.
        OutputError: an output that exists or cannot be written; WriteError where that ends in the middle.
        NumericalError: a weight beyond float16.
    """
    if isinstance(target, str) and target in READERS:
        target = READERS[target].export
    if not isinstance(target, str) or target not in TARGETS:
        raise InputError(
            f"--to {target} is unknown{did_you_mean(str(target), [*TARGETS, *READERS])}; "
            f"there are: {', '.join([*TARGETS, *READERS])}."
        )
    source = open_source(checkpoint, dtype=dtype)
    try:
        path = check_output(output)
        provenance(source.path, source.header.files)  # an export would not show that a file was changed
        with new_folder(path) as folder:
            written = TARGETS[target](source, folder)
            copy_files(source.path, folder, left_out=(*NOT_COPIED, *OURS))
            write_card(source, target, folder, name=path.name, loading=written.loading)
            sizes = {name: (folder / name).stat().st_size for name in written.files}
    except OSError as error:
        raise WriteError(
            f"{output} cannot be written ({error.strerror or error}); free some space, or choose another --output."
        ) from error
    return Exported(
        checkpoint=str(checkpoint),
        target=target,
        output=str(output),
        dtype=str(source.dtype).removeprefix("torch."),
        matrices=len(source.specs),
        files=sizes,
        notes=written.notes,
    )
