"""What `python -m poorwill.demo` promises."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import poorwill
import pytest
from helpers import MIB, STUCK_S
from poorwill import demo


def run(*arguments: str, without_numpy: bool = False) -> subprocess.CompletedProcess[str]:
    module = [sys.executable, "-B", "-m", "poorwill.demo"]
    # `None` in `sys.modules` makes an import fail.
    script = "import runpy, sys; sys.modules['numpy'] = None; "
    script += "runpy.run_module('poorwill.demo', run_name='__main__')"
    command = [sys.executable, "-B", "-c", script] if without_numpy else module
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=STUCK_S)


def test_the_table_is_for_people() -> None:
    ran = run()
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert lines[0] == "NumPy arrays on host:192MiB"
    assert lines[2].split() == ["tag", "array", "size", "asleep", "after", "waking", "address"]
    assert [" ".join(line.split()) for line in lines[3:6]] == [
        "weights float32 16384x1024 64 MiB backed up identical the same",
        "kv_cache uint8 25165824 24 MiB dropped zeros the same",
        "runtime int64 786432 6 MiB backed up identical the same",
    ]
    assert "asleep for the first time: 94 MiB released, 70 MiB copied, 24 MiB dropped, in " in lines[7]
    assert "70 MiB copied back, 70 MiB verified by digest, 24 MiB zeroed" in lines[8]
    assert "asleep with 1 MiB changed: 94 MiB released, 2 MiB copied" in lines[9]
    assert lines[-1] == "Every byte is right."


def test_json_is_one_object() -> None:
    ran = run("--json", "--size", "64m")
    assert (ran.returncode, ran.stderr) == (0, "")
    said = json.loads(ran.stdout)
    assert list(said) == ["device", "arrays", "cycles", "ok"]
    assert (said["device"], said["ok"]) == ("host:128MiB", True)
    arrays = {array["tag"]: array for array in said["arrays"]}
    assert {tag: (array["asleep"], array["found"]) for tag, array in arrays.items()} == {
        "weights": ("backed up", "identical"),
        "kv_cache": ("dropped", "zeros"),
        "runtime": ("backed up", "identical"),
    }
    first, second = said["cycles"]
    assert (first["changed_bytes"], second["changed_bytes"]) == (0, MIB)
    assert second["sleep"]["copied_bytes"] == 2 * MIB
    assert all(cycle["sleep"]["release"] in ("confirmed", "ledger") for cycle in said["cycles"])


@pytest.mark.parametrize(
    "arguments",
    [["--size", "lots"], ["--size", "1k"], ["--size", "1EiB"], ["--fast"], ["more"], ["--size"]],
    ids=" ".join,
)
def test_wrong_usage_ends_with_two(arguments: list[str]) -> None:
    ran = run(*arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("usage: python -m poorwill.demo")


def test_without_numpy_it_says_what_to_do() -> None:
    ran = run(without_numpy=True)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("poorwill.demo: the demo needs NumPy (")
    assert ran.stderr.endswith("): pip install numpy\n")


def test_a_numpy_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", SimpleNamespace(__version__="2.1.3"))
    assert demo.main([]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("poorwill.demo: the demo needs NumPy 2.2 (NumPy 2.1.3 makes arrays ")


def test_what_cannot_be_had_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    other = poorwill.arena("host:64MiB", "other")
    assert demo.main([]) == 1
    other.close()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("poorwill.demo: cannot open the arena `demo`: host:64MiB is open")
    assert demo.main(["--json", "--size", "64MiB"]) == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_cannot_be_printed_fails_like_the_rest(unbuffered: str) -> None:
    command = [sys.executable, "-B", "-m", "poorwill.demo", "--size", "64MiB"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=STUCK_S, env=environment
        )
    assert ran.returncode == 1
    assert ran.stderr.startswith("poorwill.demo: what was found cannot be printed: ")
    assert len(ran.stderr.splitlines()) == 1


def test_a_wrong_byte_shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lent = []

    def from_dlpack(block: object) -> object:
        lent.append(np.from_dlpack(block))  # type: ignore[arg-type]
        return lent[-1]

    class Spoiling:
        """An arena that loses a byte when it wakes."""

        def __init__(self, arena: object) -> None:
            self.arena = arena

        def __getattr__(self, name: str) -> object:
            return getattr(self.arena, name)

        def wake(self, verify: str) -> object:
            woken = self.arena.wake(verify=verify)  # type: ignore[attr-defined]
            lent[2][7] += 1
            return woken

    opening = poorwill.arena
    monkeypatch.setattr(poorwill, "arena", lambda *names: Spoiling(opening(*names)))
    version = np.__version__
    numpy = SimpleNamespace(__version__=version, from_dlpack=from_dlpack, random=np.random, uint8=np.uint8)
    monkeypatch.setitem(sys.modules, "numpy", numpy)
    assert demo.main(["--size", "64MiB"]) == 1
    said = capsys.readouterr().out
    assert "wrong, not identical" in said
    assert said.endswith("Not every byte is right.\n")
