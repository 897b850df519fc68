"""How a `cache_limit` is divided: an arena and PyTorch above it each keep freed memory mapped."""

STEP_BYTES = 32 << 20
"""Growth of PyTorch's cache before a generation is retired. Larger freed parts are released whole.
Smaller ones can be carved where they lie in segments that several tensors share.
"""

_CACHED_STEPS = 3
"""Most that PyTorch's cache has mapped, in steps: of the current generation, of retired ones, and of growth
since the last check.
"""

_LARGEST_STEPS = 16
"""Largest part of a limit that is one step."""

LEAST_LIMIT_BYTES = (_CACHED_STEPS + 1) * STEP_BYTES
"""Least limit that scopes can keep: PyTorch's cache, and what freed parts may keep of the arena's chunks."""


def largest_step_bytes(limit_bytes: int) -> int:
    """Largest growth of PyTorch's cache that scopes of an arena with this limit may wait for."""
    return max(STEP_BYTES, limit_bytes // _LARGEST_STEPS)


def arena_share_bytes(limit_bytes: int) -> int:
    """What the arena itself may keep mapped. PyTorch's cache has the rest."""
    return limit_bytes - _CACHED_STEPS * largest_step_bytes(limit_bytes)


def check_limit(name: str, limit_bytes: int) -> None:
    """Raises ValueError, with the name of the setting, for a limit that scopes cannot keep."""
    if limit_bytes < LEAST_LIMIT_BYTES:
        raise ValueError(
            f"{name} is {limit_bytes} bytes, and PyTorch's cache and a chunk keep up to {LEAST_LIMIT_BYTES}: "
            f"give {LEAST_LIMIT_BYTES >> 20}MiB or more, or none"
        )
