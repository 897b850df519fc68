"""What a region's tag is in an arena: one tag of ours for each kind of backup.

A tag of the memory saver may have regions with and without backup, whose memory sleeps in different ways.
"""

import hashlib
import re
from typing import Literal, NamedTuple

Backup = Literal["none", "pinned", "mmap", "disk"]

_SUFFIXES: dict[Backup, str] = {"pinned": "", "mmap": ".mmap", "none": ".none", "disk": ".disk"}
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,56}")


class Kind(NamedTuple):
    """Regions of one tag that sleep alike."""

    tag: str
    backup: Backup

    @property
    def name(self) -> str:
        """The tag in an arena; the saver's own where it can be."""
        tag = self.tag
        is_taken = tag.endswith(tuple(filter(None, _SUFFIXES.values()))) or tag.startswith("sha256-")
        if is_taken or not _PLAIN.fullmatch(tag):
            # Any text is a tag of the saver's.
            tag = f"sha256-{hashlib.sha256(tag.encode()).hexdigest()[:32]}"
        return tag + _SUFFIXES[self.backup]

    @property
    def is_backed_up(self) -> bool:
        """Whether a pause keeps the bytes."""
        return self.backup != "none"

    @property
    def is_readable(self) -> bool:
        """Whether the bytes of a pause are in host memory."""
        return self.backup in ("pinned", "mmap")
