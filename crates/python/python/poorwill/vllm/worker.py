"""vLLM's worker with memory that sleeps by Poorwill.

The configuration names this class (`_platform`), and vLLM creates it in place of its own. It:

- opens the allocator once the GPU and the engine's share of it are known;
- backs up the weights in the background after the start;
- refuses a sleep that would not release the weights' memory;
- knows which weights were written since a wake from level 2;
- answers the engine's core by name: `poorwill_status`, `poorwill_prepare`, `poorwill_drop_backups`,
  `poorwill_mark_restored`;
- sleeps and wakes together with the other ranks, or not at all: `poorwill_together`.
"""

import contextlib
import functools
import importlib
import logging
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from poorwill import _native, _ranks
from poorwill._native import Decision, PoorwillError, Preparation, PrepareReport
from poorwill.vllm import (
    _blocks,
    _budget,
    _communicators,
    _connectors,
    _environment,
    _generations,
    _hidden,
    _hooks,
    _keep,
    _offload,
    _patches,
    _peers,
    _platform,
    _starts,
    _versions,
)
from poorwill.vllm._budget import Envelope, gib
from poorwill.vllm._communicators import Operation
from poorwill.vllm._events import Event
from poorwill.vllm._graphs import Graphs
from poorwill.vllm._hidden import Hidden
from poorwill.vllm._processes import this_process
from poorwill.vllm._tensors import Places, parameters, storages, visible
from poorwill.vllm._unwritten import Look, Unwritten
from poorwill.vllm._wrapped import wrapped
from poorwill.vllm.allocator import Allocator

gpu_worker: Any = importlib.import_module("vllm.v1.worker.gpu_worker")
_memory: Any = importlib.import_module("vllm.utils.mem_utils")
torch: Any = importlib.import_module("torch")
logger: Any = importlib.import_module("vllm.logger").init_logger("vllm.poorwill")

MUCH_KEPT = 0.05
"""Share of the weights' bytes above which a level 2 sleep warns of what it keeps."""

GRANULE_BYTES = 2 << 20
"""Of NVIDIA's GPUs."""

COVERED_AT_LEAST = 0.9
"""Least share of the weights' bytes that a sleep has to release."""

_LESS_OR_MORE = (
    f"raise {_environment.BUDGET} or --gpu-memory-utilization, whichever is in use, take a smaller or "
    "quantized model, or spread it over more GPUs"
)

# Most missing weights that are named, and most kept tensors that a status lists.
_NAMED = 3
_KEPT_NAMED = 50

# vLLM's message and error class where less memory is free after a sleep than before.
_LESS_FREE = "Memory usage increased after sleeping."

# And where more is free after profiling than before.
_MORE_FREE = "Error in memory profiling."

_vllm = _generations.chosen()


class Worker(gpu_worker.Worker):  # type: ignore[misc]
    """vLLM's worker. Overridden methods call the original."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _hooks.refuse()
        # Before the contract, which a patch may break.
        _refuse_patches(_environment.read().keep_awake)
        for module in (_memory, *_vllm.replaced()):
            _versions.check(_versions.running(), module)
        # A spawned process has decided nothing itself, and configures drafters.
        _platform.note_chosen()
        super().__init__(*args, **kwargs)
        if _vllm.resumes_communicators(self):
            # Host memory that ranks share by CUDA would not come back from hibernation. NCCL has other.
            os.environ.setdefault(_communicators.SHARES_HOST_MEMORY, "0")
        self._environment = _environment.read()
        self._preparation: Preparation | None = None
        self._allocator: Allocator | None = None
        self._envelope: Envelope | None = None
        self._graphs: Graphs | None = None
        self._communicators = _communicators.find()
        self._unwritten = Unwritten()
        # The model's tensors when they were last seen to be in memory that sleeps.
        self._covered: Places | None = None
        # What the last sleep at level 2 has kept of the weights.
        self._hidden: list[Hidden] = []
        # Lost ranges of the weights at the last check.
        self._lost: list[tuple[int, int]] = []
        # Whether this worker opened the allocator, instead of finding one that another engine uses.
        self._is_its_owner = False
        self._has_warned = False
        self._has_warned_of_layout = False
        self._warned: set[str] = set()

    # Starting

    def init_device(self) -> None:
        _refuse_patches(self._environment.keep_awake)
        _budget.install(_memory)
        if Allocator.instance is not None:
            # What an earlier engine left is freed before vLLM measures.
            Allocator.instance.settle()
        # From now on vLLM's allocator is ours.
        stock = _vllm.allocator_class()
        if stock is not None and stock is not Allocator:
            Allocator.stock = stock
        for module in (*_vllm.replaced(), *self._modules("CuMemAllocator", Allocator.stock)):
            module.CuMemAllocator = Allocator
        try:
            self._open()
        except BaseException:
            _starts.end()
            if Allocator.instance is None:
                self._give_place_back()
            raise

    def _open(self) -> None:
        cap = self._environment.budget
        request = None if cap is None else _budget.request_under(cap)
        asking = [gpu_worker, *self._modules("request_memory", gpu_worker.request_memory)]
        free = self._free_lent if self._environment.lend else None
        with _starts.requesting(asking, self._environment.wake_timeout_s, request, free) as requests:
            super().init_device()
        if not requests.count:
            self._refuse_own_share()
        self._envelope = Envelope(self, cap)
        before = Allocator.instance
        self._allocator = Allocator.open(
            self._envelope.device,
            limit_bytes=self._envelope.arena_limit_bytes(),
            host_limit_bytes=self._environment.host_budget_bytes,
            cache_limit_bytes=self._environment.cache_limit_bytes,
            pageable=self._environment.pageable,
            keep_backups=self._environment.keep_backups,
            compress=self._environment.compress,
            links=self._environment.links,
            disk=self._environment.disk,
            disk_limit_bytes=self._environment.disk_limit_bytes,
            wake_timeout_s=self._environment.wake_timeout_s,
            keep_awake=self._environment.keep_awake,
            lend=self._environment.lending(),
            peer_copies=self._environment.peer_copies,
        )
        self._is_its_owner = self._allocator is not before
        if self._is_its_owner:
            # It outlives the worker and must not keep it alive.
            expect, keep = weakref.WeakMethod(self._expect_weights), weakref.WeakMethod(self._keep_hidden)
            self._allocator.when_dropped = lambda tags: _call(expect(), tags)
            self._allocator.kept_of_weights = lambda: _call(keep()) or []
        arena = self._allocator.arena
        logger.info(
            "This worker sleeps with Poorwill %s: up to %s of %s for weights, state and KV cache",
            _native.__version__,
            gib(arena.limit_bytes),
            arena.device,
        )
        if arena.shares_host_memory and not self._environment.disk:
            logger.warning(
                "%s shares the computer's memory, so a sleep at level 1 gives back the KV cache alone: "
                "backups of the rest take what it releases. Sleep at level 2, or set %s",
                arena.device,
                _environment.DISK,
            )

    def _free_lent(self, ordinal: int, nbytes: int) -> int:
        """Has others give up so much of what they lend of a GPU. Returns the bytes."""
        timeout_s, socket = self._environment.wake_timeout_s, self._environment.broker
        try:
            freed_bytes = _native.free_lent(ordinal, nbytes, socket=socket, timeout=timeout_s)
        except PoorwillError:
            self._warn_once(f"what others lend of cuda:{ordinal} stays in use")
            return 0
        if freed_bytes:
            logger.info("%s of cuda:%d that others had lent are free now", gib(freed_bytes), ordinal)
        return freed_bytes

    def _keep_free(self) -> None:
        """A pass of the model takes PyTorch's own memory, which asks no broker."""
        # Newer versions add an estimate of graphs, which are there by now.
        peak_bytes = int(getattr(self, "peak_activation_memory", 0))
        least_bytes = min(int(self.init_snapshot.total_memory) // 128, 1 << 30)
        self.allocator.arena.keep_free(max(peak_bytes, least_bytes))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        self._keep_out_of_the_weights()
        envelope = self._envelope
        assert envelope is not None
        with self.allocator.events.of("load"):
            try:
                super().load_model(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                if not envelope.is_bounding:
                    raise
                raise envelope.refused(error, _LESS_OR_MORE) from error
        # Scales and caches wake as they were, or zeroed; this would lose calibrated scales.
        if _vllm.resets_scales:
            self.model_runner.init_fp8_kv_scales = _nothing
        self._warn_of_shortage()

    def determine_available_memory(self) -> int:
        envelope = self._envelope
        assert envelope is not None
        loaded = _memory.MemorySnapshot(device=self.device)
        envelope.refuse_full(loaded, _LESS_OR_MORE)
        graphs = self._graphs = Graphs(self, envelope)
        envelope.refuse_cache_beside(loaded, "with the weights loaded", graphs.least_bytes)
        with graphs.profiled():
            available = self._profiled_available()
        # The cost of a pass is known now, and vLLM ignores it if the cache's size was given.
        passed = _memory.MemorySnapshot(device=self.device)
        envelope.refuse_cache_beside(passed, "after a pass of the model", graphs.least_bytes)
        return graphs.left_for_cache(available)

    def _profiled_available(self) -> int:
        try:
            return int(super().determine_available_memory())
        except AssertionError as error:
            if str(error).startswith(_MORE_FREE) and not _starts.is_own(self.device.index):
                logger.warning(
                    "NVML does not list this process, so what others give back while it profiles cannot be "
                    "distinguished from its own: start it beside no process that ends or sleeps, or in "
                    "the host's process namespace (hostPID, --pid=host)"
                )
            raise

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        if _vllm.has_state_pool:
            super().initialize_from_config(*args, **kwargs)
            return
        # A sleep drops the cache itself; what is made around it is state, and has to survive.
        with contextlib.ExitStack() as stack:
            makers = _vllm.cache_makers(self.model_runner)
            if makers:
                stack.enter_context(self.allocator.renaming({"kv_cache": "runtime"}))
            else:
                stack.enter_context(self.allocator.use_memory_pool("runtime"))
            for of, name in makers:
                stack.enter_context(wrapped(of, name, self._in_the_caches_pool))
            super().initialize_from_config(*args, **kwargs)

    def _maybe_get_memory_pool_context(self, tag: str) -> Any:
        # vLLM asks with a connector, before anything is allocated for the cache.
        if problem := _connectors.pool_problem(gpu_worker):
            raise _platform.ConfigurationError(problem)
        return super()._maybe_get_memory_pool_context(tag)

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        # None where a worker joins an engine whose memory is known.
        with contextlib.nullcontext() if self._graphs is None else self._graphs.captured():
            done = super().compile_or_warm_up_model(*args, **kwargs)
        _starts.end(self.device.index)
        # By now there are graphs and other state as well.
        self._warn_of_shortage()
        if self._environment.lend:
            self._keep_free()
        self._prepare_in_background()
        return done

    def shutdown(self) -> None:
        if self._preparation is not None:
            # The rest of it is not needed any more.
            self._preparation.cancel()
        self._unwritten.forget()
        _starts.end()
        try:
            super().shutdown()
        finally:
            if self._is_its_owner and self._allocator is Allocator.instance:
                self._give_place_back()

    def _give_place_back(self) -> None:
        """The next engine of this process may use vLLM's own sleep."""
        if Allocator.stock is not None:
            for module in (*_vllm.replaced(), *self._modules("CuMemAllocator", Allocator)):
                module.CuMemAllocator = Allocator.stock

    def _modules(self, name: str, value: object) -> list[Any]:
        """The modules of the classes that ours is over, where a name is bound to this."""
        kinds = type(self).__mro__
        others = kinds[: kinds.index(gpu_worker.Worker)]
        modules = (sys.modules.get(kind.__module__) for kind in others)
        return [each for each in modules if each is not None and (name, value) in vars(each).items()]

    def _refuse_own_share(self) -> None:
        """Raises ConfigurationError where a class that ours is over opens the GPU without vLLM's request."""
        kind = next(kind for kind in type(self).__mro__ if kind is not Worker and "init_device" in vars(kind))
        said = f"{kind.__module__}.{kind.__qualname__} opens the GPU without vLLM's request_memory"
        if self._environment.budget is not None:
            raise _platform.ConfigurationError(
                f"{said}, so {_environment.BUDGET} cannot hold it: use --gpu-memory-utilization"
            )
        for name in ("init_snapshot", "requested_memory", "device"):
            if not hasattr(self, name):
                raise _platform.ConfigurationError(
                    f"{said}, and leaves no {name}: it needs vLLM's init_device"
                )
        logger.info("%s: its start waits for no memory of others", said)
        _starts.begin(self.init_snapshot)

    # Sleeping and waking

    def sleep(self, level: int = 1, kept: Sequence[_blocks.Run] = ()) -> None:
        """`kept` are runs of the KV cache's blocks whose bytes survive."""
        ranges = self._kept_ranges(kept)
        with self._changing_communicators("suspend"), self.allocator.keeping(ranges):
            self._sleep(level, ranges)

    def _sleep(self, level: int, kept: list[tuple[int, int]]) -> None:
        # A preparation that ended was before this; weights may have been written since.
        self._note_preparation(wait=False)
        self._missing()
        self._refuse_uncovered()
        if problem := _peers.problem(self._shared(), self.allocator.ranges()):
            raise PoorwillError(f"sleep: {problem}")
        if level == 1 and (shortage := self._host_shortage(kept)) is not None:
            raise PoorwillError(shortage)
        torch.cuda.empty_cache()
        before = self.allocator.sleeping()
        if "weights" in before:
            # vLLM would read the model's buffers, whose memory is gone. It still has the copies that it
            # saved.
            self._suspend(level)
            return
        try:
            with self.allocator.sleeping_by(level):
                super().sleep(level)
        except BaseException as error:
            after = self.allocator.sleeping()
            if "weights" not in after:
                # Another wake must not write what was saved for this one.
                self._forget_saved()
            # vLLM compares the device's free memory, which other processes change. What we released is known.
            is_of_others = isinstance(error, AssertionError) and str(error) == _LESS_FREE
            if not is_of_others or after == before:
                raise
            logger.warning("the device has less free memory than before the sleep: another process took it")

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "weights" in tags or not _vllm.restores_at_any_wake:
            with self._changing_communicators("resume"):
                super().wake_up(tags)
            return
        # The saved buffers belong to the weights, which are not there yet.
        saved = self._forget_saved()
        try:
            with self._changing_communicators("resume"):
                super().wake_up(tags)
        finally:
            self.__dict__.update(saved)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_asleep("reload_weights")
        with self.allocator.events.of("load"):
            super().reload_weights(*args, **kwargs)
        self._missing(is_whole=True)

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_asleep("update_weights")
        super().update_weights(*args, **kwargs)
        self._missing()

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_asleep("finish_weight_update")
        super().finish_weight_update(*args, **kwargs)
        self._missing()

    # What the engine's core asks by name

    def poorwill_status(self) -> dict[str, Any]:
        """Where this rank's memory is, and the events since the last call."""
        allocator = self.allocator
        self._note_preparation(wait=False)
        looked = self._missing()
        communicators = self._communicator_status()
        stats = allocator.arena.stats()
        return {
            "rank": int(self.rank),
            **this_process(),
            "device": allocator.arena.device,
            "state": dict(allocator.arena.state()),
            "sleeping": allocator.sleeping(),
            "undefined": allocator.undefined(),
            "unwritten": None if looked is None else self._as_dict(looked),
            "host_bytes": stats.backup_bytes,
            "lent_bytes": stats.lent_bytes,
            "kept_at_level2_bytes": sum(each.nbytes for each in self._hidden),
            "kept_at_level2": [(each.name, each.nbytes) for each in self._hidden[:_KEPT_NAMED]],
            "unaccounted_bytes": allocator.events.unaccounted_bytes,
            "communicators": communicators,
            "cannot_hibernate": _communicators.cannot_hibernate(communicators),
            "shared": [shared.as_dict() for shared in self._shared()],
            "events": allocator.events.take(),
        }

    def poorwill_together(
        self, method: str, args: Sequence[Any], kwargs: dict[str, Any], path: str, first: int, ranks: int
    ) -> Any:
        """A sleep or a wake that all ranks carry out, or none. `first` is the number of our first one."""
        decision = Decision.join(path, first + int(self.rank), ranks)
        try:
            with self.allocator.together(decision, ranks, self._environment.ranks_timeout_s):
                return getattr(self, method)(*args, **kwargs)
        except BaseException:
            # The others need not wait for this one.
            with contextlib.suppress(PoorwillError):
                decision.decide("undo")
            raise

    def poorwill_reaches(self, path: str) -> bool:
        """Whether this rank reads a decision with this path."""
        return _ranks.reaches(path)

    def poorwill_process(self) -> dict[str, Any]:
        """This rank's process, as another process can name it."""
        return this_process()

    def poorwill_mark_restored(self) -> list[str]:
        """Marks the weights as complete, whatever was written. Returns the tags that were undefined."""
        allocator = self.allocator
        if "weights" in allocator.undefined():
            # NaN instead of zeros would be worse than either.
            self._unwritten.clear(parameters(self.model_runner.model))
        return allocator.arena.mark_restored(allocator.undefined())

    def poorwill_can_keep(self, kept: Sequence[_blocks.Run]) -> None:
        """Raises PoorwillError for blocks that a sleep cannot keep besides what it keeps anyway."""
        if self._environment.host_budget_bytes is None or self._environment.disk:
            return
        if (shortage := self._host_shortage(self._kept_ranges(kept))) is not None:
            raise PoorwillError(shortage)

    def poorwill_prepare(self, wait: bool = False) -> dict[str, Any] | None:
        """Starts to back up what a sleep at level 1 would. With `wait` it returns the report at the end."""
        self._note_preparation(wait=False)
        if self._preparation is not None:
            # Finished backups stay and are reported.
            self._preparation.cancel()
            with contextlib.suppress(PoorwillError):
                self._note_preparation(wait=True)
        self._preparation = self.allocator.prepare()
        report = self._note_preparation(wait=True) if wait else None
        return None if report is None else report.as_dict()

    def poorwill_drop_backups(self) -> int:
        """Drops the backups of awake memory and of a preparation. Returns the host bytes released."""
        dropped = self.allocator.arena.drop_backups()
        self._note_preparation(wait=False)
        return dropped

    # Parts

    @property
    def allocator(self) -> Allocator:
        """The owner of this rank's memory."""
        if self._allocator is None:
            raise PoorwillError("the worker has no GPU yet: vLLM calls init_device first")
        return self._allocator

    def _models(self) -> list[Any]:
        drafting = getattr(_vllm.drafter(self.model_runner), "model", None)
        return [self.model_runner.model, *([drafting] if hasattr(drafting, "named_parameters") else [])]

    def _keep_hidden(self) -> list[tuple[int, int]]:
        """Before a sleep at level 2: what no update of the weights would write."""
        models = self._models()
        hidden = _hidden.find(models, self.allocator.ranges("weights"))
        held = {(each.address, each.nbytes) for each in self._hidden}
        if {(each.address, each.nbytes) for each in hidden} != held:
            self._hidden = _hidden.named(models, hidden)
            kept_bytes = sum(each.nbytes for each in hidden)
            is_much = kept_bytes > MUCH_KEPT * self._weight_bytes()
            logger.log(
                logging.WARNING if is_much else logging.INFO,
                "A sleep at level 2 keeps %d tensors of %d bytes that are neither parameters nor buffers: %s",
                len(hidden),
                kept_bytes,
                ", ".join(each.name or "unnamed" for each in self._hidden[:_NAMED]),
            )
        return [(each.address, each.nbytes) for each in hidden]

    def _weight_bytes(self) -> int:
        tags = self.allocator.arena.stats().tags
        return sum(entry.live_bytes for entry in tags if entry.tag == "weights")

    def _expect_weights(self, tags: list[str]) -> None:
        """After a wake that brought these tags back without their bytes."""
        if "weights" not in tags:
            return
        if self.allocator.arena.lost_ranges():
            self._expect_lost()
            return
        if self._environment.after_level2 == "serve":
            self.allocator.arena.mark_restored(["weights"])
            return
        self._unwritten.begin(parameters(self.model_runner.model), self.allocator.ranges("weights"))

    def _expect_lost(self) -> None:
        """After damaged backups of weights: their parameters are to be written again."""
        lost = [
            (lost.addr, lost.addr + lost.bytes)
            for lost in self.allocator.arena.lost_ranges()
            if lost.tag == "weights"
        ]
        if lost == self._lost:
            return
        self._lost = lost
        if not lost:
            return
        had_any = [
            (name, tensor)
            for name, tensor in parameters(self.model_runner.model)
            if any(
                start < tensor.data_ptr() + tensor.nbytes and tensor.data_ptr() < end for start, end in lost
            )
        ]
        self._unwritten.begin(had_any, self.allocator.ranges("weights"))

    def _missing(self, *, is_whole: bool = False) -> Look | None:
        """The weights that were not written since they were dropped; None if complete.

        Once nothing is missing they count as restored. Where that cannot be seen, they do after a full
        write.
        """
        if "weights" not in self.allocator.undefined():
            self._lost = []
            return None
        self._expect_lost()
        looked = self._unwritten.look(parameters(self.model_runner.model))
        # During an update, more weights are still to come.
        is_known = is_whole or not self._unwritten.is_blind
        if looked.missing or not is_known or _vllm.is_updating(self):
            return looked
        self.allocator.arena.mark_restored(["weights"])
        return None

    def _as_dict(self, looked: Look) -> dict[str, Any]:
        largest = sorted(looked.missing, key=lambda tensor: -tensor.nbytes)
        return {
            "tensors": len(looked.missing),
            "of_tensors": self._unwritten.tensors,
            "bytes": sum(tensor.nbytes for tensor in looked.missing),
            "of_bytes": self._unwritten.nbytes,
            "is_all": looked.is_all,
            "is_updating": _vllm.is_updating(self),
            "names": [tensor.name for tensor in largest[:_NAMED]],
        }

    def _in_the_caches_pool(self, allocate: Any) -> Any:
        arena = self.allocator.arena

        @functools.wraps(allocate)
        def allocate_kv_cache(*args: Any, **kwargs: Any) -> Any:
            with arena.pool("kv_cache"):
                return allocate(*args, **kwargs)

        return allocate_kv_cache

    def _suspend(self, level: int) -> None:
        """Puts what is awake to sleep, with vLLM's own steps except for the model's buffers."""
        _connectors.unregister(gpu_worker)
        _vllm.suspend(self, level)
        if _vllm.resumes_communicators(self):
            # The wake resumed them, whichever tags it woke.
            gpu_worker.suspend_device_comms()

    def _shared(self) -> list[_peers.Shared]:
        """Memory that other processes map. No sleep or wake fails because vLLM does not show it."""
        try:
            return _peers.find()
        except Exception:
            self._warn_once("what other processes map of this rank's memory is not known")
            return []

    def _communicator_status(self) -> list[dict[str, Any]]:
        try:
            return self._communicators.status()
        except Exception:
            self._warn_once("what NCCL's communicators hold is not known")
            return []

    def _warn_once(self, words: str) -> None:
        if words not in self._warned:
            self._warned.add(words)
            logger.warning("%s", words, exc_info=True)

    @contextlib.contextmanager
    def _changing_communicators(self, operation: Operation) -> Iterator[None]:
        """Where vLLM suspends or resumes NCCL's communicators, all ranks do it, or none."""
        has_begun = False

        def change() -> Any:
            nonlocal has_begun
            has_begun = True
            return getattr(self._communicators, operation)()

        try:
            with wrapped(gpu_worker, f"{operation}_device_comms", lambda _: change):
                yield
        except BaseException as error:
            if _vllm.resumes_communicators(self) and not has_begun:
                self._decline(operation, error)
            raise

    def _decline(self, operation: Operation, error: BaseException) -> None:
        """Tells the ranks that go on without this one. Its own error is raised, whatever becomes of that."""
        try:
            ranks = self.allocator.going_on()
            if ranks is None:
                # All of the engine get the same call, and those of other engines need not.
                ranks = int(self.vllm_config.parallel_config.world_size)
            if ranks:
                self._communicators.decline(operation, error, ranks)
        except Exception:
            self._warn_once("whether other ranks wait for this one, which has failed, is not known")

    def _forget_saved(self) -> dict[str, Any]:
        """Resets what vLLM saved for the next wake. Returns what it was."""
        saved = {name: self.__dict__[name] for name in _vllm.saved}
        self.__dict__.update({name: type(value)() for name, value in saved.items()})
        return saved

    def _prepare_in_background(self) -> None:
        if self._prepares() and self._host_shortage() is None:
            self.poorwill_prepare()

    def _prepares(self) -> bool:
        prepare, arena = self._environment.prepare, self.allocator.arena
        if prepare and arena.shares_host_memory:
            logger.warning(
                "%s=1 backs up the weights in the memory that %s shares: they are there twice from now on",
                _environment.PREPARE,
                arena.device,
            )
        return not arena.shares_host_memory if prepare is None else prepare

    def _note_preparation(self, *, wait: bool) -> PrepareReport | None:
        """Makes an event of a finished preparation. With `wait`, raises its error."""
        preparation = self._preparation
        if preparation is None or not (wait or preparation.is_ended):
            return None
        self._preparation = None
        event = Event("prepare")
        try:
            report = preparation.wait()
        except PoorwillError as error:
            event.values["error"] = f"{type(error).__name__}: {error}"
            logger.warning("backing the weights up in the background failed: %s", error)
            if wait:
                raise
            return None
        else:
            event.prepared(report)
            event.values["seconds"] = report.seconds
            return report
        finally:
            self.allocator.events.add(event)

    def _kept_ranges(self, kept: Sequence[_blocks.Run]) -> list[tuple[int, int]]:
        """Addresses and lengths of blocks; all of the cache where it has no layout that is known."""
        if not kept:
            return []
        layers = self.vllm_config.compilation_config.static_forward_context
        found = _blocks.places(_vllm, self.model_runner.kv_cache_config, layers, kept, GRANULE_BYTES)
        if found is None:
            if not self._has_warned_of_layout:
                self._has_warned_of_layout = True
                logger.warning("the layout of the KV cache is not known: a sleep keeps all of it, or nothing")
            return [(start, end - start) for start, end in self.allocator.ranges(_keep.CACHE)]
        return found

    def _host_shortage(self, kept: Sequence[tuple[int, int]] = ()) -> str | None:
        """Why the weights and these parts of the KV cache cannot be backed up; None if they can."""
        limit = self._environment.host_budget_bytes
        if limit is None or self._environment.disk:
            return None
        offloaded = _offload.held_bytes()
        of_cache = _in_granules(kept)
        needed = self._kept_bytes() + of_cache
        if needed + offloaded > limit:
            # Cached memory has no bytes to keep.
            self.allocator.settle()
            needed = self._kept_bytes() + of_cache
        if needed + offloaded <= limit:
            return None
        beside = f" beside {gib(offloaded)} of offloaded weights" if offloaded else ""
        other = "or sleep at level 2 and reload the weights after the wake"
        if of_cache:
            other = "or sleep with mode=wait or abort, without keep_tags"
        part = f" ({gib(of_cache)} of it for the KV cache of requests or prefixes)" if of_cache else ""
        return (
            f"a sleep at level 1 keeps {gib(needed)}{part} in host memory{beside}, and "
            f"{_environment.HOST_BUDGET} allows {gib(limit)}: raise it, {other}"
        )

    def _kept_bytes(self) -> int:
        """Upper bound of the mapped bytes that a sleep at level 1 keeps."""
        dropped = ("kv_cache", "workspace", *self._environment.keep_awake)
        return sum(tag.mapped_bytes for tag in self.allocator.arena.stats().tags if tag.tag not in dropped)

    def _warn_of_shortage(self) -> None:
        shortage = None if self._has_warned else self._host_shortage()
        if shortage is not None:
            self._has_warned = True
            logger.warning("%s", shortage)

    def _refuse_asleep(self, operation: str) -> None:
        if "weights" in self.allocator.sleeping():
            raise PoorwillError(f"{operation} needs the weights, which sleep: wake them first")

    def _refuse_uncovered(self) -> None:
        """Raises PoorwillError for a model whose weights are mostly outside of sleeping memory."""
        if self._covered is not None and self._covered.are_as_before():
            return
        tensors = list(visible(self._models()))
        ranges = iter(self.allocator.ranges())
        begin, end = next(ranges, (0, 0))
        total = covered = 0
        outside: list[tuple[int, str]] = []
        for address, size, name in sorted(storages(tensors)):
            while end <= address and end:
                begin, end = next(ranges, (0, 0))
            total += size
            if begin <= address < end:
                covered += size
            else:
                outside.append((size, name))
        if covered >= COVERED_AT_LEAST * total:
            # A model that shows nothing yet is looked at again.
            self._covered = Places(tensors) if tensors else None
            return
        size, name = max(outside)
        raise PoorwillError(
            f"sleep would cover {gib(covered)} of the weights' {gib(total)}, {covered / total:.0%} where it "
            f"has to be {COVERED_AT_LEAST:.0%}: {len(outside)} tensors were allocated outside the pool, of "
            f"which {name} with {gib(size)} is the largest. The engine stays awake. Load them in load_model, "
            "where the pool is open"
        )

    def _keep_out_of_the_weights(self) -> None:
        """Loads adapters and drafters where no sleep drops them: no reload writes them."""
        runner, allocator = self.model_runner, self.allocator

        def kept(load: Any) -> Any:
            @functools.wraps(load)
            def loads(*args: Any, **kwargs: Any) -> Any:
                with allocator.renaming({"weights": "runtime"}), allocator.use_memory_pool("weights"):
                    return load(*args, **kwargs)

            return loads

        if not _vllm.has_adapter_pool:
            runner.load_lora_model = kept(runner.load_lora_model)
        drafter = _vllm.drafter(runner)
        if hasattr(drafter, "load_model"):
            drafter.load_model = kept(drafter.load_model)


def _refusing(name: str) -> Any:
    """A method of vLLM's worker, refused while the weights sleep."""
    stock = getattr(gpu_worker.Worker, name)

    @functools.wraps(stock)
    def refusing(self: Worker, *args: Any, **kwargs: Any) -> Any:
        self._refuse_asleep(name)
        # Where ours is over another class, that one's.
        return getattr(super(Worker, self), name)(*args, **kwargs)

    return refusing


_versions.check(_versions.running(), gpu_worker)
# Unmapped memory cannot be accessed: the GPU would fault, and the engine end.
for _name in _vllm.touching:
    setattr(Worker, _name, _refusing(_name))


def _refuse_patches(keep_awake: Collection[str]) -> None:
    """Raises ConfigurationError for what others have put into vLLM's allocator, which is not used."""
    stock = _vllm.allocator_class()
    if stock is not None:
        _patches.refuse(stock, keep_awake)


def _in_granules(ranges: Sequence[tuple[int, int]]) -> int:
    """Bytes of the granules that ranges touch, which are backed up as a whole."""
    granules = counted = 0
    for start, nbytes in sorted(ranges):
        first, end = max(start // GRANULE_BYTES, counted), -(-(start + nbytes) // GRANULE_BYTES)
        granules += max(end - first, 0)
        counted = max(counted, end)
    return granules * GRANULE_BYTES


def _call(method: Callable[..., Any] | None, *args: Any) -> Any:
    return None if method is None else method(*args)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a step that is not needed."""
