"""Runs `pools_suite.py` over the stand-ins for PyTorch and NVIDIA's driver, and on a GPU if there is one."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SUITE = HERE / "pools_suite.py"

# Longer than it takes on the slowest machine: whatever runs into it is stuck, and says where.
STUCK_S = 900


def run_suite(*options: str, **environment: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(SUITE)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment},
        timeout=STUCK_S,
        check=False,
    )
    # Where PyTorch finds no GPU, nothing is collected.
    assert ended.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED), f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.mark.parametrize("watch", ["operations", "segments"])
def test_pools_keep_their_promises_over_the_stand_ins(tmp_path: Path, watch: str) -> None:
    library = os.environ.get("POORWILL_FAKE_LIBCUDA")
    if library is None or not Path(library).is_file():
        pytest.skip("POORWILL_FAKE_LIBCUDA names no library; `cargo xtask python` builds one")
    (tmp_path / "libcuda.so.1").symlink_to(Path(library).resolve())
    said = run_suite(
        *("-p", "pools_on_the_stand_in", "-o", f"faulthandler_timeout={STUCK_S // 3}"),
        LD_LIBRARY_PATH=str(tmp_path),
        PYTHONPATH=str(HERE),
        POORWILL_FAKE_CUDA_DEVICES="16GiB,16GiB",
        POORWILL_TEST_WATCH=watch,
    )
    assert " passed" in said


@pytest.mark.parametrize("watch", ["operations", "segments"])
def test_pools_keep_their_promises_on_a_gpu(watch: str) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("there is no PyTorch here")
    said = run_suite(POORWILL_TEST_WATCH=watch)
    if " passed" not in said:
        pytest.skip("PyTorch finds no GPU")
