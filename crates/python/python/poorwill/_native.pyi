from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, TypeAlias, final

__all__ = [
    "SHARED_MEMORY_WITHOUT_OPT_IN_BYTES",
    "Arena",
    "Budget",
    "BudgetError",
    "BudgetWarning",
    "Claim",
    "Claimed",
    "ClosedError",
    "PoorwillError",
    "Source",
    "__version__",
    "arena",
    "budget",
    "cuda_ordinal",
    "estimate_attention",
    "estimate_chunk_fwd_o",
    "estimate_chunk_gated_delta_rule_fwd_h",
    "estimate_matmul",
    "known_compute_capabilities",
    "parse_bytes",
    "shared_memory_of_capability",
    "shared_memory_of_device",
]

__version__: str

SHARED_MEMORY_WITHOUT_OPT_IN_BYTES: int
"""The shared memory of a block on every GPU, if its kernel does not opt in to more."""

class PoorwillError(Exception):
    """What poorwill could not do, and what would help."""

class BudgetError(PoorwillError):
    """A claim that the budget does not allow, or a budget that nobody knows."""

class ClosedError(PoorwillError):
    """Something of an arena that has been closed, or of a block that has been freed."""

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

_Device: TypeAlias = int | str | _DeviceLike
_Cap: TypeAlias = int | float | str

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
) -> Arena:
    """Opens an arena, or finds it: memory of a device that can be put to sleep and woken.

    `device` is named as for `budget`. Several arenas of one device share it and have names. Asking again for
    one that is open returns it; options that are given then must be those that it was opened with.

    `limit` is the most that it may map: bytes as an int or a text like "24GiB"; a share of the device's budget,
    as a float, or a text like "0.92" or "92%"; or one for each device, as a mapping or a text like
    "cuda:0=20GiB,0.92". It has to fit beside what this process has of the device already; a share is lowered
    until it does. Without a limit the arena may have what is left of the budget. Each arena finds its budget
    when it is opened and none is kept for the others, so several without a limit compete, and in the end it is
    the device that refuses.

    `host_limit` bounds the host memory that the device may hold for backups, and `pageable` leaves it unlocked.
    They are the device's, and so those of its first arena.

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
    def close(self) -> None:
        """Gives everything back and ends it. Closing again does nothing.

        What still lives in it loses its bytes and its memory at once; the addresses stay reserved, so that
        nothing else comes to lie there, until the last has let go.
        """
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
