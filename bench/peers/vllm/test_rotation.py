#!/usr/bin/env python3
"""Holds rotation.py to what it says, as far as neither a GPU nor vLLM is needed for it. With `POORWILL` in
the environment, the program, all of it runs over stand-ins."""

# There may be no pytest where this runs.
# ruff: noqa: PT009

import argparse
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import rotation  # noqa: E402
import web  # noqa: E402


def answer(text: str) -> web.Answer:
    return web.Answer(200, text, 0.1)


def piece(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'text': text}]})}\n\n"


class Names(unittest.TestCase):
    def test_stages_are_those_that_the_service_reports(self):
        page = (HERE.parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
        for name in (*rotation.LEAVING, *rotation.ENGINES_OWN):
            self.assertIn(f"`{name}`", page)


class Figures(unittest.TestCase):
    def test_texts_streamed_or_not(self):
        whole = json.dumps({"choices": [{"text": "w4 w5"}]})
        self.assertEqual(rotation.text_of(answer(whole)), "w4 w5")
        self.assertEqual(rotation.text_of(answer(piece("w4") + piece(" w5") + "data: [DONE]\n\n")), "w4 w5")
        for broken in ["", "[]", "{}", piece("w4"), "data: {\n\ndata: [DONE]\n\n", '{"choices": []}']:
            self.assertIsNone(rotation.text_of(answer(broken)), broken)

    def test_what_of_a_swap_is_the_rotations(self):
        def stage(model: str, before: str, before_s: float, now: str, at_unix_ms: int) -> dict:
            what = {"event": "stage", "model": model, "before": before, "before_s": before_s}
            return {**what, "at_unix_ms": at_unix_ms, "stage": now}

        swap = {"total_s": 2.0, "phases": [["finding memory", 0.1], ["waking", 1.6], ["canary", 0.3]]}
        events = [
            {"event": "ready", "model": "birch", "at_unix_ms": 900},  # of which the beginning is not there
            stage("birch", "ready", 5.0, "draining", 1_000),
            stage("birch", "draining", 0.01, "falling asleep", 1_010),
            stage("birch", "falling asleep", 0.5, "releasing memory", 1_510),
            stage("birch", "releasing memory", 0.02, "asleep", 1_530),
            stage("amber", "finding memory", 0.1, "waking", 1_630),
            stage("amber", "waking", 1.6, "canary", 3_230),
            stage("amber", "canary", 0.3, "ready", 3_530),
            {"event": "ready", "model": "amber", "at_unix_ms": 3_530},
            {"event": "learnt", "model": "birch", "at_unix_ms": 9_000},
        ]
        self.assertEqual([round(seconds, 6) for seconds in rotation.ours(events)], [0.13])
        self.assertEqual(rotation.phases([swap, {**swap, "total_s": 3.0}])["total"], 2.5)
        self.assertEqual(rotation.phases([]), {})
        self.assertEqual(
            rotation.leaving(events), {"draining": 0.01, "falling asleep": 0.5, "releasing memory": 0.02}
        )
        self.assertEqual(rotation.spread([3.0, 1.0, 2.0]), {"p50": 2.0, "least": 1.0, "most": 3.0})


class Program(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def run_with(self, *words: str, **more: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-B", str(HERE / "rotation.py"), *words]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **more})

    def test_the_configuration_is_said_in_full(self):
        ports = {"front": 1, "control": 2, "amber": 3, "birch": 4}
        commands = {"amber": ["a", 'b "c"'], "birch": ["d"]}
        for mode, words in {"poorwill": "devices", "stand-in": "processes"}.items():
            options = argparse.Namespace(mode=mode)
            text = rotation.configuration(options, self.folder, ports, commands)
            self.assertIn(f'measure = "{words}"', text)
            self.assertIn('command = ["a", "b \\"c\\""]', text)
            self.assertIn("level = 2", text)
            self.assertEqual('served_as = "bench"' in text, mode == "poorwill")

    def test_wrong_usage_is_said(self):
        for words, said in {
            ("--mode", "stand-in", "--poorwill", "/nowhere"): "no program /nowhere",
            ("--mode", "stand-in", "--poorwill", sys.executable, "--rounds", "0"): "more than 0",
            ("--mode", "stand-in", "--poorwill", sys.executable, "--skip", "dance"): "no step dance",
        }.items():
            ran = self.run_with(*words)
            self.assertEqual(ran.returncode, 2)
            self.assertIn(said, ran.stderr)

    def test_one_that_does_not_rotate_is_a_failure(self):
        ran = self.run_with("--mode", "stand-in", "--poorwill", sys.executable)
        lines = [json.loads(line) for line in ran.stdout.splitlines()]
        self.assertEqual(ran.returncode, 1)
        self.assertIn("no rotation", lines[-1]["error"])

    @unittest.skipUnless("POORWILL" in os.environ, "POORWILL says no program")
    def test_every_step_is_well_over_stand_ins(self):
        program = os.environ["POORWILL"]
        ran = self.run_with("--mode", "stand-in", "--poorwill", program, "--rounds", "3")
        steps = [line for line in map(json.loads, ran.stdout.splitlines()) if line["event"] == "step"]
        self.assertEqual([step["step"] for step in steps if not step["ok"]], [], ran.stdout)
        self.assertEqual(len(steps), len(rotation.STEPS))
        self.assertEqual(ran.returncode, 0, ran.stderr)


if __name__ == "__main__":
    unittest.main()
