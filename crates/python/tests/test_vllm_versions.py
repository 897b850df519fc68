"""Which vLLM is known, and what the check at start says of one that does not fit."""

import functools
import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from poorwill import PoorwillError
from poorwill._contract import Found, Need, Version
from poorwill.vllm import _versions
from poorwill.vllm._versions import (
    CONTRACT,
    EXTENSIONS,
    OFFLOADERS,
    OLDEST,
    RUN,
    TESTED,
    TOO_NEW,
    UnsupportedVllmError,
    check,
    extensions,
    known,
    needs,
    parse,
)
from vllm_sources.versions import held, played


@pytest.mark.parametrize(
    ("said", "release"),
    [
        ("0.20.2", (0, 20, 2)),
        ("0.20", (0, 20, 0)),
        ("v0.33.0", (0, 33, 0)),
        ("0.20.2rc1.dev3+g123", (0, 20, 2)),
        ("0.20.2rc1", (0, 20, 2)),
        ("0.33.1.dev0+g0123456.d20261121", (0, 33, 1)),
        ("0.21.0.post1", (0, 21, 0)),
        ("0.21.0+cu130.precompiled", (0, 21, 0)),
        ("0.21.0+cpu", (0, 21, 0)),
        ("0.10.1.1", (0, 10, 1)),
        (" 1.2.3\n", (1, 2, 3)),
        ("0.0.0", (0, 0, 0)),
    ],
)
def test_a_version_counts_as_its_release(said: str, release: Version) -> None:
    assert parse(said) == release


@pytest.mark.parametrize(
    "said",
    [
        *("dev", "", "unknown", "main", "0", "20", "0.x", "0.20.", ".20", "0.20.2-", "0.20.2garbage"),
        *("1!0.20.2", "0.20.2+", "0.20.2 0.20.3", "0..2", "-0.20.2", "0.20.2+g1+g2", "\u0660.20.2"),
        "0." + "9" * 5000,
    ],
)
def test_what_names_no_release_is_refused(said: str) -> None:
    with pytest.raises(UnsupportedVllmError, match="does not tell which release it belongs to"):
        parse(said)


@pytest.mark.parametrize("said", [*TESTED, "0.20.0rc1", "0.27.0", "0.33.9", "0.33.1.dev9+gabc"])
def test_the_known_are_taken(said: str) -> None:
    assert known(said) == parse(said)


@pytest.mark.parametrize(
    ("said", "how"),
    [
        *(("0.19.1", "older"), ("0.1.dev1+gabc", "older"), ("0.34.0", "newer"), ("0.34.0rc1", "newer")),
        *(("1.0.0", "newer"), ("0.100.0", "newer")),
    ],
)
def test_the_others_are_refused(said: str, how: str) -> None:
    with pytest.raises(UnsupportedVllmError) as refused:
        known(said)
    assert f"vLLM {said}: it is {how} than what poorwill knows" in str(refused.value)
    assert "which is 0.20.0 and later, below 0.34.0" in str(refused.value)


def test_a_refusal_is_one_sentence_that_says_what_to_do() -> None:
    with pytest.raises(PoorwillError) as refused:
        check("dev", ModuleType("vllm.v1.engine.core"))
    assert str(refused.value) == (
        "poorwill cannot work in vLLM dev: its version does not tell which release it belongs to; it was "
        "tested with vLLM 0.20.2 and 0.33.0: unset POORWILL_SLEEP_MODE or choose --sleep-mode-backend cumem "
        "to do without poorwill, or upgrade it"
    )
    # vLLM goes on without modules that cannot be imported, and this may be raised while it imports one.
    assert not issubclass(UnsupportedVllmError, ImportError)


def test_every_need_is_sound() -> None:
    every = CONTRACT
    names = [(need.name, need.since) for need in every]
    assert len(set(names)) == len(names)
    for need in every:
        for release in filter(None, (need.since if any(need.since) else None, need.until)):
            assert OLDEST < release < TOO_NEW, need
        assert need.until is None or need.since < need.until, need
        if need.kind in ("value", "field"):
            assert (need.parameters, need.is_whole, need.is_async) == ((), False, False), need


def test_an_extension_point_ends_needs_and_has_its_own() -> None:
    names = [each.name for each in EXTENSIONS]
    assert len(set(names)) == len(names)
    assert {need.unless for need in CONTRACT} - {None} == set(names)
    stock = {need.name for need in needs("0.33.0")}
    for each in EXTENSIONS:
        extended = {need.name for need in needs("0.33.0", extended={each.name})}
        own = {need.name for need in each.needs}
        assert own <= extended
        ended = {need.name for need in CONTRACT if need.unless == each.name} - own
        assert stock - extended == ended & stock


def test_a_point_that_is_not_whole_is_none() -> None:
    """One that has changed since is left alone, and what it would end is needed."""
    [registry] = [each for each in EXTENSIONS if each.name == OFFLOADERS]
    missing = registry.needs[-1]

    def found(need: Need) -> Found:
        if need is missing:
            raise AttributeError(need.name)
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in need.parameters]
        return Found(need.kind, tuple(parameters), need.is_async)

    assert extensions(found) == {each.name for each in EXTENSIONS} - {OFFLOADERS}


# Which are held against their sources.


def test_a_version_of_every_minor_is_tested_in_order() -> None:
    releases = [parse(version) for version in TESTED]
    assert releases == sorted(set(releases))
    minors = [(0, minor) for minor in range(OLDEST[1], TOO_NEW[1])]
    assert sorted({release[:2] for release in releases}) == minors
    assert set(RUN) <= set(TESTED)


def test_every_version_is_pinned_by_one_digest() -> None:
    pins = {path.stem: path.read_text() for path in Path(__file__).parent.glob("vllm_sources/*.txt")}
    assert sorted(pins) == sorted(TESTED)
    for version, text in pins.items():
        [pin] = [line for line in text.splitlines() if not line.startswith("#")]
        assert re.fullmatch(f"vllm=={re.escape(version)} --hash=sha256:[0-9a-f]{{64}}", pin), pin
    assert len({text.split("sha256:")[1] for text in pins.values()}) == len(pins)


def test_the_page_says_of_each_version_what_was_done_with_it() -> None:
    page = (Path(__file__).parents[3] / "docs/vllm.md").read_text(encoding="utf-8")
    section = page.partition("\n## Versions\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in section.splitlines() if "|" in row]
    done = {version: held for versions, _, held in rows for version in versions.split(", ")}
    said = {version: done.get(version) for version in TESTED}
    wanted = dict.fromkeys(TESTED, "read") | dict.fromkeys(played("usual"), "read; engines and workers run")
    assert said == wanted | dict.fromkeys(RUN, "read and run")


def test_more_effort_holds_them_all() -> None:
    assert held("usual") == held("long") == TESTED
    assert held("quick") == played("quick") == RUN
    # Of the oldest minor and of the newest.
    assert [parse(version)[:2] for version in RUN] == [OLDEST[:2], parse(TESTED[-1])[:2]]
    assert set(RUN) < set(played("usual")) < set(TESTED)
    assert len(played("usual")) == TOO_NEW[1] - OLDEST[1]


# The check at start, on modules made here.


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def frontend(**changed: Any) -> ModuleType:
    """What is needed of vLLM 0.20.2's `vllm.v1.engine.async_llm`, but for what is changed."""

    class Base:
        async def check_health(self) -> None: ...
        async def resume_generation(self) -> None: ...
        async def encode(self, prompt: Any, pooling_params: Any, request_id: str, more: int = 0) -> None: ...

    class AsyncLLM(Base):
        @decorated
        async def sleep(self, level: int = 1, mode: str = "abort") -> None: ...
        async def wake_up(self, tags: Any = None) -> None: ...
        async def collective_rpc(self, method: Any, timeout: Any, args: Any, kwargs: Any) -> None: ...
        async def generate(self, prompt: Any, sampling_params: Any, request_id: str, *, more: int = 0) -> Any:
            yield

    for name, value in changed.items():
        setattr(AsyncLLM, name, value)
    module = ModuleType("vllm.v1.engine.async_llm")
    module.AsyncLLM = AsyncLLM  # type: ignore[attr-defined]
    return module


def test_what_fits_is_taken() -> None:
    assert len(needs("0.20.2", "vllm.v1.engine.async_llm")) >= 6
    check("0.20.2", frontend())


def test_a_module_of_which_nothing_is_needed_is_taken() -> None:
    check("0.20.2", ModuleType("vllm.v1.engine.unheard_of"))
    with pytest.raises(UnsupportedVllmError):
        check("0.19.0", ModuleType("vllm.v1.engine.unheard_of"))


def test_what_came_later_is_not_missed_before() -> None:
    with pytest.raises(UnsupportedVllmError, match=r"AsyncLLM\.release_kv_cache_memory is missing"):
        check("0.33.0", frontend())


async def deeper(self: Any, depth: int = 1, mode: str = "abort") -> None: ...
def at_once(self: Any, tags: Any = None) -> None: ...
async def fuller(self: Any, tags: Any = None, verify: bool = False) -> None: ...


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"sleep": deeper}, "sleep does not take level but (depth, mode)"),
        ({"wake_up": at_once}, "wake_up is not asynchronous any more"),
        ({"wake_up": fuller}, "wake_up takes verify, too"),
        ({"wake_up": staticmethod(fuller)}, "wake_up is a staticmethod and was a method"),
        ({"wake_up": 1}, "wake_up does not tell what it takes"),
    ],
)
def test_what_has_changed_is_named(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedVllmError) as refused:
        check("0.20.2", frontend(**changed))
    said = str(refused.value)
    assert said.startswith("poorwill cannot work in vLLM 0.20.2: vllm.v1.engine.async_llm.AsyncLLM.")
    assert says in said
    assert said.endswith(
        "tested with vLLM 0.20.2 and 0.33.0: unset POORWILL_SLEEP_MODE or choose --sleep-mode-backend cumem "
        "to do without poorwill, or upgrade it"
    )


def test_a_module_that_has_lost_its_class_is_named() -> None:
    with pytest.raises(UnsupportedVllmError, match=r"async_llm\.AsyncLLM\.sleep is missing"):
        check("0.20.2", ModuleType("vllm.v1.engine.async_llm"))


def test_the_running_version_is_what_vllm_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delitem(sys.modules, "vllm.version", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", none)
    assert _versions.running() == "unknown"
    version = ModuleType("vllm.version")
    version.__version__ = "0.20.2rc1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.version", version)
    assert _versions.running() == "0.20.2rc1"


def test_nothing_of_vllm_is_imported() -> None:
    script = (
        "import sys, types; sys.modules.update(torch=None, vllm=None); "
        "from poorwill.vllm import _versions as v; v.running(); v.known('0.20.2'); "
        "v.check('0.20.2', types.ModuleType('vllm.other')); "
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'vllm')])"
    )
    ran = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "['torch', 'vllm']\n", "")
