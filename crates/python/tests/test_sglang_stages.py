"""A stage of a pipeline carries out a batch's requests in their order, whichever it has to pass on before."""

import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from poorwill.sglang import _answers, _stages
from poorwill.sglang._generations import ALL, CONTEXT, Generation


class Rpc:
    """`RpcReqOutput`."""


class Request:
    """One that is equal to any other of its kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and self.kind == other.kind

    __hash__ = None  # type: ignore[assignment]


class Scheduler:
    """A stage of two, and its loop as far as requests are concerned."""

    def __init__(self, generation: Generation, rank: int = 0) -> None:
        self._generation = generation
        self.rpc: list[Any] = []
        self.done: list[Request | str] = []
        self.answered: list[Any] = []
        self.pp_size, self.pp_rank = 2, rank
        sys.modules[CONTEXT].__dict__["get_parallel"] = lambda: self
        self._request_dispatcher: Any = self._dispatch
        socket = SimpleNamespace(send_pyobj=self.rpc.append)
        self.recv_from_rpc: Any = socket
        self.send_to_tokenizer = SimpleNamespace(send_output=self.send_control_output)
        self.ipc_channels: Any = SimpleNamespace(
            recv_from_rpc=socket, send_to_tokenizer=self.send_to_tokenizer
        )
        self.rust_server: Any = None

    def forget_rpc(self) -> None:
        """Has no socket for them."""
        self.recv_from_rpc = self.ipc_channels.recv_from_rpc = None

    def _dispatch(self, request: Request) -> Any:
        # As our hook does, within a call of the dispatcher.
        if request.kind == "release" and _stages.is_kept(self._generation, self, request):
            return None
        if request.kind == "fails":
            raise RuntimeError("the scheduler ends")
        self.done.append(request)
        return {"generate": None, "rpc": Rpc()}.get(request.kind, f"{request.kind} is done")

    def send_control_output(self, output: Any, request: Request) -> None:
        self.answered.append((output, request))

    def _pp_send_pyobj_to_next_stage(self, data: Any, async_send: bool = False) -> str:
        self.done.append("passed on")
        return f"work of {len(data)}"

    def process(self, requests: list[Request]) -> None:
        """As `process_input_requests`."""
        for request in requests:
            if (output := self._request_dispatcher(request)) is not None:
                self._generation.answer(self, output, request)

    def pass_on(self, data: Any) -> Any:
        return self._pp_send_pyobj_to_next_stage(data, async_send=True)


@pytest.fixture(autouse=True)
def _structures(monkeypatch: pytest.MonkeyPatch) -> None:
    structures = SimpleNamespace(RpcReqOutput=Rpc, sock_send=lambda socket, output: socket.send_pyobj(output))
    monkeypatch.setitem(sys.modules, _answers.REQUESTS, structures)
    monkeypatch.setitem(sys.modules, CONTEXT, ModuleType(CONTEXT))


@pytest.fixture(params=ALL.values(), ids=lambda each: each.__name__)
def generation(request: pytest.FixtureRequest) -> Generation:
    made: Generation = request.param()
    return made


KINDS = ("flush", "release", "generate", "flush", "release", "rpc", "generate")


def of_kinds(*kinds: str) -> list[Request]:
    return [Request(kind) for kind in kinds]


def is_same(done: list[Any], expected: list[Any]) -> bool:
    return [id(each) for each in done] == [id(each) for each in expected]


def test_what_follows_a_release_waits_with_it(generation: Generation) -> None:
    scheduler = Scheduler(generation)
    for _ in range(2):
        scheduler.done.clear()
        batch = of_kinds(*KINDS)
        scheduler.process(batch)
        assert is_same(scheduler.done, batch[:1])
        # Not this batch, though equal.
        scheduler.pass_on(of_kinds(*KINDS))
        assert len(scheduler.done) == 2
        assert scheduler.pass_on(batch) == "work of 7"
        assert is_same([each for each in scheduler.done if each != "passed on"], batch)
        assert scheduler.done[1:3] == ["passed on"] * 2
        # And then as ever.
        later = of_kinds("generate", "flush")
        scheduler.process(later)
        assert is_same(scheduler.done[-2:], later)
        scheduler.pass_on(later)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_is_answered_once_and_in_order(generation: Generation, rank: int) -> None:
    scheduler = Scheduler(generation, rank)
    batch = of_kinds(*KINDS)
    scheduler.process(batch)
    if rank == 0:
        scheduler.pass_on(batch)
    else:
        assert is_same(scheduler.done, batch)
    flush, release, _, second, again, _, _ = batch
    answered = scheduler.answered
    assert is_same([request for _, request in answered], [flush, release, second, again])
    assert [answer for answer, _ in answered] == [f"{each.kind} is done" for _, each in answered]
    assert [type(answer) for answer in scheduler.rpc] == [Rpc]


def test_without_a_socket_an_rpc_has_no_answer(generation: Generation) -> None:
    scheduler = Scheduler(generation)
    scheduler.forget_rpc()
    batch = of_kinds("release", "rpc")
    scheduler.process(batch)
    scheduler.pass_on(batch)
    assert [answer for answer, _ in scheduler.answered] == ["release is done"]


def test_the_rust_server_has_all_answers(generation: Generation) -> None:
    if generation.release < (0, 5, 20):
        assert "rust_server" not in inspect.getsource(type(generation)), "there is none"
        return
    scheduler = Scheduler(generation)
    pushed: list[Request] = []
    scheduler.rust_server = SimpleNamespace(push_control_output=lambda request, _: pushed.append(request))
    batch = of_kinds("release", "rpc")
    scheduler.process(batch)
    scheduler.pass_on(batch)
    # The last generation's scheduler hands them on.
    assert is_same(pushed or [request for _, request in scheduler.answered], batch)


def test_an_error_leaves_nothing_kept(generation: Generation) -> None:
    scheduler = Scheduler(generation)
    batch = of_kinds("release", "fails", "flush")
    scheduler.process(batch)
    with pytest.raises(RuntimeError, match="the scheduler ends"):
        scheduler.pass_on(batch)
    for each in (of_kinds("flush"), of_kinds("release")):
        before = len(scheduler.answered)
        scheduler.process(each)
        scheduler.pass_on(each)
        assert len(scheduler.answered) == before + 1
