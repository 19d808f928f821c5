"""Finding and loading models: folders, hub names, aliases and the demo; their configuration and tokenizer.

A model is a causal LM of transformers with safetensors weights; no code of its folder is executed. Whatever transformers
raises on a damaged or foreign folder becomes a ModelError of one sentence.
"""

import copy
import logging
import math
import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from requant.errors import (
    CheckpointError,
    ModelError,
    RequantError,
    class_and_first_line,
    did_you_mean,
    first_line,
    is_out_of_memory,
)
from requant.files import but_in_it, check_model_folder, parse_json, read_small_file
from requant.models.aliases import ALIASES
from requant.models.config_checks import (
    check_causal,
    check_config_json,
    check_depth,
    check_dtype,
    check_end_tokens,
    check_experts,
)
from requant.models.hosted import hosted_blocks, whole_state
from requant.models.named_outputs import with_named_outputs
from requant.models.prequantized import (
    FORMATS,
    check_no_codes,
    check_stored,
    float_dtype,
    float_state,
    scales_of_plain,
)
from requant.models.safetensors_header import read_tensors
from requant.models.weight_files import WEIGHT_FILES, weight_files

logger = logging.getLogger(__name__)

DEMO = Path(__file__).parents[1] / "data" / "demo"
DTYPES = ("float32", "bfloat16", "float16")
HUB_FILES = (
    WEIGHT_FILES,
    "README.md",
    "*.json",
    "*.jinja",
    "tokenizer*",
    "*.model",
    "merges.txt",
    "vocab.txt",
)


def load_model(source: str, *, device: str, dtype: str, moved: bool = True) -> PreTrainedModel:
    """The model in eval mode, all parameters frozen.

    `source` is a folder, a hub name, an alias or `demo`; `dtype` a torch dtype's name, or `auto`: float32 on the CPU,
    the dtype of the weights on a GPU. Not `moved`, the model stays on the host, where its tensors are views of the weight
    files if they have the dtype; what files hold in FP8 or MXFP4 is dequantized (`prequantized.py`).
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # loading takes a second and would print a bar above ours
    path = resolve_source(source)
    config = check_loadable(path, dtype=dtype)
    wanted = "float32" if dtype == "auto" and device == "cpu" else dtype
    loaded = _dequantized if _is_prequantized(config) else _as_it_is
    with _refusing(path, "a Hugging Face causal LM with safetensors weights"):
        model, report = loaded(path, config, wanted)
    if missing := sorted(report["missing_keys"]):  # transformers would fill them with random numbers
        raise ModelError(f"{path}: the weight files lack {missing[0]}; download the model again.")
    scales = sorted(name for name in report["unexpected_keys"] if name.endswith("_scale_inv"))
    if scales := scales or scales_of_plain(path):
        raise ModelError(  # codes would be taken for weights
            f"{path}: the weight files hold scales ({scales[0]}), but config.json has no quantization_config to "
            "say what they scale; download the model again."
        )
    if left := sorted(report["unexpected_keys"]):
        logger.warning(
            "the weight files of %s hold %d tensors that the model of its config.json does not have (%s first); they are "
            "left out.",
            path,
            len(left),
            left[0],
        )
    check_no_codes(path, model)
    if moved:
        model.to(device)
    model.eval().requires_grad_(False)
    model.config.use_cache = False
    return with_named_outputs(model)


def _as_it_is(path: str, config: Any, dtype: str) -> Any:
    """A model whose files hold floats, and transformers' report of its loading."""
    return auto_class(config).from_pretrained(
        path,
        dtype=dtype,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )


def _dequantized(path: str, config: Any, dtype: str) -> Any:
    """A model whose files hold FP8 or MXFP4, with floats in their place, and transformers' report.

    transformers takes either a folder or a state dict, so what it reads of a folder beside the weights is given here.
    """
    from transformers import GenerationConfig

    method = config.quantization_config["quant_method"]
    state, own = float_state(path)
    if not state:
        raise ModelError(
            f"{path} cannot be loaded (there are no safetensors files); download the model again."
        )
    logger.warning(
        "the weight files of %s hold %s; they are read as %s, which counts as the original.",
        path,
        FORMATS[method],
        str(own).removeprefix("torch."),
    )
    kind, config = _model_class(_of_floats(config))
    model, report = kind.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=own if dtype == "auto" else dtype,
        output_loading_info=True,
    )
    model.name_or_path = model.config._name_or_path = path
    if model.can_generate():
        with suppress(OSError):  # without the file transformers makes one of the configuration
            model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return model, report


def _is_prequantized(config: Any) -> bool:
    return getattr(config, "quantization_config", None) is not None


def _of_floats(config: Any) -> Any:
    """The configuration of the same model whose files hold floats."""
    config = copy.deepcopy(config)
    del config.quantization_config
    return config


def _model_class(config: Any) -> tuple[Any, Any]:
    """The class that `auto_class` takes for a configuration, and the part of the configuration that is given to it."""
    kind = auto_class(config)._model_mapping[type(config)]
    text = getattr(config, "sub_configs", {}).get("text_config")
    return kind, config.get_text_config() if text is not None and kind.config_class == text else config


def check_loadable(path: str, *, dtype: str) -> Any:
    """The configuration of a model's folder. Raises ModelError for what `load_model` refuses before it reads weights."""
    if dtype not in ("auto", *DTYPES):
        raise ModelError(f"--dtype {dtype} is unknown; give auto, {', '.join(DTYPES)}.")
    config = load_config(path)
    check_causal(path, config)
    if _is_prequantized(config):
        check_stored(path, config.quantization_config)
    else:
        check_dtype(path, config)
    return config


def empty_model(path: str, *, dtype: str) -> PreTrainedModel:
    """The model of a folder on the meta device: shapes from its configuration, no memory, no weight files read."""
    config = check_loadable(path, dtype=dtype)
    stored = getattr(config.get_text_config(), "dtype", None) or torch.bfloat16
    if _is_prequantized(config):
        config, stored = _of_floats(config), float_dtype(read_config(path))
    with _refusing(path, "the folder of a causal LM that transformers knows"), torch.device("meta"):
        model = auto_class(config).from_config(
            config, dtype=stored if dtype == "auto" else getattr(torch, dtype), trust_remote_code=False
        )
    return model.eval().requires_grad_(False)


def auto_class(config: Any) -> Any:
    """What of transformers loads the model of a configuration: a causal LM, or one beside encoders of images or sounds.

    The latter has the weights of both, under their names in the weight files; without images it is a causal LM too.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = getattr(config, "model_type", None)
    beside_encoders = (
        kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and config.get_text_config() is not config
    )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and beside_encoders:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def load_config(path: str) -> Any:
    """The configuration of a folder, as transformers reads it."""
    from transformers import AutoConfig

    with _refusing(path, "a model that transformers knows"):
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    check_depth(path, config)
    check_experts(path, config)
    return config


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder."""
    from transformers import AutoTokenizer

    with _refusing(path, "a folder with its tokenizer files"):
        try:
            return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception:
            # it reads config.json as well: a damaged one is not the fault of the tokenizer's files
            load_config(path)
            raise


@contextmanager
def _refusing(path: str, takes: str) -> Iterator[None]:
    """Turn whatever transformers raises on a folder into a ModelError of one sentence, except running out of memory."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RequantError) or is_out_of_memory(error):
            raise
        check_config_json(path)
        if isinstance(error, SafetensorError):
            _check_headers(path)
        # transformers' words for other shapes, which help nobody
        if "ignore_mismatched_sizes" in str(error):
            raise ModelError(
                f"{path} cannot be loaded ({_other_shape(path)}); download the model again."
            ) from error
        raise ModelError(f"{path} cannot be loaded ({first_line(error)}); give {takes}.") from error


def _check_headers(path: str) -> None:
    """Raise ModelError for the weight file that is not a whole safetensors file; safetensors does not say which."""
    try:
        read_tensors(weight_files(path))
    except CheckpointError as error:
        raise ModelError(str(error)) from error


def _other_shape(path: str) -> str:
    """The first tensor whose shape is not what config.json asks for."""
    asked = empty_model(path, dtype="auto").state_dict()
    for name, stored in read_tensors(weight_files(path)).items():
        if name in asked and tuple(asked[name].shape) != stored.shape:
            return f"{name} is {list(stored.shape)} in {stored.file.name}, but {list(asked[name].shape)} by config.json"
    return "the weight files hold tensors of other shapes than config.json asks for"


def resolve_source(source: str) -> str:
    """The folder of a model; one that is named by its hub name or alias is downloaded, unless the cache has it."""
    if source == "demo":
        return str(DEMO)
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise ModelError(
                f"{path} has no config.json{but_in_it(Path(path))}; give the folder of a Hugging Face causal LM."
            )
        check_model_folder(Path(path))
        check_end_tokens(Path(path))
        return path
    if source in ALIASES:
        return _download(ALIASES[source])
    if os.path.lexists(path):  # or `folder/model.safetensors` would be asked of the hub
        raise ModelError(f"{source} is not a folder but a file; give the folder of a Hugging Face causal LM.")
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ModelError(
            f"{source} is not a folder; check the path, or give a hub name or one of: demo, {', '.join(ALIASES)}."
        )
    if "/" not in source:
        raise ModelError(
            f"'{source}' is neither a folder nor an alias{did_you_mean(source, ['demo', *ALIASES])}; "
            "hub names have the form owner/name."
        )
    return _download(source)


def _download(name: str) -> str:
    """The local folder of a hub model: weights in safetensors, configuration and tokenizer, nothing that holds code."""
    from huggingface_hub import snapshot_download

    try:
        folder = str(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the library passes on whatever its network and file layers raise
        raise ModelError(
            f"{name} did not come from the hub ({first_line(error)}); check the name and the network, run "
            "`hf auth login` for a gated model, or give a folder."
        ) from error
    check_model_folder(Path(folder))
    return folder


@torch.no_grad()
def check_runs(model: PreTrainedModel, linears: Collection[str] = ()) -> None:
    """Refuse a model that makes no logits of tokens alone, or reads the weight of one of these `linears` to multiply with it
    by itself (Mamba's `dt_proj`), where it would find codes; before any work."""
    called: set[str] = set()
    try:
        with ExitStack() as stack:
            for name, module in model.named_modules():
                hook = module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
                stack.callback(hook.remove)
            model(input_ids=torch.ones(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    except Exception as error:
        if isinstance(error, RequantError) or is_out_of_memory(error):
            raise
        raise ModelError(
            f"{type(model).__name__} does not run on tokens alone ({class_and_first_line(error)}); requant "
            "quantizes decoder-only causal LMs."
        ) from error
    finally:
        if (hosted := hosted_blocks(model)) is not None:
            hosted.release()
    read = [name for name in linears if name not in called and name.rpartition(".")[0] in called]
    if read:
        kinds = " ".join(f"--skip '*.{kind}'" for kind in sorted({name.rpartition(".")[2] for name in read}))
        raise ModelError(
            f"{type(model).__name__} reads {read[0]} without calling it; leave it as it is: {kinds}."
        )


def check_finite(model: nn.Module) -> None:
    """Refuse a model whose weights hold NaN, infinity or what float16 cannot hold, before any work."""
    state = whole_state(model)
    for name, _ in model.named_parameters():
        stored = state[name]
        least, most = stored.aminmax() if stored.numel() else (0.0, 0.0)  # abs() would copy it
        largest = max(-float(least), float(most))
        if not math.isfinite(largest):
            raise ModelError(f"{name} holds NaN or infinity; the source model is damaged, download it again.")
        if largest > torch.finfo(torch.float16).max:
            raise ModelError(
                f"{name} holds {largest:.3g}, a weight beyond float16; the source model is damaged, download it again."
            )


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json as it stands."""
    try:
        config = parse_json(read_small_file(Path(folder) / "config.json"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{folder}/config.json cannot be read ({first_line(error)}); download it again."
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"{folder}/config.json holds no object; download it again.")
    return config


def context_limit(config: Any) -> int | None:
    """Longest sequence the model has positions for, if its configuration says so."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None
