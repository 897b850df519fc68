"""What the allocator of one device did, as PyTorch 2.11 keeps it: the `device_traces` of its snapshots.

What is freed has the frames of its allocation, unless the context is "all". Nothing compiles here, and no
entry has metadata.
"""

import sys
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any

HERE = str(Path(__file__).parent)
# Functions of PyTorch that are Python there, too.
PYTHONS = (f"{HERE}/streams.py",)

Frames = list[dict[str, Any]]


class History:
    """The last events, and which stacks they get."""

    def __init__(self) -> None:
        self.is_on = False
        self._context: str | None = None
        self._entries: deque[dict[str, Any]] = deque()

    def record(self, enabled: str | None, context: str | None, max_entries: int) -> None:
        """`_record_memory_history`. Turning it off forgets all."""
        self.is_on = enabled is not None
        self._context = context if self.is_on else None
        kept = max_entries if enabled == "all" else 1
        self._entries = deque(self._entries if self.is_on else (), maxlen=min(kept, sys.maxsize))

    def frames(self, *contexts: str) -> Frames:
        """The caller's stack, innermost first, if the context is one of these.

        Of the fake's functions only that is in it which PyTorch has in Python as well.
        """
        if self._context not in contexts:
            return []
        frames: Frames = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(HERE) or code.co_filename in PYTHONS:
                frames.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno})
            frame = frame.f_back
        return frames

    def add(self, action: str, address: int, size: int, stream: int, frames: Frames) -> None:
        if not self.is_on:
            return
        entry: dict[str, Any] = {"frames": frames} if frames else {}
        entry |= {
            "action": action,
            "device_free" if action == "oom" else "addr": address,
            "size": size,
            "stream": stream,
            "time_us": time.time_ns() // 1000,
            "compile_context": "N/A",
            "user_metadata": "",
        }
        self._entries.append(entry)

    def trace(self) -> list[dict[str, Any]]:
        return [dict(entry) for entry in self._entries]
