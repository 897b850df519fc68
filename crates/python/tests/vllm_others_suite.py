"""What frameworks bring to vLLM's worker: classes of their own, and patches of its allocator.

`test_vllm_suites.py` runs it.
"""

import functools
import importlib
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import poorwill
import pytest
from fake_vllm.loader import Loader
from vllm_engines import MIB, Engine, Shape, Start, contents

torch: Any = importlib.import_module("torch")

MODULE = "a_framework.workers.special"


def platform() -> Any:
    return importlib.import_module("poorwill.vllm._platform")


def stock() -> Any:
    return importlib.import_module("vllm.v1.worker.gpu_worker").Worker


def ours() -> Any:
    return importlib.import_module("poorwill.vllm.worker").Worker


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with worker classes, in packages."""
    for name in ("a_framework", "a_framework.workers", MODULE):
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    return module


def named(framework: ModuleType, worker: object, name: str = "Special") -> str:
    """The class in the framework's module, by its name."""
    if isinstance(worker, type):
        worker.__module__, worker.__qualname__, worker.__name__ = MODULE, name, name
    setattr(framework, name, worker)
    return f"{MODULE}.{name}"


def resolved(version: str, name: str) -> Any:
    """The class of a name as the configuration leaves it, by vLLM's own function."""
    module = "vllm.utils.import_utils"
    found: Any = Loader(version, [module], {"poorwill", "a_framework"}).module(module)
    return found.resolve_obj_by_qualname(f"{platform().OVER}{name}")


def over(start: Start, version: str, name: str, **settings: Any) -> Engine:
    """An engine whose worker is ours over the class of that name."""
    engine = start(Shape(), **settings)
    engine.config.parallel_config.worker_cls = f"{platform().OVER}{name}"
    assert platform().is_active(engine.config)
    engine.worker = resolved(version, name)(engine.config, 0, 0, "nowhere")
    return engine


# Classes


def test_a_worker_of_others_sleeps_as_ours(start: Start, version: str, framework: ModuleType) -> None:
    called: list[str] = []

    class Special(stock()):  # type: ignore[misc]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            called.append("new")
            return super().__new__(cls)

        def init_device(self) -> None:
            called.append("init_device")
            super().init_device()

        def load_model(self, *args: Any, **kwargs: Any) -> None:
            called.append("load_model")
            with self._maybe_get_memory_pool_context("weights"):
                super().load_model(*args, **kwargs)

        def sleep(self, level: int = 1) -> None:
            called.append("sleep")
            super().sleep(level)

        def add_lora(self, request: Any) -> bool:
            called.append("add_lora")
            return bool(super().add_lora(request))

        def special(self) -> str:
            return "theirs"

    engine = over(start, version, named(framework, Special)).start()
    before = contents(engine.kept())
    assert isinstance(engine.worker, Special)
    assert isinstance(engine.worker, ours())
    assert engine.worker.special() == "theirs"
    assert engine.worker.add_lora(None)
    for level in (1, 2):
        engine.worker.sleep(level)
        assert engine.worker.poorwill_status()["sleeping"]
        with pytest.raises(poorwill.PoorwillError, match="add_lora needs the weights, which sleep"):
            engine.worker.add_lora(None)
        engine.worker.wake_up()
        if level == 2:
            engine.worker.reload_weights()
        assert contents(engine.kept()) == before
    assert called == ["new", "init_device", "load_model", "add_lora", "sleep", "sleep"]


def test_a_worker_that_sleeps_by_the_allocator_alone_is_undone_and_woken_as_ours(
    start: Start, version: str, framework: ModuleType
) -> None:
    """As vLLM-Omni's, whose modules may have taken the allocator and the request by name before."""
    cumem: Any = importlib.import_module("vllm.device_allocator.cumem")
    gpu_worker: Any = importlib.import_module("vllm.v1.worker.gpu_worker")
    vars(framework).update(
        CuMemAllocator=cumem.CuMemAllocator, request_memory=gpu_worker.request_memory, torch=torch
    )
    was = cumem.CuMemAllocator

    class Special(stock()):  # type: ignore[misc]
        def sleep(self, level: int = 1) -> bool:
            tags = ("weights",) if level == 1 else ()
            framework.CuMemAllocator.get_instance().sleep(offload_tags=tags)
            return True

        def wake_up(self, tags: Any = None) -> bool:
            framework.CuMemAllocator.get_instance().wake_up(tags)
            return True

    engine = over(start, version, named(framework, Special), POORWILL_BUDGET="512MiB").start()
    assert framework.CuMemAllocator is type(engine.allocator)
    assert engine.worker.requested_memory == 512 * MIB
    before = contents(engine.kept())
    engine.worker.sleep(1)
    assert engine.states()["weights"] == "asleep_backed_up"
    assert engine.states()["runtime"] == "asleep_backed_up"
    engine.worker.wake_up()
    assert contents(engine.kept()) == before
    engine.worker.shutdown()
    assert framework.CuMemAllocator is cumem.CuMemAllocator is was
    assert framework.request_memory is gpu_worker.request_memory


def test_a_worker_that_takes_a_share_by_itself(start: Start, version: str, framework: ModuleType) -> None:
    """With a copy of what vLLM's does, as classes have that were written against an older one."""
    stocks = stock().init_device
    own = {**stocks.__globals__, "request_memory": lambda snapshot, *_: snapshot.total_memory * 0.5}
    body = {"init_device": FunctionType(stocks.__code__, own)}
    name = named(framework, type("Special", (stock(),), body))
    engine = over(start, version, name).load()
    assert engine.arena.limit_bytes == 512 * MIB
    engine.end()
    refused = over(start, version, name, POORWILL_BUDGET="256MiB")
    with pytest.raises(platform().ConfigurationError, match="so POORWILL_BUDGET cannot hold it") as said:
        refused.worker.init_device()
    assert str(said.value).startswith(f"{name} opens the GPU without vLLM's request_memory")
    plain = type("Plain", (stock(),), {"init_device": lambda self: None})
    with pytest.raises(platform().ConfigurationError, match="and leaves no init_snapshot"):
        over(start, version, named(framework, plain, "Plain"), POORWILL_BUDGET="").worker.init_device()


def test_a_class_is_found_by_its_name_again(start: Start, version: str, framework: ModuleType) -> None:
    start()
    name = named(framework, type("Special", (stock(),), {}))
    made = resolved(version, name)
    assert resolved(version, name) is made
    assert pickle.loads(pickle.dumps(made)) is made
    assert made.__mro__[:3] == (made, ours(), framework.Special)
    assert (made.__module__, made.__qualname__) == (f"{platform().OVER}{MODULE}", "Special")
    extension = type("Extension", (), {"extra": lambda self: 7})
    # As vLLM does with --worker-extension-cls.
    made.__bases__ = (*made.__bases__, extension)
    assert made.extra(None) == 7


def test_ours_and_vllms_are_not_put_over_themselves(
    start: Start, version: str, framework: ModuleType
) -> None:
    start()
    derived = type("Special", (ours(),), {})
    assert resolved(version, named(framework, derived)) is derived
    assert resolved(version, "vllm.v1.worker.gpu_worker.Worker") is ours()


def test_what_cannot_be_ours_is_refused_by_name(start: Start, version: str, framework: ModuleType) -> None:
    start()

    def refusal(name: str) -> str:
        with pytest.raises(ValueError, match="--worker-cls is") as refused:
            resolved(version, name)
        assert isinstance(refused.value, platform().ConfigurationError)
        return str(refused.value)

    said = f"--worker-cls is {MODULE}."
    another = refusal(named(framework, type("CPUWorker", (), {}), "CPUWorker"))
    assert another.startswith(f"{said}CPUWorker, which does not derive from vllm.v1.worker.gpu_worker.Worker")
    assert "does not derive" in refusal(named(framework, print, "function"))
    assert refusal(f"{MODULE}.Absent") == f"{said}Absent, and {MODULE} has no Absent"
    missing = refusal("a_framework.nowhere.Worker")
    assert missing.startswith("--worker-cls is a_framework.nowhere.Worker, which cannot be imported here: ")
    final = type("Odd", (stock(),), {"__init_subclass__": classmethod(_no_subclass)})
    assert "Poorwill's worker cannot be put before: no subclass" in refusal(named(framework, final, "Odd"))


def test_who_looks_for_a_name_in_all_modules_goes_on(start: Start, framework: ModuleType) -> None:
    """As pickle does for a function without a module."""
    start()
    framework.function = print  # type: ignore[attr-defined]
    module = importlib.import_module(f"poorwill.vllm.over.{MODULE}")
    assert [hasattr(module, name) for name in ("absent", "function")] == [False, False]


def _no_subclass(_: Any, /, **__: Any) -> None:
    raise TypeError("no subclass")


def test_a_class_that_makes_another_is_refused(start: Start, version: str, framework: ModuleType) -> None:
    other = type("Other", (stock(),), {})
    body: dict[str, Any] = {"__new__": lambda cls, *args, **kwargs: object.__new__(other)}
    name = named(framework, type("Special", (stock(),), body))
    with pytest.raises(platform().ConfigurationError, match="whose __new__ makes a Other"):
        over(start, version, name)


# Patches


@pytest.fixture
def cumem(start: Start) -> Iterator[Any]:
    """vLLM's module, whose class is afterwards as before."""
    start()
    module: Any = importlib.import_module("vllm.device_allocator.cumem")
    kind = module.CuMemAllocator
    before = dict(vars(kind))
    yield module
    module.CuMemAllocator = kind
    for name in set(vars(kind)) - set(before):
        delattr(kind, name)
    for name, member in before.items():
        if vars(kind)[name] is not member:
            setattr(kind, name, member)


def written_in(module: str, name: str = "sleep") -> Any:
    """A function of a module that is not here."""

    def code(self: Any, *args: Any, **kwargs: Any) -> None: ...

    made = FunctionType(code.__code__, {"__name__": module}, name)
    made.__qualname__ = f"patch.<locals>.{name}"
    made.__module__ = module
    return made


def test_vllms_own_class_has_no_patches(cumem: Any) -> None:
    patches = importlib.import_module("poorwill.vllm._patches")
    assert "sleep" in vars(cumem.CuMemAllocator)
    assert patches.find(cumem.CuMemAllocator) == []
    assert patches.find(importlib.import_module("poorwill.vllm.allocator").Allocator) == []


UNSLOTH = "unsloth_zoo.vllm_utils"
ADVICE = "unset UNSLOTH_VLLM_STANDBY and set POORWILL_KEEP_AWAKE=weights"


@pytest.mark.parametrize("is_constructed", [False, True])
def test_unsloths_standby_is_refused(start: Start, cumem: Any, is_constructed: bool) -> None:
    engine = start() if is_constructed else None
    for name in ("__init__", "sleep", "wake_up", "print_memory_summary"):
        setattr(cumem.CuMemAllocator, name, written_in(UNSLOTH, name))
    kind = cumem.CuMemAllocator
    with pytest.raises(ValueError, match=ADVICE) as refused:
        (engine or start()).worker.init_device()
    assert type(refused.value).__name__ == "ConfigurationError"
    said = str(refused.value)
    assert said.startswith(
        f"vLLM's CuMemAllocator is patched: __init__ by {UNSLOTH} (patch.<locals>.__init__)"
    )
    assert all(f"{name} by {UNSLOTH}" in said for name in ("sleep", "wake_up", "print_memory_summary"))
    assert cumem.CuMemAllocator is kind


def test_unsloths_standby_is_not_needed_where_weights_stay_awake(
    start: Start, cumem: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("sleep", "wake_up"):
        setattr(cumem.CuMemAllocator, name, written_in(UNSLOTH, name))
    with caplog.at_level(logging.INFO, "vllm.poorwill"):
        start(POORWILL_KEEP_AWAKE="weights").load()
    assert "Poorwill does without it, since no sleep touches the weights" in caplog.text


def test_unsloths_standby_is_needed_where_another_tag_stays_awake(start: Start, cumem: Any) -> None:
    cumem.CuMemAllocator.sleep = written_in(UNSLOTH)
    with pytest.raises(ValueError, match=ADVICE):
        start(POORWILL_KEEP_AWAKE="kv_cache")


def hidden(stock: Any) -> Any:
    """One that takes the name and module of what it replaces."""

    @functools.wraps(stock)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    return wrapper


OTHERS: dict[str, Callable[[Any], object]] = {
    "sleep": lambda _: written_in("vllm_omni.patch"),
    "wake_up": hidden,
    "get_instance": lambda _: staticmethod(written_in("vllm_omni.patch", "get_instance")),
    "use_memory_pool": lambda stock: functools.partialmethod(hidden(stock)),
    "get_current_usage": lambda _: pytest.approx,
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("keep", ["", "weights"])
def test_every_other_patch_is_refused(start: Start, cumem: Any, name: str, keep: str) -> None:
    """Also beside one of Unsloth's."""
    setattr(cumem.CuMemAllocator, name, OTHERS[name](getattr(cumem.CuMemAllocator, name)))
    if name != "sleep":
        cumem.CuMemAllocator.sleep = written_in(UNSLOTH)
    with pytest.raises(
        ValueError, match="leave the patch away, or let the engine sleep with vLLM's"
    ) as refused:
        start(POORWILL_KEEP_AWAKE=keep)
    said = str(refused.value)
    module = {"sleep": "vllm_omni.patch", "get_instance": "vllm_omni.patch"}.get(name, "")
    assert f"is patched: {name} by {module}" in said
    assert "unsloth" not in said


def test_a_class_in_the_place_of_vllms_is_refused(start: Start, cumem: Any) -> None:
    body = {"sleep": written_in("a_framework.allocator")}
    cumem.CuMemAllocator = type("Theirs", (cumem.CuMemAllocator,), body)
    with pytest.raises(ValueError, match=r"sleep by a_framework\.allocator"):
        start()


def test_a_patch_of_ours_is_refused_by_the_next_engine(start: Start) -> None:
    first = start().load()
    kind = type(first.allocator)
    before = kind.sleep
    first.end()
    vars(importlib.import_module("vllm.device_allocator.cumem"))["CuMemAllocator"] = kind
    kind.sleep = written_in(UNSLOTH)
    try:
        with pytest.raises(ValueError, match=ADVICE):
            start()
    finally:
        kind.sleep = before
