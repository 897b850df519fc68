#!/usr/bin/env python3
"""Holds run.py, table.py and churn.py to what they say; needs no GPU and no PyTorch.

A script is in poorwill's place.
"""

# There may be no pytest where this runs.
# ruff: noqa: PT009

import ast
import contextlib
import io
import json
import random
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
MEASURED = HERE.parents[1] / "crates/replay/tests/fixtures/measured"

SCRIPT = """#!/bin/sh
case "$*" in
doctor*) echo '{"host":{}}' ;;
*sleep*) echo 'not JSON'; echo '{"cycle":1}'; exec sleep 60 ;;
*moe*) echo '{"load":"moe"}'; echo 'it broke' >&2; exit 3 ;;
*dense*) kill -9 $$ ;;
*) echo "{\\"path\\":\\"$PYTHONPATH\\"}" ;;
esac
"""


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(HERE / "run.py"), *arguments],
        capture_output=True,
        text=True,
    )


def report(**figures) -> dict:
    """One of `poorwill bench sleep`, as far as table.py reads it."""
    names = ["first", "prepared", "clean", "changed", "wake", "drop", "wake_empty"]
    ratio = {"limit_s": 0.5, "ratio": 0.75, "ratio_aim": 1.0}
    return {
        "bytes": 24 << 30,
        **{f"{name}_sleep_s" if name in names[:4] else f"{name}_s": 0.25 for name in names},
        "changed_fraction": 0.01,
        "verified": True,
        "limits": {"to_host_bytes_per_s": 48 << 30},
        "ratios": {f"{name}_sleep" if name in names[:4] else name: ratio for name in names},
        **figures,
    }


class Run(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = Path(folder.name) / "out.jsonl"
        program = Path(folder.name) / "poorwill"
        program.write_text(SCRIPT)
        program.chmod(0o755)
        self.program = str(program)

    def measure(self, *arguments: str) -> list[dict]:
        ran = run("--poorwill", self.program, "--out", str(self.out), *arguments)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def test_every_line_says_where_it_comes_from_and_failures_are_no_end(self):
        lines = self.measure("--only", "poorwill", "--rounds", "1", "--limit-s", "1", "--peers", "/peers")
        ended = {line["run"]: line["ended"]["failed"] for line in lines if "ended" in line}
        self.assertEqual(
            ended,
            {
                "poorwill-doctor": None,
                "poorwill-sleep": "still running after 1 s",
                "poorwill-churn-moe": "exit code 3",
                "poorwill-churn-dense": "killed by signal 9",
                "poorwill-churn-swizzle": None,
            },
        )

        def by_run(run):
            return [line for line in lines if line["run"] == run]

        # What was printed before the end is kept.
        self.assertEqual(by_run("poorwill-sleep")[0]["text"], "not JSON")
        self.assertEqual(by_run("poorwill-sleep")[1]["line"], {"cycle": 1})
        self.assertEqual(by_run("poorwill-churn-moe")[-1]["ended"]["stderr"], "it broke\n")
        path = by_run("poorwill-churn-swizzle")[0]["line"]["path"]
        self.assertTrue(path == "/peers" or path.startswith("/peers:"), path)
        self.assertTrue(all(line["round"] == 1 for line in lines))

    def test_the_order_rotates(self):
        lines = self.measure("--only", "poorwill-doctor,poorwill-churn-swizzle", "--rounds", "2")
        order = [(line["round"], line["run"]) for line in lines if "ended" in line]
        self.assertEqual(
            order,
            [
                (1, "poorwill-doctor"),
                (1, "poorwill-churn-swizzle"),
                (2, "poorwill-churn-swizzle"),
                (2, "poorwill-doctor"),
            ],
        )

    def test_nothing_begins_behind_the_deadline(self):
        lines = self.measure("--only", "poorwill-s,poorwill-d", "--rounds", "1", "--deadline-s", "1e-9")
        self.assertEqual({line["ended"]["failed"] for line in lines}, {"the deadline had passed"})

    def test_runs_and_their_names(self):
        names = run("--poorwill", "x", "--list").stdout.split()
        self.assertEqual(len(names), 1 + 4 + 2 * 16 + 5)
        self.assertEqual(len(run("--seeds", "6", "--list").stdout.split()), 1 + 4 + (6 + 1) * 16)
        without = run("--list").stdout.split()
        self.assertFalse([name for name in without if name.startswith("poorwill-")])
        self.assertEqual(run("--only", "nobody", "--list").returncode, 2)
        self.assertEqual(run().returncode, 2)

    def test_the_load_and_what_changes_of_it_can_be_chosen(self):
        arguments = [
            "--only",
            "poorwill-doctor,poorwill-sleep",
            "--rounds",
            "1",
            "--deadline-s",
            "1e-9",
        ]
        commands = {line["run"]: line["command"] for line in self.measure(*arguments, "--changed", "0.5")}
        sleep = commands["poorwill-sleep"]
        self.assertEqual(sleep[1:4], ["bench", "sleep", "--json"])
        self.assertEqual(sleep[-4:], ["--size", "24GiB", "--changed", "0.5"])

    def test_weights_sleep_with_every_allocator_and_with_poorwill_as_codes_and_as_they_are(self):
        only = ["--only", "sleep,poorwill-sleep", "--rounds", "1", "--deadline-s", "1e-9"]
        commands = {line["run"]: line["command"] for line in self.measure(*only, "--content", "weights")}
        peers = [f"sleep-{name}" for name in ["cumem", "tms", "tms-retain", "poorwill"]]
        self.assertEqual(list(commands), [*peers, "poorwill-sleep", "poorwill-sleep-raw"])
        for name in [*peers, "poorwill-sleep"]:
            self.assertEqual(commands[name][-2:], ["--content", "weights"], name)
        raw = [*commands["poorwill-sleep"], "--compress", "off"]
        self.assertEqual(commands["poorwill-sleep-raw"], raw)
        self.assertEqual(run("--content", "jokes", "--list").returncode, 2)

    def table(self, *lines: tuple[str, int, dict], script="table.py") -> subprocess.CompletedProcess:
        records = [{"run": name, "round": turn, "line": line} for name, turn, line in lines]
        self.out.write_text("".join(json.dumps(record) + "\n" for record in records))
        program = [sys.executable, str(HERE / script), str(self.out)]
        return subprocess.run(program, capture_output=True, text=True, encoding="utf-8")

    def test_the_table_of_sleeping_and_waking(self):
        cycles = [{"sleep_s": 9.0, "wake_s": 0.5}, {"sleep_s": 0.5, "wake_s": 0.75}]
        ran = self.table(
            ("machine", 1, {"what": "pin by torch", "gib_per_s": 2.0}),
            ("machine", 1, {"what": "pin by registering", "gib_per_s": 16.0}),
            ("machine", 1, {"what": "link d2h", "gib_per_s": 50.0}),
            *(("sleep-cumem", 1, cycle) for cycle in cycles),
            ("sleep-cumem", 1, {"sleep_s": 0.5, "wake_at_once_s": 0.875}),
            ("sleep-cumem", 1, {"drop_s": 0.07, "wake_empty_s": 0.03}),
            ("sleep-cumem", 1, {"drop_s": 0.06, "wake_empty_s": 0.04}),
            ("poorwill-sleep", 1, report(first_sleep_s=1.6)),
            ("poorwill-sleep", 2, report(first_sleep_s=2.0)),
        )
        self.assertEqual(ran.returncode, 0, ran.stderr)
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ran.stdout.splitlines()]
        self.assertEqual(rows[0][1:5], ["cumem", "tms", "tms-retain", "poorwill"])
        self.assertEqual({len(row) for row in rows}, {8})
        by_title = {row[0]: row[1:] for row in rows[2:]}
        # Round 1 stands beside machine.py's pinning, round 2 beside poorwill's own.
        first = by_title["first sleep, nothing prepared"]
        self.assertEqual(first, ["9.00 s", "-", "-", "1.80 s", "1.00 s", "0.91", "≤ 1.18"])
        later = by_title["later sleep, 1 % changed"]
        self.assertEqual(later, ["500.0 ms", "-", "-", "250.0 ms", "500.0 ms", "0.75", "≤ 1.00"])
        self.assertEqual(by_title["wake, 0.1 s after the sleep"][0], "625.0 ms")
        self.assertEqual(by_title["wake right after the sleep"][:4], ["875.0 ms", "-", "-", "-"])
        self.assertEqual(by_title["sleep without a copy"][0], "60.0 ms")
        self.assertEqual(by_title["first sleep after preparing"][:3], ["-"] * 3)

    def test_a_table_says_what_it_lacks(self):
        ratios = {**report()["ratios"], "clean_sleep": None}
        ran = self.table(("poorwill-sleep", 1, report(ratios=ratios, drop_s=None, verified=False)))
        self.assertIn("| - | 250.0 ms | - | - | - |", ran.stdout)
        self.assertIn("NOT verified in round 1", ran.stdout)
        ran = self.table(("poorwill-sleep", 1, {"error": "no GPU"}))
        self.assertEqual(ran.returncode, 1)
        self.assertIn("no run of poorwill-sleep", ran.stderr)
        self.out.write_text('{"run": ')
        for path in [self.out, self.out.with_name("nothing")]:
            program = [sys.executable, str(HERE / "table.py"), str(path)]
            ran = subprocess.run(program, capture_output=True, text=True)
            self.assertEqual(ran.returncode, 1)
            self.assertTrue(ran.stderr.startswith("cannot read what run.py wrote: "), ran.stderr)

    def test_the_table_of_loading(self):
        def churn(peak: float, seconds: float, failed: str | None = None) -> dict:
            return {"failed": failed, "peak_ratio": peak, "held_ratio": 1.0, "seconds": seconds}

        ran = self.table(
            ("churn-poorwill-20-moe", 1, churn(1.01, 0.5)),
            ("churn-poorwill-20-moe-1", 1, churn(1.02, 0.7)),
            ("churn-cumem-20-moe", 1, churn(4.0, 0.1, "CUDA out of memory")),
            ("tight-poorwill-20-moe", 1, churn(1.01, 0.5)),
            ("tight-cumem-20-moe", 1, churn(1.0, 0.5, "CUDA out of memory")),
            ("sleep-cumem", 1, {"sleep_s": 1.0}),
            script="churn_table.py",
        )
        self.assertEqual(ran.returncode, 0, ran.stderr)
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ran.stdout.splitlines()]
        self.assertEqual({len(row) for row in rows}, {8})
        by_pool = {tuple(row[:3]): row[3:] for row in rows[2:]}
        ours = by_pool["moe", "20", "**Poorwill**"]
        self.assertEqual(ours, ["2 of 2", "1.010 to 1.020", "1.000", "0.600", "loads"])
        peer = by_pool["moe", "20", "vLLM's `CuMemAllocator`"]
        self.assertEqual(peer, ["0 of 1", "-", "-", "-", "fails"])
        ran = self.table(("machine", 1, {"what": "link"}), script="churn_table.py")
        self.assertIn("no run of churn.py", ran.stderr)

    def test_the_loads_of_threads_are_fixed(self):
        sys.path.insert(0, str(HERE))
        try:
            import threads
        finally:
            sys.path.remove(str(HERE))
        for load in threads.SKEWS:
            made = [threads.steps(load, 0, thread) for thread in range(threads.THREADS)]
            self.assertEqual(made, [threads.steps(load, 0, thread) for thread in range(threads.THREADS)])
            self.assertNotEqual(made[0], threads.steps(load, 1, 0))
            sizes = [value for steps in made for what, value in steps if what == "take"]
            self.assertEqual(len(sizes), 1200)
            self.assertTrue(all(512 <= size <= 256 << 20 and size % 512 == 0 for size in sizes))
            self.assertAlmostEqual(sum(map(threads.kept_bytes, made)) / (1 << 30), 10.9, delta=0.1)

    def test_what_threads_cannot_measure(self):
        for arguments in (["--rounds", "0"], ["--load", "none"], ["--pool", "nobody"], ["--seed", "x"]):
            program = [sys.executable, str(HERE / "threads.py"), *arguments]
            ran = subprocess.run(program, capture_output=True, text=True)
            self.assertEqual((ran.returncode, ran.stdout), (2, ""), arguments)
            self.assertIn(arguments[0], ran.stderr)

    def test_every_script_is_python(self):
        for path in HERE.glob("*.py"):
            ast.parse(path.read_text(), str(path))


class DriverCalls(unittest.TestCase):
    def test_handles_are_of_one_block_or_one_granule(self):
        from driver_calls import GRANULE, SPAN, handles

        def block(kind: str, start: float, size: float) -> dict:
            return {"kind": kind, "addr": (8 << 30) + int(start * GRANULE), "bytes": int(size * GRANULE)}

        blocks = [
            block("live", 0, 2.5),
            block("live", 2.5, 0.25),
            block("free", 2.75, 1.25),
            block("live", 4, 1),
            block("live", 5, 514),
        ]
        found = list(handles({"addr": 8 << 30, "blocks": blocks}))
        span = SPAN // GRANULE
        expected = [(0, 2), (2, 1), (4, 1), (5, span), (5 + span, 2)]
        self.assertEqual(found, [(first * GRANULE, count * GRANULE) for first, count in expected])
        self.assertEqual(list(handles({"addr": 0, "blocks": [block("free", 0, 9)]})), [])

    def test_other_memory_than_the_pools_is_not_measured(self):
        from driver_calls import described

        self.assertEqual(described(3, [2, 4], 6)["handles"], 2)
        said = ""
        try:
            described(3, [2, 4], 8)
        except SystemExit as ended:
            said = str(ended)
        self.assertRegex(said, "6 bytes.*8")

    def test_memory_is_as_the_gpu_supports_it(self):
        from driver_calls import RDMA_WITH_VIRTUAL_MEMORY, DriverCalls

        def attribute(code: int, can: int):
            def ask(found, which: int, gpu: int) -> int:
                self.assertEqual((which, gpu), (RDMA_WITH_VIRTUAL_MEMORY, 0))
                found._obj.value = can
                return code

            return ask

        for code, can, flag in ((0, 1, 1), (0, 0, 0), (1, 1, 0)):
            cuda = mock.Mock(cuDeviceGetAttribute=attribute(code, can))
            with mock.patch("ctypes.CDLL", return_value=cuda):
                flags = list(DriverCalls([])._prop.flags)
            self.assertEqual(flags, [0, flag, 0, 0, 0, 0, 0, 0])

    def test_a_query_that_nvml_refuses_has_no_figure(self):
        from driver_calls import nvml_queries

        queries = ["nvmlDeviceGetHandleByUUID", "nvmlDeviceGetComputeRunningProcesses_v3"]
        names = ["nvmlInit_v2", *queries, "nvmlShutdown"]
        for refused in [None, *names]:
            nvml = mock.Mock(**{f"{name}.return_value": 3 * (name == refused) for name in names})
            said = io.StringIO()
            with mock.patch("ctypes.CDLL", return_value=nvml), contextlib.redirect_stderr(said):
                took = nvml_queries(b"GPU-0")
            self.assertEqual(len(took), 2 if refused is None else 0)
            self.assertIn(f"{refused} gave 3" if refused else "", said.getvalue())


class Recorded(unittest.TestCase):
    """What was recorded on a GPU is what the loads still ask for."""

    def asked(self, name: str) -> list[int]:
        asked: list[int] = []

        class Tensor:
            def __init__(self, size: int):
                self.size = size
                asked.append(size)

            def __del__(self):
                asked.append(-self.size)

            def numel(self) -> int:
                return self.size

        torch = types.ModuleType("torch")
        torch.Tensor = Tensor
        torch.cuda = types.SimpleNamespace(empty_cache=lambda: asked.append(0))
        with mock.patch.dict(sys.modules, {"torch": torch}):
            sys.modules.pop("churn", None)
            import churn

            meter = types.SimpleNamespace(take=Tensor, give=lambda tensor: None)
            kept = churn.LOADS[name](meter, random.Random(0))
            sys.modules.pop("churn")
        asked_for = asked.copy()
        del kept
        return asked_for

    def test_loads_are_what_was_recorded(self):
        for name in ("moe", "dense", "swizzle", "mixed"):
            sizes, recorded = {}, []
            for line in (MEASURED / f"{name}.jsonl").read_text().splitlines():
                event = json.loads(line)
                if event.get("t") == "a":
                    sizes[event["k"]] = event["b"]
                    recorded.append(event["b"])
                elif event.get("t") == "f":
                    recorded.append(-sizes[event["k"]])
                elif event.get("t") == "e":
                    recorded.append(0)
            self.assertEqual(self.asked(name), recorded, name)


if __name__ == "__main__":
    unittest.main()
