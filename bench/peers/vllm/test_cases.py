#!/usr/bin/env python3
"""Holds bad_input.py and variants.py to what they say, as far as no GPU and no vLLM are needed."""

# There may be no pytest where this runs.
# ruff: noqa: PT009

import contextlib
import io
import json
import os
import sys
import types
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import bad_input  # noqa: E402
import common  # noqa: E402
import variants  # noqa: E402
from test_scripts import printed  # noqa: E402


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

    def test_who_breaks_the_engine_is_told_from_who_comes_behind(self):
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
        told = RuntimeError("KeyError: 'layers.0.mlp.gate_up_proj.weight'")
        record = self.outcome("poorwill", told)
        self.assertTrue(record["ok"] and record["afterwards"]["refused"], record)
        self.assertFalse(self.outcome("poorwill", told, gibberish=True)["ok"])
        record = self.outcome("cumem", KeyError("layers.0.mlp.gate_up_proj.weight"))
        self.assertTrue(record["ok"] and "afterwards" not in record, record)

    def test_other_failures_are_not_vllms(self):
        for name in ["norm.weight", "layers.1.mlp.gate_up_proj.weight", "proj.weight", "weight"]:
            self.assertFalse(self.outcome("poorwill", KeyError(name))["ok"], name)
        self.assertFalse(self.outcome("poorwill", RuntimeError("no such file"))["ok"])


if __name__ == "__main__":
    unittest.main()
