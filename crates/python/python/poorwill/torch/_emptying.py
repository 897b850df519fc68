"""Logs once what emptying PyTorch's cache for our pools takes from its default pool.

Until 2.12 PyTorch leaves the default pool alone while any pool is begun. Since 2.13 it does so only while
the current stream is captured. Otherwise the default pool's cache goes back to the GPU as well, and its next
allocations request it again. That is correct but slow, so the log has its size. It is measured before the
first scope that is entered with enough cached.
"""

import logging
import threading

from poorwill.torch._gpu import Gpu, snapshot_segments
from poorwill.torch._import import torch

__all__ = ["LEAST_BYTES", "look"]

LEAST_BYTES = 64 << 20
"""Least cached bytes worth a look; below that, requesting them from the GPU takes longer."""

_log = logging.getLogger("poorwill.torch")


class _Once:
    """Whether this process knows what its PyTorch does, which is the same on each GPU."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_over = False

    def begins(self) -> bool:
        """Whether the caller is the one that measures."""
        with self._lock:
            is_first, self.is_over = not self.is_over, True
        return is_first


_once = _Once()


def look(gpu: Gpu) -> None:
    """Empties the cache as scopes do, and logs what the default pool lost, unless that is known.

    Not while this thread's stream is captured.
    """
    if _once.is_over or gpu.cached_bytes() < LEAST_BYTES:
        return
    before = _default_cache(gpu)
    if sum(before.values()) < LEAST_BYTES or not _once.begins():
        return
    gpu.flush()
    left = {segment["address"] for segment in snapshot_segments()}
    taken = [size for address, size in before.items() if address not in left]
    if taken:
        _log.warning(
            "PyTorch %s empties its default pool's cache whenever a poorwill pool gives memory back: %d MiB "
            "in %d segments now. What is loaded is right; what is allocated outside of pools next asks the "
            "GPU for memory again. Loading before that cache is in use avoids it",
            torch.__version__,
            sum(taken) >> 20,
            len(taken),
        )


def _default_cache(gpu: Gpu) -> dict[int, int]:
    """Sizes of the default pool's empty segments, by address."""
    return {
        segment["address"]: segment["total_size"]
        for segment in snapshot_segments()
        if segment["device"] == gpu.ordinal
        and tuple(segment["segment_pool_id"]) == (0, 0)
        and all(block["state"] == "inactive" for block in segment["blocks"])
    }
