#!/usr/bin/env python3
"""Two arenas that lend take turns on one card, and each sleep keeps a part of a cache: what that takes.

Each process has 8 GiB of weights, which never change, and 8 GiB of a cache in 36 tensors. The card has room
for 1.3 of them. Prints a line of JSON for sleeps and wakes of each case: how many granules of a tensor are
kept, how far apart they are, and how many have changed since the last sleep. `grow` keeps ever more, as
requests do.

    kept.py            # with poorwill on PATH, a GPU and PyTorch
"""

import json
import subprocess
import sys
import time

GIB, MIB = 1 << 30, 1 << 20
GRANULE = 2 * MIB
TENSORS, TENSOR_VALUES = 36, 114 * MIB  # of bf16
CARD_BYTES = int(22.4 * GIB)
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
        if case["do"] == "end":
            return
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


class Other:
    """A process that serves."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "serve"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._answer()

    def ask(self, **what: object) -> dict:
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return {} if what["do"] == "end" else self._answer()

    def _answer(self) -> dict:
        return json.loads(self._process.stdout.readline())


def main() -> None:
    import torch

    torch.empty(1, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    others = torch.empty(max(0, free - CARD_BYTES), dtype=torch.uint8, device="cuda")
    both = []
    for _ in range(2):
        both.append(Other())
        both[-1].ask(do="sleep", granules=0, apart=1, changed=0, turn=0)
    for name, case in CASES.items():
        both[0].ask(do="wake")
        for turn in range(20):
            for one, other in [both, both[::-1]]:
                slept, woken = one.ask(do="sleep", turn=turn, **case), other.ask(do="wake")
            if turn in (2, 9, 19):
                print(json.dumps({"case": name, "turn": turn, "sleep": slept, "wake": woken}), flush=True)
        both[0].ask(do="sleep", turn=turn, **case)
    for one in both:
        one.ask(do="end")
    del others


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
