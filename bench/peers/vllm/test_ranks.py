#!/usr/bin/env python3
"""Holds ranks.py and rank_worker.py to what they say, with several ranks in one process and no GPU."""

# There may be no pytest where this runs.
# ruff: noqa: PT009, PT027

import contextlib
import dataclasses
import io
import os
import sys
import tempfile
import types
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import common  # noqa: E402
import plans  # noqa: E402
import rank_engine  # noqa: E402
import ranks  # noqa: E402
import sleep  # noqa: E402
from test_scripts import printed  # noqa: E402

GIB = common.GIB
WEIGHTS, CACHE, CONTEXT, TOTAL = GIB, 2 * GIB, GIB // 2, 140 * GIB
STEPS = ["cycle", "cycle", "by tag", "by tag", "level 2", "after level 2"]


class RefusalError(RuntimeError):
    """What poorwill raises."""


RefusalError.__module__, RefusalError.__qualname__ = "poorwill", "PoorwillError"


@dataclasses.dataclass(frozen=True)
class Environment:
    host_budget_bytes: int | None = None


class Worker:
    """One rank."""

    def __init__(self, rank: int):
        self.rank, self.device = rank, f"cuda:{rank}"
        self.model_runner = types.SimpleNamespace(model=types.SimpleNamespace(weights=0))
        self._environment = Environment(8 * GIB)
        self.events: list[dict] = []
        self.asleep: set[str] = set()
        self.undefined = False
        self.keeps_weights = self.is_down = False

    @property
    def used(self) -> int:
        """Of its GPU."""
        if self.is_down:
            return 0
        weights = WEIGHTS if self.keeps_weights or "weights" not in self.asleep else 0
        return CONTEXT + weights + (0 if "kv_cache" in self.asleep else CACHE)

    def poorwill_status(self) -> dict:
        events, self.events = self.events, []
        undefined = ["weights"] if self.undefined else []
        reported = {"rank": self.rank, "host_bytes": WEIGHTS, "undefined": undefined, "events": events}
        return {**reported, "sleeping": sorted(self.asleep)}

    def poorwill_mark_restored(self) -> list[str]:
        restored, self.undefined = ["weights"] if self.undefined else [], False
        return restored

    def sleep(self, level: int) -> None:
        limit = self._environment.host_budget_bytes
        if limit is not None and limit < WEIGHTS:
            raise RefusalError("POORWILL_HOST_BUDGET allows too little")
        self.asleep = {"weights", "kv_cache"}
        if level == 2:
            self.undefined, self.model_runner.model.weights = True, None
        self.events.append({"operation": "sleep"})

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.asleep -= set(tags or self.asleep)


class Llm:
    """An engine over several ranks. With flaws by name it does something wrong."""

    def __init__(self, count: int, mode: str, *flaws: str):
        # vLLM has a wrapper around each worker.
        self.workers = [types.SimpleNamespace(worker=Worker(rank)) for rank in range(count)]
        self.mode, self.flaws, self.is_down, self.calls = mode, flaws, False, []
        self.ranks[-1].keeps_weights = "nothing given back" in flaws

    @property
    def ranks(self) -> list[Worker]:
        return [wrapper.worker for wrapper in self.workers]

    def shutdown(self) -> None:
        self.is_down = True
        for rank in self.ranks:
            rank.is_down = True
        if "kept at the end" in self.flaws:
            self.ranks[-1].is_down = False

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None) -> list:
        if not isinstance(method, str):
            return [method(wrapper, *args) for wrapper in self.workers]
        self.calls.append(method)
        return [getattr(rank, method)(*args) for rank in self.ranks]

    def sleep(self, level: int) -> None:
        refused = []
        for rank in self.ranks:
            try:
                rank.sleep(level)
            except RefusalError as error:
                refused.append(f"rank {rank.rank}: {error}")
        if refused and "refusal lost" not in self.flaws:
            if "half asleep" not in self.flaws:
                self.wake_up()
            raise RefusalError("; ".join(refused))

    def wake_up(self, tags: list[str] | None = None) -> None:
        for rank in self.ranks:
            rank.wake_up(tags)
        if "bytes lost" in self.flaws:
            self.ranks[-1].model_runner.model.weights = 7

    def tokens(self) -> list[list[int]]:
        if self.mode == "poorwill" and any(rank.undefined for rank in self.ranks):
            if "serves without weights" not in self.flaws:
                raise RefusalError("the weights were dropped")
        assert not any(rank.asleep for rank in self.ranks) or "half asleep" in self.flaws
        return [[rank.model_runner.model.weights or 0 for rank in self.ranks]]


class Cards:
    """What the GPUs of an engine's ranks have in use, from outside."""

    def __init__(self, llm: Llm):
        self.llm = llm
        self.started = False

    def used(self) -> list[int]:
        return [rank.used if self.started else 0 for rank in self.llm.ranks]

    def free(self) -> list[int]:
        return [TOTAL - used for used in self.used()]

    def total(self) -> list[int]:
        return [TOTAL] * len(self.llm.ranks)

    def settled(self, aims: list[int]) -> list[int]:
        return self.free()


def modules(llm: Llm) -> dict[str, types.ModuleType]:
    """What stands in the place of engine.py and PyTorch."""
    engine, torch = types.ModuleType("engine"), types.ModuleType("torch")

    def fill_weights(model, seed):
        model.weights = seed
        return 3, 0

    engine.fill_weights = fill_weights
    engine.model_of = lambda worker: worker.model_runner.model
    engine.digests = lambda model: {"weights": str(model.weights)}
    engine.copied = lambda model: {"weights": model.weights}
    engine.write_back = lambda model, weights: setattr(model, "weights", weights["weights"])
    engine.weight_bytes = lambda model: WEIGHTS
    engine.used_memory = lambda: CONTEXT
    engine.check_allocator = lambda mode: {"allocator": mode}
    engine.generated = lambda llm: llm.tokens()
    torch.cuda = types.SimpleNamespace(synchronize=lambda: None, get_device_name=lambda: "a GPU")
    return {"engine": engine, "torch": torch}


class Several(unittest.TestCase):
    maxDiff = None

    def take(self, mode: str, *flaws: str, count: int = 2) -> tuple[bool, list[dict]]:
        """Whether a run went well, and the lines that it printed."""
        options = ranks.parsed(["--mode", mode, "--ranks", str(count), "--cycles", "2"])
        self.llm = llm = Llm(count, mode, *flaws)
        cards, good = Cards(llm), False

        def start(options, folder):
            cards.started = True
            return llm

        def whole() -> None:
            nonlocal good
            with tempfile.TemporaryDirectory() as folder:
                good = ranks.run(options, Path(folder), cards)

        with (
            mock.patch.dict(sys.modules, modules(llm)),
            mock.patch.object(rank_engine, "start", start),
            mock.patch("faulthandler.dump_traceback_later"),
        ):
            lines = printed(whole)
        return good, lines

    def wrong(self, mode: str, *flaws: str) -> list[str]:
        """The steps that did not go well."""
        good, lines = self.take(mode, *flaws)
        self.assertFalse(good, flaws)
        self.assertTrue(self.llm.is_down)
        return [line.get("step", line["event"]) for line in lines if not line.get("ok", True)]

    def test_every_step_on_every_rank(self):
        good, lines = self.take("poorwill", count=4)
        self.assertTrue(good, lines)
        events = [line["event"] for line in lines]
        self.assertEqual(
            events,
            ["cards", "overwritten", "ranks", "reference", "before"] + ["step"] * 8 + ["after", "end"],
        )
        steps = [line for line in lines if line["event"] == "step"]
        self.assertEqual(
            [line["step"] for line in steps],
            [*STEPS, "refused by one rank", "after the refusal"],
        )
        self.assertEqual([line["tags"] for line in steps[2:4]], sleep.ORDERS)
        self.assertEqual(steps[0]["used_asleep_gib"], [0.5] * 4)
        self.assertEqual(steps[0]["freed_gib"], [3.0] * 4)
        self.assertEqual(steps[0]["sleep_reported"], [[{"operation": "sleep"}]] * 4)
        # Tag by tag, one after the other comes back.
        self.assertEqual(steps[2]["used_after_wake_weights_gib"], [1.5] * 4)
        self.assertEqual(steps[3]["used_after_wake_kv_cache_gib"], [2.5] * 4)
        self.assertEqual(steps[4]["undefined"], [["weights"]] * 4)
        self.assertTrue(steps[4]["before"]["refused"])
        self.assertEqual(steps[6]["error"], "rank 3: POORWILL_HOST_BUDGET allows too little")
        self.assertEqual(steps[6]["sleeping"], [[]] * 4)
        self.assertEqual({rank._environment.host_budget_bytes for rank in self.llm.ranks}, {8 * GIB})
        self.assertTrue(self.llm.is_down)

    def test_every_rank_has_weights_of_its_own(self):
        self.take("cumem", count=4)
        weights = {rank.model_runner.model.weights for rank in self.llm.ranks}
        self.assertEqual(weights, {1234, 2234, 3234, 4234})

    def test_of_vllms_own_nothing_of_poorwills_is_asked(self):
        good, lines = self.take("cumem")
        self.assertTrue(good, lines)
        self.assertEqual(self.llm.calls, [])
        steps = [line["step"] for line in lines if line["event"] == "step"]
        self.assertEqual(steps[-1], "after level 2")

    def test_what_goes_wrong_on_one_rank_is_no_success(self):
        self.assertEqual(self.wrong("cumem", "nothing given back"), STEPS)
        wrong = self.wrong("cumem", "bytes lost")
        self.assertEqual(wrong, [step for step in STEPS if step != "level 2"])  # written back there
        self.assertEqual(self.wrong("poorwill", "serves without weights"), ["level 2"])
        self.assertEqual(self.wrong("poorwill", "kept at the end"), ["end"])

    def test_which_tensors_are_wrong_is_said(self):
        _, lines = self.take("cumem", "bytes lost")
        step = next(line for line in lines if line["event"] == "step")
        self.assertEqual((step["bytes_equal"], step["different"]), ([True, False], [[], ["weights"]]))

    def test_a_refusal_has_to_come_and_leave_no_engine_asleep(self):
        self.assertEqual(self.wrong("poorwill", "refusal lost"), ["refused by one rank"])
        self.assertIn("refused by one rank", self.wrong("poorwill", "half asleep"))

    def test_who_fails_is_taken_down(self):
        with mock.patch.object(Llm, "tokens", side_effect=RuntimeError("no tokens")):
            with self.assertRaisesRegex(RuntimeError, "no tokens"):
                self.take("cumem")
        self.assertTrue(self.llm.is_down)


class Options(unittest.TestCase):
    def refused(self, *given: str) -> str:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), self.assertRaises(SystemExit):
            ranks.parsed(["--mode", "cumem", *given])
        return said.getvalue()

    def test_a_model_has_to_be_split_evenly(self):
        self.assertIn("num_attention_heads is 16, num_key_value_heads is 8", self.refused("--ranks", "3"))
        self.assertIn("--tp is 0", self.refused("--ranks", "0"))
        for count in ["1", "2", "4", "8"]:
            ranks.parsed(["--mode", "cumem", "--ranks", count, "--kind", "dense"])

    def test_the_plan_can_be_read(self):
        for name in [name for name in plans.PLANS if name.startswith("ranks")]:
            for run in plans.PLANS[name]:
                self.assertEqual(ranks.parsed(run.arguments).count, 2)

    def test_nothing_turns_multicast_on(self):
        given = {"NCCL_NVLS_ENABLE": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "1", "PATH": os.environ["PATH"]}
        chosen = common.environment("poorwill", given, **ranks.SURROUNDINGS)
        for name in ["NCCL_NVLS_ENABLE", "VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_USE_NCCL_SYMM_MEM"]:
            self.assertEqual(chosen[name], "0", name)
        self.assertEqual((chosen["POORWILL_SLEEP_MODE"], chosen["PATH"]), ("1", given["PATH"]))


class Seen(unittest.TestCase):
    def test_every_card_is_seen_by_a_process_of_its_own(self):
        opened, closed = [], []

        class Ballast:
            def __init__(self, free_gib=None, ordinal=0):
                if ordinal == 3:
                    raise RuntimeError("there is no such GPU")
                opened.append(ordinal)
                self.ordinal = ordinal

            def __enter__(self):
                return self

            def __exit__(self, *ended):
                closed.append(self.ordinal)

            def free(self):
                return 10 - self.ordinal

            def total(self):
                return 10

            def settled(self, aim):
                return aim - self.ordinal

        with mock.patch.object(rank_engine, "Ballast", Ballast):
            with ranks.Cards(2) as cards:
                self.assertEqual((cards.used(), cards.settled([10, 9])), ([0, 1], [10, 8]))
                self.assertEqual(closed, [])
            self.assertEqual((opened, closed), ([0, 1], [1, 0]))
            with self.assertRaisesRegex(RuntimeError, "no such GPU"):
                ranks.Cards(4)
            self.assertEqual(sorted(closed), [0, 0, 1, 1, 2])


if __name__ == "__main__":
    unittest.main()
