"""An engine's share of its GPU, from Poorwill's budget instead of vLLM's measurement.

vLLM takes the card's total, and counts all that PyTorch has not reserved as foreign. A slice has another
total, and memory that our pools released still counts as reserved. Both are corrected in vLLM's snapshots,
so that its own arithmetic is right; a whole card needs no correction. A configuration that cannot fit is
refused with figures before the engine is profiled.
"""

import functools
from typing import Any, NoReturn

from poorwill import _native
from poorwill._native import BudgetError
from poorwill._record import ADVICE
from poorwill.torch._gpu import snapshot_segments
from poorwill.vllm import _environment, _starts

GIB = 1 << 30


def install(memory_module: Any) -> None:
    """Corrects the snapshots of `vllm.utils.mem_utils` in this process, for every engine."""
    snapshot = memory_module.MemorySnapshot
    if getattr(snapshot.measure, "__poorwill__", False):
        return
    measure = snapshot.measure

    @functools.wraps(measure)
    def measured(self: Any) -> None:
        measure(self)
        correct(self)

    measured.__dict__["__poorwill__"] = True
    snapshot.measure = measured


def request_under(cap: str) -> _starts.Request:
    """What asks for the user's cap in the place of vLLM's share of the total."""

    def requested(init_snapshot: Any, cache_config: Any, external_weight_memory: int = 0) -> int:
        return _requested(init_snapshot, cap, external_weight_memory)

    return requested


def correct(snapshot: Any) -> None:
    """Corrects the total, the free memory and PyTorch's part in a snapshot of vLLM's.

    Adds what NVML says of this process.
    """
    ordinal = int(snapshot.device_.index)
    budget = _native.budget(f"cuda:{ordinal}")
    if budget.total_bytes is not None:
        snapshot.total_memory = min(snapshot.total_memory, budget.total_bytes)
    if budget.headroom_bytes is not None:
        snapshot.free_memory = min(snapshot.free_memory, budget.headroom_bytes)
    snapshot.own_bytes = budget.process_used_bytes
    snapshot.torch_memory -= unmapped_bytes(ordinal)
    _starts.note_held(ordinal, snapshot.own_bytes, snapshot.torch_memory)
    snapshot.free_memory = _starts.free_bytes(ordinal, snapshot.free_memory, snapshot.own_bytes)
    snapshot.cuda_memory = snapshot.total_memory - snapshot.free_memory
    snapshot.non_torch_memory = snapshot.cuda_memory - snapshot.torch_memory


def unmapped_bytes(ordinal: int) -> int:
    """Bytes that PyTorch counts as reserved on a GPU although they are not mapped any more."""
    ours = sum(
        segment["total_size"]
        for segment in snapshot_segments()
        if segment["device"] == ordinal and _native.torch_has_segment_at(segment["address"])
    )
    _, held_bytes = _native.torch_segments(ordinal)
    return max(0, int(ours) - held_bytes)


def _requested(snapshot: Any, cap: str, external_bytes: int = 0) -> int:
    """What an engine may use under the user's cap, in the place of vLLM's share of the total.

    Weights that another process holds for it are subtracted.
    """
    device = f"cuda:{snapshot.device_.index}"
    budget_bytes = int(_native.budget(device, cap).budget_bytes)
    left_bytes = budget_bytes - external_bytes
    beside = f", {gib(external_bytes)} of them for weights in another process" if external_bytes else ""
    if left_bytes <= 0:
        raise BudgetError(
            f"{_environment.BUDGET}={cap} allows {gib(budget_bytes)} of {device}{beside}: raise "
            f"{_environment.BUDGET}"
        )
    if snapshot.free_memory < left_bytes:
        raise BudgetError(
            f"{_environment.BUDGET}={cap} allows {gib(budget_bytes)} of {device}{beside}, and only "
            f"{gib(snapshot.free_memory)} of it is free: lower {_environment.BUDGET}, or end what else uses "
            "the GPU"
        )
    return left_bytes


class Envelope:
    """What one worker may use, from its first snapshot on: weights, profile, graphs and KV cache alike."""

    def __init__(self, worker: Any, cap: str | None) -> None:
        self.device = f"cuda:{worker.device.index}"
        self.requested_bytes = int(worker.requested_memory)
        self.free_at_start_bytes = int(worker.init_snapshot.free_memory)
        self.cap = cap
        given_bytes = int(worker.cache_config.kv_cache_memory_bytes or 0)
        # With a given KV cache size vLLM enforces no other bound. A cap is still enforced.
        self.is_bounding = cap is not None or not given_bytes
        # A given size has to fit in the cap.
        self._cache_bytes = given_bytes if cap is not None else 0
        if self._cache_bytes >= self.requested_bytes:
            self._refuse_cache("leaves nothing for weights")

    def arena_limit_bytes(self) -> int | None:
        """What the arena may map: the whole envelope, as far as the budget has it."""
        if not self.is_bounding:
            return None
        return min(self.requested_bytes, _native.budget(self.device).unclaimed_bytes)

    def used_bytes(self, snapshot: Any) -> int:
        """Bytes used since the first snapshot."""
        return self.free_at_start_bytes - int(snapshot.free_memory)

    def refuse_full(self, snapshot: Any, hint: str) -> None:
        """Raises BudgetError if nothing is left for a KV cache."""
        used = self.used_bytes(snapshot)
        if self.is_bounding and used >= self.requested_bytes:
            raise BudgetError(
                f"of the {gib(self.requested_bytes)} that the engine may use of {self.device}, {gib(used)} "
                f"are in use with the weights loaded, and nothing is left for a KV cache: {hint}"
            )

    def refuse_cache_beside(self, snapshot: Any, what: str, graphs_bytes: int) -> None:
        """Raises BudgetError if a KV cache of the given size does not fit beside what is used.

        CUDA graphs are counted with their minimum.
        """
        used = self.used_bytes(snapshot)
        if self._cache_bytes and used + self._cache_bytes + graphs_bytes > self.requested_bytes:
            graphs = f" and CUDA graphs of at least {gib(graphs_bytes)}" if graphs_bytes else ""
            self._refuse_cache(f"does not fit beside the {gib(used)} in use {what}{graphs}")

    def _refuse_cache(self, why: str) -> NoReturn:
        raise BudgetError(
            f"{self.allowance()}, and the KV cache of {gib(self._cache_bytes)} that --kv-cache-memory-bytes "
            f"(kv_cache_memory_bytes) asks for {why}: raise {_environment.BUDGET}, lower "
            "--kv-cache-memory-bytes, or leave it away for a cache that takes what is left"
        )

    def refuse_without_cache(self, available_bytes: int, pass_bytes: int, graphs_bytes: int) -> None:
        """Raises BudgetError if a pass of the model and CUDA graphs leave nothing for a KV cache."""
        if self.is_bounding and available_bytes <= 0:
            graphs = f" and {gib(graphs_bytes)} for CUDA graphs" if graphs_bytes else ""
            eager = ", or give --enforce-eager" if graphs_bytes else ""
            raise BudgetError(
                f"{self.allowance()}, and with {gib(pass_bytes)} for a pass of the model{graphs} beside the "
                f"weights nothing is left for a KV cache, which lacks {gib(-available_bytes)}: raise "
                f"{_environment.BUDGET} or --gpu-memory-utilization, whichever is in use, or lower "
                f"--max-num-batched-tokens{eager}"
            )

    def ran_out(self, what: str, snapshot: Any, hint: str, error: BaseException) -> BudgetError:
        """A BudgetError for an out-of-memory error of PyTorch's."""
        return BudgetError(
            f"{what} ran out of memory: of the {gib(self.requested_bytes)} that the engine may use of "
            f"{self.device} {gib(self.used_bytes(snapshot))} are in use: {hint} ({error})"
        )

    def allowance(self) -> str:
        """The allowance and its source, as the beginning of a sentence."""
        by = "--gpu-memory-utilization" if self.cap is None else f"{_environment.BUDGET}={self.cap}"
        return f"{by} allows the engine {gib(self.requested_bytes)} of {self.device}"

    def refused(self, error: BaseException, hint: str) -> BudgetError:
        """A BudgetError for PyTorch's error where loading exceeded the budget."""
        notes = [note for note in getattr(error, "__notes__", ()) if note != ADVICE]
        why = " ".join([str(error), *notes])
        refusal = (
            f"the weights do not fit in the {gib(self.requested_bytes)} that the engine may use of "
            f"{self.device}: {hint} ({why})"
        )
        if _environment.record_folder() is None:
            refusal += f"; with {_environment.RECORD}=FOLDER the load is recorded, and `poorwill replay` "
            refusal += "says what would fit"
        return BudgetError(refusal)

    def refuse_what_cannot_fit(self, what: str, needed_bytes: int, snapshot: Any, hint: str) -> None:
        """Raises BudgetError if `needed_bytes` do not fit beside what is used."""
        if not self.is_bounding:
            return
        used = self.used_bytes(snapshot)
        if used + needed_bytes > self.requested_bytes:
            raise BudgetError(
                f"{what} needs {gib(needed_bytes)}, and of the {gib(self.requested_bytes)} that the engine "
                f"may use of {self.device} {gib(used)} are in use: {hint}"
            )


def gib(size: float) -> str:
    """A size for a sentence."""
    return f"{size / GIB:.2f} GiB"
