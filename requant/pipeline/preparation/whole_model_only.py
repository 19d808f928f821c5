"""Models that cannot run one block at a time: they are trained as a whole, and refused if they would have to run block by
block.

The blocks of a few models take more than the hidden states of the block before. Whatever runs block by block (matrices on
the host, training in less memory, sequential calibration) would fail in the middle of its work, or learn from wrong
gradients.
"""

import dataclasses

from transformers import PreTrainedModel

from requant.calibration.hidden_states import why_not_block_by_block
from requant.errors import ModelError
from requant.recipe.schema import Recipe


def with_whole_training(model: PreTrainedModel, recipe: Recipe, *, hosted: bool) -> Recipe:
    """The recipe without training block by block for a model that cannot run so. Raises ModelError where it has to."""
    in_turn, by_block = recipe.calibration.inputs != "original", recipe.finetune.blockwise
    trains = recipe.finetune.trains and by_block is not False
    if not (hosted or in_turn or trains):
        return recipe
    # gradients beside those of hidden states are passed on where the matrices are not on the host
    why = why_not_block_by_block(model, gradients=hosted or trains, carried=not hosted)
    if why is None:
        return recipe
    model_class = type(model).__name__
    if hosted:
        raise ModelError(
            f"{model_class} is larger than the GPU and cannot run block by block: {why}; give the run a larger GPU."
        )
    if in_turn and why_not_block_by_block(model, gradients=False):
        raise ModelError(f"{model_class} cannot run block by block: {why}; leave calibration.inputs out.")
    if by_block and recipe.finetune.trains:
        raise ModelError(
            f"{model_class} cannot be trained block by block: {why}; leave finetune.blockwise out."
        )
    return dataclasses.replace(recipe, finetune=dataclasses.replace(recipe.finetune, blockwise=False))
