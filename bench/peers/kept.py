#!/usr/bin/env python3
"""Two arenas that lend take turns on one card, and each sleep keeps a part of a cache: what that takes.

Each process has 8 GiB of weights, which never change, and 8 GiB of a cache in 36 tensors. The card has room
for 1.3 of them. Prints a line of JSON for sleeps and wakes of each case: how many granules of a tensor are
kept, how far apart they are, and how many have changed since the last sleep. `grow` keeps ever more, as
requests do.

    kept.py            # with poorwill on PATH, a GPU and PyTorch
"""

import contextlib
import json
import sys
import time

from colocated import Process

GIB, MIB = 1 << 30, 1 << 20
GRANULE = 2 * MIB
TENSORS, TENSOR_VALUES = 36, 114 * MIB  # of bf16
FREE_GIB = 22.4
TURNS = 20
GROWS_BY = 1.3  # granules of a tensor in a turn
CASES = {
    "compact": {"granules": 39, "apart": 1, "changed": 3},
    "spread": {"granules": 58, "apart": 1, "changed": 19},
    "holes": {"granules": 39, "apart": 2, "changed": 3},
    "grow": {"granules": 2, "apart": 1, "changed": 0, "grows": True},
}


def serve() -> None:
    """One of the two: does what each line says, and answers with a line."""
    import poorwill
    import torch

    arena = poorwill.arena(lend=True)
    held = {}
    for tag in ["weights", "kv_cache"]:
        with poorwill.pool(tag=tag):
            empty = (torch.empty(TENSOR_VALUES, dtype=torch.bfloat16, device="cuda") for _ in range(TENSORS))
            held[tag] = [tensor.normal_() for tensor in empty]
    arena.declare("weights", changes="immutable")
    answer({})
    for line in sys.stdin:
        case = json.loads(line)
        kept = written(held["kv_cache"], case) if case["do"] == "sleep" else []
        torch.cuda.synchronize()
        began = time.perf_counter()
        report = arena.sleep(1, kept=kept) if case["do"] == "sleep" else arena.wake()
        torch.cuda.synchronize()
        took = {"seconds": time.perf_counter() - began, "copied_gib": report.copied_bytes / GIB}
        answer({**took, **report.as_dict()["phases"]})


def written(cache: list, case: dict) -> list[tuple[int, int]]:
    """Changes some granules of each tensor, and returns what the next sleep keeps."""
    granules, apart, turn = case["granules"], case["apart"], case["turn"]
    kept = []
    for tensor in cache:
        if case.get("grows"):
            granules = 2 + int(turn * GROWS_BY)
            first, end = (int((2 + at * GROWS_BY) * MIB) for at in [turn - 1, turn])
            tensor[max(0, first) : end].normal_()
        kept += [(tensor.data_ptr() + nth * apart * GRANULE, GRANULE) for nth in range(granules)]
        for nth in range(case["changed"]):
            at = (granules - 1 - nth) * apart * MIB  # in values
            tensor[at : at + 4096].fill_(turn + nth)
    return kept


def answer(of: dict) -> None:
    print(json.dumps({name: round(value, 4) for name, value in of.items()}), flush=True)


def main() -> None:
    from common import Ballast

    def ask(process: Process, do: str, **case: object) -> dict:
        return process(json.dumps({"do": do, **case}))

    with contextlib.ExitStack() as stack:
        stack.enter_context(Ballast(FREE_GIB))
        both = []
        for _ in range(2):
            both.append(stack.enter_context(contextlib.closing(Process(__file__, "serve"))))
            ask(both[-1], "sleep", granules=0, apart=1, changed=0, turn=0)
        for name, case in CASES.items():
            ask(both[0], "wake")
            for turn in range(TURNS):
                for one, other in [both, both[::-1]]:
                    slept, woken = ask(one, "sleep", turn=turn, **case), ask(other, "wake")
                if turn in (2, TURNS // 2, TURNS - 1):
                    print(json.dumps({"case": name, "turn": turn, "sleep": slept, "wake": woken}), flush=True)
            ask(both[0], "sleep", turn=TURNS, **case)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
