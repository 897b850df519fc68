#!/usr/bin/env python3
"""Holds bad_input.py, budgets.py, variants.py, offload_engine.py and pruner.py to what they say, as far as no
GPU and no vLLM are needed.
"""

# There may be no pytest where this runs.
# ruff: noqa: PT009

import contextlib
import functools
import io
import json
import os
import sys
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import bad_input  # noqa: E402
import budgets  # noqa: E402
import common  # noqa: E402
import offload_engine  # noqa: E402
import pruner  # noqa: E402
import variants  # noqa: E402
from test_scripts import printed  # noqa: E402


class Budgets(unittest.TestCase):
    SAID = "POORWILL_BUDGET=0.88 allows the engine 88 GiB: give --kv-cache-memory-bytes 41943040"

    def engine(self, allowed: int, cache: int, used: int = 0) -> dict:
        names = ("pass_bytes", "graphs_estimated_bytes", "graphs_bytes")
        line = {"event": "engine", "allowed_bytes": allowed, "cache_bytes": cache, **dict.fromkeys(names, 0)}
        return {**line, "used_bytes": used, "used_serving_bytes": used, "kv_blocks": 1, "runner": "r"}

    def compared(self, answer) -> tuple[bool, list[dict]]:
        results = []
        with mock.patch.object(budgets, "run", answer), tempfile.TemporaryDirectory() as folder:
            compare = functools.partial(budgets.compare, [0.95, 0.92, 0.88], False, Path(folder))
            lines = printed(lambda: results.append(compare()))
        return results[0], lines

    def answer(self, way: str, share: float, kv_bytes: int, *rest: Any) -> dict:
        """As an engine that is as it should be."""
        allowed = int(share * 100 * common.GIB)
        cache = kv_bytes or allowed - 60 * common.GIB
        if kv_bytes > allowed - 60 * common.GIB:
            return {"event": "refused", "error": self.SAID, "error_type": "BudgetError"}
        return self.engine(allowed, cache, allowed)

    def test_what_is_no_two_shares_is_refused(self):
        for shares in ["2,0.9", "0.9", "0.9,0.9", "0.9,x", "0,0.5", ""]:
            with (
                mock.patch.object(sys, "argv", ["budgets.py", "--shares", shares]),
                contextlib.redirect_stderr(io.StringIO()) as said,
                self.assertRaises(SystemExit) as ended,  # noqa: PT027
            ):
                budgets.main()
            self.assertEqual(ended.exception.code, 2)
            self.assertIn(f"--shares is {shares}", said.getvalue())

    def test_three_shares_and_a_cache_that_is_given(self):
        good, lines = self.compared(self.answer)
        self.assertTrue(good)
        found = [line["way"] for line in lines if line["event"] == "budget"]
        self.assertEqual(
            found,
            ["utilization"] * 3 + ["budget"] * 3 + ["budget-and-cache", "budget-and-fitting-cache"],
        )
        self.assertEqual(lines[-1]["cache_gib"], common.gib(41943040))

    def test_what_came_of_an_engine_is_said_before_the_next_one_starts(self):
        reported, paths = [], []

        def answer(*asked: object) -> dict:
            paths.append(asked[-1] / "config.json")
            self.assertTrue(paths[-1].is_file())
            reported.append(said.getvalue().count('"event": "budget"'))
            return self.answer(*asked)

        with contextlib.redirect_stdout(io.StringIO()) as said, tempfile.TemporaryDirectory() as folder:
            with mock.patch.object(budgets, "run", answer):
                self.assertTrue(budgets.compare([0.95, 0.92], False, Path(folder)))
        self.assertEqual(reported, [0, 1, 2, 3, 4, 5])
        self.assertEqual(len(set(paths)), 1)

    def test_what_is_wrong_is_no_success(self):
        def same(way: str, share: float, kv_bytes: int, *rest: Any) -> dict:
            line = self.answer(way, share, kv_bytes, *rest)
            return {**line, "cache_bytes": 20 * common.GIB} if not kv_bytes else line

        def beyond(way: str, share: float, kv_bytes: int, *rest: Any) -> dict:
            line = self.answer(way, share, kv_bytes, *rest)
            return {**line, "used_serving_bytes": line.get("used_serving_bytes", 0) + 1}

        def never_refused(way: str, share: float, kv_bytes: int, *rest: Any) -> dict:
            return self.engine(100, kv_bytes) if kv_bytes else self.answer(way, share, 0, *rest)

        def never_started(*_: object, **__: object) -> dict:
            return {"event": "failed", "error": "ended with code -9"}

        for wrong in (same, beyond, never_refused, never_started):
            self.assertFalse(self.compared(wrong)[0], wrong.__name__)

    def test_utilization_does_not_bind(self):
        self.assertTrue(budgets.is_within("utilization", self.engine(10, 1, 11)))
        self.assertFalse(budgets.is_within("budget", self.engine(10, 1, 11)))
        self.assertTrue(budgets.is_within("budget", self.engine(10, 1, 10)))


class BadInput(unittest.TestCase):
    def test_what_counts_as_a_good_refusal(self):
        case = self.case("budget-nonsense")

        def judged(outcome: dict | None, log: str = "") -> dict:
            lines = [{"event": "outcome", **outcome}] if outcome else []
            return bad_input.judged(case, lines, 0, log)

        said = {"at": "start", "error_type": "ValueError", "error": "POORWILL_BUDGET is nonsense"}
        self.assertTrue(judged(said)["ok"])
        self.assertFalse(judged({**said, "error": "no"}, "POORWILL_BUDGET")["ok"])
        self.assertEqual(
            judged({**said, "error": "no"}, "POORWILL_BUDGET")["only_the_log_names"][0][:8], "POORWILL"
        )
        self.assertFalse(judged({**said, "at": "later"})["ok"])
        self.assertFalse(judged(None)["ok"])

    def test_nothing_may_be_broken_afterwards(self):
        case = self.case("tag-unknown")
        outcome = {"event": "outcome", "at": "later", "error": "no nonsense: weights, kv_cache"}
        for equal in [True, False]:
            lines = [outcome, {"event": "afterwards", "tokens_equal": equal}]
            self.assertEqual(bad_input.judged(case, lines, 0, "")["ok"], equal)

    def test_an_engine_that_was_not_looked_at_afterwards_is_no_success(self):
        case = self.case("level-unknown")
        outcome = {"event": "outcome", "at": "later", "error": "level is 7"}
        self.assertFalse(bad_input.judged(case, [outcome], 1, "")["ok"])

    def test_settings_are_refused_before_anything_is_loaded(self):
        lines = [{"event": "load"}, {"event": "outcome", "at": "start", "error": "POORWILL_BUDGET nonsense"}]
        self.assertFalse(bad_input.judged(self.case("budget-nonsense"), lines, 0, "")["ok"])
        lines[1]["error"] = "POORWILL_BUDGET, kv_cache_memory_bytes, weights"
        self.assertTrue(bad_input.judged(self.case("budget-without-room"), lines, 0, "")["ok"])

    def test_the_cases_have_names_of_their_own(self):
        names = [case.name for case in bad_input.CASES]
        self.assertEqual(len(names), len(set(names)))

    def test_cases_share_a_process_that_cannot_change_what_comes_of_them(self):
        processes = bad_input.together(bad_input.CASES)
        self.assertEqual(sorted(case.name for cases in processes for case in cases), sorted(self.by_name))
        shared = {cases[0].process: cases for cases in processes if len(cases) > 1}
        self.assertEqual(set(shared), {bad_input.SETTINGS, bad_input.ENGINE})
        self.assertEqual({case.refused for case in shared[bad_input.SETTINGS]}, {"start"})
        for case in shared[bad_input.ENGINE]:
            self.assertEqual((case.environment, case.settings), ({}, {}))
            self.assertNotEqual(case.refused, "start")
        # A start takes about 15 s on the machine that this is for.
        self.assertLessEqual(len(processes), 8)

    def case(self, name: str) -> bad_input.Case:
        return self.by_name[name]

    @property
    def by_name(self) -> dict[str, bad_input.Case]:
        return {case.name: case for case in bad_input.CASES}

    def child(self, module: types.ModuleType, *cases: bad_input.Case) -> dict[str, list[dict]]:
        """What a process says, by case, with a module in the place of engine.py."""
        patches = [
            mock.patch.dict(sys.modules, {"engine": module}),
            mock.patch.dict(os.environ),
            mock.patch.dict(common._fields),
            contextlib.redirect_stderr(io.StringIO()),
        ]
        with contextlib.ExitStack() as stack:
            self.log = [stack.enter_context(patch) for patch in patches][-1]
            lines = printed(lambda: bad_input.child(list(cases)))
        return {case.name: [line for line in lines if line["case"] == case.name] for case in cases}

    def test_one_engine_for_all_cases_of_its_process(self):
        module = obedient_engine()
        [cases] = [cases for cases in bad_input.together(bad_input.CASES) if cases[0].name == "good"]
        lines = self.child(module, *cases)
        self.assertEqual(module.starts, [{}])
        for case in cases:
            log = bad_input.complaints_of(case, self.log.getvalue())
            record = bad_input.judged(case, lines[case.name], 0, log)
            self.assertTrue(record["ok"], record)
            self.assertEqual("Error" in log, case.refused != "never")

    def test_every_setting_is_tried_in_its_environment_and_no_other(self):
        module = obedient_engine()
        [cases] = [cases for cases in bad_input.together(bad_input.CASES) if cases[0].process == "settings"]
        lines = self.child(module, *cases)
        self.assertEqual(module.starts, [case.environment for case in cases])
        seen = {name: line for name, [line] in lines.items()}
        self.assertEqual({line["at"] for line in seen.values()}, {"start"})
        self.assertIn("POORWILL_PREPARE=maybe", seen["prepare-nonsense"]["error"])

    def test_a_case_that_starts_against_expectation_ends_the_process(self):
        module = obedient_engine(accepts="switch-nonsense")
        first, second = self.case("switch-nonsense"), self.case("prepare-nonsense")
        lines = self.child(module, first, second)
        self.assertEqual([line["at"] for line in lines[first.name]], ["never"])
        self.assertEqual(lines[second.name], [])

    def test_the_call_that_breaks_the_engine_differs_from_later_ones(self):
        cases = [self.case(name) for name in ["good", "tag-unknown", "level-unknown"]]
        good = {"event": "outcome", "at": "never"}, {"event": "afterwards", "tokens_equal": True}

        def command(asked: list[bad_input.Case]) -> list[str]:
            program = "import sys\n"
            for case in asked:
                program += f"print({bad_input.BEGINS + case.name!r}, file=sys.stderr)\n"
                if case.name == "tag-unknown":
                    program += "sys.exit('it broke')"
                    break
                for line in good:
                    program += f"print({json.dumps({**line, 'case': case.name})!r})\n"
            return [sys.executable, "-c", program]

        with mock.patch.object(bad_input, "command", command):
            records = list(bad_input.run(cases))
        self.assertEqual([record["case"] for record in records], [case.name for case in cases])
        self.assertEqual([record["ok"] for record in records], [True, False, False])
        self.assertEqual([record["seen"] for record in records], ["never", "ended without a word", "never"])
        self.assertEqual([record["last_lines"] for record in records], [[], ["it broke"], []])
        self.assertEqual([len(record["process"]) for record in records], [2, 2, 1])


def obedient_engine(accepts: str = "") -> types.ModuleType:
    """A module in the place of engine.py that refuses what it should, all but one environment."""
    usual = {case.name: case.environment for case in bad_input.CASES}
    wrong = {name: value for environment in usual.values() for name, value in environment.items()}

    class Llm:
        asleep = 0

        def sleep(self, level):
            if level == 7:
                raise ValueError("sleep: level is 7; it is 0, 1 or 2")
            if self.asleep and level != self.asleep:
                raise RuntimeError(f"the engine sleeps at level {self.asleep}, not at level {level}")
            self.asleep = level

        def wake_up(self, tags=None):
            if tags:
                raise ValueError(f"no tag {tags}: there are weights, kv_cache")
            self.asleep = 0

    class Engine:
        def __init__(self):
            self.llm = Llm()

        def tokens(self):
            return [[self.llm.asleep]]

    def start(mode, chosen):
        given = {name: os.environ[name] for name in wrong if name in os.environ}
        module.starts.append(given)
        if given != usual.get(accepts, {}) or not chosen["enable_sleep_mode"]:
            raise ValueError(f"{given}: {', '.join(f'{name}={value}' for name, value in given.items())}")
        return Engine()

    module = types.ModuleType("engine")
    module.starts = []
    module.start = start
    module.settings = lambda path, **chosen: {"enable_sleep_mode": True, **chosen}
    module.WrongAllocatorError = RuntimeError
    return module


class Lora(unittest.TestCase):
    """Loading a checkpoint again into a model with LoRA."""

    def outcome(self, mode: str, fails: Exception | None, *, gibberish: bool = False) -> dict:
        class NotReadyError(RuntimeError):
            pass

        NotReadyError.__module__, NotReadyError.__name__ = "poorwill.vllm", "PoorwillError"
        NotReadyError.__qualname__ = NotReadyError.__name__

        class Llm:
            ready = True

            def sleep(self, level):
                self.ready = level != 2

            def wake_up(self):
                pass

            def collective_rpc(self, method):
                if fails is not None:
                    raise fails
                self.ready = True

        class Model:
            def named_parameters(self):
                return [
                    ("model.layers.0.mlp.gate_up_proj.base_layer.weight", None),
                    ("model.norm.weight", None),
                ]

        class Engine:
            def __init__(self):
                self.mode, self.llm, self.model = mode, Llm(), Model()

            def tokens(self):
                if not self.llm.ready and not gibberish:
                    raise NotReadyError("call reload_weights")
                return [1] if self.llm.ready else [2]

            def status(self):
                return {"undefined": [] if self.llm.ready else ["weights"]}

        return variants.checkpoint_again(Engine(), [1])

    def test_what_works_is_compared(self):
        for mode in ["poorwill", "cumem"]:
            self.assertEqual(self.outcome(mode, None), {"loaded": True, "tokens_equal": True, "ok": True})

    def test_what_vllm_cannot_leaves_the_engine_not_ready(self):
        # Poorwill's hooks put the class before the words, and in vLLM's own there are the words alone.
        reported = RuntimeError("KeyError: 'layers.0.mlp.gate_up_proj.weight'")
        record = self.outcome("poorwill", reported)
        self.assertTrue(record["ok"] and record["afterwards"]["refused"], record)
        self.assertFalse(self.outcome("poorwill", reported, gibberish=True)["ok"])
        record = self.outcome("cumem", KeyError("layers.0.mlp.gate_up_proj.weight"))
        self.assertTrue(record["ok"] and "afterwards" not in record, record)

    def test_other_failures_are_not_vllms(self):
        for name in ["norm.weight", "layers.1.mlp.gate_up_proj.weight", "proj.weight", "weight"]:
            self.assertFalse(self.outcome("poorwill", KeyError(name))["ok"], name)
        self.assertFalse(self.outcome("poorwill", RuntimeError("no such file"))["ok"])


class Variants(unittest.TestCase):
    """The steps of a variant, over an engine that does what it should, or not."""

    def module(self, flaw: str) -> types.ModuleType:
        module = types.ModuleType("engine")
        state = {"used": 10 * common.GIB, "level": 0, "written": 0, "woken": []}
        module.state = state

        def sleep(level):
            state["level"], state["woken"] = level, []
            state["used"] = (9 if flaw == "keeps memory" else 1) * common.GIB
            if level == 2:
                state["written"] = -1

        def wake_up(tags=None):
            state["woken"].append(tags)
            state["used"] = 10 * common.GIB

        def write_back(model, weights):
            state["written"] = weights["written"]

        def timed(action, *positional, **named):
            action(*positional, **named)
            return 0.5

        def generated(llm, prompts):
            others = FakeOther.last is not None and "wake" in FakeOther.last.asked
            lost = 3 if flaw == "forgets" and others else None
            return [[len(prompt), state["written"], row == lost] for row, prompt in enumerate(prompts)]

        module.llm = types.SimpleNamespace(
            sleep=sleep,
            wake_up=wake_up,
            generate=None,
            collective_rpc=lambda method: write_back(None, {"written": 0}),
        )
        module.timed, module.generated, module.write_back = timed, generated, write_back
        module.used_memory = lambda: state["used"]
        module.weight_bytes = lambda model: 8 * common.GIB
        module.copied = lambda model: {"written": state["written"]}
        return module

    def exercised(self, name: str, flaw: str = "", swaps: int = 0) -> tuple[bool, list[dict]]:
        module, results = self.module(flaw), []
        FakeOther.last = None
        tokens = lambda: [[module.state["written"] + (flaw == "loses tokens" and module.state["level"])]]  # noqa: E731
        engine = types.SimpleNamespace(llm=module.llm, model=None, tokens=tokens, mode="poorwill")
        options = variants.parsed(["--mode", "poorwill", "--swaps", str(swaps), name])
        with (
            mock.patch.dict(sys.modules, {"engine": module}),
            mock.patch.object(variants, "scales", return_value={}),
            mock.patch.object(variants, "adapters", return_value={}),
            mock.patch.object(variants, "Ballast", FakeCard),
            mock.patch.object(variants, "Child", FakeOther),
        ):
            lines = printed(lambda: results.append(variants.exercise(engine, options, None)))
        return results[0], lines

    def test_both_levels_and_every_order_of_tags(self):
        for name in ["hybrid", "fp8-kv"]:
            good, lines = self.exercised(name)
            self.assertTrue(good, lines)
            steps = [line for line in lines if line["event"] == "step"]
            self.assertEqual(
                [(line["level"], line["tags"]) for line in steps],
                [(1, None), (1, None), (2, None), *((1, tags) for tags in variants.ORDERS)],
            )
            self.assertEqual([len(line["wake_s"]) for line in steps], [1, 1, 1, 2, 2])
            self.assertEqual((steps[0]["used_awake_gib"], steps[0]["used_asleep_gib"]), (10, 1))

    def test_what_keeps_its_memory_or_loses_its_state_is_found(self):
        for flaw, said in {"keeps memory": "gave_back", "loses tokens": "tokens_equal"}.items():
            good, lines = self.exercised("hybrid", flaw)
            self.assertFalse(good)
            self.assertFalse(next(line for line in lines if line["event"] == "step")[said])

    def test_requests_are_compared_after_turns_with_another_engine(self):
        good, lines = self.exercised("hybrid", swaps=3)
        self.assertTrue(good, lines)
        record = lines[-1]
        self.assertEqual((record["swaps"], record["requests"], record["requests_equal"]), (3, 30, 30))
        self.assertEqual(record["other_kv_gib"], 100 - variants.OTHERS_GIB)
        turn = ["sleep", "wake", "check"]
        self.assertEqual(FakeOther.last.asked, [*turn * 3, "sleep"])
        good, lines = self.exercised("hybrid", "forgets", swaps=1)
        self.assertEqual((good, lines[-1]["requests_equal"]), (False, 29))

    def test_how_often_is_no_negative_number(self):
        with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(SystemExit):  # noqa: PT027
            variants.parsed(["--mode", "poorwill", "--swaps", "-1", "hybrid"])
        self.assertIn("--swaps is -1", said.getvalue())


class FakeCard:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def free(self):
        return 100 * common.GIB

    def total(self):
        return 140 * common.GIB


class FakeOther:
    """The other engine, which is never wrong."""

    last = None

    def __init__(self, name, arguments):
        FakeOther.last, self.asked = self, []

    def answer(self, limit_s):
        return {}

    def ask(self, what):
        self.asked.append(what)
        return {"tokens_equal": True}

    def end(self):
        pass


class Offloading(unittest.TestCase):
    """How much host memory there is beside the weights that are in it."""

    def uva(self, held_bytes: int | None) -> dict:
        moved = types.SimpleNamespace(nbytes=1000, _vllm_is_uva_offloaded=True)
        model = types.SimpleNamespace(parameters=lambda: [moved, types.SimpleNamespace(nbytes=7)])
        held = {} if held_bytes is None else {"host_bytes": held_bytes}
        return offload_engine.host_figures(types.SimpleNamespace(**held), model)

    def test_poorwill_holds_as_much_as_it_has_to(self):
        for held, good in {1000: True, 1010: True, 1011: False, 999: False}.items():
            self.assertEqual(self.uva(held)["host_ok"], good, held)

    def test_vllms_own_gives_no_account(self):
        self.assertEqual(set(self.uva(None)), {"offloaded_gib", "host_held_gib"})

    def test_layers_that_are_prefetched_say_what_they_have(self):
        each = types.SimpleNamespace(offloaded_bytes=500)
        layers = [types.SimpleNamespace(_param_offloaders={"w": each}) for _ in range(2)]
        offloader = types.SimpleNamespace(module_offloaders=layers, host_bytes=1000)
        self.assertTrue(offload_engine.host_figures(offloader, None)["host_ok"])
        nothing = types.SimpleNamespace(module_offloaders=[], host_bytes=0)
        self.assertFalse(offload_engine.host_figures(nothing, None)["host_ok"])


class Pruner(unittest.TestCase):
    STOCK: ClassVar = dict(configurations=12, kept=12, compiled=12, largest_shared_bytes=145 << 10)

    def good(self, kept, compiled, largest_kib, stock=None, budget_kib=99):
        seen = dict(configurations=12, kept=kept, compiled=compiled, largest_shared_bytes=largest_kib << 10)
        return pruner.good(seen, {**self.STOCK, **(stock or {})}, budget_kib << 10)

    def test_what_counts_as_good(self):
        self.assertTrue(self.good(5, 5, 97))
        self.assertTrue(self.good(5, 5, 99))
        self.assertTrue(self.good(1, 1, 120))  # one stays
        self.assertTrue(self.good(12, 12, 97, {"largest_shared_bytes": 97 << 10}))  # nothing to drop
        self.assertFalse(self.good(5, 5, 100))  # one is left that does not fit
        self.assertFalse(self.good(5, 6, 97))  # one was compiled that was dropped
        self.assertFalse(self.good(5, 4, 97))
        self.assertFalse(self.good(0, 0, 0))
        self.assertFalse(self.good(12, 12, 97))  # nothing was dropped
        self.assertFalse(self.good(5, 5, 97, {"compiled": 11}))

    def test_what_the_autotuner_leaves_and_the_compiler_makes_is_seen(self):
        class Jit:
            def _do_compile(self, shared, warmup):
                if shared > 200:
                    raise ValueError("too large")
                return types.SimpleNamespace(metadata=types.SimpleNamespace(shared=shared))

        class Tuner:
            fn, configs = Jit(), [300, 150, 70]

            def prune_configs(self, arguments):
                return self.configs[arguments:]

        tuner = Tuner()
        watched = pruner.Watched(types.SimpleNamespace(fn=tuner))
        self.assertEqual(watched.figures()["compiled"], 0)
        for shared in tuner.prune_configs(1):
            tuner.fn._do_compile(shared, warmup=False)
        with contextlib.suppress(ValueError):
            tuner.fn._do_compile(300, warmup=False)
        figures = dict(configurations=3, kept=2, compiled=3, largest_shared_bytes=150)
        self.assertEqual(watched.figures(), figures)


if __name__ == "__main__":
    unittest.main()
