"""Quantized matrices, embedding and head as functions of the floats that are trained with their codes."""

from collections.abc import Mapping

from torch import nn

from requant.allocation.embedding_and_head import QuantizedEmbeddingAndHead
from requant.finetune.decoded_block import DecodedBlock
from requant.finetune.scaled_rows import ScaledRows
from requant.finetune.step import ReparametrizedWeight
from requant.formats.contract import TrainableParams
from requant.formats.quantized_weight import WeightFunction, weight_function
from requant.models.targets import QuantTarget
from requant.run.context import RunContext, Weights


def reparametrized_weights(
    run: RunContext, weights: Weights, trainable: Mapping[str, TrainableParams]
) -> list[ReparametrizedWeight]:
    """The quantized matrices: each parameter as a function of its trainable floats, all else in the parameter's dtype."""
    targets = [target for target in run.targets if target.name in weights]
    block = DecodedBlock([target for target in targets if target.hosted is not None], weights)

    def derive(target: QuantTarget) -> ReparametrizedWeight:
        weight, params = weights[target.name], trainable[target.name]
        if target.hosted is not None:
            floats, rows = block.weight_function(target, weight), []
        else:
            floats = weight_function(weight, target.parameter.dtype)
            rows = [] if target.transposed else _scaled_rows(floats, params)
        return ReparametrizedWeight(
            parameter=target.parameter,
            value=lambda: target.oriented(floats(params)),
            hosted=target.hosted,
            rows=rows,
            stack=None if target.experts is None else (target.experts, target.kind),
        )

    return list(map(derive, targets))


def reparametrized_tables(
    tables: QuantizedEmbeddingAndHead, trainable: Mapping[str, TrainableParams]
) -> list[ReparametrizedWeight]:
    """Embedding and head where they are quantized: each parameter as a function of its `trainable` floats."""

    def derive(name: str, parameter: nn.Parameter) -> ReparametrizedWeight:
        floats, params = weight_function(tables.weights[name]), trainable[name]
        return ReparametrizedWeight(
            parameter=parameter, value=lambda: floats(params), rows=_scaled_rows(floats, params)
        )

    return [derive(name, parameter) for name, parameter in tables.parameters.items() if name in trainable]


def _scaled_rows(floats: WeightFunction, params: TrainableParams) -> list[ScaledRows]:
    return [ScaledRows(scales=scales, unscaled=unscaled) for scales, unscaled in floats.scaled_rows(params)]
