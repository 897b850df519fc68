"""What CUDA graphs take of an engine's share of a GPU.

They are captured when the KV cache is there already, so their memory has to be left out of it. vLLM profiles
it before, and takes its estimate out unless VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0; it does not with
--kv-cache-memory-bytes, nor with its second model runner before 0.29.

Promised is that a profile which cannot fit is refused before it begins, and that running out of memory over
graphs is a BudgetError with figures. Under the user's cap an engine that grows beyond it while it profiles is
refused at the next graph, graphs come out of the KV cache in every version, and what they took is held
against the cap: what exceeds it ends the start. Without a cap that is a line in the log.
"""

import contextlib
import functools
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from poorwill._native import BudgetError
from poorwill.vllm import _environment, _generations
from poorwill.vllm._budget import Envelope, gib
from poorwill.vllm._wrapped import wrapped

gpu_worker: Any = importlib.import_module("vllm.v1.worker.gpu_worker")
_envs: Any = importlib.import_module("vllm.envs")
_memory: Any = importlib.import_module("vllm.utils.mem_utils")
torch: Any = importlib.import_module("torch")
logger: Any = importlib.import_module("vllm.logger").init_logger("vllm.poorwill")

MIB = 1 << 20
GRANULE_BYTES = 2 * MIB
"""What memory of a GPU is mapped in."""

GRAPH_BYTES = MIB
"""What a graph takes at least, as vLLM reckons in its estimates."""

_PROFILED = 2
"""How many graphs of a kind are captured for an estimate."""

_FEWER = "capture fewer sizes (cudagraph_capture_sizes in --compilation-config), or give --enforce-eager"
_PROFILE_LESS = (
    f"raise {_environment.BUDGET} or --gpu-memory-utilization, whichever is in use, lower "
    "max_cudagraph_capture_size in --compilation-config, or give --enforce-eager"
)


class Graphs:
    """The graphs of one worker, from their profile to the end of its start."""

    def __init__(self, worker: Any, envelope: Envelope) -> None:
        # It has us, and ends when nobody else has it.
        self._worker: Any = weakref.proxy(worker)
        self._envelope = envelope
        self.pass_bytes = 0
        """What a pass of the model takes for a while."""
        self._resident_bytes: int | None = None
        """What is in use with the weights loaded and after a pass, before there are graphs."""
        self._cache_bytes = 0
        # Whether the KV cache was sized with all that the engine takes besides.
        self._is_reckoned_with = False
        self._before_bytes = 0
        self.graphs_bytes = 0
        """What graphs have taken, once they are captured."""
        self._warned: set[str] = set()

    @property
    def least_bytes(self) -> int:
        """What all graphs take at least."""
        return self._count * GRAPH_BYTES

    @contextlib.contextmanager
    def profiled(self) -> Iterator[None]:
        """While vLLM finds out how much memory there is for a KV cache."""
        runner = self._worker.model_runner
        with (
            wrapped(runner, "profile_run", self._measured),
            wrapped(runner, "profile_cudagraph_memory", self._bounded),
            self._without_plans(),
        ):
            yield

    def left_for_cache(self, available_bytes: int) -> int:
        """What of the memory that vLLM has for the KV cache is left beside graphs. Raises BudgetError if none
        is.
        """
        worker, envelope = self._worker, self._envelope
        if not worker.cache_config.kv_cache_memory_bytes:
            estimate = int(worker.cudagraph_memory_estimate)
            reserved = estimate if _envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS else 0
            if envelope.cap is not None:
                self._is_reckoned_with = estimate > 0 or not self._count
                reserved = estimate or self._estimated_bytes()
                # vLLM may have set some of it aside, and tells the whole of it later.
                whole = int(worker.available_kv_cache_memory_bytes)
                worker.available_kv_cache_memory_bytes = min(whole, self._left_by_the_cap(reserved))
                available_bytes -= whole - worker.available_kv_cache_memory_bytes
            envelope.refuse_without_cache(available_bytes, self.pass_bytes, reserved)
        self._cache_bytes = available_bytes
        return available_bytes

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """While vLLM warms up and captures. Raises BudgetError in the end if the user's cap is exceeded."""
        with wrapped(self._worker.model_runner, "capture_model", self._held), self._without_plans():
            yield
        envelope = self._envelope
        if envelope.is_bounding and self._used_bytes() > envelope.requested_bytes:
            # Not before there is need to: vLLM has PyTorch keep some memory on purpose.
            torch.cuda.empty_cache()
            self._hold(self._used_bytes())

    # Parts

    @property
    def _count(self) -> int:
        """How many graphs there will be, at least."""
        configured = self._worker.vllm_config
        compilation = configured.compilation_config
        if (
            configured.model_config.enforce_eager
            or compilation.cudagraph_mode == gpu_worker.CUDAGraphMode.NONE
        ):
            return 0
        return len(compilation.cudagraph_capture_sizes or ())

    def _left_by_the_cap(self, graphs_bytes: int) -> int:
        """What of the cap is left for the KV cache, by what is in use: vLLM before 0.27 counts the weights'
        tensors and not their memory.
        """
        if self._resident_bytes is None:
            torch.cuda.empty_cache()
            self._resident_bytes = self._used_bytes()
        besides = self._resident_bytes + self.pass_bytes + graphs_bytes + self._rounding_bytes
        return self._envelope.requested_bytes - besides

    @property
    def _rounding_bytes(self) -> int:
        """What the parts of the KV cache may take more than they have, one for each layer."""
        return GRANULE_BYTES * len(self._worker.model_runner.get_kv_cache_spec())

    def _estimated_bytes(self) -> int:
        """What graphs may take where vLLM does not find it out: what each takes at least, and in their pool
        the activations of the largest, which are those of a pass in proportion to its tokens.
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
            with self._watched("profiling", self._refuse_profile, _PROFILE_LESS):
                return profile(*args, **kwargs)

        return profile_cudagraph_memory

    def _held(self, capture: Callable[..., Any]) -> Callable[..., Any]:
        def capture_model(*args: Any, **kwargs: Any) -> Any:
            if not self._envelope.is_bounding:
                return capture(*args, **kwargs)
            torch.cuda.empty_cache()
            self._before_bytes = self._used_bytes()
            with self._watched("capturing", self._refuse_captured, self._next_step(0)):
                done = capture(*args, **kwargs)
            torch.cuda.empty_cache()
            used = self._used_bytes()
            self.graphs_bytes = max(0, used - self._before_bytes)
            self._hold(used, self.pass_bytes)
            return done

        return capture_model

    @contextlib.contextmanager
    def _watched(self, doing: str, refuse: Callable[[int], None], hint: str) -> Iterator[None]:
        """Has each graph begin with a look at what is in use: `refuse` is told once it is beyond the engine's
        share. Makes an error in words of running out of memory.
        """
        envelope = self._envelope
        if not envelope.is_bounding:
            yield
            return
        capture, device = torch.cuda.graph, self._worker.device
        enter = capture.__enter__

        @functools.wraps(enter)
        def entered(graph: Any) -> Any:
            # There may be thousands of graphs, so that the rest is measured only if this is too much.
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
        # For a while, as vLLM does: the KV cache that it decides on afterwards is smaller by as much.
        self._warn("profile", said)

    def _refuse_captured(self, used_bytes: int) -> None:
        self.graphs_bytes = max(0, used_bytes - self._before_bytes)
        if self._envelope.cap is not None:
            self._hold(used_bytes)

    def _hold(self, used_bytes: int, pass_bytes: int = 0) -> None:
        """Holds what is in use, and what a pass takes on top, against the engine's share."""
        envelope = self._envelope
        excess = used_bytes + pass_bytes - envelope.requested_bytes
        if excess <= 0:
            return
        is_exceeded = used_bytes > envelope.requested_bytes
        if envelope.cap is None and not is_exceeded:
            # How well vLLM judges what a pass takes beside its graphs is its own matter.
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
        """What to do about so much too much. The cache that would fit is a number of bytes to copy."""
        fitting = max(0, self._cache_bytes - excess_bytes - self._rounding_bytes) // MIB * MIB
        steps = [_FEWER]
        if fitting and excess_bytes:
            steps.insert(0, f"give --kv-cache-memory-bytes {fitting}")
        if self._envelope.cap is not None and self._worker.cache_config.kv_cache_memory_bytes:
            # Of a larger share, a cache that takes the rest would only be larger.
            steps.insert(0, f"raise {_environment.BUDGET}")
        return ", ".join(steps)

    @contextlib.contextmanager
    def _without_plans(self) -> Iterator[None]:
        """Under a cap, has vLLM (0.26 and later) neither take the size of the cache from an earlier start nor
        keep it for a later one: it does not know of the cap.
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
    """What the KV cache takes, at least, that vLLM profiles CUDA graphs with."""
    # None, or 0, where no graphs of the model are captured, but others are.
    largest = int(runner.compilation_config.max_cudagraph_capture_size or 1)
    if _generations.chosen().bounds_profile_by_requests:
        largest = min(runner.max_num_reqs, largest)
    by_kind: dict[type, int] = {}
    for spec in runner.get_kv_cache_spec().values():
        by_kind[type(spec)] = by_kind.get(type(spec), 0) + int(spec.page_size_bytes)
    # Layers of different kinds share memory, as many of each as there are of the rarest.
    return largest * min(by_kind.values(), default=0)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it is for lack of memory: ending a capture that has failed raises an error of its own."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What is left of a step that is not to be."""
