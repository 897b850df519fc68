"""Backups read on the host: copied, or viewed in place."""

import gc

import numpy as np
import poorwill
import pytest
from helpers import MIB, filled


def test_a_backup_is_read_whatever_the_tag_does(arena: poorwill.Arena) -> None:
    array = filled(arena, "weights")
    (address, expected) = (array.ctypes.data, array.copy())
    with pytest.raises(poorwill.TagError, match="it is not stored in host memory or on disk"):
        arena.read_backup(address, array.nbytes)
    arena.sleep()
    for _ in range(2):
        read = arena.read_backup(address + 5, 3 * MIB)
        assert isinstance(read, bytearray)
        assert (np.frombuffer(read, np.uint8) == expected.view(np.uint8)[5 : 5 + 3 * MIB]).all()
        arena.wake()
        array[:] = 0  # Its backup is that of the last sleep.
    assert arena.read_backup(address, 0) == bytearray()
    arena.drop_backups("weights")
    with pytest.raises(poorwill.TagError, match="of `weights`, which is awake"):
        arena.read_backup(address, 1)


def test_a_view_is_the_backup_in_place(arena: poorwill.Arena) -> None:
    arena.declare("weights", backups="viewable")
    array = filled(arena, "weights")
    (address, expected) = (array.ctypes.data, array.copy().view(np.uint8))
    arena.sleep()
    view = arena.view_backup(address, array.nbytes)
    shared = np.asarray(view)
    assert (shared.ctypes.data, shared.nbytes) == (view.address, view.nbytes) == (view.address, array.nbytes)
    assert not shared.flags.writeable
    assert (shared == expected).all()
    assert repr(view) == f"<poorwill.BackupView of {address:#x}..{address + array.nbytes:#x}: 4 MiB>"
    part = arena.view_backup(address + 7, 9)
    assert part.address == view.address + 7
    del part
    arena.wake()
    array[:] = 0
    arena.sleep()
    view.verify()
    del view
    gc.collect()
    assert (shared == expected).all(), "the array keeps it"
    newer = arena.view_backup(address, array.nbytes)
    assert newer.address != shared.ctypes.data
    assert not np.asarray(newer).any()
    del shared
    at = newer.address
    del newer
    arena.wake()
    array[:] = 1
    arena.sleep()
    assert arena.view_backup(address, array.nbytes).address == at, "no view, so the same buffer"
    arena.wake()
    del array


def test_what_is_not_in_one_place_is_not_viewed(arena: poorwill.Arena) -> None:
    array = filled(arena, "weights", 40 * MIB)
    arena.sleep()
    with pytest.raises(poorwill.TagError, match="declare the tag's backups viewable"):
        arena.view_backup(array.ctypes.data, array.nbytes)
    arena.wake()


def test_a_view_outlives_its_arena(arena: poorwill.Arena) -> None:
    arena.declare("weights", backups="viewable")
    array = filled(arena, "weights")
    expected = array.copy().view(np.uint8)
    arena.sleep()
    shared = np.asarray(arena.view_backup(array.ctypes.data, array.nbytes))
    arena.close()
    assert (shared == expected).all()
