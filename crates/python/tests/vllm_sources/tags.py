"""The names that vLLM gives to memory: where it takes it, puts it to sleep, wakes it, and drops it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_sources.calls import ALLOCATOR, CUMEM, Found
from vllm_sources.tree import Function, Tree

# Which argument of the allocator's methods names tags. Those of waking and discarding come through every
# process, from requests; the modules below name what may be in them.
_TAKING = {"use_memory_pool": "tag", "sleep": "offload_tags"}
_SENDING = ("vllm/v1/executor/abstract.py", "vllm/v1/engine/core.py", "vllm/device_allocator/__init__.py")


@dataclass(frozen=True)
class Tag:
    """A tag where it is used; `None` is one that cannot be told from the source."""

    name: str | None
    where: str


def collect(tree: Tree, found: Found) -> list[Tag]:
    default = tree.definition(CUMEM, f"{ALLOCATOR}.default_tag").node
    tags = [Tag(name, "the tag that is meant where none is given") for name in _texts(_value(default), None)]
    for use in found.of("allocator"):
        if use.call is not None and use.attribute in _TAKING:
            argument = _argument(use.call, _TAKING[use.attribute], 0)
            tags += _tags(tree, argument, use.within, use.where)
    return [*tags, *_sent(tree)]


def _sent(tree: Tree) -> Iterator[Tag]:
    """The tags that are sent to the workers, or that the executor knows to sleep."""
    for path, module in tree.mentioning("tags"):
        for node in ast.walk(module) if path in _SENDING else ():
            values: list[ast.expr] = []
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(ast.unparse(target).lower().endswith("tags") for target in targets) and node.value:
                    values = [node.value]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in ("discard", "wake_up"):
                    values = node.args
            elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("tags"):
                values = [node.left]
            for value in values:
                for leaf in ast.walk(value):
                    if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str):
                        yield Tag(leaf.value, f"{path}:{leaf.lineno}")


def _tags(tree: Tree, node: ast.expr | None, within: Function | None, where: str) -> Iterator[Tag]:
    """The tags that an expression may name, through variables and the callers of the function it is in."""
    if isinstance(node, ast.Name) and within is not None:
        parameters = [*within.args.posonlyargs, *within.args.args, *within.args.kwonlyargs]
        names = [parameter.arg for parameter in parameters]
        if node.id in names:
            yield from _from_callers(tree, within, names.index(node.id), node.id)
            return
    for text in _texts(node, within):
        yield Tag(text, where)


def _from_callers(tree: Tree, function: Function, place: int, name: str) -> Iterator[Tag]:
    found_one = False
    is_method = [parameter.arg for parameter in function.args.args][:1] in (["self"], ["cls"])
    for path, module in tree.mentioning(function.name):
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == function.name:
                found_one = True
                argument = _argument(node, name, place - is_method)
                for text in _texts(argument, None):
                    yield Tag(text, f"{path}:{node.lineno}")
    if not found_one:
        yield Tag(None, f"the callers of {function.name}")


def _argument(call: ast.Call, name: str, place: int) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[place] if place < len(call.args) else None


def _texts(node: ast.expr | None, within: Function | None) -> Iterator[str | None]:
    """The texts that an expression may be made of; `None` for what cannot be told."""
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        for element in node.elts:
            yield from _texts(element, within)
    elif isinstance(node, ast.Starred):
        yield from _texts(node.value, within)
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body, within)
        yield from _texts(node.orelse, within)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _texts(node.left, within)
        yield from _texts(node.right, within)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("tuple", "list", "set", "frozenset"):
        for argument in node.args:
            yield from _texts(argument, within)
    elif isinstance(node, ast.Name) and within is not None and (values := _assigned(within, node.id)):
        for value in values:
            # What a variable is made of again, as in `tags = ("weights", *tags)`, adds nothing.
            others = [leaf for leaf in ast.walk(value) if isinstance(leaf, ast.Name) and leaf.id == node.id]
            yield from _texts(value, within) if not others else _without(value, node.id, within)
    else:
        yield None


def _without(node: ast.expr, name: str, within: Function) -> Iterator[str | None]:
    if isinstance(node, ast.Tuple):
        for element in node.elts:
            if ast.unparse(element).lstrip("*") != name:
                yield from _texts(element, within)
    else:
        yield None


def _assigned(function: Function, name: str) -> list[ast.expr]:
    values = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == name for target in node.targets):
            values.append(node.value)
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value:
            values.append(node.value)
    return values


def _value(node: ast.AST) -> ast.expr | None:
    return node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
