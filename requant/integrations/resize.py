"""`model.resize_token_embeddings(n)` on a loaded checkpoint, for new tokens.

transformers creates a new embedding and head, and new per-layer embeddings, and copies rows of `weight` into them. Codes
have no such rows, so if one of these is coded, another size is refused; plain ones are resized, and the rotations of a
folded model, which are hooks on the modules that are replaced, are kept.
"""

from functools import partial
from typing import Any

from torch import nn

from requant.errors import ModelError
from requant.inference.quant_embedding import QuantEmbedding
from requant.models.rotations import stream_kept


def guard_resizing(model: Any) -> None:
    """Put `resize_token_embeddings` in front of the method of the model's class."""
    # no bound method: pickled, that would become the method of the class
    model.resize_token_embeddings = partial(resize_token_embeddings, model)


def resize_token_embeddings(
    model: Any,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """transformers' method of that name; raises ModelError for another size of an embedding or head that has codes."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    coded = any(isinstance(module, QuantEmbedding) for module in model.modules())  # a token table may be, too
    if isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear) and not coded:
        with stream_kept(model):
            return type(model).resize_token_embeddings(
                model, new_num_tokens, pad_to_multiple_of, mean_resizing
            )
    size = embedding.num_embeddings
    multiple = pad_to_multiple_of or 1
    wanted = -(-(size if new_num_tokens is None else new_num_tokens) // multiple) * multiple
    if wanted != size:
        raise ModelError(
            f"embedding, head or per-layer embeddings of this {type(model).__name__} are codes, whose {size} rows cannot "
            f"become {wanted}: resize the original before it is quantized, load with dequantize=True, or quantize with "
            "--head-bits 16."
        )
    return embedding
