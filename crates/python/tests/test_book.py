"""The Python of the README and the book: it compiles, and what it imports of the package is there."""

import ast
import importlib
import re
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[3]
RECORDS = {"adr", "benchmarks"}
FENCED = re.compile(r"^[ ]*```python[^\n]*\n(.*?)^[ ]*```", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    below = [page for page in (ROOT / "docs").rglob("*.md") if not RECORDS & set(page.parts)]
    return [ROOT / "README.md", ROOT / "crates/python/README.md", *sorted(below)]


def snippets() -> list[tuple[str, str]]:
    found = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for match in FENCED.finditer(text):
            line = text.count("\n", 0, match.start(1)) + 1
            found.append((f"{page.relative_to(ROOT)}:{line}", match.group(1)))
    return found


@pytest.mark.parametrize(("place", "code"), snippets(), ids=lambda value: value if ":" in value[:80] else "")
def test_snippets_compile_and_import_what_is_there(place: str, code: str) -> None:
    tree = ast.parse(code, place)
    compile(tree, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "poorwill":
            assert node.module is not None
            if needs_others(node.module):
                continue
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{place}: {node.module} has no {alias.name}"
        if is_attribute_of_ours(node):
            module = importlib.import_module("poorwill")
            assert hasattr(module, node.attr), f"{place}: poorwill has no {node.attr}"


def is_attribute_of_ours(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "poorwill"
    )


def needs_others(module: str) -> bool:
    """Whether importing it needs PyTorch or vLLM, which are not here in every run."""
    return module.startswith(("poorwill.torch", "poorwill.vllm"))


def test_there_are_snippets() -> None:
    assert len(snippets()) > 5
