"""The library that takes all GPU memory of a process, and how a process gets it: by `LD_PRELOAD`."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from poorwill.compat.torch_memory_saver._errors import SaverError
from poorwill.compat.torch_memory_saver.utils import change_env, get_binary_path_from_package

STEM = "torch_memory_saver_hook_mode_preload"


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Processes that start inside have the library loaded. It does nothing unless TMS_INIT_ENABLE=1 there.

    Libraries that are to be loaded already stay so, behind it. Raises SaverError if this installation has no
    such library.
    """
    path = str(get_binary_path_from_package(STEM))
    others = [other for other in os.environ.get("LD_PRELOAD", "").split(":") if other and other != path]
    with change_env("LD_PRELOAD", ":".join([path, *others])):
        yield


@cache
def loaded() -> ctypes.CDLL | None:
    """The library, if this process was started with it.

    Raises SaverError where another package's library is in its place.
    """
    everything = ctypes.CDLL(None)
    if not hasattr(everything, "tms_pause"):
        return None
    if not hasattr(everything, "poorwill_tms_report"):
        raise SaverError(
            f"LD_PRELOAD={os.environ.get('LD_PRELOAD', '')!r} has torch_memory_saver's own library in this "
            "process: start it inside our configure_subprocess(), or without"
        )
    return everything
