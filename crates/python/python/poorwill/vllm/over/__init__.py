"""Worker classes of others with Poorwill's before them: `poorwill.vllm.over.MODULE.CLASS`.

vLLM imports an engine's worker class by its name, in every process. Below this package each module has the
classes of the module that its name ends with: `poorwill.vllm.over.mine.workers.Mine` derives from our worker
and from `mine.workers.Mine`. That one has to derive from vLLM's worker, and is imported when it is asked for.
A class that cannot be ours is refused by its name.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from poorwill.vllm._platform import OVER, ConfigurationError


class NoWorkerError(ConfigurationError, AttributeError):
    """A name here stands for no worker. Who looks for names in all modules, as pickle does, goes on."""


def compose(module: str, name: str) -> type:
    """Our worker over the class of that name. Raises ConfigurationError for one that cannot be."""
    theirs = _resolve(module, name)
    ours: Any = importlib.import_module("poorwill.vllm.worker")
    stock = ours.gpu_worker.Worker
    said = f"--worker-cls is {module}.{name}"
    if not (isinstance(theirs, type) and issubclass(theirs, stock)):
        raise ConfigurationError(
            f"{said}, which does not derive from {stock.__module__}.{stock.__qualname__}: Poorwill puts only "
            "such workers to sleep; take a worker class that does, or leave sleep mode to vLLM"
        )
    if issubclass(theirs, ours.Worker):
        return theirs
    if issubclass(ours.Worker, theirs):
        worker: type = ours.Worker
        return worker
    try:
        return types.new_class(
            name, (ours.Worker, theirs), exec_body=lambda body: body.update(_body(module, name, theirs))
        )
    except TypeError as error:
        raise ConfigurationError(f"{said}, which Poorwill's worker cannot be put before: {error}") from error


def _resolve(module: str, name: str) -> object:
    said = f"--worker-cls is {module}.{name}"
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"{said}, which cannot be imported here: {error}") from error
    try:
        return getattr(imported, name)
    except AttributeError as error:
        raise ConfigurationError(f"{said}, and {module} has no {name}") from error


def _body(module: str, name: str, theirs: type) -> dict[str, Any]:
    body: dict[str, Any] = {"__module__": f"{OVER}{module}", "__doc__": f"{name} that sleeps with Poorwill."}
    if any("__new__" in vars(kind) for kind in theirs.__mro__[:-1]):

        def create(cls: type, *args: Any, **kwargs: Any) -> Any:
            made = theirs.__new__(cls, *args, **kwargs)
            if not isinstance(made, cls):
                raise ConfigurationError(
                    f"--worker-cls is {module}.{name}, whose __new__ makes a {type(made).__qualname__}: that "
                    "would not sleep with Poorwill: name that class instead"
                )
            return made

        body["__new__"] = create
    return body


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module below this package for any name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(OVER):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        of = module.__name__.removeprefix(OVER)

        def find(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            try:
                made = compose(of, name)
            except ConfigurationError as error:
                raise NoWorkerError(str(error)) from error
            # Pickles find it by this name.
            setattr(module, name, made)
            return made

        module.__dict__["__getattr__"] = find


sys.meta_path[:] = [
    *(finder for finder in sys.meta_path if type(finder).__module__ != __name__),
    _Finder(),
]
