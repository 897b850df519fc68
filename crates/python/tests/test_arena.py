"""What arenas promise: on the host device, and over a stand-in for NVIDIA's library."""

import poorwill
import pytest

MIB = 1 << 20


def test_smoke() -> None:
    arena = poorwill.arena("host:64MiB", "smoke", limit="32MiB")
    assert (arena.device, arena.name, arena.limit_bytes) == ("host:64MiB", "smoke", 32 * MIB)
    assert poorwill.arena("host", "smoke") == arena
    with pytest.raises(poorwill.PoorwillError, match="limit"):
        poorwill.arena("host", "smoke", limit="16MiB")
    with pytest.raises(poorwill.PoorwillError, match="share it"):
        poorwill.arena("host:16MiB", "other")
    arena.close()
    arena.close()
    with pytest.raises(poorwill.ClosedError, match="has been closed"):
        _ = arena.limit_bytes
