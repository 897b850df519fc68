"""One memory saver: pauses and resumes of 24.2 GiB of weights, beside the link. Prints one JSON object.

`--saver tms` is torch_memory_saver, which has to be installed; `poorwill` has the same calls.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

MIB = 1 << 20
# A dense model's: 24.2 GiB in bf16, by tensor.
SIZES_MIB = [1000, *[112, 112, 112, 32, 8, 8, 32] * 55, 901]
INNER = "POORWILL_BENCH_INNER"


def module_of(saver: str) -> Any:
    names = {
        "poorwill": "poorwill.compat.torch_memory_saver",
        "tms": "torch_memory_saver",
    }
    return importlib.import_module(names[saver])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--saver", choices=["poorwill", "tms"], required=True)
    parser.add_argument("--retain", action="store_true", help="keep backups after a resume")
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    if INNER in os.environ or given.saver == "poorwill":
        print(json.dumps(run(given)), flush=True)
        return
    # Its library has to be loaded before anything else.
    with module_of(given.saver).configure_subprocess():
        environment = {**os.environ, INNER: "1"}
        subprocess.run([sys.executable, *sys.argv], env=environment, check=True)


def timed(call: Callable[[], object]) -> float:
    torch: Any = importlib.import_module("torch")
    torch.cuda.synchronize()
    started = time.monotonic()
    call()
    torch.cuda.synchronize()
    return time.monotonic() - started


def link(torch: Any) -> dict[str, float]:
    """GiB a second of page-locked copies, each way; the best of five."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    to_device = min(timed(lambda: device.copy_(host, non_blocking=True)) for _ in range(5))
    to_host = min(timed(lambda: host.copy_(device, non_blocking=True)) for _ in range(5))
    return {"to_device_gib_s": 1 / to_device, "to_host_gib_s": 1 / to_host}


def host_gib() -> float:
    with open("/proc/meminfo") as lines:
        rows = {row.split(":")[0]: int(row.split()[1]) for row in lines}
    return (rows["MemTotal"] - rows["MemAvailable"]) / (1 << 20)


def run(given: argparse.Namespace) -> dict[str, Any]:
    torch: Any = importlib.import_module("torch")
    torch.cuda.init()
    figures: dict[str, Any] = {
        "saver": given.saver,
        "retain": given.retain,
        **link(torch),
    }
    torch.cuda.empty_cache()
    host_before = host_gib()
    saver = module_of(given.saver).torch_memory_saver
    torch.manual_seed(0)
    tensors: list[Any] = []
    with saver.region("kept", enable_cpu_backup=True):
        for size in SIZES_MIB:
            tensors.append(torch.empty(size * MIB // 2, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02))
    if given.retain:
        saver.retain_cpu_backup = True
    gib = sum(tensor.nbytes for tensor in tensors) / (1 << 30)
    sums = [tensor.view(torch.int16).sum(dtype=torch.int64).item() for tensor in tensors]
    figures |= {"gib": gib}

    def used() -> float:
        free, total = torch.cuda.mem_get_info()
        return (total - free) / (1 << 30)

    awake = used()
    first = timed(lambda: saver.pause("kept"))
    figures |= {"first_pause_s": first, "asleep_gib": used(), "awake_gib": awake}
    figures["host_gib"] = host_gib() - host_before
    resumes = [timed(lambda: saver.resume("kept"))]
    unchanged, changed = [], []
    for _ in range(given.turns):
        unchanged.append(timed(lambda: saver.pause("kept")))
        resumes.append(timed(lambda: saver.resume("kept")))
    figures["equal"] = sums == [tensor.view(torch.int16).sum(dtype=torch.int64).item() for tensor in tensors]
    for _ in range(given.turns):
        for tensor in tensors:
            tensor.view(torch.int16).add_(1)
        changed.append(timed(lambda: saver.pause("kept")))
        resumes.append(timed(lambda: saver.resume("kept")))
    figures["last_report"] = getattr(saver, "last_report", list)()
    sums = [n + given.turns * t.numel() for n, t in zip(sums, tensors, strict=True)]
    wrapped = [tensor.view(torch.int16).sum(dtype=torch.int64).item() for tensor in tensors]
    figures["equal_changed"] = all((a - b) % 65536 == 0 for a, b in zip(sums, wrapped, strict=True))
    tensors.clear()
    torch.cuda.empty_cache()
    dropped, back = [], []
    with saver.region("dropped"):
        tensors.extend(torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in SIZES_MIB)
    for _ in range(given.turns):
        dropped.append(timed(lambda: saver.pause("dropped")))
        back.append(timed(lambda: saver.resume("dropped")))
    for name, seconds in (
        *(
            ("resume_s", resumes),
            ("unchanged_pause_s", unchanged),
            ("changed_pause_s", changed),
        ),
        *(("dropped_pause_s", dropped), ("dropped_resume_s", back)),
    ):
        figures[name] = {
            "median": statistics.median(seconds),
            "min": min(seconds),
            "max": max(seconds),
        }
    figures["changed_over_link"] = figures["changed_pause_s"]["median"] * figures["to_host_gib_s"] / gib
    figures["resume_over_link"] = figures["resume_s"]["median"] * figures["to_device_gib_s"] / gib
    return figures


if __name__ == "__main__":
    main()
