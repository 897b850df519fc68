"""vLLM's prefetching offloader with our host memory: `--offload-backend prefetch`.

vLLM decides which layers are offloaded, and owns the GPU buffers, copies and waits. We own the memory that
is copied from. It has exactly the weights' current size, is page-locked as the switches say, and takes
rewritten weights.
"""

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any, NoReturn

from poorwill import offload
from poorwill._native import PoorwillError
from poorwill.offload._layout import Layout, flat_bytes
from poorwill.offload._plans import Selection, next_of
from poorwill.vllm import _offload_memory
from poorwill.vllm._offload_memory import gib, listed

_prefetch: Any = importlib.import_module("vllm.model_executor.offloader.prefetch")
torch: Any = importlib.import_module("torch")
logger: Any = _offload_memory.logger()

MODE = "poorwill"
"""vLLM's name of a storage mode; its own is `cpu`."""


def _source_of(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except OSError:
        return ""


# How versions count that `_start_prefetch` has to correct.
_GOES_ROUND = "(index + self.prefetch_step) % len(self.module_offloaders)" in _source_of(
    _prefetch.PrefetchOffloader._hook_module_forward
)

_LOWER = "raise --offload-group-size or lower --offload-num-in-group"


class PrefetchOffloader(_prefetch.PrefetchOffloader):  # type: ignore[misc]
    """vLLM's class, so that models which look for it find it."""

    is_poorwills = True

    def __init__(
        self,
        group_size: int,
        num_in_group: int,
        prefetch_step: int,
        offload_params: set[str] | None = None,
        mode: str = "cpu",
    ) -> None:
        super().__init__(group_size, num_in_group, prefetch_step, offload_params, mode)
        self._selection = Selection.of(sorted(self.offload_params))
        if mode != "cpu":
            raise PoorwillError(
                f"vLLM prefetches in the mode {mode!r}, and poorwill knows 'cpu': unset POORWILL_OFFLOAD"
            )
        self.mode = MODE
        self._writers = 0

    @property
    def host_bytes(self) -> int:
        """Host memory that it has."""
        storages = [each.host_storage for each in self._parameters() if each.host_storage is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _parameters(self) -> Iterator["ParameterInHost"]:
        for layer in self.module_offloaders:
            yield from layer._param_offloaders.values()

    # Building and loading the model

    def wrap_modules(self, modules_generator: Any, *args: Any, **kwargs: Any) -> Any:
        with _Layers(self) as layers:
            modules = super().wrap_modules(layers.looked_at(modules_generator), *args, **kwargs)
        layers.refuse_untied(self._parameters())
        if not self.module_offloaders:
            logger.warning(
                "Nothing is offloaded: of %d layers, --offload-group-size %d, --offload-num-in-group %d and "
                "--offload-params %s mean none",
                *(len(modules), self.group_size, self.num_in_group),
                ", ".join(self._selection.patterns) or "(all)",
            )
        return modules

    @contextlib.contextmanager
    def loading(self, module: Any, target_device: Any) -> Iterator[None]:
        """Around a change of a module's parameters on the device.

        Afterwards they are copied back into their host memory, or into memory of their new size.
        """
        inside = {id(parameter) for parameter in module.parameters()}
        ours = [each for each in self._parameters() if id(each.parameter) in inside and each.is_at_rest]
        for each in ours:
            # vLLM would copy what it sees on the CPU to memory of its own.
            each.parameter.data = each.parameter.data.to(target_device)
        yield
        for each in ours:
            each.sync_cpu_storage()

    def post_init(self) -> None:
        super().post_init()
        self._tell()

    def _tell(self) -> None:
        names = [each.name for layer in self.module_offloaders for each in layer._param_offloaders.values()]
        unmatched = self._selection.unmatched(names)
        if unmatched and self.module_offloaders:
            logger.warning(
                "--offload-params: no layer that is offloaded has a parameter called %s, so nothing is "
                "offloaded for %s; offloaded are %s",
                *(", ".join(unmatched), "it" if len(unmatched) == 1 else "them"),
                listed(list(dict.fromkeys(names))),
            )
        if self.module_offloaders:
            logger.info(
                "Weights in Poorwill's host memory: %s of %d layers, %s ahead of their use",
                *(gib(self.host_bytes), len(self.module_offloaders)),
                _offload_memory.kind(_prefetch.should_pin_memory()),
            )

    # While the engine runs

    def _start_prefetch(self, layer_idx: int) -> None:
        """Copies a layer's weights into its buffers.

        Some versions request the layer `prefetch_step` ahead, modulo the number of layers. The latest may so
        overwrite a layer that is still to be computed. The right one is the next layer of the same buffers,
        or their first.
        """
        if _GOES_ROUND:
            layers = len(self.module_offloaders)
            done = (layer_idx - self.prefetch_step) % layers
            layer_idx = next_of(done, layers, self.prefetch_step)
        super()._start_prefetch(layer_idx)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around a rewrite of weights: the parameters are their host memory meanwhile.

        Where allowed they are at their device address, so that the GPU computes what derives from them. In
        the buffers the new bytes would be lost with the next copy.
        """
        # Those with buffers. A reload replaces parameters for a while.
        ours = [each for each in self._parameters() if each._gpu_buffer is not None]
        if not ours or self._writers:
            yield
            return
        # Nothing is copied while it is written.
        self.copy_stream.synchronize()
        self._writers += 1
        try:
            for each in ours:
                each.parameter.data = each.host_for_writing()
            yield
        finally:
            self._writers -= 1
            for each in ours:
                each.parameter.data = each._gpu_buffer
            self.refill()

    def refill(self) -> None:
        """Copies the first layers in, as the previous forward would have.

        Needed when buffers are back after a sleep, or when weights changed.
        """
        if self.buffer_pool is not None:
            for layer in self.module_offloaders[: self.prefetch_step]:
                layer.start_onload_to_static()


class _Layers:
    """What is shared between layers, collected while vLLM visits one after the other."""

    current: "_Layers | None" = None

    def __init__(self, offloader: PrefetchOffloader) -> None:
        self._offloader = offloader
        self._module: Any = None
        self._number = -1
        # All parameters by their first name, and those in several layers by another.
        self._names: dict[int, str] = {}
        self._others: dict[int, str] = {}
        # Replacements of storages that several parameters of the module share. Keeps them alive.
        self._shared: dict[int, tuple[Any, Any]] = {}
        self._tied: list[list[Any]] = []
        self._taken: dict[int, Any] = {}

    def __enter__(self) -> "_Layers":
        _Layers.current = self
        return self

    def __exit__(self, *_: object) -> None:
        _Layers.current = None

    def looked_at(self, modules: Iterator[Any]) -> Iterator[Any]:
        """Yields the modules. Raises PoorwillError for one that shares a parameter with an offloaded one."""
        for number, module in enumerate(modules):
            self._number = number
            for name, parameter in module.named_parameters(prefix=f"#{number}"):
                if self._names.setdefault(id(parameter), name) != name:
                    self._others[id(parameter)] = name
                    if id(parameter) in self._taken:
                        self._refuse_tied(parameter)
            yield module

    def _refuse_tied(self, parameter: Any) -> NoReturn:
        raise PoorwillError(
            f"{self._others[id(parameter)]} and {self._names[id(parameter)]} are one parameter, and "
            "prefetching gives each layer buffers of its own: leave it out by naming others with "
            "--offload-params, or take --offload-backend uva"
        )

    def host_of(self, module: Any, name: str, parameter: Any) -> Any:
        """Host memory for a parameter, with its bytes. Tied parameters stay tied."""
        device = parameter.device
        if module is not self._module:
            self._module, self._shared = module, {}
        said = f"#{self._number}.{name}"
        if id(parameter) in self._others:
            self._refuse_tied(parameter)
        # Kept, so that its id stays unique.
        self._taken[id(parameter)] = parameter
        if device.type not in _offload_memory.DEVICES:
            raise PoorwillError(
                f"{said} is to be prefetched and has no memory on a GPU, but is on {device}, as weights are "
                "that are quantised while they are loaded: take a checkpoint that is quantised, or "
                "--offload-backend uva"
            )
        if len(self._taken) == 1:
            _offload_memory.keep_to_budget(self._offloader, device)
        storage = parameter.data.untyped_storage()
        key = storage.data_ptr()
        users = [each for each in module.parameters() if _address(each) == key]
        if key not in self._shared and (len(users) == 1 or not key):
            return hosted(parameter.data, said, device)
        if key not in self._shared:
            # All that see it, before the first of them leaves it.
            self._tied.append(users)
            nbytes = max(Layout.of(each.data).nbytes for each in users)
            self._shared[key] = (hosted(flat_bytes(storage, nbytes, device), said, device), storage)
        return Layout.of(parameter.data).over(self._shared[key][0])

    def refuse_untied(self, offloaded: Iterator["ParameterInHost"]) -> None:
        """Raises PoorwillError where one of several parameters of the same memory stays on the GPU."""
        names = {id(each.parameter): each.name for each in offloaded}
        for users in self._tied:
            ours = [names[id(each)] for each in users if id(each) in names]
            if len(ours) < len(users):
                raise PoorwillError(
                    f"{' = '.join(ours)} shares its memory with parameters of its layer that are not meant "
                    "by --offload-params: name all of them, or none"
                )


class ParameterInHost(_prefetch._CpuParamOffloader):  # type: ignore[misc]
    """One parameter of a layer, in our host memory."""

    def __init__(self, module: Any, param_name: str) -> None:
        self.parameter: Any = None
        self.name: str = param_name
        self.is_pinned = bool(_prefetch.should_pin_memory())
        super().__init__(module, param_name)

    @property
    def host_storage(self) -> Any:
        """The memory; None if it has none any more."""
        return None if self._cpu_storage is None else self._cpu_storage.untyped_storage()

    @property
    def is_at_rest(self) -> bool:
        """Whether the parameter is its host memory, as before the buffers are made."""
        return self._cpu_storage is not None and _address(self.parameter) == self.host_storage.data_ptr()

    def host_for_writing(self) -> Any:
        """The host memory, at its device address if it has one."""
        host = self._cpu_storage
        if not (host.numel() and self.is_pinned and offload.policy().uva):
            return host
        return offload.device_view(host, device=_offload_memory.home(self._home))

    def _offload_to_cpu_internal(self) -> None:
        self.parameter = self._param
        self._home = self.parameter.device
        assert _Layers.current is not None
        self._cpu_storage = _Layers.current.host_of(self._module, self.name, self.parameter)
        self.offloaded_bytes = self._cpu_storage.numel() * self._cpu_storage.element_size()
        self.parameter.data = self._cpu_storage

    def sync_cpu_storage(self) -> None:
        try:
            parameter = self._param
        except AttributeError:
            parameter = None
        if parameter is None:
            # A deleted parameter has no memory; vLLM skips it from now on.
            self._param_deleted, self._cpu_storage, self.parameter = True, None, None
            return
        self._param_deleted = False
        self._update_cpu_storage_from_param()

    def _update_cpu_storage_from_param(self) -> None:
        """Copies the parameter to host memory, and makes it refer to that."""
        self.parameter = parameter = self._param
        if self.is_at_rest:
            # Strides may differ.
            self._cpu_storage = parameter.data
            return
        if self._cpu_storage is not None and _is_alike(self._cpu_storage, parameter.data):
            self._cpu_storage.copy_(parameter.data)
        else:
            # The replaced memory is freed first.
            self._cpu_storage = None
            self._cpu_storage = hosted(parameter.data, self.name, self._home)
            self.offloaded_bytes = self._cpu_storage.numel() * self._cpu_storage.element_size()
        parameter.data = self._cpu_storage


def hosted(tensor: Any, name: str, device: Any) -> Any:
    """A CPU tensor with a tensor's bytes and strides, in host memory of exactly its size."""
    is_pinned = bool(_prefetch.should_pin_memory())
    elements = sum(
        (extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    elements = 0 if 0 in tensor.shape else elements + 1
    if not elements:
        return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")
    with _offload_memory.explaining(f"offloading {name} for prefetching", _LOWER):
        buffer = offload.HostBuffer(
            elements * tensor.element_size(), device=_offload_memory.home(device), pin=is_pinned
        )
    flat = offload.host_tensor(buffer, (elements,), tensor.dtype)
    host = flat.as_strided(tuple(tensor.shape), tensor.stride())
    host.copy_(tensor)
    return host


def _address(tensor: Any) -> int:
    return int(tensor.data.untyped_storage().data_ptr())


def _is_alike(one: Any, other: Any) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


_create = _prefetch._BaseParamOffloader.create


def create(mode: str, **kwargs: Any) -> Any:
    """vLLM's own mode and ours; no other offloader has it."""
    return ParameterInHost(**kwargs) if mode == MODE else _create(mode, **kwargs)


_prefetch._BaseParamOffloader.create = staticmethod(create)
