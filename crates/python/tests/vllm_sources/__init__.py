"""vLLM's Python sources, read and not run: its modules cannot be imported without PyTorch and a GPU.

`POORWILL_VLLM_SOURCES` names a folder with one folder for each version, called by it, with what a wheel holds
of Python. `cargo xtask vllm` makes it and sets the variable. `tree` finds what is defined, `calls` who uses
vLLM's allocator and how, `likeness` whether one definition can stand in another's place.
"""

import os
from pathlib import Path

import pytest

VARIABLE = "POORWILL_VLLM_SOURCES"


def sources() -> Path | None:
    """The folder of versions; `None` where nobody has named one."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


needs_sources = pytest.mark.skipif(
    sources() is None,
    reason=f"{VARIABLE} names no folder with vLLM's sources; `cargo xtask vllm` fetches them and runs this",
)
