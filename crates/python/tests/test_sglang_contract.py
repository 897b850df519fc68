"""What the plugin for SGLang, and the fake that tests it, assume about SGLang, compared with its releases.

SGLang cannot be imported without PyTorch. So its registry of hooks, its adapter and the code that releases
and resumes are run as they are, and what these import is played. `POORWILL_SGLANG_SOURCES` names a folder
with one folder for each version. `cargo xtask` makes it and sets the variable.
"""

import ast
import contextlib
import enum
import importlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_sglang
import poorwill.sglang
import pytest
from poorwill.sglang import _adapter, _occupation

HERE = Path(__file__).resolve().parent
VERSIONS = sorted(pin.stem for pin in (HERE / "sglang_sources").glob("*.txt"))
VARIABLE = "POORWILL_SGLANG_SOURCES"
# What runs as it is lies in these.
PACKAGES = (
    *("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.managers", "sglang.srt.plugins"),
    "sglang.srt.managers.scheduler_components",
)
REQUESTS = [
    *[("release", ()), ("release", ()), ("resume", ("weights",)), ("resume", ("cuda_graph", "weights"))],
    *[("resume", ()), ("resume", ()), ("release", ("kv_cache",)), ("release", ("weights", "kv_cache"))],
    *[("release", ("nonsense",)), ("resume", ("nonsense", "kv_cache")), ("resume", ("weights",))],
]


@pytest.fixture(params=VERSIONS)
def sources(request: pytest.FixtureRequest) -> Path:
    named = os.environ.get(VARIABLE)
    folder = Path(named or "", request.param)
    if not named or not (folder / "sglang/version.py").is_file():
        pytest.skip(f"{VARIABLE} names no folder with SGLang {request.param}; `cargo xtask vllm` fetches it")
    return folder


class AnyClass(ModuleType):
    """A module that has whichever class is imported from it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)


class Struct:
    """`msgspec.Struct`, as far as classes are made of it."""

    def __init_subclass__(cls, **_: object) -> None: ...


class DisaggregationMode(enum.Enum):
    NULL = "null"


@pytest.fixture
def original(sources: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's registry of hooks. Its other modules can be imported meanwhile."""

    def play(name: str, module: ModuleType | None = None, **values: object) -> None:
        module = module or ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)

    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    for name in PACKAGES:
        play(name, __path__=[str(sources.joinpath(*name.split(".")))])
    group = SimpleNamespace(tp_group=SimpleNamespace(cpu_group=None))
    model = SimpleNamespace(weight_cache_mode="off")
    device = SimpleNamespace(synchronize=lambda: None)
    play(
        "torch",
        distributed=SimpleNamespace(barrier=lambda *_: None),
        get_device_module=lambda: device,
        inference_mode=contextlib.nullcontext,
    )
    play("msgspec", Struct=Struct)
    play("torch_memory_saver", torch_memory_saver=None)
    play("sglang.srt.utils.common", is_xpu=lambda: False)
    play("sglang.srt.utils.weight_checker", overall_checksum=None)
    play("sglang.srt.disaggregation", __path__=[])
    play("sglang.srt.disaggregation.utils", DisaggregationMode=DisaggregationMode)
    play("sglang.srt.runtime_context", get_model=lambda: model, get_parallel=lambda: group)
    play("sglang.srt.managers.io_struct", AnyClass("io_struct"))
    yield importlib.import_module("sglang.srt.plugins.hook_registry")
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


def parsed(sources: Path, module: str) -> ast.Module:
    path = sources.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text())


def definition(module: ast.AST, name: str) -> ast.ClassDef:
    [found] = [node for node in ast.walk(module) if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def parameters(owner: ast.ClassDef) -> dict[str, str]:
    """By method: what can be given to it, without types."""

    def plain(arguments: ast.arguments) -> str:
        for argument in ast.walk(arguments):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        return ast.unparse(arguments)

    return {node.name: plain(node.args) for node in owner.body if isinstance(node, ast.FunctionDef)}


def test_it_looks_for_plugins_where_ours_is(sources: Path) -> None:
    plugins = parsed(sources, "sglang.srt.plugins")
    constants = {
        ast.unparse(node.targets[0]): ast.literal_eval(node.value)
        for node in plugins.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    group = constants["GENERAL_PLUGINS_GROUP"]
    assert {"poorwill": "poorwill.sglang:register"}.items() <= {
        point.name: point.value for point in entry_points(group=group)
    }.items()
    assert "envs.SGLANG_PLUGINS.get()" in ast.unparse(plugins)


def test_its_adapter_has_the_methods_that_ours_replaces(sources: Path) -> None:
    base = parameters(definition(parsed(sources, _adapter.ADAPTER), "TorchMemorySaverAdapter"))
    ours = parameters(definition(ast.parse(Path(_adapter.__file__).read_text()), "PoorwillAdapter"))
    assert base.pop("create") == "enable"
    del base["check_validity"]
    assert base == ours


def test_its_requests_have_tags(sources: Path) -> None:
    requests = parsed(sources, _occupation._REQUESTS)
    for call in ("Release", "Resume"):
        fields = definition(requests, f"{call}MemoryOccupationReqInput").body
        assert any(isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "tags" for node in fields)
        answer = definition(requests, f"{call}MemoryOccupationReqOutput").body
        required = [node for node in answer if isinstance(node, ast.AnnAssign) and node.value is None]
        assert required == [], "an answer is made without arguments"


def test_all_hooks_find_their_place(original: Any) -> None:
    poorwill.sglang.register()
    original.HookRegistry.apply_hooks()
    assert len(original.HookRegistry._patched) == 3
    adapter = importlib.import_module(_adapter.ADAPTER)
    assert not adapter.TorchMemorySaverAdapter.create(enable=False).enabled
    constants = importlib.import_module("sglang.srt.constants")
    assert set(constants.GPU_MEMORY_ALL_TYPES) == set(_occupation._TAGS)


class Recorder:
    """An adapter that writes down what it is asked for."""

    def __init__(self, is_poorwill: bool) -> None:
        self.is_poorwill = is_poorwill
        self.calls: list[tuple[str, str]] = []

    def pause(self, tag: str) -> None:
        self.calls.append(("pause", tag))

    def resume(self, tag: str) -> None:
        self.calls.append(("resume", tag))


def manager_of_sglang(adapter: Recorder) -> Any:
    model = SimpleNamespace(named_buffers=list)
    updater = importlib.import_module(fake_sglang.UPDATER)
    return updater.SchedulerWeightUpdaterManager(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)),
        draft_worker=None,
        memory_saver_adapter=adapter,
        flush_cache=lambda: True,
        is_fully_idle=lambda ignore_waiting: True,
    )


class Buffer:
    """A tensor of the fake's model."""

    def clone(self) -> "Buffer":
        return self

    def copy_(self, other: "Buffer") -> None: ...


def test_the_fake_calls_the_adapter_as_the_original_does(original: Any) -> None:
    poorwill.sglang.register()
    original.HookRegistry.apply_hooks()
    theirs, ours = Recorder(is_poorwill=True), Recorder(is_poorwill=True)
    manager = manager_of_sglang(theirs)
    fake: Any = fake_sglang.Manager(ours, Buffer(), lambda: None)
    calls = {"release": _occupation.release, "resume": _occupation.resume}
    for kind, tags in REQUESTS:
        getattr(manager, f"{kind}_memory_occupation")(SimpleNamespace(tags=list(tags) or None))
        called = getattr(fake_sglang.Manager, f"{kind}_memory_occupation")
        calls[kind](called, fake, fake_sglang.Request(*tags))
        assert theirs.calls == ours.calls, (kind, tags)
        assert manager.offload_tags == fake.offload_tags
    assert [kind for kind, _ in theirs.calls].count("pause") == 5


def test_without_ours_repeating_a_resume_ends_a_scheduler(original: Any) -> None:
    poorwill.sglang.register()
    original.HookRegistry.apply_hooks()
    manager = manager_of_sglang(Recorder(is_poorwill=False))
    with pytest.raises(KeyError):
        manager.resume_memory_occupation(SimpleNamespace(tags=None))
