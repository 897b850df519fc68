#!/usr/bin/env python3
"""Holds the scripts here to what they say, as far as no GPU, no PyTorch and no vLLM are needed for it."""

# There may be no pytest where this runs.
# ruff: noqa: PT009

import ast
import contextlib
import io
import itertools
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
import long_answers  # noqa: E402
import models  # noqa: E402
import rotation  # noqa: E402
import same_bytes  # noqa: E402
import server  # noqa: E402
import sleep  # noqa: E402
import taken  # noqa: E402
import turns  # noqa: E402
import web  # noqa: E402

SCRIPTS = ["sleep", "same_bytes", "server", "table", "connectors", "turns", "long_answers"]


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


class SameBytes(Folder):
    def start(self, memory: bytes, tensors: list[tuple[int, int, str]]) -> list[dict]:
        """Of a segment at 10 MiB whose last block is free."""
        mib, at = 1 << 20, 10 << 20
        blocks = [
            {"addr": at, "bytes": 5 * mib, "kind": "live"},
            {"addr": at + 5 * mib, "bytes": 3 * mib, "kind": "unmapped"},
        ]
        placed = [(at + first, size, name) for first, size, name in tensors]

        def read(addr: int, size: int) -> bytes:
            return memory[addr - at : addr - at + size]

        return same_bytes.granules([{"addr": at, "blocks": blocks}], placed, read)

    def test_granules_are_compared_by_place_content_and_owner(self):
        tensors = [(0, 3 << 20, "a"), (4 << 20, 100, "b")]
        memory = bytearray(b"".join(bytes([value]) * (2 << 20) for value in (1, 2, 3, 4)))
        first = self.start(bytes(memory), tensors)
        self.assertEqual([granule["names"] for granule in first], [["a"], ["a"], ["b"]])
        same = same_bytes.compared([first, self.start(bytes(memory), tensors)])
        self.assertEqual((same["same_place"], same["same_content"]), ([3], [3]))
        self.assertEqual(same["distinct"], [3, 3])
        memory[(4 << 20) + 200] = 9  # of no tensor
        memory[5] = 9
        other = same_bytes.compared([first, self.start(bytes(memory), tensors)])
        self.assertEqual((other["same_place"], other["same_content"]), ([1], [1]))
        self.assertEqual((other["other_bytes_only"], other["tensors_differ"]), ([1], [{"a": 1}]))
        moved = [{**granule, "place": [1, nth]} for nth, granule in enumerate(first)]
        moved = same_bytes.compared([first, moved])
        self.assertEqual((moved["same_place"], moved["same_content"]), ([0], [3]))


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


def swap(model: str, at_ms: int, total_s: float, whole_s: float, left: list[dict]) -> dict:
    phases = [["waking", total_s]]
    figures = {"path": "hot", "total_s": total_s, "whole_s": whole_s, "phases": phases, "left": left}
    return {"model": model, "at_unix_ms": at_ms, **figures}


def toml(path: Path) -> dict:
    try:
        import tomllib
    except ImportError as error:
        raise unittest.SkipTest("this Python reads no TOML") from error
    return tomllib.loads(path.read_text())


class TurnFigures(unittest.TestCase):
    def test_draws_follow_the_law_and_the_seed(self):
        def some(count: int, exponent: float = 1.0, seed: int = 1) -> list[str]:
            return list(itertools.islice(taken.draws(["a", "b", "c"], exponent, seed), count))

        self.assertEqual(some(50), some(50))
        self.assertNotEqual(some(50), some(50, seed=2))
        for exponent, shares in [(1.0, [6 / 11, 3 / 11, 2 / 11]), (0.0, [1 / 3] * 3)]:
            drawn = some(11_000, exponent)
            for name, share in zip("abc", shares, strict=True):
                self.assertAlmostEqual(drawn.count(name) / len(drawn), share, delta=0.02)

    def test_a_request_has_the_swap_of_its_model_that_ended_meanwhile(self):
        took = [(("a", 1000, 1100), True), (("a", 1200, 1900), True), (("b", 2000, 2500), False)]
        requests = [taken.Taken(*which, right) for which, right in took]
        left = {"model": "b", "phases": [["draining", 0.1], ["falling asleep", 0.2]]}
        swaps = [
            swap("a", 1900, 0.4, 0.7, [left]),
            swap("b", 1999, 0.2, 0.2, []),
            swap("a", 2400, 0.3, 0.3, []),
        ]
        line = taken.summary(requests, swaps)
        self.assertEqual((line["requests"], line["right"], line["swaps"]), (3, 2, 3))
        self.assertEqual(line["with_swap_s"], {"count": 1, "p50": 0.7, "p90": 0.7, "max": 0.7})
        self.assertEqual(line["without_swap_s"], {"count": 2, "p50": 0.3, "p90": 0.5, "max": 0.5})
        self.assertEqual((line["by_model"], line["paths"]), ({"a": 2, "b": 1}, {"hot": 3}))
        self.assertEqual((line["coming_s"]["p50"], line["swap_s"]["max"]), (0.3, 0.7))
        self.assertEqual(line["coming_phases_s"], {"waking": 0.3})
        self.assertEqual(line["leaving_phases_s"], {"draining": 0.1, "falling asleep": 0.2})
        self.assertIsNone(taken.summary([], [])["request_s"])

    def test_percentiles(self):
        figures = taken.spread(place / 10 for place in range(10, 0, -1))
        self.assertEqual(figures, {"count": 10, "p50": 0.55, "p90": 0.9, "max": 1.0})

    def test_bytes_by_operation_are_summed_over_engines(self):
        text = (
            'poorwill_copied_bytes_total{engine="0",operation="wake",rank="0"} 3.221225472e+09\n'
            'poorwill_copied_bytes_total{engine="0",operation="load",rank="0"} 7.0\n'
            'poorwill_lent_bytes_total{operation="sleep",engine="0",rank="0"} 1073741824.0\n'
            'poorwill_operation_seconds_count{operation="wake"} 2.0\n'
        )
        sums = taken.copies([text, text])
        self.assertEqual(sums, {"wake_copied_bytes": 6 << 30, "sleep_lent_bytes": 2 << 30})
        before = taken.copies([text])
        self.assertEqual(taken.grown(sums, before), {"sleep_lent_gib": 1.0, "wake_copied_gib": 3.0})
        self.assertEqual((taken.grown(sums, None), taken.grown(None, before)), (None, None))

    def test_only_a_whole_answer_says_something(self):
        def answer(status: int = 200, **choice) -> web.Answer:
            return web.Answer(status, json.dumps({"choices": [{"finish_reason": "length", **choice}]}), 0.1)

        self.assertEqual(taken.said(answer(token_ids=[1, 2], text="")), [1, 2])
        self.assertEqual(taken.said(answer(text="so")), "so")
        for none in [
            answer(503, text="so"),
            answer(text="so", finish_reason="abort"),
            web.Answer(0, "", 0.1),
        ]:
            self.assertIsNone(taken.said(none))


class Turns(Folder):
    def rotation(self, mode: str, *words: str) -> rotation.Rotation:
        options = turns.parsed(["--mode", mode, "--poorwill", "/bin/poorwill", "--seconds", "0", *words])
        paths = [None if options.plays else self.folder / f"model-{nth}" for nth in range(options.engines)]
        return rotation.Rotation(options, self.folder, paths, 0.1)

    def test_each_mode_has_its_configuration(self):
        for mode in turns.MODES:
            made = self.rotation(mode, "--engines", "2", "--kv-gib", "2")
            config = toml(made.config)
            plays, lends = mode.startswith("stand-in"), mode.endswith("-lending")
            self.assertEqual("lend" in config, lends)
            self.assertEqual("folder" in config["memory"], plays and lends)
            self.assertEqual(config["memory"]["measure"], "processes" if plays else "devices")
            self.assertEqual([model["name"] for model in config["model"]], ["m0", "m1"])
            for nth, model in enumerate(config["model"]):
                port = made.ports[model["name"]]
                self.assertEqual((model["url"], model["level"]), (f"http://127.0.0.1:{port}", 1))
                self.assertEqual(model["canary"], {"kind": "none"})
                self.assertEqual(model["served_as"], f"m{nth}" if plays else "bench")
                command = " ".join(model["command"])
                self.assertIn(str(port), command)
                self.assertEqual("--device" in command, plays and lends)
                own = "--model m" if plays else f"model-{nth} "
                cache = f"--kv-cache-memory-bytes {2 << 30} --gpu-memory-utilization 0.1"
                self.assertTrue(own in command and (plays or command.endswith(cache)), command)

    def test_a_line_of_turns_is_well_only_if_all_was(self):
        def take(made: rotation.Rotation, right: bool = True) -> bool:
            starts = iter([{"m0": 1}, {"m0": made.started}])

            def one(name: str) -> None:
                made.taken.append(taken.Taken(name, 1, 2, right))

            def counts() -> dict:
                return {"engines": {}, "broker": None, "failed": {}, "starts": next(starts)}

            with mock.patch.multiple(made, take=one, counts=counts):
                results = []
                [line] = printed(lambda: results.append(turns.turns(made, made.until)))
            self.assertEqual((line["requests"], line["right"]), (2, 2 * right))
            return results[0]

        for starts, until, right in [(1, 1e12, True), (2, 1e12, True), (1, 0.0, True), (1, 1e12, False)]:
            made = self.rotation("stand-in", "--clients", "2")
            made.started, made.until = starts, until
            with self.subTest(starts=starts, until=until, right=right):
                self.assertEqual(take(made, right), (starts, until, right) == (1, 1e12, True))

    def long_answers(self, last: list[int] | None) -> tuple[bool, dict]:
        """Of two streams alone, and of two together of which the second says this."""
        made = self.rotation("stand-in")
        made.names, made.options.twice, made.options.spoil = ["m0", "m1"], False, False
        made.options.streams, made.options.slices = [1], [2.0]
        answers, results = iter([[1, 2], [1, 2], [1, 2], last]), []

        def run(stream):
            stream.said, stream.at = next(answers), [0.1, 0.2, 2.4]
            return stream

        counts = {"starts": {"m0": 1, "m1": 1}, "failed": {"failures": 0}, "engines": None}
        made.front = mock.Mock()
        made.front.stream.return_value.brief.return_value = {}
        with (
            mock.patch.object(long_answers.Stream, "run", run),
            mock.patch.object(long_answers, "cuts", return_value=0),
            mock.patch.multiple(made, counts=lambda: counts, slice=lambda seconds: None),
        ):
            lines = printed(lambda: results.append(long_answers.compare(made)))
        return results[0], next(line for line in lines if line["event"] == "together")

    def test_long_answers_are_well_only_if_all_say_what_they_said_alone(self):
        for last, well in [([1, 2], True), ([1, 3], False), (None, False)]:
            with self.subTest(last=last):
                result, line = self.long_answers(last)
                self.assertEqual((result, line["equal"]), (well, 1 + well))
                self.assertEqual((line["waits"]["count"], line["wait_max_s"]), (4, 2.2))

    def test_what_a_rotation_leaves_is_named_and_killed(self):
        made = self.rotation("stand-in")
        command = ["sh", "-c", "sleep 600 >&- & echo; wait"]
        made.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        made.process.stdout.readline()
        [pid] = common.descendants(made.process.pid, common.parents())
        results = []
        with mock.patch.object(rotation, "LEFT_S", 0):
            [line] = printed(lambda: results.append(made.end(60)))
        self.assertEqual((results, line["processes"], len(line["left"])), ([False], 1, 1))
        made.process.stdout.close()
        until = time.monotonic() + 60
        while common.name_of(pid) and time.monotonic() < until:
            time.sleep(0.01)
        self.assertEqual(common.name_of(pid), "")

    def test_a_checkpoint_that_is_there_is_taken(self):
        options, wrote = turns.parsed(["--mode", "cumem", "--gib", "1"]), []

        def write(folder: Path, layers: int, seed: int) -> Path:
            wrote.append((layers, seed))
            (folder / "checkpoint").mkdir(parents=True)
            (folder / "checkpoint" / "config.json").touch()
            return folder / "checkpoint"

        with mock.patch.object(turns, "write_checkpoint", write):
            paths = [turns.checkpoint(options, self.folder, seed) for seed in [0, 1, 0, 1]]
        self.assertEqual(wrote, [(models.layers_for(1), 0), (models.layers_for(1), 1)])
        self.assertEqual((paths[:2], len(set(paths))), (paths[2:], 2))


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
