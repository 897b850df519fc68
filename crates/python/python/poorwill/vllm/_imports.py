"""Calls a function once a module is imported, without importing it.

Every process of every vLLM beside us imports this, so it stands on what Python has imported at its start.
"""

import importlib.machinery
import sys
import threading
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader

    Patch = Callable[[ModuleType], None]
else:
    Loader = object

_waiting: "dict[str, list[Patch]]" = {}
_done: "set[tuple[str, Patch]]" = set()
_lock = threading.RLock()


def when_imported(name: str, patch: "Patch") -> None:
    """Calls `patch` once with the module: now if it is imported, otherwise right after its import.

    Several of a module are called in order. What one raises is raised by the import, without the rest.
    """
    with _lock:
        if (name, patch) in _done or patch in _waiting.get(name, ()):
            return
        module = sys.modules.get(name)
        if module is None:
            _waiting.setdefault(name, []).append(patch)
            if _FINDER not in sys.meta_path:
                sys.meta_path.insert(0, _FINDER)
            return
        _done.add((name, patch))
    patch(module)


def is_there(name: str) -> bool:
    """Whether a module of that name exists. Imports nothing."""
    package, *below = name.split(".")
    imported = sys.modules.get(package)
    if imported is not None:
        path = getattr(imported, "__path__", None)
    else:
        from importlib.util import find_spec

        found = find_spec(package)
        path = None if found is None else found.submodule_search_locations
    for each in below:
        if path is None:
            return False
        package = f"{package}.{each}"
        spec = importlib.machinery.PathFinder.find_spec(package, list(path))
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


class _Finder:
    """Finds modules as usual, with a loader that calls back."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None", target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        with _lock:
            if name not in _waiting:
                return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """A module's own loader, followed by the patches."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        with _lock:
            patches = _waiting.pop(module.__name__, [])
            _done.update((module.__name__, patch) for patch in patches)
        for patch in patches:
            patch(module)

    def __getattr__(self, name: str) -> object:
        # Resources, sources and the like come from the loader itself.
        return getattr(self._loader, name)


_FINDER = _Finder()
