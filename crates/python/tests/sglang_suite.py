"""What SGLang's calls do with our plugin: on a GPU, and over fakes of PyTorch and the driver.

The calls are those of SGLang, in the order in which a scheduler makes them.
"""

import asyncio
import gc
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import fake_sglang
import poorwill
import pytest
from poorwill.compat.torch_memory_saver import torch_memory_saver
from poorwill.compat.torch_memory_saver._pools import Pools
from poorwill.sglang._answers import OccupationError

torch: Any = import_module("torch")
GROUP: Any = None
if hasattr(torch, "distributed"):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    GROUP = torch.distributed.group.WORLD
else:
    torch.distributed = fake_sglang.Distributed

MIB = 1 << 20
CALLS = Path(__file__).with_name("sglang_calls.jsonl")
WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"
ALL = (GRAPHS, CACHE, WEIGHTS)

ADAPTER: Any = fake_sglang.install()
fake_sglang.load_plugins()
Adapter: Any = ADAPTER.TorchMemorySaverAdapter


def mapped_bytes() -> int:
    pools = torch_memory_saver._used()
    assert isinstance(pools, Pools)
    return sum(arena.stats().mapped_bytes for arena in pools._arenas.values())


class Scheduler:
    """One rank: its weights, caches and graphs, and what it does on `/release_memory_occupation`."""

    def __init__(self, *, backs_up: bool = True, captures: bool = True) -> None:
        # Each part of SGLang makes an adapter of its own.
        self.saver = Adapter.create(enable=True)
        assert self.saver.enabled
        self.saver.check_validity(caller_name="load_model")
        with Adapter.create(enable=True).region(WEIGHTS, enable_cpu_backup=backs_up):
            self.weights = [
                torch.empty(6 * MIB, dtype=torch.uint8, device="cuda").fill_(n + 1) for n in range(4)
            ]
            torch.empty(40 * MIB, dtype=torch.uint8, device="cuda").fill_(9)
        with Adapter.create(enable=True).region(tag=CACHE):
            self.requests = torch.zeros(MIB, dtype=torch.int32, device="cuda")
        with Adapter.create(enable=True).region(CACHE):
            self.cache = [torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
        self.inputs = torch.empty(6 * MIB, dtype=torch.uint8, device="cuda").fill_(0)
        self.graphs: list[Any] = []
        self.outputs: list[Any] = []
        self.manager = fake_sglang.Manager(self.saver, self.weights[0], torch.cuda.synchronize, GROUP)
        if captures:
            self._capture()

    def _capture(self) -> None:
        adapter = Adapter.create(enable=True)
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        for _ in range(3):
            graph = torch.cuda.CUDAGraph()
            with adapter.cuda_graph(
                cuda_graph=graph, pool=pool, stream=stream, tag=GRAPHS, enable_cpu_backup=True
            ):
                # SGLang takes what the first graph needs, and gives it back, before it captures more.
                span = torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")
                del span
                self.outputs.append(self.inputs.clone())
            self.graphs.append(graph)

    def answer(self, number: int) -> list[bytes]:
        """Reads weights, writes the cache, and replays."""
        self.inputs.fill_(number)
        self.cache[number % 4].fill_(number)
        self.requests.fill_(number)
        for graph in self.graphs:
            graph.replay()
        torch.cuda.synchronize()
        read = [*self.weights, *self.outputs]
        return [bytes(t.cpu().numpy_bytes() if hasattr(t, "numpy_bytes") else t.cpu().numpy()) for t in read]

    def release(self, *tags: str) -> None:
        answer = self.manager.release_memory_occupation(fake_sglang.Request(*tags))
        assert isinstance(answer, fake_sglang.Answer)

    def resume(self, *tags: str) -> None:
        answer = self.manager.resume_memory_occupation(fake_sglang.Request(*tags))
        assert isinstance(answer, fake_sglang.Answer)


@pytest.fixture(autouse=True)
def _ends() -> Any:
    yield
    pools = torch_memory_saver._impl
    if pools is None:
        return
    assert isinstance(pools, Pools)
    gc.collect()
    torch.cuda.synchronize()
    for arena in pools._arenas.values():
        arena.wake()
        arena.close()
    pools._arenas.clear()
    pools._mem_pools.clear()
    pools._graph_pools.clear()
    pools._kinds.clear()


def test_without_the_option_nothing_is_ours() -> None:
    adapter = Adapter.create(enable=False)
    assert not adapter.enabled
    with adapter.region(WEIGHTS), adapter.configure_subprocess():
        tensor = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    adapter.pause(WEIGHTS)
    tensor.fill_(1)


def test_nothing_is_loaded_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    adapter = Adapter.create(enable=True)
    assert isinstance(adapter, Adapter)
    with adapter.configure_subprocess():
        import os

        assert "LD_PRELOAD" not in os.environ


@pytest.mark.parametrize("captures", [True, False])
def test_ten_times_all_and_by_tag(captures: bool) -> None:
    scheduler = Scheduler(captures=captures)
    expected = scheduler.answer(7)
    for turn in range(10):
        tags = ALL if turn % 2 else ALL[: turn % 3 + 1]
        scheduler.release(*tags)
        if tags == ALL:
            assert mapped_bytes() == 0
        # Some frameworks bring the weights back first, to update them.
        if others := [tag for tag in tags if tag != CACHE]:
            scheduler.resume(*others)
        if CACHE in tags:
            scheduler.resume(CACHE)
        assert scheduler.answer(7) == expected


def test_the_calls_of_a_real_server_are_replayed() -> None:
    """Recorded in a scheduler of 0.5.23, whose server released and resumed six times; fewer bytes."""
    calls = [json.loads(line) for line in CALLS.read_text().splitlines()]
    adapter, stream = Adapter.create(enable=True), torch.cuda.Stream()
    weights: list[Any] = []
    caches: list[Any] = []
    graphs: list[Any] = []
    outputs: list[Any] = []
    pools = {call["pool"]: torch.cuda.graph_pool_handle() for call in calls if "pool" in call}
    paused: set[str] = set()
    turns = 0
    for call in calls:
        kind, tag = call["call"], call.get("tag")
        backup = call.get("enable_cpu_backup", False)
        size = call.get("allocated_bytes", 0) // 1024
        if kind == "configure_subprocess":
            with adapter.configure_subprocess():
                pass
        elif kind == "region":
            with adapter.region(tag, enable_cpu_backup=backup):
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda").fill_(5)
            (weights if tag == WEIGHTS else caches).append(tensor)
        elif kind == "cuda_graph":
            graph = torch.cuda.CUDAGraph()
            pool = pools[call["pool"]]
            with adapter.cuda_graph(
                cuda_graph=graph, pool=pool, stream=stream, tag=tag, enable_cpu_backup=backup
            ):
                outputs.append(weights[0].clone())
            graphs.append(graph)
        elif kind == "pause":
            adapter.pause(tag)
            paused.add(tag)
            if paused == set(ALL):
                assert mapped_bytes() == 0
        else:
            adapter.resume(tag)
            paused.remove(tag)
        if kind == "resume" and not paused:
            turns += 1
            weights[0].fill_(turns)
            for graph in graphs:
                graph.replay()
            torch.cuda.synchronize()
            read = [
                bytes(t.cpu().numpy_bytes() if hasattr(t, "numpy_bytes") else t.cpu().numpy())
                for t in outputs
            ]
            assert [set(part) for part in read] == [{turns}] * len(graphs)
    assert turns == 6


def test_a_release_twice_and_a_resume_twice_are_harmless() -> None:
    scheduler = Scheduler()
    expected = scheduler.answer(3)
    scheduler.resume()
    for _ in range(2):
        scheduler.release(CACHE)
    for _ in range(2):
        scheduler.release()
        assert mapped_bytes() == 0
    for _ in range(2):
        scheduler.resume(WEIGHTS)
        scheduler.resume(GRAPHS, WEIGHTS)
    for _ in range(2):
        scheduler.resume()
    for tag in ALL:
        scheduler.saver.resume(tag)
    # In one request.
    scheduler.release(WEIGHTS, WEIGHTS)
    scheduler.resume(WEIGHTS, WEIGHTS)
    assert scheduler.answer(3) == expected


def test_what_a_capture_left_is_kept_whether_it_is_asked_for_or_not() -> None:
    adapter = Adapter.create(enable=True)
    inputs = torch.empty(MIB, dtype=torch.uint8, device="cuda").fill_(6)
    graph = torch.cuda.CUDAGraph()
    # As 0.5.20 calls it.
    with adapter.cuda_graph(cuda_graph=graph, pool=None, stream=torch.cuda.Stream(), tag=GRAPHS):
        output = inputs.clone()
    graph.replay()
    torch.cuda.synchronize()
    adapter.pause(GRAPHS)
    assert mapped_bytes() == 0
    adapter.resume(GRAPHS)
    assert bool(torch.equal(output, inputs))


def test_weights_without_backup_are_written_again() -> None:
    scheduler = Scheduler(backs_up=False, captures=False)
    expected = scheduler.answer(3)
    scheduler.release()
    scheduler.resume()
    for number, weight in enumerate(scheduler.weights):
        weight.fill_(number + 1)
    assert scheduler.answer(3) == expected


def test_a_draft_may_keep_what_the_target_drops() -> None:
    target, draft = Scheduler(backs_up=False, captures=False), Scheduler(captures=False)
    expected = draft.answer(3)
    target.release()
    assert mapped_bytes() == 0
    target.resume()
    assert draft.answer(3) == expected


def test_disable_leaves_a_region() -> None:
    adapter = Adapter.create(enable=True)
    with adapter.region(WEIGHTS, enable_cpu_backup=True):
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda").fill_(1)
        with adapter.disable():
            outside = torch.empty(MIB, dtype=torch.uint8, device="cuda").fill_(2)
    adapter.pause(WEIGHTS)
    assert int(outside[:1].item()) == 2
    adapter.resume(WEIGHTS)
    assert int(kept[:1].item()) == 1


def test_a_pause_that_is_refused_leaves_everything_awake() -> None:
    scheduler = Scheduler(captures=False)
    expected = scheduler.answer(3)
    pools = torch_memory_saver._used()
    assert isinstance(pools, Pools)
    [arena] = pools._arenas.values()
    with arena.hold(WEIGHTS, "a network card"), pytest.raises(poorwill.PoorwillError, match="network"):
        scheduler.saver.pause(WEIGHTS)
    assert scheduler.answer(3) == expected


def test_an_error_is_answered_and_the_scheduler_goes_on() -> None:
    scheduler = Scheduler()
    expected = scheduler.answer(3)
    pools = torch_memory_saver._used()
    assert isinstance(pools, Pools)
    [arena] = pools._arenas.values()
    asked = fake_sglang.Communicator(scheduler.manager.release_memory_occupation)
    with arena.hold(WEIGHTS, "a network card"):
        with pytest.raises(OccupationError, match=r"a network card.*; everything is as it was$") as raised:
            asyncio.run(asked(fake_sglang.Release()))
        assert raised.value.status_code == 503
        assert not scheduler.manager.offload_tags
        # The caches were named before the weights.
        assert scheduler.answer(3) == expected
        # What does not ask by our hook would take it for done.
        with pytest.raises(OccupationError, match="a network card"):
            scheduler.release()
    asyncio.run(asked(fake_sglang.Release()))
    assert mapped_bytes() == 0
    scheduler.resume()
    assert scheduler.answer(3) == expected
