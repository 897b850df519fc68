"""A stand-in for vLLM's package of offloaders, in both versions: what they do to parameters, and how.

It is imported as `vllm.model_executor.offloader`, where `vllm.version` says which version it is to be. The
contract of `poorwill.vllm._versions` is held against it wherever it is hooked.
"""

import importlib
from typing import Any

_base: Any = importlib.import_module("vllm.model_executor.offloader.base")
PrefetchOffloader = importlib.import_module("vllm.model_executor.offloader.prefetch").PrefetchOffloader
UVAOffloader = importlib.import_module("vllm.model_executor.offloader.uva").UVAOffloader

BaseOffloader, NoopOffloader = _base.BaseOffloader, _base.NoopOffloader
create_offloader, get_offloader = _base.create_offloader, _base.get_offloader
set_offloader, should_pin_memory = _base.set_offloader, _base.should_pin_memory

__all__ = [
    "BaseOffloader",
    "NoopOffloader",
    "PrefetchOffloader",
    "UVAOffloader",
    "create_offloader",
    "get_offloader",
    "set_offloader",
    "should_pin_memory",
]
