#!/usr/bin/env python3
"""Holds the faults, kills and figures of ranks.py to what they say, with stand-ins and no GPU."""

# There may be no pytest where this runs.
# ruff: noqa: PT009, PT027

import argparse
import asyncio
import contextlib
import io
import json
import os
import sys
import tempfile
import types
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import capabilities  # noqa: E402
import common  # noqa: E402
import rank_breaking  # noqa: E402
import rank_engine  # noqa: E402
import rank_faults  # noqa: E402
import rank_figures  # noqa: E402
import rank_hibernate  # noqa: E402
import rank_host  # noqa: E402
import rank_kills  # noqa: E402
import ranks  # noqa: E402
from test_ranks import CONTEXT, GIB, WEIGHTS, Cards, Llm, RefusalError, modules  # noqa: E402
from test_scripts import printed  # noqa: E402


class Pool:
    """A rank's allocator."""

    def __init__(self, worker):
        self.worker, self.holds = worker, []
        self.arena = types.SimpleNamespace(hold=self.hold)

    def hold(self, tag: str, holder: str):
        self.holds.append(tag)
        return types.SimpleNamespace(end=lambda: self.holds.remove(tag))

    def suspend(self, level: int) -> None:
        if self.holds:
            raise RefusalError(f"{self.holds} are held")
        self.worker.asleep = {"weights", "kv_cache"}
        self.worker.undefined = self.worker.undefined or level == 2

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.worker.asleep -= set(tags or self.worker.asleep)


class Joint(Llm):
    """An engine whose ranks sleep and wake together, as far as a stand-in can; flaws are by name."""

    def __init__(self, *flaws: str, mode: str = "poorwill"):
        super().__init__(2, mode, *flaws)
        for rank in self.ranks:
            rank.sleep, rank.wake_up = self.operation(rank, "suspend"), self.operation(rank, "wake_up")
            if mode == "poorwill":
                rank.allocator = Pool(rank)
            else:
                rank.pool = Pool(rank)

    @staticmethod
    def operation(rank, name: str):
        def call(given=None) -> None:
            limit = rank._environment.host_budget_bytes
            if name == "suspend" and limit is not None and limit < WEIGHTS:
                raise RefusalError("POORWILL_HOST_BUDGET allows too little")
            getattr(rank.allocator if hasattr(rank, "allocator") else rank.pool, name)(given)

        return call

    def carry_out(self, name: str, given) -> None:
        before, failed, is_after = [set(rank.asleep) for rank in self.ranks], [], False
        for rank in self.ranks:
            try:
                getattr(rank, name)(given)
            except Exception as error:
                is_after = rank.asleep != before[rank.rank]
                failed.append(f"rank {rank.rank}: {error}")
        if not failed:
            return
        if self.mode == "poorwill" and "apart" not in self.flaws and not (name == "wake_up" and is_after):
            for rank, asleep in zip(self.ranks, before, strict=True):
                rank.asleep = asleep
        if "silent" not in self.flaws:
            raise RefusalError("; ".join(failed))

    def sleep(self, level: int) -> None:
        self.carry_out("sleep", level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.carry_out("wake_up", tags)


def number_of(name: str) -> int:
    [found] = [number for number, fault in enumerate(rank_faults.FAULTS) if fault.name == name]
    return found


class Faults(unittest.TestCase):
    @contextlib.contextmanager
    def engine(self, *flaws: str, mode: str = "poorwill"):
        llm = Joint(*flaws, mode=mode)
        cards, put = Cards(llm), modules(llm)
        cards.started = True
        put["torch"].cuda.empty_cache = lambda: None
        with mock.patch.dict(sys.modules, put):
            engine = rank_engine.Ranks(llm, mode, cards, 2 * GIB)
            with contextlib.redirect_stdout(io.StringIO()):
                engine.overwrite(1)
            rank_faults.calibrate(engine)
            yield engine

    def carried_out(self, name: str, *flaws: str, rank: int = 1) -> dict:
        with self.engine(*flaws) as engine:
            return rank_faults.carry_out(engine, number_of(name), rank)

    def test_the_table_has_enough_of_them(self):
        options = ranks.parsed(["--mode", "poorwill", "--tp", "2", "--faults"])
        numbers = rank_faults.chosen(options)
        faults = [rank_faults.FAULTS[number] for number in numbers]
        self.assertGreaterEqual(len(faults), 25)
        self.assertFalse([fault for fault in faults if fault.open or fault.nccl])
        self.assertEqual(len(list(rank_faults.jobs(options))), 2 * len(faults))
        every = rank_faults.FAULTS
        self.assertEqual(len({fault.name for fault in every}), len(every))
        for fault in every:
            self.assertIn(fault.place, rank_breaking.PLACES)
            self.assertIn(fault.others or "entry", rank_breaking.PLACES)
            self.assertIn(fault.expected, ("awake", "asleep", "done"))

    def test_which_faults_a_run_has(self):
        def names(*given: str) -> list[str]:
            options = ranks.parsed([*given, "--faults"])
            return [rank_faults.FAULTS[number].name for number in rank_faults.chosen(options)]

        self.assertIn("sleep join", names("--mode", "poorwill", "--dp", "2"))
        suspending = names("--mode", "poorwill", "--suspend-nccl")
        self.assertIn("wake NCCL resumes late", suspending)
        self.assertNotIn("sleep pool after", suspending)
        self.assertEqual(names("--mode", "poorwill", "--only", "removed"), ["sleep removed"])
        self.assertIn("sleep removed", names("--mode", "poorwill", "--only", "sleep moved,removed"))
        stock = names("--mode", "cumem")
        self.assertIn("sleep no host memory", stock)
        self.assertNotIn("sleep held", stock)

    def test_the_state_after_a_fault(self):
        of = {fault.name: fault for fault in rank_faults.FAULTS}
        both, cache = {"weights", "kv_cache"}, {"kv_cache"}
        for name, outcome, state in [
            ("sleep held", "awake", set()),
            ("sleep stopped shortly", "done", both),
            ("sleep held while kv_cache sleeps", "awake", cache),
            ("wake full", "asleep", both),
            ("wake exit", "awake", set()),
            ("wake full of weights", "asleep", both),
            ("wake full of weights", "done", cache),
        ]:
            self.assertEqual(of[name].after(outcome), state, name)

    def test_faults_that_go_as_they_have_to(self):
        for name in [
            "sleep entry",
            "sleep exit",
            "sleep host shortage",
            "sleep held",
            "sleep pool before",
            "sleep pool after",
            "sleep held while kv_cache sleeps",
            "wake entry",
            "wake pool before",
            "wake pool before of weights",
            "wake pool before of kv_cache",
        ]:
            for rank in (0, 1):
                record = self.carried_out(name, rank=rank)
                self.assertTrue(rank_faults.judged(record), (name, record))
                self.assertTrue(record["refused"])

    def test_a_stop_is_awaited(self):
        stops = []
        with mock.patch.object(rank_breaking, "stop", stops.append):
            record = self.carried_out("sleep stopped shortly")
        self.assertTrue(rank_faults.judged(record), record)
        self.assertEqual((stops, record["refused"]), ([rank_breaking.SHORT_S], False))

    def test_what_is_wrong_is_named(self):
        self.assertEqual(
            self.carried_out("sleep held", "apart")["judged"],
            {"refused": True, "states": False, "memory": False},
        )
        record = self.carried_out("sleep held", "silent")
        self.assertEqual(record["judged"], {"refused": False, "states": True, "memory": True})
        self.assertFalse(rank_faults.judged(record))
        self.assertFalse(rank_faults.judged({"as_meant": True}))

    def test_of_vllms_own_it_is_written_down(self):
        with self.engine(mode="cumem") as engine:
            record = rank_faults.written_down(engine, number_of("sleep entry"), 1)
            self.assertEqual(record["states"], ["kv_cache+weights", "awake"])
            self.assertTrue(record["refused"] and record["is_whole"] and record["is_in_step"], record)

    def test_the_engines_process_does_what_each_line_says(self):
        options = ranks.parsed(["--mode", "poorwill", "--child", "blind"])
        asked = [
            {"what": "calibrate"},
            {"what": "fault", "number": number_of("wake entry"), "rank": 0},
            {"what": "sleep"},
            {"what": "status"},
            {"what": "wake"},
            {"what": "check"},
            {"what": "nonsense"},
        ]
        with (
            self.engine() as engine,
            mock.patch.object(rank_engine, "opened", return_value=engine),
            mock.patch.object(rank_host, "end_with"),
            mock.patch("sys.stdin", [json.dumps(line) for line in asked]),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            lines = printed(lambda: rank_host.serve(options, Path()))
            self.assertTrue(engine.llm.is_down)
        first, states, fault, slept, status, woken, checked, failed = lines
        self.assertEqual([rank["rank"] for rank in first["ranks"]], [0, 1])
        self.assertEqual(states["used_gib"]["kv_cache+weights"], [0.5, 0.5])
        self.assertTrue(rank_faults.judged(fault), fault)
        self.assertFalse(slept["refused"] or woken["refused"])
        self.assertEqual(status["ranks"][1]["sleeping"], ["kv_cache", "weights"])
        self.assertTrue(checked["tokens_equal"])
        self.assertIn("nonsense", failed["failed"])

    def test_an_engine_that_is_lost_is_started_again(self):
        asked, started = [], []

        class Host:
            def __init__(self, options, sees=False):
                started.append(self)

            def answer(self, limit_s):
                return {"ranks": []}

            def ask(self, what, limit_s, **given):
                if what == "calibrate":
                    return {}
                asked.append(given)
                if len(asked) == 2:
                    raise rank_host.LostError("late", True)
                return {"as_meant": len(asked) != 4, "bytes_equal": [True, True], "tokens_equal": True}

            def end(self):
                pass

        options = ranks.parsed(["--mode", "poorwill", "--faults", "--first", "1"])
        cards, good = mock.Mock(), []
        lines = printed(lambda: good.append(rank_faults.run(options, Path(), cards, Host)))
        steps = [line for line in lines if line["event"] == "step"]
        self.assertEqual([step["ok"] for step in steps[:5]], [True, False, True, False, True])
        self.assertTrue(steps[1]["hangs"])
        self.assertEqual((asked[0]["rank"], steps[0]["number"]), (1, 1))
        self.assertEqual((good, len(started)), ([False], 2))
        options.deadline_s = -1
        [line] = printed(lambda: rank_faults.run(options, Path(), cards, Host))
        self.assertEqual((line["event"], line["next_first"]), ("stopped", 1))


class Names(unittest.TestCase):
    def test_what_is_broken_is_there(self):
        package = HERE.parents[2] / "crates/python/python/poorwill/vllm"
        for file, names in {
            "worker.py": [
                *("def _refuse_uncovered(", "def poorwill_together(", "_peers.problem(", "Decision.join("),
                *("torch.cuda.empty_cache()", "self._environment", "self._communicators", "def allocator("),
            ],
            "allocator.py": ["def suspend(self, level", "def wake_up(self, tags"],
            "_communicators.py": [
                "class _OfVllm",
                "def problem(self)",
                "self._free_bytes",
                "def resume(self)",
            ],
            "_together.py": ["METHODS = ", "in METHODS"],
            "_environment.py": ["host_budget_bytes", "ranks_timeout_s"],
        }.items():
            text = (package / file).read_text()
            for name in names:
                self.assertIn(name, text, file)


class Capabilities(unittest.TestCase):
    def test_a_folders_mode_holds_for_root_too(self):
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o500)
            file = Path(folder, "mark")
            try:
                with capabilities.without_override(), self.assertRaises(PermissionError):
                    file.touch()
            finally:
                os.chmod(folder, 0o700)
            file.touch()


# An engine of plain processes: ranks end with their core, and the core with any rank.
RANK = """
import os, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.02)
"""
CORE = """
import os, subprocess, sys, time
ranks = [subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid())]) for _ in range(2)]
print(*[rank.pid for rank in ranks], flush=True)
while all(rank.poll() is None for rank in ranks):
    time.sleep(0.02)
"""
CHILD = """
import json, os, subprocess, sys, time
from pathlib import Path

def say(event="answer", **answer):
    print(json.dumps({"event": event, **answer}), flush=True)

here = Path(__file__).parent
command = [sys.executable, str(here / "core.py"), str(here / "rank.py")]
core = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
pids = [int(word) for word in core.stdout.readline().split()]
print("no JSON")
say("other")
say(ranks=[{"pid": pid} for pid in pids], words=sys.argv[1:])
for line in sys.stdin:
    asked = json.loads(line)
    if asked["what"] == "hold back":
        for rank in asked["held"]:
            Path(asked["at"], f"at-{rank}").touch()
        decision = Path(os.environ["POORWILL_RANKS_FOLDER"], "decision-1")
        decision.mkdir()
        for name in ("commit", "staged-0"):
            (decision / name).touch()
        say()
    elif asked["what"] == "sleep":
        core.wait()
        say(refused=True, error="the engine has ended")
    elif asked["what"] == "fail":
        say(failed="of itself")
    elif asked["what"] == "hang":
        time.sleep(600)
    else:
        sys.exit(3)
core.kill()
"""


class Hosts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        for name, text in {"ranks": CHILD, "core": CORE, "rank": RANK}.items():
            (self.folder / f"{name}.py").write_text(text)
        patched = mock.patch.object(rank_host, "HERE", self.folder)
        patched.start()
        self.addCleanup(patched.stop)
        self.options = ranks.parsed(["--mode", "poorwill", "--pp", "2", "--suspend-nccl", "--graphs"])

    def start(self) -> tuple[rank_host.Hosted, dict]:
        engine, answers = rank_host.Hosted(self.options), []
        self.addCleanup(engine.end)
        with contextlib.redirect_stderr(io.StringIO()):
            lines = printed(lambda: answers.append(engine.answer(60)))
        self.assertEqual(lines, [{"event": "other"}])
        return engine, answers[0]

    def test_it_learns_what_engine_to_start(self):
        _, answer = self.start()
        parsed = ranks.parsed(answer["words"])
        for name in (*rank_host.PASSED_ON, "suspend_nccl", "graphs", "count"):
            self.assertEqual(getattr(parsed, name), getattr(self.options, name), name)
        self.assertEqual(parsed.child, "blind")

    def test_an_engine_that_hangs_is_killed_with_all_its_processes(self):
        engine, answer = self.start()
        with self.assertRaisesRegex(rank_host.LostError, "did not answer") as caught:
            engine.ask("hang", 0.5)
        self.assertTrue(caught.exception.is_late)
        engine.process.wait()
        pids = [rank["pid"] for rank in answer["ranks"]]
        self.assertIsNotNone(rank_kills.wait_for(lambda: not any(map(common.is_running, pids)), 60))

    def test_an_engine_that_ends_is_no_late_one(self):
        for what, said in (("end", "ended with code 3"), ("fail", "of itself")):
            engine, _ = self.start()
            engine.tell(what)
            if what == "end":
                engine.process.wait()
                engine.kill()
            with self.assertRaisesRegex(rank_host.LostError, said) as caught:
                engine.answer(60)
            self.assertFalse(caught.exception.is_late)

    def killed(self, victim: str, phase: str, used=(GIB, GIB)) -> dict:
        cards = mock.Mock()
        cards.free.return_value = cards.settled.return_value = [5 * GIB, 5 * GIB]
        cards.used.return_value = list(used)
        with (
            mock.patch.object(rank_kills, "ORPHANED_S", 0.2),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            return rank_kills.killed(self.options, self.folder, cards, victim, phase)

    def test_all_end_with_any_that_is_killed(self):
        for victim, phase in (("rank", "before"), ("core", "staged"), ("coordinator", "after")):
            record = self.killed(victim, phase)
            self.assertTrue(record["ok"], record)
            self.assertEqual((record["left"], record["processes"]), ({}, 3))
            self.assertEqual(record["verdicts"], ["commit", "staged-0"])
        self.assertTrue(record["orphaned"]["agree"])

    def test_ranks_that_are_left_in_two_states_are_no_success(self):
        record = self.killed("coordinator", "after", (GIB, 3 * GIB))
        self.assertFalse(record["ok"] or record["orphaned"]["agree"])

    def test_data_parallel_engines_have_a_core_each(self):
        of = {11: 10, 12: 10, 21: 20, 22: 20, 10: 1, 20: 1}
        self.assertEqual(rank_kills.cores_of([11, 12, 21, 22], of, 1), [10, 20])
        self.assertEqual(rank_kills.cores_of([10, 20], of, 1), [10, 20])

    def test_which_kills_there_are(self):
        self.assertEqual(len(rank_kills.parsed("all")), 9)
        self.assertEqual(rank_kills.parsed("core:after,rank:staged"), [("core", "after"), ("rank", "staged")])
        with self.assertRaisesRegex(argparse.ArgumentTypeError, "there is no rank:never"):
            rank_kills.parsed("rank:never")
        self.assertEqual(rank_kills.held_back("staged", 2), {"held": [1], "when": "before"})
        self.assertEqual(rank_kills.held_back("after", 2), {"held": [0, 1], "when": "after"})


class Figures(unittest.TestCase):
    def ranks(self):
        llm = Joint()
        cards, put = Cards(llm), modules(llm)
        cards.started = True
        put["torch"].cuda.empty_cache = lambda: None
        package, together = types.ModuleType("poorwill.vllm"), types.ModuleType("poorwill.vllm._together")
        together.METHODS, package._together = frozenset({"sleep"}), together
        put |= {"poorwill": types.ModuleType("poorwill"), "poorwill.vllm": package}
        patched = mock.patch.dict(sys.modules, {**put, "poorwill.vllm._together": together})
        patched.start()
        self.addCleanup(patched.stop)
        engine = rank_engine.Ranks(llm, "poorwill", cards, 2 * GIB)
        with contextlib.redirect_stdout(io.StringIO()):
            engine.overwrite(1)
        return engine, together

    def test_both_take_turns(self):
        engine, together = self.ranks()
        methods, stock = [], engine.llm.sleep

        def sleep(level):
            methods.append(bool(together.METHODS))
            stock(level)

        engine.llm.sleep = sleep
        record = rank_figures.two_phases(engine, 2)
        self.assertEqual(methods, [False, True, True, False, False, True])
        self.assertTrue(together.METHODS)
        self.assertEqual(record["bytes_equal"], [True, True])
        self.assertIn("median_ms", record["wake_each_by_itself"])

    def test_one_rank_alone_and_all_at_once(self):
        engine, _ = self.ranks()
        record = rank_figures.at_once(engine, 3)
        for rank in (0, 1):
            self.assertIn(f"wake_rank_{rank}_alone", record)
            self.assertIn(f"sleep_rank_{rank}_with_the_others", record)

    def test_the_share_that_is_given_back_is_of_what_is_beyond_a_context(self):
        engine, _ = self.ranks()
        for rank in engine.llm.ranks:
            status = rank.poorwill_status
            rank.poorwill_status = lambda ask=status: {**ask(), "communicators": [], "shared": []}
        with mock.patch.object(rank_figures, "used_by_process_mib", return_value={}):
            record = rank_figures.holdings(engine, [0, 0], [CONTEXT // 2] * 2)
        self.assertEqual(record["awake_gib"], [3.5, 3.5])
        self.assertEqual(record["asleep_beyond_empty_gib"], [0.25, 0.25])
        self.assertEqual(record["given_back"], [round(1 - 0.25 / 3.25, 5)] * 2)

    def test_a_spread_of_one_is_that_one(self):
        self.assertEqual(set(rank_figures.spread([0.25]).values()), {250.0})


class Hibernation(unittest.TestCase):
    def run_it(self, answers: dict[str, dict], lost: bool = False) -> tuple[bool, dict, list[str]]:
        asked: list[str] = []

        class Host:
            def __init__(self, options):
                pass

            def answer(self, limit_s):
                return {"ranks": [{"pid": os.getpid()}]}

            def ask(self, what, limit_s):
                if lost and what == "wake":
                    raise rank_host.LostError("late", True)
                equal = {"bytes_equal": [True], "tokens_equal": True}
                return {"sleep": {"refused": False}, "wake": {"refused": False}, "check": equal}.get(
                    what, {"ranks": []}
                )

            def end(self):
                pass

        def call(way, op, pids, suspended=0):
            asked.append(op)
            return answers.get(op, {})

        options = ranks.parsed(["--mode", "poorwill", "--hibernate", "poorwill"])
        cards, good = mock.Mock(), []
        cards.used.return_value = [0, 0]
        lines = printed(lambda: good.append(rank_hibernate.run(options, Path(), cards, Host, call)))
        return good[0], lines[-1], asked

    def test_a_set_that_goes_and_comes_back(self):
        good, line, asked = self.run_it({"hibernate": {"report": 1}, "resume": {"report": 1}})
        self.assertTrue(good and line["hibernated"], line)
        self.assertEqual(asked, ["inspect", "hibernate", "resume", "inspect"])

    def test_a_refusal_is_no_loss_and_a_failed_return_is(self):
        good, line, asked = self.run_it({"hibernate": {"error": "a communicator"}})
        self.assertTrue(good and not line["hibernated"] and line["known"], line)
        self.assertEqual(asked, ["inspect", "hibernate"])
        good, line, _ = self.run_it({"hibernate": {"report": 1}, "resume": {"error": "lost"}})
        self.assertFalse(good)
        good, line, _ = self.run_it({"hibernate": {"report": 1}, "resume": {"report": 1}}, lost=True)
        self.assertFalse(good or not line["is_late"])


class Driver:
    """The driver's calls for processes, of which one may fail."""

    def __init__(self, fails: str = ""):
        self.fails, self.states = fails, {}

    def cuInit(self, flags):
        return 0

    def cuGetErrorName(self, code, text):
        return 1

    def cuCheckpointProcessGetState(self, pid, state):
        state._obj.value = self.states.get(pid.value, 0)
        return 0

    def __getattr__(self, name: str):
        op = name.removeprefix("cuCheckpointProcess")

        def call(pid, arguments):
            if op == self.fails:
                return 801
            self.states[pid.value] = {"Lock": 1, "Checkpoint": 2, "Restore": 1, "Unlock": 0}[op]
            return 0

        return call


class ByDriver(unittest.TestCase):
    def ask(self, driver: Driver, op: str) -> dict:
        with mock.patch.object(rank_hibernate, "driver", return_value=driver):
            return rank_hibernate.by_driver(op, [7, 8])

    def test_all_phases_of_all_processes(self):
        driver = Driver()
        self.assertEqual(self.ask(driver, "hibernate")["after"], {7: "checkpointed", 8: "checkpointed"})
        self.assertEqual(self.ask(driver, "resume")["after"], {7: "running", 8: "running"})
        self.assertIn("report", self.ask(driver, "inspect"))

    def test_what_was_only_locked_is_unlocked(self):
        driver = Driver("Checkpoint")
        self.assertEqual(self.ask(driver, "hibernate")["error"], "801 unknown")
        self.assertEqual(self.ask(driver, "resume")["after"], {7: "running", 8: "running"})


class DataParallel(unittest.TestCase):
    def test_every_engine_is_asked(self):
        seen = []

        class Client:
            core_engines = (b"0", b"1")

            async def _call_utility_async(self, utility, method, timeout, args, kwargs, engine):
                seen.append((utility, method, args, engine))
                await asyncio.sleep(0)
                return [f"{method} of {engine.decode()}"]

        class AsyncLLM:
            engine_core = Client()

            @staticmethod
            def from_engine_args(args):
                asyncio.get_running_loop()
                return AsyncLLM()

            async def sleep(self, level):
                seen.append(("sleep", level))

            async def wake_up(self, tags):
                seen.append(("wake", tags))

            async def check_health(self):
                seen.append("health")

            async def generate(self, prompt, params, request_id, *, data_parallel_rank):
                yield self.output([0])
                yield self.output([data_parallel_rank, *prompt["prompt_token_ids"]])

            @staticmethod
            def output(tokens):
                return types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=tokens)])

            def shutdown(self):
                seen.append("down")

        put = {name: types.ModuleType(name) for name in ("engine", "vllm", "arguments", "llm")}
        put["engine"].PROMPTS, put["engine"].NEW_TOKENS = [[5], [6]], 2
        put["vllm"].SamplingParams = put["arguments"].AsyncEngineArgs = lambda **given: given
        put["llm"].AsyncLLM = AsyncLLM
        put["vllm.engine.arg_utils"], put["vllm.v1.engine.async_llm"] = put.pop("arguments"), put.pop("llm")
        put |= {name: types.ModuleType(name) for name in ("vllm.engine", "vllm.v1", "vllm.v1.engine")}
        with mock.patch.dict(sys.modules, put):
            engine = rank_engine.Apart({"model": "none"})
            self.assertEqual(engine.collective_rpc("status"), ["status of 0", "status of 1"])
            self.assertEqual([call[3] for call in seen], [b"0", b"1"])
            engine.collective_rpc("poorwill_mark_restored")
            self.assertEqual(seen.pop(), "health")
            self.assertEqual(engine.tokens(), [[0, 5], [0, 6], [1, 5], [1, 6]])
            engine.sleep(level=2)
            engine.wake_up(tags=["weights"])
            engine.shutdown()
        self.assertEqual(seen[-3:], [("sleep", 2), ("wake", ["weights"]), "down"])

    def test_ranks_are_counted_through_all_engines(self):
        import rank_worker

        parallel = types.SimpleNamespace(data_parallel_index=1, world_size=2)
        config = types.SimpleNamespace(parallel_config=parallel)
        self.assertEqual(rank_worker.number(types.SimpleNamespace(rank=1, vllm_config=config)), 3)


class Choices(unittest.TestCase):
    def refused(self, *given: str) -> str:
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as said:
            ranks.parsed(["--mode", "poorwill", *given])
        return said.getvalue()

    def test_layouts(self):
        for given, count in (
            ([], 2),
            (["--pp", "2"], 2),
            (["--dp", "2"], 2),
            (["--tp", "2", "--pp", "2"], 4),
        ):
            self.assertEqual(ranks.parsed(["--mode", "cumem", *given]).count, count)
        for given, said in {
            ("--pp", "0"): "--pp is 0",
            ("--pp", "8"): "--layers is 4",
            ("--dp", "2", "--figures"): "--dp has several",
            ("--faults", "--figures"): "not allowed with",
            ("--kills", "nothing:never"): "there is no nothing:never",
        }.items():
            self.assertIn(said, self.refused(*given))

    def test_a_vllm_with_backends_has_an_option(self):
        chosen = {"sleep_mode_backend": "poorwill"}
        for version in ("0.25.1", "0.33.0", "0.33.0.dev1+cu130", "1.0"):
            self.assertEqual(common.sleep_mode("poorwill", version), chosen, version)
        for mode, version in (
            ("poorwill", "0.20.2"),
            ("poorwill", ""),
            ("cumem", "0.33.0"),
            ("none", "0.33.0"),
        ):
            self.assertEqual(common.sleep_mode(mode, version), {})
        self.assertEqual(common.installed("no-such-distribution"), "")

    def test_a_step_that_takes_too_long_ends_everything(self):
        ended = []
        with mock.patch.object(rank_engine, "kill_all", ended.append), mock.patch("os._exit", ended.append):
            lines = printed(lambda: rank_engine.Limit("sleep", 1)._end("sleep", 1))
        self.assertEqual((lines[0]["event"], lines[0]["ok"], ended[-1]), ("hung", False, 1))


if __name__ == "__main__":
    unittest.main()
