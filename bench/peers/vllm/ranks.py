#!/usr/bin/env python3
"""One engine over several GPUs of a host: every rank has to sleep and wake, and to have its own bytes back.

    ranks.py --mode poorwill --tp 2                     # --pp 2, --dp 2: the other layouts
    ranks.py --mode poorwill --tp 2 --faults            # one rank fails, at every place, and on every rank
    ranks.py --mode poorwill --tp 2 --kills all         # rank, core or caller of the sleep is killed
    ranks.py --mode poorwill --tp 2 --kind dense --layers 16 --figures --suspend-nccl
    ranks.py --mode poorwill --tp 2 --hibernate driver --suspend-nccl
    ranks.py --mode cumem --tp 2 --faults               # what becomes of vLLM's own sleep mode
    ranks.py --mode cumem --tp 2 --kind dense --layers 8 --kv-gib 8 --cycles 10

vLLM runs as it does behind a server: the engine in one process, and every rank in one of its own. The ranks
are queried through `collective_rpc`. Processes that do not sleep read what their GPUs have in use. The
weights are made up, and overwritten with other numbers on every rank, so that tokens depend on all of them.
Without another choice, level 1 is cycled, woken as a whole and tag by tag; after level 2 the weights are
written back from a copy. With poorwill one rank alone then refuses to sleep: no rank of its engine may stay
asleep. At the end, when the engine is gone, as much of each GPU has to be free as at the start. Prints JSON
lines. Faults, kills and hibernation have engines in processes of their own, and each step has a time limit.

The ranks speak by NCCL alone, without multicast over NVLink and without symmetric memory.
"""

import argparse
import os
import tempfile
from pathlib import Path

import rank_faults
import rank_figures
import rank_hibernate
import rank_host
import rank_kills
from common import GIB, adopt, conclude, emit, environment, every_line_says
from models import configuration
from rank_engine import SURROUNDINGS, Cards, Limit, Ranks, all_gib, opened
from sleep import ORDERS

SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
SLACK_GIB = 0.1  # of free memory, between the start and the end
STEP_S = 120  # the longest that a step may take


def judged(record: dict) -> bool:
    """Whether a step went as it has to, on every rank."""
    return (
        all(record.get("bytes_equal", [True]))
        and record.get("tokens_equal", True)
        and record.get("gave_back", True)
        and record.get("as_meant", True)
    )


def exercise(options: argparse.Namespace, ranks: Ranks) -> bool:
    """Goes through all steps; whether each went as it has to."""
    emit("ranks", ranks=ranks.about, used_gib=all_gib(ranks.cards.used()))
    repeatable = ranks.tokens() == ranks.reference
    emit("reference", tokens=ranks.reference, repeatable=repeatable, tensors=len(ranks.prints[0]))
    emit("before", reported=ranks.reported(), status=ranks.status())
    good = True

    def keep(step: str, action, **fields) -> None:
        nonlocal good
        with Limit(step, STEP_S):
            record = action()
        well = judged(record)
        good = good and well
        emit("step", step=step, **fields, **record, ok=well)

    for number in range(1, options.cycles + 1):
        keep("cycle", ranks.cycle, cycle=number)
    for tags in ORDERS:
        keep("by tag", lambda tags=tags: ranks.by_tag(tags))
    keep("level 2", ranks.dropped)
    keep("after level 2", ranks.cycle)
    if ranks.is_ours:
        keep("refused by one rank", ranks.refused)
        keep("after the refusal", ranks.cycle)
    emit("after", status=ranks.status())
    return good


def take(options: argparse.Namespace, folder: Path, cards) -> bool:
    """What this run is for."""
    if options.faults:
        return rank_faults.run(options, folder, cards)
    if options.kills:
        return rank_kills.run(options, folder, cards)
    if options.figures:
        return rank_figures.run(options, folder, cards)
    if options.hibernate:
        return rank_hibernate.run(options, folder, cards)
    ranks = opened(options, folder, cards)
    try:
        return exercise(options, ranks)
    finally:
        ranks.llm.shutdown()


def run(options: argparse.Namespace, folder: Path, cards) -> bool:
    before = cards.free()
    emit("cards", free_gib=all_gib(before), total_gib=all_gib(cards.total()))
    good = take(options, folder, cards)
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
    arguments.add_argument("--tp", "--ranks", type=int, help="tensor parallel ranks, 2 if nothing is given")
    arguments.add_argument("--pp", type=int, default=1, help="pipeline parallel ranks")
    arguments.add_argument("--dp", type=int, default=1, help="data parallel engines")
    arguments.add_argument("--kind", choices=["small", "small-moe", "dense"], default="small")
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--kv-gib", type=float, default=2, help="on every GPU")
    arguments.add_argument("--cycles", type=int, default=5, help="of level 1, woken as a whole")
    arguments.add_argument("--graphs", action="store_true", help="compiled, with graphs that sleep")
    arguments.add_argument("--suspend-nccl", action="store_true", help="enable_nccl_comm_suspend (vLLM 0.33)")
    arguments.add_argument("--seed", type=int, default=1234)
    arguments.add_argument(
        "--start-limit-s", type=float, default=150, help="the longest that a start may take"
    )
    instead = arguments.add_mutually_exclusive_group()
    instead.add_argument("--faults", action="store_true", help="have each rank fail, at many places")
    instead.add_argument("--kills", type=rank_kills.parsed, help="all, or VICTIM:PHASE with commas between")
    instead.add_argument("--figures", action="store_true", help="what two phases cost, what ranks hold")
    instead.add_argument("--hibernate", choices=["poorwill", "driver"], help="who takes the ranks off")
    arguments.add_argument("--only", default="", help="faults whose names have this in them, or that")
    arguments.add_argument("--first", type=int, default=0, help="the fault to begin with, as `stopped` says")
    arguments.add_argument("--deadline-s", type=float, default=420, help="after that no further fault begins")
    arguments.add_argument("--turns", type=int, default=10, help="of each figure")
    arguments.add_argument("--child", choices=["seeing", "blind"], help=argparse.SUPPRESS)
    options = arguments.parse_args(given)
    if options.tp is None:
        options.tp = 2 if options.pp == options.dp == 1 else 1
    for name in ("tp", "pp", "dp"):
        if getattr(options, name) < 1:
            arguments.error(f"--{name} is {getattr(options, name)}; it is 1 or more")
    options.count = options.tp * options.pp * options.dp
    if wrong := uneven(configuration(options.kind, options.layers), options.tp):
        arguments.error(f"{options.kind} cannot be split over {options.tp} ranks: {', '.join(wrong)}")
    if options.pp > options.layers:
        arguments.error(f"--layers is {options.layers}, and each of --pp {options.pp} ranks has one or more")
    if options.mode != "poorwill" and (options.kills or options.hibernate):
        arguments.error("--kills and --hibernate are of --mode poorwill")
    if options.dp > 1 and options.figures:
        arguments.error("--figures is of one engine, and --dp has several")
    return options


def main() -> None:
    options = parsed()
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if options.figures else {}
    adopt(environment(options.mode, dict(os.environ), **(SURROUNDINGS | more)))
    layout = [f"{name}{getattr(options, name)}" for name in ("tp", "pp", "dp") if getattr(options, name) > 1]
    every_line_says(mode=options.mode, label="-".join(layout) or "1-rank")

    def whole() -> bool:
        with tempfile.TemporaryDirectory(prefix="poorwill-bench-") as folder:
            if options.child:
                rank_host.serve(options, Path(folder))
                return True
            with Cards(options.count) as cards:
                good = run(options, Path(folder), cards)
        emit("done", ok=good)
        return good

    conclude(whole)


if __name__ == "__main__":
    main()
