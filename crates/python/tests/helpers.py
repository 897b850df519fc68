"""What tests of arenas have in common."""

import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import poorwill
import pytest

MIB = 1 << 20

DEVICE = "host:256MiB"

# Longer than it takes on the slowest machine: whatever runs into it is stuck, and says where.
STUCK_S = 1800

# How many of its usual cases a random test runs: `POORWILL_EFFORT` says.
EFFORTS = {"quick": 0.1, "usual": 1, "long": 20}
# What would have a device here be another one.
SETTINGS_OF_CUDA = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_MEMORY_LIMIT_0"}


def cases(usual: int, least: int = 1) -> range:
    """The numbers of the cases to run, of so many that a usual run has."""
    effort = os.environ.get("POORWILL_EFFORT", "usual")
    if effort not in EFFORTS:
        raise ValueError(f"POORWILL_EFFORT is `{effort}`; it can be quick, usual or long")
    return range(max(least, round(usual * EFFORTS[effort])))


def together(*works: Callable[[], object]) -> None:
    """Runs each in a thread, all at once, and raises what one of them has raised."""
    with ThreadPoolExecutor(len(works)) as threads:
        for running in [threads.submit(work) for work in works]:
            running.result()


def eventually(is_so: Callable[[], bool]) -> None:
    """Waits for what happens in the background."""
    deadline_s = time.monotonic() + STUCK_S
    while not is_so():
        assert time.monotonic() < deadline_s, "it does not happen"
        time.sleep(0.001)


def assert_restored(report: Any) -> None:
    """Pickle restores a report: to other processes, as actors of Ray's return them."""
    restored = pickle.loads(pickle.dumps(report))
    assert type(restored) is type(report)
    assert (repr(restored), restored.as_dict()) == (repr(report), report.as_dict())
    for name in vars(type(report)):
        if not name.startswith("_") and name != "as_dict":
            values = [getattr(each, name) for each in (report, restored)]
            assert repr(values[0]) == repr(values[1]), name


def filled(arena: poorwill.Arena, tag: str, size_bytes: int = 4 * MIB) -> Any:
    """An array of the arena's memory, with a pattern in it."""
    array = np.from_dlpack(arena.empty(size_bytes, tag=tag))
    array[:] = np.random.default_rng(size_bytes).integers(0, 256, size_bytes, dtype=np.uint8)
    return array


# For scripts: whether nothing is held of what a device may hold of the host's memory.
IS_NOTHING_HELD = """
import gc
from poorwill.offload import HostBuffer

def is_nothing_held(limit, device):
    gc.collect()
    try:
        HostBuffer(limit, device=device, pin=False).free()
    except poorwill.OutOfMemoryError:
        return False
    return True
"""


class Script(NamedTuple):
    """One of several in a text."""

    settings: dict[str, str]
    text: str


def scripts(text: str) -> list[Any]:
    """Parameters of a test, of a text in which each script has a line above it: `### title (NAME=value)`."""
    parts = re.split(r"^### ([^(\n]*?)(?: \((\w+)=(.*)\))?\n", text, flags=re.MULTILINE)[1:]
    return [
        pytest.param(Script({name: value} if name else {}, script), id=title)
        for title, name, value, script in zip(*(parts[at::4] for at in range(4)), strict=True)
    ]


def nvml_beside(fake: dict[str, str]) -> dict[str, str]:
    """Variables with which a fake of NVML lists the processes of an environment over the fake libcuda."""
    folder = Path(fake["LD_LIBRARY_PATH"])
    cuda = (folder / "libcuda.so.1").resolve()
    (folder / "libnvidia-ml.so.1").symlink_to(cuda.with_name("libpoorwill_fake_nvml.so"))
    processes = folder / "processes"
    processes.mkdir()
    gpus = (f"GPU-706f6f72-7769-6c6c-4000-80000000000{gpu}:total=1GiB" for gpu in range(2))
    return {
        "POORWILL_FAKE_CUDA_PROCESSES": str(processes),
        "POORWILL_FAKE_NVML_DEVICES": ",".join(gpus),
    }


def run(script: str, *options: str, **variables: str) -> str:
    """What a script prints in a process of its own, which must end well and say nothing else."""
    inherited = {name: value for name, value in os.environ.items() if name not in SETTINGS_OF_CUDA}
    # From 3.12 on Python warns of every fork of a process with threads, as some scripts make it.
    command = [sys.executable, "-B", "-W", "ignore::DeprecationWarning", *options, "-c"]
    ran = subprocess.run(
        [*command, f"import poorwill\nfrom poorwill import _native\n{script}"],
        env={**inherited, "PYTHONFAULTHANDLER": "1", **variables},
        capture_output=True,
        text=True,
        timeout=STUCK_S,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr
    return ran.stdout
