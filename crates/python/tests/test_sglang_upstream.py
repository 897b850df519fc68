"""The patch that is proposed to SGLang: it applies, works, and spares our plugin hooks and needs."""

import importlib
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import poorwill.sglang
import pytest
from poorwill import _sources
from poorwill.sglang import _adapter, _hooks, _versions
from sglang_sources import sources_of
from test_sglang_versions import link

VERSION = _versions.RUN[-1]
UPSTREAM = Path(__file__).parents[3] / "contrib/upstream/sglang"
PATCH = UPSTREAM / "memory-saver-backend.patch"


def changed() -> list[str]:
    """The files that the patch changes, and the one that it adds."""
    return re.findall(r"^\+\+\+ b/python/(.+)$", PATCH.read_text(), re.MULTILINE)


@pytest.fixture
def patched(tmp_path: Path) -> Path:
    """The version's sources with the patch."""
    original = sources_of(VERSION)
    for name in changed():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    link(original / "sglang", tmp_path / "sglang")
    for name in changed():
        if (tmp_path / name).exists():
            (tmp_path / name).unlink()
            shutil.copyfile(original / name, tmp_path / name)
    apply = ["git", "apply", "-p2", str(PATCH)]
    subprocess.run(apply, cwd=tmp_path, check=True, capture_output=True, text=True)
    return tmp_path


@pytest.fixture
def sglang(patched: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's settings in a process whose SGLang has the patch."""
    monkeypatch.setenv("POORWILL_SLEEP_MODE", "1")
    monkeypatch.setattr(poorwill.sglang, "_said", set())
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    features = SimpleNamespace(memory_saver_backend="torch_memory_saver")
    played: dict[str, dict[str, Any]] = {
        "sglang.version": {"__version__": VERSION},
        "sglang.srt.utils.common": {"is_xpu": lambda: False},
        "sglang.srt.runtime_context": {"get_exec": lambda: SimpleNamespace(features=features)},
    }
    for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
        played[name] = {"__path__": [str(patched.joinpath(*name.split(".")))]}
    for name, values in played.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    yield features
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


def test_it_applies_to_the_newest_version_and_compiles(patched: Path) -> None:
    for name in changed():
        compile((patched / name).read_text(), name, "exec")
    assert len(changed()) == 4
    order = (patched / "sglang/srt/arg_groups/field_order.py").read_text()
    assert order.count('"memory_saver_backend",\n)\n') == 1


def test_it_spares_needs_as_its_page_says(patched: Path) -> None:
    before, after = _sources.Tree(sources_of(VERSION)), _sources.Tree(patched)
    assert [_versions.has_registry(tree) for tree in (before, after)] == [False, True]
    assert _versions.problems(VERSION, after) == []
    counted = [len(_versions.needs(VERSION, has_registry=has)) for has in (False, True)]
    [said] = re.findall(
        r"(\d+) rows .* (\d+) with the patch", " ".join((UPSTREAM / "README.md").read_text().split())
    )
    assert counted == [int(count) for count in said]
    assert counted[1] < counted[0]
    after.forget()


def test_our_plugin_registers_by_its_name_and_hooks_no_adapter(
    sglang: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        poorwill.sglang.register()
        # As SGLang may load plugins again.
        poorwill.sglang.register()
    assert caplog.messages == []
    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    assert len(registry._hooks) == 3
    assert not any(target.startswith(_adapter.ADAPTER) for target in registry._hooks)
    adapter: Any = importlib.import_module(_adapter.ADAPTER)
    base = adapter.TorchMemorySaverAdapter
    monkeypatch.setattr(_hooks, "adapter_over", lambda over: ("ours", over))
    sglang.memory_saver_backend = "poorwill"
    # SGLang has not applied the others.
    with pytest.raises(poorwill.PoorwillError, match=r"did not apply .* leave --memory-saver-backend away"):
        base.create(enable=True)
    monkeypatch.setattr(_hooks, "_is_hooked", lambda target: True)
    assert base.create(enable=True) == ("ours", base)
    assert type(base.create(enable=False)) is adapter._TorchMemorySaverAdapterNoop
    # Its own is the default, which is not here.
    sglang.memory_saver_backend = "torch_memory_saver"
    with pytest.raises(ImportError):
        base.create(enable=True)


def test_a_name_that_is_unknown_or_taken_and_another_interface_are_refused(sglang: Any) -> None:
    savers: Any = importlib.import_module("sglang.srt.plugins.memory_savers").MemorySavers
    savers.register("mine", "builtins:dict", 1)
    savers.register("mine", "builtins:dict", 1)
    assert savers.make("mine") == {}
    with pytest.raises(ValueError, match=r"there are torch_memory_saver, mine$"):
        savers.make("other")
    for name, factory in (("mine", "builtins:list"), ("torch_memory_saver", "builtins:dict")):
        with pytest.raises(ValueError, match=f"a memory saver is named '{name}' already"):
            savers.register(name, factory, 1)
    with pytest.raises(ValueError, match="implements interface 2, and SGLang calls interface 1"):
        savers.register("next", "builtins:dict", 2)
