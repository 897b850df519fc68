"""Places at which one rank of an engine fails in a sleep or a wake, and what has to become of all ranks.

Each fault is one line of a table, and is carried out on each rank. Afterwards all ranks have to be in the one
state that is expected. Their GPUs have to have given back or taken what belongs to it, and after the last
wake bytes and tokens have to be equal. vLLM's own sleep mode is given those faults that it can be given, and
what comes of each is written down.
"""

import argparse
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import rank_breaking
import rank_worker
from common import GIB, emit
from rank_engine import Ranks, all_gib
from rank_host import Hosted, LostError
from reload import attempt

SLACK_GIB = 0.1
FAULT_S, STOCK_S = 60, 25  # the longest that a fault may take, with all that belongs to it
TAGS = frozenset({"weights", "kv_cache"})


@dataclass(frozen=True)
class Fault:
    """One way to fail, and the state that all ranks have to be in.

    `expected` is `done`, as asked, or with an error `awake` or `asleep`. That is as before the call, or as
    asked where the pool had committed.
    """

    op: str
    place: str
    expected: str
    level: int = 1
    tags: tuple[str, ...] = ()  # of the wake; none are all
    slept: tuple[str, ...] = ()  # what sleeps before a sleep
    others: str = ""  # a fault of the other ranks at the same time
    lost: bool = False  # the weights are, and have to be written again
    nccl: bool = False  # with suspended communicators
    stock: bool = False  # vLLM's own sleep mode can be given it
    memory: bool = True  # what the GPUs hold is that of the state
    open: bool = False  # the ranks are known to wait for good: only where it is asked for
    cuts: bool = False  # so they do where communicators are suspended, for the rank that fails

    @property
    def name(self) -> str:
        words = [self.op, self.place, *(["beside", self.others] if self.others else [])]
        words += [f"of {'+'.join(self.tags)}"] if self.tags else []
        words += [f"while {'+'.join(self.slept)} sleeps"] if self.slept else []
        return " ".join([*words, *(["at level 2"] if self.level == 2 else [])])

    def before(self) -> frozenset[str]:
        """The tags that sleep before the call."""
        return frozenset(self.slept) if self.op == "sleep" else TAGS

    def asked(self) -> frozenset[str]:
        """Those that sleep if it succeeds."""
        return TAGS if self.op == "sleep" else TAGS - frozenset(self.tags or TAGS)

    def after(self, outcome: str) -> frozenset[str]:
        if outcome == "done":
            return self.asked()
        is_as_before = (self.op == "sleep") == (outcome == "awake")
        return self.before() if is_as_before else self.asked()


WEIGHTS, CACHE = ("weights",), ("kv_cache",)
FAULTS = [
    Fault("sleep", "entry", "awake", stock=True),
    Fault("sleep", "uncovered", "awake"),
    Fault("sleep", "peers", "awake"),
    Fault("sleep", "host shortage", "awake"),
    Fault("sleep", "empty_cache", "awake"),
    Fault("sleep", "held", "awake"),
    Fault("sleep", "pool before", "awake"),
    Fault("sleep", "pool after", "awake", cuts=True),
    Fault("sleep", "exit", "awake", stock=True),
    Fault("sleep", "stopped shortly", "done", stock=True),
    Fault("sleep", "stopped", "awake", stock=True),
    Fault("sleep", "join", "awake"),
    Fault("sleep", "decide", "awake"),
    Fault("sleep", "unwritable shortly", "done"),
    Fault("sleep", "unwritable", "awake"),
    Fault("sleep", "moved", "done"),
    Fault("sleep", "held", "awake", others="pool before"),
    Fault("sleep", "entry", "awake", others="stopped"),
    Fault("sleep", "held", "awake", level=2),
    Fault("sleep", "pool before", "awake", level=2),
    Fault("sleep", "pool after", "awake", level=2, lost=True, cuts=True),
    Fault("sleep", "stopped", "awake", level=2),
    Fault("sleep", "held", "awake", slept=CACHE),
    Fault("sleep", "pool before", "awake", slept=CACHE),
    Fault("sleep", "stopped", "awake", slept=CACHE),
    Fault("sleep", "pool before", "awake", slept=WEIGHTS),
    Fault("sleep", "no host memory", "awake", stock=True),
    Fault("wake", "entry", "asleep", stock=True),
    Fault("wake", "full", "asleep", stock=True),
    Fault("wake", "short", "asleep", stock=True),
    Fault("wake", "pool before", "asleep"),
    Fault("wake", "pool after", "awake", cuts=True),
    Fault("wake", "exit", "awake", stock=True),
    Fault("wake", "stopped shortly", "done", stock=True),
    Fault("wake", "stopped", "asleep", stock=True),
    Fault("wake", "join", "asleep"),
    Fault("wake", "decide", "asleep"),
    Fault("wake", "unwritable shortly", "done"),
    Fault("wake", "unwritable", "asleep"),
    Fault("wake", "moved", "done"),
    Fault("wake", "full", "asleep", others="pool before"),
    Fault("wake", "full", "asleep", tags=WEIGHTS),
    Fault("wake", "pool before", "asleep", tags=WEIGHTS),
    Fault("wake", "stopped", "asleep", tags=WEIGHTS),
    Fault("wake", "full", "asleep", tags=CACHE),
    Fault("wake", "pool before", "asleep", tags=CACHE),
    Fault("wake", "full", "asleep", level=2, lost=True),
    Fault("wake", "pool before", "asleep", level=2, lost=True),
    Fault("sleep", "NCCL not ready", "done", nccl=True, memory=False),
    Fault("sleep", "NCCL refuses", "awake", others="NCCL refuses", nccl=True),
    Fault("wake", "NCCL resumes late", "done", nccl=True),
    Fault("wake", "NCCL lacks memory", "awake", nccl=True, memory=False),
    Fault("sleep", "removed", "awake", open=True),
    Fault("sleep", "communicators", "awake", nccl=True, open=True),
    Fault("wake", "communicators", "awake", nccl=True, open=True),
]
OF_VLLM = frozenset({"no host memory"})  # places that vLLM's own sleep mode alone has


def chosen(options: argparse.Namespace) -> list[int]:
    """The faults that this run has, by number."""

    def has(fault: Fault) -> bool:
        if options.only and not any(words in fault.name for words in options.only.split(",")):
            return False
        if options.mode != "poorwill":
            return fault.stock
        return (
            fault.place not in OF_VLLM
            and (options.suspend_nccl or not fault.nccl)
            and (bool(options.only) or not (fault.open or (fault.cuts and options.suspend_nccl)))
        )

    return [number for number, fault in enumerate(FAULTS) if has(fault)]


# In the process of the engine


def state_name(tags: frozenset[str]) -> str:
    return "+".join(sorted(tags)) or "awake"


def calibrate(ranks: Ranks) -> dict:
    """What the GPUs hold in each state, as an engine without faults has it."""
    seen = {}

    def look(tags: frozenset[str]) -> None:
        ranks.each(rank_worker.synchronize)
        seen[state_name(tags)] = ranks.cards.used()

    for first, last in ((WEIGHTS, CACHE), (CACHE, WEIGHTS)):
        ranks.llm.sleep(level=1)
        look(TAGS)
        ranks.llm.wake_up(tags=list(first))
        look(frozenset(last))
        ranks.llm.wake_up(tags=list(last))
    ranks.each(rank_worker.settle)
    look(frozenset())
    ranks.used_by_state = seen
    return {"used_gib": {name: all_gib(used) for name, used in seen.items()}, **ranks.checks()}


def bring(ranks: Ranks, fault: Fault) -> None:
    """The state that the call begins in."""
    if fault.op == "wake" or fault.slept:
        ranks.llm.sleep(level=fault.level)
    if fault.slept:
        ranks.llm.wake_up(tags=sorted(TAGS - set(fault.slept)))
    if fault.op == "sleep":
        ranks.each(rank_worker.settle)


def act(ranks: Ranks, fault: Fault) -> Callable[[], None]:
    if fault.op == "sleep":
        return lambda: ranks.llm.sleep(level=fault.level)
    return lambda: ranks.llm.wake_up(tags=list(fault.tags) or None)


def tried(ranks: Ranks, fault: Fault, rank: int) -> dict:
    """Has the rank fail, and says what the caller saw."""
    bring(ranks, fault)
    ranks.each(rank_breaking.break_down, [rank], fault.op, fault.place)
    if fault.others:
        others = [other for other in range(len(ranks.about)) if other != rank]
        ranks.each(rank_breaking.break_down, others, fault.op, fault.others)
    begin = time.perf_counter()
    seen = attempt(act(ranks, fault))
    return {**seen, "seconds": round(time.perf_counter() - begin, 3)}


def near(used: int, meant: int) -> bool:
    return abs(used - meant) <= SLACK_GIB * GIB


def carry_out(ranks: Ranks, number: int, rank: int) -> dict:
    """One fault on one rank, and whether all ranks are what they have to be."""
    fault = FAULTS[number]
    record = tried(ranks, fault, rank)
    ranks.each(rank_breaking.mend)
    used = ranks.cards.used()
    sleeping = [set(one["sleeping"]) for one in ranks.status()]
    state = fault.after(fault.expected)
    as_meant = {
        "refused": record["refused"] == (fault.expected != "done"),
        "states": all(tags & TAGS == state and (bool(state) or not tags) for tags in sleeping),
    }
    if fault.memory:
        held = ranks.used_by_state[state_name(state)]
        as_meant["memory"] = all(near(now, then) for now, then in zip(used, held, strict=True))
        record["used_meant_gib"] = all_gib(held)
    ranks.llm.wake_up()
    if fault.lost:
        ranks.restore()
    record |= {"used_gib": all_gib(used), "sleeping": [sorted(tags) for tags in sleeping]}
    return {**record, "judged": as_meant, "as_meant": all(as_meant.values()), **ranks.checks()}


def written_down(ranks: Ranks, number: int, rank: int) -> dict:
    """One fault of vLLM's own sleep mode, and what came of it, in words."""
    fault = FAULTS[number]
    record = tried(ranks, fault, rank)
    used = ranks.cards.used()
    mended = attempt(lambda: ranks.each(rank_breaking.mend))
    record |= {"used_gib": all_gib(used), "states": by_memory(ranks.used_by_state, used)}
    # An answer that was not taken is taken for that of the next call.
    word = uuid.uuid4().hex
    echoed = attempt(lambda: ranks.each(rank_worker.echo, word))
    is_in_step = echoed.get("value") == [[number, word] for number in range(len(ranks.about))]
    woken = attempt(lambda: ranks.llm.wake_up())
    record["used_after_wake_gib"] = all_gib(ranks.cards.used())
    made = attempt(ranks.tokens)
    record |= {
        "mended": not mended["refused"],
        "is_in_step": is_in_step,
        "wake_error": woken.get("error"),
        "answers": not made["refused"],
        "answer_error": made.get("error"),
        "tokens_equal": made.get("value") == ranks.reference,
    }
    record["is_whole"] = bool(is_in_step and not woken["refused"] and record["tokens_equal"])
    return record


def by_memory(used_by_state: dict[str, list[int]], used: list[int]) -> list[str]:
    """The state of each rank, as far as its GPU shows it."""

    def of(card: int) -> str:
        return next((name for name, each in used_by_state.items() if near(used[card], each[card])), "between")

    return [of(card) for card in range(len(used))]


# In the process that judges


def is_well(record: dict) -> bool:
    """Whether the engine was what it has to be in the end, whatever came before."""
    return all(record.get("bytes_equal", [False])) and record.get("tokens_equal") is True


def judged(record: dict) -> bool:
    return bool(record.get("as_meant")) and is_well(record)


def jobs(options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """The faults of this run by number, and the ranks that fail."""
    every = [(number, rank) for number in chosen(options) for rank in range(options.count)]
    yield from every[options.first :]


def run(options: argparse.Namespace, folder: Path, cards, host=Hosted) -> bool:
    """All faults, each on every rank, with an engine that is started again where one has ended it."""
    ours, good, engine, at_first = options.mode == "poorwill", True, None, cards.free()
    end = time.monotonic() + options.deadline_s
    done = options.first
    try:
        for number, rank in jobs(options):
            if time.monotonic() > end:
                emit("stopped", next_first=done, ok=True)
                break
            if engine is None:
                engine = begun(options, cards, at_first, host)
            fault, record = FAULTS[number], {}
            named = {"fault": fault.name, "rank": rank, "expected": fault.expected if ours else None}
            try:
                if ours:
                    asked = {"number": number, "rank": rank}
                    record = engine.ask("fault", FAULT_S, **asked)
                else:
                    record = engine.ask("stock fault", STOCK_S, number=number, rank=rank)
            except LostError as error:
                record = {"hangs": error.is_late, "ended": not error.is_late, "error": str(error)}
            is_whole = judged(record) if ours else record.get("is_whole", False)
            emit("step", step="fault", number=done, **named, **record, ok=is_whole or not ours)
            good = good and (is_whole or not ours)
            done += 1
            if not (is_whole or is_well(record)):
                engine.end()
                engine = None
    finally:
        if engine is not None:
            engine.end()
    return good


def begun(options: argparse.Namespace, cards, at_first: list[int], host) -> Hosted:
    """An engine of its own, on GPUs that hold nothing of the one before."""
    cards.settled(at_first)
    engine = host(options, sees=True)
    emit("started", **engine.answer(options.start_limit_s))
    emit("calibrated", **engine.ask("calibrate", FAULT_S))
    return engine
