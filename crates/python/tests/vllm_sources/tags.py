"""The names that vLLM gives to memory: where it takes it, puts it to sleep, wakes it, and drops it."""

import ast
import contextlib
from collections.abc import Iterator

from vllm_sources.tree import MissingError, Tree

ALLOCATING = ("CuMemAllocator", "get_mem_allocator_instance")

# Those of a sleep and a wake come through every process; these know what may be in them.
_SENDING = ("vllm.v1.executor.abstract", "vllm.v1.engine.core", "vllm.device_allocator")
_POOLS = ("use_memory_pool", "_maybe_get_memory_pool_context")


def collect(tree: Tree) -> Iterator[tuple[str | None, str]]:
    """Each tag with its pool; None where the source does not show the pool's purpose."""
    modules = dict(tree.mentioning(*ALLOCATING))
    for name in _SENDING:
        with contextlib.suppress(MissingError):
            modules[tree.path(name).relative_to(tree.root).as_posix()] = tree.parsed(name)
    for path, module in modules.items():
        for node in ast.walk(module):
            for value in _values(node):
                leaves = [leaf.value for leaf in ast.walk(value) if isinstance(leaf, ast.Constant)]
                texts = [leaf for leaf in leaves if isinstance(leaf, str)]
                is_reported = (
                    texts or isinstance(value, ast.Name | ast.Constant) or not isinstance(node, ast.Call)
                )
                for text in texts if is_reported else [None]:
                    yield text, f"{path}:{value.lineno}"


def _values(node: ast.AST) -> list[ast.expr]:
    """The expressions in it that stand for tags."""
    if isinstance(node, ast.Call):
        named = [keyword.value for keyword in node.keywords if _is_tags(keyword.arg or "")]
        is_pool = ast.unparse(node.func).rpartition(".")[2] in _POOLS
        return [*named, *(node.args if is_pool else [])]
    if isinstance(node, ast.Compare):
        return [node.left] if _is_tags(ast.unparse(node.comparators[0])) else []
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [node.value] if any(_is_tags(ast.unparse(target)) for target in targets) else []
    return []


def _is_tags(name: str) -> bool:
    return name.lower().endswith(("tag", "tags"))
