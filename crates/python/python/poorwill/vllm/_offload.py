"""Offloaded weights in Poorwill's host memory: how our offloaders replace vLLM's.

With `POORWILL_OFFLOAD=1`, `create_offloader` returns our class for vLLM's (`_offload_uva`,
`_offload_prefetch`), of which ours need no more than the base class of all offloaders. Where vLLM has a
registry of them, ours are in it. Two more hooks act only for our offloaders. One is where vLLM moves
parameters to the device to change them and back. The other is where a worker rewrites weights or wakes.
Nothing here imports vLLM or PyTorch before vLLM does.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
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
"""Methods of the worker that rewrite weights; not every version has all."""

_refusals: list[UnsupportedVllmError] = []
# Our classes, by the names of backends.
_CLASSES = {
    "uva": ("poorwill.vllm._offload_uva", "UvaOffloader"),
    "prefetch": ("poorwill.vllm._offload_prefetch", "PrefetchOffloader"),
}
_CREATES = "create_offloader"
# vLLM's function of that name, which ours replaced.
_stock: Any = None


def refuse(refusal: UnsupportedVllmError) -> None:
    """Records that a module of vLLM's is unfit, so that no offloader is made."""
    _refusals.append(refusal)


# What is hooked


def install_base(module: ModuleType) -> None:
    """Has the function that makes an offloader, in `vllm.model_executor.offloader.base`, make ours."""
    global _stock
    if has_registry():
        if _environment.wants_offload():
            for name, (ours, of) in _CLASSES.items():
                module.register_offloader(name, ours, of)
        return
    found = getattr(module, _CREATES, None)
    if found is None:
        # vLLM's own error, which callers expect.
        raise _refusals[-1]
    if found is not create_offloader:
        _stock = found
        setattr(module, _CREATES, create_offloader)


def install_names(module: ModuleType) -> None:
    """The same where it was imported by name. Other modules are only checked."""
    if _stock is not None and getattr(module, _CREATES, None) is _stock:
        setattr(module, _CREATES, create_offloader)


def install_loading(module: ModuleType) -> None:
    """Makes our offloaders put back what vLLM moves to the device for a while."""
    if has_registry():
        return
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
    """Writes offloaded weights where they are stored, and refills buffers after a wake."""
    if has_registry():
        return
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
    """vLLM's offloader for a configuration, with our host memory.

    Raises ValueError for an unreadable switch, and ConfigurationError without an NVIDIA GPU. Raises
    UnsupportedVllmError for an unfit vLLM.
    """
    if not _environment.wants_offload():
        return _stock(offload_config)
    _refuse_vllm()
    made = _stock(offload_config)
    base = importlib.import_module(f"{OFFLOADER}.base")
    if type(made) is base.NoopOffloader:
        return made
    if type(made) is stood_for("uva", "UVAOffloader"):
        return _ours("uva")(made.cpu_offload_max_bytes, made.cpu_offload_params)
    if type(made) is stood_for("prefetch", "PrefetchOffloader"):
        return _ours("prefetch")(
            *(made.group_size, made.num_in_group, made.prefetch_step), made.offload_params, made.mode
        )
    raise PoorwillError(
        f"{_environment.OFFLOAD}=1 is for vLLM's own offloaders, and this vLLM has made a "
        f"{type(made).__name__}: unset it, or choose another --offload-backend"
    )


def _ours(name: str) -> Any:
    module, of = _CLASSES[name]
    return getattr(importlib.import_module(module), of)


def refuse_unfit() -> None:
    """Raises an error for what no offloader of ours can be made in, before anything is loaded."""
    _refuse_vllm()
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_cuda():
        raise ConfigurationError(
            f"{_environment.OFFLOAD}=1 offloads weights of NVIDIA's GPUs, and this vLLM runs on "
            f"{platform.device_name}: unset it for vLLM's own offloading"
        )
    _environment.read()
    offload.policy()


def _refuse_vllm() -> None:
    _versions.known(_versions.running(), _versions.WITHOUT_OFFLOAD)
    # Checks the hooks that are installed later.
    importlib.import_module("vllm.model_executor.model_loader.utils")
    if _refusals:
        raise _refusals[0]


def has_registry() -> bool:
    """Whether this vLLM has a registry of offloaders, and tells them what the hooks tell ours elsewhere."""
    return _versions.OFFLOADERS in _versions.extensions(_versions.imported)


def stood_for(module: str, name: str) -> Any:
    """The base class of ours: vLLM's own class, of which nothing is used, since some models look for it.

    Where vLLM has a registry, they ask what an offloader does.
    """
    if has_registry():
        return importlib.import_module(f"{OFFLOADER}.base").BaseOffloader
    return getattr(importlib.import_module(f"{OFFLOADER}.{module}"), name)


# What others ask


def current() -> Any:
    """This process's offloader, if it is ours."""
    base = sys.modules.get(f"{OFFLOADER}.base")
    offloader = None if base is None else base.get_offloader()
    return offloader if getattr(offloader, "is_poorwills", False) else None


def held_bytes() -> int:
    """Host memory of offloaded weights."""
    offloader = current()
    return 0 if offloader is None else int(offloader.host_bytes)
