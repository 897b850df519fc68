"""Which SGLang is known, what chooses Poorwill in it, and what is said of one that does not fit."""

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import poorwill.sglang
import pytest
from poorwill import _sources
from poorwill.sglang import _generations, _hooks, _versions
from poorwill.sglang._adapter import ADAPTER
from poorwill.sglang._generations import ALL, Sglang0_5_12, Sglang0_5_15, Sglang0_5_23
from poorwill.sglang._versions import CONTRACT, RUN, TESTED, Fit, UnsupportedSglangError, check, known, needs
from sglang_sources import sources_of
from sglang_sources.versions import held
from vllm_sources.tree import Tree

HERE = Path(__file__).parent
DOCS = HERE.parents[2] / "docs"
SCHEDULER = "sglang/srt/managers/scheduler.py"


class Registry(ModuleType):
    """SGLang's registry of hooks."""

    def __init__(self) -> None:
        super().__init__("sglang.srt.plugins.hook_registry")
        self.registered: list[str] = []
        self.HookRegistry = self
        self.HookType = type("HookType", (), {"AROUND": "around"})

    def register(self, target: str, hook: Any, hook_type: Any) -> None:
        assert hook_type == "around"
        self.registered.append(target)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """An SGLang of no version, which has nothing but its registry."""
    monkeypatch.setattr(poorwill.sglang, "_said", set())
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    played = Registry()
    monkeypatch.setitem(sys.modules, played.__name__, played)
    yield played
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


def play(monkeypatch: pytest.MonkeyPatch, version: str, folder: Path) -> None:
    """Has this process run an SGLang of that version and those sources."""
    package, said = ModuleType("sglang"), ModuleType("sglang.version")
    package.__path__ = [str(folder / "sglang")]
    said.__dict__["__version__"] = version
    monkeypatch.setitem(sys.modules, "sglang", package)
    monkeypatch.setitem(sys.modules, "sglang.version", said)


def registers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said if two callers register."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            poorwill.sglang.register()
    return caplog.messages


# What chooses it.


@pytest.mark.parametrize("value", [None, "", "0", " 0 "])
def test_without_the_variable_nothing_is_hooked_compared_or_said(
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    value: str | None,
) -> None:
    monkeypatch.delenv("POORWILL_SLEEP_MODE", raising=False)
    if value is not None:
        monkeypatch.setenv("POORWILL_SLEEP_MODE", value)
    monkeypatch.setattr(_versions, "check", lambda: pytest.fail("nothing is compared"))
    assert registers(monkeypatch, caplog) == []
    assert registry.registered == []


def test_without_the_variable_nothing_is_imported() -> None:
    script = (
        "import logging, sys, poorwill; before = set(sys.modules); import poorwill.sglang\n"
        "poorwill.sglang.register(); print(*sorted(set(sys.modules) - before))"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-B", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert set(ended.stdout.split()) <= {"poorwill.sglang", "poorwill._environment"}


@pytest.mark.parametrize("value", ["yes", "true", "2"])
def test_a_typo_is_one_error_and_changes_nothing(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    monkeypatch.setenv("POORWILL_SLEEP_MODE", value)
    [said] = registers(monkeypatch, caplog)
    assert said.startswith(
        f"POORWILL_SLEEP_MODE={value!r} is neither 0 nor 1; SGLang's own memory saver is used"
    )
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert registry.registered == []


# All hooks or none.


@pytest.mark.parametrize("version", held())
def test_a_version_that_is_known_gets_all_hooks(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setenv("POORWILL_SLEEP_MODE", "1")
    play(monkeypatch, version, sources_of(version))
    assert registers(monkeypatch, caplog) == []
    assert set(registry.registered) == set(_hooks.hooks(Fit(ALL[known(version)](), False)))
    assert len(registry.registered) == 8, "twice four"


@pytest.mark.parametrize("version", ["0.5.11", "0.5.13", "0.5.16", "0.5.19.post2", "0.5.24", "1.0.0", "dev"])
def test_another_gets_none_and_one_warning_says_which_would_do(
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    version: str,
) -> None:
    monkeypatch.setenv("POORWILL_SLEEP_MODE", "1")
    play(monkeypatch, version, tmp_path)
    [said] = registers(monkeypatch, caplog)
    assert said == (
        f"poorwill cannot work in SGLang {version}: its release is not known to this poorwill; it can in "
        "SGLang 0.5.12, 0.5.15.post1, 0.5.20, 0.5.21, 0.5.22 and 0.5.23; SGLang's own memory saver is used: "
        "unset POORWILL_SLEEP_MODE to want it"
    )
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert registry.registered == []


def test_one_that_is_patched_gets_none_and_hears_what_is_missing(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A number of a version is not enough."""
    monkeypatch.setenv("POORWILL_SLEEP_MODE", "1")
    [version] = RUN
    sources = sources_of(version)
    # All but the scheduler is the original.
    (tmp_path / "sglang/srt/managers").mkdir(parents=True)
    link(sources / "sglang", tmp_path / "sglang")
    text = (sources / SCHEDULER).read_text()
    assert text.count("def send_control_output(self, output, recv_req)") == 1
    (tmp_path / SCHEDULER).unlink()
    (tmp_path / SCHEDULER).write_text(text.replace("def send_control_output(", "def send_output("))
    play(monkeypatch, version, tmp_path)
    [said] = registers(monkeypatch, caplog)
    missing = "sglang.srt.managers.scheduler.Scheduler.send_control_output is missing"
    assert said.startswith(f"poorwill cannot work in SGLang {version}: {missing}; it can in SGLang 0.5.12,")
    assert registry.registered == []


def link(whole: Path, into: Path) -> None:
    """Fills a folder that has some folders of another with links to the rest."""
    for child in whole.iterdir():
        if (into / child.name).is_dir():
            link(child, into / child.name)
        else:
            (into / child.name).symlink_to(child)


def test_no_more_than_three_names_are_reported(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    with pytest.raises(
        UnsupportedSglangError, match=f"; and {len(needs(TESTED[0])) - 3} more; it can in"
    ) as reported:
        check(TESTED[0], _sources.Tree(tmp_path))
    assert str(reported.value).count(" is missing") == 3


def test_without_sources_it_is_refused(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sources, "installed", lambda package: None)
    with pytest.raises(UnsupportedSglangError, match="its sources are not there to be compared"):
        check(TESTED[-1])


def test_where_sglang_did_not_apply_a_hook_its_own_saver_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner: Any = ModuleType("planted_by_a_test")
    owner.hooked = lambda: None
    owner.hooked.__wrapped__ = owner.left = lambda: None
    monkeypatch.setitem(sys.modules, owner.__name__, owner)
    targets = tuple(f"{owner.__name__}.{name}" for name in ("hooked", "left"))
    assert _hooks.create(targets, lambda enable: f"stock {enable}", True) == "stock True"
    assert f"did not apply our hooks on {targets[1]}, and its log says why" in caplog.text
    assert _hooks.create(targets, lambda enable: f"stock {enable}", False) == "stock False"
    # Nor could it import this.
    missing = (targets[0], f"{owner.__name__}.Missing.call")
    assert _hooks.create(missing, lambda enable: f"stock {enable}", True) == "stock True"
    assert f"did not apply our hooks on {missing[1]}" in caplog.text
    monkeypatch.setattr(_hooks, "adapter_over", lambda base: f"ours over {base}")
    adapter: Any = ModuleType(ADAPTER)
    adapter.TorchMemorySaverAdapter = "stock"
    monkeypatch.setitem(sys.modules, ADAPTER, adapter)
    assert _hooks.create(targets[:1], lambda enable: f"stock {enable}", True) == "ours over stock"


# The contract and the adapters, beside the sources.


@pytest.mark.parametrize("version", held())
def test_all_that_a_hook_needs_is_there_and_what_is_left_out_is_not(version: str) -> None:
    tree = Tree(sources_of(version))
    assert _versions.problems(version, tree) == []
    concerned = needs(version)
    absent = [need for need in CONTRACT if need not in concerned]
    there = [need.name for need in absent if _versions._problem(tree, need) is None]
    assert not there, "`since` or `until` is wrong"
    tree.forget()


def test_every_need_is_sound() -> None:
    names = [(need.name, need.since) for need in CONTRACT]
    assert len(set(names)) == len(names)
    for need in CONTRACT:
        for release in (need.since, need.until):
            assert release in (None, (0, 0, 0), *ALL), need
        if need.kind in ("value", "field"):
            assert (need.parameters, need.is_whole, need.is_async) == ((), False, False), need


def test_every_version_has_an_adapter_that_says_something_of_its_own() -> None:
    assert [known(version) for version in TESTED] == list(ALL) == sorted(ALL)
    for before, each in pairwise(ALL.values()):
        assert each.__mro__[1] is before
        assert set(vars(each)) - {"release", "__doc__", "__module__", "__qualname__"}


@pytest.mark.parametrize(
    ("version", "generation"),
    [
        *(("0.5.12", Sglang0_5_12), ("0.5.12.post1", Sglang0_5_12), ("0.5.15", Sglang0_5_15)),
        *(("0.5.23+cu130", Sglang0_5_23), ("0.5.23.dev7+gabc", Sglang0_5_23)),
    ],
)
def test_a_version_has_the_adapter_of_its_release(version: str, generation: type) -> None:
    assert ALL[known(version)] is generation


def test_what_a_scheduler_is_asked_is_in_the_contract() -> None:
    """Each attribute that an adapter reads of SGLang's objects."""
    text = Path(_generations.__file__).read_text()
    read = set(re.findall(r"\b(?:scheduler|manager|arguments|parallel|requests|context)\.(\w+)", text))
    parts = {part for need in CONTRACT for part in need.qualname.split(".")}
    # Of the scheduler's parts.
    assert read - parts <= {"scheduler_components", "scheduler_update_weights_mixin"}


def test_every_version_is_pinned_by_one_digest() -> None:
    pins = {path.stem: path.read_text() for path in HERE.glob("sglang_sources/*.txt")}
    assert sorted(pins) == sorted(TESTED)
    for version, text in pins.items():
        [pin] = [line for line in text.splitlines() if not line.startswith("#")]
        assert re.fullmatch(f"sglang=={re.escape(version)} --hash=sha256:[0-9a-f]{{64}}", pin), pin
    assert len({text.split("sha256:")[1] for text in pins.values()}) == len(pins)


def test_more_effort_holds_them_all() -> None:
    assert held("usual") == held("long") == TESTED
    assert held("quick") == held("run") == RUN == TESTED[-1:]


def test_the_page_names_each_version() -> None:
    page = (DOCS / "sglang.md").read_text(encoding="utf-8")
    section = page.partition("\n## Versions\n")[2].partition("\n## ")[0]
    rows = [row.split("|")[1].strip() for row in section.splitlines() if row.startswith("| 0.")]
    assert [version for row in rows for version in row.split(", ")] == list(TESTED)
