"""Gives one of our modules to code that imports another package's name.

A line in `poorwill.pth`, which Python reads at its start, calls `begin`. It costs nothing unless the switch
is on.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from poorwill._native import PoorwillError

SWITCH = "POORWILL_TORCH_MEMORY_SAVER"
"""The variable that puts our module in the place of `torch_memory_saver`."""

NAME = "torch_memory_saver"
OURS = f"poorwill.compat.{NAME}"

_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")


class StandInError(PoorwillError, ImportError):
    """Our module cannot take the place of the other package."""


def begin() -> None:
    """Stands in if the switch says so. Raises StandInError for a value that cannot be read."""
    value = os.environ.get(SWITCH, "").strip().lower()
    if value in _ON:
        stand_in()
    elif value not in _OFF:
        raise StandInError(f"{SWITCH}={value!r} is neither on nor off: set it to 1 or 0")


def stand_in() -> None:
    """From now on `import torch_memory_saver` gives `poorwill.compat.torch_memory_saver`.

    Repeating it does nothing. Raises StandInError if the other package was imported before.
    """
    there = sys.modules.get(NAME)
    if there is not None and there is not sys.modules.get(OURS):
        raise StandInError(
            f"{NAME} was imported from {getattr(there, '__file__', 'elsewhere')} before Poorwill could "
            f"stand in for it: set {SWITCH}=1 in the environment of the process, or call stand_in() earlier"
        )
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def step_back() -> None:
    """Ends the standing in: later imports find the other package again."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
        if sys.modules[name] is sys.modules.get(f"poorwill.compat.{name}"):
            del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds our modules by the other package's names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != NAME and not name.startswith(f"{NAME}."):
            return None
        ours = f"poorwill.compat.{name}"
        if importlib.util.find_spec(ours) is None:
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(ours), is_package=name == NAME)


class _Loader(importlib.abc.Loader):
    """Loads nothing twice: the module is the one that our own name has."""

    def __init__(self, ours: str) -> None:
        self._ours = ours
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


_FINDER = _Finder()
