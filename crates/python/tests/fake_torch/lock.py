"""A lock that a thread may take again, and what waits for its end.

Python collects garbage in the midst of anything, and a tensor that it finds wants its memory freed; it makes
pending calls there, too. PyTorch's allocator is written in a language where that cannot happen, so here it
happens when the lock is given back.
"""

import threading
from collections.abc import Callable


class Lock:
    """A recursive lock; as a context it is held."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._holder = 0
        self._late: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()
        self._depth += 1

    def __exit__(self, *raised: object) -> None:
        try:
            while self._depth == 1 and self._late:
                self._late.pop(0)()
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._holder = 0
            self._lock.release()

    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return self._holder == threading.get_ident()

    def when_given_back(self, action: Callable[[], None]) -> None:
        """Does something at once, or when this thread gives the lock back that it holds."""
        if self.is_mine():
            self._late.append(action)
        else:
            action()
