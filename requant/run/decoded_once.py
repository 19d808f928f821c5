"""Weights that keep their floats while a result is measured, where memory is ample.

A diagnosis reads the floats of all codes a dozen times, evaluation and samples once each; a GPU takes 0.4 s for those of a
billion weights in trellis codes.
"""

from requant import ranks
from requant.formats.quantized_weight import DecodedOnce
from requant.models.devices import free_memory
from requant.models.hosted import hosted_blocks
from requant.run.context import RunContext, Weights

KEPT = 0.25  # of the free memory: what all floats may take, 4 bytes a weight


def keeps_floats(weights: int, memory: int, *, hosted: bool) -> bool:
    """Whether so many weights keep their floats in a device's free memory; never those of blocks on the host."""
    return not hosted and 4 * weights <= KEPT * memory


def decoded_once(run: RunContext, weights: Weights) -> Weights:
    """The weights, whose floats stay from their first use on if every rank has the memory."""
    free, hosted = ranks.smallest(free_memory(run.model.device)), hosted_blocks(run.model) is not None
    if not keeps_floats(run.total_weights, free, hosted=hosted):
        return weights
    return {name: DecodedOnce.of(weight) for name, weight in weights.items()}
