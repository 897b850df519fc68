"""The queue by which a disaggregated server takes its caches out of use for a release, and back for a resume.

SGLang does so before it asks its memory saver, or after. So what is to be taken back is noted here.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from poorwill.sglang._generations import Generation

NAMES = ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue")
"""The scheduler's queues that register caches for transfers. It has one of them, or none."""
RELEASE, RESUME = "release_memory_occupation", "resume_memory_occupation"
DEREGISTER = "deregister_buffer_to_engine"


class Queues:
    """Those of a scheduler, and which of them a release or resume has reached."""

    def __init__(self, generation: Generation, scheduler: Any) -> None:
        found = (getattr(scheduler, name, None) for name in NAMES if generation.has_queues)
        self._queues = [queue for queue in found if queue is not None]
        self._reached: list[Any] = []

    @contextlib.contextmanager
    def watched(self, call: str) -> Iterator[None]:
        """Notes the queues that are called in the context, whether they fail or not."""
        with contextlib.ExitStack() as stack:
            for queue in self._queues:
                stack.enter_context(self._noting(queue, call))
            yield

    def take_back(self, call: str) -> None:
        """Has the queues that a release or resume has reached as they were. It keeps waiting requests."""
        while self._reached:
            queue = self._reached.pop()
            if call == RELEASE:
                getattr(queue, RESUME)()
            elif hasattr(queue.kv_manager, DEREGISTER):
                getattr(queue.kv_manager, DEREGISTER)()

    @contextlib.contextmanager
    def _noting(self, queue: Any, call: str) -> Iterator[None]:
        stock = getattr(queue, call)

        def note() -> Any:
            self._reached.append(queue)
            return stock()

        setattr(queue, call, note)
        try:
            yield
        finally:
            delattr(queue, call)
