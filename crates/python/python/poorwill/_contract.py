"""What a plugin needs of an engine's code, and whether that code has it.

A version number is not enough: a development build or a patched one has the number and not the functions. So
each plugin lists its needs, and compares them with the engine before it replaces anything. This module has
what the lists are made of, and finds what is needed in an imported module. `_sources` finds the same in
sources, by the same rule (`Need.problem`).
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

Version = tuple[int, int, int]

Kind = Literal["value", "field", "function", "method", "classmethod", "staticmethod", "kernel"]


@dataclass(frozen=True)
class Need:
    """One thing that a hook needs.

    - `value`: can be read.
    - `field`: an attribute of instances that `__init__` may set. A class does not show it, so only the tests
      check it.
    - `method`: is found in a class, and can be called like the remaining kinds.
    - `kernel`: a tuned Triton kernel, which may have other parameters.
    """

    module: str
    qualname: str
    kind: Kind
    parameters: tuple[str, ...] = ()
    """Parameters that we pass or receive, in order, without `self`; `*args` and `**kwargs` by these names.

    Further ones must have defaults.
    """
    is_whole: bool = False
    """Whether further parameters are refused: the hook takes exactly these."""
    is_async: bool = False
    since: Version = (0, 0, 0)
    """First version that has it."""
    until: Version | None = None
    """First version without it again."""

    @property
    def name(self) -> str:
        return f"{self.module}.{self.qualname}"

    def concerns(self, version: Version) -> bool:
        return self.since <= version and (self.until is None or version < self.until)

    def problem(self, found: "Found") -> str | None:
        """What is wrong with what was found, as the rest of a sentence that begins with its name."""
        if self.kind in ("value", "field"):
            return None
        if found.kind != self.kind:
            return f"is a {found.kind} and was a {self.kind}"
        if found.is_async != self.is_async:
            return "is asynchronous now" if found.is_async else "is not asynchronous any more"
        return self._unfitting(found.parameters)

    def _unfitting(self, found: tuple[inspect.Parameter, ...]) -> str | None:
        names = [_starred(parameter) for parameter in found]
        missing = [name for name in self.parameters if name not in names]
        if missing:
            return f"does not take {', '.join(missing)} but ({', '.join(names)})"
        if self.kind == "kernel":
            return None
        ordered = [_starred(parameter) for parameter in found if parameter.kind in _BY_POSITION]
        wanted = [name for name in self.parameters if name in ordered]
        if ordered[: len(wanted)] != wanted:
            return f"takes ({', '.join(names)}), and not {', '.join(wanted)} first"
        others = [parameter for parameter in found if _starred(parameter) not in self.parameters]
        if not self.is_whole:
            others = [
                other for other in others if other.default is other.empty and other.kind not in _STARRED
            ]
        if others:
            return f"takes {', '.join(map(_starred, others))}, too"
        return None


@dataclass(frozen=True)
class Found:
    """What was found for a need, with the parameters of callables, without `self` and `cls`."""

    kind: Kind
    parameters: tuple[inspect.Parameter, ...] = ()
    is_async: bool = False


def in_module(module: str) -> Callable[..., Need]:
    """Makes needs of one module."""

    def need(qualname: str, kind: Kind, *parameters: str, **more: Any) -> Need:
        return Need(module, qualname, kind, parameters, **more)

    return need


def release(version: str) -> Version | None:
    """The release that a version belongs to: 0.20.2rc1.dev3+g123 counts as 0.20.2. None if it tells none."""
    matched = _RELEASE.fullmatch(version.strip())
    if matched is None:
        return None
    major, minor, patch, *_ = [*map(int, matched[1].split(".")), 0]
    return (major, minor, patch)


def dotted(version: Version) -> str:
    return ".".join(map(str, version))


def tuner_of(kernel: Any) -> Any:
    """The autotuner of a Triton kernel, above heuristics or below; `None` without one."""
    while kernel is not None and not (hasattr(kernel, "configs") and hasattr(kernel, "early_config_prune")):
        kernel = getattr(kernel, "fn", None)
    return kernel


def find(module: ModuleType, need: Need) -> Found:
    """What an imported module has of a need.

    Raises AttributeError if it is missing, TypeError or ValueError if it does not tell what it takes.
    """
    *path, name = need.qualname.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part)
    if need.kind == "field":
        return Found("field")
    static = inspect.getattr_static(owner, name)
    if need.kind == "value":
        return Found("value")
    if need.kind == "kernel":
        tuner = tuner_of(static)
        if tuner is None:
            return Found("function" if inspect.isfunction(static) else "value")
        return Found("kernel", tuple(map(_named, tuner.arg_names)))
    if isinstance(static, (classmethod, staticmethod)):
        kind: Kind = "classmethod" if isinstance(static, classmethod) else "staticmethod"
        static = static.__func__
    else:
        kind = "method" if path else "function"
    parameters = tuple(inspect.signature(static).parameters.values())
    inner = inspect.unwrap(static)
    is_async = inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)
    return Found(kind, parameters[kind in ("method", "classmethod") :], is_async)


def _named(name: str) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)


_RELEASE = re.compile(
    r"v?(\d{1,9}(?:\.\d{1,9})+)"
    r"(?:[-_.]?(?:a|alpha|b|beta|c|rc|pre|preview|post|rev|r|dev)[-_.]?\d*)*"
    r"(?:\+[a-z0-9]+(?:[-_.][a-z0-9]+)*)?",
    re.ASCII | re.IGNORECASE,
)

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_STARRED: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def _starred(parameter: inspect.Parameter) -> str:
    return _STARRED.get(parameter.kind, "") + parameter.name
