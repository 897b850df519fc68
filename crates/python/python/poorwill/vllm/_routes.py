"""The parameter `keep_tags` of vLLM's route `/sleep`: repeated, or with commas."""

import functools
from typing import Any

from poorwill.vllm import _keep

__all__ = ["install"]

_PATH = "/sleep"
_HOOK = "_poorwill_hook"


def install(module: Any) -> None:
    """Has the route of vLLM's router pass it on. Repeating it does nothing."""
    router = module.router
    [route] = [route for route in router.routes if route.path == _PATH]
    stock = route.endpoint
    if hasattr(stock, _HOOK):
        return

    @functools.wraps(stock)
    async def sleep(raw_request: Any, **given: Any) -> Any:
        named = ",".join(raw_request.query_params.getlist("keep_tags"))
        with _keep.asking(tag.strip() for tag in named.split(",") if tag.strip()):
            return await stock(raw_request=raw_request, **given)

    setattr(sleep, _HOOK, True)
    router.routes.remove(route)
    router.add_api_route(_PATH, sleep, methods=["POST"], name=route.name)
