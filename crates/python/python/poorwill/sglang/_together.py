"""A release or resume is carried out by all ranks of an engine, or by none.

SGLang's own code runs as it is, except that its memory saver only takes notes. The tags that it names are
paused or resumed in one step, which the ranks decide together (`poorwill.Decision`). Whatever a rank raises,
it still meets the others, and all know how each of them has ended.
"""

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from poorwill import _ranks
from poorwill._native import Decision, PoorwillError, UndoneError
from poorwill._ranks import Together
from poorwill.sglang._answers import OccupationError
from poorwill.sglang._generations import Generation
from poorwill.sglang._group import Ranks
from poorwill.sglang._queues import RELEASE, RESUME, Queues

logger = logging.getLogger("poorwill.sglang")

_MISSING = object()


class _End(NamedTuple):
    """How a rank has ended its part."""

    error: str
    is_undone: bool
    """Whether it only went back because another rank could not."""
    is_made: bool
    """Whether its memory has changed."""


def carry_out(generation: Generation, original: Any, manager: Any, request: Any, *, releases: bool) -> Any:
    """SGLang's release or resume of the request's tags, on all ranks or on none. Returns its answer.

    Raises OccupationError with the reason where a rank cannot, and PoorwillError where the ranks are not all
    alike after that.
    """
    ranks = Ranks(generation, manager)
    there, back = ranks.decisions(2) or (None, None)
    queues = Queues(generation, generation.scheduler(manager))
    change = _Change(original, manager, request, queues, releases=releases, meets=ranks.count > 1)
    ends = ranks.gather(_end_of(change, there))
    if not any(end.error for end in ends):
        ranks.remove()
        return change.answer
    why = f"{change.call}: {_causes(ends)}"
    is_made = any(end.is_made for end in ends)
    if releases and is_made and there is not None:
        ranks.remove()
        # What was dropped cannot be had back, so no rank keeps what others have released.
        raise OccupationError(f"{why}; all ranks have released their memory")
    lost = ", ".join(filter(None, ranks.gather(_taken_back(change, back, is_made=is_made))))
    ranks.remove()
    if lost:
        raise PoorwillError(f"{why}; it could not be taken back: {lost}")
    raise OccupationError(f"{why}; everything is as it was")


def _end_of(change: "_Change", decision: Decision | None) -> _End:
    try:
        change.make(decision)
    except UndoneError as error:
        logger.warning("%s: %s", change.call, error)
        return _End(_said(error), True, change.is_made)
    except Exception as error:
        logger.exception("%s failed", change.call)
        return _End(_said(error), False, change.is_made)
    return _End("", False, change.is_made)


def _taken_back(change: "_Change", decision: Decision | None, *, is_made: bool) -> str:
    """Why it could not be; nothing if it could."""
    try:
        change.take_back(decision, is_made=is_made)
    except Exception as error:
        logger.exception("what a failed %s did could not be taken back", change.call)
        if decision is not None:
            with contextlib.suppress(PoorwillError):
                decision.decide("undo")
        return _said(error)
    return ""


def _causes(ends: list[_End]) -> str:
    failed = {rank: end for rank, end in enumerate(ends) if end.error}
    causes = {rank: end for rank, end in failed.items() if not end.is_undone} or failed
    return "; ".join(
        f"rank {rank}: {end.error}" if len(ends) > 1 else end.error for rank, end in causes.items()
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class _Change:
    """What one rank does for a request."""

    def __init__(
        self, original: Any, manager: Any, request: Any, queues: Queues, *, releases: bool, meets: bool
    ) -> None:
        self.call = RELEASE if releases else RESUME
        self.answer: Any = None
        self.is_made = False
        self._original = original
        self._manager = manager
        self._queues = queues
        self._request = request
        self._releases = releases
        self._meets = meets
        self._saver = manager.memory_saver_adapter
        self._notes = _Notes()
        self._tags = set(manager.offload_tags)
        self._stashed = getattr(manager, "stashed_model_static_state", _MISSING)

    def make(self, decision: Decision | None) -> None:
        """SGLang's steps and ours. After an exception no other rank waits for this one."""
        try:
            if self._releases:
                # They read the memory.
                self.answer = self._own()
                self.is_made = self._saver.pause_all(self._notes.tags, _together(decision))
            else:
                self.is_made = self._saver.resume_all(self._request.tags, _together(decision))
                self.answer = self._own()
        except BaseException:
            if decision is not None:
                with contextlib.suppress(PoorwillError):
                    # A verdict that was there stays.
                    self.is_made = decision.decide("undo") == "commit"
            raise

    def take_back(self, decision: Decision | None, *, is_made: bool) -> None:
        """Has everything as it was before. `is_made` says whether the memory of any rank has changed."""
        if self._releases:
            if is_made:
                self._saver.resume_all(self._notes.tags, _together(decision))
            self._queues.take_back(self.call)
        else:
            self._queues.take_back(self.call)
            if is_made:
                self._saver.pause_all(self._request.tags, _together(decision))
        # The scheduler holds this very set.
        self._manager.offload_tags.clear()
        self._manager.offload_tags.update(self._tags)
        if self._stashed is not _MISSING:
            self._manager.stashed_model_static_state = self._stashed
        elif hasattr(self._manager, "stashed_model_static_state"):
            # Copies of buffers, which stay on the GPU.
            del self._manager.stashed_model_static_state

    def _own(self) -> Any:
        """What SGLang does itself, with the memory as it is."""
        manager = self._manager
        manager.memory_saver_adapter = self._notes
        try:
            barriers = _no_barriers(manager) if self._meets else contextlib.nullcontext()
            with self._queues.watched(self.call), barriers:
                return self._original(manager, self._request)
        finally:
            manager.memory_saver_adapter = self._saver


class _Notes:
    """A memory saver that notes which tags it is to pause or resume."""

    def __init__(self) -> None:
        self.tags: list[str] = []

    def pause(self, tag: str) -> None:
        self.tags.append(tag)

    resume = pause


@contextlib.contextmanager
def _no_barriers(manager: Any) -> Iterator[None]:
    """Ranks meet after SGLang's steps: one that fails before a barrier would leave the others there."""
    distributed: Any = importlib.import_module("torch").distributed
    group, manager.tp_cpu_group = manager.tp_cpu_group, distributed.GroupMember.NON_GROUP_MEMBER
    try:
        with warnings.catch_warnings():
            # PyTorch says that a barrier of others does nothing.
            warnings.filterwarnings("ignore", message="Running barrier")
            yield
    finally:
        manager.tp_cpu_group = group


def _together(decision: Decision | None) -> Together | None:
    return None if decision is None else {"decision": decision, "undo_after": _ranks.timeout_s()}
