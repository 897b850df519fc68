"""`/release_memory_occupation` and `/resume_memory_occupation`: repeatable, and for all ranks or none.

SGLang copies buffers of the model before it asks for a pause, asleep or not, which would be an illegal
access. It also fails where a tag is resumed twice, or named twice in a request. So tags that are already as
they should be are left out of the request, and each is named once.
"""

import copy
import logging
from collections.abc import Callable
from typing import Any

from poorwill.sglang import _answers, _stages
from poorwill.sglang._adapter import is_ours
from poorwill.sglang._answers import OccupationError
from poorwill.sglang._generations import Generation
from poorwill.sglang._queues import RELEASE, RESUME
from poorwill.sglang._together import carry_out

logger = logging.getLogger("poorwill.sglang")

_TAGS = ("kv_cache", "weights", "cuda_graph")


def release(generation: Generation, original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around SGLang's own: releases the tags that are not released yet."""
    return _around(generation, original, manager, request, releases=True)


def resume(generation: Generation, original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around SGLang's own: resumes the tags that are released."""
    return _around(generation, original, manager, request, releases=False)


def _around(
    generation: Generation, original: Callable[..., Any], manager: Any, request: Any, *, releases: bool
) -> Any:
    if not is_ours(manager.memory_saver_adapter):
        return original(manager, request)
    scheduler = generation.scheduler(manager)
    pipeline = generation.pipeline(scheduler)
    # Then it is as without other ranks.
    is_apart = (
        generation.reaches_late(scheduler)
        or _stages.passes_late(pipeline, scheduler)
        # SGLang refuses it, and others may wait for this stage's work.
        or (releases and pipeline.stages > 1 and not generation.is_idle(manager))
    )
    if not is_apart and _stages.is_kept(generation, scheduler, request):
        # Without an answer, which comes later.
        return None
    asked = list(request.tags or _TAGS)
    left = [tag for tag in dict.fromkeys(asked) if (tag in manager.offload_tags) != releases]
    if done := sorted(set(asked) - set(left)):
        call = RELEASE if releases else RESUME
        logger.warning("%s: %s %s already", call, ", ".join(done), "released" if releases else "resumed")
    if not left:
        return _answers.done(releases=releases)
    needed = copy.copy(request)
    needed.tags = left
    if is_apart:
        return original(manager, needed)
    try:
        return carry_out(generation, original, manager, needed, releases=releases)
    except OccupationError as error:
        return _answers.failed(request, error, releases=releases)
