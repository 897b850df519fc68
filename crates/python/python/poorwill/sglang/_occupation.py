"""`/release_memory_occupation` and `/resume_memory_occupation` may be repeated.

SGLang copies buffers of the model before it asks for a pause, asleep or not, which would be an illegal
access. It also fails where a tag is resumed twice, or named twice in a request. So tags that are already as
they should be are left out of the request, and each is named once.
"""

import copy
import importlib
import logging
from collections.abc import Callable
from typing import Any

from poorwill.sglang._adapter import is_ours

logger = logging.getLogger("poorwill.sglang")

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_REQUESTS = "sglang.srt.managers.io_struct"
_TAGS = ("kv_cache", "weights", "cuda_graph")


def release(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around SGLang's own: releases the tags that are not released yet."""
    return _around(original, manager, request, releases=True)


def resume(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around SGLang's own: resumes the tags that are released."""
    return _around(original, manager, request, releases=False)


def _around(original: Callable[..., Any], manager: Any, request: Any, *, releases: bool) -> Any:
    if not is_ours(manager.memory_saver_adapter):
        return original(manager, request)
    asked = list(request.tags or _TAGS)
    left = [tag for tag in dict.fromkeys(asked) if (tag in manager.offload_tags) != releases]
    if left == asked:
        return original(manager, request)
    call = "release_memory_occupation" if releases else "resume_memory_occupation"
    if done := sorted(set(asked) - set(left)):
        logger.warning("%s: %s %s already", call, ", ".join(done), "released" if releases else "resumed")
    if left:
        request = copy.copy(request)
        request.tags = left
        return original(manager, request)
    answers = importlib.import_module(_REQUESTS)
    answer = "ReleaseMemoryOccupationReqOutput" if releases else "ResumeMemoryOccupationReqOutput"
    return getattr(answers, answer)()
