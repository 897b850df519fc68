"""What installing and importing the package promises."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import poorwill
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
    for name in ("Repository", "Documentation", "Changelog") if addresses else ():
        assert re.search(rf'^{name} = "{re.escape(addresses[0])}', project, re.MULTILINE), name


def test_imports_without_torch_and_without_a_gpu() -> None:
    # `None` in `sys.modules` makes an import fail; a library by this name does not exist.
    script = (
        "import sys; sys.modules.update(torch=None, triton=None, numpy=None); "
        "import poorwill; poorwill.arena('host').empty(1); print(poorwill.parse_bytes('2m'))"
    )
    without = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "POORWILL_FAKE_LIBCUDA": "/nonexistent"}
    ran = subprocess.run([sys.executable, "-B", "-c", script], env=without, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{2 << 20}\n", "")


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
