#!/usr/bin/env python3
"""Print what sleep.py and server.py wrote as Markdown: vLLM's own allocator beside poorwill.

    table.py OUT.jsonl                # every table that there are figures for
    table.py OUT.jsonl --only loads   # one of them

A run is known by its mode and label; of one that was made several times the last counts. A ratio is cumem's
figure over poorwill's: above 1 poorwill is quicker, or smaller.
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

PEER, OURS = "cumem", "poorwill"
VARIANTS = ("-prepared", "-cold")  # of poorwill's first sleep; cumem has but one
BEGINNING = ("card", "import")  # what a run prints first
FIRST = {
    "prepared": "first sleep, prepared",
    "as-is": "first sleep, weights changed since the start",
    "cold": "first sleep, nothing in the background",
}


@dataclass
class Ran:
    """What one run printed."""

    lines: list[dict] = field(default_factory=list)

    def of(self, *events: str) -> list[dict]:
        return [line for line in self.lines if line.get("event") in events]

    def one(self, event: str) -> dict:
        """The last line of this kind; nothing where there is none."""
        return (self.of(event) or [{}])[-1]

    @property
    def mode(self) -> str:
        return self.lines[0].get("mode", "") if self.lines else ""

    @property
    def label(self) -> str:
        return self.lines[0].get("label", "") if self.lines else ""

    @property
    def model(self) -> str:
        """The label without what is said of the first sleep."""
        for variant in VARIANTS:
            if self.label.endswith(variant):
                return self.label.removesuffix(variant)
        return self.label


def read(paths: list[Path]) -> dict[str, Ran]:
    """The last run of every mode and label."""
    runs: dict[str, Ran] = {}
    for path in paths:
        for text in filter(str.strip, path.read_text().splitlines()):
            line = json.loads(text)
            run = runs.setdefault(f"{line['mode']} {line['label']}", Ran())
            if line["event"] in BEGINNING and run.of("import"):
                run.lines.clear()
            run.lines.append(line)
    return runs


def seconds(figure: float | None) -> str:
    if figure is None:
        return "-"
    return f"{figure:.2f} s" if figure >= 1 else f"{figure * 1e3:.0f} ms"


def size(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.2f} GiB"


def count(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:,.0f}"


def ratio(peer: float | None, ours: float | None) -> str:
    return "-" if not peer or not ours else f"{peer / ours:.2f}"


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def heading(*cells: str) -> list[str]:
    return [row(*cells), "|---" * len(cells) + "|"]


def median(figures: list[float]) -> float | None:
    return statistics.median(figures) if figures else None


def figures_of(run: Ran) -> dict[str, tuple]:
    """What a run of sleep.py measured: a figure and how it is written, by what it is."""
    cycles, summary, start = run.of("cycle"), run.one("summary"), run.one("start")
    figures: dict[str, tuple] = {
        "weights": (start.get("parameters_gib"), size),
        "blocks of KV cache": (start.get("kv_blocks"), count),
    }
    if cycles:
        kind = cycles[0].get("first") or "as-is"
        wanted = FIRST.values() if run.mode == PEER else [FIRST[kind]]
        figures |= {title: (cycles[0]["sleep_s"], seconds) for title in wanted}
    later = [cycle["sleep_s"] for cycle in cycles[1:]]
    wakes = [cycle["wake_s"] for cycle in cycles]
    if summary:
        later, wakes = [summary["sleep_s"]["median"]], [summary["wake_s"]["median"]]
        figures["longest of later sleeps"] = (summary["sleep_s"]["max"], seconds)
        figures["longest of later wakes"] = (summary["wake_s"]["max"], seconds)
    figures["later sleep"] = (median(later), seconds)
    figures["wake"] = (median(wakes), seconds)
    figures["sleep, all weights changed"] = (run.one("changed").get("sleep_s"), seconds)
    for record in run.of("by_tag"):
        for tag in record["tags"]:
            when = "first" if tag == record["tags"][0] else "second"
            figures[f"wake of {tag}, {when}"] = (record.get(f"wake_{tag}_s"), seconds)
    dropped = run.of("level2")
    figures["level 2 sleep"] = (median([record["sleep_s"] for record in dropped]), seconds)
    figures["level 2 wake"] = (median([record["wake_s"] for record in dropped]), seconds)
    slept = [*cycles, *run.of("changed", "by_tag")]
    if slept:
        figures["device memory asleep"] = (slept[-1]["used_asleep_gib"], size)
        held = slept[-1].get("host_held_gib")
        if held is None:  # what nobody accounts for is seen from outside
            held = slept[-1].get("host_added", {}).get("VmRSS")
        figures["host memory held"] = (held, size)
    return {title: (figure, written) for title, (figure, written) in figures.items() if figure is not None}


def checked(runs: list[Ran]) -> str:
    """How many cycles were compared, and whether all were equal."""
    of = [cycle for run in runs for cycle in run.of("cycle", "by_tag", "changed", "level2", "summary")]
    compared = [cycle for cycle in of if "tokens_equal" in cycle]
    wrong = [cycle for cycle in compared if not (cycle["tokens_equal"] and cycle["bytes_equal"])]
    total = sum(cycle.get("cycles", 1) for cycle in compared)
    return "-" if not compared else f"{len(wrong)} WRONG" if wrong else f"all {total} equal"


def sleeping(runs: list[Ran]) -> list[str]:
    by_model: dict[str, dict[str, list[Ran]]] = {}
    for run in runs:
        if run.of("cycle") and run.mode in (PEER, OURS) and not run.of("card"):
            by_model.setdefault(run.model, {}).setdefault(run.mode, []).append(run)
    lines = []
    for model, modes in by_model.items():
        found: dict[str, dict[str, tuple]] = {PEER: {}, OURS: {}}
        for mode, of in modes.items():
            for run in of:
                # What several runs have, the first has said.
                found[mode] = {**figures_of(run), **found[mode]}
        titles = list(dict.fromkeys([*found[OURS], *found[PEER]]))
        if OURS in modes:  # a first sleep that poorwill has not tried is not cumem's alone
            titles = [title for title in titles if title not in FIRST.values() or title in found[OURS]]
        lines += ["", f"**{model}**", "", *heading("", PEER, OURS, f"{PEER} ÷ {OURS}")]
        for title in titles:
            peer, ours = found[PEER].get(title, (None, None)), found[OURS].get(title, (None, None))
            written = peer[1] or ours[1]
            compared = "" if title == "weights" else ratio(peer[0], ours[0])
            lines.append(row(title, written(peer[0]), written(ours[0]), compared))
        lines.append(row("checked", checked(modes.get(PEER, [])), checked(modes.get(OURS, [])), ""))
    return lines


def over(figure: float | None, live: float | None) -> str:
    return "-" if not figure or not live else f"{figure:.2f} ({figure / live:.2f}x)"


def loads(runs: list[Ran]) -> list[str]:
    """Peak and kept of every load, in GiB and over what lives."""
    by_label: dict[str, dict[str, dict]] = {}
    for run in runs:
        load = run.one("load")
        if "peak_mapped_gib" in load and not run.of("card"):
            by_label.setdefault(run.label, {})[run.mode] = load
    if not by_label:
        return []
    lines = heading("", "live", f"peak, {PEER}", f"kept, {PEER}", f"peak, {OURS}", f"kept, {OURS}", "seconds")
    for label, modes in by_label.items():
        peer, ours = modes.get(PEER, {}), modes.get(OURS, {})
        live = ours.get("live_gib") or peer.get("live_gib")
        lines.append(
            row(
                label,
                "-" if live is None else f"{live:.2f}",
                over(peer.get("peak_mapped_gib"), peer.get("live_gib")),
                over(peer.get("mapped_gib"), peer.get("live_gib")),
                over(ours.get("peak_mapped_gib"), ours.get("live_gib")),
                over(ours.get("mapped_gib"), ours.get("live_gib")),
                f"{peer.get('load_s', '-')} / {ours.get('load_s', '-')}",
            )
        )
    return lines


def tight(runs: list[Ran]) -> list[str]:
    """Which loads succeed with only so much of the card free."""
    lines = []
    for run in runs:
        if not run.of("card"):
            continue
        failed = run.one("failed").get("error")
        came = "loads" if run.of("start") else f"fails: {failed or 'it was ended'}"
        came = " ".join(came.split())[:160].replace("|", "/")
        peak = run.one("load").get("peak_mapped_gib")
        lines.append(row(run.label, run.mode, size(run.one("card")["free_gib"]), size(peak), came))
    return [*heading("", "with", "free", "peak mapped", ""), *lines] if lines else []


def speed(runs: list[Ran]) -> list[str]:
    """Throughput and the time to start, medians over the runs that measured both."""
    of = [run for run in runs if run.of("throughput")]
    modes = [mode for mode in ("none", PEER, OURS) if any(run.mode == mode for run in of)]
    if not modes:
        return []

    def medians(event: str, name: str) -> list[float | None]:
        return [
            median([run.one(event)[name] for run in of if run.mode == mode and name in run.one(event)])
            for mode in modes
        ]

    def cells(figures: list[float | None], written) -> list[str]:
        first = figures[0]
        return [
            written(figure) + (f" ({figure / first:.3f}x)" if at and figure and first else "")
            for at, figure in enumerate(figures)
        ]

    return [
        *heading("", *("no sleep mode" if mode == "none" else mode for mode in modes)),
        row("tokens a second", *cells(medians("throughput", "median"), count)),
        row("start", *cells(medians("start", "start_s"), seconds)),
        row("of it loading", *cells(medians("load", "load_s"), seconds)),
    ]


def steps(runs: list[Ran]) -> list[str]:
    """What else was tried, and whether it went as it has to."""
    found: dict[str, dict[str, bool]] = {}
    for run in runs:
        for line in run.of("step"):
            of = found.setdefault(f"{line['label']}: {line['step']}", {})
            # Of what is done several times all has to be well.
            of[run.mode] = of.get(run.mode, True) and line["ok"]
    if not found:
        return []
    words = {True: "yes", False: "NO", None: "-"}
    return [
        *heading("as it has to be", PEER, OURS),
        *(
            row(name.replace("_", " "), words[of.get(PEER)], words[of.get(OURS)])
            for name, of in found.items()
        ),
    ]


TABLES = {
    "sleeping": ("Sleeping and waking", sleeping),
    "loads": ("Memory mapped while loading, GiB", loads),
    "tight": ("Loading with little of the card free", tight),
    "speed": ("Throughput and start", speed),
    "steps": ("Everything else", steps),
}


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("files", nargs="+", type=Path, help="what the scripts wrote")
    arguments.add_argument("--only", choices=list(TABLES), help="one table")
    options = arguments.parse_args()
    sys.stdout.reconfigure(encoding="utf-8")
    try:
        runs = list(read(options.files).values())
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"cannot read what the scripts wrote: {error!r}") from None
    printed = False
    for name, (title, made) in TABLES.items():
        if options.only in (None, name) and (lines := made(runs)):
            print(f"{'' if not printed else chr(10)}### {title}\n")
            print("\n".join(lines).strip("\n"))
            printed = True
    if not printed:
        raise SystemExit("there are no figures for that")


if __name__ == "__main__":
    main()
