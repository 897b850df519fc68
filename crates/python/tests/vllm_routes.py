"""vLLM's own routes beside `/sleep`, over as much of FastAPI as they ask for."""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_vllm.loader import Loader


class HTTPException(Exception):
    """FastAPI's."""

    def __init__(self, status_code: int, detail: Any = None) -> None:
        self.status_code, self.detail = status_code, detail


class Router:
    """FastAPI's, as far as routes are added."""

    def __init__(self) -> None:
        self.routes: list[Any] = []

    def add_api_route(self, path: str, call: Any, *, methods: list[str], name: str) -> None:
        self.routes.append(SimpleNamespace(path=path, endpoint=call, methods=methods, name=name))

    def post(self, path: str) -> Callable[[Any], Any]:
        def add(call: Any) -> Any:
            self.add_api_route(path, call, methods=["POST"], name=call.__name__)
            return call

        return add

    get = post


class Query(dict[str, str]):
    """The parameters of a request."""

    def getlist(self, name: str) -> list[str]:
        return [self[name]] if name in self else []


def routes_of(version: str) -> Any:
    """vLLM's module of `/sleep`."""
    module = "sleep" if int(version.split(".")[1]) < 23 else "dev.sleep"
    name = f"vllm.entrypoints.serve.{module}.api_router"
    loader = Loader(version, [name], {"poorwill"})
    loader.give("fastapi", APIRouter=Router)
    loader.give("fastapi.responses", JSONResponse=lambda content: content, Response=lambda status_code: None)
    return loader.module(name)


def install_fastapi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ours look for it."""
    fastapi, responses = ModuleType("fastapi"), ModuleType("fastapi.responses")
    vars(fastapi).update(HTTPException=HTTPException, Request=object, responses=responses)
    vars(responses).update(JSONResponse=lambda content: content)
    monkeypatch.setitem(sys.modules, "fastapi", fastapi)
    monkeypatch.setitem(sys.modules, "fastapi.responses", responses)


async def called(module: Any, frontend: Any, path: str, **query: str) -> Any:
    """A route's answer, or its status and sentence."""
    [route] = [route for route in module.router.routes if route.path == path]
    state = SimpleNamespace(engine_client=frontend)
    request = SimpleNamespace(app=SimpleNamespace(state=state), query_params=Query(query))
    # FastAPI takes out what a route names.
    named = inspect.signature(route.endpoint).parameters
    given = {name: value for name, value in query.items() if name in named}
    try:
        return await route.endpoint(raw_request=request, **given)
    except HTTPException as error:
        return (error.status_code, error.detail)
