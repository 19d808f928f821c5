"""Which matrices of a model are quantized, in which order and under which names.

The only file that knows architectures, and it knows little: a causal LM of transformers holds one list of equal
transformer blocks, and every `nn.Linear` (GPT-2: `Conv1D`, whose weight is transposed) inside a block is a linear to
quantize. So fused projections (Phi-3's `qkv_proj`, `gate_up_proj`; GPT-NeoX's `query_key_value`) need no special
case. Embedding, head and norms stay as they are. Mixture-of-experts models that fuse experts in one 3-D tensor are
refused: their experts would silently stay unquantized.
"""

import fnmatch
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from requant.errors import ModelError, NumericalError

ALIASES: dict[str, str] = {
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-1b-instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "llama-3.2-3b-instruct": "meta-llama/Llama-3.2-3B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "mistral-7b": "mistralai/Mistral-7B-v0.3",
    "gemma-3-1b": "google/gemma-3-1b-pt",
    "phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
}
DEMO = Path(__file__).parent / "data" / "demo"


@dataclass(frozen=True, kw_only=True)
class LinearSite:
    """One matrix to quantize, seen as `[n, k]` whatever the module stores."""

    name: str  # dotted path in the model: "model.layers.0.self_attn.q_proj"
    kind: str  # its last component: "q_proj"
    block: int
    module: nn.Module
    transposed: bool  # GPT-2's Conv1D holds [k, n]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.parameter.shape
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def size(self) -> int:
        return self.parameter.numel()

    @property
    def parameter(self) -> nn.Parameter:
        return self.module.get_parameter("weight")

    def weight(self) -> Float[Tensor, "n k"]:
        """A float32 copy, on the model's device."""
        return self.oriented(self.parameter.detach()).to(torch.float32, copy=True).contiguous()

    def oriented(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape (the weight, its gradient) seen as [n, k]."""
        return tensor.T if self.transposed else tensor

    @torch.no_grad()
    def set_weight(self, weight: Float[Tensor, "n k"]) -> None:
        """Overwrite the parameter in place, rounding to its dtype."""
        self.parameter.copy_(self.oriented(weight))


def load_model(source: str, *, device: str, dtype: str) -> tuple[nn.Module, Any]:
    """The model in eval mode, all parameters frozen, and its tokenizer.

    `source` is a folder, a hub name, an alias or `demo`; `dtype` a torch dtype's name, or `auto`: float32 on the CPU,
    the dtype of the weights on a GPU.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # a second bar for a second of work, above ours
    path = resolve_source(source)
    try:
        config = AutoConfig.from_pretrained(path)
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError(f"{source} is quantized already; give the original model.")
        wanted = torch.float32 if dtype == "auto" and device == "cpu" else dtype
        if isinstance(wanted, str) and wanted != "auto":
            wanted = getattr(torch, wanted)
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=wanted, use_safetensors=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{source}: the model cannot be loaded ({first.rstrip('.')}); give a Hugging Face "
            "causal-LM folder with safetensors weights, a hub name, or 'demo'."
        ) from error
    model = model.to(device).eval().requires_grad_(False)
    model.config.use_cache = False
    return model, tokenizer


def resolve_source(source: str) -> str:
    """A folder that exists, or a name for the hub."""
    if source == "demo":
        return str(DEMO)
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json; give the folder of a Hugging Face causal LM.")
        return str(path)
    if source in ALIASES:
        return ALIASES[source]
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ModelError(
            f"{source} is no folder; check the path, or give a hub name or one of: "
            f"demo, {', '.join(ALIASES)}."
        )
    if "/" not in source:
        from requant.recipe import did_you_mean

        raise ModelError(
            f"'{source}' is neither a folder nor an alias"
            f"{did_you_mean(source, ['demo', *ALIASES])}; hub names have the form owner/name."
        )
    return source


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of transformer blocks and its dotted path.

    It is the `nn.ModuleList` that holds most linears, outermost first.
    """
    candidates = [
        (sum(isinstance(m, _linear_types()) for m in module.modules()), -len(path), path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    ]
    if not candidates or max(candidates)[0] == 0:
        raise ModelError(
            f"{type(model).__name__} has no list of transformer blocks with linear layers; "
            "requant quantizes decoder-only causal LMs."
        )
    _, _, path, blocks = max(candidates, key=lambda c: c[:2])
    return path, blocks


def find_linears(model: nn.Module, *, skip: Sequence[str] = ()) -> list[LinearSite]:
    """Every matrix to quantize, in the order of the forward pass; `skip` holds shell patterns on the dotted path."""
    path, blocks = find_blocks(model)
    _refuse_fused_experts(path, blocks)
    sites = [
        LinearSite(
            name=f"{path}.{index}.{name}",
            kind=name.rsplit(".", 1)[-1],
            block=index,
            module=module,
            transposed=not isinstance(module, nn.Linear),
        )
        for index, block in enumerate(blocks)
        for name, module in block.named_modules()
        if isinstance(module, _linear_types())
    ]
    unused = [pattern for pattern in skip if not any(_matches(site.name, pattern) for site in sites)]
    if unused:
        raise ModelError(f"--skip {unused[0]} matches no matrix; names look like {sites[0].name}.")
    kept = [site for site in sites if not any(_matches(site.name, pattern) for pattern in skip)]
    if not kept:
        raise ModelError("every matrix is skipped; nothing is left to quantize.")
    return kept


def check_finite(sites: Sequence[LinearSite]) -> None:
    """Refuse a model whose weights hold NaN or infinity, before any work."""
    for site in sites:
        if not torch.isfinite(site.parameter).all():
            raise NumericalError(
                f"{site.name}: the weight holds NaN or infinity; the source model is damaged, "
                "download it again."
            )


def model_bytes(source: str) -> int:
    """Bytes of the safetensors files of a folder (0 where it is a hub name not on disk)."""
    return sum(file.stat().st_size for file in Path(source).glob("*.safetensors"))


def read_config(source: str) -> dict[str, Any]:
    with open(Path(source) / "config.json", encoding="utf-8") as file:
        return json.load(file)


def context_limit(model: nn.Module) -> int | None:
    """Longest sequence the model has positions for, if its config says so."""
    config: Any = model.config
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return int(limit) if limit else None


def _linear_types() -> tuple[type, ...]:
    from transformers.pytorch_utils import Conv1D

    return nn.Linear, Conv1D


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name.rsplit(".", 1)[-1], pattern)


def _refuse_fused_experts(path: str, blocks: nn.ModuleList) -> None:
    for name, parameter in _parameters(blocks):
        if parameter.dim() == 3 and "conv" not in name.lower():
            raise ModelError(
                f"{path}.{name.rsplit('.', 1)[0]} fuses its experts in one 3-D tensor "
                f"{tuple(parameter.shape)}; mixture-of-experts models are not supported yet."
            )


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    yield from module.named_parameters()
