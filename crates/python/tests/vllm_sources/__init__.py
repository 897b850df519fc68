"""vLLM's Python sources: `tree` finds definitions, `tags` collects the tags of memory, and `versions` chooses
the versions.

`POORWILL_VLLM_SOURCES` names a folder with one folder for each version, called by it. `cargo xtask` makes it
and sets the variable.
"""

import os
from pathlib import Path

import pytest

VARIABLE = "POORWILL_VLLM_SOURCES"


def sources() -> Path | None:
    """The folder of versions; `None` if the environment names none."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


_NO_FOLDER = f"{VARIABLE} names no folder with vLLM's sources; `cargo xtask vllm` fetches them"

needs_sources = pytest.mark.skipif(sources() is None, reason=_NO_FOLDER)


def sources_of(version: str) -> Path:
    """A version's folder; skips the test if there is none."""
    folder = sources()
    if folder is None:
        pytest.skip(_NO_FOLDER)
    if not (folder / version / "vllm/__init__.py").is_file():
        pytest.skip(f"there is no vLLM {version} in {folder}; `cargo xtask vllm` fetches it")
    return folder / version
