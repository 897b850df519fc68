"""vLLM's own schedulers, with their pools of blocks, over ranks whose model reads all of a request's keys.

A rank's model takes its next token from what it finds in the request's blocks. Bytes that a sleep has dropped
give other tokens, or an error.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from poorwill import PoorwillError

from .engines import Vllm, make_config, turn
from .loader import Stub
from .worker import Worker

BLOCK_TOKENS = 4
WINDOW = 6
UNSET = (
    *("extra_args", "structured_outputs", "prompt_logprobs", "num_logprobs"),
    *("skip_reading_prefix_cache", "repetition_detection", "eos_token_id"),
)
SCHEDULER = (
    *("vllm.v1.utils", "vllm.v1.kv_cache_interface", "vllm.v1.kv_cache_spec_registry", "vllm.v1.outputs"),
    *("vllm.v1.kv_cache_layout", "vllm.v1.metrics.stats", "vllm.utils.math_utils", "vllm.sampling_params"),
    *(f"vllm.v1.core.sched.{name}" for name in ("output", "utils", "request_queue")),
    *("vllm.v1.core.sched.scheduler", "vllm.v1.core.sched.async_scheduler"),
    *(f"vllm.v1.core.{name}" for name in ("block_pool", "kv_cache_utils", "kv_cache_metrics")),
    *(f"vllm.v1.core.{name}" for name in ("kv_cache_manager", "kv_cache_coordinator", "kv_cache_planning")),
    *("vllm.v1.core.single_type_kv_cache_manager", "vllm.v1.core.encoder_cache_manager"),
    *("vllm.v1.hisparse.block_pool", "vllm.v1.structured_output.request"),
)


class Lost(PoorwillError):
    """A request has read what is not its own: what a sleep has dropped, say."""


class Model:
    """A rank with a KV cache. Its slots have the token that was there, or None for what was dropped."""

    def __init__(self) -> None:
        self.slots: dict[int, list[int | None]] = {}
        self.requests: dict[str, tuple[list[int], list[list[int]]]] = {}
        """Tokens of each request, and its blocks in each group of layers."""
        self.computed = 0
        """Tokens that were computed so far."""

    def drop(self, kept: Sequence[Sequence[int]]) -> None:
        """What a sleep does to the blocks."""
        blocks = {first + number for first, count in kept for number in range(count)}
        self.slots = {
            block: slots if block in blocks else [None] * BLOCK_TOKENS for block, slots in self.slots.items()
        }

    def execute(self, batch: Any) -> dict[str, int | None]:
        """The next token of each request that is through with its prompt."""
        for finished in batch.finished_req_ids:
            self.requests.pop(finished, None)
        starts = {}
        for new in batch.scheduled_new_reqs:
            self.requests[new.req_id] = (list(new.prompt_token_ids), [list(each) for each in new.block_ids])
            starts[new.req_id] = new.num_computed_tokens
        cached = batch.scheduled_cached_reqs
        for number, name in enumerate(cached.req_ids):
            _, groups = self.requests[name]
            added = cached.new_block_ids[number]
            for group, blocks in enumerate(groups):
                if name in cached.resumed_req_ids:
                    blocks.clear()
                blocks += added[group] if added is not None else []
            starts[name] = cached.num_computed_tokens[number]
        return {
            name: self._compute(name, starts[name], count)
            for name, count in batch.num_scheduled_tokens.items()
        }

    def _compute(self, name: str, start: int, count: int) -> int | None:
        tokens, groups = self.requests[name]
        self.computed += count
        end = start + count
        for blocks in groups:
            for at in range(start, end):
                self._slots(blocks, at)[at % BLOCK_TOKENS] = tokens[at]
        full, *windows = groups
        read = self._read(name, full, range(end))
        for blocks in windows:
            self._read(name, blocks, range(max(end - WINDOW, 0), end))
        value = answer(read)
        if end < len(tokens):
            return None
        tokens.append(value)
        return value

    def _slots(self, blocks: list[int], at: int) -> list[int | None]:
        return self.slots.setdefault(blocks[at // BLOCK_TOKENS], [None] * BLOCK_TOKENS)

    def _read(self, name: str, blocks: list[int], positions: range) -> list[int]:
        read = []
        for at in positions:
            token = self._slots(blocks, at)[at % BLOCK_TOKENS]
            if token is None or token != self.requests[name][0][at]:
                raise Lost(f"{name} has read {token} at position {at}")
            read.append(token)
        return read


def answer(tokens: Sequence[int]) -> int:
    """The model's next token."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1009
    return value


def following(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that the model answers where nothing interrupts it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(answer(tokens))
    return tokens[len(prompt) :]


class Rank(Worker):
    """A worker with such a model. `most_blocks` is how many its host memory can keep."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.model = Model()
        self.most_blocks: int | None = None
        self.kept: list[Any] = []
        """What each sleep was to keep."""

    def poorwill_can_keep(self, kept: Any) -> None:
        super().poorwill_can_keep(kept)
        blocks = sum(count for _, count in kept)
        if self.most_blocks is not None and blocks > self.most_blocks:
            raise PoorwillError(f"a sleep keeps {blocks} blocks, and host memory has {self.most_blocks}")

    def sleep(self, level: int = 1, kept: Any = ()) -> None:
        super().sleep(level)
        self.kept.append([tuple(run) for run in kept])
        self.model.drop(kept)

    def execute_model(self, batch: Any) -> Any:
        super().execute_model(SimpleNamespace(ids=()))
        return self.model.execute(batch)


class Scheduled:
    """An engine's core with its scheduler, over such ranks."""

    def __init__(
        self,
        vllm: Vllm,
        kind: str = "EngineCoreProc",
        ranks: int = 1,
        blocks: int = 64,
        *,
        overlaps: bool = False,
        runs_ahead: bool = False,
        is_hybrid: bool = False,
    ) -> None:
        """`overlaps`: a batch is scheduled before the last one has been answered, as with pipelines.
        `runs_ahead`: also for requests whose token is not known yet, as with asynchronous scheduling.
        `is_hybrid`: some layers attend to a window alone, whose blocks are others.
        """
        self.vllm = vllm
        self.requests = vllm.loader.module("vllm.v1.request")
        self.requests.length_from_prompt_token_ids_or_embeds = lambda tokens, _: len(tokens)
        name = "async_scheduler" if runs_ahead else "scheduler"
        module = vllm.loader.module(f"vllm.v1.core.sched.{name}")
        self._of = module.AsyncScheduler if runs_ahead else module.Scheduler
        self.is_hybrid = is_hybrid
        self.utils = vllm.loader.module("vllm.v1.core.kv_cache_utils")
        self.utils.init_none_hash(_hashed)
        self.config = _config(ranks, blocks)
        self.config.scheduler_config.async_scheduling = runs_ahead
        self.config.max_concurrent_batches = 1 + (overlaps or runs_ahead)
        vllm.make_worker = Rank
        self.core = vllm.engine(kind, ranks, config=self.config)
        self.core.scheduler = self.scheduler = self._scheduler(blocks)
        self.answers: dict[str, list[int]] = {}
        """The tokens of each request so far."""
        self.ended: dict[str, str] = {}
        """Why each that has ended did."""
        self.is_process = kind != "EngineCore"
        self._wrap()
        self.core.async_scheduling = runs_ahead
        if overlaps or runs_ahead:
            self._overlap()

    @property
    def ranks(self) -> list[Rank]:
        ranks: list[Rank] = self.core.model_executor.workers
        return ranks

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def live(self) -> set[int]:
        return {block.block_id for block in self.pool.blocks if block.ref_cnt > 0 and not block.is_null}

    def cached(self) -> set[int]:
        """Blocks with a prefix that a request could find."""
        return {block.block_id for block in self.pool.blocks if block.block_hash is not None}

    def forgotten_first(self) -> list[int]:
        """The same that no request has, in the order in which they are taken."""
        free = self.pool.free_block_queue.get_all_free_blocks()
        return [block.block_id for block in free if block.block_hash is not None]

    def ask(self, name: str, prompt: Sequence[int], count: int) -> None:
        hasher = self.utils.get_request_block_hasher(BLOCK_TOKENS, _hashed)
        params: Any = Stub("sampling_params")
        params.max_tokens, params.min_tokens, params.stop_token_ids = count, 0, ()
        for unset in UNSET:
            setattr(params, unset, None)
        request = self.requests.Request(name, list(prompt), params, None, block_hasher=hasher)
        self.core.add_request(request)

    def step(self) -> None:
        """Once around the loop, if the engine has something to do."""
        if self.is_process:
            turn(self.core)
            queued = self.core.output_queue
            while not queued.empty():
                self._take(queued.get_nowait()[1])
            return
        outputs, _ = self.core.step_fn()
        for one in (outputs or {}).values():
            self._take(one)

    def run(self) -> None:
        """Until nothing is to be done."""
        while self.scheduler.has_requests() or self.core.batch_queue:
            self.step()

    def sleep(self, mode: str = "keep", level: int = 1, keep_tags: Sequence[str] = ()) -> None:
        slept = self.core.sleep(level, mode, keep_tags)
        while slept is not None and not slept.done():
            self.step()
        if slept is not None:
            slept.result()

    def _take(self, outputs: Any) -> None:
        for each in outputs.outputs:
            self.answers.setdefault(each.request_id, []).extend(each.new_token_ids)
            if each.finish_reason is not None:
                self.ended[each.request_id] = str(each.finish_reason)

    def _scheduler(self, blocks: int) -> Any:
        interface = self.vllm.loader.module("vllm.v1.kv_cache_interface")
        shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 8, "dtype": "bf16"}
        specs = {"layer": interface.FullAttentionSpec(**shape)}
        if self.is_hybrid:
            specs["window"] = interface.SlidingWindowSpec(**shape, sliding_window=WINDOW)
        groups = [interface.KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
        cache = interface.KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        structured: Any = Stub("structured_output_manager")
        structured.accept_tokens = lambda *_: True
        return self._of(self.config, cache, structured, BLOCK_TOKENS)

    def _wrap(self) -> None:
        """What travels to the ranks is plain, and their answers are vLLM's for its scheduler only."""
        executor, scheduler = self.core.model_executor, self.scheduler
        execute, update = executor.execute_model, scheduler.update_from_output
        output = self.vllm.loader.module("vllm.v1.outputs").ModelRunnerOutput

        def execute_model(batch: Any, non_block: bool = False) -> Any:
            return execute(_plain(batch), non_block=non_block)

        def update_from_output(batch: Any, tokens: dict[str, int | None]) -> Any:
            names = list(tokens)
            sampled = [[] if token is None else [token] for token in tokens.values()]
            numbers = {name: number for number, name in enumerate(names)}
            return update(batch, output(names, numbers, sampled))

        executor.execute_model, scheduler.update_from_output = execute_model, update_from_output

    def _overlap(self) -> None:
        core, executor = self.core, self.core.model_executor
        execute = executor.execute_model
        core.batch_queue_size, core.batch_queue = 2, deque(maxlen=2)
        core.is_pooling_model = core.is_mm_encoder_only = core.is_ec_producer = core.is_ec_consumer = False
        core.is_ec_consumer, core.step_fn = True, core.step_with_batch_queue
        last = Late(None)

        def execute_model(batch: Any, non_block: bool = False) -> Any:
            nonlocal last
            last = Late(execute(batch))
            return last

        executor.execute_model = execute_model
        executor.sample_tokens = lambda *_, **__: last


class Late(Future[Any]):
    """What a GPU is not through with until one waits for it."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._value)
        return super().result()


def _hashed(value: Any) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


def _plain(batch: Any) -> Any:
    def of(part: Any, *names: str) -> Any:
        return SimpleNamespace(**{name: getattr(part, name) for name in names})

    cached = ("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens")
    new = ("req_id", "prompt_token_ids", "block_ids", "num_computed_tokens")
    return SimpleNamespace(
        finished_req_ids=set(batch.finished_req_ids),
        scheduled_new_reqs=[of(each, *new) for each in batch.scheduled_new_reqs],
        scheduled_cached_reqs=of(batch.scheduled_cached_reqs, *cached),
        num_scheduled_tokens=dict(batch.num_scheduled_tokens),
    )


def _config(ranks: int, blocks: int) -> Any:
    config = make_config(ranks)
    config.kv_events_config = config.kv_transfer_config = config.ec_transfer_config = None
    config.lora_config = config.speculative_config = None
    config.num_speculative_tokens = config.num_lookahead_tokens = config.num_hash_lookahead_tokens = 0
    config.num_prefill_lookahead_tokens, config.max_concurrent_batches = 0, 1
    config.max_in_flight_tokens = 16
    config.ec_manager_config.get_encoder_cache_manager_obj = lambda: None
    parallel = config.parallel_config
    parallel.decode_context_parallel_size = parallel.prefill_context_parallel_size = 1
    parallel.pipeline_parallel_size = parallel.data_parallel_size = 1
    config.scheduler_config = SimpleNamespace(
        **vars(config.scheduler_config),
        max_num_seqs=4,
        max_num_active_seqs=None,
        max_num_scheduled_tokens=16,
        max_num_batched_tokens=16,
        long_prefill_token_threshold=0,
        long_prefill_token_threshold_adaptive=False,
        policy="fcfs",
        watermark=0.0,
        prefill_schedule_interval=1,
        scheduler_reserve_full_isl=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
    )
    config.cache_config = SimpleNamespace(
        num_gpu_blocks=blocks,
        enable_prefix_caching=True,
        enable_mamba_shared_prefix_checkpoint=False,
        mamba_cache_mode="none",
    )
    config.model_config = Stub("model_config")
    config.model_config.max_model_len = 4 * blocks
    return config
