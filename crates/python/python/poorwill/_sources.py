"""What modules below a folder define: found by name in their sources, through imports and base classes.

Nothing is imported or run.
"""

import ast
import copy
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from poorwill._contract import Found, Kind, Need

Function = ast.FunctionDef | ast.AsyncFunctionDef


def installed(package: str) -> "Tree | None":
    """The folder that a package's sources lie in, imported or not. Imports nothing."""
    module = sys.modules.get(package)
    spec = None if module is not None else importlib.util.find_spec(package)
    places = getattr(module, "__path__", None) or (spec and spec.submodule_search_locations) or ()
    return next((Tree(Path(place).parent) for place in places), None)


class MissingError(LookupError):
    """There is no such definition."""


@dataclass(frozen=True)
class Tree:
    """A folder that packages lie in."""

    root: Path

    def path(self, module: str) -> Path:
        below = self.root.joinpath(*module.split("."))
        for path in (below / "__init__.py", below.with_suffix(".py")):
            if path.is_file():
                return path
        raise MissingError(f"{module} is missing")

    def parsed(self, module: str) -> ast.Module:
        return _parsed(self.path(module))

    @staticmethod
    def forget() -> None:
        """Lets go of what was parsed, which is a hundred MB and more of a whole engine."""
        _parsed.cache_clear()

    def definition(self, module: str, qualname: str) -> "Definition":
        """What a name stands for, in the module or below a class of it."""
        place = Definition(self, module, self.parsed(module))
        for name in qualname.split("."):
            place = place.member(name)
        return place

    def found(self, need: Need) -> Found:
        """What is there of what is needed, as `poorwill._contract` finds it in an imported module."""
        owner, _, name = need.qualname.rpartition(".")
        if need.kind == "field":
            if not self.definition(need.module, owner).has_field(name):
                raise MissingError(f"{need.name} is missing")
            return Found("field")
        return self.definition(need.module, need.qualname).found()


@dataclass(frozen=True)
class Definition:
    """A module, a class, a function, or whatever else has a name."""

    tree: Tree
    module: str
    node: ast.AST
    is_member: bool = False
    """Whether it stands in a class."""

    def member(self, name: str) -> "Definition":
        """The definition that counts of those by this name: the last, or that of a base class."""
        if not isinstance(self.node, (ast.Module, ast.ClassDef)):
            raise MissingError(f"{self.module}: nothing is defined below {ast.unparse(self.node)!r}")
        in_class = isinstance(self.node, ast.ClassDef)
        for node in reversed(list(_statements(self.node.body))):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.tree.definition(self._absolute(node), alias.name)
            elif name in _names(node):
                return Definition(self.tree, self.module, node, in_class)
        for base in self.bases():
            try:
                return base.member(name)
            except MissingError:
                continue
        raise MissingError(f"{self.module}.{getattr(self.node, 'name', '')}: {name} is missing")

    def bases(self) -> Iterator["Definition"]:
        """The base classes whose sources are here."""
        for base in self.node.bases if isinstance(self.node, ast.ClassDef) else []:
            try:
                found = self.tree.definition(self.module, ast.unparse(base))
            except MissingError:
                continue
            if isinstance(found.node, ast.ClassDef):
                yield found

    def methods(self) -> dict[str, "Definition"]:
        """The functions in the body of a class, without those of its bases."""
        assert isinstance(self.node, ast.ClassDef), ast.dump(self.node)
        functions = [node for node in _statements(self.node.body) if isinstance(node, Function)]
        return {node.name: Definition(self.tree, self.module, node, True) for node in functions}

    def fields(self) -> set[str]:
        """The attributes that instances have: of the class and its bases, and what their methods set."""
        return self._own_fields().union(*(base.fields() for base in self.bases()))

    def has_field(self, name: str) -> bool:
        """Whether one of these attributes has this name; reads no more bases than it needs."""
        return name in self._own_fields() or any(base.has_field(name) for base in self.bases())

    def _own_fields(self) -> set[str]:
        if not isinstance(self.node, ast.ClassDef):
            raise MissingError(f"{self.module}: {ast.unparse(self.node)!r} is no class")
        names = {name for node in _statements(self.node.body) for name in _names(node)}
        names |= {
            node.attr
            for node in ast.walk(self.node)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
        return names

    def found(self) -> Found:
        """How it can be called, if it can. Decorators other than Python's own are taken to change nothing."""
        if not isinstance(self.node, Function):
            return Found("value")
        decorators = {ast.unparse(decorator) for decorator in self.node.decorator_list}
        if decorators & {"property", "cached_property", "functools.cached_property"}:
            return Found("value")
        if {"triton.autotune", "triton.jit"} <= {each.partition("(")[0] for each in decorators}:
            return Found("kernel", tuple(_parameters(self.node.args)))
        kind: Kind = "method" if self.is_member else "function"
        if "classmethod" in decorators:
            kind = "classmethod"
        elif "staticmethod" in decorators:
            kind = "staticmethod"
        parameters = tuple(_parameters(self.node.args))[kind in ("method", "classmethod") :]
        return Found(kind, parameters, isinstance(self.node, ast.AsyncFunctionDef))

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self.tree.path(self.module).name == "__init__.py"
        parts = self.module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A body's statements, with those that run on a condition only."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody") if isinstance(node, (ast.If, ast.Try, ast.With)) else ():
            yield from _statements(getattr(node, part, []))
        for handler in node.handlers if isinstance(node, ast.Try) else []:
            yield from _statements(handler.body)


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return {node.name}
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}


def _parameters(arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    """The parameters; a default is its text."""
    alike = copy.deepcopy(arguments)
    alike.defaults = [ast.Constant(ast.unparse(default)) for default in arguments.defaults]
    alike.kw_defaults = [each and ast.Constant(ast.unparse(each)) for each in arguments.kw_defaults]
    function = ast.fix_missing_locations(ast.Expression(ast.Lambda(alike, ast.Constant(None))))
    for parameter in inspect.signature(eval(compile(function, "", "eval"))).parameters.values():
        yield parameter.replace(annotation=parameter.empty)
