"""Integrations with other programs, one file each.

`register_integrations` runs on `import requant`. Importing transformers' quantizers or PEFT takes seconds, and a person
who types `requant --help` should not wait for that, so each registration happens when the other program imports the module
concerned (transformers always does so before it loads a model).
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

INTEGRATIONS = {  # a module of another program -> ours, which registers with it at its end
    "transformers.quantizers.auto": "requant.integrations.transformers",
    "peft.tuners.lora.model": "requant.integrations.peft",
}


def register_integrations() -> None:
    """Register with every program of INTEGRATIONS now, or as soon as it imports its module; idempotent."""
    for theirs, ours in INTEGRATIONS.items():
        if theirs in sys.modules:
            importlib.import_module(ours)
        elif not any(isinstance(finder, _Finder) and finder.theirs == theirs for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(theirs))


class _Finder(importlib.abc.MetaPathFinder):
    """Answers for one module only, once: the ordinary loader loads it, then we register."""

    def __init__(self, theirs: str) -> None:
        self.theirs = theirs

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.theirs:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisterAfter(spec.loader, INTEGRATIONS[fullname])
        return spec


class _RegisterAfter(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, ours: str) -> None:
        self.loader, self.ours = loader, ours

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        importlib.import_module(self.ours)  # where that import led here, it goes on and registers at its end
