#!/usr/bin/env python3
"""Holds so much of a GPU that the given GiB stay free, and says on request how much is free.

Prints a JSON line when it is ready, and one for every line that it reads. Ends with its input.
"""

import argparse
import ctypes
import json
import sys

from common import GIB, MIB, checked, context, device_memory, driver


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--free-gib", type=float, help="GiB to leave free; without it nothing is held")
    arguments.add_argument("--ordinal", type=int, default=0, help="which GPU, by CUDA's count")
    options = arguments.parse_args()
    cuda = driver()
    context(cuda, options.ordinal)
    held = 0
    if options.free_gib is not None:
        surplus = device_memory(cuda)[0] - int(options.free_gib * GIB)
        if surplus < 0:
            raise SystemExit(f"{-surplus / GIB:.2f} GiB less are free than are to stay free")
        held = surplus // (2 * MIB) * 2 * MIB
        if held:
            cuda.cuMemAlloc_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
            checked(f"allocating {held} bytes", cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), held))

    def report() -> None:
        free, total = device_memory(cuda)
        print(json.dumps({"free_bytes": free, "total_bytes": total, "held_bytes": held}), flush=True)

    report()
    for _ in sys.stdin:
        report()


if __name__ == "__main__":
    main()
