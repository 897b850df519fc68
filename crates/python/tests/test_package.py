"""What installing and importing the package promises."""

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import poorwill
import pytest
from poorwill import _native, offload

WORKSPACE = Path(__file__).parents[3]


def test_version_is_that_of_the_crates() -> None:
    manifest = (WORKSPACE / "Cargo.toml").read_text()
    [version] = re.findall(r'^version = "(.*)"$', manifest, re.MULTILINE)
    assert poorwill.__version__ == version
    assert importlib.metadata.version("poorwill") == version


def test_the_metadata_is_complete_and_that_of_the_crates() -> None:
    workspace = (WORKSPACE / "Cargo.toml").read_text()
    project = (WORKSPACE / "crates/python/pyproject.toml").read_text()
    for field in ("description", "readme", "license", "authors", "keywords", "classifiers"):
        assert re.search(rf"^{field} = ", project, re.MULTILINE), field
    [license_] = re.findall(r"^license = .*$", workspace, re.MULTILINE)
    assert f"\n{license_}\n" in project
    for keywords in re.findall(r"^keywords = .*$", workspace, re.MULTILINE):
        assert f"\n{keywords}\n" in project
    for author in re.findall(r'^authors = \["(.*)"\]$', workspace, re.MULTILINE):
        assert f'\nauthors = [{{ name = "{author}" }}]\n' in project
    # Until the project is public there is no address to give.
    addresses = re.findall(r'^repository = "(.*)"$', workspace, re.MULTILINE)
    for address in addresses:
        # The book may be elsewhere.
        for name, begin in ("Repository", address), ("Changelog", address), ("Documentation", "https://"):
            assert re.search(rf'^{name} = "{re.escape(begin)}', project, re.MULTILINE), name


def test_imports_without_torch_and_without_a_gpu() -> None:
    # `None` in `sys.modules` makes an import fail; a library by this name does not exist.
    script = (
        "import sys; sys.modules.update(torch=None, triton=None, numpy=None); "
        "import poorwill; poorwill.arena('host').empty(1); print(poorwill.parse_bytes('2m'))"
    )
    without = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "POORWILL_FAKE_LIBCUDA": "/nonexistent"}
    ran = subprocess.run([sys.executable, "-B", "-c", script], env=without, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{2 << 20}\n", "")


# Slow to import, and each process of each vLLM beside us would pay for it.
SLOW = {"ast", "asyncio", "dataclasses", "importlib.abc", "importlib.metadata", "inspect", "json", "logging"}
SLOW |= {"pathlib", "pickle", "re", "tempfile", "typing", "unittest"}


def imported_by(script: str) -> set[str]:
    """The modules that a script imports in a fresh interpreter, beyond those of Python's start."""
    reported = (
        f"import sys; there = set(sys.modules)\n{script}\nprint(*sorted(set(sys.modules) - there), sep='\\n')"
    )
    chosen = {name: value for name, value in os.environ.items() if not name.startswith("POORWILL_")}
    command = [sys.executable, "-B", "-c", reported]
    ran = subprocess.run(command, env=chosen, capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] == "poorwill"}


def test_importing_it_imports_nothing_else() -> None:
    modules = imported_by("import poorwill")
    assert ours(modules) == {"poorwill"}
    assert not modules & SLOW


def test_vllms_entry_point_imports_only_its_hooks() -> None:
    """They import the rest of us when vLLM imports their modules."""
    modules = imported_by("import poorwill.vllm; poorwill.vllm.register(); poorwill.vllm.register()")
    assert ours(modules) == {"poorwill", *(f"poorwill.vllm{name}" for name in ("", "._hooks", "._imports"))}
    assert not modules & SLOW


def test_names_are_imported_on_their_first_use() -> None:
    uses = {
        "poorwill.parse_bytes": {"poorwill", "poorwill._native"},
        "poorwill.triton": {"poorwill", "poorwill._native", "poorwill.triton"},
        "poorwill.record": {"poorwill", "poorwill._native", "poorwill._record"},
    }
    for use, modules in uses.items():
        assert ours(imported_by(f"import poorwill; {use}")) == modules, use
    everything = imported_by("from poorwill import *")
    assert ours(everything) == set().union(*uses.values())


def test_what_is_imported_on_use_looks_as_if_it_were_there() -> None:
    assert poorwill.triton is importlib.import_module("poorwill.triton")
    assert set(poorwill.__all__) <= set(dir(poorwill))
    assert poorwill.arena is _native.arena
    with pytest.raises(AttributeError, match="module 'poorwill' has no attribute 'arenas'"):
        poorwill.arenas  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'arenas'"):
        exec("from poorwill import arenas")


def test_works_in_a_forked_child() -> None:
    # In a process of its own, so that no thread of the test runner is there when it forks.
    script = """
import os, sys
if "early" in sys.argv: import poorwill
child = os.fork()
import poorwill
assert poorwill.parse_bytes("1k") == 1024
if child == 0: os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    for when in ["early", "late"]:
        ran = subprocess.run([sys.executable, "-B", "-c", script, when], capture_output=True, text=True)
        assert (ran.returncode, ran.stderr) == (7, ""), when


def test_one_build_serves_every_python() -> None:
    assert Path(_native.__file__).name == "_native.abi3.so"
    wheel = importlib.metadata.distribution("poorwill").read_text("WHEEL")
    assert wheel is not None
    [tag] = re.findall(r"^Tag: (.*)$", wheel, re.MULTILINE)
    assert tag.startswith("cp310-abi3-"), tag


def test_all_that_is_public_is_there_and_documented() -> None:
    for module in (poorwill, offload):
        assert all(getattr(module, name).__doc__ for name in module.__all__)


def test_errors_can_be_caught_by_one_name() -> None:
    assert issubclass(poorwill.PoorwillError, Exception)
    assert (
        f"{poorwill.PoorwillError.__module__}.{poorwill.PoorwillError.__name__}" == "poorwill.PoorwillError"
    )
