#!/usr/bin/env python3
"""Holds the scripts here to what they say, as far as no GPU, no PyTorch and no vLLM are needed for it."""

# There may be no pytest where this runs.
# ruff: noqa: PT009

import ast
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import types
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import common  # noqa: E402
import connectors  # noqa: E402
import models  # noqa: E402
import plans  # noqa: E402
import reload  # noqa: E402
import server  # noqa: E402
import sleep  # noqa: E402
import two_engines  # noqa: E402
import visit  # noqa: E402
import web  # noqa: E402


def printed(action) -> list[dict]:
    """The JSON lines that an action prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        action()
    return [json.loads(line) for line in out.getvalue().splitlines()]


class Folder(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)


class Common(Folder):
    def test_poorwill_is_on_in_its_own_mode_only(self):
        start = {"PATH": "/bin", "POORWILL_SLEEP_MODE": "1", "VLLM_USE_DEEP_GEMM": "1"}
        for mode in common.MODES:
            chosen = common.environment(mode, start, MORE="2")
            self.assertEqual(chosen.get("POORWILL_SLEEP_MODE"), "1" if mode == "poorwill" else None)
            self.assertEqual(chosen["VLLM_USE_DEEP_GEMM"], "1")  # set before, and left
            self.assertEqual((chosen["HF_HUB_OFFLINE"], chosen["MORE"], chosen["PATH"]), ("1", "2", "/bin"))

    def test_sizes_of_the_kernel(self):
        lines = ["Name:\tpython", "VmRSS:\t  1048576 kB", "VmPin:\t 524288 kB", "Threads:\t3"]
        self.assertEqual(common.parse_sizes(lines, ("VmRSS", "VmPin")), {"VmRSS": 1.0, "VmPin": 0.5})
        self.assertEqual(common.difference({"a": 1.5, "b": 2.0}, {"a": 1.0}), {"a": 0.5})
        self.assertEqual(common.in_gib({"live_bytes": 3 << 29}), {"live_gib": 1.5})

    def test_host_memory_is_touched(self):
        try:
            self.assertGreater(common.touch_host_memory(1, threads=2), 0)
        except OSError as error:
            self.skipTest(f"this kernel cannot, or there is too little: {error}")

    def test_the_share_of_a_card_that_is_full(self):
        self.assertEqual(common.utilization(0, 1, None, 0.9), 0.9)
        self.assertEqual(common.utilization(21 << 30, 140 << 30, 21, 0.9), round(20 / 140, 4))
        self.assertEqual(common.utilization(130 << 30, 140 << 30, 130, 0.5), 0.5)
        self.assertEqual(common.utilization(1 << 28, 140 << 30, 0.25, 0.5), 0.01)

    def test_the_counting_allocator_is_found_as_a_plugin(self):
        program = "\n".join(
            [
                f"import sys; sys.path.insert(0, {str(HERE)!r})",
                "import os, common, pathlib",
                f"common.install_entry_point(pathlib.Path({str(self.folder / 'plugin')!r}))",
                "from importlib.metadata import entry_points",
                "found = entry_points(group='vllm.general_plugins')",
                "found = [e for e in found if e.name == 'poorwill_bench_counting']",
                "print(found[0].load().__name__, os.environ['PYTHONPATH'].split(':')[0])",
            ]
        )
        ran = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True)
        self.assertEqual(ran.stdout.split(), ["register", str(self.folder / "plugin")], ran.stderr)

    def test_descendants_come_after_their_parents(self):
        self.assertEqual(common.descendants(2, {2: 1, 5: 2, 3: 2, 4: 5, 9: 1}), [3, 5, 4])
        child = subprocess.Popen(["sleep", "60"])
        self.addCleanup(child.wait)
        self.addCleanup(child.kill)
        self.assertIn(child.pid, common.descendants(os.getpid(), common.parents()))


class Models(Folder):
    def test_every_kind_has_a_configuration(self):
        for kind in models.KINDS:
            path = models.write_model(self.folder, kind, 6)
            settings = json.loads((path / "config.json").read_text())
            self.assertEqual(settings["num_hidden_layers"], 6)
        self.assertEqual(len(settings := models.configuration("mxfp4")["layer_types"]), 24)
        self.assertEqual(set(settings), {"sliding_attention", "full_attention"})
        self.assertNotIn("layer_types", models.SHAPES["mxfp4"])

    def test_a_checkpoint_has_every_tensor_and_the_size_asked_for(self):
        tensors = models.tensor_shapes(models.configuration("small", 2))
        self.assertEqual(len(tensors), 3 + 2 * 11)
        self.assertEqual(tensors["model.layers.1.self_attn.k_proj.weight"], (1024, 2048))
        self.assertEqual(models.shard_of("model.layers.1.mlp.up_proj.weight"), "layer-001.safetensors")
        self.assertEqual(models.shard_of("model.embed_tokens.weight"), "outer.safetensors")
        self.assertEqual(models.shard_of("lm_head.weight"), "outer.safetensors")
        for gib in [1, 2, 4]:
            made = models.tensor_shapes(models.configuration("small", models.layers_for(gib)))
            size = 2 * sum(map(models.elements, made.values())) / (1 << 30)
            self.assertAlmostEqual(size, gib, delta=0.06)


class Sleep(unittest.TestCase):
    def test_many_cycles_in_one_line(self):
        def cycle(sleep_s: float, equal: bool = True) -> dict:
            figures = {"wake_s": 0.5, "bytes_equal": True, "tokens_equal": equal, "host_added": {}}
            return {**figures, "sleep_s": sleep_s, "used_asleep_gib": sleep_s}

        line = sleep.summary([cycle(0.1), cycle(0.3), cycle(0.2)])
        self.assertEqual(line["sleep_s"], {"median": 0.2, "min": 0.1, "max": 0.3})
        self.assertEqual((line["cycles"], line["tokens_equal"]), (3, True))
        self.assertEqual(line["used_asleep_gib"], {"min": 0.1, "max": 0.3})
        self.assertNotIn("host_held_gib", line)
        self.assertFalse(sleep.summary([cycle(0.1), cycle(0.1, equal=False)])["tokens_equal"])

    def run_with(self, engine_module, *arguments: str) -> tuple[bool, list[dict]]:
        results = []
        with mock.patch.dict(sys.modules, {"engine": engine_module}), tempfile.TemporaryDirectory() as folder:
            options = sleep.parsed(list(arguments))
            lines = printed(lambda: results.append(sleep.run(options, None, Path(folder))))
        return results[0], lines

    def test_a_run_goes_through_all_that_was_asked_for(self):
        module = fake_engine()
        good, lines = self.run_with(
            module, "--mode", "poorwill", "--cycles", "3", "--first", "prepared", "--by-tag", "--level2"
        )
        self.assertTrue(good)
        events = [line["event"] for line in lines]
        self.assertEqual(
            events,
            ["overwritten", "reference", "before", "prepared"]
            + ["cycle"] * 3
            + ["by_tag"] * 2
            + ["level2"] * 2
            + ["after"],
        )
        by_tag = [line for line in lines if line["event"] == "by_tag"]
        self.assertEqual([line["tags"] for line in by_tag], sleep.ORDERS)
        self.assertIn("wake_kv_cache_s", by_tag[0])
        level2 = [line for line in lines if line["event"] == "level2"]
        self.assertEqual(level2[0]["restored"], ["weights"])
        self.assertTrue(level2[0]["tokens_equal"])
        cycles = [line for line in lines if line["event"] == "cycle"]
        self.assertEqual([cycle["first"] for cycle in cycles], ["prepared", None, None])
        self.assertEqual(cycles[0]["sleep_told"], [{"operation": "sleep"}])

    def test_what_is_wrong_is_no_success(self):
        good, lines = self.run_with(fake_engine(spoil=2), "--mode", "cumem", "--cycles", "2", "--no-counting")
        self.assertFalse(good)
        self.assertEqual([c["tokens_equal"] for c in lines if c["event"] == "cycle"], [True, False])

    def test_a_summary_leaves_the_first_cycle_out(self):
        good, lines = self.run_with(fake_engine(), "--mode", "poorwill", "--cycles", "4", "--summary")
        self.assertTrue(good)
        self.assertEqual([line["event"] for line in lines].count("cycle"), 1)
        self.assertEqual([c["cycles"] for c in lines if c["event"] == "summary"], [3])

    def test_without_sleep_mode_nothing_sleeps(self):
        good, lines = self.run_with(fake_engine(), "--mode", "none", "--throughput")
        self.assertTrue(good)
        self.assertEqual([line["event"] for line in lines], ["overwritten", "throughput", "reference"])


def fake_engine(spoil: int | None = None) -> types.ModuleType:
    """A module in the place of engine.py; the tokens are other ones after so many sleeps."""

    class Llm:
        def __init__(self, engine):
            self.engine = engine

        def sleep(self, level):
            self.engine.asleep, self.engine.sleeps = True, self.engine.sleeps + 1
            self.engine.dropped = level == 2
            self.engine.events.append({"operation": "sleep"})

        def wake_up(self, tags=None):
            self.engine.asleep = False

        def collective_rpc(self, method, **named):
            if method == "poorwill_mark_restored":
                self.engine.dropped = False
                return [["weights"]]
            raise AssertionError(method)

    class Engine:
        def __init__(self, mode):
            self.mode, self.model, self.llm = mode, object(), Llm(self)
            self.asleep, self.sleeps, self.events, self.dropped = False, 0, [], False

        def tokens(self):
            if self.asleep or (self.dropped and self.mode == "poorwill"):
                raise AssertionError("it is not ready")
            return [[0 if spoil is None or self.sleeps < spoil else 1]]

        def told(self):
            told, self.events = self.events, []
            return told

        def status(self):
            return {"host_bytes": 3 << 30, "undefined": ["weights"] if self.dropped else []}

        def prepare(self):
            return 0.25

        def throughput(self):
            return [100.0, 101.0, 99.0]

    def timed(action, *positional, **named):
        action(*positional, **named)
        return 0.125

    module = types.ModuleType("engine")
    module.timed = timed
    module.start = lambda mode, chosen, split: Engine(mode)
    module.settings = lambda path, **chosen: {"model": path, **chosen}
    module.fill_weights = lambda model, seed: (3, 0)
    module.fingerprint = lambda model: {"weights": 1}
    module.same = lambda before, after: before == after
    module.used_memory = lambda: 2 << 30
    return module


class Visit(Folder):
    def plan(self, *runs: plans.Run) -> dict[str, list[dict]]:
        with contextlib.redirect_stdout(io.StringIO()):
            self.failures = visit.visit({"some": list(runs)}, self.folder / "out", 60)
        lines = (self.folder / "out" / "some.jsonl").read_text().splitlines()
        return {run.name: [r for r in map(json.loads, lines) if r["run"] == run.name] for run in runs}

    def script(self, name: str, text: str, limit_s: float = 30, **environment: str) -> plans.Run:
        path = self.folder / f"{name}.py"
        path.write_text(text)
        return plans.Run(name, str(path), ["--mode", "x"], limit_s, environment)

    def test_lines_failures_and_logs_are_kept(self):
        kept = self.plan(
            self.script("good", "import json, os; print(json.dumps({'a': os.environ['B']}))", B="7"),
            self.script("bad", "import sys; print('no JSON'); sys.exit('it broke')"),
            self.script("late", "import time; print('{}', flush=True); time.sleep(60)", 3),
        )
        self.assertEqual(self.failures, 2)
        self.assertEqual(kept["good"][1]["line"], {"a": "7"})
        self.assertIsNone(kept["good"][2]["ended"]["failed"])
        self.assertIn("--mode x", kept["good"][0]["command"])
        self.assertTrue(kept["good"][0]["at"].endswith("+00:00"))
        self.assertEqual(kept["bad"][1]["text"], "no JSON")
        self.assertEqual(kept["bad"][2]["ended"]["failed"], "exit code 1")
        self.assertEqual(kept["late"][1]["line"], {})
        self.assertEqual(kept["late"][2]["ended"]["failed"], "still running after 3 s")
        self.assertIn("it broke", (self.folder / "out" / "some.log").read_text())

    def test_a_late_run_takes_all_that_it_started_with_it(self):
        pid = self.folder / "pid"
        text = (
            "import subprocess, time\n"
            "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
            f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
            "time.sleep(60)"
        )
        self.plan(self.script("late", text, 3))
        stat, end = Path(f"/proc/{int(pid.read_text())}/stat"), time.monotonic() + 30

        def runs() -> bool:
            try:
                return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
            except OSError:
                return False

        while runs():  # a kill takes its time
            self.assertLess(time.monotonic(), end)
            time.sleep(0.01)

    def test_nothing_begins_behind_the_deadline(self):
        run = self.script("good", "print(1)")
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(visit.visit({"some": [run]}, self.folder / "out", 0), 1)

    def test_the_plans_name_scripts_and_arguments_that_there_are(self):
        names = [run.name for runs in plans.PLANS.values() for run in runs]
        self.assertEqual(len(names), len(set(names)))
        for runs in plans.PLANS.values():
            for run in runs:
                self.assertTrue((HERE / run.script).is_file(), run)
                self.assertLessEqual(run.limit_s, 560)
                if run.script == "sleep.py":
                    sleep.parsed(run.arguments)
        self.assertEqual(set(visit.chosen(["dense", "moe"], "moe")), {"moe"})
        ran = subprocess.run([sys.executable, "-B", str(HERE / "visit.py"), "nobody"], capture_output=True)
        self.assertEqual(ran.returncode, 2)


class Reload(unittest.TestCase):
    def test_before_the_reload_poorwill_refuses(self):
        class Engine:
            def __init__(self, error):
                self.error = error

            def tokens(self):
                raise self.error

        ours = type("PoorwillError", (Exception,), {"__module__": "poorwill._native"})
        ours = type("NotReadyError", (ours,), {"__module__": "poorwill.vllm._engine"})
        for error, good in [(ours("reload"), True), (ValueError("reload"), False)]:
            seen = reload.refusal(Engine(error), [])
            self.assertEqual((seen["refused"], seen["poorwill_error"]), (True, good))
            record = {"tokens_equal": True, "bytes_equal": True, "before_reload": seen}
            self.assertEqual(reload.judged("poorwill", record), good)
            self.assertTrue(reload.judged("cumem", record))
        record["before_reload"] = None
        self.assertTrue(reload.judged("poorwill", record))
        self.assertFalse(reload.judged("poorwill", {**record, "bytes_equal": False}))

    def test_who_answers_is_compared(self):
        class Engine:
            def tokens(self):
                return [1]

        self.assertEqual(reload.refusal(Engine(), [2]), {"refused": False, "tokens_equal": False})


class TwoEngines(unittest.TestCase):
    def test_one_is_awake_at_a_time(self):
        asked = []

        class Child:
            def __init__(self, name):
                self.name = name

            def ask(self, what):
                asked.append(f"{self.name} {what}")
                return {"seconds": 0.5, "tokens_equal": self.name == "A"}

        lines = printed(
            lambda: self.assertFalse(two_engines.alternate([Child("A"), Child("B")], 1, lambda: 1 << 30))
        )
        expected = ["B sleep", "A wake", "A check", "A sleep", "B wake", "B check"]
        self.assertEqual(asked, expected)
        self.assertEqual([(line["awake"], line["ok"]) for line in lines], [("A", True), ("B", False)])

    def test_a_child_that_ends_is_an_error(self):
        child = two_engines.Child.__new__(two_engines.Child)
        child.name = "A"
        program = 'print("{\\"event\\": \\"other\\"}"); print("{\\"event\\": \\"answer\\", \\"x\\": 1}")'
        child.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with contextlib.redirect_stdout(io.StringIO()) as passed:
            self.assertEqual(child.answer(30)["x"], 1)
            with self.assertRaisesRegex(RuntimeError, "engine A ended with code 0"):  # noqa: PT027
                child.answer(30)
        self.assertEqual(json.loads(passed.getvalue()), {"event": "other"})
        child.process.stdin.close()
        child.process.stdout.close()


class Web(unittest.TestCase):
    def test_metrics_are_summed_over_their_labels(self):
        text = (
            "# HELP poorwill_failures_total x\n"
            'poorwill_failures_total{rank="0"} 1.0\npoorwill_failures_total{rank="1"} 2.0\n'
            'poorwill_operation_seconds_bucket{le="1"} 5.0\npoorwill_operation_seconds_count{a="b c"} 5.0\n'
            "poorwill_operation_seconds_created 1.0\nvllm:other 3.0\n"
        )
        expected = {"poorwill_failures_total": 3.0, "poorwill_operation_seconds_count": 5.0}
        self.assertEqual(web.families(text), expected)

    def test_answers(self):
        good = web.Answer(200, json.dumps({"choices": [{"token_ids": [1], "finish_reason": "length"}]}), 0.1)
        self.assertEqual(
            (good.tokens(), good.finish(), good.good, good.refused), ([1], "length", True, False)
        )
        for text in ["", "[]", "{}", '{"choices": []}']:
            self.assertIsNone(web.Answer(200, text, 0.1).tokens())
        lost = web.Answer(0, "ConnectionResetError: reset", 0.1)
        self.assertEqual((lost.refused, lost.hung), (False, False))
        self.assertTrue(web.Answer(0, "TimeoutError: timed out", 0.1).hung)
        self.assertTrue(server.says(web.Answer(400, "There is no tag Nonsense", 0.1), "nonsense"))
        self.assertFalse(server.says(web.Answer(200, "nonsense", 0.1), "nonsense"))

    def test_nobody_answers(self):
        answer = web.Client(web.free_port()).get("/health", limit_s=5)
        self.assertEqual(answer.status, 0)
        self.assertFalse(answer.hung)


class Card:
    """In the place of the ballast: a card of which a server takes what its file says."""

    def __init__(self, file: Path):
        self.file = file

    def free(self) -> int:
        used = 0
        with contextlib.suppress(OSError, ValueError):
            pid, size = self.file.read_text().split()
            used = int(size) if Path(f"/proc/{pid}/cmdline").exists() and web.name_of(int(pid)) else 0
        return (100 << 30) - used

    def settled(self, aim: int) -> int:
        return self.free()


class Server(Folder):
    """The steps, with a server that does what it should, and with one that does not."""

    def visitor(self, *flaws: str) -> server.Visitor:
        card = self.folder / "card"
        options = server.parsed(["--mode", "poorwill", "--kill-after-s", "0.1"])
        visitor = server.Visitor(options, self.folder, self.folder / "log", Card(card))

        def command(model, port, more):
            return [sys.executable, "-B", str(HERE / "fake_server.py"), str(port), str(card), ",".join(flaws)]

        patch = mock.patch.object(server, "server_command", command)
        patch.start()
        self.addCleanup(patch.stop)
        self.addCleanup(lambda: visitor.server and visitor.server.stop())
        look = mock.patch.object(server, "LOOK_S", 0.2)
        look.start()
        self.addCleanup(look.stop)
        return visitor

    def take(self, visitor: server.Visitor, steps: list) -> dict[str, dict]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            visitor.begin()
            for step in steps:
                server.take(visitor, step)
        return {line["step"]: line for line in map(json.loads, out.getvalue().splitlines())}

    def test_every_step_is_well_with_a_server_that_does_what_it_should(self):
        steps = [step for step in server.STEPS if step is not server.killed_in_a_sleep]
        lines = self.take(self.visitor(), steps)
        self.assertEqual([line for line in lines.values() if not line["ok"]], [])
        self.assertEqual(list(lines), [step.__name__ for step in steps])

    def test_a_kill_has_to_fall_into_the_sleep(self):
        line = self.take(self.visitor("sleeps_long"), [server.killed_in_a_sleep])["killed_in_a_sleep"]
        self.assertTrue(line["ok"] and line["in_the_middle"], line)

    def test_what_a_server_does_wrong_is_found_and_the_rest_goes_on(self):
        for flaw, step in {
            "forgets": server.level_1,
            "keeps_memory": server.level_1,
            "serves_half": server.weights_then_kv_cache,
            "takes_any_tag": server.unknown_tag,
            "takes_any_level": server.levels_that_there_are_not,
            "changes_level": server.twice_and_at_another_level,
            "gibberish": server.level_2,
            "no_metrics": server.metrics_move,
        }.items():
            with self.subTest(flaw):
                lines = self.take(self.visitor(flaw), [step])
                self.assertFalse(lines[step.__name__]["ok"], lines)

    def test_a_dead_server_is_started_again(self):
        visitor = self.visitor()

        def dies(visitor):
            visitor.server.process.kill()
            visitor.server.process.wait()
            return False, {}

        lines = self.take(visitor, [dies, server.level_1])
        self.assertEqual((lines["dies"]["ok"], lines["level_1"]["ok"]), (False, True))
        self.assertEqual(lines["level_1"]["before_that"], "started again")


def slept(**figures) -> dict:
    """A cycle's line."""
    line = {"event": "cycle", "sleep_s": 0.05, "wake_s": 0.25, "bytes_equal": True, "tokens_equal": True}
    return {**line, "used_asleep_gib": 0.9, "host_added": {"VmRSS": 21.5}, **figures}


class Table(Folder):
    def records(self, *runs: tuple[str, str, str, list[dict]]) -> Path:
        """A file as visit.py writes it."""
        path = self.folder / "some.jsonl"
        with path.open("w") as file:
            for name, mode, label, lines in runs:
                more = " --free-gib 21" if "tight" in label else ""
                head = {
                    "command": f"bench/peers/vllm/sleep.py --mode {mode}{more}",
                    "at": "2026-11-21T10:00:00",
                }
                file.write(json.dumps({"run": name, **head}) + "\n")
                for line in lines:
                    said = {"mode": mode, "label": label, **line}
                    file.write(json.dumps({"run": name, "line": said}) + "\n")
                file.write(json.dumps({"run": name, "ended": {"failed": None, "seconds": 1.0}}) + "\n")
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
        level2 = {**slept(event="level2", sleep_s=0.02, wake_s=0.03)}
        path = self.records(
            ("a", "cumem", "dense", [start, slept(sleep_s=9.0), slept(sleep_s=0.3), slept(sleep_s=0.4)]),
            (
                "b",
                "poorwill",
                "dense",
                [start, slept(first="as-is", sleep_s=0.5, host_held_gib=15.3), level2],
            ),
            ("c", "poorwill", "dense-prepared", [start, slept(first="prepared", sleep_s=0.09)]),
            ("d", "poorwill", "dense-prepared", [start, slept(first="prepared", sleep_s=0.06), slept()]),
        )
        rows = self.rows(path, "sleeping")
        self.assertEqual(rows["weights"], ["15.27 GiB", "15.27 GiB"])
        self.assertEqual(rows["first sleep, prepared"], ["9.00 s", "90 ms", "100.00"])
        self.assertEqual(rows["first sleep, weights changed since the start"], ["9.00 s", "500 ms", "18.00"])
        self.assertNotIn("first sleep, nothing in the background", rows)
        self.assertEqual(rows["later sleep"], ["350 ms", "50 ms", "7.00"])
        self.assertEqual(rows["level 2 sleep"], ["-", "20 ms", "-"])
        self.assertEqual(rows["host memory held"], ["21.50 GiB", "15.30 GiB", "1.41"])
        self.assertEqual(rows["checked"], ["all 3 equal", "all 5 equal"])

    def test_thirty_cycles_and_what_is_wrong(self):
        spread = {"median": 0.05, "min": 0.04, "max": 0.08}
        line = {"event": "summary", "cycles": 30, "sleep_s": spread, "wake_s": spread}
        good = {**line, "bytes_equal": True, "tokens_equal": True}
        rows = self.rows(self.records(("a", "poorwill", "thirty", [slept(first="as-is"), good])), "sleeping")
        self.assertEqual(rows["longest of later wakes"], ["-", "80 ms", "-"])
        self.assertEqual(rows["checked"], ["-", "all 31 equal"])
        bad = {**good, "tokens_equal": False}
        rows = self.rows(self.records(("a", "poorwill", "thirty", [slept(first="as-is"), bad])), "sleeping")
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
            ("a", "cumem", "mxfp8-split20", [load(29.86, 16.28)]),
            ("b", "poorwill", "mxfp8-split20", [load(17.6, 16.0)]),
            ("c", "cumem", "mxfp8-tight", [card, failed]),
            ("d", "poorwill", "mxfp8-tight", [card, load(17.6, 16.0), done]),
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
            ("a", "none", "speed-1", run(1000.0, 20.0)),
            ("b", "none", "speed-2", run(1020.0, 22.0)),
            ("c", "poorwill", "speed-1", run(1005.0, 21.42)),
        )
        rows = self.rows(path, "speed")
        self.assertEqual(rows["tokens a second"], ["1,010", "1,005 (0.995x)"])
        self.assertEqual(rows["start"], ["21.00 s", "21.42 s (1.020x)"])

    def test_everything_else_and_the_commands(self):
        path = self.records(
            ("a", "poorwill", "server", [{"event": "step", "step": "level_1", "ok": True}]),
            ("b", "cumem", "server", [{"event": "step", "step": "level_1", "ok": False}]),
            ("c", "poorwill", "two", [{"event": "turn", "ok": ok} for ok in (True, False, True)]),
        )
        rows = self.rows(path, "steps")
        self.assertEqual(rows["server: level 1"], ["NO", "yes"])
        self.assertEqual(rows["two: turn"], ["-", "NO"])
        whole = self.table(path).stdout
        self.assertIn("- `bench/peers/vllm/sleep.py --mode poorwill`, 2026-11-21", whole)
        self.assertNotIn("### Sleeping", whole)

    def test_what_cannot_be_read_is_said(self):
        for text in ['{"run": ', '{"line": {}}']:
            path = self.folder / "some.jsonl"
            path.write_text(text)
            ran = self.table(path)
            self.assertEqual(ran.returncode, 1)
            self.assertTrue(ran.stderr.startswith("cannot read what visit.py wrote: "), ran.stderr)
        ran = self.table(self.records(("a", "none", "x", [{"event": "import"}])), "--only", "speed")
        self.assertEqual((ran.returncode, ran.stderr), (1, "there are no figures for that\n"))


class Connectors(unittest.TestCase):
    """A pair that a stand-in plays: what one has computed the other reads, unless it is told not to."""

    def setUp(self):
        self.read, self.asked, self.moves, self.params = 0.0, [], True, {"remote_engine_id": "a"}

    def ask(self, path: str, body: dict) -> web.Answer:
        self.asked.append(body)
        params = body.get("kv_transfer_params", {})
        if params.get("do_remote_decode"):
            said = {"choices": [{"token_ids": [1]}], "kv_transfer_params": self.params}
        else:
            self.read += 64.0 if self.moves and params else 0.0
            said = {"choices": [{"token_ids": [1, 2]}]}
        return web.Answer(200, json.dumps(said), 0.1)

    def get(self, path: str) -> web.Answer:
        lines = [f'{connectors.HITS}_total{{engine="0"}} {self.read}', f"{connectors.HITS}_created 5"]
        return web.Answer(200, "\n".join(lines), 0.1)

    def passed(self, reference: list[int]) -> tuple[bool, dict]:
        return connectors.passed(self, self, reference)  # type: ignore[arg-type]

    def test_a_prompt_passes_from_one_to_the_other(self):
        ok, seen = self.passed([1, 2])
        self.assertTrue(ok)
        self.assertEqual((seen["read_tokens"], seen["tokens_equal"]), (64.0, True))
        self.assertEqual([body["max_tokens"] for body in self.asked], [1, web.NEW_TOKENS])
        self.assertEqual(self.asked[1]["kv_transfer_params"], {"remote_engine_id": "a"})

    def test_other_tokens_and_tokens_that_were_computed_anew_do_not_count(self):
        self.assertFalse(self.passed([1, 3])[0])
        self.moves = False
        self.assertFalse(self.passed([1, 2])[0])
        self.params = None
        ok, seen = self.passed([1, 2])
        self.assertFalse(ok)
        self.assertEqual(seen["prefill"]["status"], 200)

    def test_without_nixl_it_says_so(self):
        def main() -> None:
            with self.assertRaises(SystemExit) as ended:
                connectors.main()
            self.assertEqual(ended.exception.code, connectors.NO_NIXL)

        nothing = mock.patch.object(connectors.importlib.util, "find_spec", return_value=None)
        with nothing, mock.patch.object(sys, "argv", ["connectors.py"]):
            [line] = printed(main)
        self.assertEqual(line["event"], "skipped")
        self.assertIn("pip install nixl", line["why"])


class Scripts(unittest.TestCase):
    def test_every_script_is_python(self):
        for path in HERE.glob("*.py"):
            ast.parse(path.read_text(), str(path))

    def test_who_asks_gets_help_without_a_gpu(self):
        names = ["sleep", "reload", "two_engines", "ranks", "bad_input", "server", "connectors"]
        for name in [*names, "visit", "table"]:
            ran = subprocess.run(
                [sys.executable, "-B", str(HERE / f"{name}.py"), "--help"], capture_output=True, text=True
            )
            self.assertEqual(ran.returncode, 0, ran.stderr)


if __name__ == "__main__":
    unittest.main()
