#!/usr/bin/env python3
"""Holds run.py to what it says, with a shell script in poorwill's place; needs no GPU and no PyTorch."""

# There may be no pytest where this runs.
# ruff: noqa: PT009

import ast
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent

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
    return subprocess.run([sys.executable, str(HERE / "run.py"), *arguments], capture_output=True, text=True)


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
        self.assertEqual(len(names), 1 + 3 + 12 + 5)
        self.assertNotIn("poorwill", run("--list").stdout)
        self.assertEqual(run("--only", "nobody", "--list").returncode, 2)
        self.assertEqual(run().returncode, 2)

    def test_every_script_is_python(self):
        for path in HERE.glob("*.py"):
            ast.parse(path.read_text(), str(path))


if __name__ == "__main__":
    unittest.main()
