"""The ranks that carry out the same requests, and what they tell one another."""

import importlib
from typing import Any, TypeVar

from poorwill import _ranks
from poorwill._native import Decision
from poorwill.sglang._generations import Generation

_Value = TypeVar("_Value")


class Ranks:
    """The ranks of one engine. All of them make the same calls, in the same order."""

    def __init__(self, generation: Generation, manager: Any) -> None:
        scheduler = generation.scheduler(manager)
        # All stages of a pipeline, or else the tensor parallel ranks.
        is_pipeline = generation.pipeline(scheduler).stages > 1
        self._group = scheduler.world_group.cpu_group if is_pipeline else manager.tp_cpu_group
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
        made = self.gather(self._make(count))[0]
        joined = [_ranks.joined(path, self._rank, self.count) for path in made]
        decisions = [decision for decision in joined if decision is not None]
        reached = self.gather(len(decisions) == count)
        if all(reached):
            return decisions
        self.remove()
        if self._rank == 0 and len(made) == count:
            _ranks.warn_apart("rank", reached, made[0])
        return None

    def remove(self) -> None:
        """Removes the decisions, once all ranks have ended them."""
        for decision in self._made:
            _ranks.remove(decision)

    def _make(self, count: int) -> list[str]:
        """The paths of new decisions, fewer where they cannot be made."""
        if self._rank == 0:
            opened = (_ranks.open_decision("rank") for _ in range(count))
            self._made = [decision for decision in opened if decision is not None]
        return [str(decision.path) for decision in self._made]
