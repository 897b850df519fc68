"""Errors of a release or resume reach their caller, where SGLang's answers have no place for them.

What asks marks its request, by a field that SGLang leaves empty there. The answer to a marked one may have an
error in the same field. A server in Rust and additional tokenizers mark nothing. There a scheduler raises its
errors, and ends as it does without Poorwill.
"""

import importlib
from http import HTTPStatus
from typing import Any

from poorwill._native import PoorwillError

COMMUNICATOR = "sglang.srt.managers.communicator.FanOutCommunicator"
REQUESTS = "sglang.srt.managers.io_struct"
MARK = "poorwill"

_CALLS = ("Release", "Resume")


class OccupationError(PoorwillError):
    """Memory was not released or resumed, on any rank."""

    status_code = HTTPStatus.SERVICE_UNAVAILABLE
    """What SGLang's server answers."""


async def ask(original: Any, communicator: Any, request: Any) -> Any:
    """Around SGLang's own call of its schedulers. Raises OccupationError with what they answer."""
    requests = importlib.import_module(REQUESTS)
    kinds = tuple(getattr(requests, f"{call}MemoryOccupationReqInput") for call in _CALLS)
    if not isinstance(request, kinds):
        return await original(communicator, request)
    request.rid = MARK
    answers = await original(communicator, request)
    # One for each data parallel engine.
    if errors := dict.fromkeys(answer.rid for answer in answers if answer.rid):
        raise OccupationError("; ".join(errors))
    return answers


def done(*, releases: bool) -> Any:
    """The answer of a scheduler that has done it."""
    requests = importlib.import_module(REQUESTS)
    return getattr(requests, f"{_CALLS[0 if releases else 1]}MemoryOccupationReqOutput")()


def failed(request: Any, error: OccupationError, *, releases: bool) -> Any:
    """The answer with an error. Raises it where that would not be read."""
    if request.rid != MARK:
        raise error
    answer = done(releases=releases)
    answer.rid = str(error)
    return answer
