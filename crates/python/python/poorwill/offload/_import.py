"""Imports PyTorch when tensors are requested, not before.

Any version with `torch.from_dlpack` will do; pools have another check.
"""

import importlib
import sys
from typing import Any

from poorwill._native import PoorwillError


class MissingTorchError(PoorwillError, ImportError):
    """Tensors were requested, and PyTorch cannot be imported."""


def import_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise MissingTorchError(
            f"poorwill.offload's tensors are PyTorch's, and PyTorch cannot be imported ({error}): install "
            "torch, or use HostBuffer with NumPy"
        ) from error


def forget_compiled() -> None:
    """Makes PyTorch's compiler discard its code before hooks come or go.

    It does not check a module's hooks again, so its code would run without them.
    """
    if "torch._dynamo" in sys.modules:
        import_torch()._dynamo.reset()
