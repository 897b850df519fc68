"""Which KV connectors may be beside an engine that sleeps, by the configuration and by vLLM's sources."""

import ast
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_vllm.loader import Loader
from poorwill.vllm import _connectors, _environment, _hooks, _platform
from poorwill.vllm._connectors import BY_NETWORK, COPYING, OFFLOADING, SEVERAL, WITHOUT_NOTICE
from vllm_sources import needs_sources, sources
from vllm_sources.tree import Tree
from vllm_sources.versions import held

PACKAGE = "vllm.distributed.kv_transfer.kv_connector"
REGISTERED = sorted({*BY_NETWORK, *WITHOUT_NOTICE})


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "0.33.0")


def run(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    module = ModuleType("vllm.version")
    module.__dict__["__version__"] = number
    monkeypatch.setitem(sys.modules, "vllm.version", module)


def config(
    name: str | None = None, *, path: str | None = None, offloading: str | None = None, **extra: Any
) -> Any:
    """What is asked of vLLM's configuration."""
    transfer = SimpleNamespace(
        kv_connector=name, kv_connector_module_path=path, kv_connector_extra_config=extra
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="poorwill"),
        parallel_config=SimpleNamespace(worker_cls=_platform.STOCK_WORKER),
        cache_config=SimpleNamespace(
            kv_offloading_size=8.0 if offloading else None, kv_offloading_backend=offloading or "native"
        ),
        kv_transfer_config=transfer if name or path else None,
    )


def said(given: Any) -> str:
    problem = _connectors.problem(given)
    assert problem is not None
    return problem


@pytest.mark.parametrize("number", ["0.20.0", "0.33.0"])
@pytest.mark.parametrize("name", [None, *sorted(COPYING)])
def test_what_registers_nothing_may_stay(
    monkeypatch: pytest.MonkeyPatch, number: str, name: str | None
) -> None:
    run(monkeypatch, number)
    assert _connectors.problem(config(name)) is None
    assert (
        _connectors.problem(config(SEVERAL, connectors=[{"kv_connector": name or "ExampleConnector"}]))
        is None
    )


@pytest.mark.parametrize("name", sorted(BY_NETWORK))
def test_what_registers_with_a_network_card_needs_a_vllm_that_has_it_unregister(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # vLLM 0.33 refuses those that cannot itself.
    assert _connectors.problem(config(name)) is None
    run(monkeypatch, "0.32.9")
    assert said(config(name)) == (
        f"sleep mode is to be poorwill's, and the KV connector {name} registers the KV cache with a network "
        "card, and this vLLM does not have it unregister for a sleep: take vLLM 0.33, take another "
        "connector, or leave --enable-sleep-mode away"
    )


@pytest.mark.parametrize("number", ["0.20.0", "0.33.0"])
@pytest.mark.parametrize("name", sorted(WITHOUT_NOTICE))
def test_unknown_connectors_are_refused_in_every_version(
    monkeypatch: pytest.MonkeyPatch, number: str, name: str
) -> None:
    run(monkeypatch, number)
    assert said(config(name)).endswith(": take another connector, or leave --enable-sleep-mode away")
    assert f"the KV connector {name} " in said(config(name))


@pytest.mark.parametrize("name", sorted(OFFLOADING))
def test_what_keeps_copies_has_to_hear_that_the_cache_is_dropped(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for number, is_refused in (("0.22.9", True), ("0.23.0", False), ("0.33.0", False)):
        run(monkeypatch, number)
        for given in (config(name), config(name, connectors="anything")):
            assert (_connectors.problem(given) is not None) == is_refused
    run(monkeypatch, "0.22.9")
    assert "may keep zeros for what was in it: take vLLM 0.23 or later" in said(config(name))


def test_one_among_several_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "0.32.0")
    inner = {
        "kv_connector": SEVERAL,
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector"}]},
    }
    for child in ({"kv_connector": "NixlConnector"}, inner):
        given = config(
            SEVERAL, connectors=[{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}, child]
        )
        assert "the KV connector NixlConnector registers" in said(given)


def test_offloading_by_the_caches_own_options_is_a_connector_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _connectors.problem(config(offloading="native")) is None
    # vLLM puts it in the place of the one that is named.
    assert _connectors.problem(config("LMCacheMPConnector", offloading="native")) is None
    assert "the KV connector LMCacheConnectorV1 may register" in said(config(offloading="lmcache"))
    run(monkeypatch, "0.22.0")
    assert "the KV connector OffloadingConnector gets no notice" in said(config(offloading="native"))


def test_before_033_a_connector_of_somebodys_is_refused_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "0.32.0")
    unknown = "is not known to be one that registers nothing, and this vLLM does not have it unregister"
    assert unknown in said(config("Mine", path="nowhere.to.be.found"))
    assert unknown in said(config("HiSparseConnector"))
    # A name of vLLM's says nothing of a class that is elsewhere.
    for name in ("ExampleConnector", "OffloadingConnector", SEVERAL, *REGISTERED):
        assert unknown in said(config(name, path="nowhere.to.be.found"))


def test_the_engine_is_refused_where_it_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        _environment.SLEEP_MODE,
        *(name for name in vars(_environment) if name.startswith("POORWILL_")),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_platform, "_was_chosen", False)
    monkeypatch.setattr(_hooks, "_refusals", [])
    monkeypatch.setattr(_hooks.Hook, "look", lambda hook: None)
    refused = config("FlexKVConnectorV1")
    with pytest.raises(
        _platform.ConfigurationError, match="the KV connector FlexKVConnectorV1 has another process"
    ):
        _platform.decide(refused)
    assert refused.parallel_config.worker_cls == _platform.STOCK_WORKER
    # An engine that does not sleep with Poorwill is not affected.
    refused.model_config.sleep_mode_backend = "cumem"
    _platform.decide(refused)
    for may_stay in (config("ExampleConnector"), config()):
        _platform.decide(may_stay)
        assert may_stay.parallel_config.worker_cls == _platform.WORKER


# In vLLM's own modules


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class that 0.33's connectors derive from, with vLLM's factory, in Python's own tables."""
    real = (f"{PACKAGE}.factory", f"{PACKAGE}.v1.base")
    loader = Loader("0.33.0", real)
    loader.give("vllm.utils.func_utils", supports_kw=lambda *_: True)
    for name in ("vllm", "vllm.distributed", "vllm.distributed.kv_transfer", PACKAGE, f"{PACKAGE}.v1", *real):
        monkeypatch.setitem(sys.modules, name, loader.module(name))
    return loader.module(f"{PACKAGE}.v1.base").KVConnectorBase_V1


@needs_sources
def test_since_033_a_connector_of_somebodys_speaks_for_itself(
    monkeypatch: pytest.MonkeyPatch, base: Any
) -> None:
    silent = type("Mine", (base,), {})
    asked = type("Mine", (base,), {"supports_sleep_mode": classmethod(lambda cls, kv_transfer_config: True)})
    unregisters = type("Mine", (base,), {"unregister_kv_caches": lambda self: None})
    derived = type("Mine", (unregisters,), {})
    module = ModuleType("mine.alone")
    monkeypatch.setitem(sys.modules, "mine", ModuleType("mine"))
    monkeypatch.setitem(sys.modules, "mine.alone", module)
    # vLLM's factory imports as vLLM's modules do here.
    factory: Any = sys.modules[f"{PACKAGE}.factory"]
    monkeypatch.setattr(factory, "importlib", SimpleNamespace(import_module=lambda name: sys.modules[name]))
    for kind, is_refused in ((silent, True), (asked, False), (unregisters, False), (derived, False)):
        module.__dict__["Mine"] = kind
        child = {"kv_connector": "Mine", "kv_connector_module_path": "mine.alone"}
        for given in (config("Mine", path="mine.alone"), config(SEVERAL, connectors=[child])):
            assert (_connectors.problem(given) is not None) == is_refused
    module.__dict__["Mine"] = silent
    assert "says nothing of sleeping" in said(config("Mine", path="mine.alone"))
    assert "have its class define supports_sleep_mode" in said(config("Mine", path="mine.alone"))


def shipped(version: str) -> dict[str, tuple[str, str]]:
    """Where vLLM has each connector that it knows by name."""
    root = sources()
    assert root is not None
    path = root / version / f"{PACKAGE.replace('.', '/')}/factory.py"
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    named = [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "register_connector"
    ]
    found = [[arg.value for arg in call.args if isinstance(arg, ast.Constant)] for call in named]
    return {str(name): (str(module), str(kind)) for name, module, kind in found}


# Refused as what is not known: after a sleep it would have a map of a cache that is gone.
UNKNOWN = {"HiSparseConnector"}


@needs_sources
@pytest.mark.parametrize("version", held())
def test_each_connector_of_vllms_was_looked_at(version: str) -> None:
    assert set(shipped(version)) <= {*COPYING, *OFFLOADING, *BY_NETWORK, *WITHOUT_NOTICE, SEVERAL, *UNKNOWN}


def calls(path: Path) -> set[str]:
    """What is called, by the last part of its name."""
    nodes = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


@needs_sources
@pytest.mark.parametrize("version", held())
def test_what_is_said_to_register_nothing_calls_nothing_that_does(version: str) -> None:
    registering = {"register_memory", "batch_register_memory", "register_buffer", "register_torch_tensor"}
    root = sources()
    assert root is not None
    for name, (module, _) in shipped(version).items():
        path = root / version / module.replace(".", "/")
        # A connector has a module, or a package of its own.
        folder = path if path.is_dir() else path.parent
        files = [path.with_suffix(".py")] if folder.name == "v1" else sorted(folder.rglob("*.py"))
        found = set().union(*map(calls, files)) & registering
        if name in COPYING | OFFLOADING:
            assert not found, name
        if name in BY_NETWORK:
            assert found, name


@needs_sources
def test_each_that_registers_with_a_network_card_says_whether_it_can_sleep() -> None:
    root = sources()
    assert root is not None
    tree = Tree(root / "0.33.0")
    places = shipped("0.33.0")

    def is_said_by(name: str) -> str:
        module, kind = places[name]
        node = tree.definition(module, kind).node
        if isinstance(node, ast.Assign):
            kind = ast.unparse(node.value)
        return tree.definition(tree.definition(module, kind).module, f"{kind}.supports_sleep_mode").module

    looked_at = {*BY_NETWORK, *OFFLOADING, "ExampleConnector", "FlexKVConnectorV1"}
    assert {name for name in looked_at if is_said_by(name) != f"{PACKAGE}.v1.base"} == BY_NETWORK
