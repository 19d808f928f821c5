"""Post-training quantization with sensitivity metrics: see README.md for the reading order.

import requant
result = requant.quantize("demo", bits=3)   # or a loaded model; takes a recipe, or the command's options
requant.save(result, "demo-3bit")
model = requant.load("demo-3bit")
"""

from typing import TYPE_CHECKING, Any

from requant.integrations import register_integrations
from requant.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from requant.errors import RequantError as RequantError
    from requant.exporters.export import export as export
    from requant.inference.load import load as load
    from requant.pipeline.quantize import quantize as quantize
    from requant.pipeline.quantized_model import QuantizedModel as QuantizedModel
    from requant.recipe.schema import Recipe as Recipe
    from requant.recipe.yaml_files import load_recipe as load_recipe
    from requant.report.save import save as save
    from requant.report.score import score as score
    from requant.report.sweep import sweep as sweep

# name -> module; torch and transformers take seconds to import, so `requant --help` must not wait for them
_PUBLIC = {
    "QuantizedModel": "requant.pipeline.quantized_model",
    "Recipe": "requant.recipe.schema",
    "RequantError": "requant.errors",
    "export": "requant.exporters.export",
    "load": "requant.inference.load",
    "load_recipe": "requant.recipe.yaml_files",
    "quantize": "requant.pipeline.quantize",
    "save": "requant.report.save",
    "score": "requant.report.score",
    "sweep": "requant.report.sweep",
}
__all__ = [
    "QuantizedModel",
    "Recipe",
    "RequantError",
    "export",
    "load",
    "load_recipe",
    "quantize",
    "save",
    "score",
    "sweep",
    "__version__",
]

register_integrations()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'requant' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
