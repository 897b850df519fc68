#!/usr/bin/env python3
"""Print what run.py wrote about loading as one table: peak and held memory over live, and the time.

Ratios are the least and the most over seeds and rounds, seconds the median. The last column says whether a
load succeeded with 1.06 times what is live at its peak free on the card.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

ALLOCATORS = ["none", "cumem", "tms", "poorwill"]
NAMES = {"none": "PyTorch's own", "cumem": "vLLM's `CuMemAllocator`", "tms": "`torch_memory_saver`"}


def read(path: Path) -> dict[tuple[str, str, str, str], list[dict]]:
    """What each kind of run printed or how it ended: by kind, allocator, split and load."""
    runs = defaultdict(list)
    for text in filter(str.strip, path.read_text().splitlines()):
        record = json.loads(text)
        kind, *rest = record["run"].split("-")
        if kind not in ("churn", "tight"):
            continue
        key = (kind, *rest[:3])
        if isinstance(record.get("line"), dict):
            runs[key].append(record["line"])
        elif (record.get("ended") or {}).get("failed"):
            runs[key].append({"failed": record["ended"]["failed"]})
    return runs


def spread(figures: list[float]) -> str:
    low, high = f"{min(figures):.3f}", f"{max(figures):.3f}"
    return low if low == high else f"{low} to {high}"


def fate(lines: list[dict]) -> str:
    """Whether the runs in little memory succeeded."""
    if not lines:
        return "-"
    failed = [line["failed"] for line in lines if line.get("failed")]
    if not failed:
        return "loads"
    return "the process ends" if any("exit code" in why or "signal" in why for why in failed) else "fails"


def table(runs: dict[tuple[str, str, str, str], list[dict]]) -> list[str]:
    """The lines of the table."""
    lines = [
        "| load | `max_split_size_mb` | pool | runs | peak | held | seconds | 1.06 times the peak free |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for load in ["moe", "dense"]:
        for split in ["none", "20"]:
            for allocator in ALLOCATORS:
                done = runs.get(("churn", allocator, split, load), [])
                good = [line for line in done if not line.get("failed")]
                cells = [load, split, NAMES.get(allocator, "**Poorwill**"), f"{len(good)} of {len(done)}"]
                if good:
                    cells += [spread([line["peak_ratio"] for line in good])]
                    cells += [spread([line["held_ratio"] for line in good])]
                    cells += [f"{statistics.median(line['seconds'] for line in good):.3f}"]
                else:
                    cells += ["-"] * 3
                cells.append(fate(runs.get(("tight", allocator, split, load), [])))
                lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("file", type=Path, help="what run.py wrote")
    sys.stdout.reconfigure(encoding="utf-8")
    try:
        runs = read(arguments.parse_args().file)
    except (OSError, ValueError) as error:
        raise SystemExit(f"cannot read what run.py wrote: {error}") from None
    if not runs:
        raise SystemExit("no run of churn.py is there: run.py --only churn,tight makes some")
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
