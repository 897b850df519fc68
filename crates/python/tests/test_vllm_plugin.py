"""How the plugin finds its way into vLLM: settings, hooks on imports, and who gets our worker.

No driver is needed, and no vLLM: its modules are made here, or run from its sources.
"""

import importlib
import importlib.resources
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import poorwill
import pytest
from fake_vllm.loader import Loader, Stub
from poorwill.vllm import _environment, _hooks, _imports, _platform, _versions
from poorwill.vllm._hooks import Hook
from poorwill.vllm._imports import when_imported
from poorwill.vllm._platform import ConfigurationError
from poorwill.vllm._versions import UnsupportedVllmError
from vllm_sources import needs_sources, sources_of
from vllm_sources.versions import held

REGISTRY = "vllm.device_allocator.sleep_mode_backend"
VARIABLES = (
    *("POORWILL_SLEEP_MODE", "POORWILL_BUDGET", "POORWILL_HOST_BUDGET", "POORWILL_OFFLOAD"),
    *("POORWILL_PAGEABLE", "POORWILL_PREPARE", "POORWILL_KEEP_BACKUPS", "POORWILL_WAKE_TIMEOUT"),
    *("POORWILL_RANKS_TIMEOUT", "POORWILL_RANKS_FOLDER", "POORWILL_KEEP_AWAKE", "POORWILL_CACHE_LIMIT"),
    *("POORWILL_DISK", "POORWILL_DISK_LIMIT", "POORWILL_COMPRESS", "POORWILL_TRITON"),
    "POORWILL_LINKS",
    *("POORWILL_TRITON_SHARED_MEMORY", "POORWILL_GRAPHS", "POORWILL_RECORD"),
    *("POORWILL_LEND", "POORWILL_BROKER", "POORWILL_PEER_COPIES"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
)


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has just begun, with vLLM 0.33 in it."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_platform, "_was_chosen", False)
    monkeypatch.setattr(_hooks, "_refusals", [])
    monkeypatch.setattr(_imports, "_waiting", {})
    monkeypatch.setattr(_imports, "_done", set())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    # There is no vLLM to look at.
    monkeypatch.setattr(Hook, "look", lambda hook: None)
    version(monkeypatch, "0.33.0")


def version(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    module = ModuleType("vllm.version")
    module.__dict__["__version__"] = number
    monkeypatch.setitem(sys.modules, "vllm.version", module)


# Settings


def test_without_settings_everything_has_a_default() -> None:
    read = _environment.read({})
    assert read == _environment.Environment()
    assert (read.sleep_mode, read.budget, read.host_budget_bytes) == (False, None, None)
    assert (read.pageable, read.prepare) == (False, None)
    assert read.wake_timeout_s == 2.0
    assert (read.keep_backups, read.keep_awake, read.compress) == (None, (), "auto")
    assert (read.disk, read.disk_limit_bytes) == (None, None)
    assert _environment.read({name: " " for name in VARIABLES}) == read


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("SLEEP_MODE", "1", "sleep_mode", True),
        ("SLEEP_MODE", " 0 ", "sleep_mode", False),
        ("OFFLOAD", "1", "offload", True),
        ("BUDGET", "22528MiB", "budget", "22528MiB"),
        ("BUDGET", "0.92", "budget", "0.92"),
        ("HOST_BUDGET", "64GiB", "host_budget_bytes", 64 << 30),
        ("HOST_BUDGET", "0", "host_budget_bytes", 0),
        ("CACHE_LIMIT", "2GiB", "cache_limit_bytes", 2 << 30),
        ("CACHE_LIMIT", "128MiB", "cache_limit_bytes", 128 << 20),
        ("PAGEABLE", "1", "pageable", True),
        ("PREPARE", "0", "prepare", False),
        ("GRAPHS", "0", "graphs", False),
        ("LEND", "1", "lend", True),
        ("BROKER", "/no/such/broker.sock", "broker", "/no/such/broker.sock"),
        ("KEEP_BACKUPS", "0", "keep_backups", False),
        ("KEEP_BACKUPS", "1", "keep_backups", True),
        ("KEEP_AWAKE", "weights", "keep_awake", ("weights",)),
        ("KEEP_AWAKE", " weights, kv_cache,weights,", "keep_awake", ("weights", "kv_cache")),
        *(("COMPRESS", word, "compress", word) for word in ("auto", "off", "always")),
        ("LINKS", "1", "links", True),
        ("DISK", "/tmp", "disk", "/tmp"),
        ("WAKE_TIMEOUT", "0", "wake_timeout_s", 0.0),
        ("WAKE_TIMEOUT", "1.5", "wake_timeout_s", 1.5),
        ("RANKS_TIMEOUT", "5", "ranks_timeout_s", 5.0),
        ("TRITON", "1", "triton", True),
        ("TRITON_SHARED_MEMORY", "99KiB", "triton_shared_memory_bytes", 99 << 10),
        # No start fails over a record.
        ("RECORD", "/no/such/folder", "record", "/no/such/folder"),
    ],
)
def test_settings(monkeypatch: pytest.MonkeyPatch, name: str, text: str, field: str, value: object) -> None:
    assert getattr(_environment.read({f"POORWILL_{name}": text}), field) == value
    monkeypatch.setenv(f"POORWILL_{name}", text)
    assert getattr(_environment.read(), field) == value


def test_a_disk_has_a_limit() -> None:
    given = {"POORWILL_DISK": "/tmp", "POORWILL_DISK_LIMIT": "64GiB"}
    assert _environment.read(given).disk_limit_bytes == 64 << 30
    with pytest.raises(ValueError, match="like 64GiB, or in bytes"):
        _environment.read(given | {"POORWILL_DISK_LIMIT": "plenty"})


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("SLEEP_MODE", "yes", "neither 0 nor 1"),
        ("OFFLOAD", "true", "neither 0 nor 1"),
        ("PAGEABLE", "true", "neither 0 nor 1"),
        ("PREPARE", "off", "neither 0 nor 1"),
        ("GRAPHS", "no", "neither 0 nor 1"),
        ("LEND", "/a", "neither 0 nor 1"),
        ("PEER_COPIES", "1", "needs POORWILL_LEND=1"),
        ("PEER_COPIES", "all", "neither 0 nor 1"),
        ("KEEP_BACKUPS", "no", "neither 0 nor 1"),
        ("KEEP_AWAKE", "1", "names 1, which is no tag of vLLM's: there are cudagraph, default, kv_cache"),
        ("KEEP_AWAKE", "weights,Weights,kv", "names Weights, kv, which"),
        *(("COMPRESS", text, "none of auto, off, always") for text in ("on", "1", "Always")),
        ("TRITON", "on", "neither 0 nor 1"),
        *(("TRITON_SHARED_MEMORY", text, "no size above 0") for text in ("sm_120", "0", "-1")),
        *(
            ("BUDGET", text, "a size like 22528MiB nor a share like 0.92 or 92%")
            for text in ("all", "0", "0.0", "0%", "1.01", "101%", "-1", "nan%", "inf%", "%", "12 apples")
        ),
        ("HOST_BUDGET", "plenty", "like 64GiB, or in bytes"),
        ("HOST_BUDGET", "-1", "like 64GiB, or in bytes"),
        ("CACHE_LIMIT", "some", "like 64GiB, or in bytes"),
        *(("CACHE_LIMIT", text, "up to 134217728: give 128MiB or more") for text in ("0", "127MiB")),
        ("DISK", "/nonexistent", "no folder here"),
        ("DISK_LIMIT", "64GiB", "POORWILL_DISK names none"),
        ("RANKS_TIMEOUT", "soon", "from 0 to 3600"),
        ("RANKS_FOLDER", "/no/such/folder", "is no folder here"),
        *(("WAKE_TIMEOUT", text, "from 0 to 3600") for text in ("soon", "-1", "nan", "inf", "3601")),
    ],
)
def test_settings_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, says: str
) -> None:
    with pytest.raises(ValueError, match=f"^POORWILL_{name}='{text}' ") as refused:
        _environment.read({f"POORWILL_{name}": text})
    assert says in str(refused.value)
    # Before anything is started, if an engine is to sleep with Poorwill; other engines are not affected.
    monkeypatch.setenv("POORWILL_SLEEP_MODE", "1")
    monkeypatch.setenv(f"POORWILL_{name}", text)
    with pytest.raises(ValueError, match=f"^POORWILL_{name}="):
        _platform.decide(config(sleep_mode_backend=None))
    if name != "SLEEP_MODE":
        monkeypatch.delenv("POORWILL_SLEEP_MODE")
        assert decided(config(sleep_mode_backend=None)) == _platform.STOCK_WORKER


# Hooks on imports


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that can be imported, by name."""
    name = "poorwill_planted"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("VALUE = 1\n")
    (folder / "part.py").write_text("def f():\n    return 2\n")
    (folder / "broken.py").write_text("import sys\nif not sys.planted_is_mended:\n    raise KeyError\n")
    (folder / "data.txt").write_text("data")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == name]:
        del sys.modules[loaded]


class Patched:
    """A patch, and the modules that it was called with."""

    def __init__(self, error: Exception | None = None) -> None:
        self.modules: list[ModuleType] = []
        self.error = error

    def __call__(self, module: ModuleType) -> None:
        self.modules.append(module)
        if self.error is not None:
            raise self.error


def test_what_is_imported_already_is_patched_at_once(package: str) -> None:
    module = importlib.import_module(package)
    patch = Patched()
    when_imported(package, patch)
    when_imported(package, patch)
    assert patch.modules == [module]


def test_what_is_imported_later_is_patched_behind_it(package: str) -> None:
    patch, other = Patched(), Patched()
    when_imported(package, patch)
    when_imported(package, other)
    assert patch.modules == []
    assert package not in sys.modules
    module = importlib.import_module(package)
    assert patch.modules == [module]
    assert module.VALUE == 1
    when_imported(package, patch)
    importlib.reload(module)
    assert (len(patch.modules), len(other.modules)) == (1, 1)


def test_a_submodule_is_patched_and_its_package_is_not_imported_for_it(package: str) -> None:
    patch = Patched()
    when_imported(f"{package}.part", patch)
    assert package not in sys.modules
    importlib.import_module(package)
    assert patch.modules == []
    part = importlib.import_module(f"{package}.part")
    assert patch.modules == [part]
    assert part.f() == 2


def test_a_patched_module_is_as_any(package: str) -> None:
    when_imported(package, Patched())
    when_imported(f"{package}.part", Patched())
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.loader is not None
    # A query of the loader before the import gets what the module's own says.
    assert "VALUE" in spec.loader.get_source(package)  # type: ignore[attr-defined]
    assert spec.submodule_search_locations
    module = importlib.import_module(package)
    part = importlib.import_module(f"{package}.part")
    for loaded in (module, part):
        assert type(loaded.__loader__) is SourceFileLoader
        assert loaded.__spec__ is not None
        assert loaded.__spec__.loader is loaded.__loader__
    assert inspect.getsource(part.f).startswith("def f")
    assert importlib.resources.files(package).joinpath("data.txt").read_text() == "data"


def test_what_a_patch_raises_the_import_raises(package: str) -> None:
    patch = Patched(poorwill.PoorwillError("unfit"))
    when_imported(f"{package}.part", patch)
    with pytest.raises(poorwill.PoorwillError, match="unfit"):
        importlib.import_module(f"{package}.part")
    assert f"{package}.part" not in sys.modules
    importlib.import_module(f"{package}.part")
    assert len(patch.modules) == 1


def test_a_module_that_fails_is_patched_when_it_does_not(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = Patched()
    when_imported(f"{package}.broken", patch)
    monkeypatch.setattr(sys, "planted_is_mended", False, raising=False)
    with pytest.raises(KeyError):
        importlib.import_module(f"{package}.broken")
    assert patch.modules == []
    monkeypatch.setattr(sys, "planted_is_mended", True)
    module = importlib.import_module(f"{package}.broken")
    assert patch.modules == [module]


def test_a_module_that_is_nowhere_is_missing_as_ever(package: str) -> None:
    when_imported(f"{package}.nowhere", Patched())
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package}.nowhere")


# Hooks on vLLM's modules


def check_and_update_config(cls: Any, vllm_config: Any) -> None:
    vllm_config.checked = vllm_config.__dict__.get("checked", 0) + 1
    if vllm_config.parallel_config.worker_cls == "auto":
        vllm_config.parallel_config.worker_cls = _platform.STOCK_WORKER


def platform(check: Callable[..., Any] = check_and_update_config) -> ModuleType:
    module = ModuleType("vllm.platforms.cuda")
    kind = type("CudaPlatformBase", (), {"check_and_update_config": classmethod(check)})
    module.__dict__["CudaPlatformBase"] = kind
    return module


HOOK = Hook("vllm.platforms.cuda", "poorwill.vllm._platform", "install")


def test_a_module_that_fits_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    module = platform()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    HOOK.wait()
    assert getattr(module.CudaPlatformBase.check_and_update_config, "__poorwill__", False)
    _hooks.refuse()


def unfit(cls: Any, other: Any) -> None:
    """What no vLLM has that is known."""


def test_a_module_that_does_not_fit_is_left_alone_unless_poorwill_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = platform(unfit)
    stock = module.CudaPlatformBase.__dict__["check_and_update_config"]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    HOOK.wait()
    assert module.CudaPlatformBase.__dict__["check_and_update_config"] is stock
    with pytest.raises(UnsupportedVllmError, match=r"check_and_update_config does not take vllm_config"):
        _hooks.refuse()
    # An engine without Poorwill is not affected.
    _platform.decide(config(enable_sleep_mode=True, sleep_mode_backend="cumem"))
    with pytest.raises(UnsupportedVllmError, match="check_and_update_config"):
        _platform.decide(config())


def test_a_module_that_does_not_fit_is_refused_where_poorwill_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POORWILL_SLEEP_MODE", "1")
    monkeypatch.setitem(sys.modules, "vllm.platforms.cuda", platform(unfit))
    with pytest.raises(UnsupportedVllmError, match="check_and_update_config"):
        HOOK.wait()
    # Also later: who catches that, and imports the module again, has it without the hook.
    with pytest.raises(UnsupportedVllmError, match="check_and_update_config"):
        _hooks.refuse()


@pytest.mark.parametrize("number", ["0.19.3", "0.34.0", "unknown"])
def test_a_version_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    version(monkeypatch, number)
    monkeypatch.setitem(sys.modules, "vllm.platforms.cuda", platform())
    HOOK.wait()
    with pytest.raises(UnsupportedVllmError, match=number):
        _hooks.refuse()
    with pytest.raises(UnsupportedVllmError, match=number):
        _platform.decide(config())


MISSING = """
import sys
from types import ModuleType

for name in ("vllm", "vllm.platforms", "vllm.version"):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = []
sys.modules["vllm.version"].__version__ = sys.argv[2]

from poorwill.vllm import _hooks

for hook in _hooks.HOOKS:
    if hook.module == sys.argv[1]:
        try:
            hook.look()
        except Exception as error:
            print(type(error).__name__, error)
"""


def looked(module: str, number: str) -> str:
    """What comes of looking at a module, in a process whose vLLM has none."""
    command = [sys.executable, "-B", "-c", MISSING, module, number]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_module_that_has_to_be_there_is_missed() -> None:
    said = looked("vllm.v1.engine.async_llm", "0.33.0")
    assert said.startswith("UnsupportedVllmError")
    assert "the module vllm.v1.engine.async_llm is missing" in said
    assert f"the module {REGISTRY} is missing" in looked(REGISTRY, "0.33.0")
    # Before there were backends, there was no such module.
    assert looked(REGISTRY, "0.20.2") == ""


def test_what_a_module_lacks_itself_is_not_taken_for_the_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    (tmp_path / "ours_that_lacks.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        Hook("ours_that_lacks", "", "").look()


def test_everything_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(Hook, "look", lambda hook: looked.append(hook.module))
    for _ in range(2):
        _platform.decide(config())
    assert looked == [hook.module for hook in _hooks.HOOKS]


def test_registering_twice_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    register = importlib.import_module("poorwill.vllm").register
    register()
    register()
    assert set(_imports._waiting) == {hook.module for hook in (*_hooks.HOOKS, *_hooks.ROUTE_HOOKS)}
    assert sys.meta_path.count(_imports._FINDER) == 1


@pytest.mark.parametrize(("text", "waits"), [("0", False), (" ", False), ("1", True), ("yes", True)])
def test_what_is_hooked_for_offloading_waits_only_if_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, text: str, waits: bool
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("POORWILL_OFFLOAD", text)
    importlib.import_module("poorwill.vllm").register()
    modules = {hook.module for hook in _hooks.OFFLOAD_HOOKS}
    assert modules & set(_imports._waiting) == (modules if waits else set())


@pytest.mark.parametrize("folder", ["", " ", "/no/such/folder"])
def test_a_start_is_recorded_only_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("POORWILL_RECORD", folder)
    monkeypatch.setenv("POORWILL_OFFLOAD", "1")
    register = importlib.import_module("poorwill.vllm").register
    register()
    register()
    # Beside what another hook has to do with the same module.
    waiting = _imports._waiting["vllm.v1.worker.gpu_worker"]
    assert len(waiting) == (2 if folder.strip() else 1)
    assert (_hooks.RECORD_HOOK._install in waiting) == bool(folder.strip())


def test_a_worker_without_what_is_recorded_is_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    module = ModuleType("vllm.v1.worker.gpu_worker")
    _hooks.RECORD_HOOK._install(module)
    assert "nothing is recorded: 'Worker'" in caplog.text
    module.__dict__["Worker"] = type("Worker", (), {"load_model": lambda self: "loaded"})
    _hooks.RECORD_HOOK._install(module)
    assert "has no determine_available_memory: profile is not recorded" in caplog.text
    # Without the variable nothing is asked of it.
    assert module.__dict__["Worker"]().load_model() == "loaded"


@pytest.mark.parametrize("text", ["1", "yes"])
def test_offloading_is_decided_with_the_configuration(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Before anything is started, whether or not the engine sleeps."""
    module = platform()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    HOOK.wait()
    monkeypatch.setenv("POORWILL_OFFLOAD", text)
    complete = module.CudaPlatformBase.check_and_update_config
    stock = config(enable_sleep_mode=False, sleep_mode_backend="cumem")
    if text == "yes":
        with pytest.raises(ValueError, match="POORWILL_OFFLOAD='yes' is neither 0 nor 1"):
            complete(stock)
        return
    complete(stock)
    assert stock.parallel_config.worker_cls == _platform.STOCK_WORKER
    version(monkeypatch, "0.34.0")
    with pytest.raises(UnsupportedVllmError, match=r"0\.34\.0.*unset POORWILL_OFFLOAD"):
        complete(stock)


@pytest.mark.parametrize(
    "hook", [*_hooks.HOOKS, *_hooks.OFFLOAD_HOOKS], ids=lambda hook: f"{hook.function} {hook.module}"
)
def test_every_hook_is_of_a_module_that_is_looked_at_first(hook: Hook) -> None:
    ours = (Path(poorwill.__file__).parent / "vllm" / f"{hook.ours.rpartition('.')[2]}.py").read_text()
    assert f"def {hook.function}(" in ours
    if hook.module not in ("vllm.config.vllm", "vllm.model_executor.offloader"):
        assert _versions.needs("0.33.0", hook.module)


# Who gets our worker


def config(
    worker_cls: str = _platform.STOCK_WORKER,
    *,
    enable_sleep_mode: bool = True,
    sleep_mode_backend: str | None = "poorwill",
    **more: Any,
) -> Any:
    """A configuration; without a backend it is that of a vLLM without a registry."""
    model = SimpleNamespace(enable_sleep_mode=enable_sleep_mode, **more)
    if sleep_mode_backend is not None:
        model.sleep_mode_backend = sleep_mode_backend
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(worker_cls=worker_cls),
        cache_config=SimpleNamespace(kv_offloading_size=None),
        kv_transfer_config=None,
    )


def decided(given: Any) -> str:
    _platform.decide(given)
    return str(given.parallel_config.worker_cls)


COMPLAINT = r"{} is given, but sleep mode is off: add --enable-sleep-mode"


@pytest.mark.parametrize(
    ("environment", "given", "gets"),
    [
        # By the option, and where there is none by the environment.
        ("", {}, _platform.WORKER),
        ("1", {}, _platform.WORKER),
        ("1", {"sleep_mode_backend": None}, _platform.WORKER),
        # Who builds the engine may know of no backends, and leaves vLLM's default.
        ("1", {"sleep_mode_backend": "cumem"}, _platform.WORKER),
        # Others are left alone.
        ("", {"sleep_mode_backend": None}, _platform.STOCK_WORKER),
        ("", {"sleep_mode_backend": "cumem"}, _platform.STOCK_WORKER),
        ("", {"worker_cls": "of.mine", "sleep_mode_backend": "x"}, "of.mine"),
        ("", {"enable_sleep_mode": False, "sleep_mode_backend": "cumem"}, _platform.STOCK_WORKER),
        ("", {"enable_sleep_mode": False, "sleep_mode_backend": None}, _platform.STOCK_WORKER),
        # What does not go together is refused.
        ("1", {"sleep_mode_backend": "cuda_checkpoint"}, "is cuda_checkpoint, which is neither's: make that"),
        ("", {"enable_sleep_mode": False}, COMPLAINT.format("--sleep-mode-backend poorwill")),
        *(
            (
                "1",
                {"enable_sleep_mode": False, "sleep_mode_backend": backend},
                COMPLAINT.format("SLEEP_MODE=1"),
            )
            for backend in (None, "cumem")
        ),
        # Another class is put under ours, once.
        ("", {"worker_cls": "of.mine.Worker"}, f"{_platform.OVER}of.mine.Worker"),
        ("", {"worker_cls": f"{_platform.OVER}of.mine.Worker"}, f"{_platform.OVER}of.mine.Worker"),
        ("", {"worker_cls": "auto"}, "--worker-cls is 'auto', which is no MODULE.CLASS: put the class"),
        ("", {"worker_cls": "of..mine"}, "is 'of..mine', which is no MODULE.CLASS"),
        ("", {"worker_cls": b"of.mine"}, "is b'of.mine', which is no MODULE.CLASS"),
    ],
)
def test_who_gets_our_worker(
    monkeypatch: pytest.MonkeyPatch, environment: str, given: dict[str, Any], gets: str
) -> None:
    monkeypatch.setenv("POORWILL_SLEEP_MODE", environment)
    made = config(**given)
    if " " in gets:
        # vLLM takes it for a wrong value of the user's.
        with pytest.raises(ValueError, match=gets) as refused:
            decided(made)
        assert type(refused.value) is ConfigurationError
        return
    assert [decided(made), decided(made)] == [gets] * 2
    assert _platform.is_active(made) == gets.startswith("poorwill.")


def test_vllm_omnis_other_stages_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "poorwill.vllm._platform"):
        decided(config("of.mine.Worker"))
        assert caplog.messages == []
        decided(config("vllm_omni.worker.gpu_ar_worker.GPUARWorker"))
    assert caplog.messages == [
        "diffusion stages of vLLM-Omni use vLLM's allocator, and sleep as without Poorwill"
    ]


def test_modules_over_others_are_found_in_any_process() -> None:
    """By their names alone, as a spawned worker or Ray imports them. Theirs is looked at with the class."""
    script = (
        "import importlib, sys; over = importlib.import_module('poorwill.vllm.over.no.such.module');"
        "again = importlib.import_module('poorwill.vllm.over.json.decoder');"
        "print(over.__name__, 'torch' in sys.modules, hasattr(again, '__file__'));"
        "over.Worker"
    )
    ran = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True, check=False)
    assert ran.stdout == "poorwill.vllm.over.no.such.module False False\n"
    said = (
        "ConfigurationError: --worker-cls is no.such.module.Worker, which cannot be imported here: No module"
    )
    assert said in ran.stderr


def test_no_model_is_nothing_to_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POORWILL_SLEEP_MODE", "1")
    given = config(enable_sleep_mode=False)
    given.model_config = None
    assert decided(given) == _platform.STOCK_WORKER


def test_a_drafters_configuration_is_none_to_complain_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POORWILL_SLEEP_MODE", "1")
    assert decided(config()) == _platform.WORKER
    derived = config(_platform.WORKER, enable_sleep_mode=False)
    assert decided(derived) == _platform.WORKER
    assert decided(config(enable_sleep_mode=False)) == _platform.STOCK_WORKER


def test_a_second_engine_of_the_process_is_chosen_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POORWILL_SLEEP_MODE", "1")
    for _ in range(2):
        assert decided(config(sleep_mode_backend="cumem")) == _platform.WORKER


def test_a_workers_process_takes_no_drafters_configuration_for_the_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POORWILL_SLEEP_MODE", "1")
    # A process of its own, which has the engine's configuration as it was decided elsewhere.
    _platform.note_chosen()
    assert decided(config(enable_sleep_mode=False, sleep_mode_backend=None)) == _platform.STOCK_WORKER
    assert decided(config(enable_sleep_mode=False, sleep_mode_backend="cumem")) == _platform.STOCK_WORKER


@pytest.mark.parametrize("name", VARIABLES[-3:])
@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:20"])
def test_allocator_settings_are_the_users(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Pools are never expandable, whatever they are set to for everything else."""
    monkeypatch.setenv(name, value)
    assert decided(config()) == _platform.WORKER


# In vLLM's own modules


@pytest.mark.parametrize("number", held())
def test_the_platforms_method_decides_behind_vllms(number: str) -> None:
    sources_of(number)
    loader = Loader(number, ["vllm.platforms.cuda", "vllm.platforms.interface"])
    nvml = SimpleNamespace(nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 0)
    loader.give("vllm.utils.import_utils", import_pynvml=lambda: nvml)
    module = loader.module("vllm.platforms.cuda")
    _platform.install(module)
    hooked = module.CudaPlatformBase.__dict__["check_and_update_config"]
    _platform.install(module)
    assert module.CudaPlatformBase.__dict__["check_and_update_config"] is hooked
    # The contract is kept by what has taken the method's place.
    _versions.check(number, module)
    derived: Any = type("CudaPlatform", (module.CudaPlatformBase,), {})
    given = config("auto")
    whole: Any = Stub("config")
    vars(whole).update(vars(given))
    # What some versions look at.
    whole.parallel_config.prefill_context_parallel_size = whole.parallel_config.data_parallel_size = 1
    whole.model_config.is_mm_prefix_lm = whole.model_config.use_mla = False
    assert derived.check_and_update_config(whole) is None
    assert whole.parallel_config.worker_cls == _platform.WORKER


@needs_sources
def test_graphs_sleep_with_ours_as_with_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader("0.33.0", ["vllm.config.vllm"])
    loader.give("vllm.platforms", current_platform=SimpleNamespace(is_cuda_alike=lambda: True))
    loader.module("vllm.config.compilation").CUDAGraphMode.NONE = "NONE"
    module = loader.module("vllm.config.vllm")
    stock = module.VllmConfig.use_cumem_cudagraph_pool
    _platform.install_graph_pool(module)
    hooked = module.VllmConfig.use_cumem_cudagraph_pool
    _platform.install_graph_pool(module)
    assert module.VllmConfig.use_cumem_cudagraph_pool is hooked
    assert hooked.__doc__ == stock.__doc__

    def uses(worker: str, backend: str, is_kept: bool, mode: str = "FULL", ranks: Any = None) -> bool:
        given = config(worker, sleep_mode_backend=backend, sleep_mode_offload_cudagraph=is_kept)
        vars(given.parallel_config).update({"world_size": 1, "data_parallel_size": 1, **(ranks or {})})
        made = object.__new__(module.VllmConfig)
        made.__dict__.update(vars(given), compilation_config=SimpleNamespace(cudagraph_mode=mode))
        answer = made.use_cumem_cudagraph_pool
        # Nothing has changed by the question.
        assert made.model_config.sleep_mode_backend == backend
        return bool(answer)

    assert uses(_platform.WORKER, "poorwill", False)
    for several in ({"world_size": 2}, {"data_parallel_size": 2}):
        assert uses(_platform.WORKER, "poorwill", True, ranks=several)
        assert not uses(_platform.WORKER, "poorwill", False, ranks=several)
    assert not uses(_platform.WORKER, "poorwill", True, "NONE")
    assert not uses(_platform.STOCK_WORKER, "poorwill", True)
    assert uses(_platform.STOCK_WORKER, "cumem", True)
    assert not uses(_platform.STOCK_WORKER, "cumem", False)
    monkeypatch.setenv("POORWILL_GRAPHS", "0")
    assert not uses(_platform.WORKER, "poorwill", False)
    # vLLM's own option stays.
    assert uses(_platform.WORKER, "poorwill", True)
    assert uses(_platform.STOCK_WORKER, "cumem", True)


@pytest.mark.parametrize("attributes", [{}, {"use_cumem_cudagraph_pool": True}])
def test_a_vllm_without_such_a_pool_is_left_alone(attributes: dict[str, Any]) -> None:
    kind = type("VllmConfig", (), attributes)
    before = dict(vars(kind))
    _platform.install_graph_pool(cast(ModuleType, SimpleNamespace(VllmConfig=kind)))
    assert dict(vars(kind)) == before


@needs_sources
def test_our_backend_is_entered_once() -> None:
    module = Loader("0.33.0", [REGISTRY]).module(REGISTRY)
    _platform.install_backend(module)
    _platform.install_backend(module)
    assert list(module.SleepModeBackendFactory._registry).count("poorwill") == 1


def test_the_process_of_the_plugin_needs_no_driver() -> None:
    script = "import sys, poorwill.vllm; poorwill.vllm.register(); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "False\n"), ran.stderr
