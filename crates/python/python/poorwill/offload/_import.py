"""PyTorch, when tensors are asked for and no sooner.

Any version will do that has `torch.from_dlpack`, so this is not what pools import.
"""

import importlib
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
