"""Imports PyTorch, if pools can be built on it."""

import importlib
from typing import Any

from poorwill._torch_version import OLDEST_NAME, UnsupportedTorchError, refuse_older


def _import() -> Any:
    try:
        module = importlib.import_module("torch")
    except ImportError as error:
        raise UnsupportedTorchError(
            f"poorwill's pools are for PyTorch's tensors, and PyTorch cannot be imported ({error}): "
            f"install torch {OLDEST_NAME} or later"
        ) from error
    refuse_older(str(getattr(module, "__version__", "unknown")))
    return module


torch: Any = _import()
DispatchMode: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
