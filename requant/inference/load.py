"""`load`: a checkpoint as a model ready to run; `open_model`: any model as a user names it."""

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from requant.checkpoint.read import VERIFY_CHECKSUMS
from requant.checkpoint.validate import CheckpointHeader, check_depth, read_header
from requant.errors import CheckpointError, InputError, RequantError, class_and_first_line
from requant.inference.convert import convert_to_kernels
from requant.models.devices import pick_device
from requant.models.experts import Experts
from requant.models.loading import auto_class, load_model, read_config

logger = logging.getLogger(__name__)


def open_model(folder: str, *, device: str, dtype: str) -> PreTrainedModel:
    """A checkpoint of ours with its weights as floats, or any other model as it is."""
    if is_checkpoint(folder):
        wanted: Any = torch.float32 if dtype == "auto" and device == "cpu" else dtype
        return load(folder, device=device, dtype=wanted, dequantize=True)
    return load_model(folder, device=device, dtype=dtype)


def open_served(folder: str, *, device: str, dtype: str) -> Any:
    """A model as it is served: a checkpoint of ours by the kernels on a GPU, by its floats on a CPU."""
    if device == "cpu" or not is_checkpoint(folder):
        return open_model(folder, device=device, dtype=dtype)
    return load(folder, device=device, dtype=dtype)


def is_checkpoint(folder: str) -> bool:
    """Whether a folder says that requant wrote it."""
    if not Path(folder).is_dir():
        return False
    entry = read_config(folder).get("quantization_config")
    return isinstance(entry, dict) and entry.get("quant_method") == "requant"


def load(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    dequantize: bool = False,
    trust_remote_code: bool = False,
    verify_checksums: bool = True,
) -> Any:
    """The model of a checkpoint, in eval mode.

    `device` is cpu, cuda, cuda:NUMBER, or auto: the GPU if there is one. `dtype` is the dtype of activations and of
    everything that is not quantized; `auto` keeps the checkpoint's. On a GPU the matrices are held in the layout of the
    kernels (`requant.inference.convert`), and such a model cannot be saved; they run on the current GPU, so make cuda:NUMBER
    that (`torch.cuda.set_device`). With `dequantize`, plain layers hold the same
    floats: as large as the original, the same logits bit for bit, and faster if no kernel supports the quantized form.
    `verify_checksums` compares the weight files with checksums.json, which means reading them a second time. Raises
    InputError for a device that is not there, and CheckpointError or FileError for a folder that is damaged, foreign or
    hostile; then no model exists, not even in part. One line of the log (level INFO) says how many matrices were loaded,
    and whether their files are those that were saved.
    """
    device, dtype = pick_device(device), _dtype(dtype)
    header = read_header(path, trust_remote_code=trust_remote_code)
    path = header.path
    disable_progress_bar()  # a bar for a second of work
    if torch.device(device).type == "cuda" and not dequantize:
        _compile_while_loading(header, torch.device(device), dtype)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
        config.quantization_config[VERIFY_CHECKSUMS] = verify_checksums
        check_depth(path, config, header)
        model: Any = auto_class(config).from_pretrained(
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
        raise CheckpointError(
            f"{path}: transformers cannot build the model of config.json "
            f"({class_and_first_line(error)}); upgrade transformers, or download it again."
        ) from error
    logger.info(
        "loaded %d quantized matrices from %s, %s", len(header.modules), path, model.hf_quantizer.provenance
    )
    if dequantize:
        model = model.dequantize()
    elif torch.device(device).type == "cuda":
        model = convert_to_kernels(model, device=device).eval()
        if any(isinstance(module, Experts) for module in model.modules()):
            from requant.inference.experts import group_experts  # late: it needs Triton and torch's compiler

            group_experts(model)
        return model
    return model.to(device).eval()


def _compile_while_loading(header: CheckpointHeader, device: torch.device, dtype: str | torch.dtype) -> None:
    """Begin to compile the kernels that `convert_to_kernels` is going to check."""
    if not isinstance(dtype, torch.dtype):
        named = header.config.get("dtype", header.config.get("torch_dtype"))
        dtype = getattr(torch, str(named), torch.float32)
    if dtype in (torch.float16, torch.bfloat16) and find_spec("triton") is not None:
        from requant.inference.compile_while_loading import compile_while_loading

        assert isinstance(dtype, torch.dtype)
        compile_while_loading(header.modules | header.embedding_and_head, device=device, dtype=dtype)


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if isinstance(dtype, str) and dtype == "auto":
        return dtype
    value = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(value, torch.dtype) or not value.is_floating_point or value.itemsize < 2:
        raise InputError(f"dtype {dtype!r} is unknown; give auto, float32, float16 or bfloat16.")
    return value
