"""How executors call their ranks; alike in both versions but for a few parameters."""

import functools
import pickle
from collections import deque
from concurrent.futures import Future
from typing import Any

from .worker import Worker


def run(worker: Worker, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """A method by its name, or a function that takes the worker first."""
    called = getattr(worker, method) if isinstance(method, str) else functools.partial(method, worker)
    return called(*args, **(kwargs or {}))


class Ranks:
    """Worker processes and the queues of their answers."""

    def __init__(self, count: int) -> None:
        self.workers = [Worker(rank) for rank in range(count)]
        self.answers: list[deque[tuple[bool, Any]]] = [deque() for _ in self.workers]
        self.is_failed = False

    def call(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Any]:
        """Reads the answers in the order of the ranks, and stops at the first that is an error."""
        if self.is_failed:
            raise RuntimeError("Executor failed.")
        # They have their own memory.
        sent = pickle.dumps((method, args, kwargs))
        for worker, answers in zip(self.workers, self.answers, strict=True):
            try:
                answers.append((True, pickle.loads(pickle.dumps(run(worker, *pickle.loads(sent))))))
            except Exception as error:
                answers.append((False, str(error)))
        results = []
        for answers in self.answers:
            is_good, result = answers.popleft()
            if not is_good:
                raise RuntimeError(f"Worker failed with error '{result}', please check the stack trace above")
            results.append(result)
        return results


def later(value: Any) -> Future[Any]:
    """A future that is there already."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future
