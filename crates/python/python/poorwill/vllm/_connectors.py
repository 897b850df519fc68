"""KV connectors of an engine that sleeps: which are allowed, and what they must release.

A connector that registers the KV cache with a network card or another process pins its pages. A sleep would
not release them. After the wake, with other pages at the same addresses, the old ones would be accessed. So
such a connector is refused (`problem`), unless vLLM unregisters it before a sleep and registers it after the
wake (0.33). Then that happens on every path into sleep and back, also where vLLM's own methods are not
called (`unregister`, `announce`).

The behaviour of connectors is from the sources of vLLM 0.20 to 0.33. An unknown one counts as one that
registers.
"""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from poorwill._contract import Version
from poorwill.vllm import _versions

UNREGISTERS: Version = (0, 33, 0)
"""First vLLM that unregisters connectors for a sleep, and asks whether they can."""
RESETS: Version = (0, 23, 0)
"""First vLLM that tells a connector that a sleep drops the cache."""

COPYING = frozenset(
    {
        *("ExampleConnector", "ExampleHiddenStatesConnector", "DecodeBenchConnector"),
        *("P2pNcclConnector", "HF3FSKVConnector"),
    }
)
"""Connectors that copy to and from the KV cache during a step. They hold addresses at most."""

OFFLOADING = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector"})
"""The same with copies that run in a later step, and with what was copied before."""

BY_NETWORK = frozenset(
    {
        *("NixlConnector", "NixlPullConnector", "NixlPushConnector"),
        *("MooncakeConnector", "MooncakeStoreConnector", "MoRIIOConnector"),
    }
)
"""Connectors that register the KV cache with a network card. In 0.33 each says whether it can unregister."""

_MAPPED = "has another process map the KV cache, so that a sleep would not give its memory back"
WITHOUT_NOTICE = {
    "LMCacheMPConnector": _MAPPED,
    "FlexKVConnectorV1": _MAPPED,
    "LMCacheConnectorV1": "may register memory, as LMCache's own settings say, and gets no notice of a sleep",
}
"""Connectors that no vLLM unregisters, with the reason why they would have to."""

SEVERAL = "MultiConnector"

# What vLLM makes of --kv-offloading-backend after asking us. The choice depends on version and settings.
_BY_BACKEND = {"native": "OffloadingConnector", "lmcache": "LMCacheConnectorV1"}


@dataclass(frozen=True)
class _Connector:
    """The identifying part of its configuration, by vLLM's names."""

    kv_connector: str
    kv_connector_module_path: str | None = None
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)


def problem(vllm_config: Any) -> str | None:
    """Why this configuration cannot sleep because of its KV connector, and what to do; None if it can."""
    release = _versions.known(_versions.running())
    for connector in _chosen(vllm_config):
        if objection := _objection(connector, release):
            why, instead = objection
            return (
                f"sleep mode is to be poorwill's, and the KV connector {connector.kv_connector} {why}: "
                f"{instead}take another connector, or leave --enable-sleep-mode away"
            )
    return None


def unregister(gpu_worker: ModuleType) -> None:
    """Unregisters the KV cache from this process's connector, where vLLM does so before a sleep.

    Repeating it does nothing.
    """
    connector = _running(gpu_worker)
    if connector is not None and hasattr(connector, "unregister_kv_caches"):
        connector.unregister_kv_caches()


def announce(core: Any) -> None:
    """Makes the engine's core tell peers what the ranks registered at a wake, as vLLM's own wake does."""
    announce_again = getattr(core, "_set_kv_connector_handshake_metadata", None)
    if announce_again is not None:
        announce_again()


def pool_problem(gpu_worker: ModuleType) -> str | None:
    """Why the KV cache would not sleep: this process's connector allocates it in its own pool."""
    connector = _running(gpu_worker)
    # Since 0.31.
    if connector is None or not hasattr(connector, "get_mem_pool_context"):
        return None
    if connector.get_mem_pool_context() is None:
        return None
    return (
        f"sleep mode is to be poorwill's, and the KV connector {type(connector).__name__} allocates the KV "
        "cache in a memory pool of its own, which does not sleep: configure it without (custom_mem_pool), or "
        "leave --enable-sleep-mode away"
    )


def _chosen(vllm_config: Any) -> Iterator[_Connector]:
    cache, transfer = vllm_config.cache_config, vllm_config.kv_transfer_config
    if cache.kv_offloading_size is not None:
        backend = str(cache.kv_offloading_backend)
        yield _Connector(_BY_BACKEND.get(backend, backend))
    elif transfer is not None and transfer.kv_connector is not None:
        yield from _single(
            _Connector(
                transfer.kv_connector, transfer.kv_connector_module_path, transfer.kv_connector_extra_config
            )
        )


def _single(connector: _Connector) -> Iterator[_Connector]:
    """The connector, or those that it delegates to."""
    if connector.kv_connector != SEVERAL or connector.kv_connector_module_path:
        yield connector
        return
    for child in connector.kv_connector_extra_config.get("connectors", ()):
        name, path = child["kv_connector"], child.get("kv_connector_module_path")
        yield from _single(_Connector(name, path, child.get("kv_connector_extra_config") or {}))


def _objection(connector: _Connector, release: Version) -> tuple[str, str] | None:
    """The objection, and a remedy besides another connector."""
    name = None if connector.kv_connector_module_path else connector.kv_connector
    if name in COPYING:
        return None
    if name in OFFLOADING:
        if release >= RESETS:
            return None
        return (
            "gets no notice that a sleep drops the cache, and may keep zeros for what was in it",
            "take vLLM 0.23 or later, ",
        )
    if name in WITHOUT_NOTICE:
        return WITHOUT_NOTICE[name], ""
    if release < UNREGISTERS:
        registers = "registers the KV cache with a network card"
        said = registers if name in BY_NETWORK else "is not known to be one that registers nothing"
        return f"{said}, and this vLLM does not have it unregister for a sleep", "take vLLM 0.33, "
    if name in BY_NETWORK or _speaks_for_itself(connector):
        # vLLM asks it, and refuses one that cannot.
        return None
    return (
        "says nothing of sleeping, and is not known to be one that registers nothing",
        "have its class define supports_sleep_mode, and if it registers unregister_kv_caches and "
        "restore_kv_caches, ",
    )


def _speaks_for_itself(connector: _Connector) -> bool:
    """Whether its class says that it can sleep, or what it then does."""
    package = "vllm.distributed.kv_transfer.kv_connector"
    factory: Any = importlib.import_module(f"{package}.factory")
    base: Any = importlib.import_module(f"{package}.v1.base")
    for module in (factory, base):
        _versions.check(_versions.running(), module)
    of, silent = factory.KVConnectorFactory.get_connector_class(connector), base.KVConnectorBase_V1
    return any(
        inspect.getattr_static(of, name, None) is not inspect.getattr_static(silent, name)
        for name in ("supports_sleep_mode", "unregister_kv_caches")
    )


def _running(gpu_worker: Any) -> Any:
    return gpu_worker.get_kv_transfer_group() if gpu_worker.has_kv_transfer_group() else None
