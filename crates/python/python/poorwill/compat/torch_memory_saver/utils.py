"""Where the library to be loaded before others is, and other things that callers of this name use."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from poorwill.compat.torch_memory_saver._errors import SaverError

__all__ = ["change_env", "get_binary_path_from_package", "is_xpu"]


def is_xpu() -> bool:
    """Whether the GPUs are Intel's: never, as far as this package goes."""
    return False


def get_binary_path_from_package(stem: str) -> Path:
    """The library whose name begins so. One serves every CUDA runtime.

    Raises SaverError where it is not installed.
    """
    folder = Path(__file__).parents[1]
    found = sorted(folder.glob(f"{stem}*.so"))
    if not found:
        raise SaverError(
            f"there is no {stem}*.so in {folder}: `maturin` alone leaves it out, and pip builds it; install "
            "again, from the sources with `pip install ./crates/python`"
        )
    return found[0]


@contextmanager
def change_env(key: str, value: str) -> Iterator[None]:
    """Sets a variable of the environment, and puts back what was there."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before
