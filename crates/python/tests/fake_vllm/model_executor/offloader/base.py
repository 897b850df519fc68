"""What all offloaders are, and the one that this process has."""

import importlib
from typing import Any

envs: Any = importlib.import_module("vllm.envs")
is_pin_memory_available = importlib.import_module("vllm.utils.platform_utils").is_pin_memory_available


def should_pin_memory() -> bool:
    return bool(is_pin_memory_available()) and not envs.VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY


class BaseOffloader:
    supports_tower_offload = False

    def wrap_modules(self, modules_generator: Any, prefix: str = "") -> list[Any]:
        return list(modules_generator)

    def post_init(self) -> None:
        pass

    def sync_prev_onload(self) -> None:
        pass


class NoopOffloader(BaseOffloader):
    pass


_instance: BaseOffloader = NoopOffloader()


def get_offloader() -> BaseOffloader:
    return _instance


def set_offloader(instance: BaseOffloader | None) -> None:
    global _instance
    _instance = instance or NoopOffloader()


def create_offloader(offload_config: Any) -> BaseOffloader:
    package = "vllm.model_executor.offloader"
    of_prefetch: Any = importlib.import_module(f"{package}.prefetch")
    of_uva: Any = importlib.import_module(f"{package}.uva")
    uva, prefetch = offload_config.uva, offload_config.prefetch
    backend = offload_config.offload_backend
    if backend == "auto":
        by_size = "uva" if uva.cpu_offload_gb > 0 else ""
        backend = "prefetch" if prefetch.offload_group_size > 0 else by_size
    if backend == "prefetch":
        made: BaseOffloader = of_prefetch.PrefetchOffloader(
            group_size=prefetch.offload_group_size,
            num_in_group=prefetch.offload_num_in_group,
            prefetch_step=prefetch.offload_prefetch_step,
            offload_params=prefetch.offload_params,
            mode="cpu",
        )
        return made
    if backend == "uva":
        made = of_uva.UVAOffloader(
            cpu_offload_max_bytes=int(uva.cpu_offload_gb * 1024**3),
            cpu_offload_params=uva.cpu_offload_params,
        )
        return made
    return NoopOffloader()
