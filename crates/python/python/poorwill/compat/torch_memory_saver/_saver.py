"""The public object: it checks arguments, and chooses an implementation at the first use."""

import os
from typing import TYPE_CHECKING, Any, Literal

from poorwill.compat.torch_memory_saver import _environment, _preload
from poorwill.compat.torch_memory_saver._errors import SaverError

if TYPE_CHECKING:
    from poorwill.compat.torch_memory_saver._pools import Pools
    from poorwill.compat.torch_memory_saver._process import Process

__all__ = ["SaverError", "TorchMemorySaver"]

_DEFAULT = "default"

HookMode = Literal["preload", "torch"]
CpuBackupBackend = Literal["pinned", "mmap"]


class TorchMemorySaver:
    """Memory of PyTorch's that is paused and resumed at its addresses, by tag.

    With TMS_INIT_ENABLE=1 and the library of `configure_subprocess` it is all GPU memory of the process, and
    else what is allocated in a `region`. Calls may come from any thread; a region is its thread's.
    """

    def __init__(self) -> None:
        self.stored: Literal["compact", "viewable"] = "viewable"
        """How backups lie in host memory; settled by the first use. `zero_copy` needs viewable ones."""
        self._hook_mode: str = "preload"
        self._impl: Pools | Process | None = None

    def region(
        self,
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Any:
        """A context in which this thread's allocations on the current GPU belong to a tag.

        `enable_cpu_backup` keeps the bytes of a pause in host memory, `enable_disk_backup` on disk; else they
        are dropped, and come back as zeros. `cpu_backup_backend` is "pinned", or "mmap" for host memory that
        is given back by each resume.

        Raises ValueError for arguments that exclude each other, and PoorwillError where the tag is paused.
        """
        _check_tag(tag)
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        if enable_cpu_backup and enable_disk_backup:
            raise ValueError("a region has enable_cpu_backup or enable_disk_backup: give one of them")
        return self._used().region(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend)

    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Any:
        """Like `torch.cuda.graph`; what is allocated while capturing belongs to the tag.

        Graphs that are given one `pool` share one of ours. Without backup, a replay after a resume finds
        zeros where the capture had left bytes.
        """
        _check_tag(tag)
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        return self._used().cuda_graph(
            cuda_graph, pool, stream, capture_error_mode, tag, enable_cpu_backup, cpu_backup_backend
        )

    def disable(self) -> Any:
        """A context within a region whose allocations belong to no tag, and are released at its end.

        Raises AssertionError outside of a region.
        """
        return self._used().disable()

    def pause(self, tag: str | None = None) -> None:
        """Releases the memory of a tag, or of all. What is paused already, and what is unknown, is logged.

        Raises PoorwillError where that fails; everything is as before then.
        """
        self._used().pause(tag)

    def resume(self, tag: str | None = None) -> None:
        """Brings the memory of a tag back, or of all, as its regions say. What is active already is logged.

        Raises PoorwillError where that fails; everything is paused as before then.
        """
        self._used().resume(tag)

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """The bytes that a paused tensor had, as a tensor in host memory; None while it is active.

        If it was resumed with `retain_cpu_backup` also while it is active: as of the last pause.

        `zero_copy` gives the backup itself, not to be written to. It stays as it is while the tensor exists:
        a pause that finds other bytes uses other host memory then. In a whole process it is valid until the
        next pause or resume.

        Raises ValueError for a tensor that is not contiguous on a GPU. Raises PoorwillError for one that no
        region has, or whose region keeps no backup.
        """
        if not x.is_cuda:
            raise ValueError(f"only tensors on a GPU have a backup, and this is on {x.device}")
        if not x.is_contiguous():
            raise ValueError(f"the tensor of shape {tuple(x.shape)} is not contiguous: ask for its base")
        return self._used().get_cpu_backup(x, zero_copy)

    def last_report(self) -> list[dict[str, Any]]:
        """What the last pause or resume did, for each GPU: bytes and seconds. Not in torch_memory_saver."""
        return self._used().last_report()

    @property
    def enabled(self) -> bool:
        """Whether memory is saved: always."""
        return True

    @property
    def hook_mode(self) -> str:
        """Can be set before the first use: "preload" or "torch"; "torch" never takes a whole process."""
        raise AttributeError("hook_mode can be set, and not read")

    @hook_mode.setter
    def hook_mode(self, hook_mode: HookMode) -> None:
        if hook_mode not in ("preload", "torch"):
            raise ValueError(f'hook_mode is {hook_mode!r}; it is "preload" or "torch"')
        if self._impl is not None and hook_mode != self._hook_mode:
            raise AssertionError("hook_mode was settled by the first use: set it before")
        self._hook_mode = hook_mode

    @property
    def memory_margin_bytes(self) -> int:
        """Can be set: an allocation that would leave less than this free on the device fails."""
        raise NotImplementedError("memory_margin_bytes can be set, and not read")

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        if value < 0:
            raise ValueError(f"memory_margin_bytes is {value}; it is 0 or more")
        self._used().set_memory_margin(value)

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether backups can still be read after a resume from now on."""
        return self._used().retain

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._used().retain = bool(value)

    def set_disk_backup_dir(self, path: str) -> None:
        """The folder for backups on disk, which is made if it is missing. Call it before the first region."""
        os.makedirs(path, exist_ok=True)
        self._used().set_disk_backup_dir(path)

    def _used(self) -> "Pools | Process":
        if self._impl is None:
            self._impl = self._chosen()
        return self._impl

    def _chosen(self) -> "Pools | Process":
        if self._hook_mode == "preload" and _environment.takes_whole_process():
            library = _preload.loaded()
            if library is None:
                raise SaverError(
                    "TMS_INIT_ENABLE=1 asks for all GPU memory of the process, which was started without the "
                    "library: start it inside configure_subprocess(), or have LD_PRELOAD name the file of "
                    "get_binary_path_from_package()"
                )
            from poorwill.compat.torch_memory_saver._process import Process

            return Process(library)
        from poorwill.compat.torch_memory_saver._pools import Pools

        return Pools(self.stored)

    def _ensure_initialized(self) -> None:
        self._used()


def _check_tag(tag: str) -> None:
    if not isinstance(tag, str) or not tag:
        raise ValueError(f"a tag is a text of at least one character, not {tag!r}")


def _check_backend(enable_cpu_backup: bool, backend: str | None) -> None:
    if backend is None:
        return
    if not enable_cpu_backup:
        raise ValueError("cpu_backup_backend says how host memory is had: give enable_cpu_backup=True, too")
    if backend not in _environment.BACKENDS:
        raise ValueError(f"cpu_backup_backend is {backend!r}; it is {' or '.join(_environment.BACKENDS)}")
