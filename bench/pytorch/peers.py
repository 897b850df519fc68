"""What it costs a wake that other GPUs may use an arena's memory: one JSON line for each number of peers.

    python3 bench/pytorch/peers.py >> peers.jsonl

Needs two GPUs that reach each other, PyTorch and the package. A pool of `--tensors` tensors of `--mib` MiB
sleeps and wakes without a copy, with no peers, and with one more at a time. `map_s` is what the wake took to
map its memory, the least of `--cycles`; `context` says whether the peers had a context by then.
"""

import argparse
import json
from typing import Any

import poorwill
import torch

MIB = 1 << 20


def take(mib: int) -> Any:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda:0")


def cycle(arena: Any) -> float:
    arena.sleep(level=2)
    return float(arena.wake().phases.map_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--mib", type=int, default=120)
    parser.add_argument("--cycles", type=int, default=5)
    asked = parser.parse_args()
    reach = [
        other for other in range(1, torch.cuda.device_count()) if torch.cuda.can_device_access_peer(other, 0)
    ]
    for has_context in (False, True):
        for count in range(len(reach) + 1):
            peers = reach[:count]
            if has_context:
                for other in peers:
                    torch.ones(1, device=f"cuda:{other}")
            arena = poorwill.arena("cuda:0", "peers", peers=peers)
            with arena.pool("weights"):
                kept = [take(asked.mib) for _ in range(asked.tensors)]
            map_s = min(cycle(arena) for _ in range(asked.cycles))
            arena.mark_restored("weights")
            print(json.dumps({"peers": count, "context": has_context, "map_s": round(map_s, 6)}), flush=True)
            del kept
            torch.cuda.empty_cache()
            arena.close()


if __name__ == "__main__":
    main()
