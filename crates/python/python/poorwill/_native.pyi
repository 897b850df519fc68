import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias, final

__all__ = [
    "SHARED_MEMORY_WITHOUT_OPT_IN_BYTES",
    "Arena",
    "BackupView",
    "Block",
    "Budget",
    "BudgetError",
    "BudgetWarning",
    "Claim",
    "Claimed",
    "ClosedError",
    "Decision",
    "DeviceView",
    "Disk",
    "HeldMemory",
    "HibernateError",
    "HibernateReport",
    "HibernatedProcess",
    "Hibernation",
    "Hold",
    "HostBuffer",
    "LoadedTensor",
    "LostRange",
    "OutOfMemoryError",
    "PoorwillError",
    "Preparation",
    "PrepareReport",
    "ResumeReport",
    "ResumedProcess",
    "SleepError",
    "SleepPhases",
    "SleepReport",
    "Source",
    "Stats",
    "TagError",
    "TagStats",
    "UndoneError",
    "WakeError",
    "WakePhases",
    "WakeReport",
    "__version__",
    "_restored",
    "arena",
    "budget",
    "cuda_ordinal",
    "device_view_of",
    "discard",
    "drop_backups",
    "estimate_attention",
    "estimate_chunk_fwd_o",
    "estimate_chunk_gated_delta_rule_fwd_h",
    "estimate_matmul",
    "free_lent",
    "graph_pool",
    "hibernate",
    "hibernation",
    "known_compute_capabilities",
    "load_checkpoint",
    "make_immortal",
    "mark_restored",
    "offload_policy",
    "parse_bytes",
    "pool",
    "prepare_sleep",
    "process_state",
    "resume",
    "shared_memory_of_capability",
    "shared_memory_of_device",
    "sleep",
    "state",
    "stats",
    "torch_allocator",
    "torch_call_afterwards",
    "torch_carve",
    "torch_has_segment_at",
    "torch_make_default",
    "torch_moment",
    "torch_refusal",
    "torch_segments",
    "torch_set_cached_max",
    "torch_set_margin",
    "torch_tag_at",
    "torch_trim",
    "trim",
    "wake",
]

__version__: str

SHARED_MEMORY_WITHOUT_OPT_IN_BYTES: int
"""Shared memory, in bytes, of a thread block that does not opt in to more, on every GPU."""

class PoorwillError(RuntimeError):
    """An operation failed; the message says what would help."""

class BudgetError(PoorwillError):
    """A claim or a limit exceeds the budget, or the budget is unknown."""

class ClosedError(PoorwillError):
    """The arena was closed, or the block freed."""

class TagError(PoorwillError):
    """The arena does not know the tag, or the tag's state does not allow the call."""

class SleepError(PoorwillError):
    """A sleep or its preparation failed; the message says in which state that leaves the tags."""

    report: SleepReport | None
    """Set where the tags sleep, but part of their memory could not be released."""

class WakeError(PoorwillError):
    """A wake failed; everything sleeps as before, with its backups."""

class HibernateError(PoorwillError):
    """Processes could not be taken off their GPUs, or put back."""

    kind: str | None
    """Name of the reason."""
    pid: int | None
    """The process that failed, if it is one."""
    left: dict[int, str | None] | None
    """State of each process that does not run as before, by pid; empty where nothing was changed."""

class OutOfMemoryError(PoorwillError, MemoryError):
    """More memory than the arena's limit allows, or than the device has. Unknown figures are None."""

    needed_bytes: int | None
    """Needed beyond what could be reclaimed."""
    limit_bytes: int | None
    """Most that the arena may map."""
    live_bytes: int | None
    """In use by live blocks."""
    mapped_bytes: int | None
    """Device memory held."""
    reclaimable_bytes: int | None
    """Held, and in use by no block."""
    device_free_bytes: int | None
    """Free on the device, where that was full."""

class UndoneError(PoorwillError):
    """A group of ranks did not sleep or wake; this one is as it was."""

class BudgetWarning(UserWarning):
    """More memory was taken than was claimed, and the rest of the budget covers it."""

def parse_bytes(text: str, /) -> int:
    """Bytes of a size like "24GiB", "1.5GiB", "512m" or "1048576".

    Units are powers of 1024, except for "kB", "MB", "GB" and so on, which are powers of 1000. Raises
    ValueError for anything else.
    """

def known_compute_capabilities() -> list[tuple[int, int]]:
    """Compute capabilities whose shared memory is known, in ascending order."""

def shared_memory_of_capability(major: int, minor: int) -> int | None:
    """Shared memory, in bytes, that a block may opt in to; None for an unknown capability."""

def estimate_matmul(
    capability: tuple[int, int],
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    a_bytes: int,
    b_bytes: int,
    output_bytes: int,
    num_stages: int,
    num_warps: int,
) -> int:
    """Upper bound of a matrix product's shared memory, in bytes."""

def estimate_attention(
    capability: tuple[int, int],
    *,
    block_m: int,
    block_n: int,
    head_dim: int,
    element_bytes: int,
    num_stages: int,
    num_warps: int,
) -> int:
    """The same for attention."""

def estimate_chunk_fwd_o(
    capability: tuple[int, int],
    *,
    block_t: int,
    block_k: int,
    block_v: int,
    key_dim: int | None,
    element_bytes: int,
    state_v_first: bool,
    num_stages: int,
    num_warps: int,
) -> int:
    """The same for flash-linear-attention's `chunk_fwd_kernel_o`."""

def estimate_chunk_gated_delta_rule_fwd_h(
    capability: tuple[int, int],
    *,
    block_t: int,
    block_v: int,
    k_blocks: int,
    element_bytes: int,
    state_v_first: bool,
    num_stages: int,
    num_warps: int,
) -> int:
    """The same for its `chunk_gated_delta_rule_fwd_kernel_h_blockdim64`."""

def shared_memory_of_device(ordinal: int) -> int:
    """Shared memory, in bytes, that a thread block may opt in to on a GPU.

    Asks the driver without opening the GPU. Raises ValueError where the driver has no such GPU, and
    PoorwillError where there is no driver, no GPU, or no answer.
    """

class _DeviceLike(Protocol):
    """A device as torch.device describes it."""

    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...

class _HasName(Protocol):
    """An element type as numpy.dtype describes it."""

    @property
    def name(self) -> str: ...

_Device: TypeAlias = int | str | _DeviceLike
_Cap: TypeAlias = int | float | str
_Tags: TypeAlias = str | Iterable[str]
_Dtype: TypeAlias = str | _HasName | type
_State: TypeAlias = Literal["awake", "undefined", "asleep_backed_up", "asleep_dropped", "stranded"]

def cuda_ordinal(device: object = None, /) -> int:
    """Number of a GPU: None or "cuda" for the current one, a number, "cuda:1", or a torch.device.

    Does not ask the driver whether that GPU exists. Raises ValueError for anything that is not a GPU.
    """

def budget(device: _Device | None = None, cap: _Cap | Mapping[Any, _Cap] | None = None) -> Budget:
    """Decides how much memory of a device this process may use, from every available source.

    `device` is None or "cuda" for the current GPU (PyTorch's, or the first), a number, "cuda:1", "host",
    "host:8GiB", or a torch.device.

    `cap` is the user's upper bound:

    - bytes, as an int or a text like "20GiB" or "22528m";
    - a share of what there is, as a float or a text like "0.92" or "92%";
    - one for each device, as a mapping or a text like "cuda:0=20GiB,cuda:1=0.92".

    Memory that is in use already is claimed as `in_use`. Raises BudgetError where no source knows the
    device's memory, and PoorwillError where the device cannot be opened.
    """

@final
class Budget:
    """How much memory of a device this process may use, with sources and claims.

    All figures but `reclaimable_bytes` and `unclaimed_bytes` are as of its opening.
    """

    @property
    def device(self) -> str:
        """Name of the device."""
    @property
    def sources(self) -> list[Source]:
        """Every source that was consulted, with its figure."""
    @property
    def winner(self) -> str:
        """Source of the budget."""
    @property
    def total_bytes(self) -> int | None:
        """Smallest plausible total, before the user's cap."""
    @property
    def budget_bytes(self) -> int:
        """What this process may use."""
    @property
    def headroom_bytes(self) -> int | None:
        """What the process could take beyond that; None if unknown."""
    @property
    def process_used_bytes(self) -> int | None:
        """What the process had in use, with its context; None if unknown."""
    @property
    def reclaimable_bytes(self) -> int | None:
        """Lent by sleeping pools, now, and to be had by arenas that lend; None where no broker says so."""
    @property
    def unclaimed_bytes(self) -> int:
        """Bytes without a claim, now."""
    def claims(self) -> list[Claimed]:
        """Current claims, in the order in which they were made."""
    def claim(self, name: str, size: int | str) -> Claim:
        """Claims memory by name; `size` is bytes as an int, or a text like "1.53GiB".

        Several claims may have one name. Raises BudgetError, with nothing changed, when less is unclaimed.
        """
    def as_dict(self) -> dict[str, Any]:
        """The decision as plain values, like the command line's JSON."""

@final
class Source:
    """A source of a device's memory figure, and its result."""

    @property
    def name(self) -> str:
        """Name of the source."""
    @property
    def bytes(self) -> int | None:
        """Its figure; None where it had none."""
    @property
    def note(self) -> str | None:
        """Why there is none, or what is unusual about it."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Claimed:
    """A claim, as its budget lists it."""

    @property
    def name(self) -> str:
        """Name of the claim."""
    @property
    def bytes(self) -> int:
        """Claimed size."""
    @property
    def peak_bytes(self) -> int | None:
        """Measured peak; None if not measured."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Claim:
    """A part of a budget, reserved until it is released or this object is dropped.

    A `with` block measures usage and releases the claim at its end. Usage above the claim is a BudgetWarning
    where the rest of the budget covers it, otherwise a BudgetError. An exception of the block takes
    precedence.
    """

    @property
    def name(self) -> str:
        """Name of the claim."""
    @property
    def bytes(self) -> int:
        """Claimed size; the last one after the release."""
    @property
    def peak_bytes(self) -> int | None:
        """Measured peak in `with` blocks; None if not measured."""
    @property
    def over_bytes(self) -> int:
        """By how much the peak exceeds the claim."""
    def resize(self, size: int | str) -> None:
        """Changes the size: bytes as an int, or a text like "1.53GiB".

        Raises BudgetError, with nothing changed, when less is unclaimed.
        """
    def release(self) -> None:
        """Returns the claim to the budget. Repeating it does nothing."""
    def __enter__(self) -> Claim: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

def arena(
    device: _Device | None = None,
    name: str = "default",
    *,
    limit: _Cap | Mapping[Any, _Cap] | None = None,
    host_limit: int | str | None = None,
    pageable: bool = False,
    peers: Sequence[int] | None = None,
    keep_backups: bool | None = None,
    compress: Literal["auto", "off", "always"] | None = None,
    disk: str | PathLike[str] | None = None,
    disk_limit: int | str | None = None,
    cache_limit: int | str | None = None,
    lend: bool | str | PathLike[str] | None = None,
    links: bool | Sequence[int] | None = None,
    peer_copies: bool | Sequence[_Device] | None = None,
) -> Arena:
    """Opens an arena, or finds the open one: device memory that can sleep and wake.

    `device` is as for `budget`. Several arenas share a device and differ by name. Options given for an open
    arena must agree with it.

    `limit` bounds what the arena may map:

    - bytes, as an int or a text like "24GiB";
    - a share of the device's budget, as a float or a text like "0.92" or "92%", lowered until it fits;
    - one for each device, as a mapping or a text like "cuda:0=20GiB,0.92".

    Without a limit it is what is left of the budget; several such arenas compete for that.

    `cache_limit` bounds the freed memory that stays mapped for reuse, as seen before each operation in a pool
    of PyTorch's, whose cache counts. A pool needs 128 MiB or more. Without a limit all of it stays until a
    trim, or until the last pool ends.

    `host_limit` bounds the device's host memory for backups, and `pageable` leaves that unlocked. `peers`
    are the numbers of GPUs that may access this GPU's memory, by default all that can; `()` suits a process
    with one GPU. `disk` is a folder on a local disk for backups that host memory cannot hold, and
    `disk_limit` bounds what they take there. The first arena of a device decides all five.

    Unless `keep_backups` is False, backups stay after a wake for the next sleep. None means False where the
    device shares the computer's memory, else True.

    `compress` says whether backups are stored as codes, which saves three tenths of bf16 weights. It is
    "auto" (where the device encodes faster than its link), "off" or "always". None means "auto".

    `links` says whether wakes use the links of other GPUs to host memory, too: True for all `peers`, or their
    numbers. From the first sleep of 2 GiB on that takes 0.26 GiB of each of those GPUs. None means False. The
    first arena of a device decides.

    With `lend`, sleeps lend memory instead of releasing it. It stays on the device until another process
    needs it, and a wake copies only what is gone. `lend` is True, or the path of a broker's socket. True
    means the one that POORWILL_BROKER names, or the user's. A broker that is not there is started. Limits go
    by the device's total, not by what is free: where that is too little, the arena asks for what others lend.
    One without `lend` cannot.

    `peer_copies` says in which other GPUs' idle memory sleeps keep copies of what they back up. It is a
    sequence of devices, or True: all that this process sees and the device reaches. Wakes read copies some
    seven times as fast as host memory. A broker gives them up when a process asks for memory there, so this
    takes `lend`. None means False.

    Raises BudgetError for a limit that does not fit, or for an unknown budget. Raises PoorwillError where
    the device cannot be opened, cannot lend, or is open with other options.
    """

@final
class Arena:
    """Device memory that can sleep and wake; `poorwill.arena` opens one.

    It stays open until it is closed, also without references to this object.
    """

    @property
    def device(self) -> str:
        """Name of the device."""
    @property
    def name(self) -> str:
        """Name of the arena."""
    @property
    def limit_bytes(self) -> int:
        """Most that it may map."""
    @property
    def cache_limit_bytes(self) -> int | None:
        """Most freed memory that stays mapped for reuse, or None."""
    @property
    def shares_host_memory(self) -> bool:
        """Whether the device's memory is the computer's, so that backups take what a sleep releases."""
    @property
    def budget(self) -> Budget:
        """The budget that the limit came from, with its current claims."""
    def empty(self, shape: int | Sequence[int], dtype: _Dtype = "uint8", tag: str = "weights") -> Block:
        """Allocates a block for an array; its bytes are unspecified.

        `shape` is a number of elements, or one for each dimension. `dtype` is a text like "float32", or a
        NumPy type. On the host device `numpy.from_dlpack` shares the memory; from NumPy 2.2 on that array is
        writable.

        Raises OutOfMemoryError at the limit, and TagError while the tag sleeps.
        """
    def sleep(
        self,
        level: int = 1,
        tags: _Tags | None = None,
        *,
        unused: Iterable[tuple[int, int]] | None = None,
        kept: Iterable[tuple[int, int]] | None = None,
        keep_awake: _Tags | None = None,
        lend: bool | None = None,
        decision: Decision | None = None,
        undo_after: float | None = None,
    ) -> SleepReport:
        """Puts tags to sleep: releases their memory to the device and keeps their addresses.

        `level` 1 backs up weights in host memory, 2 drops them. `tags` is one, several, or None for all. All
        or nothing; tags that sleep already are left alone. Do not access sleeping memory.

        `unused` has pairs of an address and a length in bytes: device memory whose bytes need not survive.
        Whole granules of it are not backed up, and come back with unspecified bytes.

        `kept` has such pairs, too: memory whose bytes come back although the level drops their tag. The tags
        of `keep_awake` do not sleep.

        `lend` says whether the memory is lent instead of released, by default as the arena was opened.
        Backups are made in either case. Where a broker refuses, it is released, and the first time warned of.

        With a `decision`, all ranks that share it sleep, or none. Once this one is ready, it waits for the
        others for `undo_after` seconds, by default 300. Then it sleeps, or is as it was.

        Raises TagError for an unknown tag or one whose bytes are undefined, and SleepError when the sleep
        failed. Raises PoorwillError for `lend` in an arena that was opened without. Raises UndoneError where
        another rank could not sleep, or was not heard of in time. What the handler of a signal raises, as for
        Ctrl-C, ends the call: the tags are as before, or done in time.
        """
    def wake(
        self,
        tags: _Tags | None = None,
        *,
        verify: Literal["sample", "all"] | None = None,
        accept_losses: bool = False,
        timeout: float | None = None,
        decision: Decision | None = None,
        undo_after: float | None = None,
    ) -> WakeReport:
        """Wakes tags: the same bytes at the same addresses, or dropped memory by the tag's policy.

        `tags` is one, several, or None for all that sleep; awake tags are left alone.

        `verify` says how many granules are compared with their backups' digests: "all", or "sample" for one
        in 64. None means all where digests are fast, as on GPUs, otherwise a sample.

        `timeout` is how many seconds to wait for other calls with these tags, and for memory that others
        release.

        All or nothing: raises OutOfMemoryError or WakeError, and everything sleeps as before. A WakeError
        names all damaged backups. With `accept_losses` the rest wakes, and the report's `lost` lists the
        ranges to write again before `mark_restored`.

        `decision`, `undo_after` and signals are as for `sleep`.
        """
    def discard(self, tags: _Tags) -> SleepReport:
        """Drops the bytes of tags, awake or asleep, with their backups, whatever their policy.

        They then sleep; a wake gives them what their policy says of dropped memory.
        """
    def mark_restored(self, tags: _Tags) -> list[str]:
        """Marks tags as written again after their bytes were dropped or lost.

        Returns the tags that were undefined until now.
        """
    def lost_ranges(self) -> list[LostRange]:
        """Ranges of awake tags that were lost to damaged backups, in address order.

        A range stays listed until its tag is marked as restored or the block freed.
        """
    def prepare_sleep(
        self, level: int = 1, tags: _Tags | None = None, *, keep_awake: _Tags | None = None
    ) -> Preparation:
        """Starts to back up in the background what such a sleep would.

        The sleep then copies only what changed since. All memory stays usable meanwhile.
        """
    def state(self) -> dict[str, _State]:
        """State of each tag that has blocks, holds memory or sleeps.

        It is "awake", "asleep_backed_up" or "asleep_dropped". "undefined" is awake, but dropped by a sleep
        and not restored since. "stranded" is asleep with its memory, after a sleep that could not be undone.
        """
    def stats(self) -> Stats:
        """Current figures."""
    def snapshot(self) -> list[dict[str, Any]]:
        """Every segment with its blocks, in address order, as plain values."""
    def trim(self) -> int:
        """Releases all memory that serves no byte and that no hold keeps.

        Waits for work that may still use it. Returns the bytes released.
        """
    def keep_free(self, size: int | str) -> None:
        """Has others' lent memory given up where less of the device is free, after wakes and while it grows.

        That is for what asks no broker: kernels that are loaded late, memory of other allocators. `size` is
        an int or a text like "2GiB". At first it is a hundred-and-twenty-eighth of the device, 1 GiB at most.
        Without `lend` it changes nothing.
        """
    def drop_backups(self, tags: _Tags | None = None) -> int:
        """Drops the backups of awake tags and releases unused host memory; returns the bytes released.

        `tags` is one, several, or None for all that are awake. Memory that shares an extent with a remaining
        backup is released later. The next sleep copies the bytes again.

        Raises TagError, with nothing changed, for a named tag that sleeps with a backup.
        """
    def spill(self, tags: _Tags | None = None) -> int:
        """Moves the backups of sleeping tags to the arena's disk; returns the bytes moved.

        `tags` is one, several, or None for all that sleep. Sleeps do the same where host memory is short, the
        longest sleepers first. Wakes read ahead from there.

        Raises PoorwillError without a disk, or where it is full: what was not moved stays.
        """
    def hold(self, tag: str, holder: str) -> Hold:
        """Declares that `holder` has the physical memory of a tag registered, say with a network card.

        Until the hold ends, that memory stays mapped: a sleep or discard of the tag fails, and so does
        closing the arena. Take it before registering, and end it after deregistering. Holds add up.

        Raises TagError for an unknown or sleeping tag, and ValueError for an empty holder.
        """
    def held(self) -> dict[str, dict[str, Any]]:
        """The held tags, each with `holders` and the `reclaimable_bytes` that stay mapped only for them."""
    def read_backup(self, address: int, nbytes: int) -> bytearray:
        """Copies the backup of `nbytes` bytes of the device from `address` on, asleep or awake.

        The range lies in one live block: a tensor's `data_ptr()`, its offset included, and its bytes. The
        backup may be stored in any way, also as codes or on disk, and is compared with its digests. While the
        tag is awake it has the bytes of the last sleep or preparation, if backups are kept.

        Raises TagError where nothing is stored, PoorwillError for spoiled bytes, and ValueError for a range
        that does not lie in one live block.
        """
    def view_backup(self, address: int, nbytes: int) -> BackupView:
        """The backup of `nbytes` bytes of the device from `address` on, in place: nothing is copied.

        The tag's backups have to be declared "viewable" before the sleep. Otherwise as `read_backup`, but
        nothing is compared; `BackupView.verify` does that. A view never changes: as long as it lives, sleeps
        that have to store other bytes take other host memory.

        Raises TagError where nothing is stored, or not in place: on disk, as codes, in several parts. Raises
        ValueError for a range that does not lie in one live block.
        """
    def declare(
        self,
        tag: str,
        *,
        level1: Literal["backup", "drop"] | None = None,
        level2: Literal["backup", "drop"] | None = None,
        dropped: Literal["zeros", "undefined"] | None = None,
        changes: Literal["compared", "immutable", "volatile"] | None = None,
        backups: Literal["compact", "viewable"] | None = None,
    ) -> None:
        """Declares how a tag sleeps, before its first allocation, and how its bytes change, at any time.

        `level1` and `level2` choose "backup" or "drop" for such a sleep. `dropped` memory wakes as "zeros" or
        "undefined". `changes` are "compared" (unknown), "immutable" (promised; only a sample is compared) or
        "volatile" (always copied). A sleep that lends copies volatile bytes only once others need the memory.

        `backups` are "compact" (as codes where the arena compresses) or "viewable" (each block raw, at one
        host address); best declared before the first allocation, too. Omitted options keep the tag's
        defaults.

        Raises TagError when the tag is in use, or declared, with another policy.
        """
    def pool(self, tag: str = "weights") -> AbstractContextManager[Any]:
        """A context manager that routes PyTorch's allocations into this arena, as `tag`.

        Needs PyTorch. See `poorwill.torch`.
        """
    def graph_pool(self) -> Any:
        """A pool for `torch.cuda.graph` that takes graph memory from this arena.

        Needs PyTorch. See `poorwill.torch`.
        """
    def close(self) -> None:
        """Releases everything and closes the arena, after calls in progress. Repeating it does nothing.

        Live blocks lose their memory at once; their addresses stay reserved until the last is freed. The end
        of a `with` statement closes it, too.

        Raises SleepError during a CUDA graph capture, and TagError while a tag is held; both change nothing.
        """
    def __enter__(self) -> Arena: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        """Closes it, also after an exception."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class BackupView:
    """A backup in host memory, in place and read-only; `Arena.view_backup` makes it.

    `numpy.asarray(view)` shares it as a flat uint8 array, and `torch.from_numpy` that array; PyTorch does not
    know that it must not be written. The bytes stay as they are until the last of this object and its arrays
    is gone, also after wakes, sleeps and a close. Until then the host memory is in use. A forked child does
    not have it.
    """

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
    @property
    def address(self) -> int:
        """Its address in host memory, the same in every view until the backup is stored elsewhere."""
    def verify(self) -> None:
        """Compares its granules with the digests of what was stored.

        Raises PoorwillError for one that differs.
        """
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

@final
class Block:
    """An arena's memory as an array of elements, shared by DLPack: `numpy.from_dlpack(block)`.

    It is freed with the last of this object and its arrays. Access while its tag sleeps is a segmentation
    fault or a GPU error. So is access to a closed arena and, on the host device, from a forked child.

    On a GPU it belongs to the default stream. Other streams' work must complete before it is freed.
    """

    @property
    def tag(self) -> str: ...
    @property
    def dtype(self) -> str:
        """Name of the element type."""
    @property
    def shape(self) -> tuple[int, ...]:
        """Elements in each dimension."""
    @property
    def nbytes(self) -> int:
        """Size in bytes."""
    @property
    def address(self) -> int:
        """Its address, the same asleep and awake."""
    @property
    def device(self) -> str:
        """Name of the device."""
    def free(self) -> None:
        """Frees the memory once its last array is gone. Repeating it does nothing."""
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Exports a DLPack capsule.

        Raises TagError while the tag sleeps. Raises BufferError for another device, a copy, or a GPU stream
        that is not ordered with the default stream.
        """
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class Decision:
    """Where ranks that sleep or wake together read whether they do it: all of them, or none.

    One process makes it with `create` and gives its path to the ranks. Each rank joins it, and names it in
    `Arena.sleep` or `Arena.wake`. The last rank that is ready commits for all.
    """

    @staticmethod
    def create(folder: str | PathLike[str] | None = None) -> Decision:
        """Makes a decision in `folder`, or in a folder of this user in memory.

        Ranks on several machines need a folder of a file system that they share.

        Raises PoorwillError where the folder belongs to another user, or others may write into it.
        """
    @staticmethod
    def join(path: str | PathLike[str], rank: int, ranks: int) -> Decision:
        """Joins a decision as one of `ranks` ranks, counted from 0, for one sleep or wake.

        Raises PoorwillError where it was removed, and ValueError where there is no such rank.
        """
    @property
    def path(self) -> Path:
        """Its folder, for the other ranks."""
    @property
    def verdict(self) -> Literal["commit", "undo"] | None:
        """The verdict, "commit" or "undo"; None while there is none.

        Raises PoorwillError where it was removed, or cannot be read.
        """
    def decide(self, verdict: Literal["commit", "undo"]) -> Literal["commit", "undo"]:
        """Decides, unless that was done before. Returns the verdict that holds.

        Raises PoorwillError where it was removed, or cannot be written.
        """
    def note_staged(self) -> None:
        """Says that this rank is ready, where it has nothing to sleep or wake.

        Raises PoorwillError where it was removed, or cannot be written.
        """
    def remove(self) -> None:
        """Removes it. A rank that has not read it by then keeps its memory, and waits for good.

        Raises PoorwillError where it cannot be removed.
        """

@final
class Preparation:
    """Backups in the background, so that a later sleep copies only what changed since.

    A sleep or discard of one of its tags ends it. The end of a `with` block waits for it, or cancels it
    after an exception.
    """

    @property
    def done_bytes(self) -> int:
        """Bytes processed so far."""
    @property
    def total_bytes(self) -> int:
        """Live bytes when it began."""
    @property
    def is_ended(self) -> bool:
        """Whether it has ended, for whatever reason."""
    def cancel(self) -> None:
        """Requests its end. Copies in progress are finished and kept."""
    def wait(self, timeout: float | None = None) -> PrepareReport:
        """Waits for its end and reports what was done.

        Raises TimeoutError after `timeout` seconds; the preparation continues. Raises SleepError when host
        memory was missing or the device failed; finished backups stay.
        """
    def __enter__(self) -> Preparation: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class Hold:
    """Keeps the memory of a tag at its address until it is ended or dropped.

    The end of a `with` block ends it.
    """

    @property
    def tag(self) -> str:
        """The held tag."""
    @property
    def holder(self) -> str:
        """Name of the holder."""
    def end(self) -> None:
        """Ends the hold. Repeating it does nothing."""
    def __enter__(self) -> Hold:
        """Raises PoorwillError when it has ended, since nothing would be held."""
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class SleepReport:
    """What a sleep did."""

    @property
    def level(self) -> int:
        """Requested level; 2 for a discard."""
    @property
    def tags(self) -> list[str]:
        """Tags that this call put to sleep."""
    @property
    def already_asleep_tags(self) -> list[str]:
        """Tags that slept before."""
    @property
    def seconds(self) -> float:
        """Whole duration."""
    @property
    def planned_release_bytes(self) -> int:
        """To be released when that began: all of it is, but a shortfall and `shared_backup_bytes`."""
    @property
    def released_bytes(self) -> int:
        """Actual release: less `shared_backup_bytes`."""
    @property
    def shared_backup_bytes(self) -> int:
        """Taken by backups from memory that the device shares with the computer; 0 where it has its own."""
    @property
    def release(self) -> Literal["confirmed", "ledger", "shortfall"]:
        """Evidence: "confirmed" by the driver's figure, or only the "ledger" of calls."""
    @property
    def lent_bytes(self) -> int:
        """Lent instead of released: it stays in use until others need it."""
    @property
    def resident_bytes(self) -> int:
        """Neither lent nor backed up: volatile bytes that stay in place until others need the memory."""
    @property
    def lend_refused(self) -> str | None:
        """Why nothing was lent, although the call lends; None if nothing refused."""
    @property
    def copied_bytes(self) -> int:
        """Copied to host memory."""
    @property
    def stored_bytes(self) -> int:
        """Written there for them: less where they are stored as codes."""
    @property
    def unchanged_bytes(self) -> int:
        """Not copied: equal to the backup, or declared immutable."""
    @property
    def unchecked_bytes(self) -> int:
        """Part of `unchanged_bytes` that was not compared: declared immutable."""
    @property
    def peer_bytes(self) -> int:
        """Copied to other devices' memory besides."""
    @property
    def peer_refused(self) -> str | None:
        """Why some of it was not, where that is no lack of memory; None if nothing refused."""
    @property
    def unused_bytes(self) -> int:
        """Neither copied nor compared: declared unused, in whole granules."""
    @property
    def fast_digests(self) -> bool:
        """Whether the device computes digests at memory speed; otherwise everything is copied."""
    @property
    def discarded_bytes(self) -> int:
        """Live bytes that were dropped, in whole granules."""
    @property
    def kept_bytes(self) -> int:
        """Backed up of dropped tags, since the call keeps them, in whole granules."""
    @property
    def unaccounted_bytes(self) -> int:
        """Device memory of this process beyond this arena and its context."""
    @property
    def device_free_before_bytes(self) -> int:
        """Free device memory before."""
    @property
    def device_free_after_bytes(self) -> int | None:
        """Free device memory after; None if unknown."""
    @property
    def phases(self) -> SleepPhases:
        """Where the time went."""
    def as_dict(self) -> dict[str, Any]:
        """Plain values, like the command line's JSON."""

@final
class SleepPhases:
    """Where the time of a sleep went, in seconds."""

    @property
    def copy_s(self) -> float:
        """Getting host memory, copying, and digests of what was stored."""
    @property
    def digest_s(self) -> float:
        """Comparing with the backups before that, while the first of them are unmapped."""
    @property
    def unmap_s(self) -> float: ...
    @property
    def release_s(self) -> float:
        """Releasing memory."""
    def as_dict(self) -> dict[str, Any]:
        """Plain values, like the command line's JSON."""

@final
class WakeReport:
    """What a wake did."""

    @property
    def tags(self) -> list[str]:
        """Tags that this call woke."""
    @property
    def already_awake_tags(self) -> list[str]:
        """Tags that were awake before."""
    @property
    def seconds(self) -> float:
        """Whole duration."""
    @property
    def mapped_bytes(self) -> int:
        """Memory mapped at its addresses again."""
    @property
    def returned_bytes(self) -> int:
        """Lent by the sleep or left in place, and still there: not copied."""
    @property
    def copied_bytes(self) -> int:
        """Copied from host memory."""
    @property
    def read_bytes(self) -> int:
        """Read there for them: less where these are codes."""
    @property
    def linked_bytes(self) -> int:
        """Of the copied bytes, those that came over other GPUs' links."""
    @property
    def peer_bytes(self) -> int:
        """Of the copied bytes, those that came from other devices' memory."""
    @property
    def disk_read_bytes(self) -> int:
        """Read from disk before that."""
    @property
    def zeroed_bytes(self) -> int:
        """Overwritten with zeros."""
    @property
    def verified_bytes(self) -> int:
        """Compared with the backup's digests, and equal."""
    @property
    def undefined_tags(self) -> list[str]:
        """Tags that are undefined until they are marked as restored."""
    @property
    def lost(self) -> list[LostRange]:
        """Accepted losses: undefined until they are written again."""
    @property
    def phases(self) -> WakePhases:
        """Where the time went."""
    def as_dict(self) -> dict[str, Any]:
        """Plain values, like the command line's JSON."""

@final
class LostRange:
    """A range of bytes that a damaged backup lost."""

    @property
    def tag(self) -> str: ...
    @property
    def block(self) -> str:
        """Its block, as errors name it."""
    @property
    def offset_bytes(self) -> int:
        """Offset in the block."""
    @property
    def addr(self) -> int:
        """Address on the device."""
    @property
    def bytes(self) -> int:
        """Size."""
    def as_dict(self) -> dict[str, Any]:
        """Plain values, like the command line's JSON."""

@final
class WakePhases:
    """Where the time of a wake went, in seconds. Copies overlap the other phases."""

    @property
    def create_s(self) -> float:
        """Creating device memory."""
    @property
    def map_s(self) -> float:
        """Mapping it and enabling access."""
    @property
    def copy_s(self) -> float:
        """First to last copy or zero fill."""
    @property
    def verify_s(self) -> float:
        """Waiting for digests after that, and comparing them."""
    @property
    def wait_s(self) -> float:
        """Waiting for memory that others release."""
    def as_dict(self) -> dict[str, Any]:
        """Plain values, like the command line's JSON."""

@final
class PrepareReport:
    """What a preparation did."""

    @property
    def tags(self) -> list[str]:
        """Tags that the sleep would back up."""
    @property
    def end(self) -> Literal["finished", "cancelled", "overtaken"]:
        """How it ended: "finished", "cancelled", or "overtaken" by a sleep, a discard, or the arena's end."""
    @property
    def seconds(self) -> float:
        """Whole duration."""
    @property
    def copied_bytes(self) -> int:
        """Copied to the backups."""
    @property
    def stored_bytes(self) -> int:
        """Written there for them: less where they are stored as codes."""
    @property
    def unchanged_bytes(self) -> int:
        """Not copied: equal to the backup, or declared immutable."""
    def as_dict(self) -> dict[str, Any]:
        """Plain values, like the command line's JSON."""

def _restored(class_: type[object], taken: tuple[object, ...], /) -> object:
    """A report that was pickled."""

@final
class Stats:
    """Figures of an arena."""

    @property
    def live_bytes(self) -> int:
        """In use by live blocks, rounded up to 512."""
    @property
    def mapped_bytes(self) -> int:
        """Device memory held."""
    @property
    def peak_live_bytes(self) -> int:
        """Peak of `live_bytes`."""
    @property
    def peak_mapped_bytes(self) -> int:
        """Peak of `mapped_bytes`."""
    @property
    def created_bytes(self) -> int:
        """Memory created so far, released since or not."""
    @property
    def cached_bytes(self) -> int:
        """Held, but not live."""
    @property
    def deferred_release_bytes(self) -> int:
        """Part of `cached_bytes` whose release the driver refused so far."""
    @property
    def lent_bytes(self) -> int:
        """Lent by sleeps: not held, and in use until others need it."""
    @property
    def peer_bytes(self) -> int:
        """Copied to other devices' memory: in use there until others need it."""
    @property
    def resident_bytes(self) -> int:
        """Part of `mapped_bytes` that sleeps without a backup, until others need it."""
    @property
    def reserved_bytes(self) -> int:
        """Address space."""
    @property
    def backup_bytes(self) -> int:
        """Host memory of backups."""
    @property
    def backup_disk_bytes(self) -> int:
        """Disk space of backups."""
    @property
    def backup_raw_bytes(self) -> int:
        """Device memory of which both hold the bytes; more where these are codes."""
    @property
    def disk(self) -> Disk | None:
        """The disk for backups, if any."""
    @property
    def limit_bytes(self) -> int:
        """Most that may be mapped."""
    @property
    def live_blocks(self) -> int: ...
    @property
    def segments(self) -> int: ...
    @property
    def tags(self) -> list[TagStats]:
        """Figures of each tag in use."""
    def as_dict(self) -> dict[str, Any]:
        """Plain values, like the command line's JSON."""

@final
class Disk:
    """A disk for backups: how it works, and what it holds of all arenas of its device."""

    @property
    def used_bytes(self) -> int:
        """In use."""
    @property
    def limit_bytes(self) -> int | None:
        """Its limit, or None."""
    @property
    def io(self) -> str:
        """How bytes are read and written: "io_uring" or "threads"."""
    @property
    def io_because(self) -> str | None:
        """Why not by io_uring, or None."""
    @property
    def is_direct(self) -> bool:
        """Whether transfers bypass the page cache."""
    @property
    def direct_because(self) -> str | None:
        """Why they do not, or None."""
    def as_dict(self) -> dict[str, Any]:
        """Plain values, like the command line's JSON."""

@final
class TagStats:
    """Figures of one tag."""

    @property
    def tag(self) -> str: ...
    @property
    def state(self) -> _State:
        """ "awake", "undefined", "asleep_backed_up", "asleep_dropped" or "stranded"."""
    @property
    def live_bytes(self) -> int:
        """In use by live blocks."""
    @property
    def mapped_bytes(self) -> int:
        """Device memory held."""
    @property
    def backup_bytes(self) -> int:
        """Host memory of backups."""
    @property
    def backup_disk_bytes(self) -> int:
        """Disk space of backups."""
    @property
    def backup_raw_bytes(self) -> int:
        """Device memory of which both hold the bytes; more where these are codes."""
    @property
    def live_blocks(self) -> int: ...
    def as_dict(self) -> dict[str, Any]:
        """Plain values, like the command line's JSON."""

def hibernate(
    pid: int | Iterable[int],
    *,
    wait_max: float | None = None,
    host_bytes_max: int | str | None = None,
    without_space_check: bool = False,
    suspended_communicators: int = 0,
) -> HibernateReport:
    """Takes another process off its GPUs: what it holds there goes to host memory, with context and graphs.

    It runs on without GPUs until `resume`: calls that need one wait. Put its memory to sleep first, since
    what sleeps does not pass through the host again. Several pids are one set: all of them go, or none.

    `wait_max` is how long to wait for work that is queued, in seconds; by default 5. `host_bytes_max` is the
    most host memory to take, in bytes or like "4GiB". Without figures of NVIDIA's driver nothing will say
    whether there is space for the processes: refused, unless `without_space_check`. Raises HibernateError.

    A process with communicators of NCCL is refused: it would be lost. `suspended_communicators` is how many
    of them each process has suspended by `ncclCommSuspend`, with NCCL_CUMEM_HOST_ENABLE=0 since its start.
    """

def resume(pid: int | Iterable[int], *, without_space_check: bool = False) -> ResumeReport:
    """Puts processes back on their GPUs. Those that hibernate together resume together.

    Any process may do that, not only the one that called `hibernate`. Where nothing says that there is space
    for them, it is refused, unless `without_space_check`: without space they are lost. Raises HibernateError.
    """

def hibernation(pid: int) -> Hibernation:
    """Where another process stands, what it holds on its GPUs, and what would make `hibernate` fail.

    Changes nothing. Raises HibernateError.
    """

def process_state(pid: int) -> str:
    """The state in `hibernation` alone, which is one call of the driver."""

@final
class HibernateReport:
    """What `hibernate` did."""

    @property
    def processes(self) -> list[HibernatedProcess]:
        """Its processes, in the order of the call."""
    @property
    def host_bytes(self) -> int | None:
        """Host memory that it takes; None where the driver keeps no figure."""
    @property
    def total_ms(self) -> float:
        """Whole duration."""
    def as_dict(self) -> dict[str, Any]:
        """Plain values, like the command line's JSON."""

@final
class HibernatedProcess:
    """A process that hibernates."""

    @property
    def pid(self) -> int: ...
    @property
    def released_bytes(self) -> int | None:
        """Released on its GPUs; None where the driver keeps no figure."""
    @property
    def lock_ms(self) -> float:
        """Until its queued work was done."""
    @property
    def checkpoint_ms(self) -> float:
        """Until it held nothing on its GPUs."""
    def as_dict(self) -> dict[str, Any]:
        """Plain values, like the command line's JSON."""

@final
class ResumeReport:
    """What `resume` did."""

    @property
    def processes(self) -> list[ResumedProcess]:
        """Its processes, in the order of the call."""
    @property
    def total_ms(self) -> float:
        """Whole duration."""
    def as_dict(self) -> dict[str, Any]:
        """Plain values, like the command line's JSON."""

@final
class ResumedProcess:
    """A process that is back on its GPUs."""

    @property
    def pid(self) -> int: ...
    @property
    def restore_ms(self) -> float:
        """Until its memory was on its GPUs again."""
    @property
    def unlock_ms(self) -> float:
        """Until its calls went on."""
    def as_dict(self) -> dict[str, Any]:
        """Plain values, like the command line's JSON."""

@final
class Hibernation:
    """Where a process stands, and what `hibernate` would take."""

    @property
    def state(self) -> Literal["running", "locked", "checkpointed", "checkpointing", "restoring", "failed"]:
        """Where it stands; "failed" has lost the GPU."""
    @property
    def held(self) -> list[HeldMemory]:
        """What it holds on each GPU."""
    @property
    def host_bytes(self) -> int | None:
        """Host memory that `hibernate` would take; None where the driver keeps no figure."""
    @property
    def obstacles(self) -> list[str]:
        """What would make `hibernate` fail, as in its error."""
    def as_dict(self) -> dict[str, Any]:
        """Plain values, like the command line's JSON."""

@final
class HeldMemory:
    """Memory of a process on one GPU."""

    @property
    def uuid(self) -> str:
        """The GPU's UUID, without prefix."""
    @property
    def used_bytes(self) -> int | None:
        """None where the driver keeps no figure."""
    def as_dict(self) -> dict[str, Any]:
        """Plain values, like the command line's JSON."""

def pool(tag: str = "weights", device: _Device | None = None) -> AbstractContextManager[Any]:
    """`Arena.pool` of a device's default arena, opened on first use. None is the current device."""

def graph_pool(device: _Device | None = None) -> Any:
    """`Arena.graph_pool` of a device's default arena, opened on first use. None is the current device."""

def prepare_sleep(
    level: int = 1, tags: _Tags | None = None, *, keep_awake: _Tags | None = None
) -> Preparation:
    """`Arena.prepare_sleep` of the current device."""

def sleep(
    level: int = 1,
    tags: _Tags | None = None,
    *,
    unused: Iterable[tuple[int, int]] | None = None,
    kept: Iterable[tuple[int, int]] | None = None,
    keep_awake: _Tags | None = None,
    lend: bool | None = None,
) -> SleepReport:
    """`Arena.sleep` of the current device."""

def wake(
    tags: _Tags | None = None,
    *,
    verify: Literal["sample", "all"] | None = None,
    accept_losses: bool = False,
    timeout: float | None = None,
) -> WakeReport:
    """`Arena.wake` of the current device."""

def discard(tags: _Tags) -> SleepReport:
    """`Arena.discard` of the current device."""

def mark_restored(tags: _Tags) -> list[str]:
    """`Arena.mark_restored` of the current device."""

def state() -> dict[str, _State]:
    """`Arena.state` of the current device."""

def stats() -> Stats:
    """`Arena.stats` of the current device."""

def trim() -> int:
    """`Arena.trim` of the current device."""

def drop_backups(tags: _Tags | None = None) -> int:
    """`Arena.drop_backups` of the current device."""

def free_lent(
    device: _Device | None = None,
    size: int | str | None = None,
    *,
    socket: str | PathLike[str] | None = None,
    timeout: float | None = None,
) -> int:
    """Has what processes lend on a device given up, for a program that goes by free memory.

    Returns the bytes. They are `size`, an int or a text like "1GiB", or a little more; without it all.
    `socket` is the path of the broker's socket, by default POORWILL_BROKER's or the usual one. Without a
    broker it is 0. Owners that have to make backups first get `timeout` seconds.

    Raises PoorwillError for a broker that does not answer, and for a device that cannot be opened.
    """

def torch_allocator(arena: Arena, tag: str) -> tuple[int, int]:
    """Addresses of two C functions, alloc and free, for segments of a tag of an arena.

    For `torch._C._cuda_customAllocator`. Raises ValueError for an invalid tag, and PoorwillError where
    PyTorch cannot use the arena.
    """

def torch_make_default(arena: Arena, tag: str) -> None:
    """Makes the symbol `poorwill_alloc` serve a tag of an arena, for the arena's device.

    Raises as `torch_allocator`.
    """

def torch_call_afterwards(look: Callable[[], None] | None) -> None:
    """Sets what Python's main thread calls after PyTorch got a segment; None unsets it.

    Its exceptions are raised in the main thread.
    """

def torch_moment() -> int:
    """Serial number of the latest segment, for `torch_carve`."""

def torch_carve(moment: int, segments: Sequence[tuple[int, int, Sequence[tuple[int, int]]]]) -> int:
    """Releases parts of segments that PyTorch never hands out again.

    Each segment is its address, its size, and its free parts, each an address and a size. Returns the bytes
    released, in whole granules. Raises the first PoorwillError after trying everything else.
    """

def torch_segments(ordinal: int | None = None) -> tuple[int, int]:
    """Number of PyTorch's segments and their held bytes, on one GPU, or on all for None."""

def torch_has_segment_at(addr: int) -> bool:
    """Whether one of PyTorch's segments begins at an address."""

def torch_tag_at(arena: Arena, addr: int) -> str | None:
    """The tag of an arena's segment that an address is in, or None."""

def torch_set_margin(arena: Arena, margin_bytes: int) -> None:
    """Sets how many bytes every request for a segment has to leave free on the device."""

def torch_set_cached_max(arena: Arena, max_bytes: int | None) -> None:
    """Sets how many unused bytes an arena may keep mapped.

    A thread of its own releases what exceeds that.

    None means no bound. Raises ClosedError when the arena is closed.
    """

def torch_trim(arena: Arena) -> int:
    """`Arena.trim`, without asking PyTorch to free its cache first."""

def torch_refusal() -> str | None:
    """Takes the message of PyTorch's last refused request, or None.

    This thread's requests come first.
    """

def make_immortal(object: object) -> None:
    """Leaks an object whose destructor would end the process."""

@final
class HostBuffer:
    """Host memory of exactly `nbytes` bytes, from a device's host arena; its bytes are unspecified.

    `device` is as for `budget`. `pin` True page-locks the memory or raises PoorwillError. "auto" does so
    where possible for a GPU with memory of its own; otherwise `pageable_because` says why not.
    POORWILL_DISABLE_PIN=1 and VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1 override `pin`.

    DLPack shares it as a flat uint8 array on the CPU: `numpy.from_dlpack(buffer)`. It is freed with the last
    of this object, its arrays and views. A forked child does not have it.

    Raises OutOfMemoryError, with the requested, held and allowed bytes, where it does not fit.
    """

    def __new__(
        cls, nbytes: int | str, *, device: _Device | None = None, pin: bool | Literal["auto"] = "auto"
    ) -> HostBuffer: ...
    @property
    def nbytes(self) -> int:
        """Size in bytes."""
    @property
    def address(self) -> int:
        """Its address in this process."""
    @property
    def device(self) -> str:
        """Name of the device."""
    @property
    def is_pinned(self) -> bool:
        """Whether it is page-locked for a GPU."""
    @property
    def pageable_because(self) -> str | None:
        """Why it is not page-locked; None if it is."""
    def device_view(self) -> DeviceView:
        """The same bytes at their device address.

        Raises PoorwillError for a pageable buffer of a GPU, and with VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=1.
        """
    def free(self) -> None:
        """Frees the memory once its last array and view are gone. Repeating it does nothing."""
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Exports a DLPack capsule.

        Raises BufferError for another device, a copy, or a stream.
        """
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class LoadedTensor:
    """The bytes of a tensor that `load_checkpoint` read: a slice of a host buffer.

    DLPack shares it as a flat uint8 array on the CPU. The buffer is freed with the last of its tensors,
    their arrays and views.
    """

    @property
    def name(self) -> str:
        """Its name in the file."""
    @property
    def dtype(self) -> str:
        """Element type, as the format names it, like "BF16"."""
    @property
    def shape(self) -> tuple[int, ...]:
        """Elements in each dimension."""
    @property
    def nbytes(self) -> int:
        """Size in bytes."""
    @property
    def address(self) -> int:
        """Its address in this process; 0 without bytes."""
    @property
    def device(self) -> str:
        """Name of the device."""
    @property
    def is_pinned(self) -> bool:
        """Whether it is page-locked for a GPU."""
    @property
    def pageable_because(self) -> str | None:
        """Why it is not page-locked; None if it is, or has no bytes."""
    def device_view(self) -> DeviceView:
        """The same bytes at their device address.

        Raises PoorwillError as `HostBuffer.device_view`, and ValueError for no bytes.
        """
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Exports a DLPack capsule.

        Raises BufferError for another device, a copy, or a stream.
        """
    def __dlpack_device__(self) -> tuple[int, int]: ...

def load_checkpoint(
    paths: Sequence[str | os.PathLike[str]],
    dtypes: Sequence[str],
    *,
    device: _Device | None = None,
    pin: bool | Literal["auto"] = "auto",
    readers: int | None = None,
) -> tuple[list[LoadedTensor], dict[str, Any]]:
    """Reads a checkpoint into host memory; returns its tensors in file order, and a report.

    `dtypes` are the format's names of the types that the caller supports. `device` and `pin` are as for
    `HostBuffer`. `readers` is the number of concurrent reads, 1 to 256, or None to choose by machine. Other
    Python threads run meanwhile. A signal handler that raises ends the load; every error frees everything.

    Raises ValueError for a tensor of another type, and OutOfMemoryError before reading if it does not fit.
    Raises FileNotFoundError, and PoorwillError for files that are unreadable or no checkpoint.
    """

@final
class DeviceView:
    """Host memory at its device address, without a copy; see `HostBuffer.device_view` and `device_view_of`.

    DLPack shares it as a flat uint8 array on the device. The memory stays until the last of this object and
    its arrays is gone, which waits for the device's work.
    """

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
    @property
    def address(self) -> int:
        """Its address on the device."""
    @property
    def device(self) -> str:
        """Name of the device."""
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Exports a DLPack capsule.

        Raises BufferError for another device, or a copy.
        """
    def __dlpack_device__(self) -> tuple[int, int]: ...

def device_view_of(address: int, nbytes: int, keep: object, *, device: _Device | None = None) -> DeviceView:
    """A device view of `nbytes` of host memory at `address` that another owner allocated.

    `keep` owns that memory, and is referenced until the last array of the view is gone. Page-locked memory
    is used as it is. Other memory is page-locked in place, in whole pages, until its last view is gone; it
    must not be freed before.

    Raises ValueError for no bytes, and for memory that shares a page with memory that is page-locked
    already. Raises PoorwillError where it cannot be page-locked, or the environment forbids it.
    """

def offload_policy() -> dict[str, Any]:
    """What the environment allows now, by key.

    `pin` and `uva` say whether host memory may be page-locked, and accessed in place. `pin_because` and
    `uva_because` name the variable that forbids it, or are None.

    Raises PoorwillError for a variable that is neither 0 nor 1.
    """
