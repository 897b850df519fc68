"""Modules with their parameters in host memory, where the device reads them in place.

What is promised: a parameter is moved as a whole or stays what it was, whatever fails. What is tied stays
tied. Nothing is taken beyond the budget or twice, and nothing goes back to the device without being named.
"""

import operator
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from poorwill import _native
from poorwill._native import PoorwillError
from poorwill.offload._import import forget_compiled, import_torch
from poorwill.offload._layout import Layout, flat_bytes
from poorwill.offload._members import (
    Group,
    Key,
    Layers,
    Place,
    about,
    distinct,
    key_of,
    places_of,
    point,
    selected_groups,
    spelt,
)
from poorwill.offload._offloaded import Offloaded, offload
from poorwill.offload._plans import Selection, fitting


class ReplacedError(PoorwillError):
    """Parameters that were offloaded are not in host memory any more: somebody has replaced them."""


@dataclass(frozen=True)
class OffloadedPart:
    """One piece of memory, and all names that it has."""

    names: tuple[str, ...]
    nbytes: int
    because: str | None = None
    """Of what is in host memory: why the device gets copies of it; None where it reads it in place. Of what
    was left: why."""


@dataclass(frozen=True)
class OffloadReport:
    """What one call has found and done."""

    taken: tuple[OffloadedPart, ...]
    """Moved to host memory by this call."""
    already: tuple[OffloadedPart, ...]
    """Selected, and in host memory before."""
    left: tuple[OffloadedPart, ...]
    """Selected, and where it was."""
    replaced: tuple[str, ...]
    """Names that were offloaded and were found to hold other memory. They are in `taken` or `left`, if they
    are selected."""
    gone: tuple[str, ...]
    """Names that were offloaded and are no parameters any more."""
    unmatched: tuple[str, ...]
    """Patterns that have selected nothing."""
    used_bytes: int
    """Host memory that the offloader holds after the call."""
    max_bytes: int | None
    """What it may hold; None without a limit."""

    @property
    def taken_bytes(self) -> int:
        return sum(part.nbytes for part in self.taken)

    @property
    def left_bytes(self) -> int:
        return sum(part.nbytes for part in self.left)

    @property
    def asked_bytes(self) -> int:
        """All that was selected."""
        return self.taken_bytes + self.left_bytes + sum(part.nbytes for part in self.already)


class _Moved:
    """One storage in host memory, and those who look at it."""

    def __init__(self, kept: Offloaded, nbytes: int) -> None:
        self.kept = kept
        self.nbytes = nbytes
        self.places: dict[tuple[int, str], dict[str, Place]] = {}
        self._depth = 0
        self._staged: Any = None
        self._lock = threading.Lock()
        # At rest, what a device cannot read in place is a tensor on the CPU.
        self.resting = kept.stage_in() if kept.is_zero_copy else kept.host

    def add(self, places: Iterable[Place]) -> None:
        for place in places:
            self.places.setdefault(place.identity, {})[place.name] = place

    def all_places(self) -> list[Place]:
        return [place for named in self.places.values() for place in named.values()]

    def keys(self) -> set[Key | None]:
        return {key_of(flat) for flat in (self.resting, self._staged) if flat is not None}

    def holds(self, place: Place) -> bool:
        """Also while another thread has it brought in."""
        with self._lock:
            tensor = place.tensor()
            return tensor is not None and key_of(tensor) in self.keys()

    def part(self) -> OffloadedPart:
        names = tuple(place.name for place in self.all_places())
        return OffloadedPart(names, self.nbytes, self.kept.copies_because)

    def enter(self) -> None:
        """Brings it to the device, if it is not there yet."""
        with self._lock:
            if self._depth == 0 and (tensors := self._looking_at(self.resting)):
                staged = self.kept.stage_in()
                _point_into(staged, tensors)
                self._staged = staged
            self._depth += 1

    def leave(self) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0 and self._staged is not None:
                _point_into(self.resting, self._looking_at(self._staged))
                self._staged = None

    def _looking_at(self, flat: Any) -> list[Any]:
        """Not those that were replaced."""
        key = key_of(flat)
        return [tensor for tensor in distinct(self.all_places()) if key_of(tensor) == key]


def _point_into(flat: Any, tensors: list[Any]) -> None:
    """Each tensor at the same place of `flat`."""
    point(tensors, lambda tensor: Layout.of(tensor).over(flat))


class _Unit:
    """A module that is staged in as a whole, where copies are needed."""

    def __init__(self) -> None:
        self.moved: list[_Moved] = []
        self._entered: list[list[_Moved]] = []

    def before(self) -> None:
        entered: list[_Moved] = []
        try:
            for moved in self.moved:
                moved.enter()
                entered.append(moved)
        except BaseException:
            for moved in entered:
                moved.leave()
            # What PyTorch calls after a failure, too, finds nothing to do.
            self._entered.append([])
            raise
        self._entered.append(entered)

    def after(self) -> None:
        for moved in self._entered.pop() if self._entered else ():
            moved.leave()


class _Hook:
    """What a module calls. In a copy of the module it does nothing: the copy has parameters of its own."""

    def __init__(self, unit: _Unit | None, is_before: bool = False) -> None:
        self._unit = unit
        self._is_before = is_before

    def __call__(self, *_: Any) -> None:
        if self._unit is not None:
            if self._is_before:
                self._unit.before()
            else:
                self._unit.after()

    def __deepcopy__(self, memo: Any) -> "_Hook":
        return _Hook(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Hook, (None,))


@dataclass(frozen=True)
class _Root:
    """A module that was given, weakly, and how."""

    module: "weakref.ref[Any]"
    name: str
    layers: tuple["weakref.ref[Any]", ...]


class UvaOffloader:
    """Moves parameters of modules to host memory, where the device reads them in place.

        offloader = UvaOffloader(max_bytes="40GiB", parameters=("experts.w2_weight",))
        for number, layer in enumerate(model.layers):
            report = offloader.offload(layer, name=f"layers.{number}")

    `max_bytes` is what it may hold in host memory, in bytes or as "40GiB", and without an end if it is None.
    `parameters` are names, or runs of whole segments of names, and all parameters if there are none. `device`
    and `pin` are as for `offload`.

    Parameters are moved, and with them whatever shares their memory: other parameters of the module, selected
    or not, and buffers. Other buffers stay. `parameter.data` is pointed at the new memory; the Parameter, its
    attributes, `requires_grad`, its strides and its offset stay what they were. As with `offload`, what is
    taken is all from the beginning of the storage to the last element that one of them sees.

    Where the device cannot read the memory in place, the parameters are on the CPU, and hooks bring them to
    the device, on the current stream, while a module runs. What is written to them there is lost. Those hooks
    run when a module is called, one thread at a time, and not when somebody calls its `forward` or uses
    its parameters otherwise.

    Nothing keeps the modules. The memory lives until neither a parameter nor the offloader holds it.
    """

    def __init__(
        self,
        *,
        max_bytes: int | str | None = None,
        parameters: Sequence[str] = (),
        device: Any = None,
        pin: bool | Literal["auto"] = "auto",
    ) -> None:
        self._max_bytes = None if max_bytes is None else _bytes_of(max_bytes)
        self._selection = Selection.of(parameters)
        self._device = device
        self._pin = pin
        self._lock = threading.RLock()
        self._moved: list[_Moved] = []
        self._roots: list[_Root] = []
        self._lost: dict[tuple[tuple[int, str], str], Place] = {}
        self._units: weakref.WeakKeyDictionary[Any, _Unit] = weakref.WeakKeyDictionary()

    @property
    def used_bytes(self) -> int:
        """Host memory that it holds."""
        with self._lock:
            self._forget_the_dead()
            return sum(moved.nbytes for moved in self._moved)

    @property
    def max_bytes(self) -> int | None:
        """What it may hold; None without a limit."""
        return self._max_bytes

    def offload(self, module: Any, *, name: str = "", layers: Iterable[Any] = ()) -> OffloadReport:
        """Moves what is selected of a module, in the order of its names, and goes on with what is left of the
        budget.

        What does not fit into that is left, and smaller ones that come later may still be taken. What is in
        host memory already is not taken again. `name` is the module's own, before those of its parameters.
        Where copies are needed, each of `layers`, which are in `module`, is brought in by itself, and the
        rest while `module` runs. A `ModuleList` is never called, and its modules are its layers.

        Parameters of this module that were replaced are taken anew, as `again` does.

        Raises OutOfMemoryError where there is not so much host memory, and, before anything is moved,
        TypeError or ValueError for what is no plain tensor. After any error each parameter is where it was
        or in host memory, and the module can be used.
        """
        torch = import_torch()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"offload takes a torch.nn.Module, not {type(module).__name__}")
        given = list(layers)
        inside = {id(part) for part in module.modules()}
        if any(id(part) not in inside for part in given):
            raise ValueError("layers are modules within the module")
        if not given and not _is_called(module):
            given = [module]
        parts = [part for each in given for part in _called(each)]
        root = _Root(weakref.ref(module), name, tuple(map(weakref.ref, parts)))
        with self._lock:
            known = [(each.module(), each.name) for each in self._roots]
            if (module, name) in known:
                self._roots.pop(known.index((module, name)))
            self._roots.append(root)
            return self._take([root])

    def again(self) -> OffloadReport:
        """Looks at all modules that were given, and offloads what is not in host memory any more.

        The memory of parameters that were replaced, and that nobody else has a name for, is given back first.
        Then it goes on as `offload` for all modules in turn, but what was replaced comes first.

        Raises as `offload`.
        """
        with self._lock:
            self._forget_the_dead()
            return self._take([root for root in self._roots if root.module() is not None])

    def replaced(self) -> tuple[str, ...]:
        """The names that were offloaded and now hold other memory, or none. It changes nothing."""
        with self._lock:
            self._forget_the_dead()
            found = {
                place.name: None
                for moved in self._moved
                for place in moved.all_places()
                if not moved.holds(place)
            }
            return tuple(dict.fromkeys([*(place.name for place in self._lost.values()), *found]))

    def check(self) -> None:
        """Raises ReplacedError where `replaced` has names."""
        names = self.replaced()
        if names:
            raise ReplacedError(
                f"{len(names)} offloaded parameters are not in host memory any more, since they were "
                f"replaced or removed: {', '.join(names)}; again() offloads what is there now and gives the "
                "old memory back"
            )

    def _take(self, roots: list[_Root]) -> OffloadReport:
        self._forget_the_dead()
        by_root = [(root, places_of(root.module(), root.name)) for root in roots]
        places = list(
            {(place.identity, place.name): place for _, found in by_root for place in found}.values()
        )
        replaced, gone = self._forget_the_replaced(roots, places)
        groups = selected_groups(places, self._selection)
        # Plain or not, and how large, before anything is moved.
        sizes = {id(group): group.nbytes() for group in groups}
        groups = [group for group in groups if sizes[id(group)]]
        by_key = {key: moved for moved in self._moved for key in moved.keys()}
        already, new = [], []
        for group in groups:
            moved = by_key.get(group.key)
            if moved is None:
                new.append(group)
                continue
            moved.add(group.places)
            already.append(moved)
            self._hook(moved, by_root)
        lost = {identity for identity, _ in self._lost}
        new.sort(key=lambda group: not any(each.identity in lost for each in group.places))
        room = None if self._max_bytes is None else self._max_bytes - self.used_bytes
        taken, left = [], []
        for group, fits in zip(new, fitting([sizes[id(group)] for group in new], room), strict=True):
            nbytes = sizes[id(group)]
            if not fits:
                because = f"{nbytes} bytes, and {self._max_bytes} bytes are allowed in all"
                left.append(OffloadedPart(group.names, nbytes, because))
                continue
            moved = self._move(group, nbytes)
            self._hook(moved, by_root)
            taken.append(moved.part())
            self._found(group.places)
        # What is not selected any more was named, and is nobody's concern from now on.
        waiting = {place.identity for group in new for place in group.places}
        self._found([place for place in places if place.identity not in waiting])
        return OffloadReport(
            taken=tuple(taken),
            already=tuple(moved.part() for moved in already),
            left=tuple(left),
            replaced=replaced,
            gone=gone,
            unmatched=self._selection.unmatched(place.name for place in places if not place.is_buffer),
            used_bytes=self.used_bytes,
            max_bytes=self._max_bytes,
        )

    def _found(self, places: Iterable[Place]) -> None:
        found = {place.identity for place in places}
        self._lost = {key: place for key, place in self._lost.items() if key[0] not in found}

    def _move(self, group: Group, nbytes: int) -> _Moved:
        first = group.tensors()[0]
        try:
            flat = flat_bytes(first.untyped_storage(), nbytes, first.device)
            moved = _Moved(offload(flat, device=self._device, pin=self._pin), nbytes)
            _point_into(moved.resting, group.tensors())
        except Exception as error:
            allowed = "no limit" if self._max_bytes is None else f"{self._max_bytes} bytes"
            raise about(
                error,
                f"cannot offload {spelt(group.names)} of {nbytes} bytes; it is as it was, and "
                f"{self.used_bytes} bytes are offloaded with {allowed} for max_bytes",
            ) from error
        moved.add(group.places)
        self._moved.append(moved)
        return moved

    def _hook(self, moved: _Moved, by_root: list[tuple[_Root, list[Place]]]) -> None:
        """Has the modules whose parameters it has bring it in, where copies are needed."""
        if moved.kept.is_zero_copy:
            return
        named = {(place.identity, place.name) for place in moved.all_places()}
        for root, places in by_root:
            layers = [layer for reference in root.layers if (layer := reference()) is not None]
            numbers = Layers(root.module(), root.name, layers)
            for place in places:
                if (place.identity, place.name) in named:
                    of = [layers[number] for number in numbers.of(place)]
                    for module in of or [root.module()]:
                        self._unit(module, moved)

    def _unit(self, module: Any, moved: _Moved) -> None:
        unit = self._units.get(module)
        if unit is None:
            unit = self._units[module] = _Unit()
            module.register_forward_pre_hook(_Hook(unit, is_before=True), prepend=True)
            # Also when forward raises.
            module.register_forward_hook(_Hook(unit), always_call=True)
            forget_compiled()
        if moved not in unit.moved:
            unit.moved.append(moved)

    def _forget_the_dead(self) -> None:
        """Gives back what belongs to modules that are gone."""
        self._roots = [root for root in self._roots if root.module() is not None]
        self._lost = {key: place for key, place in self._lost.items() if place.owner is not None}
        for moved in self._moved:
            moved.places = {
                identity: named
                for identity, named in moved.places.items()
                if any(place.owner is not None for place in named.values())
            }
        self._drop_unused()

    def _forget_the_replaced(
        self, roots: list[_Root], places: list[Place]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Lets go of what these modules do not look at any more. Gives the names that hold other memory, and
        those that hold nothing."""
        owners = {id(owner) for root in roots for owner in root.module().modules()}  # type: ignore[union-attr]
        replaced, gone = [], []
        for moved in self._moved:
            for identity, named in list(moved.places.items()):
                if identity[0] not in owners or any(moved.holds(place) for place in named.values()):
                    continue
                del moved.places[identity]
                for place in named.values():
                    self._lost[(identity, place.name)] = place
        for key, place in list(self._lost.items()):
            if key[0][0] not in owners:
                continue
            if place.tensor() is None:
                gone.append(place.name)
                del self._lost[key]
            else:
                replaced.append(place.name)
        self._drop_unused()
        return tuple(replaced), tuple(gone)

    def _drop_unused(self) -> None:
        unused = [moved for moved in self._moved if not moved.places]
        if not unused:
            return
        self._moved = [moved for moved in self._moved if moved.places]
        for unit in self._units.values():
            unit.moved = [moved for moved in unit.moved if moved not in unused]


def _bytes_of(size: int | str) -> int:
    nbytes = _native.parse_bytes(size) if isinstance(size, str) else operator.index(size)
    if nbytes < 0:
        raise ValueError(f"max_bytes is {nbytes}, and there is no room of less than nothing")
    return nbytes


def _is_called(module: Any) -> bool:
    """Lists and dictionaries of modules are not."""
    return type(module).forward is not import_torch().nn.Module.forward


def _called(module: Any) -> list[Any]:
    """It, or the modules in it that are called."""
    if _is_called(module):
        return [module]
    return [part for child in module.children() for part in _called(child)]
