"""Post-training quantization with sensitivity metrics: see README.md for the reading order.

import requant
result = requant.quantize("demo", requant.Recipe())   # or a loaded model
result.save("demo-3bit")
model = requant.load("demo-3bit")
"""

from typing import TYPE_CHECKING, Any

from requant.integrations import register_with_transformers
from requant.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from requant.checkpoint import load as load
    from requant.exporting import export as export
    from requant.pipeline import QuantizedModel as QuantizedModel
    from requant.pipeline import quantize as quantize
    from requant.recipe import Recipe as Recipe
    from requant.recipe import load_recipe as load_recipe
    from requant.scoring import sensitivity as sensitivity

# name -> module; torch and transformers take seconds to import, so `requant --help` must not wait for them
_PUBLIC = {
    "QuantizedModel": "requant.pipeline",
    "Recipe": "requant.recipe",
    "export": "requant.exporting",
    "load": "requant.checkpoint",
    "load_recipe": "requant.recipe",
    "quantize": "requant.pipeline",
    "sensitivity": "requant.scoring",
}
__all__ = [
    "QuantizedModel",
    "Recipe",
    "export",
    "load",
    "load_recipe",
    "quantize",
    "sensitivity",
    "__version__",
]

register_with_transformers()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'requant' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)
