"""Who uses vLLM's allocator and its backends of sleep, and how.

Followed are the class `CuMemAllocator`, whatever `get_instance()`, `get_mem_allocator_instance()` and
`sleep_mode_backend` give, and the module `cumem`: through imports, variables, attributes of `self`, and
conditions. What is done with one of them is either a use that is understood, or it escapes: is returned,
passed on, stored elsewhere. An escape is told as well, so that no use is lost in silence.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vllm_sources.tree import Function, Tree

CUMEM = "vllm.device_allocator.cumem"
ALLOCATOR = "CuMemAllocator"
GETTER = "get_mem_allocator_instance"
REGISTRY = "SleepModeBackendFactory"
BACKENDS = ("sleep_mode_backend", "_sleep_mode_backend", "_get_sleep_mode_backend")

Thing = Literal["module", "class", "getter", "allocator", "factory", "backend class", "backend"]

_IMPORTED: dict[str, Thing] = {ALLOCATOR: "class", GETTER: "getter", REGISTRY: "factory"}
_WORDS = (ALLOCATOR, GETTER, "device_allocator", "sleep_mode_backend", REGISTRY)

# Where the name of a backend is a setting, a text, and no object.
_SETTINGS = {"EngineArgs", "ModelConfig"}


@dataclass(frozen=True)
class Use:
    """One use that is understood: an attribute that is read, or a call."""

    of: Thing
    attribute: str
    """Empty where the thing itself is called."""
    where: str
    call: ast.Call | None = field(compare=False)
    within: Function | None = field(compare=False)
    """The function that it stands in."""


@dataclass(frozen=True)
class Escape:
    """A use that is not followed any further."""

    of: Thing
    where: str
    function: str
    """The innermost function or class that it stands in."""
    text: str


@dataclass
class Found:
    uses: list[Use] = field(default_factory=list)
    escapes: list[Escape] = field(default_factory=list)

    def of(self, *things: Thing) -> list[Use]:
        return [use for use in self.uses if use.of in things]


def collect(tree: Tree) -> Found:
    """Every use in the tree, but for those in the body of the allocator's own class."""
    found = Found()
    for path, module in tree.mentioning(*_WORDS):
        _Reader(path, module, found).read()
    return found


def keywords(call: ast.Call) -> list[str] | None:
    """The names of the arguments that have one; `None` where that cannot be told."""
    names = [keyword.arg for keyword in call.keywords]
    if None in names or any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    return [name for name in names if name is not None]


_Scope = ast.Module | ast.ClassDef | Function | ast.Lambda


class _Reader:
    def __init__(self, path: str, module: ast.Module, found: Found) -> None:
        self.path = path
        self.module = module
        self.found = found
        self.is_cumem = path == CUMEM.replace(".", "/") + ".py"
        self.parents = {child: node for node in ast.walk(module) for child in ast.iter_child_nodes(node)}
        self.bound: dict[tuple[ast.AST, str], Thing] = {}
        self.docstrings = {
            node.body[0].value
            for node in ast.walk(module)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }

    def read(self) -> None:
        nodes = [node for node in ast.walk(self.module) if not self._is_left_out(node)]
        for node in nodes:
            self._bind_import(node)
        # A variable may be bound to what another one has, further down.
        while any([self._bind_assignment(node) for node in nodes]):
            pass
        for node in nodes:
            if isinstance(node, ast.expr) and (thing := self._thing(node)):
                self._classify(node, thing)
            elif isinstance(node, ast.Constant):
                self._mention(node)

    def _is_left_out(self, node: ast.AST) -> bool:
        """Annotations are no uses, and the class that ours replaces is gone as a whole."""
        child: ast.AST | None = None
        up: ast.AST | None = node
        while up is not None:
            if self.is_cumem and isinstance(up, ast.ClassDef) and up.name == ALLOCATOR:
                return True
            if isinstance(up, (ast.arg, ast.AnnAssign)) and up.annotation is child and child is not None:
                return True
            if isinstance(up, Function) and up.returns is child and child is not None:
                return True
            child, up = up, self.parents.get(up)
        return False

    # What names stand for.

    def _bind_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == CUMEM and alias.asname:
                    self._bind(node, alias.asname, "module")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name
                if node.module == CUMEM:
                    self._imported_from_cumem(node, alias.name, name)
                elif alias.name in _IMPORTED:
                    self._bind(node, name, _IMPORTED[alias.name])
                elif f"{node.module}.{alias.name}" == CUMEM:
                    self._bind(node, name, "module")

    def _imported_from_cumem(self, node: ast.AST, original: str, name: str) -> None:
        if original == "*":
            self._escape(node, "module")
        else:
            self.found.uses.append(Use("module", original, self._where(node), None, self._function(node)))
        if original == ALLOCATOR:
            self._bind(node, name, "class")

    def _bind_assignment(self, node: ast.AST) -> bool:
        targets: Sequence[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            targets = [node.target]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets = [node.optional_vars]
        value = getattr(node, "context_expr", None) or getattr(node, "value", None)
        thing = self._thing(value) if targets and isinstance(value, ast.expr) else None
        return thing is not None and any([self._bind_target(node, target, thing) for target in targets])

    def _bind_target(self, node: ast.AST, target: ast.expr, thing: Thing) -> bool:
        if isinstance(target, ast.Name):
            return self._bind(node, target.id, thing)
        if isinstance(target, ast.Attribute) and _is_self(target.value):
            return self._bind(self._class(node) or self.module, f"self.{target.attr}", thing)
        return False

    def _bind(self, node: ast.AST, name: str, thing: Thing) -> bool:
        scope = node if name.startswith("self.") else next(self._scopes(node))
        is_new = (scope, name) not in self.bound
        self.bound.setdefault((scope, name), thing)
        return is_new

    def _thing(self, node: ast.expr) -> Thing | None:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            return self._looked_up(node, node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._called(node)
        choices: list[ast.expr] = []
        if isinstance(node, ast.IfExp):
            choices = [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            choices = node.values
        elif isinstance(node, (ast.Await, ast.NamedExpr)):
            choices = [node.value]
        return next((thing for choice in choices if (thing := self._thing(choice))), None)

    def _looked_up(self, node: ast.AST, name: str) -> Thing | None:
        for scope in self._scopes(node):
            if (scope, name) in self.bound:
                return self.bound[scope, name]
        if name == ALLOCATOR and self.is_cumem:
            return "class"
        if self.path.endswith("device_allocator/sleep_mode_backend.py") and name == REGISTRY:
            return "factory"
        return "getter" if name == GETTER and self.path.endswith("device_allocator/__init__.py") else None

    def _attribute(self, node: ast.Attribute) -> Thing | None:
        if ast.unparse(node) == CUMEM:
            return "module"
        owner = self._thing(node.value)
        if owner == "module" and node.attr == ALLOCATOR:
            return "class"
        if owner == "class" and node.attr == "instance" and isinstance(node.ctx, ast.Load):
            return "allocator"
        if owner is None and node.attr in _IMPORTED and isinstance(node.ctx, ast.Load):
            return _IMPORTED[node.attr]
        if owner is None and node.attr in BACKENDS and isinstance(node.ctx, ast.Load):
            return None if self._is_setting(node) else "backend"
        if _is_self(node.value) and isinstance(node.ctx, ast.Load):
            return self.bound.get((self._class(node) or self.module, f"self.{node.attr}"))
        return None

    def _is_setting(self, node: ast.Attribute) -> bool:
        owner = ast.unparse(node.value).rpartition(".")[2]
        holder = self._class(node)
        in_settings = holder is not None and holder.name in _SETTINGS and owner == "self"
        return in_settings or owner in _SETTINGS or owner.endswith("config")

    def _called(self, node: ast.Call) -> Thing | None:
        if ast.unparse(node.func).rpartition(".")[2] == "cast" and len(node.args) == 2:
            return self._thing(node.args[1])
        made: dict[Thing | None, Thing] = {
            "getter": "allocator",
            "class": "allocator",
            "backend class": "backend",
            "backend": "backend",  # a method that gives it
        }
        if isinstance(node.func, ast.Attribute):
            owner = self._thing(node.func.value)
            if owner == "class" and node.func.attr == "get_instance":
                return "allocator"
            own_class = self._class(node)
            in_registry = own_class is not None and own_class.name == REGISTRY and _is_self(node.func.value)
            if owner == "factory" or in_registry:
                of_factory: dict[str, Thing] = {
                    "create_backend": "backend",
                    "get_backend_class": "backend class",
                }
                return of_factory.get(node.func.attr)
        return made.get(self._thing(node.func))

    # What is done with them.

    def _classify(self, node: ast.expr, thing: Thing) -> None:
        parent = self.parents[node]
        if isinstance(parent, ast.Attribute):
            above = self.parents[parent]
            call = above if isinstance(above, ast.Call) and above.func is parent else None
            self._use(node, thing, parent.attr, call)
        elif isinstance(parent, ast.Call) and parent.func is node:
            self._use(node, thing, "", parent)
        elif isinstance(parent, ast.Call) and self._thing(parent) == thing:
            return  # a cast
        elif isinstance(parent, (ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.Await, ast.Expr)):
            return
        elif isinstance(parent, (ast.If, ast.UnaryOp, ast.Assert)):
            return
        elif isinstance(parent, ast.Compare) and all(
            isinstance(operator, (ast.Is, ast.IsNot)) for operator in parent.ops
        ):
            return
        elif isinstance(parent, (ast.Assign, ast.AnnAssign)) and self._follows(parent):
            return
        else:
            self._escape(node, thing)

    def _use(self, node: ast.expr, thing: Thing, attribute: str, call: ast.Call | None) -> None:
        self.found.uses.append(Use(thing, attribute, self._where(node), call, self._function(node)))

    def _follows(self, node: ast.Assign | ast.AnnAssign) -> bool:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all(
            isinstance(target, ast.Name) or (isinstance(target, ast.Attribute) and _is_self(target.value))
            for target in targets
        )

    def _mention(self, node: ast.Constant) -> None:
        """A name that stands in a text may be looked up with it."""
        if node.value not in (CUMEM, ALLOCATOR, GETTER) or node in self.docstrings:
            return
        parent = self.parents[node]
        is_cast = isinstance(parent, ast.Call) and self._thing(parent) and parent.args[:1] == [node]
        if not is_cast:
            self._escape(node, "module")

    def _escape(self, node: ast.AST, thing: Thing) -> None:
        scope = next(scope for scope in self._scopes(node) if not isinstance(scope, ast.Lambda))
        statement: ast.AST = node
        while not isinstance(statement, ast.stmt):
            statement = self.parents[statement]
        name = getattr(scope, "name", "")
        text = ast.unparse(statement).splitlines()[0]
        self.found.escapes.append(Escape(thing, self._where(node), name, text))

    # Where they stand.

    def _scopes(self, node: ast.AST) -> Iterator[_Scope]:
        """The scopes in which a name is looked up, innermost first. A class's own is none for its methods."""
        within: ast.AST | None = self.parents.get(node)
        is_first = True
        while within is not None:
            if isinstance(within, (ast.Module, ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)) or (
                is_first and isinstance(within, ast.ClassDef)
            ):
                yield within
                is_first = False
            within = self.parents.get(within)

    def _function(self, node: ast.AST) -> Function | None:
        return next((scope for scope in self._scopes(node) if isinstance(scope, Function)), None)

    def _class(self, node: ast.AST) -> ast.ClassDef | None:
        within: ast.AST | None = node
        while within is not None and not isinstance(within, ast.ClassDef):
            within = self.parents.get(within)
        return within

    def _where(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 0)}"


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
