"""Operations end with their engine: who waits for one hears that the engine has died, and waits no longer.

vLLM fails the requests of an engine that has died. It does not fail calls of the engine (a sleep, a wake):
they wait for an answer that nobody is left to give, so that a client hangs, and a server that wants to end
waits for that client. The operations that poorwill watches look twice a second whether the engine lives, as
vLLM itself knows it, and raise vLLM's own error for that, which ends its server.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import InvalidStateError
from typing import Any

__all__ = ["outlive", "outlive_async"]

_LOOK_SECONDS = 0.5


async def outlive_async(client: Any, operation: Awaitable[Any]) -> Any:
    """What an operation on the engines of an asynchronous client comes to; raises if they die meanwhile."""
    task = asyncio.ensure_future(operation)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_LOOK_SECONDS)
            if not task.done():
                client.ensure_alive()
    finally:
        # Only if it has not ended: the client went away, or the engine did.
        task.cancel()
    return task.result()


def outlive(client: Any, operation: Callable[[], Any]) -> Any:
    """The same where the caller waits in a thread; engines in this process end with it."""
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
    while not ended.wait(_LOOK_SECONDS):
        try:
            client.ensure_alive()
        except Exception as error:
            for answer in list(client.utility_results.values()):
                # One that has come at this moment stays.
                with contextlib.suppress(InvalidStateError):
                    answer.set_exception(error)
