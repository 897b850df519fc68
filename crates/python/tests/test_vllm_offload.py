"""Weights that vLLM offloads, over the stand-ins for PyTorch and the driver, and over PyTorch on the CPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from poorwill.vllm._versions import TESTED

HERE = Path(__file__).resolve().parent

# Longer than it takes on the slowest machine: whatever runs into it is stuck, and says where.
STUCK_S = 900


def run_suite(suite: str, *options: str, **environment: str) -> str:
    command = [
        sys.executable,
        "-B",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *options,
        str(HERE / suite),
    ]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment},
        timeout=STUCK_S,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.mark.parametrize("suite", ["vllm_offload_suite.py", "vllm_offload_prefetch_suite.py"])
def test_offloaders_keep_their_promises_over_the_stand_ins(suite: str, fake: dict[str, str]) -> None:
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    said = run_suite(
        *(suite, "-p", "pools_on_the_stand_in", "-o", f"faulthandler_timeout={STUCK_S // 3}"),
        **{**fake, "PYTHONPATH": path},
    )
    assert " passed" in said


@pytest.mark.parametrize("version", TESTED)
def test_offloaders_keep_their_promises_over_pytorch(version: str) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("there is no PyTorch here")
    assert " passed" in run_suite("vllm_offload_torch_suite.py", "-k", version)
