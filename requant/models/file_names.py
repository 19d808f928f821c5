"""The names that weight files have for a model's matrices, and back.

transformers renames tensors when it loads the files of some models: Mixtral's experts, Nemotron-H's `backbone`, the text
model of a Qwen3.5 that also reads images. A checkpoint keeps the names of its source's files, which other programs and other
versions of transformers know, but only where nothing but the name differs: a matrix that is part of another one in the files
keeps its own name.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from requant.models.experts import Experts
from requant.models.weight_conversions import quick_conversions


def names_in_files(model: nn.Module, stored: Collection[str] = ()) -> dict[str, str]:
    """Matrix in a block -> what weight files call it, where that is another name.

    `stored` are the names in the source's files; experts need none, since no file has a name of both.
    """
    # late: transformers may be importing this package
    from requant.models.targets import find_linears

    experts = {
        f"{path}.{e}.{name}"
        for path, layer in model.named_modules()
        if isinstance(layer, Experts)
        for e in range(len(layer))
        for name in layer.names
    }
    others = [t.name for t in find_linears(model) if f"{t.name}.weight" not in stored] if stored else []
    renamed = disk_names(model, {f"{name}.weight": torch.empty(0) for name in (*experts, *others)})
    found = {name.removesuffix(".weight"): new.removesuffix(".weight") for name, new in renamed.items()}
    found = {
        name: new
        for name, new in found.items()
        if new != name and (name in experts or f"{new}.weight" in stored)
    }
    back = module_names(
        model, [f"{found[name]}.weight" for name in found if name not in experts], model.state_dict()
    )
    return {
        name: new
        for name, new in found.items()
        if name in experts or back[f"{new}.weight"] == f"{name}.weight"
    }


def disk_names(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name of a tensor in the model -> the name that the model's weight files use for it.

    transformers may rename tensors when it loads older checkpoints, but older versions do not know the new names, so the
    name in the files is the one to save.
    """
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    found = {name: name for name in tensors}
    if not isinstance(model, PreTrainedModel):
        return found
    with quick_conversions(model):
        for name, tensor in tensors.items():
            names = list(revert_weight_conversion(model, {name: tensor}))
            if len(names) == 1:
                found[name] = names[0]
    return found


def module_names(model: Any, names: Iterable[str], state: Mapping[str, Any]) -> dict[str, str]:
    """Name on disk -> where the model looks for that tensor (GPT-NeoX: embed_out is lm_head today)."""
    found = {name: name for name in names}
    if all(name in state for name in found):
        return found
    # Imported late: this file is loaded while transformers is still importing its registry of quantizers.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    known = dict(state)
    for name in found:
        if name not in state:
            found[name] = rename_source_key(name, renamings, [], model.base_model_prefix, known)[0]
    return found
