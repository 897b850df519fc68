#!/usr/bin/env python3
"""What host memory takes beyond what was asked for: a buffer of Poorwill's, or a page-locked tensor of
PyTorch's. Prints one JSON line.

    host_memory.py --whose poorwill --gib 65                    # page-locked for cuda:0
    host_memory.py --whose torch --gib 33
    host_memory.py --whose poorwill --gib 0.4 --device host  # any machine

Three independent sources report what was taken: this process's control group, the machine's available memory,
and Poorwill's own accounting. All pages are there when a page-locked buffer is; of a
pageable one each is touched first.
"""

import argparse
import json
import os
import time
from pathlib import Path

GIB, PAGE = 1 << 30, 4096
GROUPS = Path("/sys/fs/cgroup")


def group_bytes() -> int | None:
    """The control group's charge for this process without page cache; None if unknown."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            places, usage, cache = [GROUPS / path.lstrip("/"), GROUPS], "memory.current", "file"
        elif "memory" in controllers.split(","):
            folder = GROUPS / "memory"
            places, usage, cache = [folder / path.lstrip("/"), folder], "memory.usage_in_bytes", "cache"
        else:
            continue
        for place in places:  # within a container the path may be that of the machine outside
            try:
                used = int((place / usage).read_text())
                figures = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
            except OSError:
                continue
            # Pages of no file that several may map are counted as cache, too.
            return used - int(figures[cache]) + int(figures.get("shmem", 0))
    return None


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo does not say what is available")


def take(options: argparse.Namespace, nbytes: int) -> tuple[object, int | None]:
    """Takes the memory. What holds it, and how much of it the holder says there is."""
    if options.whose == "torch":
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), None
    import numpy
    from poorwill.offload import HostBuffer

    buffer = HostBuffer(nbytes, device=options.device, pin=False if options.pageable else "auto")
    if not buffer.is_pinned:
        numpy.from_dlpack(buffer)[::PAGE] = 1
    return buffer, buffer.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--whose", choices=["poorwill", "torch"], required=True)
    parser.add_argument("--gib", type=float, required=True)
    parser.add_argument("--device", default="cuda:0", help="cuda:N or host, for poorwill")
    parser.add_argument("--pageable", action="store_true", help="not page-locked, for poorwill")
    options = parser.parse_args()
    nbytes = int(options.gib * GIB)
    if nbytes < 1:
        parser.error("--gib is more than 0")
    # What is made once, whatever the size.
    warm = take(options, 1 << 20)
    group, available, start = group_bytes(), available_bytes(), time.perf_counter()
    kept, said = take(options, nbytes)
    seconds = time.perf_counter() - start
    group_after, available_after = group_bytes(), available_bytes()
    taken = None if group is None or group_after is None else group_after - group
    print(
        json.dumps(
            {
                "whose": options.whose,
                "asked_bytes": nbytes,
                "said_bytes": said,
                "group_bytes": taken,
                "available_less_bytes": available - available_after,
                "group_over_asked": None if taken is None else round(taken / nbytes, 4),
                "available_over_asked": round((available - available_after) / nbytes, 4),
                "seconds": round(seconds, 3),
                "gib_per_s": round(nbytes / GIB / seconds, 2),
                "is_pinned": getattr(kept, "is_pinned", None)
                if options.whose == "poorwill"
                else kept.is_pinned(),
            }
        ),
        flush=True,
    )
    del kept, warm
    os._exit(0)  # what ends with the process need not be taken down before


if __name__ == "__main__":
    main()
