"""Operations fail when their engine dies.

vLLM fails the requests of a dead engine, but not calls like sleep and wake. Those wait for an answer that
never comes, so a client hangs, and so does a server that waits for it. The operations that poorwill watches
check twice a second whether vLLM considers the engine alive. If not, they raise vLLM's own error, which ends
its server.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import InvalidStateError
from typing import Any

__all__ = ["outlive", "outlive_async"]

_POLL_SECONDS = 0.5


async def outlive_async(client: Any, operation: Awaitable[Any]) -> Any:
    """The result of an operation on an asynchronous client's engines; raises if they die meanwhile."""
    task = asyncio.ensure_future(operation)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_POLL_SECONDS)
            if not task.done():
                client.ensure_alive()
    finally:
        # Only if it is unfinished: the client disconnected, or the engine died.
        task.cancel()
    return task.result()


def outlive(client: Any, operation: Callable[[], Any]) -> Any:
    """The same for a caller that waits in a thread; engines in this process end with it."""
    if not hasattr(client, "utility_results"):
        return operation()
    ended = threading.Event()
    watcher = threading.Thread(
        target=_fail_what_waits, args=(client, ended), name="poorwill-vllm-engine", daemon=True
    )
    watcher.start()
    try:
        return operation()
    finally:
        ended.set()
        watcher.join()


def _fail_what_waits(client: Any, ended: threading.Event) -> None:
    """Fails the answers that a client waits for, as soon as its engine has died."""
    while not ended.wait(_POLL_SECONDS):
        try:
            client.ensure_alive()
        except Exception as error:
            for answer in list(client.utility_results.values()):
                # An answer that has just arrived stays.
                with contextlib.suppress(InvalidStateError):
                    answer.set_exception(error)
