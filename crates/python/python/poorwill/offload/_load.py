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

# What PyTorch calls the types of the format. Those of which a version has none are left out there.
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
    """How a file was read."""

    path: str
    """The path by which it was opened."""
    bytes: int
    """Of its tensors."""
    how: Literal["direct", "buffered", "unread"]
    """Past the page cache, through it (and it was dropped behind), or not at all, without bytes to read."""
    because: str | None
    """Why it was not read directly; None if it was."""


@dataclass(frozen=True)
class LoadReport:
    """What a load did. Times are in seconds."""

    bytes: int
    """Of all tensors."""
    tensors: int
    """How many there are."""
    host_bytes: int
    """Of the buffers that they lie in."""
    buffers: int
    """How many there are."""
    alignment_bytes: int | None
    """What each tensor begins at a multiple of; None where that is the size of its elements."""
    seconds: float
    """From the call until all bytes were there."""
    memory_s: float
    """From the call until all memory was there; reading goes on beside it."""
    readers: int
    """How many read at the same time."""
    piece_bytes: int
    """The most that one reads with a call."""
    direct_bytes: int
    """Read past the page cache straight into place."""
    staged_bytes: int
    """Read past the page cache into a reader's own memory, and copied from there."""
    buffered_bytes: int
    """Read through the page cache, which was dropped behind."""
    staging_bytes: int
    """The readers' own memory, which was given back."""
    pinned: bool
    """Whether all buffers are page-locked."""
    pageable_because: str | None
    """Why one is not; None if all are."""
    files: tuple[FileReport, ...]
    """How each file was read."""

    @property
    def gib_per_s(self) -> float:
        """The rate of the whole."""
        return self.bytes / (1 << 30) / max(self.seconds, 1e-9)


class HostCheckpoint(Mapping[str, Any]):
    """CPU tensors by their names, over buffers of host memory. `load_checkpoint` makes one.

    Each tensor has a storage of its own, exactly its bytes. A buffer holds many of them, and stays as long as
    any of its tensors or their views.
    """

    def __init__(
        self, pieces: Sequence[LoadedTensor], report: LoadReport, pin: bool | Literal["auto"]
    ) -> None:
        """Not for users. `pin` is what was asked for."""
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
        """A tensor as `offload` would give it, and unlike that it ALIASES the loaded one: nothing is copied
        before it is staged in."""
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
                # Pageable memory some devices read and others do not. Page-locked memory all do.
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
    """Reads a safetensors checkpoint into host memory, and gives its tensors by their names.

    `paths` is a file, a folder with its index, an index, or several of them, as for the `poorwill` command.
    `device` and `pin` are as for `HostBuffer`. All memory is taken before a byte is read. The files are read
    by `readers` threads, as many as suit the machine if it is None, past the page cache where their file
    system does that; `report` says how. Ctrl-C ends it, and everything is given back, as after every error.

    The tensors are on the CPU, and ALIAS the buffers. `device_view` of them copies nothing, and neither does
    `HostCheckpoint.offloaded`.

    Raises ValueError for a tensor of a type that PyTorch has not, OutOfMemoryError where there is not so much
    host memory, FileNotFoundError, and PoorwillError for files that are no checkpoint, or that cannot be
    read.
    """
    torch = import_torch()
    named = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    known = [name for name, ours in _DTYPES.items() if hasattr(torch, ours)]
    pieces, found = _native.load_checkpoint(named, known, device=device, pin=pin, readers=readers)
    files = tuple(FileReport(**{**file, "path": os.fspath(file["path"])}) for file in found.pop("files"))
    return HostCheckpoint(pieces, LoadReport(**found, files=files), pin)


def _tensor(piece: LoadedTensor) -> Any:
    """The tensor over a piece's bytes, which keeps them."""
    torch = import_torch()
    dtype, shape = getattr(torch, _DTYPES[piece.dtype]), piece.shape
    if piece.dtype == "F4":
        # An element of PyTorch's is a pair.
        shape = (*shape[:-1], shape[-1] // 2)
    if piece.nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    layout = Layout(dtype, shape, tuple(reversed(strides)), 0, False, False, piece.nbytes)
    return layout.over(torch.from_dlpack(piece))
