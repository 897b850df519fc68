"""Imports PyTorch, if pools can be built on it."""

import importlib
from typing import Any

from poorwill._native import PoorwillError

OLDEST = (2, 11)


class UnsupportedTorchError(PoorwillError, ImportError):
    """PyTorch is missing, or one that pools cannot be built on."""


def _import() -> Any:
    oldest = ".".join(map(str, OLDEST))
    try:
        module = importlib.import_module("torch")
    except ImportError as error:
        raise UnsupportedTorchError(
            f"poorwill's pools are for PyTorch's tensors, and PyTorch cannot be imported ({error}): "
            f"install torch {oldest} or later"
        ) from error
    version = str(getattr(module, "__version__", "unknown"))
    parts = version.split("+")[0].split(".")[:2]
    numbers = tuple(int(part) if part.isdecimal() else 0 for part in parts)
    if numbers < OLDEST:
        raise UnsupportedTorchError(
            f"PyTorch {version} is too old for poorwill's pools: install torch {oldest} or later"
        )
    return module


torch: Any = _import()
DispatchMode: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
