#!/usr/bin/env python3
"""One engine over several GPUs of a host: every rank has to sleep and wake, and to have its own bytes back.

    ranks.py --mode poorwill --ranks 2
    ranks.py --mode poorwill --ranks 2 --faults
    ranks.py --mode cumem --ranks 2 --kind dense --layers 8 --kv-gib 8 --cycles 10

vLLM runs as it does behind a server: the engine in one process, and every rank in one of its own. The ranks
are queried through `LLM.collective_rpc`. Processes that do not sleep read what their GPUs have in use. The
weights are made up, and overwritten with other numbers on every rank, so that tokens depend on all of them.
Level 1 is cycled, woken as a whole and tag by tag; after level 2 the weights are written back from a copy.
With poorwill one rank alone then refuses to sleep: no rank may stay asleep. At the end, when the engine is
gone, as much of each GPU has to be free as at the start. Prints JSON lines.

The ranks speak by NCCL alone, without multicast over NVLink and without symmetric memory.
"""

import argparse
import contextlib
import os
import tempfile
import time
from pathlib import Path

import rank_worker
from common import (
    GIB,
    Ballast,
    adopt,
    conclude,
    emit,
    environment,
    every_line_says,
    gib,
)
from models import configuration, write_model
from reload import attempt, refusal
from sleep import ORDERS

SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
GIVEN_BACK = 0.9  # of weights and KV cache, the share that a sleep has to give back on every GPU
SLACK_GIB = 0.1  # of free memory, between the start and the end
REFUSED_BYTES = 1  # of host memory, where a rank is to refuse
UNDO_AFTER_S = 3  # how long a rank that is ready waits for the others
# What fails, and where: in the pool, in the plugin, or in the process.
FAULTS = (
    *(("sleep", place) for place in ("held", "suspend before", "suspend after", "suspend stopped")),
    *(("wake", place) for place in ("full", "wake_up before", "wake_up after", "wake_up stopped")),
)
DIFFERENT = 5  # tensors that are named, at most

# In the place of whatever is set: a function is passed to the workers, and the GPUs share nothing but NCCL.
SURROUNDINGS = {
    "NCCL_NVLS_ENABLE": "0",
    "POORWILL_RANKS_TIMEOUT": str(UNDO_AFTER_S),
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


class Cards:
    """The GPUs, each seen by a process that does not sleep."""

    def __init__(self, count: int):
        with contextlib.ExitStack() as opened:
            self.each = [opened.enter_context(Ballast(ordinal=ordinal)) for ordinal in range(count)]
            self._opened = opened.pop_all()

    def free(self) -> list[int]:
        return [card.free() for card in self.each]

    def total(self) -> list[int]:
        return [card.total() for card in self.each]

    def used(self) -> list[int]:
        return [total - free for total, free in zip(self.total(), self.free(), strict=True)]

    def settled(self, aims: list[int]) -> list[int]:
        """What is free once that is as much as is meant, or when that takes too long."""
        return [card.settled(aim) for card, aim in zip(self.each, aims, strict=True)]

    def __enter__(self) -> "Cards":
        return self

    def __exit__(self, *ended) -> None:
        self._opened.close()


def all_gib(sizes: list[int]) -> list[float | None]:
    return [gib(size) for size in sizes]


class Ranks:
    """A `vllm.LLM` over several GPUs, and what it has to be like when it is awake."""

    def __init__(self, llm, mode: str, cards, kv_bytes: int):
        self.llm, self.mode, self.cards = llm, mode, cards
        self.about: list[dict] = self.each(rank_worker.begin, mode)
        self.covered_bytes = [rank["weight_bytes"] + kv_bytes for rank in self.about]
        self.prints: list[dict[str, str]] = []
        self.reference: list[list[int]] = []

    def each(self, function, *arguments) -> list:
        """Calls a function in the process of every rank; what each returns, by rank."""
        return self.llm.collective_rpc(function, args=arguments)

    def tokens(self) -> list[list[int]]:
        from engine import generated

        return generated(self.llm)

    def overwrite(self, seed: int) -> None:
        """Gives the engine other weights, which it has to have from now on."""
        emit("overwritten", ranks=self.each(rank_worker.fill, seed))
        self.each(rank_worker.keep_copy)
        self.prints, self.reference = self.each(rank_worker.digests), self.tokens()

    def status(self) -> list[dict]:
        """What poorwill says of every rank; the events are left out."""
        if self.mode != "poorwill":
            return []
        statuses = self.llm.collective_rpc("poorwill_status")
        return [{name: value for name, value in one.items() if name != "events"} for one in statuses]

    def reported(self) -> list[list[dict]]:
        """Reports of the operations since the last call, by rank."""
        self.status()
        return self.each(rank_worker.reported)

    def timed(self, action, **named) -> float:
        """Seconds until all GPUs are done with it."""
        self.each(rank_worker.synchronize)
        start = time.perf_counter()
        action(**named)
        self.each(rank_worker.synchronize)
        return time.perf_counter() - start

    def sleep(self, level: int) -> dict:
        """Sleeps, and says what came of it on every GPU."""
        self.reported()
        awake = self.cards.used()
        seconds = self.timed(self.llm.sleep, level=level)
        asleep = self.cards.used()
        freed = [before - after for before, after in zip(awake, asleep, strict=True)]
        record = {
            "level": level,
            "sleep_s": round(seconds, 4),
            "used_awake_gib": all_gib(awake),
            "used_asleep_gib": all_gib(asleep),
            "freed_gib": all_gib(freed),
            "gave_back": all(
                size >= GIVEN_BACK * covered for size, covered in zip(freed, self.covered_bytes, strict=True)
            ),
            "host": self.each(rank_worker.host),
        }
        if self.mode == "poorwill":
            record["host_held_gib"] = all_gib([rank["host_bytes"] for rank in self.status()])
            record["sleep_reported"] = self.reported()
        return record

    def wake(self, tags: list[str] | None = None) -> dict:
        seconds = self.timed(self.llm.wake_up, tags=tags)
        name = "_".join(["wake", *(tags or [])])
        figures = {f"{name}_s": round(seconds, 4), f"used_after_{name}_gib": all_gib(self.cards.used())}
        if self.mode == "poorwill":
            figures[f"{name}_reported"] = self.reported()
        return figures

    def checks(self) -> dict:
        """Whether bytes and tokens are those that they have to be, and which tensors are not."""
        now = self.each(rank_worker.digests)
        equal = [before == after for before, after in zip(self.prints, now, strict=True)]
        record: dict = {"bytes_equal": equal, "tokens_equal": self.tokens() == self.reference}
        if not all(equal):
            record["different"] = [
                [name for name in before if before[name] != after.get(name)][:DIFFERENT]
                for before, after in zip(self.prints, now, strict=True)
            ]
        return record

    def cycle(self) -> dict:
        return {**self.sleep(1), **self.wake(), **self.checks()}

    def by_tag(self, tags: list[str]) -> dict:
        record = {"tags": tags, **self.sleep(1)}
        for tag in tags:
            record |= self.wake([tag])
        return {**record, **self.checks()}

    def dropped(self) -> dict:
        """Level 2, and the weights written back by us; with poorwill the engine refuses until they are."""
        record = {**self.sleep(2), **self.wake()}
        ours = self.mode == "poorwill"
        if ours:
            record["undefined"] = [rank["undefined"] for rank in self.status()]
            record["before"] = refusal(self, self.reference)
        self.each(rank_worker.write_back)
        if ours:
            record["restored"] = self.llm.collective_rpc("poorwill_mark_restored")
            weights = [["weights"]] * len(self.about)
            record["as_meant"] = (
                record["undefined"] == weights
                and record["restored"] == weights
                and record["before"]["refused"]
                and record["before"]["poorwill_error"]
            )
        return {**record, **self.checks()}

    def refused(self) -> dict:
        """A sleep that the last rank refuses, because it may not hold the host memory that it would take. The
        others have slept by then: all have to be awake again, and it has to be said which rank it was."""
        last = len(self.about) - 1
        limits = self.each(rank_worker.bound_host_memory, last, REFUSED_BYTES)
        try:
            seen = attempt(lambda: self.llm.sleep(level=1))
        finally:
            self.each(rank_worker.bound_host_memory, last, limits[last])
        record = {"rank": last, **seen, "used_gib": all_gib(self.cards.used())}
        if not seen["refused"]:
            self.llm.wake_up()
            return {**record, "as_meant": False}
        record["sleeping"] = [rank["sleeping"] for rank in self.status()]
        words = [f"rank {last}", "POORWILL_HOST_BUDGET"]
        record["as_meant"] = (
            seen["poorwill_error"]
            and all(word in seen["error"] for word in words)
            and not any(record["sleeping"])
        )
        return {**record, **self.checks()}

    def fault(self, op: str, rank: int, place: str) -> dict:
        """One rank cannot do it: all of them are as they were, or in the one state that is named."""
        if op == "wake":
            self.llm.sleep(level=1)
        act = (lambda: self.llm.sleep(level=1)) if op == "sleep" else self.llm.wake_up
        self.each(rank_worker.break_down, rank, place)
        seen = attempt(act)
        self.each(rank_worker.mend, rank)
        record = {"op": op, "rank": rank, "place": place, **seen, "used_gib": all_gib(self.cards.used())}
        record["sleeping"] = [sorted(one["sleeping"]) for one in self.status()]
        record["as_meant"] = record["sleeping"][0] == record["sleeping"][-1] and seen["refused"]
        self.llm.wake_up()
        return {**record, **self.checks()}

    def killed(self, rank: int, place: str) -> dict:
        """A rank ends in the midst of it, and the engine with it."""
        self.each(rank_worker.break_down, rank, place)
        begin = time.perf_counter()
        seen = attempt(lambda: self.llm.sleep(level=1))
        ended_s = round(time.perf_counter() - begin, 2)
        return {"rank": rank, "place": place, **seen, "ended_s": ended_s, "as_meant": seen["refused"]}


def judged(record: dict) -> bool:
    """Whether a step went as it has to, on every rank."""
    return (
        all(record.get("bytes_equal", [True]))
        and record.get("tokens_equal", True)
        and record.get("gave_back", True)
        and record.get("as_meant", True)
    )


def start(options: argparse.Namespace, folder: Path):
    """Starts vLLM; emits a line."""
    import engine as engines

    chosen = engines.settings(
        write_model(folder, options.kind, options.layers),
        mode=options.mode,
        kv_gib=options.kv_gib,
        utilization=0.5,
    )
    begin = time.perf_counter()
    from vllm import LLM

    imported = time.perf_counter()
    llm = LLM(
        **chosen,
        tensor_parallel_size=options.ranks,
        distributed_executor_backend="mp",
        disable_custom_all_reduce=True,
    )
    emit("start", import_s=round(imported - begin, 2), start_s=round(time.perf_counter() - imported, 2))
    return llm


def exercise(options: argparse.Namespace, ranks: Ranks) -> bool:
    """Goes through all steps; whether each went as it has to."""
    emit("ranks", ranks=ranks.about, used_gib=all_gib(ranks.cards.used()))
    ranks.overwrite(options.seed)
    repeatable = ranks.tokens() == ranks.reference
    emit("reference", tokens=ranks.reference, repeatable=repeatable, tensors=len(ranks.prints[0]))
    emit("before", reported=ranks.reported(), status=ranks.status())
    good = True

    def keep(step: str, record: dict, **fields) -> None:
        nonlocal good
        well = judged(record)
        good = good and well
        emit("step", step=step, **fields, **record, ok=well)

    for number in range(1, options.cycles + 1):
        keep("cycle", ranks.cycle(), cycle=number)
    for tags in ORDERS:
        keep("by tag", ranks.by_tag(tags))
    keep("level 2", ranks.dropped())
    keep("after level 2", ranks.cycle())
    if options.mode == "poorwill":
        keep("refused by one rank", ranks.refused())
        keep("after the refusal", ranks.cycle())
        for op, place in FAULTS if options.faults else ():
            for rank in range(options.ranks):
                keep("fault", ranks.fault(op, rank, place))
    emit("after", status=ranks.status())
    if options.faults and options.mode == "poorwill":
        keep("killed", ranks.killed(options.ranks - 1, options.kill))
    return good


def run(options: argparse.Namespace, folder: Path, cards) -> bool:
    before = cards.free()
    emit("cards", free_gib=all_gib(before), total_gib=all_gib(cards.total()))
    llm = start(options, folder)
    try:
        good = exercise(options, Ranks(llm, options.mode, cards, int(options.kv_gib * GIB)))
    finally:
        llm.llm_engine.engine_core.shutdown()
    after = cards.settled(before)
    given_back = all(was - now <= SLACK_GIB * GIB for was, now in zip(before, after, strict=True))
    emit("end", free_before_gib=all_gib(before), free_after_gib=all_gib(after), ok=given_back)
    return good and given_back


def uneven(settings: dict, ranks: int) -> list[str]:
    """What of a model cannot be split into so many equal parts."""
    return [f"{name} is {settings[name]}" for name in SPLIT if settings[name] % ranks]


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--mode", choices=["cumem", "poorwill"], required=True)
    arguments.add_argument("--ranks", type=int, default=2, help="GPUs, each with a rank")
    arguments.add_argument("--kind", choices=["small", "dense"], default="small")
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--kv-gib", type=float, default=2, help="on every GPU")
    arguments.add_argument("--cycles", type=int, default=5, help="of level 1, woken as a whole")
    arguments.add_argument("--faults", action="store_true", help="have each rank fail, and end one at last")
    arguments.add_argument(
        "--kill", choices=["suspend killed before", "suspend killed after"], default="suspend killed before"
    )
    arguments.add_argument("--seed", type=int, default=1234)
    options = arguments.parse_args(given)
    if options.ranks < 1:
        arguments.error(f"--ranks is {options.ranks}; it is 1 or more")
    if wrong := uneven(configuration(options.kind, options.layers), options.ranks):
        arguments.error(f"{options.kind} cannot be split over {options.ranks} ranks: {', '.join(wrong)}")
    return options


def main() -> None:
    options = parsed()
    adopt(environment(options.mode, dict(os.environ), **SURROUNDINGS))
    every_line_says(mode=options.mode, label=f"{options.ranks}-ranks")

    def whole() -> bool:
        with (
            tempfile.TemporaryDirectory(prefix="poorwill-bench-") as folder,
            Cards(options.ranks) as cards,
        ):
            good = run(options, Path(folder), cards)
        emit("done", ok=good)
        return good

    conclude(whole)


if __name__ == "__main__":
    main()
