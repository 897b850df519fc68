"""The ranks that carry out the same requests, and what they tell one another."""

import contextlib
import importlib
import logging
from typing import Any, TypeVar

from poorwill import _ranks
from poorwill._native import Decision, PoorwillError

logger = logging.getLogger("poorwill.sglang")

CONTEXT = "sglang.srt.runtime_context"
"""SGLang's module of it."""

_Value = TypeVar("_Value")


class Ranks:
    """The ranks of one engine. All of them make the same calls, in the same order."""

    has_warned = False

    def __init__(self, manager: Any) -> None:
        parallel = importlib.import_module(CONTEXT).get_parallel()
        # All stages of a pipeline, or else the tensor parallel ranks.
        self._group = parallel.world_group.cpu_group if parallel.pp_size > 1 else manager.tp_cpu_group
        self._distributed: Any = importlib.import_module("torch").distributed
        self.count = int(self._distributed.get_world_size(self._group))
        self._rank = int(self._distributed.get_rank(self._group)) if self.count > 1 else 0
        self._made: list[Decision] = []

    def gather(self, value: _Value) -> list[_Value]:
        """What each rank says. All have come here, then."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        self._distributed.all_gather_object(values, value, group=self._group)
        return values

    def decisions(self, count: int) -> list[Decision] | None:
        """As many decisions of all ranks. None where each acts by itself.

        No rank fails here without the others: they would wait for it.
        """
        if self.count == 1:
            return None
        made, reason = self.gather(self._make(count))[0]
        joined = [_ranks.joined(path, self._rank, self.count) for path in made]
        decisions = [decision for decision in joined if decision is not None]
        reached = self.gather(len(decisions) == count)
        if all(reached):
            return decisions
        self.remove()
        if self._rank == 0 and not Ranks.has_warned:
            Ranks.has_warned = True
            apart = ", ".join(str(rank) for rank, is_reached in enumerate(reached) if not is_reached)
            logger.warning(
                "one rank may release its memory while another cannot: %s; name a folder that all of them "
                "share in %s, and they do it together or not at all",
                reason or f"rank {apart} does not reach {made[0]}",
                _ranks.RANKS_FOLDER,
            )
        return None

    def remove(self) -> None:
        """Removes the decisions, once all ranks have ended them."""
        for decision in self._made:
            with contextlib.suppress(PoorwillError):
                # What stays is removed by a later one.
                decision.remove()

    def _make(self, count: int) -> tuple[list[str], str]:
        """The paths of new decisions, or why there are none."""
        if self._rank != 0:
            return [], ""
        try:
            folder = _ranks.shared_folder()
            self._made = [Decision.create(folder) for _ in range(count)]
        except (PoorwillError, ValueError) as error:
            return [], str(error)
        return [str(decision.path) for decision in self._made], ""
