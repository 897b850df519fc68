"""Checkpoints in host memory: read from their files straight into page-locked buffers, and held once."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from poorwill import _native
from poorwill._native import LoadedTensor, PoorwillError
from poorwill.offload._import import import_torch
from poorwill.offload._layout import Layout
from poorwill.offload._offloaded import Offloaded
from poorwill.offload._policy import policy
from poorwill.offload._views import nothing_on, torch_device

# PyTorch's names of the format's types. A version without one leaves it out.
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}


@dataclass(frozen=True)
class FileReport:
    """How one file was read."""

    path: str
    """The path by which it was opened."""
    bytes: int
    """Bytes of its tensors."""
    how: Literal["direct", "buffered", "unread"]
    """"direct" past the page cache, "buffered" through it (and dropped afterwards), or "unread" without
    bytes.
    """
    because: str | None
    """Why it was not read directly; None if it was."""


@dataclass(frozen=True)
class LoadReport:
    """What a load did. Times are in seconds."""

    bytes: int
    """Bytes of all tensors."""
    tensors: int
    """Number of tensors."""
    host_bytes: int
    """Bytes of the buffers."""
    buffers: int
    """Number of buffers."""
    alignment_bytes: int | None
    """Alignment of each tensor; None for that of its elements."""
    seconds: float
    """From the call until all bytes were there."""
    memory_s: float
    """From the call until all memory was allocated; reading overlaps it."""
    readers: int
    """Number of concurrent readers."""
    piece_bytes: int
    """Most bytes of one read."""
    direct_bytes: int
    """Read past the page cache into their final location."""
    staged_bytes: int
    """Read past the page cache into a reader's staging memory, and copied from there."""
    buffered_bytes: int
    """Read through the page cache, which was dropped afterwards."""
    staging_bytes: int
    """The readers' staging memory, which was freed."""
    pinned: bool
    """Whether all buffers are page-locked."""
    pageable_because: str | None
    """Why one is not; None if all are."""
    files: tuple[FileReport, ...]
    """How each file was read."""

    @property
    def gib_per_s(self) -> float:
        """Overall rate."""
        return self.bytes / (1 << 30) / max(self.seconds, 1e-9)


class HostCheckpoint(Mapping[str, Any]):
    """CPU tensors by name, over buffers of host memory. `load_checkpoint` makes one.

    Each tensor has a storage of exactly its bytes. A buffer holds many of them, and stays as long as any of
    its tensors or their views.
    """

    def __init__(
        self, pieces: Sequence[LoadedTensor], report: LoadReport, pin: bool | Literal["auto"]
    ) -> None:
        """Internal. `pin` is the requested value."""
        self._pieces = {piece.name: piece for piece in pieces}
        self._tensors = {piece.name: _tensor(piece) for piece in pieces}
        self._report = report
        self._pin = pin

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        kind = "page-locked" if self._report.pinned else "pageable"
        return f"<poorwill.offload.HostCheckpoint of {len(self)} tensors, {self._report.bytes} B, {kind}>"

    @property
    def report(self) -> LoadReport:
        """What the load did."""
        return self._report

    def offloaded(self, name: str) -> Offloaded:
        """A tensor as `offload` would give it, but it ALIASES the loaded one: only `stage_in` may copy."""
        piece, tensor = self._pieces[name], self._tensors[name]
        place, layout, allowed = torch_device(piece.device), Layout.of(tensor), policy()
        because = None if allowed.uva else f"{allowed.uva_because}=1 is set"
        torch, asked = import_torch(), (piece.device, self._pin)
        if piece.nbytes == 0:
            view = nothing_on(piece.device) if allowed.uva else None
            nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
            return Offloaded(layout, nothing, view, place, False, because, asked)
        view = None
        if allowed.uva:
            try:
                view = torch.from_dlpack(piece.device_view())
            except PoorwillError as error:
                # Only some devices read pageable memory; all read page-locked memory.
                if piece.is_pinned:
                    raise
                because = piece.pageable_because or str(error)
        host = torch.from_dlpack(piece)
        return Offloaded(layout, host, view, place, piece.is_pinned, because, asked)


def load_checkpoint(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    device: Any = None,
    pin: bool | Literal["auto"] = "auto",
    readers: int | None = None,
) -> HostCheckpoint:
    """Reads a safetensors checkpoint into host memory; returns its tensors by name.

    `paths` is a file, a folder with its index, an index, or several of them, as for the `poorwill` command.
    `device` and `pin` are as for `HostBuffer`. All memory is allocated before reading. `readers` threads
    read the files, past the page cache where the file system allows that; None chooses the number by
    machine. `report` has the details. Ctrl-C and every error free everything.

    The tensors are on the CPU, and ALIAS the buffers. Their `device_view` copies nothing, and neither does
    `HostCheckpoint.offloaded`.

    Raises ValueError for a type that PyTorch does not have, and OutOfMemoryError without enough host memory.
    Raises FileNotFoundError, and PoorwillError for files that are unreadable or no checkpoint.
    """
    torch = import_torch()
    named = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    known = [name for name, ours in _DTYPES.items() if hasattr(torch, ours)]
    pieces, found = _native.load_checkpoint(named, known, device=device, pin=pin, readers=readers)
    files = tuple(FileReport(**{**file, "path": os.fspath(file["path"])}) for file in found.pop("files"))
    return HostCheckpoint(pieces, LoadReport(**found, files=files), pin)


def _tensor(piece: LoadedTensor) -> Any:
    """A tensor over a loaded tensor's bytes, which it keeps alive."""
    torch = import_torch()
    dtype, shape = getattr(torch, _DTYPES[piece.dtype]), piece.shape
    if piece.dtype == "F4":
        # PyTorch packs two into an element.
        shape = (*shape[:-1], shape[-1] // 2)
    if piece.nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    layout = Layout(dtype, shape, tuple(reversed(strides)), 0, False, False, piece.nbytes)
    return layout.over(torch.from_dlpack(piece))
