"""The parameters of modules by name, and which of them share memory."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from poorwill._native import OutOfMemoryError, PoorwillError
from poorwill.offload._import import import_torch
from poorwill.offload._layout import Layout, checked
from poorwill.offload._plans import Selection, grouped

Key = tuple[str, int]
"""Key of a storage: its device and address."""


def key_of(tensor: Any) -> Key | None:
    """None without memory that could be moved."""
    try:
        address = tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError, ValueError):
        # Sparse tensors, subclasses without a storage, and parameters that a lazy module has not made yet.
        return None
    return (str(tensor.device), address) if address else None


prefetched_slots: weakref.WeakValueDictionary[Key | None, Any] = weakref.WeakValueDictionary()
"""The slots of prefetched layers, which hold one layer's bytes after another's."""


class Place:
    """A parameter or buffer of a module, by name. It does not keep the module alive."""

    def __init__(self, name: str, owner: Any, attribute: str, is_buffer: bool) -> None:
        self.name = name
        self.is_buffer = is_buffer
        self.attribute = attribute
        self._owner = weakref.ref(owner)
        self.identity = (id(owner), attribute)

    @property
    def owner(self) -> Any | None:
        """The module; None when it is gone."""
        return self._owner()

    def tensor(self) -> Any | None:
        """The current tensor."""
        owner = self._owner()
        if owner is None:
            return None
        return (owner._buffers if self.is_buffer else owner._parameters).get(self.attribute)


def places_of(module: Any, name: str = "") -> list[Place]:
    """All parameters and buffers of a module and its submodules, under each of their names."""
    found = []
    for prefix, owner in module.named_modules(prefix=name, remove_duplicate=False):
        for tensors, is_buffer in ((owner._parameters, False), (owner._buffers, True)):
            for attribute, tensor in tensors.items():
                if tensor is not None:
                    full = f"{prefix}.{attribute}" if prefix else attribute
                    found.append(Place(full, owner, attribute, is_buffer))
    return found


class Layers:
    """Which of some modules a name leads through.

    A module that is both in a layer and elsewhere has names for both, so the names decide.
    """

    def __init__(self, module: Any, name: str, layers: Sequence[Any]) -> None:
        numbers: dict[int, set[int]] = {}
        for number, layer in enumerate(layers):
            numbers.setdefault(id(layer), set()).add(number)
        self._numbers = {
            prefix: numbers[id(inner)]
            for prefix, inner in module.named_modules(prefix=name, remove_duplicate=False)
            if id(inner) in numbers
        }

    def of(self, place: Place) -> set[int]:
        """Numbers of the layers."""
        segments = place.name.split(".")
        prefixes = (".".join(segments[:end]) for end in range(len(segments)))
        found: set[int] = set()
        return found.union(*(self._numbers.get(prefix, ()) for prefix in prefixes))


@dataclass
class Group:
    """Everything that shares one storage. It is moved as one, so tied tensors stay tied."""

    key: Key | None
    places: list[Place]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(place.name for place in self.places)

    def tensors(self) -> list[Any]:
        """The parameters and buffers, each once."""
        return distinct(self.places)

    def nbytes(self) -> int:
        """From the storage's beginning to the last element of any of them.

        Raises as `checked`, with the name, and PoorwillError for prefetched memory.
        """
        if self.key in prefetched_slots:
            raise PoorwillError(
                f"cannot offload {spelt(self.names)}: other bytes come and go there, since it is prefetched; "
                "close() the PrefetchOffloader first"
            )
        nbytes = 0
        for tensor in self.tensors():
            try:
                checked(tensor, "offloading a module")
            except (TypeError, ValueError) as error:
                raise type(error)(f"cannot offload {spelt(self.names)}: {error}") from error
            nbytes = max(nbytes, Layout.of(tensor).nbytes)
        return nbytes


def distinct(places: Iterable[Place]) -> list[Any]:
    """Their tensors, each once."""
    tensors = {id(tensor): tensor for place in places if (tensor := place.tensor()) is not None}
    return list(tensors.values())


def selected_groups(places: Sequence[Place], selection: Selection) -> list[Group]:
    """The groups with a parameter that is selected by one of its names."""

    def identity(place: Place) -> object:
        tensor = place.tensor()
        return key_of(tensor) or id(tensor)

    groups = [Group(key_of(group[0].tensor()), group) for group in grouped(places, identity)]
    return [
        group
        for group in groups
        if any(not place.is_buffer and selection.has(place.name) for place in group.places)
    ]


def point(tensors: Sequence[Any], at: Callable[[Any], Any]) -> None:
    """Makes each tensor refer to `at(tensor)`; all of them, or on an error none."""
    before: list[tuple[Any, Any]] = []
    # Inference tensors could not be used outside of inference mode later.
    with import_torch().inference_mode(False):
        try:
            for tensor in tensors:
                new = at(tensor)
                # First, so that an interrupt finds it here.
                before.append((tensor, tensor.data))
                tensor.data = new
        except BaseException:
            for tensor, old in before:
                tensor.data = old
            raise


def spelt(names: Sequence[str]) -> str:
    return " = ".join(names)


def about(error: Exception, what: str) -> Exception:
    """The same kind of error, with its subject added."""
    text = f"{what}: {error}"
    if isinstance(error, OutOfMemoryError):
        said = OutOfMemoryError(text)
        # The allocator's size figures.
        said.__dict__.update(error.__dict__)
        return said
    for kind in (PoorwillError, TypeError, ValueError):
        if isinstance(error, kind):
            return kind(text)
    return PoorwillError(text)
