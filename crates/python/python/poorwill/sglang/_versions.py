"""The SGLang versions that poorwill knows, and what it needs of each.

`check` compares `CONTRACT` (`poorwill._contract`) with the sources of the SGLang that is installed, before
anything is hooked. So all processes of a server come to the same result, also those that never import what
others hook, and nothing is imported early. The tests compare the same list with the sources of `TESTED`.
"""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from poorwill import _contract, _sources
from poorwill._contract import Need, Version, in_module
from poorwill._native import PoorwillError
from poorwill.sglang._adapter import ADAPTER
from poorwill.sglang._answers import COMMUNICATOR, REQUESTS
from poorwill.sglang._generations import ALL, CONTEXT, Generation

TESTED = ("0.5.12", "0.5.15.post1", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
"""Versions whose sources the contract is checked against, and whose code the tests run with ours."""
RUN = ("0.5.23",)
"""Those of them that a quick run of the tests has."""

_NAMED = 3
"""How many missing names a refusal tells."""


class UnsupportedSglangError(PoorwillError):
    """Poorwill cannot work in this SGLang."""


def _needs() -> Iterator[Need]:
    managed, published, waiting, sent = (0, 5, 15), (0, 5, 20), (0, 5, 21), (0, 5, 23)
    # How the plugin is found and called, and what it hooks with.
    need = in_module("sglang.srt.plugins")
    yield need("GENERAL_PLUGINS_GROUP", "value")
    yield need("load_plugins", "function", is_whole=True)
    need = in_module("sglang.srt.plugins.hook_registry")
    yield need("HookRegistry.register", "classmethod", "target", "hook", "hook_type")
    yield need("HookType.AROUND", "value")

    # The adapter that ours is given for.
    need = in_module(ADAPTER)
    adapter = "TorchMemorySaverAdapter"
    yield need(f"{adapter}.create", "staticmethod", "enable", is_whole=True)
    yield need(f"{adapter}.check_validity", "method", "caller_name", is_whole=True)
    yield need(f"{adapter}.configure_subprocess", "method", is_whole=True)
    yield need(f"{adapter}.region", "method", "tag", "enable_cpu_backup", is_whole=True)
    yield need(f"{adapter}.cuda_graph", "method", "**kwargs", is_whole=True)
    yield need(f"{adapter}.disable", "method", is_whole=True)
    for call in ("pause", "resume"):
        yield need(f"{adapter}.{call}", "method", "tag", is_whole=True)
    yield need(f"{adapter}.enabled", "value")
    yield Need("sglang.srt.constants", "GPU_MEMORY_ALL_TYPES", "value")

    # Requests, and how errors are reported.
    need, communicator = _of_class(COMMUNICATOR)
    yield need(f"{communicator}.__call__", "method", "obj", is_whole=True, is_async=True)
    need = in_module(REQUESTS)
    for call in ("Release", "Resume"):
        for field in ("tags", "rid"):
            yield need(f"{call}MemoryOccupationReqInput.{field}", "field")
        yield need(f"{call}MemoryOccupationReqOutput.rid", "field")
    yield need("RpcReqOutput", "value")
    yield need("sock_send", "function", "socket", "obj", since=managed)

    # What releases and resumes.
    fields = ("memory_saver_adapter", "tp_cpu_group", "offload_tags")
    need, mixin = _of_class(ALL[0, 5, 12].manager)
    for call in ("release", "resume"):
        yield need(f"{mixin}.{call}_memory_occupation", "method", "recv_req", is_whole=True, until=managed)
    need, manager = _of_class(ALL[managed].manager)
    for call in ("release", "resume"):
        yield need(f"{manager}.{call}_memory_occupation", "method", "recv_req", is_whole=True, since=managed)
    for field in (*fields, "scheduler", "is_fully_idle", "stashed_model_static_state"):
        yield need(f"{manager}.{field}", "field", since=managed)

    # The scheduler: its loop, its ranks, and how it answers.
    need = in_module("sglang.srt.managers.scheduler")
    for field in ("memory_saver_adapter", "tp_cpu_group"):
        yield need(f"Scheduler.{field}", "field")
    yield need("Scheduler.offload_tags", "field", until=managed)
    yield need("Scheduler.is_fully_idle", "method", "for_health_check")
    yield need("Scheduler.is_fully_idle", "method", "for_health_check", "ignore_waiting", since=waiting)
    yield need("Scheduler._request_dispatcher", "field")
    yield need("Scheduler._pp_send_pyobj_to_next_stage", "method", "data", "async_send", is_whole=True)
    yield need("Scheduler.process_input_requests", "method", "recv_reqs", is_whole=True)
    yield need("Scheduler.world_group", "field")
    yield need("Scheduler._engine_paused", "field")
    for field in ("pp_size", "pp_rank", "send_to_tokenizer", "recv_from_rpc"):
        yield need(f"Scheduler.{field}", "field", until=managed)
    yield need("Scheduler.server_args", "field")
    yield need("Scheduler.ipc_channels", "field", since=managed)
    yield need("Scheduler.rust_server", "field", since=published)
    yield need("Scheduler.send_control_output", "method", "output", "recv_req", is_whole=True, since=sent)
    for queue in ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"):
        yield need(f"Scheduler.{queue}", "field")
    for module, name in (("prefill", "PrefillBootstrapQueue"), ("decode", "DecodePreallocQueue")):
        need = in_module(f"sglang.srt.disaggregation.{module}")
        for call in ("release", "resume"):
            yield need(f"{name}.{call}_memory_occupation", "method", is_whole=True, since=managed)
        yield need(f"{name}.kv_manager", "field")

    # Settings of ranks.
    settings = ("enable_dp_attention", "enable_dp_attention_local_control_broadcast")
    for field in settings:
        yield Need("sglang.srt.server_args", f"ServerArgs.{field}", "field", until=published)
    need = in_module(CONTEXT)
    yield need("get_parallel", "function", is_whole=True, since=managed)
    yield need("get_exec", "function", is_whole=True, since=published)
    yield need("ParallelContext.pp_size", "value", since=managed, until=published)
    yield need("ParallelContext.pp_rank", "value", since=managed, until=waiting)
    need = in_module("sglang.srt.arg_groups.fields.parallel")
    yield need("Parallel.pp_size", "field", since=published)
    yield need("Parallel.pp_rank", "field", since=waiting)
    yield need("Parallel.enable_dp_attention", "field", since=published)
    yield need("Parallel.enable_dp_attention_local_control_broadcast", "field", since=published)
    yield need("Parallel.attn_dp_enabled", "field", since=(0, 5, 22))
    yield Need("sglang.srt.arg_groups.fields.exec_", "ExecMoe.is_ep_scale_joiner", "field", since=published)


def _of_class(path: str) -> tuple[Callable[..., Need], str]:
    module, _, name = path.rpartition(".")
    return in_module(module), name


CONTRACT: Sequence[Need] = tuple(_needs())

REGISTRY = Need(
    *("sglang.srt.plugins.memory_savers", "MemorySavers.register", "classmethod"),
    ("name", "factory", "interface"),
    is_whole=True,
)
"""Memory savers by name, as they are proposed to SGLang (`contrib/upstream/sglang`). The number of their
interface stands for all needs of its adapter."""


class Fit(NamedTuple):
    """How the installed SGLang is hooked."""

    generation: Generation
    has_registry: bool
    """Whether our memory saver is registered by its name, and chosen by it."""


def running() -> str:
    """Version of this process's SGLang, or of the one that it would import."""
    said = getattr(sys.modules.get("sglang.version"), "__version__", None)
    if isinstance(said, str):
        return said
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def known(version: str) -> Version:
    """The release that a version belongs to. Raises UnsupportedSglangError if it is not known."""
    release = _contract.release(version)
    if release is None or release not in ALL:
        raise _unsupported(version, "its release is not known to this poorwill")
    return release


def needs(version: str, *, has_registry: bool = False) -> list[Need]:
    """The needs of this version."""
    release = known(version)
    concerned = [need for need in CONTRACT if need.concerns(release)]
    return [REGISTRY, *(need for need in concerned if need.module != ADAPTER)] if has_registry else concerned


def has_registry(tree: _sources.Tree) -> bool:
    """Whether sources have memory savers by name."""
    return _problem(tree, REGISTRY) is None


def problems(version: str, tree: _sources.Tree) -> list[str]:
    """What sources lack of the needs of a version."""
    wanted = needs(version, has_registry=has_registry(tree))
    return [said for need in wanted if (said := _problem(tree, need))]


def check(version: str | None = None, tree: _sources.Tree | None = None) -> Fit:
    """How the installed SGLang is hooked. Raises UnsupportedSglangError where it lacks something."""
    version = version or running()
    release = known(version)
    tree = tree or _sources.installed("sglang")
    if tree is None:
        raise _unsupported(version, "its sources are not there to be compared")
    try:
        wrong = problems(version, tree)
        fit = Fit(ALL[release](), has_registry(tree))
    finally:
        tree.forget()
    if wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise _unsupported(version, "; ".join(wrong[:_NAMED]) + more)
    return fit


def _problem(tree: _sources.Tree, need: Need) -> str | None:
    try:
        problem = need.problem(tree.found(need))
    except _sources.MissingError:
        return f"{need.name} is missing"
    except (OSError, SyntaxError, ValueError) as error:
        return f"{need.module} cannot be read ({error})"
    return problem and f"{need.name} {problem}"


def _unsupported(version: str, what: str) -> UnsupportedSglangError:
    *others, last = TESTED
    return UnsupportedSglangError(
        f"poorwill cannot work in SGLang {version}: {what}; it can in SGLang {', '.join(others)} and {last}"
    )
