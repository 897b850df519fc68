import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias, final

__all__ = [
    "SHARED_MEMORY_WITHOUT_OPT_IN_BYTES",
    "Arena",
    "Block",
    "Budget",
    "BudgetError",
    "BudgetWarning",
    "Claim",
    "Claimed",
    "ClosedError",
    "DeviceView",
    "Hold",
    "HostBuffer",
    "LoadedTensor",
    "LostRange",
    "OutOfMemoryError",
    "PoorwillError",
    "Preparation",
    "PrepareReport",
    "SleepError",
    "SleepPhases",
    "SleepReport",
    "Source",
    "Stats",
    "TagError",
    "TagStats",
    "WakeError",
    "WakePhases",
    "WakeReport",
    "__version__",
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
    "graph_pool",
    "known_compute_capabilities",
    "load_checkpoint",
    "make_immortal",
    "mark_restored",
    "offload_policy",
    "parse_bytes",
    "pool",
    "prepare_sleep",
    "shared_memory_of_capability",
    "shared_memory_of_device",
    "sleep",
    "state",
    "stats",
    "torch_allocator",
    "torch_call_afterwards",
    "torch_carve",
    "torch_has_segment_at",
    "torch_leave_uncut",
    "torch_make_default",
    "torch_moment",
    "torch_refusal",
    "torch_segments",
    "torch_set_cached_max",
    "torch_trim",
    "trim",
    "wake",
]

__version__: str

SHARED_MEMORY_WITHOUT_OPT_IN_BYTES: int
"""The shared memory of a block on every GPU, if its kernel does not opt in to more."""

class PoorwillError(RuntimeError):
    """What poorwill could not do, and what would help."""

class BudgetError(PoorwillError):
    """A claim or a limit that the budget does not allow, or a budget that nobody knows."""

class ClosedError(PoorwillError):
    """Something of an arena that has been closed, or of a block that has been freed."""

class TagError(PoorwillError):
    """A tag that the arena does not know, or that is in no state for what was to be done."""

class SleepError(PoorwillError):
    """A sleep, or its preparation, that failed. The message says what state that leaves.

    `report` says what was done where the tags sleep, but not all of their memory could be given back.
    """

    report: SleepReport | None

class WakeError(PoorwillError):
    """A wake that failed; everything sleeps as before, with its backups."""

class OutOfMemoryError(PoorwillError, MemoryError):
    """More memory than the arena's limit allows, or than the device has.

    Its figures say what was needed beyond what could be reclaimed, and what there was; what is not known
    is None.
    """

    needed_bytes: int | None
    limit_bytes: int | None
    live_bytes: int | None
    mapped_bytes: int | None
    idle_bytes: int | None
    device_free_bytes: int | None

class BudgetWarning(UserWarning):
    """Something took more memory than it had claimed, and the rest of the budget covers it."""

def parse_bytes(text: str, /) -> int:
    """How many bytes a size like "24GiB", "1.5GiB", "512m" or "1048576" stands for.

    Units are powers of 1024, except for "kB", "MB", "GB" and so on, which are powers of 1000.
    Raises ValueError for anything else.
    """

def known_compute_capabilities() -> list[tuple[int, int]]:
    """The compute capabilities whose shared memory is known, in ascending order."""

def shared_memory_of_capability(major: int, minor: int) -> int | None:
    """The bytes of shared memory that a block may opt in to; None where the capability is not known."""

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
    """The shared memory that a matrix product takes at most, in bytes."""

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
    """The shared memory that attention takes at most, in bytes."""

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
    """The shared memory that flash-linear-attention's `chunk_fwd_kernel_o` takes at most, in bytes."""

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
    """The shared memory that `chunk_gated_delta_rule_fwd_kernel_h_blockdim64` takes at most, in bytes."""

def shared_memory_of_device(ordinal: int) -> int:
    """Shared memory, in bytes, that a block of threads may opt in to on a GPU.

    Asks the driver without opening the GPU. Raises ValueError where the driver has no such GPU, and
    PoorwillError where there is no driver, no GPU at all, or no answer.
    """

class _DeviceLike(Protocol):
    """What names a device as torch.device does."""

    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...

class _HasName(Protocol):
    """What names a type of elements as numpy.dtype does."""

    @property
    def name(self) -> str: ...

_Device: TypeAlias = int | str | _DeviceLike
_Cap: TypeAlias = int | float | str
_Tags: TypeAlias = str | Iterable[str]
_Dtype: TypeAlias = str | _HasName | type
_State: TypeAlias = Literal["awake", "undefined", "asleep_backed_up", "asleep_dropped", "stranded"]

def cuda_ordinal(device: object = None, /) -> int:
    """The number of the GPU that is meant: None or "cuda" for the current one, a number, "cuda:1", or a
    torch.device.

    Asks no driver, so whether there is such a GPU stays open. Raises ValueError for what is no GPU.
    """

def budget(device: _Device | None = None, cap: _Cap | Mapping[Any, _Cap] | None = None) -> Budget:
    """How much memory of a device this process may use: everyone who can be asked about it is asked.

    `device` is None or "cuda" for the current GPU (PyTorch's, if PyTorch is in use already, otherwise the
    first), the number of one, a text like "cuda:1", "host" or "host:8GiB", or a torch.device.

    `cap` is what the user allows at most: bytes as an int or a text like "20GiB" or "22528m"; a share of what
    there is, as a float, or a text like "0.92" or "92%"; or one for each device, as a mapping or a text like
    "cuda:0=20GiB,cuda:1=0.92".

    What is in use already is claimed as `in_use`. Raises BudgetError where nobody tells how much memory there
    is, and PoorwillError where the device cannot be opened.
    """

@final
class Budget:
    """How much memory of a device this process may use, who says so, and who has claimed how much of it.

    Figures other than the unclaimed one are as they were decided when it was opened.
    """

    @property
    def device(self) -> str:
        """The device, by name."""
    @property
    def sources(self) -> list[Source]:
        """Everyone who was asked, with their figures as given."""
    @property
    def winner(self) -> str:
        """Whose figure the budget is."""
    @property
    def total_bytes(self) -> int | None:
        """The smallest plausible total, before the user's cap."""
    @property
    def budget_bytes(self) -> int:
        """What this process may use."""
    @property
    def headroom_bytes(self) -> int | None:
        """What it could have on top of what it had. None where nobody tells what is free."""
    @property
    def process_used_bytes(self) -> int | None:
        """What it had in use, its context included. None where that is not known."""
    @property
    def unclaimed_bytes(self) -> int:
        """What nobody has claimed, now."""
    def claims(self) -> list[Claimed]:
        """The claims there are now, in the order in which they were made."""
    def claim(self, name: str, size: int | str) -> Claim:
        """Claims memory by name before it is taken; `size` is an int, in bytes, or a text like "1.53GiB".

        Several claims may have one name. Raises BudgetError when less is unclaimed; nothing has changed then.
        """
    def as_dict(self) -> dict[str, Any]:
        """The decision as plain values: what the command line prints as JSON."""

@final
class Source:
    """Who was asked about a device's memory, and what came of it."""

    @property
    def name(self) -> str:
        """Who."""
    @property
    def bytes(self) -> int | None:
        """The figure as it was given; None where there was none."""
    @property
    def note(self) -> str | None:
        """Why there is none, or what is odd about it."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Claimed:
    """An entry in the book of a budget."""

    @property
    def name(self) -> str:
        """Who claims."""
    @property
    def bytes(self) -> int:
        """How much."""
    @property
    def peak_bytes(self) -> int | None:
        """Most that was measured for it; None where nobody has measured."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Claim:
    """A part of a budget that belongs to whoever holds this, until it is released or no longer used.

    In a `with` statement the memory in use is watched, and the end of the block returns the claim. What was
    taken beyond the claim is a BudgetWarning where the rest of the budget covers it; otherwise it is a
    BudgetError, unless the block has raised something itself.
    """

    @property
    def name(self) -> str:
        """Who claims."""
    @property
    def bytes(self) -> int:
        """How much is claimed; after the release, how much was."""
    @property
    def peak_bytes(self) -> int | None:
        """Most that was taken in `with` blocks. None where nobody has measured."""
    @property
    def over_bytes(self) -> int:
        """By how much that exceeds the claim."""
    def resize(self, size: int | str) -> None:
        """Makes it another size: an int, in bytes, or a text like "1.53GiB".

        Raises BudgetError when less is unclaimed beside it; it stays as it was then.
        """
    def release(self) -> None:
        """Returns it to the budget. Doing so again does nothing."""
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
) -> Arena:
    """Opens an arena, or finds it: memory of a device that can be put to sleep and woken.

    `device` is named as for `budget`. Several arenas of one device share it and have names. Asking again for
    one that is open returns it; options that are given then must be those that it was opened with.

    `limit` is the most that it may map: bytes as an int or a text like "24GiB"; a share of the device's
    budget, as a float, or a text like "0.92" or "92%"; or one for each device, as a mapping or a text
    like "cuda:0=20GiB,0.92". It has to fit beside what this process has of the device already; a share is
    lowered until it does. Without a limit the arena may have what is left of the budget. Each arena finds
    its budget when it is opened and none is kept for the others, so several without a limit compete, and
    in the end it is the device that refuses.

    `host_limit` bounds the host memory that the device may hold for backups, and `pageable` leaves it
    unlocked. `peers` are the numbers of the other GPUs that may use a GPU's memory: without, all that the
    process sees and that can reach it; `()` for a process that uses one GPU. All three are the device's, and
    so those of its first arena.

    Backups stay in host memory after a wake and save the next sleep's copy of what has not changed, unless
    `keep_backups` is False; `Arena.drop_backups` lets them go at any other time.

    Raises BudgetError for a limit that does not fit or where nobody tells how much memory there is, and
    PoorwillError where the device cannot be opened, or is open in another way.
    """

@final
class Arena:
    """Memory of a device that can be put to sleep and woken; `poorwill.arena` opens one.

    It stays open until it is closed, whether or not anybody holds this object.
    """

    @property
    def device(self) -> str:
        """The device, by name."""
    @property
    def name(self) -> str:
        """Its own name."""
    @property
    def limit_bytes(self) -> int:
        """Most that it may map."""
    @property
    def budget(self) -> Budget:
        """The budget that its limit comes from, as it was decided when it was opened, and the claims on it
        now.
        """
    def empty(self, shape: int | Sequence[int], dtype: _Dtype = "uint8", tag: str = "weights") -> Block:
        """Takes memory for an array. Its bytes are unspecified.

        `shape` is a number of elements, or one for each dimension; `dtype` a text like "float32", or a
        type of NumPy's. `numpy.from_dlpack` makes an array of it that shares the memory, on the host
        device;
        from NumPy 2.2 on it can be written to.

        Raises OutOfMemoryError at the limit, and TagError while the tag sleeps.
        """
    def sleep(self, level: int = 1, tags: _Tags | None = None) -> SleepReport:
        """Puts tags to sleep: their memory goes back to the device, their addresses stay.

        `level` 1 keeps weights in host memory, 2 drops them. `tags` is one, several, or None for all. All or
        nothing; tags that sleep already are reported and left alone. Nobody may touch what sleeps.

        Raises TagError for a tag that is not there or has no bytes worth keeping, and SleepError when it
        failed.
        """
    def wake(
        self,
        tags: _Tags | None = None,
        *,
        verify: Literal["sample", "all"] | None = None,
        accept_losses: bool = False,
        timeout: float | None = None,
    ) -> WakeReport:
        """Wakes tags: the same bytes at the same addresses, or what their policy says of dropped ones.

        `tags` is one, several, or None for all that sleep. Tags that are awake are reported and left
        alone. `verify` says how many granules are compared with their backups' digests: "all", "sample" for
        one in 64, or None for all where the device computes digests at the speed of its memory, as GPUs do,
        and else a sample. With a `timeout`, in seconds, it waits so long for memory of the device that others
        are about to give back, and for other calls that have the tags; Ctrl-C does not end that.

        All or nothing: raises OutOfMemoryError for lack of memory and WakeError when it failed, and
        everything sleeps as before then. Where backups have spoiled in host memory that names all of them;
        with `accept_losses` the rest wakes, and the report's `lost` says what has to be written again before
        it is marked as restored.
        """
    def discard(self, tags: _Tags) -> SleepReport:
        """Drops the bytes of tags whatever their policy says, awake or asleep, backups included.

        They sleep until they are woken, and hold then what their policy says of dropped memory.
        """
    def mark_restored(self, tags: _Tags) -> list[str]:
        """Says that the bytes of tags have been written again after they were dropped or lost. Returns the
        tags that were undefined until now.
        """
    def lost_ranges(self) -> list[LostRange]:
        """What was lost of awake tags because its backup had spoiled in host memory, and was neither written
        again and marked as restored nor freed since, in address order.
        """
    def prepare_sleep(self, level: int = 1, tags: _Tags | None = None) -> Preparation:
        """Begins to back up, in the background, what such a sleep would, so that even the first sleep copies
        nothing but what has changed by then. Everything can be used meanwhile.
        """
    def state(self) -> dict[str, _State]:
        """Where the bytes of each tag are that has blocks, holds memory or sleeps: "awake", "undefined"
        (awake, but dropped by a sleep and not restored since), "asleep_backed_up", "asleep_dropped", or
        "stranded" (asleep with its memory, after a sleep that could not be undone).
        """
    def stats(self) -> Stats:
        """Figures, now."""
    def snapshot(self) -> list[dict[str, Any]]:
        """Every segment with its blocks, in address order, as plain values."""
    def trim(self) -> int:
        """Gives back all memory of the device that serves no byte, but for what a hold keeps, waiting for
        work that may still touch it. Returns how many bytes that was.
        """
    def drop_backups(self, tags: _Tags | None = None) -> int:
        """Lets go of the backups of tags that are awake, and gives host memory back that nothing uses.
        Returns how many bytes that was; what lies in one piece with a backup that stays comes back with that.

        `tags` is one, several, or None for all that are awake. What sleeps keeps its backups. The next sleep
        copies what is let go of.

        Raises TagError for a tag that is named and sleeps with a backup; nothing has happened then.
        """
    def hold(self, tag: str, holder: str) -> Hold:
        """Says that somebody else, `holder` by name, has the physical memory of a tag registered: with a
        network card, say, or another process. Until the hold is ended, as by the end of a `with` statement,
        none of it leaves its address: a sleep or a discard that means the tag is refused, and so is closing
        the arena.

        Take it before registering, and end it after deregistering. Holds add up.

        Raises TagError for a tag that is not there or sleeps, and ValueError for a holder without a name.
        """
    def held(self) -> dict[str, dict[str, Any]]:
        """The tags that are held, each with its `holders` and the `idle_bytes` that serve nobody and stay
        because of it.
        """
    def declare(
        self,
        tag: str,
        *,
        level1: Literal["backup", "drop"] | None = None,
        level2: Literal["backup", "drop"] | None = None,
        dropped: Literal["zeros", "undefined"] | None = None,
        changes: Literal["compared", "immutable", "volatile"] | None = None,
    ) -> None:
        """Says what sleep does with a tag, before anything is put into it; and what is known about changes to
        its bytes between two sleeps, at any time.

        At `level1` and `level2` a sleep has a "backup" made of it or is to "drop" it, and `dropped`
        memory comes back as "zeros" or "undefined". `changes` are "compared" (nothing is known),
        "immutable" (promised to stay, and only a sample is compared) or "volatile" (always copied). What
        is left open is as it is for this tag by default.

        Raises TagError when the tag is in use, or was declared, in another way.
        """
    def pool(self, tag: str = "weights") -> AbstractContextManager[Any]:
        """Where PyTorch's allocations go in a `with` statement over what this returns: into this arena, as
        `tag`.

        Needs PyTorch. See `poorwill.torch`.
        """
    def graph_pool(self) -> Any:
        """What to give `torch.cuda.graph` as its pool, for graphs whose memory is to be this arena's.

        Needs PyTorch. See `poorwill.torch`.
        """
    def close(self) -> None:
        """Gives everything back and ends it, after what is under way. Closing again does nothing. Raises
        SleepError while a CUDA graph is being captured, and TagError while a tag is held, with nothing done.

        What still lives in it loses its bytes and its memory at once; the addresses stay reserved, so that
        nothing else comes to lie there, until the last has let go.
        """
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Block:
    """Memory of an arena, as an array of elements. It is lent by the DLPack protocol:
    `numpy.from_dlpack(block)`.

    The memory is freed when neither this nor an array made of it is left. While its tag sleeps it has none:
    whoever reads or writes it then, through an array, ends the process with a segmentation fault, or gets an
    error from the GPU. The same goes for a closed arena, and, on the host device, for a forked child.

    On a GPU it belongs to the default stream. Work on others has to be done before the memory is freed.
    """

    @property
    def tag(self) -> str:
        """What it is, as its sleep sees it."""
    @property
    def dtype(self) -> str:
        """The name of the type of its elements."""
    @property
    def shape(self) -> tuple[int, ...]:
        """How many elements it has in each dimension."""
    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
    @property
    def address(self) -> int:
        """Where it is, asleep or awake."""
    @property
    def device(self) -> str:
        """The device, by name."""
    def free(self) -> None:
        """Lets go of the memory. Arrays that were made of it keep it until they are gone, too. Freeing
        again does nothing.
        """
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of the DLPack protocol; `max_version` says which of its versions is understood.

        Raises TagError while the tag sleeps, and BufferError for another device, a copy, or a stream of a GPU
        that is not in order with its default stream.
        """
    def __dlpack_device__(self) -> tuple[int, int]:
        """Where it is, as the DLPack protocol has it: (1, 0) for the host device, (2, N) for a GPU."""

@final
class Preparation:
    """A sleep that is being prepared: backups are made in the background, so that the sleep copies only
    what has changed by then.

    Nobody has to hold or to wait for it; a sleep or a discard of one of the tags ends it. In a `with`
    statement the end of the block waits for it, and an exception in the block cancels it.
    """

    @property
    def done_bytes(self) -> int:
        """Looked at so far."""
    @property
    def total_bytes(self) -> int:
        """Live bytes that there were to look at when it began."""
    @property
    def is_ended(self) -> bool:
        """Whether it has ended, in whatever way."""
    def cancel(self) -> None:
        """Asks it to end. What is being copied is finished and kept."""
    def wait(self, timeout: float | None = None) -> PrepareReport:
        """Waits for its end and says what was done.

        Raises TimeoutError when it has not ended after `timeout` seconds; it goes on then. Raises SleepError
        when host memory was lacking or the device failed; what was backed up by then stays.
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
    """Keeps the memory of a tag where it is until it is ended, or no longer used.

    In a `with` statement the end of the block ends it.
    """

    @property
    def tag(self) -> str:
        """What is held."""
    @property
    def holder(self) -> str:
        """By whom."""
    def end(self) -> None:
        """Lets the memory go. Doing so again does nothing."""
    def __enter__(self) -> Hold:
        """Raises PoorwillError when it is ended: nothing would be held."""
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class SleepReport:
    """What a sleep did. Sizes in bytes, times in seconds."""

    @property
    def level(self) -> int:
        """The level asked for; 2 for a discard."""
    @property
    def tags(self) -> list[str]:
        """Tags that this call put to sleep."""
    @property
    def already_asleep_tags(self) -> list[str]:
        """Tags that slept already: for them nothing was done."""
    @property
    def seconds(self) -> float:
        """Whole duration."""
    @property
    def planned_release_bytes(self) -> int:
        """What the plan was to give back."""
    @property
    def released_bytes(self) -> int:
        """What was given back."""
    @property
    def release(self) -> Literal["confirmed", "ledger", "shortfall"]:
        """How that is known: "confirmed" by the driver's figure for this process, or by the "ledger" of
        releases.
        """
    @property
    def copied_bytes(self) -> int:
        """Copied to host memory."""
    @property
    def unchanged_bytes(self) -> int:
        """Not copied, because the backup's digest matched, or because the tag was declared immutable."""
    @property
    def trusted_bytes(self) -> int:
        """Of which nobody compared, because the tag was declared immutable."""
    @property
    def fast_digests(self) -> bool:
        """Whether the device computes digests at the speed of its memory. Where it does not, everything is
        copied.
        """
    @property
    def discarded_bytes(self) -> int:
        """Held live bytes and were dropped, in whole granules."""
    @property
    def uncovered_bytes(self) -> int:
        """What this process still holds of the device beyond this arena and its bare context."""
    @property
    def device_free_before_bytes(self) -> int:
        """Free memory of the device before."""
    @property
    def device_free_after_bytes(self) -> int | None:
        """Free memory of the device after; None where the device would not say any more."""
    @property
    def phases(self) -> SleepPhases:
        """Where the time went."""
    def as_dict(self) -> dict[str, Any]:
        """The same as plain values: what the command line prints as JSON."""

@final
class SleepPhases:
    """Where the time of a sleep went, in seconds."""

    @property
    def copy_s(self) -> float:
        """Getting host memory, copying to it, and digests of what was stored, which run beside the copies."""
    @property
    def digest_s(self) -> float:
        """Comparing with the backups before that: digests of what is on the device."""
    @property
    def unmap_s(self) -> float:
        """Unmapping."""
    @property
    def release_s(self) -> float:
        """Giving memory back."""
    def as_dict(self) -> dict[str, Any]:
        """The same as plain values: what the command line prints as JSON."""

@final
class WakeReport:
    """What a wake did. Sizes in bytes, times in seconds."""

    @property
    def tags(self) -> list[str]:
        """Tags that this call woke."""
    @property
    def already_awake_tags(self) -> list[str]:
        """Tags that were awake already: for them nothing was done."""
    @property
    def seconds(self) -> float:
        """Whole duration."""
    @property
    def mapped_bytes(self) -> int:
        """Memory brought back to its addresses."""
    @property
    def copied_bytes(self) -> int:
        """Copied from host memory."""
    @property
    def zeroed_bytes(self) -> int:
        """Overwritten with zeros."""
    @property
    def verified_bytes(self) -> int:
        """Compared with the backup's digests, and equal."""
    @property
    def undefined_tags(self) -> list[str]:
        """Tags that are undefined now, until they are marked restored."""
    @property
    def lost(self) -> list[LostRange]:
        """What did not come back because its backup had spoiled, where that was accepted: undefined until it
        is written again.
        """
    @property
    def phases(self) -> WakePhases:
        """Where the time went."""
    def as_dict(self) -> dict[str, Any]:
        """The same as plain values: what the command line prints as JSON."""

@final
class LostRange:
    """Bytes that were lost because their backup had spoiled in host memory."""

    @property
    def tag(self) -> str:
        """Their tag."""
    @property
    def block(self) -> str:
        """The block that they are of, as errors name it."""
    @property
    def offset_bytes(self) -> int:
        """Where in the block they begin."""
    @property
    def addr(self) -> int:
        """Where on the device they begin."""
    @property
    def bytes(self) -> int:
        """How many they are."""
    def as_dict(self) -> dict[str, Any]:
        """The same as plain values: what the command line prints as JSON."""

@final
class WakePhases:
    """Where the time of a wake went, in seconds. Copying runs beside the other phases."""

    @property
    def create_s(self) -> float:
        """Getting memory from the device."""
    @property
    def map_s(self) -> float:
        """Mapping it and opening it for access."""
    @property
    def copy_s(self) -> float:
        """From the first copy, or the first zeros, to the end of the last."""
    @property
    def verify_s(self) -> float:
        """Waiting for digests after that, and comparing them."""
    @property
    def wait_s(self) -> float:
        """Waiting, with nothing held, for memory that others gave back."""
    def as_dict(self) -> dict[str, Any]:
        """The same as plain values: what the command line prints as JSON."""

@final
class PrepareReport:
    """What a preparation did. Sizes in bytes, times in seconds."""

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
    def unchanged_bytes(self) -> int:
        """Not copied, because the backup's digest matched, or because the tag was declared immutable."""
    def as_dict(self) -> dict[str, Any]:
        """The same as plain values: what the command line prints as JSON."""

@final
class Stats:
    """Figures of an arena, in bytes unless the name says otherwise."""

    @property
    def live_bytes(self) -> int:
        """In use by live blocks, rounded to 512."""
    @property
    def mapped_bytes(self) -> int:
        """Memory of the device that is held."""
    @property
    def peak_live_bytes(self) -> int:
        """Most bytes of live blocks at any time."""
    @property
    def peak_mapped_bytes(self) -> int:
        """Most memory held at any time."""
    @property
    def created_bytes(self) -> int:
        """Memory created since the arena was opened, whether released since or not."""
    @property
    def cached_bytes(self) -> int:
        """Held, but not live."""
    @property
    def owed_bytes(self) -> int:
        """Of which the driver has refused a release so far."""
    @property
    def reserved_bytes(self) -> int:
        """Address space."""
    @property
    def backup_bytes(self) -> int:
        """Host memory of backups."""
    @property
    def limit_bytes(self) -> int:
        """Most that may be mapped."""
    @property
    def live_blocks(self) -> int:
        """Live blocks."""
    @property
    def segments(self) -> int:
        """Segments."""
    @property
    def tags(self) -> list[TagStats]:
        """The same by tag, for tags that have blocks, hold memory or sleep."""
    def as_dict(self) -> dict[str, Any]:
        """The same as plain values: what the command line prints as JSON."""

@final
class TagStats:
    """Figures of one tag, in bytes unless the name says otherwise."""

    @property
    def tag(self) -> str:
        """The tag."""
    @property
    def state(self) -> _State:
        """Where its bytes are: "awake", "undefined", "asleep_backed_up", "asleep_dropped" or "stranded"."""
    @property
    def live_bytes(self) -> int:
        """In use by live blocks."""
    @property
    def mapped_bytes(self) -> int:
        """Memory of the device that is held."""
    @property
    def backup_bytes(self) -> int:
        """Host memory of backups."""
    @property
    def live_blocks(self) -> int:
        """Live blocks."""
    def as_dict(self) -> dict[str, Any]:
        """The same as plain values: what the command line prints as JSON."""

def pool(tag: str = "weights", device: _Device | None = None) -> AbstractContextManager[Any]:
    """`Arena.pool` of a device's arena, which is opened if need be. The device is the current one if None is
    given.
    """

def graph_pool(device: _Device | None = None) -> Any:
    """`Arena.graph_pool` of a device's arena, which is opened if need be. The device is the current one
    if None is given.
    """

def prepare_sleep(level: int = 1, tags: _Tags | None = None) -> Preparation:
    """`Arena.prepare_sleep` of the current device's arena."""

def sleep(level: int = 1, tags: _Tags | None = None) -> SleepReport:
    """`Arena.sleep` of the current device's arena."""

def wake(
    tags: _Tags | None = None,
    *,
    verify: Literal["sample", "all"] | None = None,
    accept_losses: bool = False,
    timeout: float | None = None,
) -> WakeReport:
    """`Arena.wake` of the current device's arena."""

def discard(tags: _Tags) -> SleepReport:
    """`Arena.discard` of the current device's arena."""

def mark_restored(tags: _Tags) -> list[str]:
    """`Arena.mark_restored` of the current device's arena."""

def state() -> dict[str, _State]:
    """`Arena.state` of the current device's arena."""

def stats() -> Stats:
    """`Arena.stats` of the current device's arena."""

def trim() -> int:
    """`Arena.trim` of the current device's arena."""

def drop_backups(tags: _Tags | None = None) -> int:
    """`Arena.drop_backups` of the current device's arena."""

def torch_allocator(arena: Arena, tag: str) -> tuple[int, int]:
    """The addresses of two C functions, to get segments for a tag of an arena and to give them back: for
    `torch._C._cuda_customAllocator`.

    Raises ValueError for a name that no tag can have, and PoorwillError where PyTorch cannot use the arena.
    """

def torch_make_default(arena: Arena, tag: str) -> None:
    """Has the symbol `poorwill_alloc` serve a tag of an arena, for the arena's device.

    Raises as `torch_allocator`.
    """

def torch_call_afterwards(look: Callable[[], None] | None) -> None:
    """Has a function called, in Python's main thread, soon after PyTorch was given a segment; None ends that.

    What it raises is raised where the main thread is.
    """

def torch_leave_uncut(arena: Arena, tag: str, begins: bool) -> None:
    """A scope begins, or ends, in which PyTorch gives the large segments of a tag of an arena back without
    having cut them: they get memory in large pieces.

    Raises as `torch_allocator`, and does nothing for an arena that was closed meanwhile.
    """

def torch_moment() -> int:
    """Now: segments that are handed out later are not carved by who names this moment."""

def torch_carve(moment: int, segments: Sequence[tuple[int, int, Sequence[tuple[int, int]]]]) -> int:
    """Gives parts of segments back that PyTorch never hands out again.

    Each segment is its address, its size, and its free parts, each an address and a size. Returns the bytes
    given back, which are whole granules. Raises PoorwillError for what an arena says first, when everything
    else was tried.
    """

def torch_segments(ordinal: int | None = None) -> tuple[int, int]:
    """How many segments PyTorch has, and the bytes of them that are still held: on one GPU, or on all if None
    is given.
    """

def torch_has_segment_at(addr: int) -> bool:
    """Whether a segment that PyTorch has begins at an address."""

def torch_set_cached_max(arena: Arena, max_bytes: int | None) -> None:
    """How many bytes an arena may keep mapped that nothing uses, before a thread of its own gives them back;
    None for as many as there are.

    Raises ClosedError when it is closed.
    """

def torch_trim(arena: Arena) -> int:
    """`Arena.trim`, of what PyTorch has given back by itself."""

def torch_refusal() -> str | None:
    """What was refused to PyTorch last, in words; None where nothing was since this was asked last."""

def make_immortal(object: object) -> None:
    """Keeps an object for ever: for those of PyTorch's whose end would end the process."""

@final
class HostBuffer:
    """Host memory of exactly `nbytes` bytes, of a device's host arena.

    `device` is named as for `budget`. With `pin` True the memory is page-locked for the device, or this
    raises PoorwillError; with "auto" it is where the GPU has memory of its own and the machine does it, and
    otherwise `pageable_because` says why not; with False it is not. POORWILL_DISABLE_PIN=1 and
    VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1 win over `pin`. What the bytes are at first is unspecified.

    It is lent by the DLPack protocol as a flat array of uint8 on the CPU: `numpy.from_dlpack(buffer)`. The
    memory goes when neither this, nor an array, nor a view of it is left; in a forked child it is not there.

    Raises OutOfMemoryError, with what is asked, held and allowed, where there is no room for it.
    """

    def __new__(
        cls, nbytes: int | str, *, device: _Device | None = None, pin: bool | Literal["auto"] = "auto"
    ) -> HostBuffer: ...
    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
    @property
    def address(self) -> int:
        """Where it begins in this process."""
    @property
    def device(self) -> str:
        """The device, by name."""
    @property
    def is_pinned(self) -> bool:
        """Whether it is page-locked for a GPU."""
    @property
    def pageable_because(self) -> str | None:
        """Why it is not page-locked; None if it is."""
    def device_view(self) -> DeviceView:
        """The same bytes as the device sees them.

        Raises PoorwillError where the device does not: for a pageable buffer of a GPU, and with
        VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=1.
        """
    def free(self) -> None:
        """Lets go of the memory. Arrays and views that were made of it keep it until they are gone, too.
        Freeing again does nothing.
        """
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of the DLPack protocol; `max_version` says which of its versions is understood.

        Raises BufferError for another device, and for a copy.
        """
    def __dlpack_device__(self) -> tuple[int, int]:
        """Where it is, as the DLPack protocol has it: on the CPU."""

@final
class LoadedTensor:
    """A tensor of a checkpoint that `load_checkpoint` has read, or rather its bytes: a piece of a buffer of
    host memory.

    It is lent by the DLPack protocol as a flat array of uint8 on the CPU. The buffer goes when neither this,
    nor an array, nor a view of any of its pieces is left; in a forked child it is not there.
    """

    @property
    def name(self) -> str:
        """Its name, as the file has it."""
    @property
    def dtype(self) -> str:
        """The type of its elements, as the format names it: "BF16"."""
    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
    @property
    def address(self) -> int:
        """Where it begins in this process; 0 without bytes."""
    @property
    def device(self) -> str:
        """The device, by name."""
    @property
    def is_pinned(self) -> bool:
        """Whether it is page-locked for a GPU."""
    @property
    def pageable_because(self) -> str | None:
        """Why it is not page-locked; None if it is, or has no bytes."""
    def device_view(self) -> DeviceView:
        """The same bytes as the device sees them.

        Raises PoorwillError where the device does not, as `HostBuffer.device_view`, and ValueError without
        bytes.
        """
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of the DLPack protocol; `max_version` says which of its versions is understood.

        Raises BufferError for another device, and for a copy.
        """
    def __dlpack_device__(self) -> tuple[int, int]:
        """Where it is, as the DLPack protocol has it: on the CPU."""

def load_checkpoint(
    paths: Sequence[str | os.PathLike[str]],
    dtypes: Sequence[str],
    *,
    device: _Device | None = None,
    pin: bool | Literal["auto"] = "auto",
    readers: int | None = None,
) -> tuple[list[LoadedTensor], dict[str, Any]]:
    """Reads the checkpoint that `paths` make up into host memory, and gives its tensors, in the order of the
    files, and a dictionary of what was done.

    `dtypes` are those that the caller can have tensors of, by the format's names. `device`, `pin` are as for
    `HostBuffer`; `readers` is how many read at the same time, 1 to 256, chosen from the machine if it is
    None. Python code goes on meanwhile, and a signal's handler that raises ends the load: everything is given
    back then, as after every error.

    Raises ValueError for a tensor of another type, OutOfMemoryError, before anything is read, where there is
    no room for all of it, FileNotFoundError, and PoorwillError for files that are no checkpoint, or that
    cannot be read.
    """

@final
class DeviceView:
    """Host memory as a device sees it, without a copy: `HostBuffer.device_view` and `device_view_of` make it.

    It is lent by the DLPack protocol as a flat array of uint8 on the device. The memory stays as long as this
    or an array of it is left, and the last to go waits for the device's work.
    """

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
    @property
    def address(self) -> int:
        """Where the device sees it."""
    @property
    def device(self) -> str:
        """The device, by name."""
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of the DLPack protocol; `max_version` says which of its versions is understood.

        Raises BufferError for another device, and for a copy.
        """
    def __dlpack_device__(self) -> tuple[int, int]:
        """Where it is, as the DLPack protocol has it: (1, 0) for the host device, (2, N) for a GPU."""

def device_view_of(address: int, nbytes: int, keep: object, *, device: _Device | None = None) -> DeviceView:
    """`nbytes` of host memory of somebody else's at `address`, as the device sees them. `keep` is what keeps
    the memory, and is held until the last array of the view has gone.

    Memory that is page-locked, by whomever, is seen as it is; other memory is page-locked in place, in whole
    pages, until its last view has gone. It must not be freed before.

    Raises ValueError for no bytes and for memory that shares a page with such as somebody else has
    page-locked, and PoorwillError where it cannot be page-locked, or a variable of the environment says not
    to.
    """

def offload_policy() -> dict[str, Any]:
    """What the environment turns off now: `pin` and `uva` are whether host memory may be page-locked, and
    seen in place; `pin_because` and `uva_because` name the variable where not.

    Raises PoorwillError for one that is neither 0 nor 1.
    """
