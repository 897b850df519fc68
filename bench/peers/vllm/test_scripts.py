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
import types
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import common  # noqa: E402
import models  # noqa: E402
import server  # noqa: E402
import sleep  # noqa: E402
import web  # noqa: E402

SCRIPTS = ["sleep", "server", "table", "connectors"]


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
        # All of the weights were written, so no call has to say so.
        self.assertEqual((level2[0]["undefined"], "restored" in level2[0]), ([], False))
        self.assertTrue(level2[0]["tokens_equal"])
        cycles = [line for line in lines if line["event"] == "cycle"]
        self.assertEqual([cycle["first"] for cycle in cycles], ["prepared", None, None])
        self.assertEqual(cycles[0]["sleep_reported"], [{"operation": "sleep"}])

    def test_what_the_weights_are_overwritten_with_can_be_chosen(self):
        for words, normal in [([], False), (["--fill", "normal"], True)]:
            module = fake_engine()
            asked = ["--mode", "cumem", "--no-counting", "--changed", "--level2", *words]
            good, _ = self.run_with(module, *asked)
            self.assertTrue(good)
            self.assertEqual(module.filled, [(seed, normal) for seed in [1234, 1235, 1235, 1235]])

    def test_weights_that_cannot_be_written_count_as_whole(self):
        _, lines = self.run_with(fake_engine(quantised=2), "--mode", "poorwill", "--level2")
        level2 = [line for line in lines if line["event"] == "level2"]
        self.assertEqual(level2[0]["undefined"], ["weights"])
        self.assertEqual(level2[0]["restored"], ["weights"])
        self.assertNotIn("tokens_equal", level2[0])

    def test_what_does_not_go_together_is_refused(self):
        for words in ["--offload-graphs", "--expandable --max-split-mib 20"]:
            with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(SystemExit):  # noqa: PT027
                sleep.parsed(["--mode", "poorwill", *words.split()])
            self.assertIn(words.split()[0], said.getvalue())
        sleep.parsed(["--mode", "poorwill", "--graphs", "--offload-graphs"])

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


def fake_engine(spoil: int | None = None, quantised: int = 0) -> types.ModuleType:
    """A module in the place of engine.py; the tokens are other ones after so many sleeps, and so many of the
    weights are quantised."""

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

        def reported(self):
            reported, self.events = self.events, []
            return reported

        def status(self):
            return {"host_bytes": 3 << 30, "undefined": ["weights"] if self.dropped else []}

        def prepare(self):
            return 0.25

        def throughput(self):
            return [100.0, 101.0, 99.0]

    def timed(action, *positional, **named):
        action(*positional, **named)
        return 0.125

    def start(mode, chosen, split):
        module.engine = Engine(mode)
        return module.engine

    def fill_weights(model, seed, normal):
        module.filled.append((seed, normal))
        # What is quantised cannot be written so.
        module.engine.dropped = module.engine.dropped and bool(quantised)
        return 3, quantised

    module = types.ModuleType("engine")
    module.filled = []
    module.timed = timed
    module.start = start
    module.settings = lambda path, **chosen: {"model": path, **chosen}
    module.fill_weights = fill_weights
    module.fingerprint = lambda model: {"weights": 1}
    module.same = lambda before, after: before == after
    module.used_memory = lambda: 2 << 30
    return module


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

    def test_no_server_answers(self):
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
        card = self.folder / "-".join(["card", *flaws])
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
            "stays": server.hibernated,
            "wakes_it": server.hibernated,
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


class Scripts(unittest.TestCase):
    def test_every_script_is_python(self):
        for path in HERE.glob("*.py"):
            ast.parse(path.read_text(), str(path))

    def test_who_asks_gets_help_without_a_gpu(self):
        for name in SCRIPTS:
            ran = subprocess.run(
                [sys.executable, "-B", str(HERE / f"{name}.py"), "--help"], capture_output=True, text=True
            )
            self.assertEqual(ran.returncode, 0, ran.stderr)


if __name__ == "__main__":
    unittest.main()
