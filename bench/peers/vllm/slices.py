#!/usr/bin/env python3
"""Cut a slice of a GPU by HAMi and by MPS, and print Poorwill's budget for it, with a sleep and a wake within
it. What prevents a slice is printed in the place of that.

    slices.py --hami ~/HAMi-core --limit-gib 8      # sources of https://github.com/Project-HAMi/HAMi-core
    slices.py --only mps

HAMi's library is built here with the C compiler and preloaded. CUDA's headers (`cuda.h`, `nvml.h`) come from
a folder of `--headers`, from CUDA_HOME or from NVIDIA's Python packages. MPS gets a daemon of its own, with
folders of its own, which ends with this script; no setting of the card is touched. Needs no PyTorch and no
vLLM. Prints JSON lines; a slice that could not be cut is no failure of the run.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import (
    GIB,
    MIB,
    checked,
    conclude,
    conclude_in_a_folder,
    context,
    device_memory,
    driver,
    emit,
    every_line_says,
    gib,
)
from plans import Run
from visit import execute, tail

MECHANISMS = ["whole", "hami", "mps"]  # the first is no slice, and tells what the others differ from
BUILD_S, CHILD_S, DAEMON_S = 120, 90, 20
HAMI_SWITCHES = [
    "MULTIPROCESS_LIMIT_ENABLE",
    "DLSYM_HOOK_ENABLE",
    "HOOK_MEMINFO_ENABLE",
    "HOOK_NVML_ENABLE",
]
HAMI_LOCK = Path("/tmp/vgpulock")  # where its library looks for a lock, and nowhere else
CONTROL = "nvidia-cuda-mps-control"
DRIVERS_FOLDERS = ["/usr/local/nvidia/bin", "/usr/bin", "/usr/local/bin"]
WEIGHTS_BYTES = 512 * MIB
SPARE_BYTES = GIB  # of the headroom, what the cache leaves
SLACK_BYTES = 64 * MIB
CYCLES = 3


class PreventedError(Exception):
    """Why there is no slice."""


def header_folders(given: list[Path]) -> list[Path]:
    """Where CUDA's headers may be."""
    site = Path(sysconfig.get_paths()["purelib"])
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    return [*given, *(home / "include" for home in homes), *sorted(site.glob("nvidia/*/include"))]


def headers(folders: list[Path]) -> list[Path]:
    """The folders of them that hold what HAMi includes."""
    found = []
    for name in ["cuda.h", "nvml.h"]:
        having = [folder for folder in folders if (folder / name).is_file()]
        if not having:
            raise PreventedError(f"no {name} in {', '.join(map(str, folders))}: name its folder by --headers")
        found.append(having[0])
    return list(dict.fromkeys(found))


def build_hami(sources: Path | None, folders: list[Path], into: Path) -> Path:
    """HAMi's library, as its own build makes it."""
    if sources is None:
        raise PreventedError("no sources of HAMi-core: name their folder by --hami")
    files = sorted(file for file in (sources / "src").rglob("*.c") if file.name != "shrreg_tool.c")
    if not files:
        raise PreventedError(f"{sources} has no src/*.c: it is no checkout of HAMi-core")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise PreventedError("there is no C compiler (cc, or what CC names)")
    # In the place of what CMake makes of src/static_config.h.in.
    switches = "".join(f"#define {name}\n" for name in HAMI_SWITCHES)
    (into / "static_config.h").write_text(switches)
    library = into / "libvgpu.so"  # by this name it is known to be there
    command = [compiler, "-shared", "-fPIC", "-D_GNU_SOURCE", "-w", "-o", str(library)]
    for folder in [into, sources / "src", *headers(folders)]:
        command += ["-I", str(folder)]
    command += [*map(str, files), "-lpthread", "-ldl"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=BUILD_S)
    except subprocess.TimeoutExpired:
        raise PreventedError(f"the compiler was not done after {BUILD_S} s") from None
    if ran.returncode:
        raise PreventedError(f"HAMi-core does not compile: {ran.stderr.strip()[-1500:]}")
    return library


@contextmanager
def hami(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, str]]:
    """A slice by HAMi; what the environment of a process in it has."""
    start = time.monotonic()
    library = build_hami(options.hami, header_folders(options.headers), folder)
    emit("built", mechanism="hami", build_s=round(time.monotonic() - start, 2), bytes=library.stat().st_size)
    HAMI_LOCK.mkdir(exist_ok=True)
    yield {
        "LD_PRELOAD": str(library),
        "CUDA_REDIRECT": str(library),  # whose functions it gives in the place of the driver's
        "CUDA_DEVICE_MEMORY_LIMIT": f"{int(options.limit_gib * 1024)}m",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(folder / "cudevshr.cache"),
    }


@contextmanager
def mps(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, str]]:
    """A slice by MPS, with a daemon that ends when it is left."""
    control = shutil.which(CONTROL) or shutil.which(CONTROL, path=os.pathsep.join(DRIVERS_FOLDERS))
    if control is None:
        raise PreventedError(f"there is no {CONTROL}, on the PATH or in {', '.join(DRIVERS_FOLDERS)}")
    places = {"CUDA_MPS_PIPE_DIRECTORY": folder / "pipe", "CUDA_MPS_LOG_DIRECTORY": folder / "log"}
    for place in places.values():
        place.mkdir()
    own = {name: str(place) for name, place in places.items()}
    # The server is found beside the daemon.
    path = os.pathsep.join([str(Path(control).parent), os.environ.get("PATH", "")])
    surroundings = {**os.environ, **own, "PATH": path}

    def say(*words: str, text: str = "") -> subprocess.CompletedProcess:
        return subprocess.run(
            [control, *words],
            input=text,
            env=surroundings,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DAEMON_S,
        )

    def last_words() -> str:
        logs = sorted(places["CUDA_MPS_LOG_DIRECTORY"].glob("*"))
        return "".join(f"{log.name}: {log.read_text(errors='replace')[-1000:]}\n" for log in logs)

    try:
        begun = say("-d")
        if begun.returncode:
            said = f"{begun.stdout} {begun.stderr} {last_words()}".strip()
            raise PreventedError(f"{CONTROL} -d ends with code {begun.returncode}: {said[-1200:]}")
        yield {**own, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={int(options.limit_gib * 1024)}M"}
    except subprocess.TimeoutExpired:
        raise PreventedError(f"{CONTROL} does not answer within {DAEMON_S} s") from None
    finally:
        try:
            say(text="quit\n")
        except (OSError, subprocess.TimeoutExpired):
            emit("left", mechanism="mps", why=f"{CONTROL} did not take its quit")
        print(f"---- mps\n{last_words()}", file=sys.stderr)


@contextmanager
def whole(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, str]]:
    """The card as it is."""
    yield {}


class Bytes:
    """Copies between a block on the GPU and this process."""

    def __init__(self, cuda):
        self.cuda = cuda
        for name in ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"]:
            # An address, and a pointer.
            both = [ctypes.c_uint64, ctypes.c_void_p]
            getattr(cuda, name).argtypes = [
                *(both if "HtoD" in name else reversed(both)),
                ctypes.c_size_t,
                ctypes.c_void_p,
            ]

    def write(self, address: int, data: bytes) -> None:
        checked("copying to the GPU", self.cuda.cuMemcpyHtoDAsync_v2(address, data, len(data), None))
        checked("cuCtxSynchronize", self.cuda.cuCtxSynchronize())

    def read(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        checked("copying from the GPU", self.cuda.cuMemcpyDtoHAsync_v2(data, address, size, None))
        checked("cuCtxSynchronize", self.cuda.cuCtxSynchronize())
        return data.raw


def budget_figures(budget, limit_bytes: int | None) -> dict:
    """What a budget says, beside the limit of the slice; without one it may be anything."""
    figures = {**budget.as_dict(), "limit_bytes": limit_bytes}
    figures["ok"] = limit_bytes is None or limit_bytes - SLACK_BYTES <= budget.budget_bytes <= limit_bytes
    return figures


def taken_beyond(arena, limit_bytes: int) -> dict:
    """What comes of asking for all of the slice on top of what is taken of it: it has to be refused."""
    import poorwill

    try:
        arena.empty(limit_bytes, tag="kv_cache").free()
    except poorwill.OutOfMemoryError as error:
        return {"ok": True, "error": str(error)[:600]}
    return {"ok": False}


def child(options: argparse.Namespace) -> bool:
    """What is done in the slice; whether all of it went as it has to."""
    import poorwill

    oks: list[bool] = []

    def tell(event: str, *, ok: bool, **figures) -> None:
        emit(event, **figures, ok=ok)
        oks.append(ok)

    limit = None if options.child == "whole" else int(options.limit_gib * GIB)
    cuda = driver()
    context(cuda)
    free, total = device_memory(cuda)
    emit("driver", free_gib=gib(free), total_gib=gib(total))
    budget = poorwill.budget("cuda:0")
    tell("budget", **budget_figures(budget, limit))
    most = budget.budget_bytes if budget.headroom_bytes is None else budget.headroom_bytes
    # As much as the slice has, so that what sleeps has to be given back for the wake to have room.
    cache_bytes = min(most, int(options.limit_gib * GIB)) - WEIGHTS_BYTES - SPARE_BYTES
    arena = poorwill.arena("cuda:0", "slices")
    weights = arena.empty(WEIGHTS_BYTES, tag="weights")
    cache = arena.empty(cache_bytes // (2 * MIB) * 2 * MIB, tag="kv_cache")
    copies, pattern = Bytes(cuda), os.urandom(MIB) * (WEIGHTS_BYTES // MIB)
    copies.write(weights.address, pattern)
    if limit is not None:
        tell("beyond", **taken_beyond(arena, limit))
    for cycle in range(1, CYCLES + 1):
        awake, _ = device_memory(cuda)
        asleep = arena.sleep()
        between, _ = device_memory(cuda)
        start = time.perf_counter()
        arena.wake(verify="all")
        wake_s = time.perf_counter() - start
        after, _ = device_memory(cuda)
        equal = copies.read(weights.address, WEIGHTS_BYTES) == pattern
        # By the figure of the tool that cuts the slice.
        given_back = between - awake >= asleep.released_bytes - SLACK_BYTES
        tell(
            "cycle",
            cycle=cycle,
            released_gib=gib(asleep.released_bytes),
            release=asleep.release,
            free_gib=[gib(free) for free in (awake, between, after)],
            wake_s=round(wake_s, 4),
            bytes_equal=equal,
            gave_back=given_back,
            ok=equal and given_back and asleep.released_bytes >= weights.nbytes + cache.nbytes,
        )
    return all(oks)


def in_slice(options: argparse.Namespace, mechanism: str, environment: dict[str, str], folder: Path) -> bool:
    """Runs the child, and passes on what it says."""

    def keep(record: dict) -> None:
        line = record.get("line")
        if isinstance(line, dict):
            emit(**line)

    words = ["--child", mechanism, "--limit-gib", str(options.limit_gib)]
    log = folder / "log-of-the-child"
    ended = execute(Run(mechanism, "slices.py", words, CHILD_S, environment), CHILD_S, keep, log)
    said = tail(log)
    print(f"---- {mechanism}: {ended}\n{said}", file=sys.stderr, flush=True)
    if ended["failed"]:
        emit("ended", mechanism=mechanism, failed=ended["failed"], last_words=said[-1500:])
    return not ended["failed"]


def run(options: argparse.Namespace, folder: Path) -> bool:
    good = True
    for name in options.only:
        own = folder / name
        own.mkdir()
        cut = {"whole": whole, "hami": hami, "mps": mps}[name]
        try:
            with cut(options, own) as environment:
                well = in_slice(options, name, environment, own)
        except PreventedError as error:
            emit("prevented", mechanism=name, why=str(error))
            continue
        emit("slice", mechanism=name, ok=well)
        good = good and well
    return good


def mechanisms(text: str) -> list[str]:
    chosen = text.split(",")
    if wrong := [name for name in chosen if name not in MECHANISMS]:
        raise argparse.ArgumentTypeError(f"no {', '.join(wrong)}: there are {', '.join(MECHANISMS)}")
    return chosen


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--hami", type=Path, help="a checkout of HAMi-core")
    arguments.add_argument("--headers", type=Path, action="append", default=[], help="a folder of CUDA's")
    arguments.add_argument("--limit-gib", type=float, default=8, help="of the slice; more than 2")
    arguments.add_argument("--only", type=mechanisms, default=MECHANISMS, help="which, with commas between")
    arguments.add_argument("--child", choices=MECHANISMS, help=argparse.SUPPRESS)
    options = arguments.parse_args(given)
    if not options.limit_gib > 2:
        arguments.error(f"--limit-gib is {options.limit_gib}; it is more than 2")
    return options


def main() -> None:
    options = parsed()
    if options.child:
        every_line_says(mechanism=options.child)
        conclude(lambda: child(options))
    conclude_in_a_folder(lambda folder: run(options, folder))


if __name__ == "__main__":
    main()
