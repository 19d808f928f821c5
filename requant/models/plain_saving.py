"""`save_pretrained` of a model of floats that we have changed, so that it writes what transformers builds again.

    folded rotations (`rotations.py`)             back to the original's basis: an ordinary folder cannot name them
    experts as linears (`experts.py`)             one tensor per layer, where the original's files have that

Otherwise transformers would load the folder without an error: the first as a model without rotations, the second with random
experts.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from requant.models.experts import Experts, fused_again
from requant.models.folding import unfold
from requant.models.rotations import HEAD_SCALES, Rotation, rotation_of
from requant.models.targets import embedding_and_head_modules


def save_plainly(model: Any) -> None:
    """Put `save_pretrained` in front of the method of the model's class."""
    # no bound method: pickled, that would become the method of the class
    model.save_pretrained = partial(save_pretrained, model)


def save_pretrained(
    model: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    *arguments: Any,
    **options: Any,
) -> None:
    """transformers' method of that name, with the tensors that a dense export has."""
    if not getattr(model, "_hf_peft_config_loaded", False):  # then only adapters are saved
        state_dict = plain(model, model.state_dict() if state_dict is None else state_dict)
    type(model).save_pretrained(model, save_directory, is_main_process, state_dict, *arguments, **options)


def plain(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict as that of the model which transformers builds."""
    rotation = rotation_of(model)
    found = dict(state) if rotation is None else _unfolded(model, state, rotation)
    for path, layer in model.named_modules():
        if isinstance(layer, Experts) and layer.fused_in_files:
            found |= {f"{path}.{name}": tensor for name, tensor in _fused(path, layer, found).items()}
    return found


def _unfolded(model: Any, state: Mapping[str, Tensor], rotation: Rotation) -> dict[str, Tensor]:
    (embedding, _), _ = embedding_and_head_modules(model)
    head_scales, norm = f"{embedding}.{HEAD_SCALES}", f"{model.base_model_prefix}.norm.weight"
    return {
        name: unfold(name, state[head_scales if name == norm else name], rotation, state.__getitem__).to(
            tensor.dtype
        )
        for name, tensor in state.items()
        if name != head_scales
    }


def _fused(path: str, layer: Experts, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that a layer of experts was made of; takes those of single experts out of `state`."""
    return fused_again(layer, lambda e, linear, kind: state.pop(f"{path}.{e}.{linear}.{kind}"))
