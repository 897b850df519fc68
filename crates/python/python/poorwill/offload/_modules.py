"""Modules with their parameters in host memory, where the device reads them in place.

Guarantees: a parameter is moved as a whole or stays as it was, whatever fails. Tied parameters stay tied.
Nothing exceeds the budget or is taken twice, and nothing returns to the device without being reported.
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
    """Offloaded parameters are not in host memory any more: other code has replaced them."""


@dataclass(frozen=True)
class OffloadedPart:
    """One storage, with all its names."""

    names: tuple[str, ...]
    nbytes: int
    because: str | None = None
    """For an offloaded part, why the device gets copies; None if it reads in place. For a part that was
    left, why.
    """


@dataclass(frozen=True)
class OffloadReport:
    """What one call found and did."""

    taken: tuple[OffloadedPart, ...]
    """Moved to host memory by this call."""
    already: tuple[OffloadedPart, ...]
    """Selected, and in host memory before."""
    left: tuple[OffloadedPart, ...]
    """Selected, and left where it was."""
    replaced: tuple[str, ...]
    """Offloaded names that now hold other memory. If selected, they are also in `taken` or `left`."""
    gone: tuple[str, ...]
    """Offloaded names that are no parameters any more."""
    unmatched: tuple[str, ...]
    """Patterns that selected nothing."""
    used_bytes: int
    """Host memory of the offloader after the call, in bytes."""
    max_bytes: int | None
    """Its limit; None without one."""

    @property
    def taken_bytes(self) -> int:
        """Bytes of `taken`."""
        return sum(part.nbytes for part in self.taken)

    @property
    def left_bytes(self) -> int:
        """Bytes of `left`."""
        return sum(part.nbytes for part in self.left)

    @property
    def selected_bytes(self) -> int:
        """Bytes of all that was selected."""
        return self.taken_bytes + self.left_bytes + sum(part.nbytes for part in self.already)


class _Moved:
    """One storage in host memory, and the tensors that refer to it."""

    def __init__(self, kept: Offloaded, nbytes: int) -> None:
        self.kept = kept
        self.nbytes = nbytes
        self.places: dict[tuple[int, str], dict[str, Place]] = {}
        self._depth = 0
        self._staged: Any = None
        self._lock = threading.Lock()
        # At rest, a parameter that a device cannot read in place is a CPU tensor.
        self.resting = kept.stage_in() if kept.is_zero_copy else kept.host

    def add(self, places: Iterable[Place]) -> None:
        for place in places:
            self.places.setdefault(place.identity, {})[place.name] = place

    def all_places(self) -> list[Place]:
        return [place for named in self.places.values() for place in named.values()]

    def keys(self) -> set[Key | None]:
        return {key_of(flat) for flat in (self.resting, self._staged) if flat is not None}

    def holds(self, place: Place) -> bool:
        """Also while another thread has it staged in."""
        with self._lock:
            tensor = place.tensor()
            return tensor is not None and key_of(tensor) in self.keys()

    def part(self) -> OffloadedPart:
        names = tuple(place.name for place in self.all_places())
        return OffloadedPart(names, self.nbytes, self.kept.copies_because)

    def enter(self) -> None:
        """Stages it in, if it is not on the device yet."""
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
        """Without replaced ones."""
        key = key_of(flat)
        return [tensor for tensor in distinct(self.all_places()) if key_of(tensor) == key]


def _point_into(flat: Any, tensors: list[Any]) -> None:
    """Makes each tensor refer to the same offset of `flat`."""
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
            # PyTorch's call after a failure finds nothing to do.
            self._entered.append([])
            raise
        self._entered.append(entered)

    def after(self) -> None:
        for moved in self._entered.pop() if self._entered else ():
            moved.leave()


class _Hook:
    """A module's hook. In a copy of the module it does nothing: the copy has its own parameters."""

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
    """A given module, weakly referenced, with its options."""

    module: "weakref.ref[Any]"
    name: str
    layers: tuple["weakref.ref[Any]", ...]


class UvaOffloader:
    """Moves parameters of modules to host memory, where the device reads them in place.

    ```python
    offloader = UvaOffloader(max_bytes="40GiB", parameters=("experts.w2_weight",))
    for number, layer in enumerate(model.layers):
        report = offloader.offload(layer, name=f"layers.{number}")
    ```

    `max_bytes` bounds its host memory, in bytes or as "40GiB"; None is no limit. `parameters` are names or
    runs of whole name segments; without any, all parameters are selected. `device` and `pin` are as for
    `offload`.

    A parameter moves with all that shares its memory: other parameters of the module, selected or not, and
    buffers. Other buffers stay. `parameter.data` refers to the new memory. The Parameter, its attributes,
    `requires_grad`, strides and offset stay as they were. As with `offload`, the bytes from the storage's
    beginning to the last visible element are moved.

    Where the device cannot read the memory in place, the parameters are on the CPU. Hooks stage them in, on
    the current stream, while a module runs; writes to the copies are lost. Those hooks run for calls of a
    module, in one thread at a time. Calls of its `forward` and other uses of its parameters bypass them.

    Modules are not kept alive. The memory lives until neither a parameter nor the offloader holds it.
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
        """Host memory that it holds, in bytes."""
        with self._lock:
            self._forget_the_dead()
            return sum(moved.nbytes for moved in self._moved)

    @property
    def max_bytes(self) -> int | None:
        """Its limit, in bytes; None without one."""
        return self._max_bytes

    def offload(self, module: Any, *, name: str = "", layers: Iterable[Any] = ()) -> OffloadReport:
        """Moves the selected parameters of a module, in the order of their names, within the budget.

        One that does not fit is left, and later smaller ones may still be taken. One that is in host memory
        already is not taken again. `name` is the module's own name, before those of its parameters. `layers`
        are submodules that are staged in one by one where copies are needed; the rest is staged in while
        `module` runs. A `ModuleList` is never called, and its modules are its layers.

        Parameters of this module that were replaced are taken again, as by `again`.

        Raises OutOfMemoryError without enough host memory. Raises TypeError or ValueError for tensors that
        are not plain, before moving any. After an error each parameter is in its old memory or in host
        memory, and the module is usable.
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
        """Checks all given modules, and offloads what is not in host memory any more.

        First it frees the memory of replaced parameters that no other name holds. Then it acts as `offload`
        on all modules in turn, replaced parameters first.

        Raises as `offload`.
        """
        with self._lock:
            self._forget_the_dead()
            return self._take([root for root in self._roots if root.module() is not None])

    def replaced(self) -> tuple[str, ...]:
        """Offloaded names that now hold other memory, or none. Changes nothing."""
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
        # Check all, and their sizes, before moving any.
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
        capacity = None if self._max_bytes is None else self._max_bytes - self.used_bytes
        taken, left = [], []
        for group, fits in zip(new, fitting([sizes[id(group)] for group in new], capacity), strict=True):
            nbytes = sizes[id(group)]
            if not fits:
                because = f"{nbytes} bytes, and {self._max_bytes} bytes are allowed in all"
                left.append(OffloadedPart(group.names, nbytes, because))
                continue
            moved = self._move(group, nbytes)
            self._hook(moved, by_root)
            taken.append(moved.part())
            self._found(group.places)
        # A part that is not selected any more was reported, and is ignored from now on.
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
        """Makes the modules of its parameters stage it in, where copies are needed."""
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
        """Frees the memory of modules that are gone."""
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
        """Drops storages that these modules do not use any more.

        Returns the names that hold other memory, and those that hold nothing.
        """
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
        raise ValueError(f"max_bytes is {nbytes}, and there is no capacity of less than nothing")
    return nbytes


def _is_called(module: Any) -> bool:
    """False for lists and dictionaries of modules."""
    return type(module).forward is not import_torch().nn.Module.forward


def _called(module: Any) -> list[Any]:
    """The module, or the modules in it that are called."""
    if _is_called(module):
        return [module]
    return [part for child in module.children() for part in _called(child)]
