"""vLLM's Python sources: `tree` finds what is defined in them, and `tags` collects the names that memory has.

`POORWILL_VLLM_SOURCES` names a folder with one folder for each version, called by it. `cargo xtask` makes it
and sets the variable.
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
    reason=f"{VARIABLE} names no folder with vLLM's sources; `cargo xtask vllm` fetches them",
)
