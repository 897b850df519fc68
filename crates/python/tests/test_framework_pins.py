"""The engines that trainers pin are engines that were tested, and docs/rl.md names them.

Reads the metadata of the frameworks' newest wheels, from the package index. So a test here may begin to fail
though nothing changed in the project: then a framework pins another engine, which is to be tested or refused.
"""

import email
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from poorwill._torch_version import OLDEST_NAME
from poorwill.sglang import _versions as sglang
from poorwill.vllm import _versions
from vllm_sources.versions import PINNED

pytestmark = pytest.mark.long

PAGE = Path(__file__).resolve().parents[3] / "docs/rl.md"
ENGINES = {"vllm": _versions.TESTED, "sglang": sglang.TESTED}
FRAMEWORKS = ("verl", "trl", "openrlhf")
REFUSED = "areal"
"""Pins a PyTorch that is too old for us."""

_FETCH = ("-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet", "--no-cache-dir")
_NEWEST = ("--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp")
_PLATFORMS = ("--platform=manylinux1_x86_64", "--platform=manylinux2014_x86_64")
_SOON = ("--timeout=30", "--retries=2")


def newest(framework: str, folder: Path) -> tuple[str, list[Requirement]]:
    """Version of the newest wheel, and what it requires.

    Where no index can be reached the test is skipped, and fails in CI, as all that xtask fetches.
    """
    command = [sys.executable, *_FETCH, *_NEWEST, *_PLATFORMS, *_SOON, "--dest", str(folder), framework]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        why = done.stderr[-400:]
        said = f"{framework}'s pins were not compared: no package index could be reached: {why}"
        if os.environ.get("CI"):
            pytest.fail(said)
        pytest.skip(said)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        metadata = email.message_from_bytes(archive.read(name))
    return metadata["Version"], [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


def newest_allowed(required: list[Requirement], engine: str) -> set[str]:
    """The newest versions of an engine that requirements allow, where they say so."""
    return {
        bound.version
        for requirement in required
        if requirement.name.lower() == engine
        for bound in requirement.specifier
        if bound.operator in ("==", "<=")
    }


def rows() -> Iterator[tuple[str, str]]:
    """Framework with its version, and its pins, as the page's table has them."""
    for line in PAGE.read_text().splitlines():
        if cells := re.match(r"\| ([A-Za-z-]+ [\d.]+) \|([^|]*)\|", line):
            yield cells[1].lower(), cells[2]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_pinned_engine_was_tested_and_is_named(framework: str, tmp_path: Path) -> None:
    version, required = newest(framework, tmp_path)
    pins = {engine: newest_allowed(required, engine) for engine in ENGINES}
    assert pins["vllm"], f"{framework} {version} pins no vLLM any more: change this test and docs/rl.md"
    for engine, allowed in pins.items():
        untested = allowed.difference(ENGINES[engine])
        assert not untested, f"{framework} {version} pins {engine} {untested}, which was not tested"
    unplayed = pins["vllm"].difference(PINNED)
    assert not unplayed, f"{framework} {version} pins vLLM {unplayed}: add it to PINNED"
    named = dict(rows()).get(f"{framework} {version}")
    assert named is not None, f"docs/rl.md has no row for {framework} {version}"
    missing = {pin for allowed in pins.values() for pin in allowed if pin not in named}
    assert not missing, f"docs/rl.md does not name {missing} for {framework} {version}"


def test_a_framework_that_is_refused_still_pins_an_older_pytorch(tmp_path: Path) -> None:
    version, required = newest(REFUSED, tmp_path)
    linux = {"sys_platform": "linux", "platform_machine": "x86_64", "extra": ""}
    bounds = [
        requirement.specifier
        for requirement in required
        if requirement.name == "torch" and (requirement.marker is None or requirement.marker.evaluate(linux))
    ]
    assert bounds, f"{REFUSED} {version} needs no PyTorch any more"
    assert not any(bound.contains(f"{OLDEST_NAME}.0") for bound in bounds), f"{REFUSED} {version}: {bounds}"
    assert f"{REFUSED} {version}" in dict(rows()), f"docs/rl.md has no row for {REFUSED} {version}"
