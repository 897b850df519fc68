"""Layers that are copied into buffers on the GPU ahead of their use."""

import importlib
from typing import Any

torch: Any = importlib.import_module("torch")
_base: Any = importlib.import_module("vllm.model_executor.offloader.base")
should_pin_memory: Any = _base.should_pin_memory
get_offloader: Any = _base.get_offloader
direct_register_custom_op: Any = importlib.import_module("vllm.utils.torch_utils").direct_register_custom_op
__version__: str = importlib.import_module("vllm.version").__version__


def _wait_prefetch(input_tensor: Any, layer_idx: int) -> None:
    get_offloader()._wait_for_layer(layer_idx)


def _start_prefetch(output_tensor: Any, layer_idx: int) -> None:
    get_offloader()._start_prefetch(layer_idx)


direct_register_custom_op(op_name="wait_prefetch", op_func=_wait_prefetch)
direct_register_custom_op(op_name="start_prefetch", op_func=_start_prefetch)


class _Buffers:
    def __init__(self, layers: list[Any], slots: int, device: Any) -> None:
        self.of: dict[Any, list[Any]] = {}
        for layer in layers:
            for name, each in layer._param_offloaders.items():
                host = each._cpu_storage
                key = (name, host.shape, host.stride(), host.dtype)
                if key not in self.of:
                    like = {"size": host.shape, "stride": host.stride(), "dtype": host.dtype}
                    self.of[key] = [torch.empty_strided(**like, device=device) for _ in range(slots)]


class PrefetchOffloader(_base.BaseOffloader):  # type: ignore[misc]
    def __init__(
        self,
        group_size: int,
        num_in_group: int,
        prefetch_step: int,
        offload_params: set[str] | None = None,
        mode: str = "cpu",
    ) -> None:
        self.group_size, self.num_in_group = group_size, num_in_group
        self.prefetch_step = prefetch_step
        self.offload_params = offload_params or set()
        self.mode = mode
        self.copy_stream = torch.cuda.Stream()
        self.module_offloaders: list[_ModuleOffloader] = []
        self.buffer_pool: Any = None

    def wrap_modules(self, modules_generator: Any, prefix: str = "") -> list[Any]:
        assert not self.module_offloaders, "wrap_modules should only be called once"
        modules, offloaded = [], []
        before = f"{prefix}." if prefix else ""
        for index, module in enumerate(modules_generator):
            modules.append(module)
            if index % self.group_size < self.group_size - self.num_in_group:
                continue
            names = [
                name
                for name, _ in module.named_parameters()
                if not self.offload_params
                or any(f".{p}." in f".{before}{name}." for p in self.offload_params)
            ]
            if names:
                offloaded.append(module)
                number = len(self.module_offloaders)
                self.module_offloaders.append(
                    _ModuleOffloader(self.mode, module, self.copy_stream, names, number)
                )
        for number, module in enumerate(offloaded):
            self._hook_module_forward(number, module)
        return modules

    def _hook_module_forward(self, index: int, module: Any) -> None:
        stock = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            module.forward = stock
            torch.ops.vllm.wait_prefetch(args[0], index)
            output = stock(*args, **kwargs)
            following = (index + self.prefetch_step) % len(self.module_offloaders)
            torch.ops.vllm.start_prefetch(output, following)
            module.forward = forward
            return output

        module.forward = forward

    def _wait_for_layer(self, layer_idx: int) -> None:
        torch.cuda.current_stream().wait_stream(self.copy_stream)

    def _start_prefetch(self, layer_idx: int) -> None:
        self.module_offloaders[layer_idx].start_onload_to_static()

    def post_init(self) -> None:
        for layer in self.module_offloaders:
            layer.sync_cpu_storage()
        if not self.module_offloaders:
            return
        device = self.module_offloaders[0].device
        self.buffer_pool = _Buffers(self.module_offloaders, self.prefetch_step, device)
        for number, layer in enumerate(self.module_offloaders):
            layer.assign_buffer_slot(self.buffer_pool, number % self.prefetch_step)
        for layer in self.module_offloaders[: self.prefetch_step]:
            layer.start_onload_to_static()


if not __version__.startswith("0.20"):

    def _get_next_prefetch_index(index: int, prefetch_step: int, module_count: int) -> int:
        after = (index + prefetch_step) % module_count
        same = after % prefetch_step == index % prefetch_step
        return after if same or prefetch_step >= module_count else index % prefetch_step

    def _hook_in_order(self: Any, index: int, module: Any) -> None:
        stock = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            module.forward = stock
            torch.ops.vllm.wait_prefetch(args[0], index)
            output = stock(*args, **kwargs)
            count = len(self.module_offloaders)
            following = _get_next_prefetch_index(index, self.prefetch_step, count)
            torch.ops.vllm.start_prefetch(output, following)
            module.forward = forward
            return output

        module.forward = forward

    PrefetchOffloader._hook_module_forward = _hook_in_order  # type: ignore[method-assign]


class _ModuleOffloader:
    def __init__(
        self, mode: str, module: Any, copy_stream: Any, whitelist_param_names: list[str], layer_idx: int
    ) -> None:
        self.module = module
        self.device = next(module.parameters()).device
        self.copy_stream = copy_stream
        assert self.device.type != "cpu"
        self._param_offloaders: dict[str, Any] = {
            name: _BaseParamOffloader.create(mode, module=module, param_name=name)
            for name in whitelist_param_names
        }

    def sync_cpu_storage(self) -> None:
        for each in self._param_offloaders.values():
            each.sync_cpu_storage()
        kept = {name: each for name, each in self._param_offloaders.items() if not each._param_deleted}
        self._param_offloaders = kept

    def assign_buffer_slot(self, pool: Any, slot_idx: int) -> None:
        for name, each in self._param_offloaders.items():
            host = each._cpu_storage
            each.assign_static_buffer(pool.of[name, host.shape, host.stride(), host.dtype][slot_idx])

    def start_onload_to_static(self) -> None:
        ready = torch.cuda.Event()
        torch.cuda.current_stream().record_event(ready)
        self.copy_stream.wait_event(ready)
        with torch.cuda.stream(self.copy_stream):
            for each in self._param_offloaders.values():
                assert not should_pin_memory() or each._cpu_storage.is_pinned(), "not pinned!"
                each._gpu_buffer.copy_(each._cpu_storage, non_blocking=True)


class _BaseParamOffloader:
    @staticmethod
    def create(mode: str, **kwargs: Any) -> "_BaseParamOffloader":
        if mode == "cpu":
            return _CpuParamOffloader(**kwargs)
        raise ValueError(f"Unknown offload mode: {mode}")

    def __init__(self, module: Any, param_name: str) -> None:
        self._module = module
        self._param_name = param_name
        self.offloaded_bytes = 0
        self._cpu_storage: Any = None
        self._gpu_buffer: Any = None

    @property
    def _param(self) -> Any:
        found = self._module
        for name in self._param_name.split("."):
            found = getattr(found, name)
        return found


class _CpuParamOffloader(_BaseParamOffloader):
    def __init__(self, module: Any, param_name: str) -> None:
        super().__init__(module, param_name)
        self._param_deleted = False
        self._offload_to_cpu_internal()

    def _offload_to_cpu_internal(self) -> None:
        self._cpu_storage = self._param.data = _pinned(self._param.data)

    def _update_cpu_storage_from_param(self) -> None:
        data = self._param.data
        if data.device.type == "cpu":
            self._cpu_storage = data if data.is_pinned() else _pinned(data)
        else:
            self._cpu_storage.copy_(data)

    def assign_static_buffer(self, gpu_buffer: Any) -> None:
        self._update_cpu_storage_from_param()
        self._gpu_buffer = self._param.data = gpu_buffer

    def sync_cpu_storage(self) -> None:
        try:
            self._update_cpu_storage_from_param()
        except AttributeError:
            self._param_deleted = True
            self._cpu_storage = None


def _pinned(data: Any) -> Any:
    like = {"size": data.size(), "stride": data.stride(), "dtype": data.dtype}
    return torch.empty_strided(**like, device="cpu", pin_memory=should_pin_memory()).copy_(data)
