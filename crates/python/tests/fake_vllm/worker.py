"""A worker as poorwill's is: what the hooks may count on."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from poorwill import Decision, PoorwillError, UndoneError
from poorwill.vllm import _environment
from poorwill.vllm._processes import this_process


class MemoryFault(BaseException):
    """What a GPU does when work reads memory that is not mapped: nothing behind it can be trusted."""


WEIGHTS = ("embed", "layer", "lm_head")
"""The names of what the model of a rank has."""


class Worker:
    """One rank. `fails` has the errors of its next calls, by method; `None` lets one call pass."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.asleep: set[str] = set()
        self.unwritten: set[str] = set()
        """The weights that are awake without their bytes."""
        self.dropped = False
        self.events: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.fails: dict[str, list[Exception | None]] = {}
        self.wakes_nothing = False
        self.process = this_process()
        self.reaches = True
        """Whether it shares folders with the others."""
        self.communicators: list[dict[str, Any]] = []
        self.cannot_hibernate: str | None = None
        self.shared: list[dict[str, Any]] = []
        self.meets: Callable[[], object] = lambda: None
        """Waits until all ranks wake, as where NCCL resumes communicators that a sleep has suspended."""

    @contextlib.contextmanager
    def _decided(self, method: str) -> Iterator[None]:
        """A call in the context does not fail any more."""
        fails = self.fails.pop(method, [])
        try:
            yield
        finally:
            self.fails[method] = fails

    def _enter(self, method: str) -> None:
        self.calls.append(method)
        self._fail(method)

    def _fail(self, method: str) -> None:
        errors = self.fails.get(method)
        error = errors.pop(0) if errors else None
        if error is not None:
            if method in ("sleep", "wake_up", "discard"):
                self._tell(method.removesuffix("_up"), error=str(error))
            raise error

    def _tell(self, operation: str, copied: int = 0, error: str | None = None) -> None:
        self.events.append(
            {
                "operation": operation,
                "seconds": 0.25,
                "copied_bytes": copied,
                "skipped_bytes": 10,
                "released_bytes": 100,
                "lent_bytes": 0,
                "returned_bytes": 0,
                "release": "confirmed" if operation == "sleep" and error is None else None,
                "error": error,
            }
        )

    def poorwill_can_keep(self, kept: Any) -> None:
        self._enter("poorwill_can_keep")

    def sleep(self, level: int = 1, kept: Any = ()) -> None:
        self._enter("sleep")
        kept = set(_environment.read().keep_awake)
        if "weights" not in self.asleep | kept:
            # What was not written is so after level 1 as well.
            self.dropped = level == 2
            self.unwritten = set() if self.dropped else self.unwritten
        self.asleep = {"weights", "kv_cache"} - kept
        self._tell("sleep", copied=1000 if level == 1 else 0)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._enter("wake_up")
        if self.wakes_nothing:
            return
        woken = self.asleep & set(tags if tags is not None else self.asleep)
        if woken:
            self.meets()
        self.asleep -= woken
        if "weights" in woken and self.dropped:
            self.unwritten = set(WEIGHTS)
            self.dropped = False
        self._tell("wake", copied=500)

    def discard(self, tags: tuple[str, ...]) -> None:
        self._enter("discard")
        self.asleep |= set(tags)
        self._tell("discard")

    def reload_weights(self) -> str:
        self._enter("reload_weights")
        if "weights" in self.asleep:
            raise PoorwillError("reload_weights: the weights sleep")
        self.load_weights(WEIGHTS)
        self._tell("load")
        return "reloaded"

    def add_lora(self, lora_request: Any = None) -> bool:
        self._enter("add_lora")
        if self.asleep:
            raise PoorwillError("add_lora: the weights sleep")
        return True

    def poorwill_mark_restored(self) -> list[str]:
        self._enter("poorwill_mark_restored")
        marked = ["weights"] if self.unwritten else []
        self.unwritten.clear()
        return marked

    def extension(self, names: Iterable[str] = WEIGHTS) -> None:
        """A method that an extension of the worker brings, which has the model load weights."""
        self._enter("extension")
        self.load_weights(names)

    def load_weights(self, names: Iterable[str]) -> None:
        """As the model's: no other part learns of it."""
        if "weights" in self.asleep:
            raise MemoryFault(f"rank {self.rank} writes weights that sleep")
        self.unwritten -= set(names)

    def poorwill_status(self) -> dict[str, Any]:
        self._enter("poorwill_status")
        events, self.events = self.events, []
        return {
            "rank": self.rank,
            **self.process,
            "device": f"cuda:{self.rank}",
            "state": {tag: "asleep" if tag in self.asleep else "awake" for tag in ("weights", "kv_cache")},
            # What was dropped is reported before it is mapped again, too.
            "undefined": ["weights"] if self.unwritten or self.dropped else [],
            "unwritten": self._reported() if self.unwritten and "weights" not in self.asleep else None,
            "sleeping": sorted(self.asleep),
            "host_bytes": 1000,
            "unaccounted_bytes": None,
            "communicators": self.communicators,
            "cannot_hibernate": self.cannot_hibernate,
            "shared": self.shared,
            "events": events,
        }

    def poorwill_together(
        self, method: str, args: Sequence[Any], kwargs: dict[str, Any], path: str, first: int, ranks: int
    ) -> Any:
        """Ready is a rank whose method does not fail; here that is seen before it is called."""
        decision = Decision.join(path, first + self.rank, ranks)
        try:
            self._fail(method)
            decision.note_staged()
            while (verdict := decision.verdict) is None:
                time.sleep(0.001)
            if verdict == "undo":
                raise UndoneError(f"the {method} was undone")
        except BaseException:
            decision.decide("undo")
            raise
        with self._decided(method):
            result = getattr(self, method)(*args, **kwargs)
        # As where a release fails.
        self._fail("decided")
        return result

    def poorwill_reaches(self, path: str) -> bool:
        Decision.join(path, 0, 1)
        return self.reaches

    def poorwill_process(self) -> dict[str, Any]:
        self._enter("poorwill_process")
        return self.process

    def _reported(self) -> dict[str, Any]:
        return {
            "tensors": len(self.unwritten),
            "of_tensors": len(WEIGHTS),
            "bytes": 10 * len(self.unwritten),
            "of_bytes": 10 * len(WEIGHTS),
            "is_all": True,
            "is_updating": False,
            "names": sorted(self.unwritten),
        }

    def synchronize_device(self) -> None:
        self._enter("synchronize_device")

    def reset_mm_cache(self) -> None: ...

    reset_encoder_cache = reset_mm_cache

    def get_kv_connector_handshake_metadata(self) -> dict[int, str]:
        return {self.rank: "shaken"}

    def execute_model(self, batch: Any) -> dict[str, str]:
        self._enter("execute_model")
        if self.asleep:
            raise MemoryFault(f"rank {self.rank} computes while {self.asleep} sleep")
        return dict.fromkeys(batch.ids, "gibberish" if self.unwritten else "token")

    def execute_dummy_batch(self) -> None:
        self._enter("execute_dummy_batch")
        if self.asleep:
            raise MemoryFault(f"rank {self.rank} computes while {self.asleep} sleep")
