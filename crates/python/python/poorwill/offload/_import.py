"""PyTorch, when tensors are asked for and no sooner.

Any version will do that has `torch.from_dlpack`, so this is not what pools import.
"""

import importlib
import sys
from typing import Any

from poorwill._native import PoorwillError


class MissingTorchError(PoorwillError, ImportError):
    """Tensors were asked for, and PyTorch cannot be imported."""


def import_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise MissingTorchError(
            f"poorwill.offload's tensors are PyTorch's, and PyTorch cannot be imported ({error}): install "
            "torch, or use HostBuffer with NumPy"
        ) from error


def forget_compiled() -> None:
    """Has PyTorch's compiler forget what it made before hooks came or went: it does not look at the hooks of
    modules again, and what it made would go on without them."""
    if "torch._dynamo" in sys.modules:
        import_torch()._dynamo.reset()
