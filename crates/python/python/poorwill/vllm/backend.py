"""The sleep-mode backend `poorwill`, for vLLM's registry of backends (0.25 and later).

It uses the allocator of the worker's pools, as vLLM's own backend does. A vLLM that asks for a backend's
allocator gets it from here; in any other the worker puts it in the place of vLLM's.
"""

import importlib
from typing import Any

from poorwill.vllm.allocator import Allocator

_stock: Any = importlib.import_module("vllm.device_allocator.sleep_mode_backend")
_platforms: Any = importlib.import_module("vllm.platforms")


class Backend(_stock.SleepModeBackend):  # type: ignore[misc]
    """Puts an engine's memory to sleep with Poorwill."""

    def suspend(self, level: int = 1) -> None:
        """Puts everything to sleep; level 2 drops the weights.

        Raises SleepError, with everything awake as before, or with a report of what was not released.
        """
        try:
            Allocator.get_instance().suspend(level)
        finally:
            self._look()

    def resume(self, tags: list[str] | None = None) -> None:
        """Wakes everything, or all but the weights and the KV cache where they are not named."""
        self._state = "RESUMING"
        try:
            Allocator.get_instance().wake_up(tags)
        finally:
            self._look()

    def discard(self, tags: tuple[str, ...]) -> None:
        """Drops the memory and bytes of these tags."""
        try:
            Allocator.get_instance().discard(tags)
        finally:
            self._look()

    def state(self) -> str:
        """`RUNNING`, `SUSPENDED` while anything sleeps, or `RESUMING`."""
        return str(self._state)

    def _look(self) -> None:
        self._state = "SUSPENDED" if Allocator.get_instance().sleeping() else "RUNNING"

    @classmethod
    def allocator(cls) -> Allocator:
        """The process's allocator, whose pools it puts to sleep."""
        return Allocator.get_instance()

    @classmethod
    def is_supported(cls) -> bool:
        """On NVIDIA's GPUs."""
        return bool(_platforms.current_platform.is_cuda())

    @classmethod
    def preserves_communicators(cls) -> bool:
        """Their memory is outside of the pools, and stays."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """The process and its context stay, and with them every kernel."""
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """Both keep their addresses."""
        return True

    @classmethod
    def supports_durable_storage(cls) -> bool:
        """Backups end with the process."""
        return False
