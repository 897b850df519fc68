"""NVIDIA's driver, called in a process of its own.

A process that has called it counts as one that uses a GPU, and would be taken off with its engine. So the
server's process does not call it, and a child does, one call after the other. The child ends with the server.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from poorwill import HibernateError, PoorwillError, hibernate, resume
from poorwill._native import process_state as state_of

__all__ = ["open_driver", "process_state", "put_back", "take_off"]

_SERVE = "from poorwill.vllm._driver import serve; serve()"


class _Child:
    """The process, started by the first call, and again if it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """The value of a call. Raises its HibernateError or ValueError."""
        asked = json.dumps([name, args, options])
        with self._lock:
            answer = self._answer(asked)
        if answer is None:
            raise _error("failed", "the process that calls the driver has ended: see the log, and call again")
        if answer["kind"] is None:
            return answer["value"]
        if answer["kind"] == "ValueError":
            raise ValueError(answer["value"])
        raise _error(answer["kind"], answer["value"])

    def _answer(self, asked: str) -> Any:
        if self._process is None or self._process.poll() is not None:
            # Not ended by an interrupt of the server, but by the end of its input.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.write(f"{asked}\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if line:
                return json.loads(line)
        process.kill()
        process.communicate()
        return None


def _error(kind: str, message: str) -> HibernateError:
    error = HibernateError(message)
    error.kind = kind
    return error


_child = _Child()


def open_driver() -> None:
    """Starts the process, which loads the driver: seconds, on machines with many GPUs."""
    with contextlib.suppress(PoorwillError):
        _child.call("open")


def process_state(pid: int) -> str:
    """As the library's."""
    return str(_child.call("state", pid))


def take_off(pids: Sequence[int], **limits: Any) -> dict[str, Any]:
    """The library's `hibernate`, with its report as plain values."""
    report: dict[str, Any] = _child.call("hibernate", list(pids), **limits)
    return report


def put_back(pids: Sequence[int]) -> dict[str, Any]:
    """The library's `resume`, likewise."""
    report: dict[str, Any] = _child.call("resume", list(pids))
    return report


# In the child

_CALLS: dict[str, Callable[..., Any]] = {
    "open": lambda: state_of(os.getpid()),
    "state": state_of,
    "hibernate": lambda *args, **options: hibernate(*args, **options).as_dict(),
    "resume": lambda *args: resume(*args).as_dict(),
}


def serve() -> None:
    """Answers each line of the input with a line, until its end."""
    for line in sys.stdin:
        name, args, options = json.loads(line)
        print(json.dumps(_called(name, args, options)), flush=True)
    # The driver's own end would wait while this process is off its GPU.
    os._exit(0)


def _called(name: str, args: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"kind": None, "value": _CALLS[name](*args, **options)}
    except HibernateError as error:
        return {"kind": error.kind, "value": str(error)}
    except (ValueError, TypeError) as error:
        return {"kind": "ValueError", "value": str(error)}
