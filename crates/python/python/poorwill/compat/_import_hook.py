"""Gives one of our modules to code that imports another package's name.

Python calls `begin` at its start: by a line in `poorwill.pth`, and from 3.15 on by `poorwill.start`. Every
process of the installation does that. So this imports nothing more until the other name is imported, and
only that import fails for a wrong switch.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
else:
    Loader = object

SWITCH = "POORWILL_TORCH_MEMORY_SAVER"
"""The variable that puts our module in the place of `torch_memory_saver`."""

NAME = "torch_memory_saver"
OURS = f"poorwill.compat.{NAME}"

_ON = ("1", "true", "yes", "on")
# The line in `poorwill.pth` has them, too.
_OFF = ("", "0", "false", "no", "off")


def begin() -> None:
    """Stands in if the switch says so. A value that is neither on nor off fails imports of the name."""
    value = os.environ.get(SWITCH, "").strip().lower()
    if value in _ON:
        stand_in()
    elif value not in _OFF:
        sys.meta_path.insert(0, _Refusal(value))


def stand_in() -> None:
    """From now on `import torch_memory_saver` gives `poorwill.compat.torch_memory_saver`.

    Repeating it does nothing. Raises StandInError if the other package was imported before.
    """
    there = sys.modules.get(NAME)
    if there is not None and there is not sys.modules.get(OURS):
        raise _error(
            f"{NAME} was imported from {getattr(there, '__file__', 'elsewhere')} before Poorwill could "
            f"stand in for it: set {SWITCH}=1 in the environment of the process, or call stand_in() earlier"
        )
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def step_back() -> None:
    """Ends the standing in: later imports find the other package again."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    for name in [name for name in sys.modules if _is_theirs(name)]:
        if sys.modules[name] is sys.modules.get(f"poorwill.compat.{name}"):
            del sys.modules[name]


def _is_theirs(name: str) -> bool:
    return name == NAME or name.startswith(f"{NAME}.")


def _error(reason: str) -> ImportError:
    from poorwill.compat._error import StandInError

    error = StandInError(reason)
    error.name = NAME
    return error


class _Finder:
    """Finds our modules by the other package's names."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None", target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_theirs(name):
            return None
        from importlib.util import find_spec

        ours = f"poorwill.compat.{name}"
        if find_spec(ours) is None:
            return None
        return ModuleSpec(name, _Loader(ours), is_package=name == NAME)


class _Refusal:
    """Finds an error by the other package's name, in place of either package.

    Only its importers are concerned; a traceback at each process's start would go on with the other package.
    """

    def __init__(self, value: str) -> None:
        self._value = value

    def find_spec(
        self, name: str, path: "Sequence[str] | None", target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_theirs(name):
            return None
        raise _error(
            f"{SWITCH}={self._value!r} is neither on nor off, so it is not known whose {NAME} to import: "
            "set it to 1 for Poorwill's, or to 0"
        )


class _Loader(Loader):
    """Loads nothing twice: the module is the one that our own name has."""

    def __init__(self, ours: str) -> None:
        self._ours = ours
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._ours)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


_FINDER = _Finder()
