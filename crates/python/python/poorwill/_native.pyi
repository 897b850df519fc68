__all__ = [
    "SHARED_MEMORY_WITHOUT_OPT_IN_BYTES",
    "PoorwillError",
    "__version__",
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

def parse_bytes(text: str, /) -> int:
    """How many bytes a size like "24GiB", "1.5GiB", "512m" or "1048576" stands for.

    Units are powers of 1024, except for "kB", "MB", "GB" and so on, which are powers of 1000.
    Raises ValueError for anything else.
    """

def known_compute_capabilities() -> list[tuple[int, int]]:
    """The compute capabilities whose shared memory is known, in ascending order."""

def shared_memory_of_capability(major: int, minor: int) -> int | None:
    """The bytes of shared memory that a block may opt in to; None where the capability is not known."""

def shared_memory_of_device(ordinal: int) -> int:
    """The bytes of shared memory that a block may opt in to. Raises PoorwillError without such a GPU."""

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
