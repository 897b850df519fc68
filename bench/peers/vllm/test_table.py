#!/usr/bin/env python3
"""Holds table.py to what it says, over files as sleep.py writes them."""

# There may be no pytest where this runs.
# ruff: noqa: PT009

import json
import subprocess
import sys
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from test_scripts import Folder  # noqa: E402


def slept(**figures) -> dict:
    """A cycle's line."""
    line = {"event": "cycle", "sleep_s": 0.05, "wake_s": 0.25, "bytes_equal": True, "tokens_equal": True}
    return {**line, "used_asleep_gib": 0.9, "host_added": {"VmRSS": 21.5}, **figures}


class Table(Folder):
    def records(self, *runs: tuple[str, str, list[dict]]) -> Path:
        """A file as sleep.py writes it, run after run."""
        path = self.folder / "some.jsonl"
        lines = [{"mode": mode, "label": label, **line} for mode, label, lines in runs for line in lines]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return path

    def table(self, path: Path, *arguments: str) -> subprocess.CompletedProcess:
        program = [sys.executable, "-B", str(HERE / "table.py"), str(path), *arguments]
        return subprocess.run(program, capture_output=True, text=True, encoding="utf-8")

    def rows(self, path: Path, only: str) -> dict[str, list[str]]:
        ran = self.table(path, "--only", only)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        cells = [line.strip("| ").split(" | ") for line in ran.stdout.splitlines() if line.startswith("| ")]
        return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in cells}

    def test_sleeping_and_waking(self):
        start = {"event": "start", "parameters_gib": 15.27, "kv_blocks": 1000, "start_s": 25.0}
        imported = {"event": "import"}
        level2 = {**slept(event="level2", sleep_s=0.02, wake_s=0.03)}
        path = self.records(
            ("cumem", "dense", [start, slept(sleep_s=9.0), slept(sleep_s=0.3), slept(sleep_s=0.4)]),
            (
                "poorwill",
                "dense",
                [start, slept(first="as-is", sleep_s=0.5, host_held_gib=15.3), level2],
            ),
            ("poorwill", "dense-prepared", [imported, start, slept(first="prepared", sleep_s=0.06)]),
            # Once more: this one counts.
            ("poorwill", "dense-prepared", [imported, start, slept(first="prepared", sleep_s=0.09), slept()]),
        )
        rows = self.rows(path, "sleeping")
        self.assertEqual(rows["weights"], ["15.27 GiB", "15.27 GiB"])
        self.assertEqual(rows["first sleep, prepared"], ["9.00 s", "90 ms", "100.00"])
        self.assertEqual(rows["first sleep, weights changed since the start"], ["9.00 s", "500 ms", "18.00"])
        self.assertNotIn("first sleep, nothing in the background", rows)
        self.assertEqual(rows["later sleep"], ["350 ms", "50 ms", "7.00"])
        self.assertEqual(rows["level 2 sleep"], ["-", "20 ms", "-"])
        self.assertEqual(rows["host memory held"], ["21.50 GiB", "15.30 GiB", "1.41"])
        self.assertEqual(rows["checked"], ["all 3 equal", "all 4 equal"])

    def test_thirty_cycles_and_what_is_wrong(self):
        spread = {"median": 0.05, "min": 0.04, "max": 0.08}
        line = {"event": "summary", "cycles": 30, "sleep_s": spread, "wake_s": spread}
        good = {**line, "bytes_equal": True, "tokens_equal": True}
        rows = self.rows(self.records(("poorwill", "thirty", [slept(first="as-is"), good])), "sleeping")
        self.assertEqual(rows["longest of later wakes"], ["-", "80 ms", "-"])
        self.assertEqual(rows["checked"], ["-", "all 31 equal"])
        bad = {**good, "tokens_equal": False}
        rows = self.rows(self.records(("poorwill", "thirty", [slept(first="as-is"), bad])), "sleeping")
        self.assertEqual(rows["checked"], ["-", "1 WRONG"])

    def test_loading(self):
        def load(peak: float, kept: float) -> dict:
            return {
                "event": "load",
                "live_gib": 16.0,
                "peak_mapped_gib": peak,
                "mapped_gib": kept,
                "load_s": 4,
            }

        card, done = {"event": "card", "free_gib": 21.0}, {"event": "start"}
        failed = {"event": "failed", "error": "out of\nmemory | more"}
        path = self.records(
            ("cumem", "mxfp8-split20", [load(29.86, 16.28)]),
            ("poorwill", "mxfp8-split20", [load(17.6, 16.0)]),
            ("cumem", "mxfp8-tight", [card, failed]),
            ("poorwill", "mxfp8-tight", [card, load(17.6, 16.0), done]),
        )
        cells = self.rows(path, "loads")["mxfp8-split20"]
        self.assertEqual(cells[:3], ["16.00", "29.86 (1.87x)", "16.28 (1.02x)"])
        self.assertEqual(cells[3:], ["17.60 (1.10x)", "16.00 (1.00x)", "4 / 4"])
        lines = [line for line in self.table(path, "--only", "tight").stdout.splitlines() if "tight" in line]
        self.assertEqual(lines[0], "| mxfp8-tight | cumem | 21.00 GiB | - | fails: out of memory / more |")
        self.assertEqual(lines[1], "| mxfp8-tight | poorwill | 21.00 GiB | 17.60 GiB | loads |")

    def test_speed(self):
        def run(rate: float, start_s: float) -> list[dict]:
            return [{"event": "start", "start_s": start_s}, {"event": "throughput", "median": rate}]

        path = self.records(
            ("none", "speed-1", run(1000.0, 20.0)),
            ("none", "speed-2", run(1020.0, 22.0)),
            ("poorwill", "speed-1", run(1005.0, 21.42)),
        )
        rows = self.rows(path, "speed")
        self.assertEqual(rows["tokens a second"], ["1,010", "1,005 (0.995x)"])
        self.assertEqual(rows["start"], ["21.00 s", "21.42 s (1.020x)"])

    def test_everything_else(self):
        path = self.records(
            ("poorwill", "server", [{"event": "step", "step": "level_1", "ok": True}]),
            ("cumem", "server", [{"event": "step", "step": "level_1", "ok": False}]),
            ("poorwill", "two", [{"event": "step", "step": "turn", "ok": ok} for ok in (True, False, True)]),
        )
        rows = self.rows(path, "steps")
        self.assertEqual(rows["server: level 1"], ["NO", "yes"])
        self.assertEqual(rows["two: turn"], ["-", "NO"])
        self.assertNotIn("### Sleeping", self.table(path).stdout)

    def test_what_cannot_be_read_is_said(self):
        for text in ['{"run": ', '{"line": {}}']:
            path = self.folder / "some.jsonl"
            path.write_text(text)
            ran = self.table(path)
            self.assertEqual(ran.returncode, 1)
            self.assertTrue(ran.stderr.startswith("cannot read what the scripts wrote: "), ran.stderr)
        ran = self.table(self.records(("none", "x", [{"event": "import"}])), "--only", "speed")
        self.assertEqual((ran.returncode, ran.stderr), (1, "there are no figures for that\n"))


if __name__ == "__main__":
    unittest.main()
