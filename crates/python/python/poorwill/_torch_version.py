"""Which PyTorch has what pools need. Imports none, so that it can refuse one before anything is loaded."""

import importlib.metadata
import re

from poorwill._native import PoorwillError

OLDEST = (2, 11)
OLDEST_NAME = ".".join(map(str, OLDEST))


class UnsupportedTorchError(PoorwillError, ImportError):
    """PyTorch is missing, or one that pools cannot be built on."""


def refuse_older(version: str, instead: str = "") -> None:
    """Raises UnsupportedTorchError for a version without what pools need, and says what to do `instead`."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        raise UnsupportedTorchError(
            f"PyTorch {version} is too old for poorwill's pools: "
            f"install torch {OLDEST_NAME} or later{instead}"
        )


def refuse_older_installed(instead: str = "") -> None:
    """The same for the one that is installed. Where none is, its first use says so."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    refuse_older(version, instead)
