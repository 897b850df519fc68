"""SGLang's Python sources: `versions` chooses the versions.

`POORWILL_SGLANG_SOURCES` names a folder with one folder for each version, called by it. `cargo xtask` makes
it and sets the variable.
"""

import os
from pathlib import Path

import pytest

VARIABLE = "POORWILL_SGLANG_SOURCES"


def sources_of(version: str) -> Path:
    """A version's folder; skips the test if there is none."""
    named = os.environ.get(VARIABLE)
    folder = Path(named or "", version)
    if not named or not (folder / "sglang/version.py").is_file():
        pytest.skip(f"{VARIABLE} names no folder with SGLang {version}; `cargo xtask vllm` fetches it")
    return folder
