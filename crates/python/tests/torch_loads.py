"""The loads that were measured on a GPU, and an allocator that counts: for PyTorch and its fake."""

import ctypes
import random
from typing import Any

from fake_torch.machine import Paper

MIB = 1 << 20
GIB = 1 << 30


class Alloc(Paper):
    """A pluggable allocator of two C functions, made here. It counts, and has no memory."""

    def __init__(self, limit_bytes: int = 1 << 50) -> None:
        super().__init__(limit_bytes)
        alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        self._functions = (alloc(self.allocate), free(self.free))

    def addresses(self) -> list[int]:
        return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._functions]


def take(torch: Any, mib: float, device: str = "cuda") -> Any:
    return torch.empty(int(mib * MIB), dtype=torch.uint8, device=device)


def moe(torch: Any, rng: random.Random) -> tuple[list[Any], int]:
    """Experts whose conversion takes transients of varied size. Returns what is kept, and the peak live."""
    kept = []
    live = peak = 0

    def meter(mib: int) -> Any:
        nonlocal live, peak
        live += mib
        peak = max(peak, live)
        return take(torch, mib)

    for _layer in range(24):
        raw = [meter(rng.randint(180, 260)) for _ in range(4)]
        for tensor in raw:
            transient = meter(rng.randint(900, 2000))
            kept.append(meter(tensor.numel() // MIB))
            live -= transient.numel() // MIB
            del transient
        kept += [meter(rng.randint(2, 9)) for _ in range(8)]
        live -= sum(tensor.numel() // MIB for tensor in raw)
        del raw, tensor
    return kept, peak * MIB


def experts(torch: Any, rng: random.Random, layers: int = 5, count: int = 64) -> tuple[list[Any], int]:
    """Experts that are quantised and laid out anew one by one, with a layer's weights stacked after each
    step.

    These are hundreds of small operations for a few large tensors. Returns the same."""
    kept = []
    live = peak = 0.0
    for _layer in range(layers):
        raw = [take(torch, 768), take(torch, 384)]
        live += 1152
        for whole in (768, 384):
            each = whole / count
            parts = []
            for _expert in range(count):
                wide, scaled = take(torch, each * 2), take(torch, each)
                parts.append(take(torch, each / 2))
                del wide, scaled
            stacked = take(torch, whole / 2)
            del parts
            laid_out = [take(torch, each / 2) for _expert in range(count)]
            peak = max(peak, live + 1.5 * whole)
            kept += [take(torch, whole / 2), take(torch, whole / 64)]
            live += whole / 2 + whole / 64
            del stacked, laid_out
        live -= 1152
        del raw
    return kept, int(peak * MIB)


def dense(torch: Any, rng: random.Random) -> tuple[list[Any], int]:
    """Layers that are converted to half their size, one tensor at a time. Returns the same."""
    kept = []
    live = peak = 0
    for _layer in range(60):
        for mib in (96, 64, 530, 270):
            raw = take(torch, mib)
            kept.append(take(torch, mib // 2))
            peak = max(peak, live + mib + mib // 2)
            live += mib // 2
            del raw
    return kept, peak * MIB


def blocks(torch: Any, rng: random.Random, count: int, frees: bool) -> list[Any]:
    """Blocks of 512 B to 256 MiB, of which about half are freed under way if any are."""
    kept: list[Any] = []
    for _ in range(count):
        kept.append(take(torch, 2 ** (19 * rng.random() ** (1 if frees else 2)) / 2048))
        if frees and rng.random() < 0.5:
            kept.pop(rng.randrange(len(kept)))
    return kept
