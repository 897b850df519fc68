"""The stages of a pipeline release and resume at once.

SGLang's stages pass a batch of requests on after they have carried it out. So a stage would wait for others
that have not got the request. Here each but the last passes the batch on before it carries out a release or
resume, and what follows that in the batch. All stages keep the order of requests.
"""

from typing import Any

from poorwill.sglang._generations import Generation, Pipeline
from poorwill.sglang._queues import NAMES

# The scheduler's attribute with what is kept.
_KEPT = "_poorwill_kept"
# What carries requests out, and its method that passes them on.
_DISPATCH = "_request_dispatcher"
_SEND = "_pp_send_pyobj_to_next_stage"


def passes_late(pipeline: Pipeline, scheduler: Any) -> bool:
    """Whether a stage waits for more from the one before it, before it passes a batch on.

    So do disaggregated servers. Of three stages the last one would not get the request.
    """
    return pipeline.stages > 2 and any(getattr(scheduler, name, None) is not None for name in NAMES)


def is_kept(generation: Generation, scheduler: Any, request: Any) -> bool:
    """Whether a request is carried out later, after it was passed on."""
    pipeline = generation.pipeline(scheduler)
    if pipeline.stage == pipeline.stages - 1:
        return False
    if _KEPT not in vars(scheduler):
        vars(scheduler)[_KEPT] = _Kept(generation, scheduler)
    kept: _Kept = vars(scheduler)[_KEPT]
    return kept.begin(request)


class _Kept:
    """The rest of a batch, from a release or resume on, until the batch was passed on."""

    def __init__(self, generation: Generation, scheduler: Any) -> None:
        self._generation = generation
        self._scheduler = scheduler
        self._requests: list[Any] = []
        self._dispatch: Any = None
        self._is_passed = False
        self._send = getattr(scheduler, _SEND)
        setattr(scheduler, _SEND, self._pass_on)

    def begin(self, request: Any) -> bool:
        """Keeps this request and those that follow, unless their batch was passed on."""
        if self._is_passed:
            return False
        self._requests = [request]
        self._dispatch = getattr(self._scheduler, _DISPATCH)
        # It has no answer for now.
        setattr(self._scheduler, _DISPATCH, self._requests.append)
        return True

    def _pass_on(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        sent = self._send(data, *args, **kwargs)
        # Two requests may be equal.
        if self._requests and any(each is self._requests[0] for each in data):
            self._carry_out()
        return sent

    def _carry_out(self) -> None:
        requests, self._requests = self._requests, []
        setattr(self._scheduler, _DISPATCH, self._dispatch)
        self._is_passed = True
        try:
            for request in requests:
                if (output := self._dispatch(request)) is not None:
                    self._generation.answer(self._scheduler, output, request)
        finally:
            self._is_passed = False
