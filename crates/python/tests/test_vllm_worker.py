"""Runs the suites of our worker in vLLM's own code, over the stand-ins for PyTorch and NVIDIA's driver."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from poorwill.vllm._versions import TESTED
from vllm_sources import VARIABLE, needs_sources

HERE = Path(__file__).resolve().parent
SUITES = [HERE / f"vllm_{name}_suite.py" for name in ("worker", "ends", "beside", "allocator", "budget")]

# Longer than it takes on the slowest machine: whatever runs into it is stuck, and says where.
STUCK_S = 900


@needs_sources
@pytest.mark.parametrize("version", TESTED)
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: str(suite.stem))
def test_engines_keep_their_promises_over_the_stand_ins(tmp_path: Path, suite: Path, version: str) -> None:
    library = os.environ.get("POORWILL_FAKE_LIBCUDA")
    if library is None or not Path(library).is_file():
        pytest.skip("POORWILL_FAKE_LIBCUDA names no library; `cargo xtask python` builds one")
    (tmp_path / "libcuda.so.1").symlink_to(Path(library).resolve())
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("POORWILL_", "VLLM_", "CUDA_")) or name in ("POORWILL_FAKE_LIBCUDA", VARIABLE)
    }
    environment = {
        **inherited,
        "LD_LIBRARY_PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "PYTHONFAULTHANDLER": "1",
        "POORWILL_FAKE_CUDA_DEVICES": "1GiB,1GiB",
    }
    # A process can have only so many arenas with tags.
    options = ["-q", "-p", "no:cacheprovider", "-p", "pools_on_the_stand_in", "-p", "vllm_engines"]
    options += ["-k", version]
    options += ["-o", f"faulthandler_timeout={STUCK_S // 3}"]
    ended = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", *options, str(suite)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=STUCK_S,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert " passed" in ended.stdout
