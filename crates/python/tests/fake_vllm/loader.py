"""vLLM's own modules, run from its sources, with stubs for everything around them.

    loader = Loader("0.33.0", ["vllm.v1.engine.core"])
    core = loader.module("vllm.v1.engine.core")

A module that is listed is run from its source. Every other one of vLLM's is a stub, and so is every package
that is neither Python's own nor listed as `outside`. Modules import through their loader, not through
`sys.modules`: nothing of it stays in the process, and its modules have no hooks.
"""

import builtins
import functools
import importlib
import logging
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from vllm_sources import sources


class Stub:
    """Stands for whatever a module is asked for: each of its attributes and results is another one, and it is
    false. As a base class it adds nothing, as a decorator it changes nothing.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __repr__(self) -> str:
        return f"<stub {self.__name__}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **_: Any) -> Any:
        is_decorator = len(args) == 1 and isinstance(args[0], FunctionType | type)
        return args[0] if is_decorator else Stub(f"{self.__name__}()")

    def __getitem__(self, _: Any) -> Any:
        return self

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, _: object) -> bool:
        return False

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __await__(self) -> Iterator[Any]:
        yield from ()


class StubModule(ModuleType):
    """A module with any name that is asked for."""

    __path__ = ()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Stub(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class Struct:
    """msgspec's: a class with the fields that are annotated."""

    def __init_subclass__(cls, **_: Any) -> None:
        for name, value in list(vars(cls).items()):
            if isinstance(value, list | dict | set) and not name.startswith("__"):
                setattr(cls, name, field(default_factory=type(value)))
        dataclass(eq=False)(cls)


class Log(logging.Logger):
    """vLLM's loggers can say a thing once."""

    info_once = logging.Logger.info
    debug_once = logging.Logger.debug
    warning_once = logging.Logger.warning


def init_logger(name: str) -> logging.Logger:
    before = logging.getLoggerClass()
    logging.setLoggerClass(Log)
    try:
        return logging.getLogger(name)
    finally:
        logging.setLoggerClass(before)


@functools.cache
def _compiled(path: Path) -> CodeType:
    return compile(path.read_bytes(), str(path), "exec", dont_inherit=True)


class Loader:
    """One version's modules: those of `real` are run, the packages of `outside` are the process's."""

    def __init__(self, version: str, real: Collection[str], outside: Collection[str] = ()) -> None:
        root = sources()
        assert root is not None
        self.version = version
        self.root = root / version
        self.real = frozenset(real)
        self.outside = frozenset(outside) | sys.stdlib_module_names
        self.modules: dict[str, ModuleType] = {}
        self._builtins = {**vars(builtins), "__import__": self._import}
        self.give("vllm.version", __version__=version)
        self.give("vllm.logger", init_logger=init_logger)
        self.give("msgspec", Struct=Struct, field=field)

    def give(self, name: str, **contents: Any) -> None:
        """Puts something real into a module, stub or not."""
        vars(self.module(name)).update(contents)

    def has(self, name: str) -> bool:
        below = self.root.joinpath(*name.split("."))
        return below.with_suffix(".py").is_file() or (below / "__init__.py").is_file()

    def module(self, name: str) -> Any:
        if name in self.modules:
            return self.modules[name]
        parent, _, own = name.rpartition(".")
        above = self.module(parent) if parent else None
        if name in self.modules:
            return self.modules[name]
        made = self._run(name) if name in self.real else self._pretend(name)
        if above is not None:
            setattr(above, own, made)
        return made

    def _pretend(self, name: str) -> ModuleType:
        self.modules[name] = made = StubModule(name)
        return made

    def _run(self, name: str) -> ModuleType:
        below = self.root.joinpath(*name.split("."))
        is_package = below.is_dir()
        path = below / "__init__.py" if is_package else below.with_suffix(".py")
        self.modules[name] = made = ModuleType(name)
        vars(made).update(__builtins__=self._builtins, __file__=str(path))
        made.__package__ = name if is_package else name.rpartition(".")[0]
        if is_package:
            made.__path__ = []
        # Where classes of dataclasses look up what their annotations mean.
        before = sys.modules.get(name)
        sys.modules[name] = made
        try:
            exec(_compiled(path), vars(made))
        finally:
            del sys.modules[name]
            if before is not None:
                sys.modules[name] = before
        return made

    def _import(self, name: str, names: Any = None, _: Any = None, wanted: Any = (), level: int = 0) -> Any:
        if level:
            package = str(names["__package__"]).rsplit(".", level - 1)[0]
            name = f"{package}.{name}" if name else package
        root = name.partition(".")[0]
        if root in self.outside:
            return importlib.__import__(name, names, None, wanted or ())
        found = self.module(name)
        if not wanted:
            return self.module(root)
        for each in wanted:
            if f"{name}.{each}" in self.real or not hasattr(found, each):
                self.module(f"{name}.{each}")
        return found
