"""`/release_memory_occupation` and `/resume_memory_occupation`: repeatable, and for all ranks or none.

SGLang copies buffers of the model before it asks for a pause, asleep or not, which would be an illegal
access. It also fails where a tag is resumed twice, or named twice in a request. So tags that are already as
they should be are left out of the request, and each is named once.
"""

import copy
import importlib
import logging
from collections.abc import Callable
from typing import Any

from poorwill.sglang import _answers, _stages
from poorwill.sglang._adapter import is_ours
from poorwill.sglang._answers import OccupationError
from poorwill.sglang._group import CONTEXT
from poorwill.sglang._queues import RELEASE, RESUME
from poorwill.sglang._together import carry_out

logger = logging.getLogger("poorwill.sglang")

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
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
    context = importlib.import_module(CONTEXT)
    parallel = context.get_parallel()
    # Then it is as without other ranks.
    is_apart = (
        _is_late(context, parallel)
        or _stages.passes_late(parallel, manager.scheduler)
        or (releases and _stages.is_busy(parallel, manager))
    )
    if not is_apart and _stages.is_kept(parallel, manager.scheduler, request):
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
        return carry_out(original, manager, needed, releases=releases)
    except OccupationError as error:
        return _answers.failed(request, error, releases=releases)


def _is_late(context: Any, parallel: Any) -> bool:
    """Whether some tensor parallel ranks get a request later than others, which may not wait for them."""
    return bool(
        parallel.attn_dp_enabled
        and (
            parallel.enable_dp_attention_local_control_broadcast or context.get_exec().moe.is_ep_scale_joiner
        )
    )
