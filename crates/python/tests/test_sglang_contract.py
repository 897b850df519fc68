"""What the plugin for SGLang, and the fake that tests it, assume about SGLang, compared with its releases.

SGLang cannot be imported without PyTorch. So its plugins' loader, its registry of hooks, its adapter and the
code that releases and resumes are run as they are, and what these import is played.
Those are all that are `TESTED`, or with little effort the newest.
"""

import ast
import asyncio
import contextlib
import dataclasses
import enum
import functools
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_sglang
import poorwill.compat.torch_memory_saver
import poorwill.sglang
import pytest
from poorwill.sglang import _adapter, _answers, _generations, _hooks, _occupation, _queues, _stages, _versions
from poorwill.sglang._generations import ALL, Generation
from poorwill.sglang._versions import Fit
from sglang_sources import sources_of
from sglang_sources.versions import held
from vllm_sources.tree import Tree

HERE = Path(__file__).resolve().parent
# What runs as it is lies in these.
PACKAGES = (
    *("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.managers"),
    "sglang.srt.managers.scheduler_components",
)
CONTEXTS = ("configure_subprocess", "region", "cuda_graph", "disable")

# By name: requests one after the other, each with its tags.
REQUESTS: dict[str, list[tuple[str, list[str] | None]]] = {
    "all": [("release", None), ("resume", None)],
    "all, by an empty list": [("release", []), ("resume", [])],
    **{tag: [("release", [tag]), ("resume", [tag])] for tag in _occupation._TAGS},
    "resumed by parts": [
        *[("release", None), ("resume", ["weights"]), ("resume", ["cuda_graph"]), ("resume", ["kv_cache"])]
    ],
    "in another order": [
        ("release", ["cuda_graph", "weights", "kv_cache"]),
        ("resume", ["kv_cache", "weights"]),
    ],
    "released twice": [("release", None), ("release", None), ("resume", None)],
    "released by parts, then all": [("release", ["weights"]), ("release", None), ("resume", None)],
    "resumed twice": [("release", None), ("resume", None), ("resume", None), ("release", ["weights"])],
    "resumed by parts, then all": [("release", None), ("resume", ["weights"]), ("resume", None)],
    "resumed and never released": [("resume", None), ("resume", ["weights"])],
    "a tag named twice": [("release", ["weights", "weights"]), ("resume", ["weights", "weights"])],
    "an unknown tag": [*[("release", ["nonsense"]), ("release", None)], ("resume", ["nonsense", "kv_cache"])],
    "an unknown tag resumed": [("resume", ["nonsense"])],
}


@pytest.fixture(params=held())
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sources(version: str) -> Path:
    return sources_of(version)


@pytest.fixture
def generation(version: str) -> Generation:
    return ALL[_versions.known(version)]()


@pytest.fixture(autouse=True)
def _chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POORWILL_SLEEP_MODE", "1")
    monkeypatch.setattr(poorwill.sglang, "_said", set())


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
    PREFILL = "prefill"
    DECODE = "decode"


@pytest.fixture
def original(
    version: str, sources: Path, generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """SGLang's registry of hooks. Its other modules can be imported meanwhile."""

    def play(name: str, module: ModuleType | None = None, **values: object) -> None:
        module = module or ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)

    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    for name in PACKAGES:
        play(name, __path__=[str(sources.joinpath(*name.split(".")))])
    parallel = SimpleNamespace(
        pp_size=1, pp_rank=0, **_settings(generation), tp_group=SimpleNamespace(cpu_group=fake_sglang.Group())
    )
    model = SimpleNamespace(weight_cache_mode="off")
    device = SimpleNamespace(synchronize=lambda: None)
    play(
        "torch",
        distributed=fake_sglang.Distributed,
        get_device_module=lambda: device,
        inference_mode=contextlib.nullcontext,
    )
    play("msgspec", Struct=Struct)
    play("zmq", Socket=object)
    play("torch_memory_saver", torch_memory_saver=None)
    play("sglang.version", __version__=version)
    play("sglang.srt.utils.common", is_xpu=lambda: False)
    play("sglang.srt.utils.weight_checker", overall_checksum=None)
    play("sglang.srt.disaggregation", __path__=[])
    play("sglang.srt.disaggregation.utils", DisaggregationMode=DisaggregationMode)
    if generation.has_queues:
        experts = SimpleNamespace(moe=SimpleNamespace(is_ep_scale_joiner=False))
        play(
            "sglang.srt.runtime_context",
            get_model=lambda: model,
            get_parallel=lambda: parallel,
            get_exec=lambda: experts,
        )
    play("sglang.srt.managers.io_struct", AnyClass("io_struct"))
    yield importlib.import_module("sglang.srt.plugins.hook_registry")
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


def hook(registry: Any, generation: Generation) -> None:
    """Puts our hooks in their places, in an SGLang that is what it says."""
    _hooks.install(Fit(generation, has_registry=False))
    registry.HookRegistry.apply_hooks()


def updater(sources: Path, generation: Generation) -> ast.ClassDef:
    """The class that releases and resumes."""
    module, _, name = generation.manager.rpartition(".")
    return definition(parsed(sources, module), name)


def _settings(generation: Generation) -> dict[str, bool]:
    """Those of a version's ranks."""
    named = "attn_dp_enabled" if generation.release >= (0, 5, 22) else "enable_dp_attention"
    return {named: False, "enable_dp_attention_local_control_broadcast": False}


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


def test_the_sources_are_those_of_the_version(sources: Path) -> None:
    metadata = sources / f"sglang-{sources.name}.dist-info" / "METADATA"
    assert f"\nVersion: {sources.name}\n" in metadata.read_text(encoding="utf-8")


# The loader of plugins, and its hooks.


@pytest.mark.parametrize(
    ("chosen", "is_called"),
    [(None, True), ("", True), ("poorwill", True), ("other, poorwill ", True), ("none", False)],
)
def test_its_loader_calls_ours_where_its_setting_allows_it(
    original: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    chosen: str | None,
    is_called: bool,
) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    if chosen is None:
        monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("SGLANG_PLUGINS", chosen)
    plugins = importlib.import_module("sglang.srt.plugins")
    [ours] = entry_points(group=plugins.GENERAL_PLUGINS_GROUP, name="poorwill")
    assert ours.value == "poorwill.sglang:register"
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            plugins.load_plugins()
    # It logs what fails, and goes on.
    theirs = [record for record in caplog.records if record.name.startswith(("sglang", "poorwill"))]
    assert [record.getMessage() for record in theirs if record.levelno >= logging.WARNING] == []
    assert len(original.HookRegistry._patched) == (4 if is_called else 0)
    # It says so where its log is set up by then.
    assert caplog.messages.count("Executed general plugin: poorwill") == int(is_called)


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("sglang.srt.managers.scheduler", "run_scheduler_process"),
        ("sglang.srt.managers.data_parallel_controller", "run_data_parallel_controller_process"),
        ("sglang.srt.entrypoints.engine", "Engine.__init__"),
    ],
)
def test_a_process_loads_plugins_before_it_reads_its_arguments(
    sources: Path, generation: Generation, module: str, function: str
) -> None:
    """Those that make adapters."""
    owner: ast.AST = parsed(sources, module)
    if "." in function:
        owner = definition(owner, function.partition(".")[0])
    [made] = [
        node
        for node in ast.iter_child_nodes(owner)
        if isinstance(node, ast.FunctionDef) and node.name == function.rpartition(".")[2]
    ]
    steps = [
        ast.unparse(node) for node in made.body if node is not made.body[0] or ast.get_docstring(made) is None
    ]
    if function == "run_data_parallel_controller_process" and generation.release < (0, 5, 22):
        # It only starts schedulers, by SGLang's own adapter.
        assert "load_plugins()" not in steps
        return
    assert "load_plugins()" in steps
    assert "server_args" not in " ".join(steps[: steps.index("load_plugins()")])


class Hooked:
    """What two calls of a class do after hooks have been put in their places."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hooks: Any) -> None:
        class Owner:
            @staticmethod
            def create(enable: object) -> str:
                return f"original {enable}"

            def call(self, request: object) -> str:
                return f"original {request}"

        self._owner = Owner
        self._hooks = hooks
        planted = ModuleType("planted")
        planted.__dict__["Owner"] = Owner
        monkeypatch.setitem(sys.modules, "planted", planted)

    def register(self) -> None:
        def create(enable: object) -> str:
            return f"replaced {enable}"

        def around(original: Any, owner: object, request: object) -> str:
            assert isinstance(owner, self._owner)
            return f"around ({original(owner, request)})"

        self._hooks.HookRegistry.register("planted.Owner.create", create, self._hooks.HookType.REPLACE)
        self._hooks.HookRegistry.register("planted.Owner.call", around, self._hooks.HookType.AROUND)

    def applied(self) -> list[str]:
        self._hooks.HookRegistry.apply_hooks()
        owner = self._owner
        return [owner.create(True), owner.create(enable=True), owner().create(True), owner().call("request")]


def test_the_fakes_registry_does_what_the_original_does(
    original: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_sglang.HookRegistry, "hooks", {})
    monkeypatch.setattr(fake_sglang.HookRegistry, "patched", set())
    seen = []
    for hooks in (original, fake_sglang):
        registered_once = Hooked(monkeypatch, hooks)
        registered_once.register()
        seen.append(first := registered_once.applied())
        registered_once.register()
        seen.append(registered_once.applied())
        assert seen[-1] == first, "a target gets its hooks once"
        hooks.HookRegistry.reset()
        registered_twice = Hooked(monkeypatch, hooks)
        registered_twice.register()
        registered_twice.register()
        seen.append(registered_twice.applied())
        hooks.HookRegistry.reset()
    once, _, twice = seen[:3]
    assert seen[3:] == seen[:3]
    assert once == [*["replaced True"] * 3, "around (original request)"]
    assert twice == [*["replaced True"] * 3, "around (around (original request))"]


def test_all_hooks_find_their_place(
    original: Any, generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = importlib.import_module(_adapter.ADAPTER)
    base = adapter.TorchMemorySaverAdapter
    monkeypatch.setattr(_hooks, "adapter_over", lambda over: ("ours", over))
    hook(original, generation)
    assert len(original.HookRegistry._patched) == 4
    # Other modules have imported the class before.
    assert adapter.TorchMemorySaverAdapter is base
    assert base.create(enable=True) == base.create(True) == ("ours", base)
    assert type(base.create(enable=False)) is adapter._TorchMemorySaverAdapterNoop


# The adapter.


def test_its_adapter_has_the_methods_that_ours_replaces(sources: Path) -> None:
    base = parameters(definition(parsed(sources, _adapter.ADAPTER), "TorchMemorySaverAdapter"))
    ours = parameters(definition(ast.parse(Path(_adapter.__file__).read_text()), "PoorwillAdapter"))
    assert base.pop("create") == "enable"
    del base["check_validity"]
    assert [ours.pop(f"{call}_all") for call in ("pause", "resume")] == ["self, tags, together"] * 2
    assert base == ours


def test_the_fakes_adapter_is_like_the_original(original: Any) -> None:
    modules = [importlib.import_module(_adapter.ADAPTER), fake_sglang._adapter()]
    for name in ("TorchMemorySaverAdapter", "_TorchMemorySaverAdapterNoop"):
        theirs, ours = (
            {
                member: type(inspect.getattr_static(getattr(module, name), member))
                for member in dir(getattr(module, name))
                if not member.startswith("_")
            }
            for module in modules
        )
        assert theirs == ours, name
    for module in modules:
        base, noop = module.TorchMemorySaverAdapter(), module.TorchMemorySaverAdapter.create(enable=False)
        tag = {"region": {"tag": "weights", "enable_cpu_backup": True}}
        for call in CONTEXTS:
            with getattr(noop, call)(**tag.get(call, {})):
                pass
            with pytest.raises(NotImplementedError):
                getattr(base, call)(**tag.get(call, {}))
        for call in ("pause", "resume"):
            assert getattr(noop, call)("weights") is None
            with pytest.raises(NotImplementedError):
                getattr(base, call)("weights")
        assert noop.enabled is False
        with pytest.raises(NotImplementedError):
            _ = base.enabled


def test_what_it_calls_of_an_adapter_ours_takes(sources: Path, generation: Generation) -> None:
    """Every use on NVIDIA's GPUs, by the names that it gives to adapters."""
    ours = parameters(definition(ast.parse(Path(_adapter.__file__).read_text()), "PoorwillAdapter"))
    saver = inspect.signature(poorwill.compat.torch_memory_saver.TorchMemorySaver.cuda_graph).parameters
    used: set[str] = set()
    graphs: set[str] = set()
    tags: set[str] = set()
    tree = Tree(sources)
    for path, module in tree.mentioning("memory_saver_adapter"):
        for node in ast.walk(module) if "/hardware_backend/" not in path else ():
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith(
                ("saver_adapter", "saver")
            ):
                used.add(node.attr)
            if not isinstance(node, ast.Call):
                continue
            called, names = ast.unparse(node.func), {keyword.arg or "**" for keyword in node.keywords}
            if called.endswith(("saver_adapter.region", "saver.region")):
                assert len(node.args) <= 2, path
                assert names <= {"tag", "enable_cpu_backup"}, path
                given = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "tag")]
                tags |= {ast.unparse(tag) for tag in given}
            # A capture is begun with arguments of two calls.
            if called == "graph_ctx" or (
                node.args and ast.unparse(node.args[0]).endswith("saver_adapter.cuda_graph")
            ):
                graphs |= names
    tree.forget()
    assert {"region", "cuda_graph", "pause", "resume", "enabled", "configure_subprocess"} <= used
    assert used <= {*ours, "check_validity"}
    known = {f"GPU_MEMORY_TYPE_{tag.upper()}" for tag in _occupation._TAGS}
    # Not every version has regions for graphs' memory beside the graphs.
    assert known - {"GPU_MEMORY_TYPE_CUDA_GRAPH"} <= tags <= known
    assert {"cuda_graph", "pool", "stream", "tag"} <= graphs <= set(saver)
    # Ours does in any case.
    assert ("enable_cpu_backup" in graphs) is (generation.release >= (0, 5, 21))


# Releasing and resuming.


def test_its_tags_are_those_that_ours_knows(original: Any) -> None:
    constants = importlib.import_module("sglang.srt.constants")
    assert constants.GPU_MEMORY_ALL_TYPES == list(_occupation._TAGS) == list(fake_sglang.Occupation.ALL)


def test_its_requests_have_tags_that_can_be_set(sources: Path) -> None:
    requests = parsed(sources, _answers.REQUESTS)
    for call in ("Release", "Resume"):
        request = definition(requests, f"{call}MemoryOccupationReqInput")
        [tags] = [node for node in request.body if isinstance(node, ast.AnnAssign)]
        assert "frozen" not in " ".join(map(ast.unparse, request.decorator_list))
        assert ast.unparse(tags) == "tags: Optional[List[str]] = None"
        answer = definition(requests, f"{call}MemoryOccupationReqOutput")
        bases = [definition(requests, ast.unparse(base)) for each in (request, answer) for base in each.bases]
        assert len(bases) == 2
        for each in (request, answer, *bases):
            assert {keyword.arg for keyword in each.keywords} <= {"kw_only", "tag", "array_like"}, (
                "none is frozen"
            )
        required = [
            node
            for each in (answer, *bases)
            for node in each.body
            if isinstance(node, ast.AnnAssign) and node.value is None
        ]
        assert required == [], "an answer is made without arguments"


def test_a_request_reaches_a_manager_as_the_one_argument(sources: Path, generation: Generation) -> None:
    manager = updater(sources, generation)
    methods = parameters(manager)
    table = [
        ast.unparse(node)
        for node in ast.walk(parsed(sources, "sglang.srt.managers.scheduler"))
        if isinstance(node, ast.Tuple)
    ]
    calls = [
        ast.unparse(node)
        for node in definition(parsed(sources, "sglang.utils"), "TypeBasedDispatcher").body
        if isinstance(node, ast.FunctionDef) and node.name == "__call__"
    ]
    for call in ("release", "resume"):
        assert methods[f"{call}_memory_occupation"] == "self, recv_req"
        holder = "self.weight_updater" if generation.has_queues else "self"
        entry = f"({call.title()}MemoryOccupationReqInput, {holder}.{call}_memory_occupation)"
        assert entry in table
    assert set(re.findall(r"fn\(.*?\)", calls[0])) == {"fn(obj)"}


class Recorder:
    """An adapter, the model and the GPU of a manager: writes down what is done with them, in order."""

    def __init__(self, is_poorwill: bool) -> None:
        self.is_poorwill = is_poorwill
        self.done: list[str] = []
        self.fails = False

    def pause(self, tag: str) -> None:
        self.done.append(f"pause {tag}")

    def resume(self, tag: str) -> None:
        self.done.append(f"resume {tag}")

    def pause_all(self, tags: list[str], together: object) -> bool:
        self.done += [f"pause {tag}" for tag in tags]
        return True

    def resume_all(self, tags: list[str], together: object) -> bool:
        self.done += [f"resume {tag}" for tag in tags if tag in _occupation._TAGS]
        return True

    def synchronize(self) -> None:
        self.done.append("synchronize")

    def named_buffers(self) -> list[tuple[str, "Recorder"]]:
        return [("buffer", self)]

    # The model's only buffer.

    def detach(self) -> "Recorder":
        return self

    def clone(self) -> "Recorder":
        self._fail()
        self.done.append("copy out")
        return self

    def copy_(self, other: "Recorder") -> None:
        self._fail()
        assert other is self
        self.done.append("copy in")

    def _fail(self) -> None:
        if self.fails:
            raise MemoryError("no memory for buffers")

    def __setitem__(self, place: object, other: "Recorder") -> None:
        assert place is ...
        self.copy_(other)


def manager_of_sglang(generation: Generation, recorder: Recorder, scheduler: Any = None) -> Any:
    """What releases and resumes in a version: its manager, or a scheduler that is nothing else."""
    sys.modules["torch"].__dict__["get_device_module"] = lambda: recorder
    module, _, name = generation.manager.rpartition(".")
    owner = getattr(importlib.import_module(module), name)
    scheduler = scheduler or SimpleNamespace(disaggregation_mode=None, _engine_paused=False)
    scheduler.server_args = SimpleNamespace(**_settings(ALL[0, 5, 12]()))
    parts = {
        "tp_worker": SimpleNamespace(model_runner=SimpleNamespace(model=recorder)),
        "draft_worker": None,
        "memory_saver_adapter": recorder,
        "flush_cache": lambda: True,
        "is_fully_idle": _idle(generation),
        "tp_cpu_group": fake_sglang.Group(),
    }
    if not generation.has_queues:
        made = type("Scheduler", (owner,), {})()
        vars(made).update({**parts, **vars(scheduler), "offload_tags": set(), "pp_size": 1, "pp_rank": 0})
        return made
    made = {each.name for each in dataclasses.fields(owner) if each.init}
    return owner(scheduler=scheduler, **{name: part for name, part in parts.items() if name in made})


def _idle(generation: Generation) -> Any:
    """A function with the parameters of the version's."""
    return (lambda ignore_waiting: True) if generation.release >= (0, 5, 21) else lambda: True


def hooked_fake(generation: Generation, recorder: Recorder) -> Any:
    """The fake with our hooks around."""
    fake = fake_sglang.Occupation()
    fake.begin(recorder, recorder, recorder.synchronize)
    scheduler = SimpleNamespace(server_args=SimpleNamespace(**_settings(ALL[0, 5, 12]())))
    vars(fake).update(vars(scheduler), scheduler=scheduler, pp_size=1, pp_rank=0)
    for call in ("release", "resume"):
        name = f"{call}_memory_occupation"
        hook, original = getattr(_occupation, call), getattr(fake_sglang.Occupation, name)
        vars(fake)[name] = functools.partial(hook, generation, original, fake)
    return fake


def said(manager: Any, kind: str, tags: list[str] | None) -> str:
    """How a request ends."""
    request = SimpleNamespace(tags=tags, rid=None)
    try:
        answer = getattr(manager, f"{kind}_memory_occupation")(request)
    except KeyError as missing:
        return f"fails for {missing}"
    assert request.tags == tags, "a request is not changed"
    kinds = ("Answer", f"{kind.title()}MemoryOccupationReqOutput")
    assert type(answer).__name__ in kinds
    return "answered"


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "without ours"])
@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS)
def test_the_fake_does_what_the_original_does(
    original: Any, generation: Generation, requests: list[tuple[str, list[str] | None]], is_ours: bool
) -> None:
    hook(original, generation)
    theirs, ours = Recorder(is_ours), Recorder(is_ours)
    manager: Any = manager_of_sglang(generation, theirs)
    fake = hooked_fake(generation, ours)
    for kind, tags in requests:
        assert said(manager, kind, tags) == said(fake, kind, tags)
        assert theirs.done == ours.done
        assert manager.offload_tags == fake.offload_tags


@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS)
def test_with_ours_the_original_never_reads_or_pauses_what_is_paused(
    original: Any, generation: Generation, requests: list[tuple[str, list[str] | None]]
) -> None:
    # Twice, which is harmless.
    _hooks.install(Fit(generation, has_registry=False))
    hook(original, generation)
    recorder = Recorder(is_poorwill=True)
    manager = manager_of_sglang(generation, recorder)
    assert {said(manager, kind, tags) for kind, tags in requests} == {"answered"}
    paused: set[str] = set()
    for done in recorder.done:
        call, _, tag = done.partition(" ")
        if call == "copy":
            assert "weights" not in paused, recorder.done
        elif call == "pause":
            assert tag not in paused, recorder.done
            paused.add(tag)
        elif call == "resume":
            paused.remove(tag)
    assert paused == manager.offload_tags - {"nonsense"}


def test_all_is_done_in_this_order(original: Any, generation: Generation) -> None:
    hook(original, generation)
    recorder = Recorder(is_poorwill=True)
    manager = manager_of_sglang(generation, recorder)
    assert said(manager, "release", None) == "answered"
    assert recorder.done == ["copy out", "synchronize", "pause kv_cache", "pause weights", "pause cuda_graph"]
    recorder.done.clear()
    assert said(manager, "resume", None) == "answered"
    assert recorder.done == ["resume kv_cache", "resume weights", "resume cuda_graph", "copy in"]


def disaggregated(mode: str) -> SimpleNamespace:
    """A scheduler of a disaggregated server."""
    modes: Any = importlib.import_module("sglang.srt.disaggregation.utils").DisaggregationMode
    queues = {name: fake_sglang.Queue() for name in _queues.NAMES if mode.lower() in name}
    scheduler = SimpleNamespace(disaggregation_mode=modes[mode], _engine_paused=False, **queues)
    if mode == "DECODE":
        # It is called before the other queue, and registers nothing.
        nothing = dict.fromkeys((_queues.RELEASE, _queues.RESUME), lambda: None)
        scheduler.disagg_decode_transfer_queue = SimpleNamespace(**nothing)
    [scheduler.queue] = queues.values()
    return scheduler


def stashed(manager: Any) -> Any:
    """The copies of buffers that it keeps."""
    return getattr(manager, "stashed_model_static_state", None)


@pytest.mark.parametrize("mode", ["PREFILL", "DECODE"])
@pytest.mark.parametrize("fault", ["buffers", "transfers"])
@pytest.mark.parametrize("call", ["release", "resume"])
@pytest.mark.parametrize("tags", [None, ["weights"], ["kv_cache"]], ids=["all", "weights", "cache"])
def test_what_failed_in_the_original_is_taken_back(
    original: Any, generation: Generation, call: str, tags: list[str] | None, fault: str, mode: str
) -> None:
    hook(original, generation)
    scheduler = disaggregated(mode)
    recorder = Recorder(is_poorwill=True)
    manager = manager_of_sglang(generation, recorder, scheduler)
    transfers = scheduler.queue.kv_manager
    if call == "resume":
        assert said(manager, "release", None) == "answered"
    scheduler.queue.queue.append("waits")
    held = manager.offload_tags
    before = set(held), transfers.is_registered, stashed(manager)
    recorder.done.clear()
    recorder.fails = fault == "buffers"
    transfers.fault = "" if recorder.fails else {"release": "deregister", "resume": "register"}[call]
    if tags == (["kv_cache"] if recorder.fails else ["weights"]) or (
        fault == "transfers" and not generation.has_queues
    ):
        assert said(manager, call, tags) == "answered", "this step is of other tags"
        return
    words = {"": "no memory for buffers", "deregister": "not closed", "register": "not registered"}
    with pytest.raises(_answers.OccupationError, match=f"{words[transfers.fault]}; everything is as it was$"):
        said(manager, call, tags)
    assert manager.offload_tags is held, "the scheduler has it, too"
    assert (set(held), transfers.is_registered, stashed(manager)) == before
    assert manager.memory_saver_adapter is recorder
    changes = [done for done in recorder.done if done.startswith(("pause", "resume"))]
    number = len(tags or _occupation._TAGS)
    assert [change.partition(" ")[0] for change in changes] == (
        [] if call == "release" else ["resume"] * number + ["pause"] * number
    )
    if call == "resume":
        assert scheduler.queue.queue == ["waits"]
    recorder.fails, transfers.fault = False, ""
    if call == "release":
        assert said(manager, "release", None) == "answered"
    assert said(manager, "resume", None) == "answered"
    assert (held, transfers.is_registered) == (set(), True)


def test_queues_register_caches_and_do_nothing_else(sources: Path, generation: Generation) -> None:
    """By which a resume is taken back. The third queue has nothing to take back."""
    bodies: dict[tuple[str, str], str] = {}
    for module, name in (
        *(("prefill", "PrefillBootstrapQueue"), ("decode", "DecodePreallocQueue")),
        ("decode", "DecodeTransferQueue"),
    ):
        queue = definition(parsed(sources, f"sglang.srt.disaggregation.{module}"), name)
        for node in queue.body:
            if isinstance(node, ast.FunctionDef) and node.name in (_queues.RELEASE, _queues.RESUME):
                assert [argument.arg for argument in node.args.args] == ["self"]
                bodies[name, node.name] = "\n".join(map(ast.unparse, node.body))
    if not generation.has_queues:
        assert bodies == {}
        return
    register = (
        "if hasattr(self.kv_manager, 'register_buffer_to_engine'):\n"
        "    self.kv_manager.register_buffer_to_engine()"
    )
    for name in ("PrefillBootstrapQueue", "DecodePreallocQueue"):
        assert bodies[name, _queues.RESUME] == register
        # The last step.
        assert bodies[name, _queues.RELEASE].endswith(register.replace("register", "deregister"))
    assert bodies["DecodeTransferQueue", _queues.RESUME].endswith("pass")
    manager = ast.unparse(updater(sources, generation))
    named = {*re.findall(r"'(disagg_\w+_queue)'", manager)}
    assert named == {*_queues.NAMES, "disagg_decode_transfer_queue"}


def test_the_originals_barriers_are_of_a_group_that_ours_replaces(
    sources: Path, generation: Generation
) -> None:
    manager = updater(sources, generation)
    methods = {node.name: node for node in manager.body if isinstance(node, ast.FunctionDef)}
    for call in ("release", "resume"):
        steps = [
            ast.unparse(n) for n in ast.walk(methods[f"{call}_memory_occupation"]) if isinstance(n, ast.Call)
        ]
        collective = [step for step in steps if step.startswith("torch.distributed.")]
        assert collective == ["torch.distributed.barrier(self.tp_cpu_group)"]
    assert "frozen" not in " ".join(ast.unparse(each) for each in manager.decorator_list)


def test_not_all_ranks_get_a_request_at_once_where_ours_leaves_it_to_them(
    sources: Path, generation: Generation
) -> None:
    """By the conditions of what receives requests."""
    named = "scheduler_components.request_receiver" if generation.has_queues else "scheduler"
    receiver = ast.unparse(parsed(sources, f"sglang.srt.managers.{named}"))
    local = "enable_dp_attention_local_control_broadcast"
    if generation.release < (0, 5, 20):
        splits, late = "self.server_args.enable_dp_attention", f"self.server_args.{local}"
    else:
        splits = f"get_parallel().{next(iter(_settings(generation)))}"
        late = f"get_parallel().{local} or get_exec().moe.is_ep_scale_joiner"
    assert f"if {splits}:\n" in receiver
    assert f"_local_ctrl = {late}\n" in receiver
    ours = ast.unparse(ast.parse(inspect.getsource(_generations)))
    owners = {
        "self.server_args": "arguments",
        "get_parallel()": "parallel",
        "get_exec()": "context.get_exec()",
    }
    for theirs, name in owners.items():
        splits, late = splits.replace(theirs, name), late.replace(theirs, name)
    assert splits in ours
    assert late in ours


def settings_of(generation: Generation, manager: Any) -> Iterator[Any]:
    """What a scheduler knows of its ranks by."""
    if generation.release < (0, 5, 20):
        yield generation.scheduler(manager).server_args
    else:
        yield importlib.import_module(_generations.CONTEXT).__dict__["get_parallel"]()


def test_it_leaves_requests_to_ranks_that_get_them_later(original: Any, generation: Generation) -> None:
    hook(original, generation)
    recorder = Recorder(is_poorwill=True)
    manager = manager_of_sglang(generation, recorder)
    for settings in settings_of(generation, manager):
        vars(settings).update(dict.fromkeys(_settings(generation), True))
    assert said(manager, "release", None) == "answered"
    assert recorder.done == ["pause kv_cache", "copy out", "pause weights", "pause cuda_graph", "synchronize"]


# Stages of a pipeline.


RECEIVES = (
    "recv_reqs = self.ingest_requests()",
    "recv_reqs = self.request_receiver.recv_requests()\n",
    "recv_reqs = self.recv_requests()\n",
)
"""How a stage receives requests. The first carries them out, too."""

_RPC = "if self.ipc_channels.recv_from_rpc is not None: sock_send(self.ipc_channels.recv_from_rpc, output)"
_TOKENIZER = "self.ipc_channels.send_to_tokenizer.send_output(output, recv_req)"
ANSWERS = {
    (0, 5, 12): (
        "if not isinstance(output, RpcReqOutput): self.send_to_tokenizer.send_output(output, recv_req) "
        "elif self.recv_from_rpc is not None: self.recv_from_rpc.send_pyobj(output)"
    ),
    (0, 5, 15): f"if not isinstance(output, RpcReqOutput): {_TOKENIZER} el{_RPC}",
    (0, 5, 20): (
        "if self.rust_server is not None: self.rust_server.push_control_output(recv_req, output) "
        f"elif isinstance(output, RpcReqOutput): {_RPC} else: {_TOKENIZER}"
    ),
    (0, 5, 23): (
        f"if self.rust_server is None and isinstance(output, RpcReqOutput): {_RPC} "
        "else: self.send_control_output(output, recv_req)"
    ),
}
"""What SGLang does with the answer to a request, from which release on."""


def test_stages_pass_on_what_they_have_received(sources: Path, generation: Generation) -> None:
    """In each of its loops, and without waiting for the next one."""
    pipeline = definition(parsed(sources, "sglang.srt.managers.scheduler_pp_mixin"), "SchedulerPPMixin")
    methods = {node.name: node for node in pipeline.body if isinstance(node, ast.FunctionDef)}
    assert [argument.arg for argument in methods[_stages._SEND].args.args] == ["self", "data", "async_send"]
    loops = [node for name, node in methods.items() if name.startswith("event_loop_pp")]
    assert len(loops) == 3
    for loop in loops:
        text = ast.unparse(loop)
        received, sent = (
            next(call for call in RECEIVES if call in text),
            f"self.{_stages._SEND}(recv_reqs, async_send=True)",
        )
        assert text.count(received) == text.count(sent) == 1
        assert text.index(received) < text.index(sent)
    scheduler = definition(parsed(sources, "sglang.srt.managers.scheduler"), "Scheduler")
    assert "__slots__" not in {ast.unparse(n) for n in ast.walk(scheduler) if isinstance(n, ast.Name)}
    steps = {node.name: ast.unparse(node) for node in scheduler.body if isinstance(node, ast.FunctionDef)}
    if "ingest_requests" in steps:
        assert "self.process_input_requests(recv_reqs)\n    return recv_reqs" in steps["ingest_requests"]
    assert "output = self._request_dispatcher(recv_req)\n" in steps["process_input_requests"]
    # What ours does with the output of a request that was kept.
    answering = steps["process_input_requests"].partition("if output is not None:")[2]
    answers = max((release, said) for release, said in ANSWERS.items() if release <= generation.release)[1]
    assert " ".join(answering.split()).startswith(answers)
    if generation.has_queues:
        assert "scheduler=self" in steps["init_weight_updater"]


def test_a_stage_that_is_busy_refuses_at_once(original: Any, generation: Generation) -> None:
    """Others may wait for its work, and it must not wait for them."""
    hook(original, generation)
    manager = manager_of_sglang(generation, Recorder(is_poorwill=True))
    if generation.has_queues:
        pipeline = importlib.import_module(_generations.CONTEXT).__dict__["get_parallel"]()
    else:
        pipeline = manager
    manager.is_fully_idle = lambda **_: False
    pipeline.pp_size = 2
    for pipeline.pp_rank in range(2):
        with pytest.raises(AssertionError, match="only when server is idle"):
            said(manager, "release", None)


# Errors.


def test_its_structures_have_the_field_for_marks_and_errors(sources: Path) -> None:
    base = definition(parsed(sources, _answers.REQUESTS), "BaseReq")
    fields = [ast.unparse(node) for node in base.body if isinstance(node, ast.AnnAssign)]
    assert any(field.startswith("rid: Optional[") for field in fields)


def test_its_server_answers_with_errors_of_a_request(sources: Path, generation: Generation) -> None:
    control = definition(
        parsed(sources, "sglang.srt.managers.tokenizer_control_mixin"), "TokenizerControlMixin"
    )
    calls = {node.name: ast.unparse(node) for node in control.body if isinstance(node, ast.AsyncFunctionDef)}
    server = {
        node.name: ast.unparse(node)
        for node in parsed(sources, "sglang.srt.entrypoints.http_server").body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for call in ("release", "resume"):
        name = f"{call}_memory_occupation"
        assert f"await self.{name}_communicator(obj)" in calls[name]
        assert "except Exception as e:\n        return _create_error_response(e)" in server[name]
    # Before, each error was a bad request.
    has_status = "status_code=getattr(e, 'status_code', " in server["_create_error_response"]
    assert has_status is (generation.release >= (0, 5, 20))


async def asked(
    communicators: Any, request: Any, answers: list[Any], *, is_function: bool
) -> tuple[list[Any], list[Any]]:
    """What was sent for a request, and what is returned to who asked."""
    sent: list[Any] = []
    # The first takes a socket.
    sender: Any = sent.append if is_function else SimpleNamespace(send_pyobj=sent.append)
    communicator = communicators.FanOutCommunicator(sender, len(answers))
    asking = asyncio.ensure_future(communicator(request))
    while not sent and not asking.done():
        await asyncio.sleep(0)
    for answer in answers:
        communicator.handle_recv(answer)
    return sent, await asking


@pytest.mark.parametrize("call", ["Release", "Resume"])
def test_errors_reach_who_asked(original: Any, generation: Generation, call: str) -> None:
    hook(original, generation)
    communicators = importlib.import_module("sglang.srt.managers.communicator")
    requests = importlib.import_module(_answers.REQUESTS)
    request = getattr(requests, f"{call}MemoryOccupationReqInput")()
    is_function = generation.has_queues

    def answer(error: str | None = None) -> Any:
        made = getattr(requests, f"{call}MemoryOccupationReqOutput")()
        made.rid = error
        return made

    sent, answers = asyncio.run(asked(communicators, request, [answer(), answer()], is_function=is_function))
    assert [each.rid for each in sent] == [_answers.MARK]
    assert len(answers) == 2
    with pytest.raises(_answers.OccupationError, match=r"^rank 1 cannot; nor can 3$") as raised:
        asyncio.run(
            asked(
                communicators,
                request,
                [answer("rank 1 cannot"), answer(), answer("nor can 3")],
                is_function=is_function,
            )
        )
    assert raised.value.status_code == 503
    # Others are not touched.
    other = SimpleNamespace(rid=None)
    sent, _ = asyncio.run(
        asked(communicators, other, [SimpleNamespace(rid="its own")], is_function=is_function)
    )
    assert sent[0].rid is None


def test_without_ours_repeating_ends_a_scheduler(original: Any, generation: Generation) -> None:
    """What the hooks are for: a copy of what is not there, and an error."""
    hook(original, generation)
    recorder = Recorder(is_poorwill=False)
    manager = manager_of_sglang(generation, recorder)
    for _ in range(2):
        assert said(manager, "release", ["weights"]) == "answered"
    assert recorder.done == ["copy out", "pause weights", "synchronize"] * 2
    assert said(manager, "resume", ["weights"]) == "answered"
    assert said(manager, "resume", ["weights"]) == "fails for 'weights'"
