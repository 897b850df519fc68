"""The stages of a pipeline release and resume at once.

SGLang's stages pass requests on after they have carried them out. So a stage would wait for others that have
not got the request. Here each but the last carries a release or resume out once it has passed it on.
"""

from collections.abc import Sequence
from typing import Any

# The scheduler's attribute with requests that the next stage has not got.
_KEPT = "_poorwill_kept"
# Its method that passes requests on.
_SEND = "_pp_send_pyobj_to_next_stage"


def is_busy(parallel: Any, manager: Any) -> bool:
    """Whether a stage has work, so that SGLang refuses a release, and others may wait for this stage."""
    if parallel.pp_size == 1:
        return False
    return not manager.is_fully_idle(ignore_waiting=manager.scheduler._engine_paused)


def is_kept(parallel: Any, scheduler: Any, request: Any) -> bool:
    """Whether a request is carried out later, after it was passed on."""
    if parallel.pp_size == 1 or parallel.pp_rank == parallel.pp_size - 1:
        return False
    if _KEPT not in vars(scheduler):
        _watch(scheduler)
    kept: list[Any] = vars(scheduler)[_KEPT]
    if _has(kept, request):
        return False
    kept.append(request)
    return True


def _watch(scheduler: Any) -> None:
    """Carries requests that are kept out once they are passed on."""
    kept: list[Any] = []
    original = getattr(scheduler, _SEND)

    def send(data: Any, *args: Any, **kwargs: Any) -> Any:
        sent = original(data, *args, **kwargs)
        for request in [each for each in kept if _has(data, each)]:
            try:
                answer = scheduler._request_dispatcher(request)
            finally:
                kept[:] = [each for each in kept if each is not request]
            scheduler.send_control_output(answer, request)
        return sent

    vars(scheduler).update({_KEPT: kept, _SEND: send})


def _has(requests: Sequence[Any], request: Any) -> bool:
    # Two of them may be equal.
    return any(each is request for each in requests)
