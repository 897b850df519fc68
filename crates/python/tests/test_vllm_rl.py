"""The calls of trainers for reinforcement learning, in order: verl 0.9, TRL 1.16 and OpenRLHF 0.11.

Their own code builds engines, puts them to sleep, wakes, writes and queries them.

Each flow lists its framework's calls in one step of training, against the engine of each client that it uses.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_vllm.clients import EngineProcesses, asynchronous, in_process
from fake_vllm.engines import PARAMS
from fake_vllm.worker import WEIGHTS
from poorwill.vllm._engine import NotReadyError
from vllm_sources import needs_sources
from vllm_sources.versions import PINNED, trained

pytest_plugins = ["vllm_cores"]
pytestmark = [
    needs_sources,
    # What trainers pin runs after each quick run, other minors in a whole run only.
    pytest.mark.parametrize(
        "vllm",
        [
            pytest.param(version, marks=pytest.mark.other_versions) if version in PINNED else version
            for version in trained()
        ],
        indirect=True,
        scope="module",
    ),
]

STEPS = 10


class Colocated:
    """`LLM` in the trainer's process: TRL."""

    def __init__(self, vllm: Any) -> None:
        self.engine = in_process(vllm, vllm.engine("EngineCore", count=1))
        self.count = 0

    @property
    def worker(self) -> Any:
        """What TRL reaches through `llm_engine.model_executor.driver_worker`."""
        return self.engine.engine_core.engine_core.model_executor.workers[0]

    def generate(self) -> list[str]:
        self.count += 1
        self.engine.add_request(f"asked {self.count}", 1, PARAMS)
        return [token for output in self.engine.step() for token in output.new_token_ids]


class Server:
    """`AsyncLLM` in an actor, over workers of its own: verl, OpenRLHF."""

    def __init__(self, vllm: Any) -> None:
        self.engine = asynchronous(vllm, EngineProcesses(vllm.engine(count=1)))
        self.count = 0

    async def generate(self) -> list[str]:
        self.count += 1
        outputs = self.engine.generate(1, PARAMS, f"asked {self.count}")
        return [token async for output in outputs for token in output.new_token_ids]


def trl(vllm: Any, level: int, left_out: int = 0) -> None:
    llm = Colocated(vllm)
    llm.engine.sleep(level)
    for _ in range(STEPS):
        llm.engine.wake_up(["weights"])
        # `model.load_weights([(name, param)])`, one by one and by no call of the engine's.
        for name in WEIGHTS[left_out:]:
            llm.worker.load_weights([name])
        llm.engine.wake_up(["kv_cache"])
        assert llm.generate() == ["token"]
        llm.engine.sleep(level)


async def verl(vllm: Any, level: int, left_out: int = 0) -> None:
    server = Server(vllm)
    await server.engine.sleep(level)
    for _ in range(STEPS):
        await server.engine.wake_up(["weights"])
        # `update_weights_from_ipc` of an extension of the worker, bucket by bucket.
        for bucket in (WEIGHTS[left_out:2], WEIGHTS[2:]):
            await server.engine.collective_rpc("extension", args=(bucket,))
        await server.engine.wake_up(["kv_cache"])
        assert await server.generate() == ["token"]
        await server.engine.sleep(level)


async def openrlhf(vllm: Any, level: int, left_out: int = 0) -> None:
    server = Server(vllm)
    await server.engine.sleep(level)
    for _ in range(STEPS):
        await server.engine.wake_up(["weights"])
        for name in WEIGHTS[left_out:]:
            await server.engine.collective_rpc("extension", args=((name,),))
        await server.engine.wake_up(["kv_cache"])
        assert await server.generate() == ["token"]
        await server.engine.sleep(level)


Flow = Callable[..., Awaitable[None] | None]
flows = pytest.mark.parametrize("flow", [trl, verl, openrlhf])


def run(flow: Flow, *args: Any) -> None:
    going = functools.partial(flow, *args)()
    if going is not None:
        asyncio.run(_awaited(going))


async def _awaited(going: Awaitable[None]) -> None:
    await going


@flows
@pytest.mark.parametrize("level", [1, 2])
def test_nothing_of_ours_has_to_be_called(vllm: Any, flow: Flow, level: int) -> None:
    run(flow, vllm, level)


def test_weights_that_are_written_last_count_as_well(vllm: Any) -> None:
    """By the model itself, when everything is awake; so only the next request finds out."""
    llm = Colocated(vllm)
    for level in (2, 1, 2):
        llm.engine.sleep(level)
        llm.engine.wake_up()
        if level == 2:
            with pytest.raises(NotReadyError, match="3 of 3 tensors"):
                llm.generate()
            llm.worker.load_weights(WEIGHTS)
        assert llm.generate() == ["token"]


@flows
def test_a_weight_that_was_left_out_is_named(vllm: Any, flow: Flow) -> None:
    missing = rf"1 of {len(WEIGHTS)} tensors and 10 of 30 bytes are missing: {WEIGHTS[0]}\)"
    with pytest.raises(NotReadyError, match=missing):
        run(flow, vllm, 2, 1)
    # Whose weights were kept misses nothing.
    run(flow, vllm, 1, 1)
