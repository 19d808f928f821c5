"""Shell patterns by which `--skip` and `--module` name matrices: on the dotted path or its last part.

Names are those of the model, or, for a pattern that matches none of them, those in weight files, which `requant inspect`
lists.
"""

import difflib
import fnmatch
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from requant.models.file_names import disk_names
from requant.models.token_tables import token_tables


def matched(model: nn.Module, names: Collection[str], patterns: Sequence[str]) -> dict[str, set[str]]:
    """Pattern -> those of the names of modules in `model` that it matches."""
    of_model = {name: name for name in names}
    found = {pattern: _like(pattern, of_model) for pattern in patterns}
    if not all(found.values()):
        # only then: renamings take up to milliseconds a matrix
        stored = disk_names(model, {f"{name}.weight": torch.empty(0) for name in names})
        in_files = {name: stored[f"{name}.weight"].removesuffix(".weight") for name in names}
        found |= {pattern: _like(pattern, in_files) for pattern, own in found.items() if not own}
    return found


def why_unmatched(model: nn.Module, names: Sequence[str], pattern: str) -> str:
    """What a pattern that matches none of the matrices `names` matches instead, or a name to take for an example."""
    modules = {path: module for path, module in model.named_modules() if hasattr(module, "weight")}
    other = min(matched(model, modules.keys() - set(names), [pattern])[pattern], default=None)
    if other is None:
        near = difflib.get_close_matches(pattern, names, n=1) or names
        return f"names look like {near[0]}, and embedding and head have --head-bits."
    if isinstance(model, PreTrainedModel):
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        if modules[other] in (*ends, *token_tables(model).values()):
            return f"{other} has an option of its own, --head-bits; 16 leaves it as it is."
    return f"{other} is never quantized; leave it out."


def _like(pattern: str, names: Mapping[str, str]) -> set[str]:
    """The keys whose values match."""
    return {
        name
        for name, searched in names.items()
        if fnmatch.fnmatch(searched, pattern) or fnmatch.fnmatch(searched.rpartition(".")[2], pattern)
    }
