"""Bytes that follow from a model's shapes: what planned memory, and whether matrices stay on the host, are added up from.

The model may be one of shapes alone.
"""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from requant.calibration.collect import bytes_needed, working_bytes
from requant.models.prequantized import stored_float_dtypes
from requant.models.targets import QuantTarget, by_block
from requant.models.weight_files import folder_bytes


def parameter_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters of a model."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def outside_bytes(model: PreTrainedModel, targets: Sequence[QuantTarget]) -> int:
    """Bytes of what is never on the host: embedding, head, norms, biases, matrices that are skipped."""
    return parameter_bytes(model) - hosted_bytes(targets)


def hosted_bytes(targets: Sequence[QuantTarget]) -> int:
    """Bytes of the matrices' floats."""
    return sum(target.size * target.parameter.element_size() for target in targets)


def bytes_on_host(targets: Sequence[QuantTarget], folder: Path, *, gpus: int) -> int:
    """Bytes of the matrices' floats in the host's memory, in the processes of all `gpus` together.

    Processes share what is a view of the weight files in `folder`. Each has its own copy of experts, which are copied one
    by one (`models/experts.py`), and of what the files do not hold as floats of the model's dtype.
    """
    dtypes = stored_float_dtypes(folder)
    return sum(
        hosted_bytes([target]) * (1 if target.experts is None and target.parameter.dtype in dtypes else gpus)
        for target in targets
    )


def largest_block(targets: Sequence[QuantTarget]) -> int:
    """Bytes of the floats of a block's matrices."""
    return max(map(hosted_bytes, by_block(targets)))


def block_statistics(targets: Sequence[QuantTarget], needs: frozenset[str]) -> int:
    """Bytes of the statistics of a block, all of its matrices at once."""
    return max(bytes_needed(members, needs).total() for members in by_block(targets))


def work_bytes(targets: Sequence[QuantTarget], needs: frozenset[str]) -> int:
    """Bytes that predicting the loss of a matrix and quantizing it take beside its statistics, at most."""
    return max(working_bytes(target, needs) for target in targets)


def score_bytes(targets: Sequence[QuantTarget]) -> int:
    """Bytes that the scores of the largest matrix are computed in: three times its size in float32."""
    return 12 * max(target.size for target in targets)


def bytes_before(model: PreTrainedModel, source: Path | None) -> int:
    """Bytes of the original's weight files, or of its parameters where it was built in memory."""
    return parameter_bytes(model) if source is None else folder_bytes(source)
