#!/usr/bin/env python3
"""Print what run.py wrote as Markdown: each figure the median over the rounds, each maximum the greatest."""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

from figures import COMING, ENGINES, LEAVING, median

P50_AIM_MS = 0.2
SMALL_BYTES = 1024
CPU_AIM_SMALL = 1.7
CPU_AIM = 2.0
GAP_AIM_MS = 5.0
SWAP_AIM_MS = 50.0
NAMES = {
    "direct": "no proxy",
    "nginx": "nginx",
    "poorwill": "poorwill",
    "llama-swap": "llama-swap",
    "nginx-unlogged": "nginx, no log",
    "poorwill-unlogged": "poorwill, no log",
}


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def head(*cells: str) -> list[str]:
    return [line(list(cells)), line(["---"] * len(cells))]


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def judged(text: str, is_met: bool) -> str:
    return f"**{text}**" if is_met else f"**{text}** (missed)"


def grouped(records: list[dict], *keys: str) -> dict[tuple, list[dict]]:
    groups = defaultdict(list)
    for record in records:
        if "failed" not in record:
            groups[tuple(record[key] for key in keys)].append(record)
    return groups


def peer_of(way: str) -> str:
    return way.replace("poorwill", "nginx").replace("llama-swap", "nginx")


def of_proxy(records: list[dict]) -> list[str]:
    lines = head(
        *["body", "requests/s", "way", "p50 ms", "p99 ms", "CPU µs a request"],
        *["p50 less nginx's", "CPU over nginx's"],
    )
    groups = grouped(records, "body_bytes", "rate", "way")

    def middle(key: tuple, figure: str) -> float | None:
        return median([record[figure] for record in groups.get(key, [])])

    for body, rate, way in groups:
        key, peer = (body, rate, way), (body, rate, peer_of(way))
        over, times = "", ""
        if peer != key and way != "direct" and peer in groups:
            difference = middle(key, "p50_ms") - middle(peer, "p50_ms")
            ratio = middle(key, "cpu_us") / middle(peer, "cpu_us")
            over, times = f"{difference:+.2f}", f"{ratio:.2f}"
            if way.startswith("poorwill"):
                over = judged(over, difference <= P50_AIM_MS)
                times = judged(times, ratio <= (CPU_AIM_SMALL if body <= SMALL_BYTES else CPU_AIM))
        cells = [f"{body} B", str(rate), NAMES[way], number(middle(key, "p50_ms"))]
        cells += [number(middle(key, "p99_ms")), number(middle(key, "cpu_us"), 0), over, times]
        lines.append(line(cells))
    return lines


def of_streams(records: list[dict]) -> list[str]:
    lines = head(
        *["way", "gap at the client p50", "p99", "max", "gap at the engine p99", "max"],
        *["p99 less the engine's", "chunk under way p50", "p99", "p99 less no proxy's"],
    )
    groups = grouped(records, "way")

    def middle(way: str, what: str, figure: str) -> float | None:
        return median([record[what][figure] for record in groups.get((way,), [])])

    def most(way: str, what: str) -> float:
        return max(record[what]["max"] for record in groups[way,])

    for (way,) in groups:
        over = middle(way, "gap_ms", "p99") - middle(way, "own_gap_ms", "p99")
        straight = middle("direct", "delay_ms", "p99")
        later = middle(way, "delay_ms", "p99") - straight if straight is not None else None
        is_ours = way == "poorwill"
        lines.append(
            line(
                [
                    NAMES[way],
                    number(middle(way, "gap_ms", "p50")),
                    number(middle(way, "gap_ms", "p99")),
                    number(most(way, "gap_ms")),
                    number(middle(way, "own_gap_ms", "p99")),
                    number(most(way, "own_gap_ms")),
                    judged(f"{over:+.2f}", over <= GAP_AIM_MS) if is_ours else f"{over:+.2f}",
                    number(middle(way, "delay_ms", "p50")),
                    number(middle(way, "delay_ms", "p99")),
                    number(later),
                ]
            )
        )
    return lines


def of_swaps(swaps: dict) -> list[str]:
    figures = swaps["figures"]

    def row(name: str, spread: dict, whose: str) -> str:
        return line([name, whose, number(spread["p50"], 1), number(spread["max"], 1)])

    lines = head("of a swap", "whose", "p50 ms", "max ms")
    lines.append(row("a request that forces it", figures["whole_ms"], "all, the answer included"))
    for stage in (*LEAVING, *COMING):
        whose = "engine" if stage in ENGINES else "canary" if stage == "canary" else "rotation"
        lines.append(row(stage, figures["stages_ms"][stage], whose))
    lines.append(row("what no stage tells", figures["untold_ms"], "rotation"))
    own = figures["own_ms"]
    p50 = judged(number(own["p50"], 1), own["p50"] <= SWAP_AIM_MS)
    lines.append(line(["**the rotation's own**", "", p50, number(own["max"], 1)]))
    lines.append(row("sleep and wake, asked directly", figures["direct_ms"], "engine, without a rotation"))
    over = number(figures["over_direct_ms"], 1)
    lines.append(line(["whole, less answer, canary and that", "medians", over, ""]))
    return lines


def of_machine(result: dict) -> list[str]:
    machine, versions = result["machine"], result["versions"]
    kind = "virtual, " if machine["is_virtual"] else ""
    pairs = set(filter(None, machine["thread_siblings"].values()))
    shared = (
        f", threads of a core {'; '.join(sorted(pairs))}" if any("-" in p or "," in p for p in pairs) else ""
    )
    programs = ", ".join(text.splitlines()[0].replace("nginx version: ", "") for text in versions.values())
    options = result["options"]
    before = " ".join(f"{value:.2f}" for value in machine["load_average_before"])
    text = (
        f"{result['began']}: {machine['processor']}, {kind}{len(machine['cpus'])} processors{shared}, "
        f"{machine['memory_bytes'] / (1 << 30):.0f} GiB, Linux {machine['kernel']}; {programs}; "
        f"load average before {before}. Proxy on {options['proxy_cpus']}, engine and clients on "
        f"{options['load_cpus']}; {options['rounds']} rounds, {options['connections']} connections, "
        f"{options['seconds']} s for each rate."
    )
    return [text]


def tables(result: dict) -> str:
    sections = [of_machine(result)]
    if "failed" in result:
        sections.append([f"It broke off: {result['failed']}"])
    if records := result.get("proxy"):
        sections += [["### Requests"], of_proxy(records)]
    if records := result.get("streams"):
        few = records[0]
        sections += [
            ["### Streams"],
            [f"{few['streams']} at a time, {few['tokens']} tokens each; milliseconds."],
        ]
        sections.append(of_streams(records))
    if swaps := result.get("swaps"):
        sections += [["### Swaps"], [f"{len(swaps['each'])} swaps."], of_swaps(swaps)]
    failed = [one for part in ("proxy", "streams") for one in result.get(part, []) if "failed" in one]
    for one in failed:
        sections.append([f"Failed: round {one['round']}, {NAMES[one['way']]}: {one['failed']}"])
    return "\n\n".join("\n".join(lines) for lines in sections)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("file", type=Path, help="what run.py wrote")
    options = arguments.parse_args()
    try:
        result = json.loads(options.file.read_text())
        if result.get("what") != "rotation":
            raise ValueError("it is not what rotation/run.py writes")
        print(tables(result))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        print(f"error: {options.file}: {error!r}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
