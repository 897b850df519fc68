"""The figures that `torch._C._cuda_memoryStats` tells, nested as PyTorch nests them."""

from typing import Any

KINDS = [
    "allocation",
    "segment",
    "active",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "requested_bytes",
]
COUNTS = ["num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free"]


class Figures:
    """What one device's allocator has counted. `inactive_split` is not modelled, nor are oversize blocks."""

    def __init__(self) -> None:
        self._kinds = {
            kind: {
                pool: {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
                for pool in ("all", "small_pool", "large_pool")
            }
            for kind in KINDS
        }
        self.counts = dict.fromkeys(COUNTS, 0)

    def add(self, kind: str, is_small: bool, amount: int) -> None:
        for pool in ("all", "small_pool" if is_small else "large_pool"):
            figure = self._kinds[kind][pool]
            figure["current"] += amount
            figure["peak"] = max(figure["peak"], figure["current"])
            figure["allocated" if amount > 0 else "freed"] += abs(amount)

    def current(self, kind: str) -> int:
        return self._kinds[kind]["all"]["current"]

    def reset_peaks(self) -> None:
        for pools in self._kinds.values():
            for figure in pools.values():
                figure["peak"] = figure["current"]

    def reported(self) -> dict[str, Any]:
        kinds = {
            kind: {pool: dict(figure) for pool, figure in pools.items()}
            for kind, pools in self._kinds.items()
        }
        return {**kinds, **self.counts}
