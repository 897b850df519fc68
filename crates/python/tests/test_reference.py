"""The reference pages are what the code says, and the stubs say what the native module says.

With `POORWILL_BLESS=1` the pages are written anew.
"""

import ast
import inspect
import itertools
import os
from pathlib import Path
from typing import Any

import poorwill
import pytest
from poorwill import _native, offload
from reference import PACKAGE, SWITCHES, python_page, settings, settings_page, variables_read

PAGES = Path(__file__).parents[3] / "docs" / "reference"


@pytest.mark.parametrize("name", ["python.md", "vllm-settings.md"])
def test_the_page_is_what_the_code_says(name: str) -> None:
    page, made = PAGES / name, python_page if name == "python.md" else settings_page
    if os.environ.get("POORWILL_BLESS") == "1":
        PAGES.mkdir(exist_ok=True)
        page.write_text(made())
    assert page.read_text() == made(), f"write {name} anew: POORWILL_BLESS=1"


def test_every_variable_that_the_package_names_is_on_the_page() -> None:
    known = {setting.variable for setting in settings()} | set(SWITCHES)
    assert variables_read() <= known, "add it to SWITCHES in reference.py"
    assert all(setting.meaning for setting in settings())


def documented() -> list[tuple[str, Any, str]]:
    """Path, object and docstring of each public name that the stub documents."""
    found = []
    for node in ast.parse((PACKAGE / "_native.pyi").read_text()).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        owner = getattr(_native, node.name)
        if owner not in (getattr(poorwill, node.name, None), getattr(offload, node.name, None)):
            continue
        nodes: list[tuple[str, Any, ast.FunctionDef | ast.ClassDef]] = [(node.name, owner, node)]
        if isinstance(node, ast.ClassDef):
            members = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            nodes += [(f"{node.name}.{each.name}", getattr(owner, each.name), each) for each in members]
        found += [(path, each, text) for path, each, of in nodes if (text := described(of))]
    return found


def described(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Its docstring, which names the attributes of an exception with theirs: plain values have none."""
    described = [ast.get_docstring(node) or ""]
    for attribute, text in itertools.pairwise(node.body):
        match attribute, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(about))):
                described.append(f"- `{name}`: {about}")
    return " ".join(described)


def test_docstrings_are_those_of_the_stub() -> None:
    differing = {
        path: inspect.getdoc(each)
        for path, each, text in documented()
        if " ".join((inspect.getdoc(each) or "").split()) != " ".join(text.split())
    }
    assert not differing
