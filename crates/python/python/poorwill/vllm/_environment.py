"""The plugin's settings, from environment variables. Each has a default; a bad value is a ValueError."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from poorwill import _cache
from poorwill._environment import BROKER as BROKER
from poorwill._environment import LEND as LEND
from poorwill._environment import PEER_COPIES as PEER_COPIES
from poorwill._environment import SLEEP_MODE as SLEEP_MODE
from poorwill._environment import WAKE_TIMEOUT as WAKE_TIMEOUT
from poorwill._environment import WAKE_TIMEOUT_S
from poorwill._environment import check_peer_copies as _check_peer_copies
from poorwill._environment import choice as _choice
from poorwill._environment import folder as _folder
from poorwill._environment import path as _path
from poorwill._environment import seconds as _seconds
from poorwill._environment import switch as _switch
from poorwill._environment import wants_sleep_mode as wants_sleep_mode
from poorwill._native import parse_bytes
from poorwill._ranks import RANKS_FOLDER as RANKS_FOLDER
from poorwill._ranks import RANKS_TIMEOUT as RANKS_TIMEOUT

OFFLOAD = "POORWILL_OFFLOAD"
BUDGET = "POORWILL_BUDGET"
HOST_BUDGET = "POORWILL_HOST_BUDGET"
CACHE_LIMIT = "POORWILL_CACHE_LIMIT"
PAGEABLE = "POORWILL_PAGEABLE"
PREPARE = "POORWILL_PREPARE"
KEEP_BACKUPS = "POORWILL_KEEP_BACKUPS"
KEEP_AWAKE = "POORWILL_KEEP_AWAKE"
COMPRESS = "POORWILL_COMPRESS"
LINKS = "POORWILL_LINKS"
DISK = "POORWILL_DISK"
DISK_LIMIT = "POORWILL_DISK_LIMIT"
GRAPHS = "POORWILL_GRAPHS"
AFTER_LEVEL2 = "POORWILL_AFTER_LEVEL2"
TRITON = "POORWILL_TRITON"
TRITON_SHARED_MEMORY = "POORWILL_TRITON_SHARED_MEMORY"
RECORD = "POORWILL_RECORD"

TAGS = frozenset({"weights", "kv_cache", "runtime", "workspace", "cudagraph", "default"})
"""vLLM's tags of memory; a sleep needs a policy for each."""


@dataclass(frozen=True)
class Environment:
    """Every setting of the plugin, parsed."""

    sleep_mode: bool = False
    """Whether sleep mode is Poorwill's; a backend other than vLLM's default is then refused."""
    offload: bool = False
    """Whether weights that vLLM offloads are in Poorwill's host memory."""
    budget: str | None = None
    """What one engine may use of its GPU, in bytes or as a share; replaces `--gpu-memory-utilization`."""
    host_budget_bytes: int | None = None
    """Host memory for backups and offloaded weights, for each GPU."""
    cache_limit_bytes: int | None = None
    """Freed memory that stays mapped for reuse during a load, PyTorch's cache of it included."""
    pageable: bool = False
    """Whether backups are in pageable instead of page-locked memory."""
    prepare: bool | None = None
    """Whether the weights are backed up in the background once the engine has started; by default, unless the
    GPU shares the computer's memory"""
    keep_backups: bool | None = None
    """Whether backups stay in host memory after a wake, for the next sleep; by default, unless
    the GPU shares the computer's memory"""
    keep_awake: tuple[str, ...] = ()
    """Tags that no sleep of the engine touches: `weights` where a trainer in the process shares them"""
    compress: Literal["auto", "off", "always"] = "auto"
    """Whether backups are stored as codes, of seven tenths of bf16 weights; `auto`: where codes are fast"""
    links: bool = False
    """Whether wakes use the links of the other GPUs that the engine sees, too; takes 0.26 GiB of each"""
    disk: str | None = None
    """Where backups go that host memory cannot hold"""
    disk_limit_bytes: int | None = None
    """What they may take there, for each GPU"""
    lend: bool = False
    """Whether sleeps lend memory: it stays on the GPU until another process needs it"""
    broker: str | None = None
    """The broker at which they do; by default the user's own"""
    peer_copies: bool = False
    """Whether sleeps keep copies in the idle memory of the other GPUs that it sees; with `POORWILL_LEND`"""
    graphs: bool = True
    """Whether CUDA graphs sleep on one GPU, from 0.32 on; `0`: only with `--sleep-mode-offload-cudagraph`"""
    wake_timeout_s: float = WAKE_TIMEOUT_S
    """How long a start or a wake waits for memory that another process is about to release."""
    ranks_timeout_s: float = 300.0
    """How long a rank that is ready to sleep or wake waits for the other ranks, before it goes back"""
    ranks_folder: str | None = None
    """A folder that the ranks of several machines share, to sleep and wake together or not at all"""
    after_level2: Literal["refuse", "serve"] = "refuse"
    """Whether requests after a wake from level 2 are refused or served until all weights are written."""
    triton: bool = False
    """Whether configurations of vLLM's kernels that exceed the GPU's shared memory are dropped."""
    triton_shared_memory_bytes: int | None = None
    """Upper bound of a thread block's shared memory for that, where the GPU has more."""
    record: str | None = None
    """Where each rank writes what its start allocates: `rank0.pickle` and the like, for `poorwill replay`"""

    def lending(self) -> bool | str | None:
        """What `poorwill.arena` is given as `lend`."""
        return (self.broker or True) if self.lend else None


def read(environ: Mapping[str, str] | None = None) -> Environment:
    """Reads the settings from `environ`, or from this process's environment.

    Raises ValueError with the variable, its value, and the accepted values.
    """
    given = os.environ if environ is None else environ
    default = Environment()
    _check_peer_copies(given)
    if given.get(DISK_LIMIT, "").strip() and not given.get(DISK, "").strip():
        raise ValueError(f"{DISK_LIMIT}={given[DISK_LIMIT]!r} bounds a disk, and {DISK} names none: set both")
    return Environment(
        sleep_mode=_switch(given, SLEEP_MODE, default.sleep_mode),
        offload=_switch(given, OFFLOAD, default.offload),
        budget=_budget(given),
        host_budget_bytes=_bytes(given, HOST_BUDGET),
        cache_limit_bytes=_cache_limit(given),
        pageable=_switch(given, PAGEABLE, default.pageable),
        prepare=_choice(given, PREPARE),
        keep_backups=_choice(given, KEEP_BACKUPS),
        keep_awake=_keep_awake(given),
        compress=_compress(given),
        links=_switch(given, LINKS, default.links),
        disk=_folder(given, DISK),
        disk_limit_bytes=_bytes(given, DISK_LIMIT),
        lend=_switch(given, LEND, default.lend),
        broker=_path(given, BROKER),
        peer_copies=_switch(given, PEER_COPIES, default.peer_copies),
        graphs=_switch(given, GRAPHS, default.graphs),
        wake_timeout_s=_seconds(given, WAKE_TIMEOUT, default.wake_timeout_s),
        ranks_timeout_s=_seconds(given, RANKS_TIMEOUT, default.ranks_timeout_s),
        ranks_folder=_folder(given, RANKS_FOLDER),
        after_level2=_after_level2(given),
        triton=_switch(given, TRITON, default.triton),
        triton_shared_memory_bytes=triton_shared_memory_bytes(given),
        record=record_folder(given),
    )


def wants_graphs(environ: Mapping[str, str] | None = None) -> bool:
    """`graphs` alone."""
    return _switch(os.environ if environ is None else environ, GRAPHS, Environment.graphs)


def wants_offload(environ: Mapping[str, str] | None = None) -> bool:
    """`offload` alone."""
    return _switch(os.environ if environ is None else environ, OFFLOAD, Environment.offload)


def wants_triton(environ: Mapping[str, str] | None = None) -> bool:
    """`triton` alone."""
    return _switch(os.environ if environ is None else environ, TRITON, Environment.triton)


def triton_shared_memory_bytes(environ: Mapping[str, str] | None = None) -> int | None:
    """`triton_shared_memory_bytes` alone."""
    given = os.environ if environ is None else environ
    text = given.get(TRITON_SHARED_MEMORY, "").strip()
    if text and not _is_size(text):
        raise ValueError(
            f"{TRITON_SHARED_MEMORY}={text!r} is no size above 0: write it like 99KiB, or in bytes"
        )
    return _bytes(given, TRITON_SHARED_MEMORY)


def record_folder(environ: Mapping[str, str] | None = None) -> str | None:
    """`record` alone. Any text is a folder, which is made when the record begins."""
    return (os.environ if environ is None else environ).get(RECORD, "").strip() or None


def _keep_awake(environ: Mapping[str, str]) -> tuple[str, ...]:
    names = [name.strip() for name in environ.get(KEEP_AWAKE, "").split(",") if name.strip()]
    unknown = [name for name in names if name not in TAGS]
    if unknown:
        raise ValueError(
            f"{KEEP_AWAKE}={environ[KEEP_AWAKE]!r} names {', '.join(unknown)}, which is no tag of vLLM's: "
            f"there are {', '.join(sorted(TAGS))}"
        )
    return tuple(dict.fromkeys(names))


def _compress(environ: Mapping[str, str]) -> Literal["auto", "off", "always"]:
    text = environ.get(COMPRESS, "").strip() or Environment.compress
    if text not in ("auto", "off", "always"):
        raise ValueError(f"{COMPRESS}={text!r} is none of auto, off, always")
    return cast(Literal["auto", "off", "always"], text)


def _after_level2(environ: Mapping[str, str]) -> Literal["refuse", "serve"]:
    text = environ.get(AFTER_LEVEL2, "").strip() or Environment.after_level2
    if text not in ("refuse", "serve"):
        raise ValueError(
            f"{AFTER_LEVEL2}={text!r} is neither refuse, until all weights were written, nor serve, whatever "
            "they are"
        )
    return cast(Literal["refuse", "serve"], text)


def _bytes(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r} is no size ({error}): write it like 64GiB, or in bytes") from None


def _cache_limit(environ: Mapping[str, str]) -> int | None:
    limit_bytes = _bytes(environ, CACHE_LIMIT)
    if limit_bytes is not None:
        _cache.check_limit(f"{CACHE_LIMIT}={environ[CACHE_LIMIT]!r}", limit_bytes)
    return limit_bytes


def _budget(environ: Mapping[str, str]) -> str | None:
    text = environ.get(BUDGET, "").strip()
    if not text:
        return None
    if _share(text) or _is_size(text):
        return text
    raise ValueError(f"{BUDGET}={text!r} is neither a size like 22528MiB nor a share like 0.92 or 92%")


def _is_size(text: str) -> bool:
    try:
        return parse_bytes(text) > 0
    except ValueError:
        return False


def _share(text: str) -> bool:
    number = text.removesuffix("%")
    if number == text and "." not in text:
        return False
    try:
        share = float(number) / (100 if number != text else 1)
    except ValueError:
        return False
    return 0 < share <= 1
