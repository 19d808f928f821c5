"""What a model's `forward` returns: an object with names, whatever its config.json says."""

from typing import Any


def with_named_outputs(model: Any) -> Any:
    """The model, with `return_dict` of its configuration set: of the tuples that were the form before nothing is read here,
    and the models of transformers fail on them."""
    model.config.return_dict = model.config.get_text_config().return_dict = True
    return model
