"""Weights that vLLM offloads, in host memory of Poorwill's: how ours get into the place of vLLM's offloaders.

With `POORWILL_OFFLOAD=1` `create_offloader` gives, for what vLLM would make, ours of the same class
(`_offload_uva`, `_offload_prefetch`). Around it stand two more hooks, which do nothing for any other
offloader: where vLLM takes parameters to the device to change them and puts them back, and where a worker
writes weights anew or wakes. Nothing here imports vLLM or PyTorch before vLLM has.
"""

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from poorwill import offload
from poorwill._native import PoorwillError
from poorwill.vllm import _environment, _versions
from poorwill.vllm._platform import ConfigurationError
from poorwill.vllm._versions import UnsupportedVllmError

OFFLOADER = "vllm.model_executor.offloader"

WRITING = (
    *("reload_weights", "update_weights"),
    *("start_weight_update", "start_draft_weight_update", "finish_weight_update"),
)
"""Methods of the worker, as far as there are, that write weights anew."""

_refusals: list[UnsupportedVllmError] = []
# What stood where ours stands now, by name.
_stock: dict[str, Callable[..., Any]] = {}


def refuse(refusal: UnsupportedVllmError) -> None:
    """Remembers that a module of vLLM's is not as it has to be: no offloader is made then."""
    _refusals.append(refusal)


# What is hooked


def install_base(module: ModuleType) -> None:
    """Replaces the functions that `vllm.model_executor.offloader.base` defines."""
    for name, ours in _OURS.items():
        found = getattr(module, name, None)
        if found is None:
            # Whoever asks for it gets vLLM's own error, and would have to know ours.
            raise _refusals[-1]
        if found is not ours:
            _stock[name] = found
            setattr(module, name, ours)


def install_names(module: ModuleType) -> None:
    """Replaces them where they were imported by name."""
    for name, ours in _OURS.items():
        if name in _stock and getattr(module, name, None) is _stock[name]:
            setattr(module, name, ours)


def install_loading(module: ModuleType) -> None:
    """Has our offloaders put back what vLLM takes to the device for a while."""
    stock = getattr(module, "device_loading_context", None)
    if stock is None or getattr(stock, "__poorwill__", False):
        return

    @contextlib.contextmanager
    def device_loading_context(module: Any, target_device: Any) -> Iterator[Any]:
        offloader = current()
        is_ours = offloader is not None and target_device.type != "cpu"
        with (
            offloader.loading(module, target_device) if is_ours else contextlib.nullcontext(),
            stock(module, target_device) as entered,
        ):
            yield entered

    functools.update_wrapper(device_loading_context, stock)
    device_loading_context.__dict__["__poorwill__"] = True
    module.__dict__["device_loading_context"] = device_loading_context


def install_worker(module: ModuleType) -> None:
    """Has offloaded weights written where they are kept, and brought in again when the others are back."""
    worker = getattr(module, "Worker", None)
    for name in (*WRITING, "wake_up"):
        stock = getattr(worker, name, None)
        if stock is not None and not getattr(stock, "__poorwill__", False):
            hooked = _waking(stock) if name == "wake_up" else _writing(stock)
            hooked.__dict__["__poorwill__"] = True
            setattr(worker, name, hooked)


def _writing(stock: Any) -> Any:
    @functools.wraps(stock)
    def writing(self: Any, *args: Any, **kwargs: Any) -> Any:
        offloader = current()
        with contextlib.nullcontext() if offloader is None else offloader.writing():
            return stock(self, *args, **kwargs)

    return writing


def _waking(stock: Any) -> Any:
    @functools.wraps(stock)
    def wake_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = stock(self, *args, **kwargs)
        tags = args[0] if args else kwargs.get("tags")
        offloader = current()
        if offloader is not None and (tags is None or "weights" in tags):
            offloader.refill()
        return done

    return wake_up


# What stands in the place of vLLM's


def create_offloader(offload_config: Any) -> Any:
    """vLLM's offloader for a configuration, with host memory of ours.

    Raises ValueError for a switch that cannot be read, ConfigurationError where there is no NVIDIA GPU, and
    UnsupportedVllmError for a vLLM that is not as it has to be.
    """
    stock = _stock["create_offloader"]
    if not _environment.wants_offload():
        return stock(offload_config)
    _versions.known(_versions.running(), _versions.WITHOUT_OFFLOAD)
    # What is hooked later than this is looked at now.
    importlib.import_module("vllm.model_executor.model_loader.utils")
    if _refusals:
        raise _refusals[0]
    made = stock(offload_config)
    base = importlib.import_module(f"{OFFLOADER}.base")
    if type(made) is base.NoopOffloader:
        return made
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_cuda():
        raise ConfigurationError(
            f"{_environment.OFFLOAD}=1 offloads weights of NVIDIA's GPUs, and this vLLM runs on "
            f"{platform.device_name}: unset it for vLLM's own offloading"
        )
    # What cannot be read is told before anything is loaded.
    _environment.read()
    offload.policy()
    kind = type(made).__name__
    if type(made) is importlib.import_module(f"{OFFLOADER}.uva").UVAOffloader:
        return importlib.import_module("poorwill.vllm._offload_uva").UvaOffloader(
            made.cpu_offload_max_bytes, made.cpu_offload_params
        )
    if type(made) is importlib.import_module(f"{OFFLOADER}.prefetch").PrefetchOffloader:
        return importlib.import_module("poorwill.vllm._offload_prefetch").PrefetchOffloader(
            *(made.group_size, made.num_in_group, made.prefetch_step), made.offload_params, made.mode
        )
    raise PoorwillError(
        f"{_environment.OFFLOAD}=1 is for vLLM's own offloaders, and this vLLM has made a {kind}: unset "
        "it, or choose another --offload-backend"
    )


def should_pin_memory() -> bool:
    """vLLM's answer, and ours: our switch counts where it asks. It is asked before each copy."""
    return bool(_stock["should_pin_memory"]()) and os.environ.get("POORWILL_DISABLE_PIN") != "1"


_OURS: dict[str, Callable[..., Any]] = {
    "create_offloader": create_offloader,
    "should_pin_memory": should_pin_memory,
}


# What others ask


def current() -> Any:
    """The offloader of this process, if it is ours."""
    base = sys.modules.get(f"{OFFLOADER}.base")
    offloader = None if base is None else base.get_offloader()
    return offloader if getattr(offloader, "is_poorwills", False) else None


def held_bytes() -> int:
    """Host memory that offloaded weights have."""
    offloader = current()
    return 0 if offloader is None else int(offloader.host_bytes)
