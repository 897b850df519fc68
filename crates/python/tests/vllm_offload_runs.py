"""Runs suites over vLLM's code, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

SUITES = ("vllm_offload_suite.py", "vllm_offload_prefetch_suite.py")

# Longer than it takes on the slowest machine: whatever runs into it is stuck, and says where.
STUCK_S = 900


def run_suite(suite: str, *options: str, **environment: str) -> str:
    """What pytest says. `options` go before those that all runs have."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    ended = subprocess.run(
        [*command, "-o", f"faulthandler_timeout={STUCK_S // 3}", str(HERE / suite)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONPATH": path, **environment},
        timeout=STUCK_S,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout
