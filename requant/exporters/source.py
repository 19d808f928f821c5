"""The checkpoint to be exported: its matrices and its other tensors, one at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from requant.checkpoint.validate import (
    CheckpointHeader,
    check_depth,
    check_values,
    read_header,
)
from requant.errors import CheckpointError, InputError, NumericalError
from requant.files import path_of
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight, unpack
from requant.models.experts import Experts, unfuse_experts
from requant.models.file_names import module_names
from requant.models.folding import unfold
from requant.models.loading import DTYPES, auto_class, load_config, resolve_source
from requant.models.rotations import HEAD_SCALES
from requant.models.safetensors_reader import TensorReader
from requant.models.targets import embedding_and_head_modules


@dataclass(frozen=True, kw_only=True)
class Source:
    """`skeleton` is the model without memory (on the meta device), `layers` the layer of every quantized matrix in it."""

    path: Path
    header: CheckpointHeader
    read: TensorReader  # of its tensors
    config: Any  # transformers' configuration, without the quantization
    skeleton: PreTrainedModel
    layers: Mapping[str, nn.Module]
    dtype: torch.dtype
    casts_all: bool  # a dtype was given: it applies to every float tensor

    @cached_property
    def specs(self) -> dict[str, PackedSpec]:
        """Specs of all quantized matrices: those of the blocks, then embedding and head if they are quantized."""
        return {**self.header.modules, **self.header.embedding_and_head}

    @property
    def experts(self) -> list[Experts]:
        """The layers of experts, empty for a dense model."""
        return [module for module in self.skeleton.modules() if isinstance(module, Experts)]

    def weights(self) -> Iterator[tuple[str, QuantizedWeight]]:
        """Every quantized matrix by name, in the order of `specs`."""
        for name in self.specs:
            yield name, self.weight(name)

    def weight(self, name: str) -> QuantizedWeight:
        """A quantized matrix, checked, on the CPU."""
        spec = self.specs[name]
        tensors = self.read.matrix(name, spec.tensors())
        check_values(name, spec, tensors)
        return unpack(spec, tensors)

    def plain(self) -> Iterator[tuple[str, Tensor]]:
        """Every other tensor, in the dtype to write."""
        for name in self.plain_names():
            yield name, self.plain_tensor(name)

    def plain_tensor(self, name: str) -> Tensor:
        """A tensor that is not quantized, in the dtype to write."""
        stored = self.read(name)
        tensor = self._unfolded(name, stored)
        return self.cast(name, tensor) if self._is_cast(stored.dtype) else tensor.to(stored.dtype)

    def plain_names(self) -> list[str]:
        """Includes biases of quantized layers, but no other tensor stored with their codes, and no `head_scales`."""
        modules = self.specs
        parts = {name: name.rpartition(".") for name in self.header.tensors}
        return [
            name
            for name, (parent, _, last) in parts.items()
            if (parent not in modules and last != HEAD_SCALES) or last == "bias"
        ]

    def plain_dtype(self, name: str) -> torch.dtype:
        """The dtype in which `plain` gives a tensor."""
        stored = self.header.tensors[name].dtype
        return self.dtype if self._is_cast(stored) else stored

    def transposed(self, name: str) -> bool:
        """Whether the layer holds its weight as [k, n] (GPT-2)."""
        from transformers.pytorch_utils import Conv1D

        return isinstance(self.layers[name], Conv1D)

    def floats(self, name: str, weight: QuantizedWeight) -> Float[Tensor, "n k"]:
        """A matrix dequantized, without rotations that are folded into it, rounded once to the output dtype."""
        return self.cast(f"{name}.weight", self._unfolded(f"{name}.weight", weight.dequantize()))

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        """Rounded to the dtype to write; raises NumericalError where that makes an infinity."""
        rounded = tensor.to(self.dtype)
        if not torch.isfinite(rounded).all():
            raise NumericalError(f"{name} holds values beyond {self.dtype}; export with --dtype bfloat16.")
        return rounded

    def _unfolded(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor in the original's basis."""
        if self.header.rotation is None:
            return tensor
        (embedding, _), _ = embedding_and_head_modules(self.skeleton)
        base: Any = self.skeleton.base_model
        if name == f"{self.skeleton.base_model_prefix}.norm.weight" and base.norm is not None:
            return self.read(f"{embedding}.{HEAD_SCALES}")
        return unfold(name, tensor, self.header.rotation, self.read)

    def _is_cast(self, stored: torch.dtype) -> bool:
        return self.casts_all and stored.is_floating_point


def open_source(checkpoint: str | Path, *, dtype: str) -> Source:
    """Check the folder and its architecture. Raises CheckpointError, InputError."""
    if dtype not in ("auto", *DTYPES):
        raise InputError(f"--dtype {dtype} is unknown; give auto, {', '.join(DTYPES)}.")
    path = Path(resolve_source(str(path_of(checkpoint, "a checkpoint"))))
    header = read_header(path)
    config = load_config(str(path))
    del config.quantization_config
    skeleton, layers = _skeleton(path, config, header)
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    return Source(
        path=path,
        header=header,
        read=TensorReader(header.tensors),
        config=config,
        skeleton=skeleton,
        layers=layers,
        dtype=own if dtype == "auto" else getattr(torch, dtype),
        casts_all=dtype != "auto",
    )


def _skeleton(
    path: Path, config: Any, header: CheckpointHeader
) -> tuple[PreTrainedModel, dict[str, nn.Module]]:
    check_depth(path, config, header)
    try:
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
            unfuse_experts(model)
        names = (*header.modules, *header.embedding_and_head)
        paths = module_names(model, [f"{name}.weight" for name in names], model.state_dict())
        layers = {
            name: model.get_submodule(paths[f"{name}.weight"].removesuffix(".weight")) for name in names
        }
    except Exception as error:  # config.json is untrusted: transformers may raise anything
        raise CheckpointError(
            f"{path}: config.json describes no model with these matrices ({type(error).__name__}: "
            f"{str(error)[:160]}); upgrade transformers, or download it again."
        ) from error
    return model, layers
