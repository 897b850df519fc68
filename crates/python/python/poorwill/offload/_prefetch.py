"""A row of layers in host memory, copied to the device a few ahead of the one that is computed.

Guarantees: a called layer has its own bytes, in any order of layers and after any failure. Its parameters
have the same addresses in every forward. The CPU never waits if host memory is page-locked.

Layer i always has its parameters in slot i % slots. One stream makes all copies, in the order in which they
are started. A copy waits until the previous layer of its slot is computed, and a layer waits for its copy.
"""

import dataclasses
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn

from poorwill._native import HostBuffer, PoorwillError
from poorwill.offload import _plans
from poorwill.offload._import import forget_compiled, import_torch
from poorwill.offload._layout import Layout, flat_bytes
from poorwill.offload._members import (
    Group,
    Layers,
    Place,
    about,
    distinct,
    key_of,
    places_of,
    point,
    prefetched_slots,
    selected_groups,
    spelt,
)
from poorwill.offload._modules import OffloadedPart, OffloadReport, ReplacedError
from poorwill.offload._offloaded import _queued
from poorwill.offload._plans import Ring, Selection, SlotLayout
from poorwill.offload._views import home_of, torch_device


@dataclass(frozen=True)
class PrefetchStats:
    """Copies since the offloader was made. A graph's copies are counted once, at its capture."""

    copied_ahead: int = 0
    """Started before their layer was called, as all but the next one, if layers are called in order."""
    copied_at_once: int = 0
    """Started when their layer was called, which waits for the whole copy.

    Such is a layer out of order, after a skipped one or a forward that raised, and the first of a forward
    with graphs.
    """
    copied_bytes: int = 0


class _Part:
    """One storage of a layer: its offset in the layer's slot and host memory, and its tensors."""

    def __init__(self, group: Group, nbytes: int, offset: int) -> None:
        self.places = group.places
        self.nbytes = nbytes
        self.offset = offset
        # Kept, so that an id stays unique.
        self.tensors = group.tensors()
        self.layouts = {id(tensor): Layout.of(tensor) for tensor in self.tensors}

    def in_slot(self, tensor: Any) -> Layout:
        """The layout of one of its tensors in the slot."""
        return _shifted(self.layouts[id(tensor)], self.offset)

    def out_of_slot(self, tensor: Any) -> Layout:
        """The current layout of one of its tensors, in memory with this storage alone."""
        return _shifted(Layout.of(tensor), -self.offset)

    def has(self, tensor: Any) -> bool:
        """Whether it is one of its tensors, and sees nothing else of its slot."""
        if id(tensor) not in self.layouts:
            return False
        layout = Layout.of(tensor)
        begin = layout.offset * layout.dtype.itemsize
        return self.offset <= begin and layout.nbytes <= self.offset + self.nbytes


def _shifted(layout: Layout, nbytes: int) -> Layout:
    return dataclasses.replace(layout, offset=layout.offset + nbytes // layout.dtype.itemsize)


class _Layer:
    """A layer with parameters in host memory."""

    def __init__(self, module: Any, groups: Sequence[Group]) -> None:
        self.module = weakref.ref(module)
        sizes = [group.nbytes() for group in groups]
        layout = SlotLayout.of(sizes)
        self.nbytes = layout.nbytes
        self.parts = [
            _Part(group, nbytes, offset)
            for group, nbytes, offset in zip(groups, sizes, layout.offsets, strict=True)
        ]
        self.host: Any = None
        self.is_pinned = False
        self._given: list[tuple[Place, Any, int]] = []

    @property
    def names(self) -> list[str]:
        return [place.name for part in self.parts for place in part.places]

    def part_of(self, tensor: Any) -> _Part | None:
        """None for a tensor that other code made of the slot's memory."""
        return next((part for part in self.parts if part.has(tensor)), None)

    def tensors(self) -> list[tuple[_Part, Any]]:
        """The tensors that were there when it was made, and still are."""
        return [
            (part, tensor)
            for part in self.parts
            for tensor in distinct(part.places)
            if id(tensor) in part.layouts
        ]

    def places(self) -> list[Place]:
        """All that its module holds now, under its original names."""
        module = self.module()
        known = {place.identity: place.name for part in self.parts for place in part.places}
        found = [] if module is None else places_of(module)
        for place in found:
            place.name = known.get(place.identity, place.name)
        return found

    def fill(self, device: Any, pin: bool | Literal["auto"]) -> str:
        """Copies it to host memory, and returns that memory's device."""
        buffer = HostBuffer(self.nbytes, device=device, pin=pin)
        self.host = import_torch().from_dlpack(buffer)
        self.is_pinned = buffer.is_pinned
        for part in self.parts:
            first = distinct(part.places)[0]
            source = flat_bytes(first.untyped_storage(), part.nbytes, first.device)
            self.host[part.offset : part.offset + part.nbytes].copy_(source)
        return buffer.device

    def remember(self) -> None:
        """Records its tensors and their addresses."""
        self._given = [
            (place, tensor, tensor.data_ptr())
            for part in self.parts
            for place in part.places
            if (tensor := place.tensor()) is not None
        ]

    def strangers(self) -> list[str]:
        """Names with another tensor than before, or with other memory than assigned."""
        return [
            place.name
            for place, given, address in self._given
            if given.data_ptr() != address or place.tensor() is not given
        ]

    def overwritten(self) -> None:
        """Makes a backward pass detect that its tensors were overwritten since the forward."""
        for _, tensor, _ in self._given:
            import_torch().autograd.graph.increment_version(tensor)


class _HostCopies:
    """Copies without streams: each completes when it is started."""

    is_capturing = False
    is_new = False

    def __init__(self, slots: Sequence[Any]) -> None:
        self._slots = slots

    def start(self, slot: int, layer: _Layer) -> None:
        self._slots[slot][: layer.nbytes].copy_(layer.host)

    def look(self) -> None:
        """Nothing is ever captured."""

    def forget(self) -> None:
        """Nothing is in flight."""

    def after_what_is_queued(self, slots: Sequence[int]) -> None:
        """Nothing is queued."""

    def wait_for(self, slot: int) -> None:
        """Complete already."""

    def release(self, slot: int) -> None:
        """Not in use any more."""

    def after_release(self, slot: int) -> None:
        """Not in use any more."""

    def settle(self) -> None:
        """Nothing is in flight."""

    def synchronize(self) -> None:
        """Nothing is in flight."""


class _StreamCopies:
    """Copies on a stream of their own, in order with the streams that compute."""

    def __init__(self, slots: Sequence[Any], device: Any) -> None:
        torch = import_torch()
        self._slots = slots
        self._device = device
        self._stream = torch.cuda.Stream(device=device)
        self._ready: list[Any] = [None] * len(slots)
        self._free: list[Any] = [None] * len(slots)
        self.is_capturing = False
        self.is_new = False
        for slot in slots:
            # Its memory is not reused while a copy writes to it.
            slot.record_stream(self._stream)

    def look(self) -> None:
        """Whether the current stream is captured, and whether a capture has begun or ended since."""
        before = self.is_capturing
        self.is_capturing = self._is_capturing(self._current())
        # The copy stream is part of a capture from its first copy there until the capture ends.
        self.is_new = (
            not self._is_capturing(self._stream) if self.is_capturing else before != self.is_capturing
        )

    def forget(self) -> None:
        """Drops events that a capture must not see, or that were only captured."""
        self._ready = [None] * len(self._slots)
        self._free = [None] * len(self._slots)

    def after_what_is_queued(self, slots: Sequence[int]) -> None:
        self._stream.wait_stream(self._current())
        for slot in slots:
            if self._free[slot] is not None:
                self._stream.wait_event(self._free[slot])

    def start(self, slot: int, layer: _Layer) -> None:
        torch = import_torch()
        if self.is_capturing and not layer.is_pinned:
            raise PoorwillError(
                f"cannot capture the copy of {layer.nbytes} bytes of a layer: its host memory is pageable, "
                "and such a copy is waited for; page-lock it with pin=True, or do not capture"
            )
        if not self.is_capturing:
            _queued.forget_made()
        event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._slots[slot][: layer.nbytes].copy_(layer.host, non_blocking=layer.is_pinned)
            event.record(self._stream)
        self._ready[slot] = event
        if not self.is_capturing:
            # Also if the model is dropped before the copy completes.
            _queued.add(event, layer.host)

    def wait_for(self, slot: int) -> None:
        if self._ready[slot] is not None:
            self._current().wait_event(self._ready[slot])

    def release(self, slot: int) -> None:
        event = import_torch().cuda.Event()
        event.record(self._current())
        self._free[slot] = event

    def after_release(self, slot: int) -> None:
        self._stream.wait_event(self._free[slot])

    def settle(self) -> None:
        if not self._is_capturing(self._current()) or self._is_capturing(self._stream):
            self._current().wait_stream(self._stream)

    def synchronize(self) -> None:
        if self._is_capturing(self._current()):
            raise PoorwillError("cannot close a prefetch offloader while a graph is being captured")
        # Layers may have run on any stream.
        import_torch().cuda.synchronize(self._device)

    def _current(self) -> Any:
        return import_torch().cuda.current_stream(self._device)

    def _is_capturing(self, stream: Any) -> bool:
        torch = import_torch()
        with torch.cuda.stream(stream):
            return bool(torch.cuda.is_current_stream_capturing())


class _Engine:
    """The hooks' target: the ring and its copies. The hooks own it, and it goes with the modules."""

    def __init__(self, layers: list[_Layer], slots: Sequence[Any], copies: Any) -> None:
        self.layers = layers
        self.slots = slots
        self.copies = copies
        self.ring = Ring(len(layers), len(slots))
        self.stats = PrefetchStats()
        self._is_linear = False
        self._has_graphs = False
        # Indices of the layers that are running, innermost last.
        self._active: list[int] = []
        # Layers of the slots whose tensors a backward pass may need.
        self._graded: list[int | None] = [None] * len(slots)

    def fill(self) -> None:
        """Copies the first layers, before their first call."""
        self.copies.after_what_is_queued(range(len(self.slots)))
        self._start(self.ring.fill(), at_once=0)
        for slot in range(len(self.slots)):
            self.copies.wait_for(slot)

    def settle(self) -> None:
        self.copies.settle()
        self.ring.interrupt()

    def before(self, index: int, *_: Any) -> None:
        if self._active and self._active[-1] != index:
            # Layers do not call one another: that one was interrupted.
            self._active = []
        strangers = self.layers[index].strangers()
        if strangers:
            raise ReplacedError(
                f"{len(strangers)} prefetched parameters were replaced or moved, and may have been made of "
                f"another layer's bytes: {', '.join(strangers)}; close() the offloader before changing them, "
                "and make another one afterwards"
            )
        self._active.append(index)
        self.copies.look()
        if self.copies.is_new:
            self.ring.forget()
            self.copies.forget()
        self._has_graphs = self._has_graphs or self.copies.is_capturing
        # A replay is invisible here, and leaves other layers in the slots.
        self._is_linear = self._has_graphs
        copied = self.ring.enter(index, self._is_linear)
        if copied:
            self.copies.after_what_is_queued([layer % len(self.slots) for layer in copied])
            self._start(copied, at_once=1)
        self.copies.wait_for(index % len(self.slots))
        if import_torch().is_grad_enabled():
            self._graded[index % len(self.slots)] = index

    def after(self, index: int, *_: Any) -> None:
        if not self._active or self._active[-1] != index:
            return
        self._active.pop()
        if self._active:
            return
        slot = index % len(self.slots)
        self.copies.release(slot)
        coming = self.ring.leave(index, self._is_linear)
        if coming is not None:
            self.copies.after_release(slot)
            self._start([coming], at_once=0)

    def _start(self, copied: Sequence[int], at_once: int) -> None:
        try:
            for layer in copied:
                slot = layer % len(self.slots)
                before, self._graded[slot] = self._graded[slot], None
                if before is not None and before != layer:
                    self.layers[before].overwritten()
                self.copies.start(slot, self.layers[layer])
        except BaseException:
            # A failed copy leaves the slot's contents unknown.
            self.ring.forget()
            raise
        self.stats = PrefetchStats(
            self.stats.copied_ahead + len(copied) - at_once,
            self.stats.copied_at_once + at_once,
            self.stats.copied_bytes + sum(self.layers[layer].nbytes for layer in copied),
        )


class _Hook:
    """A module's hook. It refuses to be copied, so that no copied module refers to slots."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse_to("copy")

    def __reduce__(self) -> NoReturn:
        _refuse_to("pickle")


def _refuse_to(what: str) -> NoReturn:
    raise PoorwillError(
        f"cannot {what} a module whose parameters are prefetched, since they are not on the device all at "
        "once: take its state_dict(), or close() the offloader first"
    )


def _refuse_to_load(*_: Any) -> NoReturn:
    raise PoorwillError(
        "cannot load into a module whose parameters are prefetched: close() the offloader, load, and make "
        "another one"
    )


class PrefetchOffloader:
    """Keeps the parameters of a row of layers in host memory, and copies each layer in before its call.

    ```python
    offloader = PrefetchOffloader(model.layers, ahead=2, within=model)
    ```

    `layers` are modules that are called one after the other, over and over, one forward at a time. The
    device holds `ahead + 1` slots, at most one for each layer, each as large as the largest layer. After the
    last layer the first ones are copied again. A layer out of order, or after a skipped one, is copied when
    it is called; `stats` counts those.

    `parameters` are names, or runs of whole name segments, as for `UvaOffloader`. A parameter's name is the
    one in `within`, or else the layer's number and the name in the layer. Memory that is shared with
    something outside of its layer stays resident, and is in `report.left`. Only `layers` and `within` are
    searched for that: pass the model if anything of it may be tied to its layers.

    It is for inference: what a forward writes to these parameters is lost. Until `close`, such modules
    cannot be copied, pickled, or loaded into. Their `state_dict` has CPU tensors of the right bytes, which
    ALIAS the host memory. A parameter that is used without a call of its layer may have any layer's bytes.

    **Graphs.** A capture uses nothing that was in a slot before. It begins with copies of its first layers,
    and copies only what the same forward needs. From the first capture on every forward works so, since
    replays are invisible. Call `settle` before the end of a capture that stops short of the last layer. Also
    call it before a replay, if the forward before has raised or not reached its last layer. Host memory has
    to be page-locked. A graph keeps nothing alive: keep the model.

    All or nothing: after an error here every parameter is as it was. Hooks run for calls of a layer, not of
    its `forward`.
    """

    choose_ahead = staticmethod(_plans.choose_ahead)

    def __init__(
        self,
        layers: Sequence[Any],
        *,
        ahead: int = 1,
        parameters: Sequence[str] = (),
        device: Any = None,
        pin: bool | Literal["auto"] = "auto",
        within: Any = None,
    ) -> None:
        """Raises OutOfMemoryError without enough host memory.

        Raises TypeError or ValueError for tensors that are not plain.
        """
        torch = import_torch()
        if not hasattr(torch.nn.Module, "register_state_dict_post_hook"):
            raise PoorwillError(f"prefetching needs PyTorch 2.5 or newer, and this is {torch.__version__}")
        modules = list(layers)
        for module in (*modules, *([] if within is None else [within])):
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"layers are modules of PyTorch's, not {type(module).__name__}")
        if operator.index(ahead) < 0:
            raise ValueError(f"ahead is {ahead}, and it is a number of layers")
        self._ahead = ahead
        selection = Selection.of(parameters)
        rows, left, places = _sorted_out(modules, within, selection)
        self._engine: _Engine | None = None
        self._handles: list[Any] = []
        held = [_Layer(modules[number], groups) for number, groups in rows]
        if held:
            # Inference tensors could not be written outside of inference mode later.
            with torch.inference_mode(False), torch.no_grad():
                self._engine = _set_up(held, ahead, device, pin)
            self._device = self._engine.slots[0].device
            try:
                # First, so that no parameter is in a slot that is never filled.
                self._hook(self._engine)
                _move_in(self._engine)
            except BaseException:
                self.close()
                raise
        self.report = OffloadReport(
            taken=tuple(
                OffloadedPart(tuple(place.name for place in part.places), part.nbytes, "copied ahead")
                for layer in held
                for part in layer.parts
            ),
            already=(),
            left=tuple(
                OffloadedPart(group.names, group.nbytes(), "it shares memory with what is outside its layer")
                for group in left
            ),
            replaced=(),
            gone=(),
            unmatched=selection.unmatched(place.name for place in places if not place.is_buffer),
            used_bytes=sum(layer.nbytes for layer in held),
            max_bytes=None,
        )

    @property
    def ahead(self) -> int:
        return self._ahead

    @property
    def stats(self) -> PrefetchStats:
        return PrefetchStats() if self._engine is None else self._engine.stats

    @property
    def slots(self) -> tuple[Any, ...]:
        """The slots: flat tensors of uint8. Empty after `close`."""
        return () if self._engine is None else tuple(self._engine.slots)

    def replaced(self) -> tuple[str, ...]:
        """Names with other memory than their slot. Calling their layer is an error."""
        layers = [] if self._engine is None else self._engine.layers
        return tuple(name for layer in layers for name in layer.strangers())

    def settle(self) -> None:
        """Makes the current stream wait for all started copies, and ends an incomplete forward.

        A graph may then be replayed, or a capture end. The CPU does not wait.
        """
        if self._engine is not None:
            self._engine.settle()

    def close(self, *, on: Literal["device", "host"] = "device") -> None:
        """Makes the parameters resident again, all or none.

        They go to memory of their own on the device, or become CPU tensors that ALIAS the host memory. After
        an error everything stays as it was. Replaced parameters are left alone. It waits for the device.
        Repeating it does nothing.
        """
        if on not in ("device", "host"):
            raise ValueError(f"on is {on!r}, and it is 'device' or 'host'")
        engine = self._engine
        if engine is None:
            return
        engine.copies.synchronize()
        torch = import_torch()
        keys = {key_of(slot) for slot in engine.slots}
        found: dict[int, tuple[_Part, Any, _Layer]] = {}
        unknown = []
        for layer in engine.layers:
            for place in layer.places():
                tensor = place.tensor()
                if key_of(tensor) not in keys:
                    continue
                part = layer.part_of(tensor)
                if part is None:
                    unknown.append(place.name)
                else:
                    found[id(tensor)] = (part, tensor, layer)
        if unknown:
            raise _unknown(unknown)
        flats: dict[int, Any] = {}
        for part, _, layer in found.values() if on == "device" else ():
            if id(part) in flats:
                continue
            try:
                flat = torch.empty(part.nbytes, dtype=torch.uint8, device=self._device)
            except Exception as error:
                what = f"cannot put {spelt([place.name for place in part.places])} back"
                raise about(
                    error,
                    f"{what}: no {part.nbytes} bytes on {self._device}; nothing was changed, and "
                    "close(on='host') needs no memory",
                ) from error
            flats[id(part)] = flat.copy_(layer.host[part.offset : part.offset + part.nbytes])

        def back(tensor: Any) -> Any:
            part, _, layer = found[id(tensor)]
            if on == "host":
                return Layout.of(tensor).over(layer.host)
            return part.out_of_slot(tensor).over(flats[id(part)])

        point([tensor for _, tensor, _ in found.values()], back)
        for handle in self._handles:
            handle.remove()
        forget_compiled()
        self._handles = []
        self._engine = None

    def _hook(self, engine: _Engine) -> None:
        for index, layer in enumerate(engine.layers):
            module: Any = layer.module()
            self._handles += [
                module.register_forward_pre_hook(_Hook(partial(engine.before, index)), prepend=True),
                # Also when forward raises.
                module.register_forward_hook(_Hook(partial(engine.after, index)), always_call=True),
            ]
            owners: dict[int, Any] = {}
            for part in layer.parts:
                for place in part.places:
                    owners[id(place.owner)] = place.owner
            for owner in owners.values():
                self._handles += [
                    owner.register_state_dict_post_hook(_Hook(_StateOf(layer, engine.slots))),
                    owner.register_load_state_dict_pre_hook(_Hook(_refuse_to_load)),
                ]
        forget_compiled()


class _StateOf:
    """Puts the bytes of the host memory into a state dict."""

    def __init__(self, layer: _Layer, slots: Sequence[Any]) -> None:
        self._layer = layer
        self._keys = {key_of(slot) for slot in slots}

    def __call__(self, module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = prefix + attribute
            if tensor is None or name not in state or key_of(tensor) not in self._keys:
                continue
            if self._layer.part_of(tensor) is None:
                raise _unknown([name])
            state[name] = Layout.of(tensor).over(self._layer.host)


def _unknown(names: Sequence[str]) -> ReplacedError:
    return ReplacedError(
        f"{len(names)} parameters were made of prefetched ones, with the bytes of an unknown layer: "
        f"{', '.join(names)}; put back what was there, or give them memory of their own"
    )


def _sorted_out(
    modules: Sequence[Any], within: Any, selection: Selection
) -> tuple[list[tuple[int, list[Group]]], list[Group], list[Place]]:
    """Sorts parameters into groups for each layer and groups that stay, and lists all.

    A group stays if more than one layer, or something else, shares it.
    """
    if within is None:
        numbered = [
            (place, {number})
            for number, module in enumerate(modules)
            for place in places_of(module, str(number))
        ]
    else:
        inside = {id(module) for module in within.modules()}
        if any(id(module) not in inside for module in modules):
            raise ValueError("within is a module that has all the layers in it")
        layers = Layers(within, "", modules)
        numbered = [(place, layers.of(place)) for place in places_of(within)]
    places = [place for place, _ in numbered]
    numbers_of = {id(place): numbers for place, numbers in numbered}
    rows: dict[int, list[Group]] = {}
    left = []
    for group in selected_groups(places, selection):
        within_layers = [numbers_of[id(place)] for place in group.places]
        together: set[int] = set().union(*within_layers)
        if not together or not group.nbytes():
            continue
        if len(together) > 1 or not all(within_layers):
            left.append(group)
        else:
            rows.setdefault(together.pop(), []).append(group)
    return sorted(rows.items()), left, places


def _set_up(layers: list[_Layer], ahead: int, device: Any, pin: bool | Literal["auto"]) -> _Engine:
    """Allocates and fills host memory and slots."""
    torch = import_torch()
    first = layers[0].tensors()[0][1]
    home = home_of(first, device)
    total = sum(layer.nbytes for layer in layers)
    named = home
    done = 0
    for layer in layers:
        try:
            named = layer.fill(home, pin)
        except Exception as error:
            raise about(
                error,
                f"cannot offload {layer.names[0]} and what is with it, {layer.nbytes} bytes of {total} for "
                f"{len(layers)} layers, after {done} bytes; nothing was changed",
            ) from error
        done += layer.nbytes
    place = torch_device(named)
    count, nbytes = min(ahead + 1, len(layers)), max(layer.nbytes for layer in layers)
    try:
        slots = [torch.empty(nbytes, dtype=torch.uint8, device=place) for _ in range(count)]
        prefetched_slots.update((key_of(slot), slot) for slot in slots)
        copies = _HostCopies(slots) if place.type != "cuda" else _StreamCopies(slots, place)
        engine = _Engine(layers, slots, copies)
        engine.fill()
    except Exception as error:
        raise about(
            error, f"cannot make {count} slots of {nbytes} bytes on {place} for {len(layers)} layers"
        ) from error
    return engine


def _move_in(engine: _Engine) -> None:
    """Moves the parameters to their slots."""
    homes = {
        id(tensor): (part, engine.slots[index % len(engine.slots)])
        for index, layer in enumerate(engine.layers)
        for part, tensor in layer.tensors()
    }

    def at(tensor: Any) -> Any:
        part, slot = homes[id(tensor)]
        return part.in_slot(tensor).over(slot)

    point([tensor for layer in engine.layers for _, tensor in layer.tensors()], at)
    for layer in engine.layers:
        layer.remember()
