"""Parameters that the GPU reads in host memory, or that a forward copies in."""

import importlib
from typing import Any

envs: Any = importlib.import_module("vllm.envs")
functional_call: Any = importlib.import_module("torch.func").functional_call
_base: Any = importlib.import_module("vllm.model_executor.offloader.base")
should_pin_memory: Any = _base.should_pin_memory
is_uva_available: Any = importlib.import_module("vllm.utils.platform_utils").is_uva_available
view_of: Any = importlib.import_module("vllm.utils.torch_utils").get_accelerator_view_from_cpu_tensor
__version__: str = importlib.import_module("vllm.version").__version__


class UVAOffloader(_base.BaseOffloader):  # type: ignore[misc]
    supports_tower_offload = True

    def __init__(self, cpu_offload_max_bytes: int, cpu_offload_params: set[str] | None = None) -> None:
        self.cpu_offload_max_bytes = cpu_offload_max_bytes
        self.cpu_offload_bytes = 0
        self.cpu_offload_params = cpu_offload_params or set()
        self.pin_memory = should_pin_memory()
        self.uva_offloading = is_uva_available() and not envs.VLLM_WEIGHT_OFFLOADING_DISABLE_UVA

    def wrap_modules(self, modules_generator: Any, prefix: str = "") -> list[Any]:
        if __version__.startswith("0.20"):
            return [self._maybe_offload_to_cpu(module) for module in modules_generator]
        before = f"{prefix}." if prefix else ""
        return [self._maybe_offload_to_cpu(module, before) for module in modules_generator]

    def _maybe_offload_to_cpu(self, module: Any, prefix: str = "") -> Any:
        first = next(module.parameters(), None)
        if first is None or first.device.type == "cpu":
            return module
        device, has_moved = first.device, False
        for name, parameter in module.named_parameters():
            full = f".{prefix}{name}."
            is_meant = not self.cpu_offload_params or any(f".{p}." in full for p in self.cpu_offload_params)
            if self.cpu_offload_bytes >= self.cpu_offload_max_bytes or not is_meant:
                continue
            if not __version__.startswith("0.20") and getattr(parameter, "_vllm_is_uva_offloaded", False):
                continue
            host = parameter.data.to(device="cpu")
            host = host.pin_memory() if self.pin_memory else host
            parameter.data = view_of(host) if self.uva_offloading else host
            if self.uva_offloading:
                parameter._vllm_is_uva_offloaded = True
            self.cpu_offload_bytes += host.numel() * host.element_size()
            has_moved = True
        if has_moved and not self.uva_offloading:
            stock = module.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                module.forward = stock
                state = {
                    name: each.to(device, non_blocking=True) for name, each in module.state_dict().items()
                }
                output = functional_call(module, state, args=args, kwargs=kwargs, tie_weights=False)
                module.forward = forward
                return output

            module.forward = forward
        return module
