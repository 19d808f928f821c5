"""Where requant meets other programs: one file each.

`register_with_transformers` runs on `import requant`. Importing transformers' quantizers takes seconds, which
a person who types `requant --help` should not wait for, so the registration happens when transformers itself
imports them (it always does before it loads a model).
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

_REGISTRY = "transformers.quantizers.auto"


def register_with_transformers() -> None:
    """Register requant's quantizer now, or as soon as transformers' registry is imported; idempotent."""
    if _REGISTRY in sys.modules:
        from requant.integrations.transformers import register

        register()
    elif not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder())


class _RegistryFinder(importlib.abc.MetaPathFinder):
    """Answers for one module only, once: the ordinary loader loads it, then we register."""

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisterAfter(spec.loader)
        return spec


class _RegisterAfter(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        register_with_transformers()
