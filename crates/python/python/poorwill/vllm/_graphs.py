"""CUDA graphs' part of an engine's share of a GPU.

Graphs are captured after the KV cache is allocated, so its size must leave space for them. vLLM profiles
graphs before and subtracts its estimate, with three exceptions: VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0,
--kv-cache-memory-bytes, and its second model runner before 0.29.

A profile that cannot fit is refused before it begins, and running out of memory over graphs is a BudgetError
with figures. Under the user's cap, an engine that exceeds it while profiling is refused at the next graph.
Every version then subtracts graphs from the KV cache, and captured graphs that exceed the cap end the start.
Without a cap that is only logged.
"""

import contextlib
import functools
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from poorwill._native import BudgetError
from poorwill.vllm import _environment, _generations, _starts
from poorwill.vllm._budget import Envelope, gib
from poorwill.vllm._wrapped import wrapped

gpu_worker: Any = importlib.import_module("vllm.v1.worker.gpu_worker")
_envs: Any = importlib.import_module("vllm.envs")
_memory: Any = importlib.import_module("vllm.utils.mem_utils")
torch: Any = importlib.import_module("torch")
logger: Any = importlib.import_module("vllm.logger").init_logger("vllm.poorwill")

MIB = 1 << 20
GRANULE_BYTES = 2 * MIB
"""Granularity of mapped GPU memory."""

GRAPH_BYTES = MIB
"""Least memory of a graph, as vLLM estimates it."""

_PROFILED = 2
"""Graphs of each kind that are captured for an estimate."""

_FEWER = "capture fewer sizes (cudagraph_capture_sizes in --compilation-config), or give --enforce-eager"
_PROFILE_LESS = (
    f"raise {_environment.BUDGET} or --gpu-memory-utilization, whichever is in use, lower "
    "max_cudagraph_capture_size in --compilation-config, or give --enforce-eager"
)


class Graphs:
    """The graphs of one worker, from profiling to the end of its start."""

    def __init__(self, worker: Any, envelope: Envelope) -> None:
        # It refers to us, and ends with its last other reference.
        self._worker: Any = weakref.proxy(worker)
        self._envelope = envelope
        self.pass_bytes = 0
        """Temporary memory of one pass of the model."""
        self._resident_bytes: int | None = None
        """Memory in use with the weights loaded and after a pass, before graphs."""
        self._cache_bytes = 0
        # Whether the KV cache was sized with everything else counted.
        self._is_reckoned_with = False
        self._before_bytes = 0
        self.graphs_bytes = 0
        """Memory of the captured graphs."""
        self._warned: set[str] = set()

    @property
    def least_bytes(self) -> int:
        """Least memory of all graphs."""
        return self._count * GRAPH_BYTES

    @contextlib.contextmanager
    def profiled(self) -> Iterator[None]:
        """While vLLM measures how much memory is left for a KV cache."""
        runner = self._worker.model_runner
        with (
            wrapped(runner, "profile_run", self._measured),
            wrapped(runner, "profile_cudagraph_memory", self._bounded),
            self._without_plans(),
        ):
            yield

    def left_for_cache(self, available_bytes: int) -> int:
        """How much of vLLM's KV cache memory is left beside graphs. Raises BudgetError if none is."""
        worker, envelope = self._worker, self._envelope
        if not worker.cache_config.kv_cache_memory_bytes:
            # A class over vLLM's may have a profile of its own, which makes none.
            estimate = int(getattr(worker, "cudagraph_memory_estimate", 0))
            reserved = estimate if _envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS else 0
            if envelope.cap is not None:
                self._is_reckoned_with = estimate > 0 or not self._count
                reserved = estimate or self._estimated_bytes()
                # vLLM may have reserved some of it, and reports the whole later.
                whole = int(worker.available_kv_cache_memory_bytes)
                worker.available_kv_cache_memory_bytes = min(whole, self._left_by_the_cap(reserved))
                available_bytes -= whole - worker.available_kv_cache_memory_bytes
            envelope.refuse_without_cache(available_bytes, self.pass_bytes, reserved)
        self._cache_bytes = available_bytes
        return available_bytes

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """While vLLM warms up and captures. Raises BudgetError at the end if the cap is exceeded."""
        with wrapped(self._worker.model_runner, "capture_model", self._held), self._without_plans():
            yield
        envelope = self._envelope
        if envelope.is_bounding and self._used_bytes() > envelope.requested_bytes:
            # Only if needed: vLLM keeps some of PyTorch's cache on purpose.
            torch.cuda.empty_cache()
            self._hold(self._used_bytes())

    # Parts

    @property
    def _count(self) -> int:
        """Least number of graphs."""
        configured = self._worker.vllm_config
        compilation = configured.compilation_config
        if (
            configured.model_config.enforce_eager
            or compilation.cudagraph_mode == gpu_worker.CUDAGraphMode.NONE
        ):
            return 0
        return len(compilation.cudagraph_capture_sizes or ())

    def _left_by_the_cap(self, graphs_bytes: int) -> int:
        """How much of the cap is left for the KV cache, by the memory in use.

        vLLM before 0.27 counts the weights' tensors instead of their memory.
        """
        if self._resident_bytes is None:
            torch.cuda.empty_cache()
            self._resident_bytes = self._used_bytes()
        besides = self._resident_bytes + self.pass_bytes + graphs_bytes + self._rounding_bytes
        return self._envelope.requested_bytes - besides

    @property
    def _rounding_bytes(self) -> int:
        """Most bytes that rounding adds to the KV cache, one granule for each layer."""
        return GRANULE_BYTES * len(self._worker.model_runner.get_kv_cache_spec())

    def _estimated_bytes(self) -> int:
        """An estimate of graphs' memory where vLLM makes none.

        It is the least memory of each, and in their pool the activations of the largest, in proportion to
        its tokens.
        """
        if not self._count:
            return 0
        largest = int(self._worker.vllm_config.compilation_config.max_cudagraph_capture_size or 0)
        tokens = int(self._worker.vllm_config.scheduler_config.max_num_batched_tokens)
        return self.least_bytes + self.pass_bytes * min(largest, tokens) // tokens

    def _measured(self, run: Callable[..., Any]) -> Callable[..., Any]:
        device = self._worker.device

        def profile_run(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.reset_peak_memory_stats(device)
            result = run(*args, **kwargs)
            stats = torch.cuda.memory_stats(device)
            peak, left = (stats.get(f"allocated_bytes.all.{name}", 0) for name in ("peak", "current"))
            self.pass_bytes = int(peak - left)
            return result

        return profile_run

    def _bounded(self, profile: Callable[..., Any]) -> Callable[..., Any]:
        runner, envelope = self._worker.model_runner, self._envelope

        def profile_cudagraph_memory(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.empty_cache()
            before = self._snapshot()
            self._resident_bytes = envelope.used_bytes(before)
            needed = profile_cache_bytes(runner) + min(self._count, _PROFILED) * GRAPH_BYTES
            envelope.refuse_what_cannot_fit("profiling CUDA graphs", needed, before, _PROFILE_LESS)
            watched = self._watched("profiling", self._refuse_profile, _PROFILE_LESS)
            with _starts.measured(), watched:
                return profile(*args, **kwargs)

        return profile_cudagraph_memory

    def _held(self, capture: Callable[..., Any]) -> Callable[..., Any]:
        def capture_model(*args: Any, **kwargs: Any) -> Any:
            if not self._envelope.is_bounding:
                with _starts.measured():
                    return capture(*args, **kwargs)
            torch.cuda.empty_cache()
            self._before_bytes = self._used_bytes()
            watched = self._watched("capturing", self._refuse_captured, self._next_step(0))
            with _starts.measured(), watched:
                done = capture(*args, **kwargs)
            torch.cuda.empty_cache()
            used = self._used_bytes()
            self.graphs_bytes = max(0, used - self._before_bytes)
            self._hold(used, self.pass_bytes)
            return done

        return capture_model

    @contextlib.contextmanager
    def _watched(self, doing: str, refuse: Callable[[int], None], hint: str) -> Iterator[None]:
        """Checks the memory in use at the start of each graph, and calls `refuse` beyond the engine's share.

        Turns out-of-memory errors into a BudgetError.
        """
        envelope = self._envelope
        if not envelope.is_bounding:
            yield
            return
        capture, device = torch.cuda.graph, self._worker.device
        enter = capture.__enter__

        @functools.wraps(enter)
        def entered(graph: Any) -> Any:
            # There may be thousands of graphs, so the rest is measured only beyond this.
            free, _ = torch.cuda.mem_get_info(device)
            if envelope.free_at_start_bytes - free > envelope.requested_bytes:
                torch.cuda.empty_cache()
                used = self._used_bytes()
                if used > envelope.requested_bytes:
                    refuse(used)
            return enter(graph)

        capture.__enter__ = entered
        try:
            yield
        except Exception as error:
            if isinstance(error, BudgetError) or not _is_out_of_memory(error):
                raise
            raise envelope.ran_out(f"{doing} CUDA graphs", self._snapshot(), hint, error) from error
        finally:
            capture.__enter__ = enter

    def _refuse_profile(self, used_bytes: int) -> None:
        envelope = self._envelope
        said = (
            f"profiling CUDA graphs takes the engine to {gib(used_bytes)} of {envelope.device}, and it may "
            f"use {gib(envelope.requested_bytes)}: {_PROFILE_LESS}"
        )
        if envelope.cap is not None:
            raise BudgetError(said)
        # Temporary, as with vLLM: the KV cache that it sizes afterwards is smaller by as much.
        self._warn("profile", said)

    def _refuse_captured(self, used_bytes: int) -> None:
        self.graphs_bytes = max(0, used_bytes - self._before_bytes)
        if self._envelope.cap is not None:
            self._hold(used_bytes)

    def _hold(self, used_bytes: int, pass_bytes: int = 0) -> None:
        """Checks the memory in use, plus that of a pass, against the engine's share."""
        envelope = self._envelope
        excess = used_bytes + pass_bytes - envelope.requested_bytes
        if excess <= 0:
            return
        is_exceeded = used_bytes > envelope.requested_bytes
        if envelope.cap is None and not is_exceeded:
            # vLLM's own estimate of a pass is its own matter.
            return
        beside = f", and a pass of the model takes {gib(pass_bytes)} for a while" if pass_bytes else ""
        said = (
            f"{envelope.allowance()}, and with {gib(self.graphs_bytes)} of CUDA graphs {gib(used_bytes)} "
            f"are in use{beside}, which is {-(-excess // MIB)} MiB too much: {self._next_step(excess)}"
        )
        if envelope.cap is not None and (is_exceeded or not self._is_reckoned_with):
            raise BudgetError(said)
        self._warn("capture", said)

    def _warn(self, of: str, said: str) -> None:
        """Once of each."""
        if of not in self._warned:
            self._warned.add(of)
            logger.warning("%s", said)

    def _next_step(self, excess_bytes: int) -> str:
        """What to do about an excess. The size of a fitting cache is given as bytes to copy."""
        fitting = max(0, self._cache_bytes - excess_bytes - self._rounding_bytes) // MIB * MIB
        steps = [_FEWER]
        if fitting and excess_bytes:
            steps.insert(0, f"give --kv-cache-memory-bytes {fitting}")
        if self._envelope.cap is not None and self._worker.cache_config.kv_cache_memory_bytes:
            # With a larger share, a cache that takes the rest would only grow.
            steps.insert(0, f"raise {_environment.BUDGET}")
        return ", ".join(steps)

    @contextlib.contextmanager
    def _without_plans(self) -> Iterator[None]:
        """Under a cap, stops vLLM (0.26 and later) from reusing or storing the cache size of a start.

        It does not know of the cap.
        """
        names = ("maybe_apply_startup_plan", "maybe_save_startup_plan")
        with contextlib.ExitStack() as stack:
            if self._envelope.cap is not None:
                for name in names:
                    stack.enter_context(wrapped(gpu_worker, name, lambda _: _nothing))
            yield

    def _snapshot(self) -> Any:
        return _memory.MemorySnapshot(device=self._worker.device)

    def _used_bytes(self) -> int:
        return self._envelope.used_bytes(self._snapshot())


def profile_cache_bytes(runner: Any) -> int:
    """Least KV cache that vLLM profiles CUDA graphs with, in bytes."""
    # None, or 0, where only other graphs than the model's are captured.
    largest = int(runner.compilation_config.max_cudagraph_capture_size or 1)
    if _generations.chosen().bounds_profile_by_requests:
        largest = min(runner.max_num_reqs, largest)
    by_kind: dict[type, int] = {}
    for spec in runner.get_kv_cache_spec().values():
        by_kind[type(spec)] = by_kind.get(type(spec), 0) + int(spec.page_size_bytes)
    # Layers of different kinds share memory, as many of each as of the rarest.
    return largest * min(by_kind.values(), default=0)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out: ending a failed capture raises its own error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a step that must not run."""
