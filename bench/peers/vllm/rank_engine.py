"""An engine over several GPUs of a host, in each of vLLM's layouts: starting it, and what it has to be like.

Tensor and pipeline parallel ranks are one engine, which `vllm.LLM` starts. Data parallel ranks are several
engines behind one `AsyncLLM`, which sleeps and wakes all of them.
"""

import argparse
import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path

import rank_worker
from common import GIB, Ballast, descendants, emit, gib, kill_all, parents
from models import write_model
from reload import attempt, refusal

GIVEN_BACK = 0.9  # of weights and KV cache, the share that a sleep has to give back on every GPU
REFUSED_BYTES = 1  # of host memory, where a rank is to refuse
UNDO_AFTER_S = 3  # how long a rank that is ready waits for the others
DIFFERENT = 5  # tensors that are named, at most

# In the place of whatever is set: a function is passed to the workers, and the GPUs share nothing but NCCL.
SURROUNDINGS = {
    "NCCL_NVLS_ENABLE": "0",
    "POORWILL_RANKS_TIMEOUT": str(UNDO_AFTER_S),
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


class Cards:
    """The GPUs, each seen by a process that does not sleep."""

    def __init__(self, count: int):
        with contextlib.ExitStack() as opened:
            self.each = [opened.enter_context(Ballast(ordinal=ordinal)) for ordinal in range(count)]
            self._opened = opened.pop_all()

    def free(self) -> list[int]:
        return [card.free() for card in self.each]

    def total(self) -> list[int]:
        return [card.total() for card in self.each]

    def used(self) -> list[int]:
        return [total - free for total, free in zip(self.total(), self.free(), strict=True)]

    def settled(self, aims: list[int]) -> list[int]:
        """What is free once that is as much as is meant, or when that takes too long."""
        return [card.settled(aim) for card, aim in zip(self.each, aims, strict=True)]

    def __enter__(self) -> "Cards":
        return self

    def __exit__(self, *ended) -> None:
        self._opened.close()


def all_gib(sizes: list[int]) -> list[float | None]:
    return [gib(size) for size in sizes]


class Limit:
    """Ends the engine, and then this process, where a step takes longer than it may; a line says so."""

    def __init__(self, step: str, seconds: float):
        self._timer = threading.Timer(seconds, self._end, [step, seconds])
        self._timer.daemon = True

    def _end(self, step: str, seconds: float) -> None:
        emit("hung", step=step, limit_s=seconds, ok=False)
        kill_all(descendants(os.getpid(), parents()))
        os._exit(1)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *ended) -> None:
        self._timer.cancel()


class Together:
    """A `vllm.LLM`: one engine, whose ranks hold parts of one model."""

    def __init__(self, chosen: dict):
        from vllm import LLM

        self.llm = LLM(**chosen)

    def collective_rpc(self, method, args: tuple = ()) -> list:
        return self.llm.collective_rpc(method, args=args)

    def sleep(self, level: int) -> None:
        self.llm.sleep(level=level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.llm.wake_up(tags=tags)

    def tokens(self) -> list[list[int]]:
        from engine import generated

        return generated(self.llm)

    def shutdown(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class Apart:
    """An `AsyncLLM` over data parallel engines, each with a model of its own, called as if it were one."""

    def __init__(self, chosen: dict):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._requests = 0
        # In the loop, where its tasks belong.
        self._llm = self._do(self._made(chosen))
        self._client = self._llm.engine_core

    def _do(self, what):
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    @staticmethod
    async def _made(chosen: dict):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**chosen))

    def collective_rpc(self, method, args: tuple = ()) -> list:
        """What each rank of every engine returns; vLLM's own call has the first engine's answers alone."""

        async def answers() -> list:
            asked = ("collective_rpc", method, None, tuple(args), None)
            engines = self._client.core_engines
            calls = [self._client._call_utility_async(*asked, engine=engine) for engine in engines]
            answered = [answer for of_engine in await asyncio.gather(*calls) for answer in of_engine]
            if method == "poorwill_mark_restored":
                # The frontend looks again, and has all engines go on together.
                await self._llm.check_health()
            return answered

        return self._do(answers())

    def sleep(self, level: int) -> None:
        self._do(self._llm.sleep(level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._do(self._llm.wake_up(tags))

    def tokens(self) -> list[list[int]]:
        """The prompts' tokens of the first engine, then of the next."""
        from engine import NEW_TOKENS, PROMPTS
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)

        async def of_one(engine: int, prompt: list[int]) -> list[int]:
            self._requests += 1
            asked = {"prompt_token_ids": prompt}, params, f"bench-{self._requests}"
            made: list[int] = []
            async for output in self._llm.generate(*asked, data_parallel_rank=engine):
                made = list(output.outputs[0].token_ids)
            return made

        async def of_all() -> list[list[int]]:
            engines = range(len(self._client.core_engines))
            return [await of_one(engine, prompt) for engine in engines for prompt in PROMPTS]

        return self._do(of_all())

    def shutdown(self) -> None:
        async def down() -> None:
            self._llm.shutdown()

        self._do(down())


def start(options: argparse.Namespace, folder: Path):
    """Starts vLLM; emits a line."""
    import engine as engines

    chosen = engines.settings(
        write_model(folder, options.kind, options.layers),
        mode=options.mode,
        kv_gib=options.kv_gib,
        utilization=0.5,
        graphs="compile" if options.graphs else "",
        offload_graphs=options.graphs,
    )
    chosen |= {
        "tensor_parallel_size": options.tp,
        "pipeline_parallel_size": options.pp,
        "distributed_executor_backend": "mp",
        "disable_custom_all_reduce": True,
    }
    if options.suspend_nccl:
        chosen["enable_nccl_comm_suspend"] = True
    begin = time.perf_counter()
    import vllm

    imported = time.perf_counter()
    if options.dp > 1:
        llm = Apart({**chosen, "data_parallel_size": options.dp})
    else:
        llm = Together(chosen)
    emit(
        "start",
        vllm=vllm.__version__,
        import_s=round(imported - begin, 2),
        start_s=round(time.perf_counter() - imported, 2),
    )
    return llm


class Ranks:
    """An engine over several GPUs, and what it has to be like when it is awake."""

    def __init__(self, llm, mode: str, cards, kv_bytes: int):
        self.llm, self.mode, self.cards = llm, mode, cards
        self.about: list[dict] = self.each(rank_worker.begin, mode)
        self.covered_bytes = [rank["weight_bytes"] + kv_bytes for rank in self.about]
        self.prints: list[dict[str, str]] = []
        self.reference: list[list[int]] = []
        self.used_by_state: dict[str, list[int]] = {}

    @property
    def is_ours(self) -> bool:
        return self.mode == "poorwill"

    def each(self, function, *arguments) -> list:
        """Calls a function in the process of every rank; what each returns, by rank."""
        return self.llm.collective_rpc(function, args=arguments)

    def tokens(self) -> list[list[int]]:
        return self.llm.tokens()

    def overwrite(self, seed: int) -> None:
        """Gives the engine other weights, which it has to have from now on."""
        emit("overwritten", ranks=self.each(rank_worker.fill, seed))
        self.each(rank_worker.keep_copy)
        self.prints, self.reference = self.each(rank_worker.digests), self.tokens()

    def status(self) -> list[dict]:
        """What poorwill says of every rank; the events are left out."""
        if not self.is_ours:
            return []
        statuses = self.llm.collective_rpc("poorwill_status")
        return [{name: value for name, value in one.items() if name != "events"} for one in statuses]

    def reported(self) -> list[list[dict]]:
        """Reports of the operations since the last call, by rank."""
        self.status()
        return self.each(rank_worker.reported)

    def timed(self, action, **named) -> float:
        """Seconds until all GPUs are done with it."""
        self.each(rank_worker.synchronize)
        start = time.perf_counter()
        action(**named)
        self.each(rank_worker.synchronize)
        return time.perf_counter() - start

    def sleep(self, level: int) -> dict:
        """Sleeps, and says what came of it on every GPU."""
        self.reported()
        awake = self.cards.used()
        seconds = self.timed(self.llm.sleep, level=level)
        asleep = self.cards.used()
        freed = [before - after for before, after in zip(awake, asleep, strict=True)]
        record = {
            "level": level,
            "sleep_s": round(seconds, 4),
            "used_awake_gib": all_gib(awake),
            "used_asleep_gib": all_gib(asleep),
            "freed_gib": all_gib(freed),
            "gave_back": all(
                size >= GIVEN_BACK * covered for size, covered in zip(freed, self.covered_bytes, strict=True)
            ),
            "host": self.each(rank_worker.host),
        }
        if self.is_ours:
            record["host_held_gib"] = all_gib([rank["host_bytes"] for rank in self.status()])
            record["sleep_reported"] = self.reported()
        return record

    def wake(self, tags: list[str] | None = None) -> dict:
        seconds = self.timed(self.llm.wake_up, tags=tags)
        name = "_".join(["wake", *(tags or [])])
        figures = {f"{name}_s": round(seconds, 4), f"used_after_{name}_gib": all_gib(self.cards.used())}
        if self.is_ours:
            figures[f"{name}_reported"] = self.reported()
        return figures

    def checks(self) -> dict:
        """Whether bytes and tokens are those that they have to be, and which tensors are not."""
        now = self.each(rank_worker.digests)
        equal = [before == after for before, after in zip(self.prints, now, strict=True)]
        record: dict = {"bytes_equal": equal, "tokens_equal": self.tokens() == self.reference}
        if not all(equal):
            record["different"] = [
                [name for name in before if before[name] != after.get(name)][:DIFFERENT]
                for before, after in zip(self.prints, now, strict=True)
            ]
        return record

    def cycle(self) -> dict:
        return {**self.sleep(1), **self.wake(), **self.checks()}

    def by_tag(self, tags: list[str]) -> dict:
        record = {"tags": tags, **self.sleep(1)}
        for tag in tags:
            record |= self.wake([tag])
        return {**record, **self.checks()}

    def restore(self) -> list:
        """Writes the weights that a level 2 sleep has dropped; the tags that poorwill waited for."""
        self.each(rank_worker.write_back)
        return self.llm.collective_rpc("poorwill_mark_restored") if self.is_ours else []

    def dropped(self) -> dict:
        """Level 2, and the weights written back by us; with poorwill the engine refuses until they are."""
        record = {**self.sleep(2), **self.wake()}
        if self.is_ours:
            record["undefined"] = [rank["undefined"] for rank in self.status()]
            record["before"] = refusal(self, self.reference)
        restored = self.restore()
        if self.is_ours:
            record["restored"] = restored
            weights = [["weights"]] * len(self.about)
            record["as_meant"] = (
                record["undefined"] == weights
                and record["restored"] == weights
                and record["before"]["refused"]
                and record["before"]["poorwill_error"]
            )
        return {**record, **self.checks()}

    def refused(self) -> dict:
        """A sleep that the last rank refuses, because it may not hold the host memory that it would take.

        All ranks have to be awake then. The error has to name the setting, and the rank or its engine."""
        last = len(self.about) - 1
        limits = self.each(rank_worker.bound_host_memory, last, REFUSED_BYTES)
        try:
            seen = attempt(lambda: self.llm.sleep(level=1))
        finally:
            self.each(rank_worker.bound_host_memory, last, limits[last])
        record = {"rank": last, **seen, "used_gib": all_gib(self.cards.used())}
        if not seen["refused"]:
            self.llm.wake_up()
            return {**record, "as_meant": False}
        record["sleeping"] = [rank["sleeping"] for rank in self.status()]
        record["as_meant"] = (
            seen["poorwill_error"]
            and "POORWILL_HOST_BUDGET" in seen["error"]
            and any(f"{of} {last}" in seen["error"] for of in ("rank", "engine"))
            and not any(record["sleeping"])
        )
        return {**record, **self.checks()}


def opened(options: argparse.Namespace, folder: Path, cards) -> Ranks:
    """An engine that has started, with weights of its own."""
    with Limit("start", options.start_limit_s):
        llm = start(options, folder)
        try:
            ranks = Ranks(llm, options.mode, cards, int(options.kv_gib * GIB))
            ranks.overwrite(options.seed)
        except BaseException:
            llm.shutdown()
            raise
    return ranks
