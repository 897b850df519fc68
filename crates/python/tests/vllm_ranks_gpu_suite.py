"""What only two GPUs and vLLM itself show of ranks: they sleep and wake together or not at all.

    python -m pytest crates/python/tests/vllm_ranks_gpu_suite.py

where vLLM and this package are installed. Each layout has an engine of its own, in processes of its own, with
made-up weights. Every sleep has to give memory back on every GPU, and every wake the bytes of every rank.
One rank fails at each place, and what is left of an engine of which a process is killed has to end.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_rank_engine import ANSWER, KV_BYTES

HERE = Path(__file__).resolve().parent
START_S, STEP_S, ENDED_S, ORPHANED_S = 300, 90, 60, 15
GIVEN_BACK = 0.9
"""Of weights and KV cache, the share that a sleep has to give back on every GPU."""
SLACK_MIB = 100
TAGS = ["kv_cache", "weights"]

# The GPUs share nothing but NCCL, and a rank that is ready waits for the others only briefly.
SURROUNDINGS = {
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "POORWILL_RANKS_TIMEOUT": "3",
    "POORWILL_SLEEP_MODE": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
LAYOUTS = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "data": {"data_parallel_size": 2},
}


def used_mib() -> list[int]:
    """By GPU; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return list(map(int, ran.stdout.split())) if ran.returncode == 0 else []


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(len(used_mib()) < 2, reason="there are not two GPUs"),
]


class Hosted:
    """The engine's process, and all that it has started, in a group of their own."""

    def __init__(self, layout: str, **environment: str) -> None:
        script = str(HERE / "vllm_rank_engine.py")
        self.process = subprocess.Popen(
            [sys.executable, "-B", script, json.dumps(LAYOUTS[layout])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **SURROUNDINGS, **environment},
            start_new_session=True,
        )
        self.ranks: list[dict[str, Any]] = self.answer(START_S)

    def answer(self, limit_s: float = STEP_S) -> Any:
        """Its next answer. Where it is late, all of it is killed."""
        timer = threading.Timer(limit_s, self.kill)
        timer.start()
        try:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                if line.startswith(ANSWER):
                    return json.loads(line.removeprefix(ANSWER))
                print(line, end="", file=sys.stderr)
        finally:
            timer.cancel()
        pytest.fail(f"the engine's process ended, or was killed after {limit_s:.0f} s")

    def tell(self, what: str, /, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, arguments]) + "\n")
        self.process.stdin.flush()

    def ask(self, what: str, /, **arguments: Any) -> Any:
        self.tell(what, **arguments)
        answer = self.answer()
        assert "error" not in answer, answer
        return answer["value"]

    def refusal(self, what: str, /, **arguments: Any) -> str:
        """What the error says, which has to be ours."""
        self.tell(what, **arguments)
        answer = self.answer()
        assert "error" in answer, answer
        return str(answer["error"])

    def check(self) -> None:
        assert self.ask("different") == []

    def sleeping(self) -> list[list[str]]:
        """Of our two tags those that sleep; of others only where none of ours does."""
        every = [set(tags) for tags in self.ask("status", name="sleeping")]
        return [sorted(tags & set(TAGS) or tags) for tags in every]

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self.process.wait()


@pytest.fixture(scope="module", params=LAYOUTS)
def engine(request: pytest.FixtureRequest) -> Iterator[Hosted]:
    hosted = Hosted(request.param)
    yield hosted
    hosted.end()


def sleep(engine: Hosted, level: int = 1) -> None:
    """A sleep that gives memory back on every GPU."""
    awake = engine.ask("used")
    engine.ask("sleep", level=level)
    for rank, before, after in zip(engine.ranks, awake, engine.ask("used"), strict=True):
        assert before - after >= GIVEN_BACK * (rank["weight_bytes"] + KV_BYTES), rank


@pytest.mark.parametrize("tags", [None, TAGS, TAGS[::-1]])
def test_every_rank_has_its_bytes_back(engine: Hosted, tags: list[str] | None) -> None:
    for _ in range(2):
        sleep(engine)
        for each in [None] if tags is None else [[tag] for tag in tags]:
            engine.ask("wake", tags=each)
        engine.check()


def test_dropped_weights_are_refused_until_they_are_written(engine: Hosted) -> None:
    sleep(engine, level=2)
    engine.ask("wake")
    weights = [["weights"]] * len(engine.ranks)
    assert engine.ask("status", name="undefined") == weights
    assert engine.refusal("tokens")
    assert engine.ask("restore") == weights
    engine.check()


# One rank fails, at each place: the state of all, as it was or as asked, or with the call done.
FAULTS = [
    *(("sleep", place, []) for place in ("entry", "host shortage", "held", "pool before", "pool after")),
    *(("sleep", place, []) for place in ("exit", "stopped", "join", "decide")),
    *(("wake", place, TAGS) for place in ("entry", "full", "pool before", "stopped", "join", "decide")),
    *(("wake", place, []) for place in ("pool after", "exit")),
]


@pytest.fixture(scope="module")
def broken_engines() -> Iterator[Callable[[], Hosted]]:
    """One engine for all faults, and another where one has ended it."""
    made: list[Hosted] = []

    def running() -> Hosted:
        if not made or not made[-1].runs:
            made.append(Hosted("tensor"))
        return made[-1]

    yield running
    for each in made:
        each.end()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("op", "place", "left"), FAULTS)
def test_one_rank_that_fails_leaves_all_in_one_state(
    broken_engines: Callable[[], Hosted], op: str, place: str, left: list[str], rank: int
) -> None:
    engine = broken_engines()
    try:
        if op == "wake":
            engine.ask("sleep")
        engine.ask("break_down", rank=rank, op=op, place=place)
        assert engine.refusal(op)
        engine.ask("mend")
        assert engine.sleeping() == [left] * len(engine.ranks)
        engine.ask("wake")
        engine.check()
        sleep(engine)
        engine.ask("wake")
        engine.check()
    except BaseException:
        engine.end()
        raise


# A process is killed in the midst of a sleep.


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def children() -> dict[int, int]:
    """The parent of every process that runs."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name stands in parentheses and may hold anything.
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                found[int(path.parent.name)] = int(parent)
    return found


def below(pid: int) -> list[int]:
    of, found = children(), [pid]
    for each in found:
        found += [child for child, parent in of.items() if parent == each]
    return found[1:]


@pytest.mark.parametrize("phase", ["before", "staged", "after"])
@pytest.mark.parametrize("victim", ["rank", "core", "caller"])
def test_what_a_kill_leaves_ends_and_gives_its_memory_back(victim: str, phase: str, tmp_path: Path) -> None:
    """Before any rank is ready, while one waits for the other, and after all have committed."""
    before, decisions = used_mib(), tmp_path / "decisions"
    decisions.mkdir(mode=0o700)
    engine = Hosted("tensor", POORWILL_RANKS_FOLDER=str(decisions))
    try:
        pids = [rank["pid"] for rank in engine.ranks]
        core, watched = children()[pids[0]], set(below(engine.process.pid))
        held = [1] if phase == "staged" else [0, 1]
        when = "after" if phase == "after" else "before"
        engine.ask("hold_back", ranks=held, when=when, folder=str(tmp_path))
        engine.tell("sleep")
        assert wait_for(lambda: all((tmp_path / f"at-{rank}").exists() for rank in held), STEP_S)
        if phase == "staged":
            assert wait_for(lambda: any(decisions.glob("decision-*/staged-0")), STEP_S)
        os.kill({"rank": pids[-1], "core": core, "caller": engine.process.pid}[victim], signal.SIGKILL)
        time.sleep(0.2)
        (tmp_path / "go").touch()
        if victim == "caller":
            # vLLM's core may go on by itself, with both ranks in one state.
            if not wait_for(lambda: watched.isdisjoint(children()), ORPHANED_S):
                used = used_mib()
                assert abs(used[0] - before[0] - used[1] + before[1]) <= SLACK_MIB
                with contextlib.suppress(ProcessLookupError):
                    os.kill(core, signal.SIGKILL)
        else:
            assert "error" in engine.answer()
        assert wait_for(lambda: watched.isdisjoint(children()), ENDED_S)
    finally:
        engine.end()
    assert not list(decisions.glob("decision-*/undecided"))
    assert wait_for(
        lambda: all(now - was <= SLACK_MIB for was, now in zip(before, used_mib(), strict=True)), ENDED_S
    )
