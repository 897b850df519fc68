"""How vLLM takes parameters to the device while it processes them, and puts them back."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

torch: Any = importlib.import_module("torch")
envs: Any = importlib.import_module("vllm.envs")
is_pin_memory_available: Any = importlib.import_module("vllm.utils.platform_utils").is_pin_memory_available
view_of: Any = importlib.import_module("vllm.utils.torch_utils").get_accelerator_view_from_cpu_tensor

MARK = "_vllm_is_uva_offloaded"


@contextmanager
def device_loading_context(module: Any, target_device: Any) -> Iterator[Any]:
    if target_device.type == "cpu":
        yield module
        return
    on_cpu, marked = set(), []
    for name, parameter in module.named_parameters():
        if parameter.device.type == "cpu":
            on_cpu.add(name)
            parameter.data = parameter.data.to(target_device)
        if getattr(parameter, MARK, False):
            marked.append(name)
    try:
        yield module
    finally:
        pin = is_pin_memory_available() and not envs.VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY
        for name, parameter in module.named_parameters():
            like = {"device": "cpu", "pin_memory": pin}
            if name in on_cpu:
                parameter.data = torch.empty_like(parameter.data, **like).copy_(parameter.data)
            if name in marked and not getattr(parameter, MARK, False):
                host = torch.empty_like(parameter.data, **like).copy_(parameter.data)
                parameter.data = view_of(host)
                parameter._vllm_is_uva_offloaded = True
