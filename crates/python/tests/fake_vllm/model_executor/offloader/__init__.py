"""A stand-in for vLLM's package of offloaders, in both versions: what they do to parameters, and how.

It is imported as `vllm.model_executor.offloader`, where `vllm.version` says which version it is to be. The
contract of `poorwill.vllm._versions` is held against it wherever it is hooked.
"""

from vllm.model_executor.offloader.base import (
    BaseOffloader,
    NoopOffloader,
    create_offloader,
    get_offloader,
    set_offloader,
    should_pin_memory,
)
from vllm.model_executor.offloader.prefetch import PrefetchOffloader
from vllm.model_executor.offloader.uva import UVAOffloader

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
