"""Whether another program will be able to read a checkpoint, judged from the shapes alone before it is made."""

from typing import Any

import torch
from torch import nn

from requant.errors import InputError
from requant.formats.other_programs import inexpressible, misfit
from requant.models.experts import Experts, unfuse_experts
from requant.models.llama_cpp import check_architecture
from requant.models.loading import auto_class, load_config, resolve_source
from requant.models.targets import find_linears
from requant.quantizers.registry import METHODS
from requant.recipe.readers import find_reader
from requant.recipe.schema import Recipe

OBSTACLES = {"compressed-tensors": inexpressible, "gguf": misfit}


def check_readable(recipe: Recipe, program: str, *, config: Any = None) -> None:
    """Raise InputError, with the first matrix that `program` could not read, if the recipe makes such ones.

    `config` is that of a loaded model; None: of the recipe's.
    """
    export = find_reader(program).export
    config = load_config(resolve_source(recipe.model)) if config is None else config
    if export == "gguf":
        try:
            check_architecture(config)
        except InputError as error:
            raise InputError(f"leave --for {program} out: {error}") from error
    with torch.device("meta"):
        skeleton = auto_class(config).from_config(config)
        unfuse_experts(skeleton)
    # also where all of its experts are skipped
    if any(isinstance(module, Experts) for module in skeleton.modules()):
        raise InputError(
            f"--for {program}: this model is a mixture of experts, whose exported form has not been tested with any reader; "
            "leave --for out, and export --to dense."
        )
    for target in find_linears(skeleton, skip=recipe.skip):
        spec = METHODS[recipe.method].packed_spec(
            recipe.quantizer, target.shape, finetuned=recipe.finetune.trains
        )
        what = OBSTACLES[export](spec)
        if what is None and not isinstance(target.module, nn.Linear):
            what = f"is not a linear layer but a {type(target.module).__name__}"
        if what is not None:
            raise InputError(
                f"--for {program}: {target.name} {what}; choose another --group-size, --skip it, or leave --for out."
            )
