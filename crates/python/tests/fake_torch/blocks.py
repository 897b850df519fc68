"""Blocks, the free ones of which are kept by stream, size and address, and the pools that they are in."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any

from .driver import Segments

PoolId = tuple[int, int]
"""Of a graph's pool the first number counts, of a user's the second; the default pool is (0, 0)."""

Key = tuple[int, int, int]
"""Stream, size and address of a free block: the first that is not less than the wanted one fits best."""


@dataclass(eq=False)
class Block:
    """A part of a segment, or all of it."""

    stream: int
    size: int
    address: int
    pool: BlockPool
    is_expandable: bool = False
    requested: int = 0
    is_allocated: bool = False
    previous: Block | None = None
    next: Block | None = None
    frames: list[dict[str, Any]] = field(default_factory=list)
    """Where it was allocated."""

    @property
    def key(self) -> Key:
        return (self.stream, self.size, self.address)

    @property
    def is_split(self) -> bool:
        return self.previous is not None or self.next is not None

    @property
    def state(self) -> str:
        return "active_allocated" if self.is_allocated else "inactive"


class BlockPool:
    """The small or the large blocks of a pool; those that are free, ready to be found."""

    def __init__(self, is_small: bool, owner: PrivatePool | None = None) -> None:
        self.is_small = is_small
        self.owner = owner
        self.keys: list[Key] = []
        self._blocks: dict[int, Block] = {}

    def insert(self, block: Block) -> None:
        bisect.insort(self.keys, block.key)
        self._blocks[block.address] = block

    def remove(self, block: Block) -> None:
        del self.keys[bisect.bisect_left(self.keys, block.key)]
        del self._blocks[block.address]

    def place(self, stream: int, size: int) -> int:
        """Where the first block is that has the stream and at least the size, or a later stream."""
        return bisect.bisect_left(self.keys, (stream, size, 0))

    def at(self, place: int, stream: int) -> Block | None:
        if not 0 <= place < len(self.keys):
            return None
        block = self._blocks[self.keys[place][2]]
        return block if block.stream == stream else None

    def free_blocks(self) -> list[Block]:
        return [self._blocks[address] for _stream, _size, address in self.keys]

    @property
    def pool_id(self) -> PoolId:
        return (0, 0) if self.owner is None else self.owner.pool_id


class PrivatePool:
    """A pool of its own: a graph's, or a user's."""

    def __init__(self, pool_id: PoolId, segments: Segments | None) -> None:
        self.pool_id = pool_id
        self.segments = segments
        self.use_count = 1
        self.segment_count = 0
        self.small = BlockPool(True, self)
        self.large = BlockPool(False, self)
