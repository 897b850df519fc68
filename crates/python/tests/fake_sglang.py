"""SGLang 0.5.23 as far as a plugin sees it: its registry of hooks, its memory saver's adapter, their user.

`Manager` does on a release and a resume what SGLang does, with what goes wrong there when these are repeated.
"""

import enum
import functools
import importlib
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

ADAPTER = "sglang.srt.utils.torch_memory_saver_adapter"


UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
REQUESTS = "sglang.srt.managers.io_struct"
COMMUNICATOR = "sglang.srt.managers.communicator"
CONTEXT = "sglang.srt.runtime_context"


class HookType(enum.Enum):
    REPLACE = "replace"
    AROUND = "around"


class HookRegistry:
    """Keeps hooks, and puts each target's in place once, when all plugins have been called."""

    hooks: ClassVar[dict[str, list[tuple[Callable[..., Any], HookType]]]] = {}
    patched: ClassVar[set[str]] = set()

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        cls.hooks.setdefault(target, []).append((hook, hook_type))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hooks in cls.hooks.items():
            if target not in cls.patched:
                cls.patched.add(target)
                cls._apply(target, hooks)

    @classmethod
    def reset(cls) -> None:
        cls.hooks.clear()
        cls.patched.clear()

    @staticmethod
    def _apply(target: str, hooks: list[tuple[Callable[..., Any], HookType]]) -> None:
        module, holder, name = target.rsplit(".", 2)
        holder_class = getattr(importlib.import_module(module), holder)
        original = vars(holder_class)[name]
        is_static = isinstance(original, staticmethod)
        call = original.__func__ if is_static else original
        for hook, kind in sorted(hooks, key=lambda each: each[1] is not HookType.REPLACE):
            call = hook if kind is HookType.REPLACE else _around(hook, call)
        setattr(holder_class, name, staticmethod(call) if is_static else call)


def _around(hook: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapper


class Request:
    """Tags to release or resume; None for all."""

    def __init__(self, *tags: str, rid: str | None = None) -> None:
        self.tags = list(tags) or None
        self.rid = rid


class Release(Request):
    """`ReleaseMemoryOccupationReqInput`."""


class Resume(Request):
    """`ResumeMemoryOccupationReqInput`."""


class Answer:
    """That it was done."""

    rid: str | None = None


class Communicator:
    """`FanOutCommunicator` before schedulers that answer at once."""

    def __init__(self, *send: Callable[[Any], Any]) -> None:
        self._send = send

    async def __call__(self, request: Any) -> list[Any]:
        return [send(request) for send in self._send]


class Group:
    """Ranks of which there is only this one."""

    count, rank = 1, 0

    def meet(self, value: Any) -> list[Any]:
        """What each rank gives here."""
        return [value]


class Distributed:
    """`torch.distributed`, as far as it is used here."""

    class GroupMember:
        """Groups that are none."""

        NON_GROUP_MEMBER: Any = None

    @staticmethod
    def get_world_size(group: Group) -> int:
        return group.count

    @staticmethod
    def get_rank(group: Group) -> int:
        return group.rank

    @staticmethod
    def all_gather_object(values: list[Any], value: Any, group: Group) -> None:
        values[:] = group.meet(value)

    @staticmethod
    def barrier(group: Group | None) -> None:
        if group is not None:
            group.meet(None)


class Transfers:
    """`MooncakeKVManager`: its transfers may use the cache. Repeated calls only make it log."""

    def __init__(self) -> None:
        self.is_registered = True
        self.fault = ""

    def register_buffer_to_engine(self) -> None:
        if self.fault == "register":
            raise OSError("the cache was not registered")
        self.is_registered = True

    def deregister_buffer_to_engine(self) -> None:
        self.is_registered = False
        if self.fault == "deregister":
            raise OSError("connections were not closed")


class Queue:
    """`PrefillBootstrapQueue`."""

    def __init__(self) -> None:
        self.queue: list[Any] = []
        self.kv_manager = Transfers()

    def release_memory_occupation(self) -> None:
        self.queue.clear()
        self.kv_manager.deregister_buffer_to_engine()

    def resume_memory_occupation(self) -> None:
        self.kv_manager.register_buffer_to_engine()


class Manager:
    """`SchedulerWeightUpdaterManager`, over a model with one buffer."""

    ALL = ("kv_cache", "weights", "cuda_graph")

    def __init__(
        self,
        memory_saver_adapter: Any,
        buffer: Any,
        synchronize: Callable[[], None],
        group: Any = None,
        scheduler: Any = None,
    ) -> None:
        self.memory_saver_adapter = memory_saver_adapter
        self.offload_tags: set[str] = set()
        self.stashed_model_static_state: Any = None
        self.tp_cpu_group = group or Group()
        self.scheduler = scheduler
        self.is_fully_idle: Callable[..., bool] = lambda ignore_waiting: True
        self._queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
        self._buffer = buffer
        self._synchronize = synchronize

    def release_memory_occupation(self, request: Request) -> Answer:
        assert self.is_fully_idle(ignore_waiting=False), "should be called only when server is idle"
        tags = request.tags or self.ALL
        self.offload_tags |= set(tags)
        if "kv_cache" in tags:
            if self._queue is not None:
                self._queue.release_memory_occupation()
            self.memory_saver_adapter.pause("kv_cache")
        if "weights" in tags:
            # Reads the model, whether it is there or not. The copy stays on the GPU meanwhile.
            self.stashed_model_static_state = self._buffer.clone()
            importlib.import_module("torch").distributed.barrier(self.tp_cpu_group)
            self.memory_saver_adapter.pause("weights")
        if "cuda_graph" in tags:
            self.memory_saver_adapter.pause("cuda_graph")
        self._synchronize()
        return Answer()

    def resume_memory_occupation(self, request: Request) -> Answer:
        tags = request.tags or self.ALL
        for tag in tags:
            self.offload_tags.remove(tag)
        if "cuda_graph" in tags:
            self.memory_saver_adapter.resume("cuda_graph")
        if "weights" in tags:
            self.memory_saver_adapter.resume("weights")
            importlib.import_module("torch").distributed.barrier(self.tp_cpu_group)
            self._buffer.copy_(self.stashed_model_static_state)
            del self.stashed_model_static_state
        if "kv_cache" in tags:
            self.memory_saver_adapter.resume("kv_cache")
            if self._queue is not None:
                self._queue.resume_memory_occupation()
        return Answer()


PARALLEL = SimpleNamespace(
    pp_size=1, pp_rank=0, attn_dp_enabled=False, enable_dp_attention_local_control_broadcast=False
)
"""What `get_parallel` returns."""


def _refuses(*_: object, **__: object) -> Any:
    raise NotImplementedError


def _adapter() -> ModuleType:
    module = ModuleType(ADAPTER)

    def create(enable: bool) -> Any:
        assert not enable, "torch_memory_saver is not here"
        return module.__dict__["_TorchMemorySaverAdapterNoop"]()

    contexts, calls = ("configure_subprocess", "region", "cuda_graph", "disable"), ("pause", "resume")
    base = type(
        "TorchMemorySaverAdapter",
        (),
        {
            "create": staticmethod(create),
            "check_validity": lambda self, caller_name: None,
            "enabled": property(_refuses),
            **dict.fromkeys((*contexts, *calls), _refuses),
        },
    )
    does_nothing = {
        "enabled": property(lambda self: False),
        **{name: lambda self, *_, **__: nullcontext() for name in contexts},
        **{name: lambda self, tag: None for name in calls},
    }
    noop = type("_TorchMemorySaverAdapterNoop", (base,), does_nothing)
    module.__dict__.update({"TorchMemorySaverAdapter": base, "_TorchMemorySaverAdapterNoop": noop})
    return module


def install() -> ModuleType:
    """Has SGLang's modules imported, and returns its adapter's."""
    names = (
        *("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.plugins", "sglang.srt.managers"),
        "sglang.srt.managers.scheduler_components",
    )
    made = {name: ModuleType(name) for name in names}
    for package in made.values():
        package.__path__ = []
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.__dict__.update({"HookRegistry": HookRegistry, "HookType": HookType})
    updater, requests = ModuleType(UPDATER), ModuleType(REQUESTS)
    updater.__dict__["SchedulerWeightUpdaterManager"] = Manager
    for call, request in (("Release", Release), ("Resume", Resume)):
        requests.__dict__[f"{call}MemoryOccupationReqInput"] = request
        requests.__dict__[f"{call}MemoryOccupationReqOutput"] = Answer
    requests.__dict__["RpcReqOutput"] = type("RpcReqOutput", (), {})
    communicator, context = ModuleType(COMMUNICATOR), ModuleType(CONTEXT)
    communicator.__dict__["FanOutCommunicator"] = Communicator
    context.__dict__["get_parallel"] = lambda: PARALLEL
    played = (registry, _adapter(), updater, requests, communicator, context)
    made |= {module.__name__: module for module in played}
    sys.modules.update(made)
    return made[ADAPTER]


def load_plugins(register: Callable[[], None]) -> None:
    """What each of its processes does first."""
    register()
    HookRegistry.apply_hooks()
