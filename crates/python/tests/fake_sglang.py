"""SGLang as far as a plugin sees it: its registry of hooks, its memory saver's adapter, their user.

`Occupation` does on a release and a resume what SGLang does, with what goes wrong there when these are
repeated. `POORWILL_TEST_SGLANG` names the version that this is like.
"""

import enum
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from poorwill.sglang import _hooks
from poorwill.sglang._generations import ALL
from poorwill.sglang._versions import RUN, Fit, known

RELEASE = known(os.environ.get("POORWILL_TEST_SGLANG", RUN[-1]))
"""The release that this is like."""
GENERATION = ALL[RELEASE]()
IS_MANAGED = RELEASE >= (0, 5, 15)
"""Whether a manager releases and resumes; before it was the scheduler."""

ADAPTER = "sglang.srt.utils.torch_memory_saver_adapter"
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
        original = inspect.getattr_static(holder_class, name)
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


class Occupation:
    """What releases and resumes, over a model with one buffer."""

    ALL = ("kv_cache", "weights", "cuda_graph")

    memory_saver_adapter: Any
    offload_tags: set[str]
    tp_cpu_group: Any
    stashed_model_static_state: Any
    is_fully_idle: Callable[..., bool]

    def begin(self, adapter: Any, buffer: Any, synchronize: Callable[[], None], group: Any = None) -> None:
        """Its attributes."""
        self.memory_saver_adapter = adapter
        self.offload_tags = set()
        self.tp_cpu_group = group or Group()
        self.is_fully_idle = _is_idle if RELEASE >= (0, 5, 21) else lambda: True
        self._queue: Any = None
        self._buffer = buffer
        self._synchronize = synchronize

    def release_memory_occupation(self, request: Request) -> Answer:
        settings = {"ignore_waiting": False} if RELEASE >= (0, 5, 21) else {}
        assert self.is_fully_idle(**settings), "should be called only when server is idle"
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


class SchedulerWeightUpdaterManager(Occupation):
    """The manager of a scheduler, from 0.5.15 on."""

    def __init__(
        self,
        adapter: Any,
        buffer: Any,
        synchronize: Callable[[], None],
        group: Any = None,
        scheduler: Any = None,
    ) -> None:
        self.begin(adapter, buffer, synchronize, group)
        self.stashed_model_static_state = None
        self.scheduler = scheduler or equipped(SimpleNamespace())
        self._queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)


class SchedulerUpdateWeightsMixin(Occupation):
    """The part of the scheduler itself, before. It leaves queues as they are."""


class LoneScheduler(SchedulerUpdateWeightsMixin):
    """A scheduler with nothing but this part."""

    def __init__(self, adapter: Any, buffer: Any, synchronize: Callable[[], None], group: Any = None) -> None:
        self.begin(adapter, buffer, synchronize, group)
        equipped(self)


Manager: Any = SchedulerWeightUpdaterManager if IS_MANAGED else LoneScheduler
"""What releases and resumes in this version."""


def equipped(scheduler: Any, send: Callable[[Any, Any], None] = lambda output, request: None) -> Any:
    """Gives a scheduler what it has in this version to know its ranks by, and to answer with."""
    sender, settings = SimpleNamespace(send_output=send), SimpleNamespace(**_SETTINGS)
    if IS_MANAGED:
        scheduler.ipc_channels = SimpleNamespace(send_to_tokenizer=sender, recv_from_rpc=None)
    else:
        scheduler.send_to_tokenizer, scheduler.recv_from_rpc = sender, None
        scheduler.pp_size, scheduler.pp_rank = PIPELINE.pp_size, PIPELINE.pp_rank
    if RELEASE < (0, 5, 20):
        scheduler.server_args = settings
    else:
        scheduler.rust_server = None
    if RELEASE >= (0, 5, 21):
        scheduler._engine_paused = False
    if RELEASE >= (0, 5, 23):
        scheduler.send_control_output = send
    return scheduler


def _is_idle(ignore_waiting: bool) -> bool:
    return True


_SETTINGS = {"enable_dp_attention": False, "enable_dp_attention_local_control_broadcast": False}
if RELEASE >= (0, 5, 22):
    _SETTINGS = {"attn_dp_enabled": False, "enable_dp_attention_local_control_broadcast": False}

PIPELINE = SimpleNamespace(pp_size=1, pp_rank=0)
PARALLEL = SimpleNamespace(**vars(PIPELINE), **(_SETTINGS if RELEASE >= (0, 5, 20) else {}))
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
    module, _, holder = GENERATION.manager.rpartition(".")
    updater, requests = ModuleType(module), ModuleType(REQUESTS)
    updater.__dict__[holder] = globals()[holder]
    for call, request in (("Release", Release), ("Resume", Resume)):
        requests.__dict__[f"{call}MemoryOccupationReqInput"] = request
        requests.__dict__[f"{call}MemoryOccupationReqOutput"] = Answer
    requests.__dict__["RpcReqOutput"] = type("RpcReqOutput", (), {})
    communicator, context = ModuleType(COMMUNICATOR), ModuleType(CONTEXT)
    communicator.__dict__["FanOutCommunicator"] = Communicator
    context.__dict__["get_parallel"] = lambda: PARALLEL
    context.__dict__["get_exec"] = lambda: SimpleNamespace(moe=SimpleNamespace(is_ep_scale_joiner=False))
    played = (registry, _adapter(), updater, requests, communicator, *([context] if IS_MANAGED else []))
    made |= {module.__name__: module for module in played}
    sys.modules.update(made)
    return made[ADAPTER]


def load_plugins() -> None:
    """What each of its processes does first, in a version that is what it says."""
    _hooks.install(Fit(GENERATION, has_registry=False))
    HookRegistry.apply_hooks()
