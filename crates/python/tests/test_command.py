"""`python -m poorwill`: which program it becomes, in the same process."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import poorwill
import pytest

MAIN = Path(poorwill.__file__).parent / "__main__.py"
PLAYED = """#!/bin/sh
echo "$$ $*"
exit 7
"""


def run(folder: Path, *words: str) -> tuple[int, int, str, str]:
    """The process's number, its exit code and what it writes."""
    command = [sys.executable, "-B", "-m", "poorwill", *words]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        out, err = process.communicate()
    return process.pid, process.returncode, out, err


def place(packages: Path) -> None:
    (packages / "poorwill").mkdir(parents=True)
    (packages / "poorwill/__init__.py").touch()
    shutil.copy(MAIN, packages / "poorwill/__main__.py")


def put(program: Path) -> None:
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(PLAYED)
    program.chmod(0o755)


@pytest.mark.parametrize("packages", [".", "lib/python3.13/site-packages"], ids=["a target", "a prefix"])
def test_it_becomes_the_program_that_was_installed_with_it(packages: str, tmp_path: Path) -> None:
    place(tmp_path / packages)
    put(tmp_path / "bin/poorwill")
    pid, code, out, err = run(tmp_path / packages, "replay", "a b")
    # Its process, so that signals and the exit code are the program's.
    assert (code, out, err) == (7, f"{pid} replay a b\n", "")


def test_a_missing_program_is_named_with_what_installs_it(tmp_path: Path) -> None:
    place(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/poorwill").write_text("not executable")
    script = (
        "import runpy, sysconfig; sysconfig.get_path = lambda name: '/nonexistent'; "
        "runpy.run_module('poorwill', run_name='__main__')"
    )
    command = [sys.executable, "-B", "-c", script]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert str(tmp_path / "bin/poorwill") in ran.stderr
    assert "/nonexistent/poorwill" in ran.stderr
    assert "pip install ./crates/python" in ran.stderr


def test_the_installed_command_is_of_this_version(tmp_path: Path) -> None:
    version = importlib.metadata.version("poorwill")
    assert run(tmp_path, "--version")[1:] == (0, f"poorwill {version}\n", "")
    _, code, out, err = run(tmp_path, "replay")
    assert (code, out) == (2, "")
    assert "poorwill replay" in err
