"""Reading a checkpoint's matrices as containers, and comparing its files with their checksums.

Loading the whole model, ready to run, is the task of `requant.inference.load`: it uses transformers' own loader, once the
folder has passed `read_header` and the quantizer in `requant.integrations.transformers` has checked its values.
"""

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from requant.checkpoint.header import CHECKSUMS_FILE, read_json
from requant.checkpoint.validate import check_values, read_header
from requant.errors import CheckpointError
from requant.formats.quantized_weight import QuantizedWeight, unpack
from requant.models.safetensors_reader import TensorReader

# A key of config.quantization_config while it is in memory: false skips the comparison with checksums.json.
VERIFY_CHECKSUMS = "verify_checksums"


def load_weights(path: str | Path) -> Iterator[tuple[str, QuantizedWeight]]:
    """Every quantized matrix by name, on the CPU, one at a time, each fully checked."""
    header = read_header(path, trust_remote_code=True)  # no code is run here
    read = TensorReader(header.tensors)
    for name, spec in header.modules.items():
        tensors = read.matrix(name, spec.tensors())
        check_values(name, spec, tensors)
        yield name, unpack(spec, tensors)


def provenance(path: str | Path, files: Iterable[Path]) -> str:
    """`sha256 1a2b3c4d as saved`: the weight files match checksums.json, and the digits identify them.

    A folder that `save_pretrained` wrote has no checksums. Raises CheckpointError where a file was changed.
    """
    if not has_checksums(path):
        return f"without {CHECKSUMS_FILE}"
    listed = sorted(verify_checksums(path, files).items())
    digest = hashlib.sha256("".join(f"{name} {sha256}\n" for name, sha256 in listed).encode()).hexdigest()
    return f"sha256 {digest[:8]} as saved"


def has_checksums(path: str | Path) -> bool:
    """Whether the folder says what its weight files should hash to."""
    return (Path(path) / CHECKSUMS_FILE).exists()


def verify_checksums(path: str | Path, files: Iterable[Path]) -> dict[str, str]:
    """Compare the weight files with checksums.json, streamed; returns sha256 by file name, raises CheckpointError."""
    path = Path(path)
    listed = read_json(path / CHECKSUMS_FILE).get("files")
    if not isinstance(listed, dict):
        raise CheckpointError(f"{path / CHECKSUMS_FILE} lists no files; download it again.")
    present = {file.name for file in files}
    if present != listed.keys():
        odd = min(present ^ listed.keys())
        raise CheckpointError(
            f"{path}: {odd} is in only one of {CHECKSUMS_FILE} and the weights; download both again."
        )
    paths = [path / name for name in sorted(present)]
    with ThreadPoolExecutor() as threads:  # side by side: hashing leaves Python's lock
        for file, digest in zip(paths, threads.map(_sha256, paths), strict=True):
            if digest != listed[file.name]:
                raise CheckpointError(
                    f"{file} has sha256 {digest}, but {CHECKSUMS_FILE} says {str(listed[file.name])[:64]}; "
                    "the file is damaged or was changed, download it again."
                )
    return dict(listed)


def _sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:  # callers would take it for one of their own files'
        raise CheckpointError(f"{path} cannot be read ({error}); download it again.") from error
