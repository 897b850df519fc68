#!/usr/bin/env python3
"""Print what run.py wrote about sleeping and waking as one table: peers, poorwill, and its limits.

Every figure is the median over the rounds. Within a round a peer's later sleeps and wakes are medians. Those
without a copy are the quickest, as in poorwill's own report.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

GIB = 1 << 30
PEERS = ["cumem", "tms", "tms-retain"]
FIRST_SLEEP_PART = 0.85  # which part of its limit the first sleep should reach

# What a row is called, poorwill's figure, and how its report names the ratio.
ROWS = [
    ("first sleep, nothing prepared", "first_sleep_s", "first_sleep"),
    ("first sleep after preparing", "prepared_sleep_s", "prepared_sleep"),
    ("later sleep, nothing changed", "clean_sleep_s", "clean_sleep"),
    ("later sleep, {changed} changed", "changed_sleep_s", "changed_sleep"),
    ("wake, 0.1 s after the sleep", "wake_s", "wake"),
    ("wake right after the sleep", "wake_at_once_s", None),
    ("sleep without a copy", "drop_s", "drop"),
    ("wake without a copy", "wake_empty_s", "wake_empty"),
]


def read(path: Path) -> dict[tuple[str, int], list[dict]]:
    """What each run printed in each round."""
    printed = defaultdict(list)
    for line in filter(str.strip, path.read_text().splitlines()):
        record = json.loads(line)
        if isinstance(record.get("line"), dict):
            printed[record["run"], record["round"]].append(record["line"])
    return printed


def of_peer(lines: list[dict]) -> dict[str, float]:
    """A peer's figures of one round, by poorwill's names."""
    cycles = [line for line in lines if "sleep_s" in line]
    rested = [line["wake_s"] for line in cycles if "wake_s" in line]
    at_once = [line["wake_at_once_s"] for line in cycles if "wake_at_once_s" in line]
    empty = [line for line in lines if "drop_s" in line]
    figures = {}
    if cycles:
        figures["first_sleep_s"] = cycles[0]["sleep_s"]
    if rested:
        figures["wake_s"] = statistics.median(rested)
    if at_once:
        figures["wake_at_once_s"] = statistics.median(at_once)
    if later := [cycle["sleep_s"] for cycle in cycles[1:]]:
        # It copies whether anything has changed or not.
        figures["clean_sleep_s"] = figures["changed_sleep_s"] = statistics.median(later)
    for name in ["drop_s", "wake_empty_s"] if empty else []:
        figures[name] = min(line[name] for line in empty)
    return figures


def best_pin(lines: list[dict]) -> float | None:
    """Bytes a second that machine.py reached at best."""
    rates = [line["gib_per_s"] for line in lines if str(line.get("what", "")).startswith("pin by")]
    return max(rates) * GIB if rates else None


def ratios_of(report: dict, pin: float | None) -> dict[str, dict]:
    """Poorwill's ratios of one round; the first sleep's with the pinning of machine.py, where it ran."""
    ratios = {name: ratio for name, ratio in report["ratios"].items() if ratio}
    if pin and report["first_sleep_s"]:
        limit_s = report["bytes"] / min(pin, report["limits"]["to_host_bytes_per_s"])
        ratio = report["first_sleep_s"] / limit_s
        ratios["first_sleep"] = {
            "limit_s": limit_s,
            "ratio": ratio,
            "ratio_aim": 1 / FIRST_SLEEP_PART,
        }
    return ratios


def median(figures: list[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return statistics.median(known) if known else None


def seconds(figure: float | None) -> str:
    if figure is None:
        return "-"
    return f"{figure:.2f} s" if figure >= 1 else f"{figure * 1e3:.1f} ms"


def table(printed: dict[tuple[str, int], list[dict]]) -> list[str]:
    """The lines of the table."""
    rounds = sorted({turn for _, turn in printed})
    ours = {}
    for turn in rounds:
        reports = [line for line in printed.get(("poorwill-sleep", turn), []) if "first_sleep_s" in line]
        if reports:
            at_once = (reports[-1].get("spreads") or {}).get("wake_at_once_s")
            ours[turn] = {**reports[-1], "wake_at_once_s": at_once and at_once["median"]}
    if not ours:
        raise SystemExit("no run of poorwill-sleep has a report")
    ratios = {turn: ratios_of(ours[turn], best_pin(printed.get(("machine", turn), []))) for turn in ours}
    peers = {name: [of_peer(printed.get((f"sleep-{name}", turn), [])) for turn in rounds] for name in PEERS}
    changed = f"{next(iter(ours.values()))['changed_fraction'] * 100:g} %"
    lines = [
        "| | " + " | ".join([*PEERS, "poorwill", "limit", "÷ limit", "aim"]) + " |",
        "|---" * (len(PEERS) + 5) + "|",
    ]
    for title, figure, name in ROWS:
        cells = [seconds(median([figures.get(figure) for figures in peers[peer]])) for peer in PEERS]
        cells.append(seconds(median([report[figure] for report in ours.values()])))
        beside = [ratio[name] for ratio in ratios.values() if name in ratio]
        cells.append(seconds(median([one["limit_s"] for one in beside])))
        ratio = median([one["ratio"] for one in beside])
        cells += [f"{ratio:.2f}", f"≤ {beside[0]['ratio_aim']:.2f}"] if beside else ["-", "-"]
        lines.append("| " + " | ".join([title.format(changed=changed), *cells]) + " |")
    wrong = [turn for turn, report in ours.items() if not report["verified"]]
    if wrong:
        lines.append(f"\nNOT verified in round {', '.join(map(str, wrong))}.")
    return lines


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("file", type=Path, help="what run.py wrote")
    sys.stdout.reconfigure(encoding="utf-8")
    try:
        printed = read(arguments.parse_args().file)
    except (OSError, ValueError) as error:
        raise SystemExit(f"cannot read what run.py wrote: {error}") from None
    print("\n".join(table(printed)))


if __name__ == "__main__":
    main()
