"""What tests of arenas have in common."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import poorwill

MIB = 1 << 20

DEVICE = "host:256MiB"


def filled(arena: poorwill.Arena, tag: str, size_bytes: int = 4 * MIB) -> Any:
    """An array of the arena's memory, with a pattern in it."""
    array = np.from_dlpack(arena.empty(size_bytes, tag=tag))
    array[:] = np.random.default_rng(size_bytes).integers(0, 256, size_bytes, dtype=np.uint8)
    return array


def run(script: str, **variables: str) -> str:
    """What a script prints in a process of its own, which must end well and say nothing else."""
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    ran = subprocess.run(
        # From 3.12 on Python warns of every fork of a process with threads, as some scripts make it.
        [sys.executable, "-B", "-W", "ignore::DeprecationWarning", "-c", f"import poorwill\n{script}"],
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout
