"""Read a checkpoint: its matrices as containers, or the whole model ready to run.

`load` stands on transformers' own loader. Before it may allocate anything, the folder has passed
`read_header`, and the quantizer in `requant.integrations.transformers` has compared it with the architecture
and checked its values.
"""

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from requant.checkpoint.header import read_json
from requant.checkpoint.packing import unpack
from requant.checkpoint.save import CHECKSUMS_FILE
from requant.checkpoint.validate import check_values, read_header, read_matrix
from requant.errors import CheckpointError, InputError, RequantError
from requant.formats import QuantizedWeight

logger = logging.getLogger(__name__)


def load_weights(path: str | Path) -> Iterator[tuple[str, QuantizedWeight]]:
    """Every quantized matrix by name, on the CPU, one at a time, each fully checked."""
    header = read_header(path, trust_remote_code=True)  # no code is run here
    for name, layout in header.modules.items():
        tensors = read_matrix(name, layout.tensors(), header.tensors)
        check_values(name, layout, tensors)
        yield name, unpack(layout, tensors)


def load(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    dequantize: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """The model of a checkpoint, in eval mode.

    `dtype` is that of activations and of all that is not quantized; `auto` keeps what the checkpoint has.
    On a GPU the matrices are held as the kernels read them (`requant.inference.serving`), and such a model cannot be saved.
    With `dequantize`, plain layers hold the same floats: as large as the original, the same logits bit for
    bit, and faster where no kernel serves the quantized form. Raises CheckpointError for a folder that is
    damaged, foreign or hostile; then no model exists, not even in part. One line of the log (level INFO) says how
    many matrices were loaded, and whether their files are those that were saved.
    """
    header = read_header(path, trust_remote_code=trust_remote_code)
    dtype = _dtype(dtype)
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    from requant.integrations.transformers import register

    register()
    logging.disable_progress_bar()  # a bar for a second of work
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
        depth = getattr(config.get_text_config(), "num_hidden_layers", 0)
        if depth > len(header.tensors):  # would build that many blocks before it finds their tensors missing
            raise CheckpointError(
                f"{path}: config.json asks for {depth} blocks, but the weight files hold "
                f"{len(header.tensors)} tensors; download the checkpoint again."
            )
        model: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        )
    except (RequantError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # config.json is a stranger's: transformers may fail on it in any way
        first = (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(
            f"{path}: transformers cannot build the model of config.json "
            f"({type(error).__name__}: {first[:160]}); upgrade transformers, or download it again."
        ) from error
    logger.info("loaded %d quantized matrices from %s, %s", len(header.modules), path, provenance(path))
    if dequantize:
        model = model.dequantize()
    elif torch.device(device).type == "cuda":
        from requant.inference.serving import serve

        return serve(model, device=device).eval()
    return model.to(device).eval()


def provenance(path: str | Path) -> str:
    """`sha256 1a2b3c4d as saved`: the weight files are those of checksums.json, and these digits name them all.

    A folder that `save_pretrained` wrote has no checksums. Raises CheckpointError where a file was changed.
    """
    if not (Path(path) / CHECKSUMS_FILE).is_file():
        return f"without {CHECKSUMS_FILE}"
    listed = sorted(verify_checksums(path).items())
    digest = hashlib.sha256("".join(f"{name} {sha256}\n" for name, sha256 in listed).encode()).hexdigest()
    return f"sha256 {digest[:8]} as saved"


def verify_checksums(path: str | Path) -> dict[str, str]:
    """Compare every weight file with checksums.json; returns sha256 by file name, raises CheckpointError."""
    path = Path(path)
    listed = read_json(path / CHECKSUMS_FILE).get("files")
    if not isinstance(listed, dict):
        raise CheckpointError(f"{path / CHECKSUMS_FILE} lists no files; download it again.")
    present = {file.name for file in read_header(path, trust_remote_code=True).files}
    if present != listed.keys():
        odd = min(present ^ listed.keys())
        raise CheckpointError(
            f"{path}: {odd} is in only one of {CHECKSUMS_FILE} and the weights; download both again."
        )
    for name in sorted(present):
        with open(path / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != listed[name]:
            raise CheckpointError(
                f"{path / name} has sha256 {digest}, but {CHECKSUMS_FILE} says {str(listed[name])[:64]}; "
                "the file is damaged or was changed, download it again."
            )
    return dict(listed)


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    value = getattr(torch, dtype, None)
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise InputError(f"dtype {dtype!r} is unknown; give auto, float32, float16 or bfloat16.")
    return value
