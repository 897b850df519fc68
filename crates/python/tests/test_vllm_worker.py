"""Runs `vllm_worker_suite.py` over the stand-ins for vLLM's workers, PyTorch and NVIDIA's driver."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SUITE = HERE / "vllm_worker_suite.py"

# Longer than it takes on the slowest machine: whatever runs into it is stuck, and says where.
STUCK_S = 900

# A whole card, a second one, and one of which a limiter in front of the driver leaves a part.
DEVICES = {
    "whole": {"POORWILL_FAKE_CUDA_DEVICES": "1GiB,1GiB"},
    "slice": {"POORWILL_FAKE_CUDA_DEVICES": "1GiB,1GiB", "POORWILL_FAKE_CUDA_PLAY": "0:hami=512MiB"},
}


@pytest.mark.parametrize("card", DEVICES)
def test_engines_sleep_over_the_stand_ins(tmp_path: Path, card: str) -> None:
    library = os.environ.get("POORWILL_FAKE_LIBCUDA")
    if library is None or not Path(library).is_file():
        pytest.skip("POORWILL_FAKE_LIBCUDA names no library; `cargo xtask python` builds one")
    (tmp_path / "libcuda.so.1").symlink_to(Path(library).resolve())
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("POORWILL_", "VLLM_")) or name == "POORWILL_FAKE_LIBCUDA"
    }
    environment = {
        **inherited,
        "LD_LIBRARY_PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "PYTHONFAULTHANDLER": "1",
        **DEVICES[card],
    }
    options = ["-q", "-p", "no:cacheprovider", "-p", "pools_on_the_stand_in", "-m", card]
    options += ["-o", f"faulthandler_timeout={STUCK_S // 3}", "-o", "markers=whole\nslice"]
    ended = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", *options, str(SUITE)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=STUCK_S,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert " passed" in ended.stdout
