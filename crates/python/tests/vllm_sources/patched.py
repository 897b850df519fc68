"""vLLM's sources with the patches of `contrib/upstream/vllm`.

A version's folder in which only what they change is a copy, and all else a link.
"""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[4] / "contrib/upstream/vllm"
VERSION = "0.33.0"
"""The version that they are for."""


def patches() -> list[Path]:
    """All of them, in their order."""
    return sorted(PATCHES.glob("*.patch"))


def changed(patch: Path) -> list[str]:
    """The files that a patch changes, by their path from the root. One that it adds is not among them."""
    lines = patch.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("--- a/") for line in lines if line.startswith("--- a/")]


def sizes(patch: Path) -> tuple[int, int]:
    """How many lines a patch adds, and how many it removes."""
    lines = patch.read_text(encoding="utf-8").splitlines()
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++ ")]
    removed = [line for line in lines if line.startswith("-") and not line.startswith("--- ")]
    return len(added), len(removed)


def apply(source: Path, target: Path, which: Sequence[Path]) -> Path:
    """Makes `target` the source's folder, patched. Raises CalledProcessError if one does not fit."""
    target.mkdir(parents=True)
    _overlay(source, target, {Path(name) for patch in which for name in changed(patch)})
    for patch in which:
        command = ["git", "apply", "--whitespace=error", str(patch)]
        subprocess.run(command, cwd=target, check=True, capture_output=True, text=True)
    return target


def _overlay(source: Path, target: Path, copied: set[Path]) -> None:
    above = {parent for path in copied for parent in path.parents}
    for each in sorted(source.iterdir()):
        below = {path.relative_to(each.name) for path in copied if path.parts[0] == each.name}
        if Path(each.name) in copied:
            shutil.copyfile(each, target / each.name)
        elif Path(each.name) in above:
            (target / each.name).mkdir()
            _overlay(each, target / each.name, below)
        else:
            (target / each.name).symlink_to(each)
