"""All GPU memory of a process, by the library that was loaded before others and takes `cudaMalloc`.

PyTorch says which parts of its segments hold no tensor, so that a pause copies none of them. Memory of
expandable segments does not pass through `cudaMalloc`; a pause is refused while PyTorch has some.
"""

import contextlib
import ctypes
import json
import threading
from collections.abc import Iterator
from typing import Any

from poorwill import _native
from poorwill.compat.torch_memory_saver._errors import SaverError
from poorwill.compat.torch_memory_saver._shared import shared_tensor
from poorwill.torch import Outside
from poorwill.torch._gpu import snapshot_segments
from poorwill.torch._import import torch

# Of what no private pool has.
_DEFAULT_POOL = (0, 0)


class Process:
    """The memory saver over the library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._binary_wrapper = _Binary(library)
        self._cdll = self._binary_wrapper.cdll
        self._lock = threading.RLock()
        self._mem_pools: dict[tuple[str, bool, bool, str, int], Any] = {}
        self._last = "pause"

    # Regions

    @contextlib.contextmanager
    def region(
        self, tag: str, enable_cpu_backup: bool, enable_disk_backup: bool, cpu_backup_backend: str | None
    ) -> Iterator[None]:
        backend = (cpu_backup_backend or self._backend()) if enable_cpu_backup else ""
        key = (tag, enable_cpu_backup, enable_disk_backup, backend, int(torch.cuda.current_device()))
        with self._lock:
            if key not in self._mem_pools:
                pool = torch.cuda.MemPool()
                # Its destructor would end the process while another pool is in use.
                _native.make_immortal(pool)
                self._mem_pools[key] = pool
            pool = self._mem_pools[key]
        with (
            torch.cuda.use_mem_pool(pool),
            self._with_region_config(
                tag=tag,
                enable_cpu_backup=enable_cpu_backup,
                cpu_backup_backend=cpu_backup_backend,
                enable_disk_backup=enable_disk_backup,
            ),
        ):
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any,
        stream: Any,
        capture_error_mode: str,
        tag: str,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None,
    ) -> Iterator[None]:
        with (
            torch.cuda.graph(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode),
            self._with_region_config(
                tag=tag, enable_cpu_backup=enable_cpu_backup, cpu_backup_backend=cpu_backup_backend
            ),
        ):
            yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        if not self._cdll.tms_get_interesting_region():
            raise AssertionError(
                "disable() leaves a region, and this thread is in none: enter region() first"
            )
        self._cdll.tms_set_interesting_region(False)
        try:
            with Outside():
                yield
        finally:
            self._cdll.tms_set_interesting_region(True)

    @contextlib.contextmanager
    def _with_region_config(
        self,
        *,
        tag: str,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None,
        enable_disk_backup: bool = False,
    ) -> Iterator[None]:
        before = (
            self._cdll.tms_get_current_tag(),
            self._cdll.tms_get_interesting_region(),
            self._cdll.tms_get_enable_cpu_backup(),
            self._cdll.tms_get_cpu_backup_backend(),
            self._cdll.tms_get_enable_disk_backup(),
        )
        backend = before[3] if cpu_backup_backend is None else cpu_backup_backend.encode()
        self._configure(tag.encode(), True, enable_cpu_backup, backend, enable_disk_backup)
        try:
            yield
        finally:
            self._configure(*before)

    def _configure(self, tag: bytes, interesting: bool, cpu: bool, backend: bytes, disk: bool) -> None:
        self._cdll.tms_set_current_tag(tag)
        self._cdll.tms_set_interesting_region(interesting)
        self._cdll.tms_set_enable_cpu_backup(cpu)
        self._cdll.tms_set_cpu_backup_backend(backend)
        self._cdll.tms_set_enable_disk_backup(disk)

    def _backend(self) -> str:
        return str(self._cdll.tms_get_cpu_backup_backend().decode())

    # Pause and resume

    def pause(self, tag: str | None) -> None:
        with self._lock:
            ranges = self._unused()
            flat = [number for pair in ranges for number in pair]
            pairs = (ctypes.c_uint64 * len(flat))(*flat)
            self._check("pause", self._cdll.poorwill_tms_set_unused(pairs, len(ranges)))
            self._check("pause", self._cdll.tms_pause(tag.encode() if tag else None))
            self._last = "pause"

    def resume(self, tag: str | None) -> None:
        with self._lock:
            self._check("resume", self._cdll.tms_resume(tag.encode() if tag else None))
            self._last = "resume"

    def _unused(self) -> list[tuple[int, int]]:
        """The parts of segments that PyTorch has cached, so that no tensor has their bytes.

        Free parts of graphs' pools are not among them: replays may read what the capture left there.
        """
        segments = snapshot_segments()
        expandable = sum(int(segment["total_size"]) for segment in segments if segment["is_expandable"])
        if expandable:
            raise SaverError(
                f"pause cannot release {expandable} bytes of PyTorch's expandable segments, which do not "
                "come from cudaMalloc: take expandable_segments:True out of PYTORCH_ALLOC_CONF (or "
                "PYTORCH_CUDA_ALLOC_CONF), or allocate inside region(...) without TMS_INIT_ENABLE"
            )
        ours = {_DEFAULT_POOL, *(tuple(pool.id) for pool in self._mem_pools.values())}
        return [
            (int(block["address"]), int(block["size"]))
            for segment in segments
            if tuple(segment["segment_pool_id"]) in ours
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ]

    def last_report(self) -> list[dict[str, Any]]:
        """What the last pause or resume did, for each GPU."""
        needed = self._cdll.poorwill_tms_report(None, 0)
        text = ctypes.create_string_buffer(needed + 1)
        self._cdll.poorwill_tms_report(text, needed + 1)
        reports = json.loads(text.value or b"{}").get(self._last, [])
        return [report["sleep" if self._last == "pause" else "wake"] for report in reports]

    def _check(self, call: str, code: int) -> None:
        if code:
            said = self._cdll.poorwill_tms_last_error() or b""
            raise SaverError(said.decode(errors="replace") or f"{call} failed with code {code}")

    # Backups and settings

    def get_cpu_backup(self, tensor: Any, zero_copy: bool) -> Any:
        address, nbytes = int(tensor.data_ptr()), int(tensor.nbytes)
        if nbytes == 0:
            return torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
        at = self._cdll.tms_get_cpu_backup_pointer(address, nbytes)
        if not at:
            said = self._cdll.poorwill_tms_last_error()
            if said:
                raise SaverError(said.decode(errors="replace"))
            return None
        shared = shared_tensor(at, tensor, self._cdll)
        return shared if zero_copy else shared.clone()

    @property
    def retain(self) -> bool:
        """Whether backups can still be read after a resume from now on."""
        return bool(self._cdll.tms_get_retain_cpu_backup())

    @retain.setter
    def retain(self, value: bool) -> None:
        self._cdll.tms_set_retain_cpu_backup(value)

    def set_disk_backup_dir(self, path: str) -> None:
        self._check("set_disk_backup_dir", self._cdll.tms_set_disk_backup_dir(path.encode()))

    def set_memory_margin(self, margin_bytes: int) -> None:
        self._check("memory_margin_bytes", self._cdll.set_memory_margin_bytes(margin_bytes))


class _Binary:
    """The library with the types of its functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        text, flag, size = ctypes.c_char_p, ctypes.c_bool, ctypes.c_size_t
        address, code = ctypes.c_uint64, ctypes.c_int
        functions: dict[str, tuple[list[Any], Any]] = {
            "tms_set_current_tag": ([text], None),
            "tms_get_current_tag": ([], text),
            "tms_set_interesting_region": ([flag], None),
            "tms_get_interesting_region": ([], flag),
            "tms_set_enable_cpu_backup": ([flag], None),
            "tms_get_enable_cpu_backup": ([], flag),
            "tms_set_cpu_backup_backend": ([text], None),
            "tms_get_cpu_backup_backend": ([], text),
            "tms_set_enable_disk_backup": ([flag], None),
            "tms_get_enable_disk_backup": ([], flag),
            "tms_set_disk_backup_dir": ([text], code),
            "tms_pause": ([text], code),
            "tms_resume": ([text], code),
            "set_memory_margin_bytes": ([address], code),
            "tms_set_retain_cpu_backup": ([flag], None),
            "tms_get_retain_cpu_backup": ([], flag),
            "tms_get_cpu_backup_pointer": ([ctypes.c_void_p, address], ctypes.c_void_p),
            "poorwill_tms_set_unused": ([ctypes.POINTER(address), size], code),
            "poorwill_tms_report": ([text, size], code),
            "poorwill_tms_last_error": ([], text),
        }
        for name, (arguments, result) in functions.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
        self.cdll = library
