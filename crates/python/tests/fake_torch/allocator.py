"""A model of PyTorch's caching allocator on one device.

Which block an allocation gets, and what is freed when, is decided as in PyTorch 2.11. Segments come from a
machine or a pluggable allocator. Not modelled are uses by other streams, the garbage collection threshold,
memory fractions, checkpoints, inter-process handles and the growth of expandable segments. Waiting for the
lock gives the interpreter's lock away, so deadlocks of the two do not show.
"""

from collections.abc import Callable
from typing import Any

from .blocks import Block, BlockPool, PoolId, PrivatePool
from .driver import Driver, Segments
from .errors import OutOfMemoryError, check
from .figures import Figures
from .history import History
from .lock import Lock
from .settings import MIB, NO_LIMIT, AllocatorSettings

GRAIN = 512
SMALL = 1 * MIB
SMALL_SEGMENT = 2 * MIB
LARGE = 10 * MIB
LARGE_STEP = 2 * MIB

Filter = Callable[[int], bool]
"""Whether what is allocated now for a stream belongs to a pool."""

Capturing = Callable[[], bool]
"""Whether this thread's current stream is being captured."""


class DeviceAllocator:
    """The caching allocator of one device."""

    def __init__(
        self,
        device: int,
        machine: Driver,
        settings: AllocatorSettings,
        *,
        first_wins: bool = False,
        empties_default: Capturing | None = None,
    ) -> None:
        """Of several pools that claim an allocation PyTorch 2.11 takes the one that began last; other
        versions, and `first_wins`, the first.

        2.11 leaves the default pool's cache alone while any pool is begun. 2.13 does so while the current
        stream is captured: `empties_default` says whether it is.
        """
        self.device = device
        self.figures = Figures()
        self.history = History()
        self.mutex = Lock()
        self._machine = machine
        self._settings = settings
        self._first_wins = first_wins
        self._empties_default = empties_default
        self._small = BlockPool(True)
        self._large = BlockPool(False)
        self._pools: dict[PoolId, PrivatePool] = {}
        self._freeable: dict[PoolId, PrivatePool] = {}
        self._claims: list[tuple[PoolId, Filter]] = []
        self._active: dict[int, Block] = {}

    # What tensors call

    def malloc(self, requested: int, stream: int) -> int:
        """The address of a block."""
        with self.mutex:
            size = self._rounded(requested)
            pool = self._pool(size, stream)
            block = (
                self._cached(pool, size, stream)
                or self._new(pool, size, stream)
                or (self._release_available(pool, size, stream) and self._new(pool, size, stream))
                or (not self._is_shielded() and self._release_and_retry(pool, size, stream))
            )
            if not isinstance(block, Block):
                self.figures.counts["num_ooms"] += 1
                free, _ = self._machine.memory_bytes(self.device)
                self.history.add("oom", free, size, stream, self.history.frames("alloc", "all"))
                raise OutOfMemoryError(self._says(size))
            return self._hand_out(block, size, requested)

    def free(self, address: int) -> None:
        with self.mutex:
            block = self._active[address]
            check(block.is_allocated, "free of a block that is free")
            frames = self.history.frames("all") or block.frames
            for action in ("free_requested", "free_completed"):
                self.history.add(action, block.address, block.requested, block.stream, frames)
            block.is_allocated = False
            self.figures.add("allocation", block.pool.is_small, -1)
            self.figures.add("allocated_bytes", block.pool.is_small, -block.size)
            self._free_block(block)

    # What pools and graphs call

    def create_or_share(self, pool_id: PoolId, segments: Segments | None = None) -> PrivatePool:
        with self.mutex:
            pool = self._pools.get(pool_id)
            if pool is None:
                pool = self._pools[pool_id] = PrivatePool(pool_id, segments)
            else:
                check(pool.use_count > 0, "a pool without users is used again")
                check(segments is None, "a pool gets another allocator")
                pool.use_count += 1
            return pool

    def begin(self, pool_id: PoolId, claims: Filter) -> None:
        with self.mutex:
            self.create_or_share(pool_id)
            if any(known == pool_id for known, _ in self._claims):
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            self._claims.append((pool_id, claims))

    def end(self, pool_id: PoolId) -> None:
        with self.mutex:
            places = [place for place, (known, _) in enumerate(self._claims) if known == pool_id]
            if not places:
                raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
            del self._claims[places[0]]

    def release(self, pool_id: PoolId) -> None:
        with self.mutex:
            pool = self._private(pool_id)
            pool.use_count -= 1
            check(pool.use_count >= 0, "a pool is released more often than it was used")
            if pool.use_count == 0:
                check(pool_id not in self._freeable, "a pool becomes freeable twice")
                self._freeable[pool_id] = pool

    def empty_cache(self, pool_id: PoolId = (0, 0)) -> None:
        with self.mutex:
            self._release_cached(pool_id)

    def snapshot(self, pool_id: PoolId = (0, 0)) -> list[dict[str, Any]]:
        """The segments, of all pools or of one private pool, by address."""
        with self.mutex:
            pools = [self._small, self._large]
            if pool_id == (0, 0):
                pools += [half for pool in self._pools.values() for half in (pool.small, pool.large)]
            else:
                pools = [half for half in self._halves(pool_id)]
            blocks = [block for pool in pools for block in pool.free_blocks()]
            blocks += [block for block in self._active.values() if block.pool in pools]
            heads = sorted(
                (block for block in blocks if block.previous is None), key=lambda head: head.address
            )
            self.history.add("snapshot", 0, self.figures.current("active_bytes"), 0, [])
            return [_segment(self.device, head) for head in heads]

    def _halves(self, pool_id: PoolId) -> list[BlockPool]:
        pool = self._pools.get(pool_id)
        return [] if pool is None else [pool.small, pool.large]

    def _private(self, pool_id: PoolId) -> PrivatePool:
        check(pool_id in self._pools, f"there is no pool {pool_id}")
        return self._pools[pool_id]

    # Which block

    def _rounded(self, size: int) -> int:
        if size < GRAIN:
            return GRAIN
        interval = min(max(size.bit_length() - 1 - 20, 0), 15)
        divisions = self._settings.roundup_power2_divisions[interval]
        if divisions > 1 and size > GRAIN * divisions:
            step = (1 << (size.bit_length() - 1)) // divisions
            return _up(size, step)
        return _up(size, GRAIN)

    def _pool(self, size: int, stream: int) -> BlockPool:
        claims = iter(self._claims) if self._first_wins else reversed(self._claims)
        for pool_id, claimed in claims:
            if claimed(stream):
                pool = self._private(pool_id)
                return pool.small if size <= SMALL else pool.large
        return self._small if size <= SMALL else self._large

    def _cached(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """The best fit: the smallest block that is large enough, of these the lowest."""
        place, limit = pool.place(stream, size), self._settings.max_split_bytes
        block = pool.at(place, stream)
        while block is not None and block.is_expandable and not self._settings.expandable_segments:
            place += 1
            block = pool.at(place, stream)
        if block is None:
            return None
        if size < limit <= block.size:
            return None
        if size >= limit and block.size >= size + self._settings.max_non_split_rounding_bytes:
            return None
        pool.remove(block)
        return block

    def _new(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """A segment of its own."""
        segment = self._segment_bytes(size)
        segments: Segments = self._machine
        if (
            pool.owner is not None
            and pool.owner.segments is not None
            and not self._settings.expandable_segments
        ):
            segments = pool.owner.segments
        address = segments.allocate(segment, self.device, stream)
        if address == 0:
            return None
        if pool.owner is not None:
            pool.owner.segment_count += 1
        self.figures.add("segment", pool.is_small, 1)
        self.figures.add("reserved_bytes", pool.is_small, segment)
        self.figures.counts["num_device_alloc"] += 1
        self.history.add("segment_alloc", address, segment, stream, self.history.frames("alloc", "all"))
        return Block(stream, segment, address, pool, is_expandable=self._settings.expandable_segments)

    def _segment_bytes(self, size: int) -> int:
        if size <= SMALL:
            return SMALL_SEGMENT
        return self._settings.large_segment_bytes if size < LARGE else _up(size, LARGE_STEP)

    def _release_and_retry(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        self._release_cached((0, 0))
        self.figures.counts["num_alloc_retries"] += 1
        return self._new(pool, size, stream)

    def _hand_out(self, block: Block, size: int, requested: int) -> int:
        if self._is_to_split(block, size):
            rest = Block(
                block.stream, block.size - size, block.address + size, block.pool, block.is_expandable
            )
            rest.previous, rest.next = block, block.next
            if rest.next is not None:
                rest.next.previous = rest
            block.next, block.size = rest, size
            block.pool.insert(rest)
        block.is_allocated, block.requested = True, requested
        block.frames = self.history.frames("state", "alloc", "all")
        self.history.add("alloc", block.address, requested, block.stream, block.frames)
        self._active[block.address] = block
        for kind in ("allocation", "active"):
            self.figures.add(kind, block.pool.is_small, 1)
        for kind in ("allocated_bytes", "active_bytes"):
            self.figures.add(kind, block.pool.is_small, block.size)
        self.figures.add("requested_bytes", block.pool.is_small, requested)
        return block.address

    def _is_to_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.is_small or self._settings.expandable_segments:
            return rest >= GRAIN
        return size < self._settings.max_split_bytes and rest > SMALL

    def _says(self, size: int) -> str:
        free, total = self._machine.memory_bytes(self.device)
        return (
            f"CUDA out of memory. Tried to allocate {size / MIB:.2f} MiB. GPU {self.device} has a total "
            f"capacity of {total / MIB:.2f} MiB of which {free / MIB:.2f} MiB is free."
        )

    # What becomes of blocks

    def _free_block(self, block: Block) -> None:
        check(not block.is_allocated, "a block is freed that is in use")
        pool, size = block.pool, block.size
        del self._active[block.address]
        for neighbour in (block.previous, block.next):
            if neighbour is not None and not neighbour.is_allocated:
                _merge(block, neighbour)
        pool.insert(block)
        self.figures.add("active", pool.is_small, -1)
        self.figures.add("active_bytes", pool.is_small, -size)
        self.figures.add("requested_bytes", pool.is_small, -block.requested)
        block.requested = 0

    # What goes back

    def _release_available(self, pool: BlockPool, size: int, stream: int) -> bool:
        """Frees blocks of this pool and stream that are too large to be split.

        One that is large enough, or else the largest ones until they suffice.
        """
        limit = self._settings.max_split_bytes
        if limit == NO_LIMIT:
            return False
        wanted = max(size, limit)
        place = pool.place(stream, wanted)
        block = pool.at(place, stream)
        if block is not None and not block.is_expandable:
            self._release_block(block)
            return True
        released = 0
        while released < wanted:
            place -= 1
            block = pool.at(place, stream)
            if block is None or block.size < limit:
                break
            if not block.is_expandable:
                released += block.size
                self._release_block(block)
        return released >= wanted

    def _release_cached(self, pool_id: PoolId) -> None:
        if pool_id == (0, 0) and not self._is_shielded():
            self._release_blocks(self._large)
            self._release_blocks(self._small)
        for freeable in list(self._freeable.values()):
            if pool_id not in ((0, 0), freeable.pool_id):
                continue
            if pool_id == freeable.pool_id:
                # Where all streams are waited for.
                check(not self._is_shielded(), "captures_underway.empty()")
            check(freeable.use_count == 0, "a pool in use is freeable")
            self._release_blocks(freeable.small)
            self._release_blocks(freeable.large)
            if freeable.segment_count == 0:
                del self._pools[freeable.pool_id], self._freeable[freeable.pool_id]

    def _is_shielded(self) -> bool:
        """Whether what other pools than retired ones cache stays where it is."""
        return bool(self._claims) if self._empties_default is None else self._empties_default()

    def _release_blocks(self, pool: BlockPool) -> None:
        for block in pool.free_blocks():
            if not block.is_split:
                self._release_block(block)

    def _release_block(self, block: Block) -> None:
        """Gives a block back as a segment: the caller ensures that it is one."""
        pool, owner = block.pool, block.pool.owner
        segments: Segments = self._machine
        if owner is not None and owner.segments is not None and not block.is_expandable:
            segments = owner.segments
        segments.free(block.address, block.size, self.device, block.stream)
        if owner is not None:
            check(owner.segment_count > 0, "a pool gives back more segments than it has")
            owner.segment_count -= 1
        self.figures.add("segment", pool.is_small, -1)
        self.figures.add("reserved_bytes", pool.is_small, -block.size)
        self.figures.counts["num_device_free"] += 1
        frames = self.history.frames("all") or block.frames
        self.history.add("segment_free", block.address, block.size, block.stream, frames)
        pool.remove(block)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _merge(block: Block, neighbour: Block) -> None:
    """Makes a free neighbour a part of a block that becomes free."""
    neighbour.pool.remove(neighbour)
    block.size += neighbour.size
    if neighbour is block.previous:
        block.address, block.previous = neighbour.address, neighbour.previous
        if block.previous is not None:
            block.previous.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.previous = block


def _segment(device: int, head: Block) -> dict[str, Any]:
    blocks, block = [], head
    while True:
        blocks.append(block)
        if block.next is None:
            break
        block = block.next
    active = [block for block in blocks if block.state != "inactive"]
    return {
        "device": device,
        "address": head.address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": sum(block.size for block in blocks if block.is_allocated),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested for block in active),
        "stream": head.stream,
        "segment_type": "small" if head.pool.is_small else "large",
        "segment_pool_id": head.pool.pool_id,
        "is_expandable": head.is_expandable,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": block.state,
                "frames": block.frames,
            }
            for block in blocks
        ],
    }
