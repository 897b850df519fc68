"""Settings from the environment: those of torch_memory_saver, and Poorwill's."""

import os
from typing import Literal, cast

from poorwill import _environment
from poorwill.compat.torch_memory_saver._errors import SaverError

_TRUE = ("1", "true", "TRUE", "yes", "YES")
_FALSE = ("", "0", "false", "FALSE", "no", "NO")

BACKENDS = ("pinned", "mmap")


def flag(name: str, *, otherwise: bool = False) -> bool:
    """Whether a variable is on. Raises SaverError for a value that cannot be read."""
    value = os.environ.get(name)
    if value is None:
        return otherwise
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise SaverError(f"{name}={value!r} is neither on nor off: set it to 1 or 0")


def takes_whole_process() -> bool:
    """Whether all GPU memory of the process is to be saved, not only that of regions."""
    return flag("TMS_INIT_ENABLE")


def retains_cpu_backup() -> bool:
    """Whether backups can be read after a resume."""
    return flag("TMS_RETAIN_CPU_BACKUP")


def keeps_backups() -> bool:
    """Whether host memory keeps backups after a resume, so that the next pause copies only what changed."""
    return flag("POORWILL_KEEP_BACKUPS", otherwise=True)


def backend() -> str:
    """The kind of host memory for regions that name none. Raises SaverError for an unknown one."""
    value = os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND") or BACKENDS[0]
    if value not in BACKENDS:
        raise SaverError(f"TMS_INIT_CPU_BACKUP_BACKEND={value!r} is unknown: it is {' or '.join(BACKENDS)}")
    return value


def host_budget() -> str | None:
    """Most host memory for backups, for each GPU; the machine's if it is not set."""
    return os.environ.get("POORWILL_HOST_BUDGET") or None


def compress() -> Literal["auto", "off", "always"] | None:
    """Whether compact backups are stored as codes. Raises SaverError for an unknown value."""
    value = os.environ.get("POORWILL_COMPRESS") or None
    if value not in (None, "auto", "off", "always"):
        raise SaverError(f"POORWILL_COMPRESS={value!r} is unknown: it is auto, off or always")
    return cast(Literal["auto", "off", "always"] | None, value)


def wake_timeout_s() -> float:
    """How long a resume waits for memory that others release. Raises SaverError for a bad value."""
    try:
        return _environment.wake_timeout_s()
    except ValueError as error:
        raise SaverError(str(error)) from None


def lending() -> bool | str | None:
    """What an arena is given as `lend`. Raises SaverError for a bad value."""
    try:
        return _environment.lending()
    except ValueError as error:
        raise SaverError(str(error)) from None


def peer_copies() -> bool:
    """What an arena is given as `peer_copies`. Raises SaverError for a bad value."""
    try:
        return _environment.peer_copies()
    except ValueError as error:
        raise SaverError(str(error)) from None


def disk_folder() -> str | None:
    """The folder of the disk tier, if one is named."""
    return os.environ.get("TMS_DISK_BACKUP_DIR") or os.environ.get("POORWILL_DISK") or None
