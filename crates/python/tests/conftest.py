"""Fixtures of tests of arenas."""

import os
from collections.abc import Iterator
from pathlib import Path

import poorwill
import pytest
from helpers import DEVICE


@pytest.fixture
def arena() -> Iterator[poorwill.Arena]:
    opened = poorwill.arena(DEVICE, "tested", limit="64MiB")
    yield opened
    opened.close()


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """The environment in which the driver's library is the stand-in."""
    library = os.environ.get("POORWILL_FAKE_LIBCUDA")
    if library is None or not Path(library).is_file():
        pytest.skip("POORWILL_FAKE_LIBCUDA names no library; `cargo xtask python` builds one")
    (tmp_path / "libcuda.so.1").symlink_to(Path(library).resolve())
    return {"LD_LIBRARY_PATH": str(tmp_path), "POORWILL_FAKE_CUDA_DEVICES": "1GiB,1GiB"}
