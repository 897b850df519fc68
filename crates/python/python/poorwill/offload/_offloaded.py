"""One tensor in host memory, for systems where the device reads it there and for others."""

import threading
from typing import Any, Literal

from poorwill._native import HostBuffer, PoorwillError
from poorwill.offload._import import import_torch
from poorwill.offload._layout import Layout, checked
from poorwill.offload._policy import policy
from poorwill.offload._views import fill, home_of, nothing_on, torch_device


class _Queued:
    """Queued copies that a GPU may not have completed: their sources stay until then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: list[tuple[Any, Any]] = []

    def forget_made(self) -> None:
        """Asks the GPU, which is not allowed while this thread's stream is being captured."""
        if import_torch().cuda.is_current_stream_capturing():
            return
        with self._lock:
            made = [event.query() for event, _ in self._copies]
            sources = [copy for copy, is_made in zip(self._copies, made, strict=True) if is_made]
            self._copies = [copy for copy, is_made in zip(self._copies, made, strict=True) if not is_made]
        # Sources may be freed here, with no lock held.
        del sources

    def add(self, event: Any, source: Any) -> None:
        with self._lock:
            self._copies.append((event, source))


_queued = _Queued()


class Offloaded:
    """A tensor in host memory, and its path to the device. `offload` makes one."""

    def __init__(
        self,
        layout: Layout,
        host: Any,
        view: Any,
        device: Any,
        is_pinned: bool,
        copies_because: str | None,
        asked: tuple[Any, bool | Literal["auto"]],
    ) -> None:
        """Internal. `host` is the CPU tensor, `view` the device's, or None where it gets copies.

        `asked` holds the device and `pin`, for another one like it.
        """
        self._layout = layout
        self._host = host
        self._view = view
        self._device = device
        self._is_pinned = is_pinned
        self._copies_because = copies_because
        self._asked = asked

    def __repr__(self) -> str:
        how = "zero copy" if self.is_zero_copy else "copied in"
        shape, dtype, nbytes = list(self._layout.shape), self._layout.dtype, self._layout.nbytes
        return f"<poorwill.offload.Offloaded for {self._device}: {nbytes} B, {shape} of {dtype}, {how}>"

    def __copy__(self) -> "Offloaded":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A deep or unpickled copy is offloaded anew; tensors copied singly would not alias each other."""
        return _offload_again, (self.host, *self._asked)

    @property
    def host(self) -> Any:
        """The tensor on the CPU, which ALIASES the memory: writes to it are staged in later."""
        return self._layout.over(self._host)

    @property
    def device(self) -> Any:
        """The torch.device that `stage_in` uses."""
        return self._device

    @property
    def is_pinned(self) -> bool:
        """Whether its memory is page-locked."""
        return self._is_pinned

    @property
    def is_zero_copy(self) -> bool:
        """Whether `stage_in` copies nothing. Decided when it was offloaded."""
        return self._copies_because is None

    @property
    def copies_because(self) -> str | None:
        """Why `stage_in` copies; None if it does not."""
        return self._copies_because

    def stage_in(self, stream: Any = None) -> Any:
        """The tensor on its device, with the same type, shape, strides and storage offset.

        With `is_zero_copy` it ALIASES `host`, and nothing is queued. Otherwise it is a new COPY in device
        memory, queued on `stream`, or on the device's current stream for None. To use it on another stream,
        let that one wait and call `record_stream`.

        With page-locked memory the call does not wait for the copy. Do not write to `host` until the copy is
        complete. Its source stays until then; if all else has dropped it, the next call that offloads or
        copies frees it. A graph that captures the copy reads `host` in every replay and does not keep it
        alive.

        Raises ValueError for a stream of another device.
        """
        torch = import_torch()
        is_cuda = self._device.type == "cuda"
        if stream is not None and (not is_cuda or stream.device != self._device):
            whose = f"on {stream.device}" if is_cuda else "given, and the host device has none"
            raise ValueError(f"stage_in brings a tensor to {self._device}, and the stream is {whose}")
        if self._view is not None:
            return self._layout.over(self._view)
        if not is_cuda:
            return self._layout.over(self._copied())
        _queued.forget_made()
        with torch.cuda.stream(stream or torch.cuda.current_stream(self._device)):
            return self._layout.over(self._copied())

    def _copied(self) -> Any:
        torch = import_torch()
        flat = torch.empty(self._layout.nbytes, dtype=torch.uint8, device=self._device)
        is_queued = self._device.type == "cuda" and self._is_pinned
        flat.copy_(self._host, non_blocking=is_queued)
        if is_queued and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event()
            event.record()
            _queued.add(event, self._host)
        return flat


def offload(tensor: Any, *, device: Any = None, pin: bool | Literal["auto"] = "auto") -> Offloaded:
    """COPIES a tensor to host memory of its own, from where `stage_in` brings it to a device.

    For both kinds of system. Where the device reads host memory in place, nothing is copied afterwards.
    Where that is disabled or the memory is pageable, every `stage_in` copies. `tensor`, `device`, and the
    copied bytes are as for `to_host_view`.

    Raises as `to_host_view`, except that the device need not be able to read the memory.
    """
    torch = import_torch()
    checked(tensor, "offload")
    allowed = policy()
    because = None if allowed.uva else f"{allowed.uva_because}=1 is set"
    layout = Layout.of(tensor)
    if layout.nbytes == 0:
        place = torch_device(home_of(tensor, device))
        view = nothing_on(home_of(tensor, device)) if allowed.uva else None
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        asked = ("host" if place.type == "cpu" else str(place), pin)
        return Offloaded(layout, nothing, view, place, False, because, asked)
    buffer = HostBuffer(layout.nbytes, device=home_of(tensor, device), pin=pin)
    place = torch_device(buffer.device)
    if place.type == "cuda":
        _queued.forget_made()
    view = None
    if allowed.uva:
        view, because = _view_of(buffer)
    host = torch.from_dlpack(buffer)
    fill(host, tensor)
    return Offloaded(layout, host, view, place, buffer.is_pinned, because, (buffer.device, pin))


def _offload_again(host: Any, device: Any, pin: bool | Literal["auto"]) -> Offloaded:
    return offload(host, device=device, pin=pin)


def _view_of(buffer: HostBuffer) -> tuple[Any, str | None]:
    """The device's view of a buffer, or why there is none."""
    torch = import_torch()
    try:
        return torch.from_dlpack(buffer.device_view()), None
    except PoorwillError as error:
        # Only some devices read pageable memory; all read page-locked memory.
        if buffer.is_pinned:
            raise
        return None, buffer.pageable_because or str(error)
