"""Our memory saver behind the interface of SGLang's adapter."""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from poorwill._ranks import Together

logger = logging.getLogger("poorwill.sglang")

ADAPTER = "sglang.srt.utils.torch_memory_saver_adapter"
"""SGLang's module of it."""


def is_ours(adapter: Any) -> bool:
    """Whether an adapter's memory is Poorwill's."""
    return bool(getattr(adapter, "is_poorwill", False))


@cache
def adapter_over(base: type[Any]) -> Any:
    """The adapter of this process, an instance of SGLang's own class."""
    # It imports PyTorch, which not every process of SGLang has.
    from poorwill.compat.torch_memory_saver import torch_memory_saver as saver
    from poorwill.compat.torch_memory_saver._pools import Pools

    if saver._impl is None:
        # SGLang never reads a backup, so it may be stored as codes. It has regions, and is not taken whole.
        saver.stored = "compact"
        saver.hook_mode = "torch"
    logger.info("the memory saver of this process is Poorwill")

    def pools() -> Pools:
        used = saver._used()
        assert isinstance(used, Pools)
        return used

    class PoorwillAdapter(base):  # type: ignore[misc]
        """Regions, pauses and resumes go to Poorwill."""

        is_poorwill = True

        @contextmanager
        def configure_subprocess(self) -> Iterator[None]:
            # Pools need no library to be loaded before.
            yield

        def region(self, tag: str, enable_cpu_backup: bool = False) -> Any:
            return saver.region(tag=tag, enable_cpu_backup=enable_cpu_backup)

        def cuda_graph(self, **kwargs: Any) -> Any:
            # Replays read what the capture left in the pool. SGLang says so from 0.5.21 on only.
            return saver.cuda_graph(**{"enable_cpu_backup": True, **kwargs})

        def disable(self) -> Any:
            return saver.disable()

        def pause_all(self, tags: Collection[str], together: Together | None) -> bool:
            return pools().pause_all(tags, together)

        def resume_all(self, tags: Collection[str], together: Together | None) -> bool:
            return pools().resume_all(tags, together)

        def pause(self, tag: str) -> None:
            saver.pause(tag)

        def resume(self, tag: str) -> None:
            saver.resume(tag)

        @property
        def enabled(self) -> bool:
            return True

    return PoorwillAdapter()
