"""What the scripts here share without PyTorch and vLLM.

JSON lines, environments, host memory, processes, and a card with limited free memory."""

import ctypes
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

ERROR_CHARACTERS = 3000  # of an error's text, at most
HERE = Path(__file__).resolve().parent
GIB, MIB = 1 << 30, 1 << 20
FIRST_WITH_BACKENDS = (0, 25)  # of vLLM
MODES = ["cumem", "poorwill", "none"]

# Whatever is set already stays.
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_MOE_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}

# Of PyTorch's allocator, by its old name and its new one.
EXPANDABLE = dict.fromkeys(["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"], "expandable_segments:True")

_fields: dict = {}
_emitting = threading.Lock()


def every_line_says(**fields) -> None:
    """What `emit` adds to all that follows."""
    _fields.update(fields)


def emit(event: str, **fields) -> None:
    """One JSON line to standard output."""
    line = json.dumps({"event": event, **_fields, **fields}, default=str)
    with _emitting:
        print(line, flush=True)


def conclude(run: Callable[[], bool]) -> NoReturn:
    """Runs, says what failed if anything did, and ends the process with 0 if all was well.

    At once: what ends with the process need not be taken down before.
    """
    good = False
    try:
        good = run()
    except BaseException as error:
        traceback.print_exc()
        emit("failed", error=f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if good else 1)


def conclude_in_a_folder(run: Callable[[Path], bool]) -> NoReturn:
    """The same with a folder of the run's own, and a line at the end that says whether all was well."""

    def whole() -> bool:
        with tempfile.TemporaryDirectory(prefix="poorwill-bench-") as folder:
            good = run(Path(folder))
        emit("done", ok=good)
        return good

    conclude(whole)


def gib(size: float | None) -> float | None:
    return None if size is None else round(size / GIB, 3)


def in_gib(sizes: dict[str, int]) -> dict[str, float | None]:
    """Sizes by name, in GiB and called so."""
    return {name.replace("_bytes", "_gib"): gib(size) for name, size in sizes.items()}


def environment(mode: str, start: dict[str, str], **more: str) -> dict[str, str]:
    """The environment of a run: what a machine without a network needs, and poorwill's switch."""
    chosen = {**ENVIRONMENT, **start}
    chosen.pop("POORWILL_SLEEP_MODE", None)
    if mode == "poorwill":
        chosen["POORWILL_SLEEP_MODE"] = "1"
    return {**chosen, **more}


def sleep_mode(mode: str, version: str) -> dict[str, str]:
    """How a vLLM of this version learns whose sleep mode it is: with an option from 0.25 on, before that by
    the environment alone."""
    found = re.match(r"(\d+)\.(\d+)", version)
    has_backends = found is not None and (int(found[1]), int(found[2])) >= FIRST_WITH_BACKENDS
    return {"sleep_mode_backend": "poorwill"} if mode == "poorwill" and has_backends else {}


def installed(distribution: str = "vllm") -> str:
    """Its version; empty where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def adopt(chosen: dict[str, str]) -> None:
    """Makes an environment this process's own."""
    for name in set(os.environ) - set(chosen):
        del os.environ[name]
    os.environ.update(chosen)


def parse_sizes(lines: list[str], names: tuple[str, ...]) -> dict[str, float]:
    """Figures of a file like /proc/self/status by name, in GiB."""
    figures = {}
    for line in lines:
        name, _, rest = line.partition(":")
        if name in names:
            figures[name] = round(int(rest.split()[0]) / MIB, 3)  # the kernel says kB
    return figures


def host_memory(pid: int | str = "self") -> dict[str, float]:
    """Host memory of a process and the machine, in GiB; unknown figures are left out."""
    figures = {}
    for path, names in {
        f"/proc/{pid}/status": ("VmRSS", "VmLck", "VmPin"),
        "/proc/meminfo": ("MemTotal", "MemAvailable"),
    }.items():
        try:
            figures.update(parse_sizes(Path(path).read_text().splitlines(), names))
        except OSError:
            continue
    return figures


def difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: round(after[name] - before[name], 3) for name in after if name in before}


def parents(proc: Path = Path("/proc")) -> dict[int, int]:
    """The parent of every process."""
    found = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text()
        except OSError:
            continue  # it has ended meanwhile
        # The name stands in parentheses and may hold anything.
        found[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    return found


def descendants(pid: int, of: dict[int, int]) -> list[int]:
    """All processes below one, parents first."""
    below, at = [pid], 0
    while at < len(below):
        below += sorted(child for child, parent in of.items() if parent == below[at])
        at += 1
    return below[1:]


def name_of(pid: int, proc: Path = Path("/proc")) -> str:
    try:
        return (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def driver():
    """The CUDA driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def checked(what: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{what} failed: CUDA error {code}")


def context(cuda, ordinal: int = 0) -> None:
    """A context of this process on a GPU."""
    device, primary = ctypes.c_int(), ctypes.c_void_p()
    checked("cuInit", cuda.cuInit(0))
    checked("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), ordinal))
    checked("cuDevicePrimaryCtxRetain", cuda.cuDevicePrimaryCtxRetain(ctypes.byref(primary), device))
    checked("cuCtxSetCurrent", cuda.cuCtxSetCurrent(primary))


def device_memory(cuda) -> tuple[int, int]:
    """Free and all memory of the context's GPU, in bytes."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    checked("cuMemGetInfo", cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    return free.value, total.value


class Ballast:
    """A child process that leaves `free_gib` GiB of a card free, or holds nothing with None.

    It reports how much is free, and ends with this process.
    """

    def __init__(self, free_gib: float | None = None, ordinal: int = 0):
        command = [sys.executable, str(HERE / "ballast.py"), "--ordinal", str(ordinal)]
        if free_gib is not None:
            command += ["--free-gib", str(free_gib)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.first = self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"ballast.py ended with code {self.process.wait()}")
        return json.loads(line)

    def free(self) -> int:
        """Free bytes of the card now."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer()["free_bytes"]

    def total(self) -> int:
        return self.first["total_bytes"]

    def settled(self, aim: int, seconds: float = 30, slack: int = 64 * MIB) -> int:
        """Free bytes once `aim` is nearly reached, or the time is up.

        A process that was killed releases its memory a little later.
        """
        end = time.monotonic() + seconds
        while (free := self.free()) < aim - slack and time.monotonic() < end:
            time.sleep(0.25)
        return free

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def __enter__(self) -> "Ballast":
        return self

    def __exit__(self, *ended) -> None:
        self.close()


def utilization(free: int, total: int, free_gib: float | None, wanted: float) -> float:
    """The share of the card for vLLM when little of it is free.

    It refuses to start with more than is free after its process's context.
    """
    if free_gib is None:
        return wanted
    return round(min(wanted, max((free - GIB) / total, 0.01)), 4)


def install_entry_point(folder: Path) -> None:
    """Lays out a distribution whose entry point has vLLM load counting_allocator.py, in every process."""
    info = folder / "poorwill_bench_counting-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: poorwill-bench-counting\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\npoorwill_bench_counting = counting_allocator:register\n"
    )
    shutil.copy(HERE / "counting_allocator.py", folder)
    # First of all for this process, and for those that vLLM starts.
    sys.path.insert(1, str(folder))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
