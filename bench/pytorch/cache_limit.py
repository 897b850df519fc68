#!/usr/bin/env python3
"""What `cache_limit` leaves mapped beside live tensors while weights are converted; prints JSON lines."""

import gc
import json
import random
import time
from typing import Any

import poorwill
import torch
from poorwill.torch import Pool

MIB = 1 << 20
LAYERS = 16


class Load:
    """Experts converted with transients of varied size, and small blocks of which most go."""

    def __init__(self, arena: poorwill.Arena, waits: bool) -> None:
        self.arena, self.waits = arena, waits
        self.live = self.peak_live = self.beyond = self.under_way = 0
        self.rng = random.Random(0)

    def beyond_live(self) -> int:
        return self.arena.stats().mapped_bytes - self.live

    def take(self, mib: float, fills: bool = False) -> Any:
        tensor = torch.empty(int(mib * MIB), dtype=torch.uint8, device="cuda")
        if fills:
            tensor.fill_(1)
        self.live += tensor.nbytes
        self.peak_live = max(self.peak_live, self.live)
        self.under_way = max(self.under_way, self.beyond_live())
        if self.waits:
            # The arena gives back in the background; what stays for a tenth of a second stays.
            torch.cuda.synchronize()
            deadline = time.monotonic() + 0.1
            limit = self.arena.cache_limit_bytes
            while limit is not None and self.beyond_live() > limit and time.monotonic() < deadline:
                time.sleep(0.0005)
            self.beyond = max(self.beyond, self.beyond_live())
        return tensor

    def give(self, tensors: list[Any]) -> None:
        self.live -= sum(tensor.nbytes for tensor in tensors)
        tensors.clear()

    def run(self) -> list[Any]:
        rng, kept = self.rng, []
        for _ in range(LAYERS):
            raw = [self.take(rng.randint(180, 260), True) for _ in range(4)]
            for mib in [tensor.nbytes // MIB for tensor in raw]:
                transient = [self.take(rng.randint(900, 2000), True)]
                kept.append(self.take(mib, True))
                self.give(transient)
            self.give(raw)
            for _ in range(40):
                kept.append(self.take(2 ** rng.uniform(-8, 8)))
                if rng.random() < 0.6:
                    self.give([kept.pop(rng.randrange(len(kept)))])
        return kept


def measure(number: int, limit: str | None, waits: bool) -> dict[str, Any]:
    with poorwill.arena("cuda:0", f"limit-{number}", cache_limit=limit, peers=()) as arena:
        with Pool(arena, "weights"):
            torch.cuda.current_blas_handle()
        load = Load(arena, waits)
        torch.cuda.synchronize()
        start = time.perf_counter()
        with Pool(arena, "weights"):
            kept = load.run()
        torch.cuda.synchronize()
        seconds, stats = time.perf_counter() - start, arena.stats()
        gib = {"beyond_live": load.beyond, "under_way": load.under_way, "created": stats.created_bytes}
        gib |= {"peak_mapped": stats.peak_mapped_bytes, "peak_live": load.peak_live}
        figures = {f"{name}_gib": round(value / (1 << 30), 2) for name, value in gib.items()}
        del kept
        gc.collect()
    return {"cache_limit": limit, "waits": waits, **figures, "seconds": round(seconds, 3)}


def main() -> None:
    torch.empty(1, device="cuda")
    measure(0, None, False)  # The first one warms PyTorch and the driver up.
    for number, limit in enumerate([None, "2GiB", "512MiB", "128MiB"]):
        for waits in (False, True):
            print(json.dumps(measure(1 + 2 * number + waits, limit, waits)), flush=True)


if __name__ == "__main__":
    main()
