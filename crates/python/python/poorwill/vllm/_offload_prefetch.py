"""A prefetching offloader with our host memory: `--offload-backend prefetch`.

Layers, groups and steps are meant as vLLM means them, and its operators (`wait_prefetch`, `start_prefetch`)
call it, so that compiling and CUDA graphs know it. The rest is ours. Host memory has exactly the weights'
current size, page-locked as the switches say. The parameters are buffers on the GPU while the engine runs,
filled ahead of their use. Weights may be rewritten.
"""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from poorwill import offload
from poorwill._native import PoorwillError
from poorwill.offload._layout import Layout, flat_bytes
from poorwill.offload._plans import Selection, next_of
from poorwill.vllm import _offload, _offload_memory
from poorwill.vllm._offload_memory import gib, listed

_base: Any = importlib.import_module("vllm.model_executor.offloader.base")
# It registers the operators.
importlib.import_module("vllm.model_executor.offloader.prefetch_ops")
torch: Any = importlib.import_module("torch")
logger: Any = _offload_memory.logger()

_LOWER = "raise --offload-group-size or lower --offload-num-in-group"


class PrefetchOffloader(_offload.stood_for("prefetch", "PrefetchOffloader")):  # type: ignore[misc]
    """Takes layers, and copies each to its buffers while those before it run."""

    is_poorwills = True
    hooks_forward = True

    def __init__(
        self,
        group_size: int,
        num_in_group: int,
        prefetch_step: int,
        offload_params: set[str] | None = None,
        mode: str = "cpu",
    ) -> None:
        _offload.refuse_unfit()
        if mode != "cpu":
            raise PoorwillError(
                f"vLLM prefetches in the mode {mode!r}, and poorwill knows 'cpu': unset POORWILL_OFFLOAD"
            )
        self.group_size = group_size
        self.num_in_group = num_in_group
        self.prefetch_step = prefetch_step
        self.offload_params = offload_params or set()
        self.layers: list[_Layer] = []
        self._selection = Selection.of(sorted(self.offload_params))
        self._stream = torch.cuda.Stream()
        self._has_buffers = False
        self._writers = 0

    @property
    def host_bytes(self) -> int:
        """Host memory that it has."""
        storages = [each.host.untyped_storage() for each in self.weights() if each.host is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def weights(self) -> Iterator["Weight"]:
        """All that are offloaded."""
        for layer in self.layers:
            yield from layer.weights

    # Building and loading the model

    def wrap_modules(self, modules_generator: Any, prefix: str = "") -> list[Any]:
        """Takes the last `num_in_group` of each `group_size` layers, one before the next is built."""
        if self.layers:
            raise PoorwillError("vLLM has given its prefetching offloader a second row of layers")
        modules, shared = [], _Shared(self)
        for number, module in enumerate(modules_generator):
            modules.append(module)
            shared.look_at(number, module)
            if number % self.group_size < self.group_size - self.num_in_group:
                continue
            names = [
                name
                for name, _ in module.named_parameters()
                if self._selection.has(f"{prefix}.{name}" if prefix else name)
            ]
            if names:
                weights = [Weight(module, name, shared) for name in names]
                self.layers.append(_Layer(module, weights, self._stream))
        shared.refuse_untied(self.weights())
        for index, layer in enumerate(self.layers):
            self._put_forward_around(index, layer.module)
        if not self.layers:
            logger.warning(
                "Nothing is offloaded: of %d layers, --offload-group-size %d, --offload-num-in-group %d and "
                "--offload-params %s mean none",
                *(len(modules), self.group_size, self.num_in_group),
                ", ".join(self._selection.patterns) or "(all)",
            )
        return modules

    def _put_forward_around(self, index: int, module: Any) -> None:
        """Waits for a layer's weights before it runs, and has the next of its buffers copied after it.

        The operators are said to change what they are given, so that a compiler keeps their order.
        """
        inner = module.forward
        following = next_of(index, len(self.layers), self.prefetch_step)

        def forward(*args: Any, **kwargs: Any) -> Any:
            module.forward = inner
            torch.ops.vllm.wait_prefetch(args[0] if args else kwargs.get("hidden_states"), index)
            output = inner(*args, **kwargs)
            torch.ops.vllm.start_prefetch(output[0] if isinstance(output, tuple) else output, following)
            module.forward = forward
            return output

        module.forward = forward

    @contextlib.contextmanager
    def loading(self, module: Any, target_device: Any) -> Iterator[None]:
        """Around a change of a module's parameters on the device.

        Afterwards they are copied back into their host memory, or into memory of their new size.
        """
        inside = {id(parameter) for parameter in module.parameters()}
        ours = [each for each in self.weights() if id(each.parameter) in inside and each.is_at_rest]
        for each in ours:
            # vLLM would copy what it sees on the CPU to memory of its own.
            each.parameter.data = each.parameter.data.to(target_device)
        yield
        for each in ours:
            each.settle()

    def post_init(self) -> None:
        """After the model is loaded: makes the buffers, and copies the first layers into them."""
        for layer in self.layers:
            layer.settle()
        buffers: dict[Any, Any] = {}
        for index, layer in enumerate(self.layers):
            for each in layer.weights:
                layout = (tuple(each.host.shape), each.host.stride())
                # Weights of one name share buffers, and those of one layer do not.
                key = (index % self.prefetch_step, each.name, *layout, each.host.dtype)
                if key not in buffers:
                    buffers[key] = torch.empty_strided(*layout, dtype=each.host.dtype, device=layer.device)
                each.buffer = each.parameter.data = buffers[key]
        self._has_buffers = True
        self.refill()
        self._tell()

    def _tell(self) -> None:
        names = [each.name for each in self.weights()]
        unmatched = self._selection.unmatched(names)
        if unmatched and self.layers:
            logger.warning(
                "--offload-params: no layer that is offloaded has a parameter called %s, so nothing is "
                "offloaded for %s; offloaded are %s",
                *(", ".join(unmatched), "it" if len(unmatched) == 1 else "them"),
                listed(list(dict.fromkeys(names))),
            )
        if self.layers:
            logger.info(
                "Weights in Poorwill's host memory: %s of %d layers, %s ahead of their use",
                *(gib(self.host_bytes), len(self.layers)),
                _offload_memory.kind(_is_pinned()),
            )

    # While the engine runs

    def _wait_for_layer(self, layer_idx: int) -> None:
        self.layers[layer_idx].wait()

    def _start_prefetch(self, layer_idx: int) -> None:
        self.layers[layer_idx].start()

    def sync_prev_onload(self) -> None:
        """Before a graph is captured or replayed: waits for all copies."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def join_after_forward(self) -> None:
        """At the end of a capture: waits for the copies that were started in it."""
        for layer in self.layers:
            layer.join()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around a rewrite of weights: the parameters are their host memory meanwhile.

        Where allowed they are at their device address, so that the GPU computes what derives from them. In
        the buffers the new bytes would be lost with the next copy.
        """
        # Those with buffers. A reload replaces parameters for a while.
        ours = [each for each in self.weights() if each.buffer is not None]
        if not ours or self._writers:
            yield
            return
        # Nothing is copied while it is written.
        self._stream.synchronize()
        self._writers += 1
        try:
            for each in ours:
                each.parameter.data = each.host_for_writing()
            yield
        finally:
            self._writers -= 1
            for each in ours:
                each.parameter.data = each.buffer
            self.refill()

    def refill(self) -> None:
        """Copies the first layers in, as the previous forward would have.

        Needed when buffers are back after a sleep, or when weights changed.
        """
        if self._has_buffers:
            for layer in self.layers[: self.prefetch_step]:
                layer.start()


class _Layer:
    """A layer with weights in host memory, and the copies to its buffers."""

    def __init__(self, module: Any, weights: Sequence["Weight"], stream: Any) -> None:
        self.module = module
        self.weights = list(weights)
        self.device = weights[0].home
        self._stream = stream
        self._copied = torch.cuda.Event()
        # An event that a capture has recorded is none outside of it.
        self._was_copied_at_once = False
        # Whether the capture in progress started a copy that it has not waited for.
        self._is_to_join = False

    def settle(self) -> None:
        """Has its weights' current bytes in host memory, without those that are gone."""
        for each in self.weights:
            each.settle()
        self.weights = [each for each in self.weights if each.host is not None]

    def start(self) -> None:
        """Starts to copy it, behind what uses its buffers now."""
        is_capturing = torch.cuda.is_current_stream_capturing()
        before = torch.cuda.Event()
        torch.cuda.current_stream().record_event(before)
        self._stream.wait_event(before)
        with torch.cuda.stream(self._stream):
            for each in self.weights:
                each.buffer.copy_(each.host, non_blocking=True)
        self._copied.record(self._stream)
        self._was_copied_at_once, self._is_to_join = not is_capturing, is_capturing

    def wait(self) -> None:
        """Has the current stream wait for the copy."""
        if torch.cuda.is_current_stream_capturing():
            # What was started before the capture has ended (`sync_prev_onload`).
            self.join()
        elif self._was_copied_at_once:
            torch.cuda.current_stream().wait_event(self._copied)
        else:
            torch.cuda.current_stream().wait_stream(self._stream)

    def join(self) -> None:
        """The same in a capture, for a copy that it has started."""
        if self._is_to_join:
            torch.cuda.current_stream().wait_event(self._copied)
            self._is_to_join = False


class _Shared:
    """What is shared between layers, collected while vLLM builds one after the other."""

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

    def look_at(self, number: int, module: Any) -> None:
        """Raises PoorwillError for a module that shares a parameter with an offloaded one."""
        self._number = number
        for name, parameter in module.named_parameters(prefix=f"#{number}"):
            if self._names.setdefault(id(parameter), name) != name:
                self._others[id(parameter)] = name
                if id(parameter) in self._taken:
                    self._refuse_tied(parameter)

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

    def refuse_untied(self, offloaded: Iterator["Weight"]) -> None:
        """Raises PoorwillError where one of several parameters of the same memory stays on the GPU."""
        names = {id(each.parameter): each.name for each in offloaded}
        for users in self._tied:
            ours = [names[id(each)] for each in users if id(each) in names]
            if len(ours) < len(users):
                raise PoorwillError(
                    f"{' = '.join(ours)} shares its memory with parameters of its layer that are not meant "
                    "by --offload-params: name all of them, or none"
                )


class Weight:
    """One parameter of a layer, in our host memory."""

    def __init__(self, module: Any, name: str, shared: _Shared) -> None:
        self.name = name
        self._module = module
        self.parameter: Any = self._found()
        """None once the module has it no more."""
        self.home = self.parameter.device
        self.is_pinned = _is_pinned()
        self.host: Any = shared.host_of(module, name, self.parameter)
        """Its bytes; None if it has none any more."""
        self.buffer: Any = None
        """What the GPU reads it in, once the model is loaded."""
        self.parameter.data = self.host

    @property
    def is_at_rest(self) -> bool:
        """Whether the parameter is its host memory, as before the buffers are made."""
        return self.host is not None and _address(self.parameter) == _address(self.host)

    def host_for_writing(self) -> Any:
        """The host memory, at its device address if it has one."""
        if not (self.host.numel() and self.is_pinned and offload.policy().uva):
            return self.host
        return offload.device_view(self.host, device=_offload_memory.home(self.home))

    def settle(self) -> None:
        """Copies the module's parameter to host memory, and makes it refer to that."""
        self.parameter = parameter = self._found()
        if parameter is None:
            self.host = None
            return
        if self.is_at_rest:
            # Strides may differ.
            self.host = parameter.data
            return
        if self.host is not None and _is_alike(self.host, parameter.data):
            self.host.copy_(parameter.data)
        else:
            # The replaced memory is freed first.
            self.host = None
            self.host = hosted(parameter.data, self.name, self.home)
        parameter.data = self.host

    def _found(self) -> Any:
        owner, found = self._module, None
        for part in self.name.split("."):
            found = owner = getattr(owner, part, None)
        return found


def hosted(tensor: Any, name: str, device: Any) -> Any:
    """A CPU tensor with a tensor's bytes and strides, in host memory of exactly its size."""
    is_pinned = _is_pinned()
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


def _is_pinned() -> bool:
    return offload.policy().pin and bool(_base.should_pin_memory())
