"""What blocks promise that are lent to NumPy and its like: on the host device, and over a fake."""

import ctypes
import gc
import subprocess
import sys

import numpy as np
import poorwill
import pytest
from helpers import MIB, STUCK_S, run, together


def live_bytes(arena: poorwill.Arena) -> int:
    gc.collect()
    return arena.stats().live_bytes


def test_a_block_is_an_array(arena: poorwill.Arena) -> None:
    block = arena.empty((3, 4, 5), "float32", "runtime")
    assert (block.tag, block.dtype, block.shape, block.nbytes) == ("runtime", "float32", (3, 4, 5), 240)
    assert (block.device, block.__dlpack_device__()) == ("host:256MiB", (1, 0))
    array = np.from_dlpack(block)
    assert (array.shape, array.dtype, array.strides) == ((3, 4, 5), np.dtype("float32"), (80, 20, 4))
    assert (array.ctypes.data, array.flags.writeable) == (block.address, True)
    array[...] = np.arange(60).reshape(3, 4, 5)
    assert np.from_dlpack(block)[2, 3, 4] == 59
    assert repr(block) == "<poorwill.Block runtime on host:256MiB: 240 B, [3, 4, 5] of float32>"
    assert repr(arena.empty(8)).endswith("8 B, [8] of uint8>")


@pytest.mark.parametrize(
    "name",
    [f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)]
    + ["float16", "float32", "float64", "complex64", "complex128", "bool"],
)
def test_types_of_elements_are_those_of_numpy(arena: poorwill.Arena, name: str) -> None:
    dtype = np.dtype(name)
    for said in (name, dtype, dtype.type):
        array = np.from_dlpack(arena.empty(7, said))
        assert (array.dtype, array.shape) == (dtype, (7,))
    array[:] = 1
    assert array.sum() == 7


@pytest.mark.parametrize("versioned", [False, True])
def test_both_forms_of_capsules_are_made(arena: poorwill.Arena, versioned: bool) -> None:
    block = arena.empty(16)
    capsule = block.__dlpack__(max_version=(1, 3) if versioned else (0, 8))
    name = "dltensor_versioned" if versioned else "dltensor"
    assert f'"{name}"' in repr(capsule)
    assert ('"dltensor"' in repr(block.__dlpack__())) is True
    # An unconsumed capsule frees it itself.
    block.free()
    assert live_bytes(arena) > 0
    del capsule
    assert live_bytes(arena) == 0


class OfVersion:
    """A consumer that knows only this version."""

    def __init__(self, block: poorwill.Block, version: tuple[int, int] | None) -> None:
        self.block, self.version = block, version

    def __dlpack__(self, **asked: object) -> object:
        return self.block.__dlpack__(max_version=self.version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.block.__dlpack_device__()


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_memory_lives_as_long_as_anybody_has_it(
    arena: poorwill.Arena, version: tuple[int, int] | None
) -> None:
    block = arena.empty(MIB)
    address = block.address
    array = np.from_dlpack(OfVersion(block, version))  # type: ignore[arg-type]
    if array.flags.writeable:
        array[:] = 7
    view = array[10:20]
    block.free()
    block.free()
    with pytest.raises(poorwill.ClosedError, match="this block of `weights` has been freed"):
        block.__dlpack__()
    assert repr(block).endswith(", freed>")
    assert (block.address, block.nbytes) == (address, MIB)
    del array
    assert live_bytes(arena) == MIB
    assert int(view[0]) in range(256)
    del view
    assert live_bytes(arena) == 0
    again = arena.empty(MIB)
    del again
    assert live_bytes(arena) == 0


def test_arrays_sleep_and_wake(arena: poorwill.Arena) -> None:
    block, cache = arena.empty((512, 1024), "float64"), arena.empty(3 * MIB, tag="kv_cache")
    weights, tokens = np.from_dlpack(block), np.from_dlpack(cache)
    weights[...] = np.arange(weights.size).reshape(weights.shape)
    tokens[:] = 9
    expected = weights.copy()
    asleep = arena.sleep()
    assert (sorted(asleep.tags), asleep.discarded_bytes) == (["kv_cache", "weights"], 4 * MIB)
    with pytest.raises(poorwill.TagError, match=r"cannot lend a block: `weights` is asleep, .* wake it"):
        block.__dlpack__()
    with pytest.raises(poorwill.TagError, match="`weights` is asleep"):
        arena.empty(1)
    arena.wake(verify="all")
    assert (weights == expected).all()
    assert not tokens.any()
    assert np.from_dlpack(block).ctypes.data == block.address


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (0, "has no element"),
        ((3, 0), "has no element"),
        (-1, "`-1` is no size of an array"),
        ((2, -1), "is no size of an array"),
        (2**64, "is no size of an array"),
        (2**63 - 1, "is too large for any device"),
        ((2**40, 2**40), "is too large for any device"),
    ],
)
def test_what_is_no_shape(arena: poorwill.Arena, shape: int | tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arena.empty(shape, "float32")


def test_what_is_no_type(arena: poorwill.Arena) -> None:
    for shape in (1.5, "12", [True], None):
        with pytest.raises(TypeError, match=r"a shape is an int|a size is an int"):
            arena.empty(shape)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`float` is no type of elements that is known; known are uint8, "):
        arena.empty(1, float)
    with pytest.raises(ValueError, match="`datetime64` is no type of elements"):
        arena.empty(1, "datetime64")
    with pytest.raises(TypeError, match="not int"):
        arena.empty(1, 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be a tag"):
        arena.empty(1, tag="key values")


def test_what_a_block_cannot_do_is_a_buffer_error(arena: poorwill.Arena) -> None:
    block = arena.empty(16)
    with pytest.raises(BufferError, match="is lent where it is only"):
        block.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="copy the array instead"):
        block.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="is not lent to stream 1"):
        block.__dlpack__(stream=1)
    assert np.from_dlpack(block, device="cpu", copy=False).shape == (16,)


def test_more_than_the_limit_says_what_there_is(arena: poorwill.Arena) -> None:
    held = arena.empty(60 * MIB)
    with pytest.raises(poorwill.OutOfMemoryError, match="the limit of 64 MiB is too low by") as raised:
        arena.empty(8 * MIB)
    error = raised.value
    assert isinstance(error, MemoryError)
    assert (error.needed_bytes, error.limit_bytes) == (8 * MIB, 64 * MIB)
    assert (error.live_bytes, error.mapped_bytes, error.reclaimable_bytes) == (60 * MIB, 60 * MIB, 0)
    assert error.device_free_bytes is None
    held.free()
    assert arena.empty(64 * MIB).nbytes == 64 * MIB


def test_a_closed_arena_leaves_arrays_their_addresses() -> None:
    arena = poorwill.arena("host:256MiB", "closing")
    block = arena.empty(4 * MIB)
    array = np.from_dlpack(block)
    array[:] = 1
    spare = arena.empty(2 * MIB, tag="runtime")
    arena.close()
    with pytest.raises(poorwill.ClosedError, match="the arena `closing` on host:256MiB has been closed"):
        block.__dlpack__()
    # Nothing else may come to lie where the array still points to.
    ours = range(block.address, block.address + block.nbytes)
    others = [poorwill.arena("host", f"closing-{n}") for n in range(3)]
    assert all(other.empty(4 * MIB).address not in ours for other in others)
    spare.free()
    del array, block, spare
    gc.collect()
    for other in others:
        other.close()


def test_a_fault_is_all_that_touching_what_sleeps_can_be() -> None:
    for end in ("arena.sleep()", "arena.discard('weights')", "arena.close()"):
        script = f"""
import numpy, poorwill
arena = poorwill.arena("host:64MiB")
array = numpy.from_dlpack(arena.empty(1 << 20))
array[0] = 1
{end}
print("before", flush=True)
array[0] = 2
print("after")
"""
        ran = subprocess.run(
            [sys.executable, "-B", "-c", script], capture_output=True, text=True, timeout=STUCK_S
        )
        assert (ran.returncode, ran.stdout) == (-11, "before\n"), end


def test_a_borrower_gives_back_on_a_thread_that_knows_no_python(arena: poorwill.Arena) -> None:
    class Managed(ctypes.Structure):
        _fields_ = [
            ("data", ctypes.c_void_p),
            ("device", ctypes.c_int32 * 2),
            ("dimensions", ctypes.c_int32),
            ("dtype", ctypes.c_uint8 * 4),
            ("shape", ctypes.POINTER(ctypes.c_int64)),
            ("strides", ctypes.POINTER(ctypes.c_int64)),
            ("byte_offset", ctypes.c_uint64),
            ("context", ctypes.c_void_p),
            ("deleter", ctypes.c_void_p),
        ]

    python = ctypes.pythonapi
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    python.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
    block = arena.empty((2, 3), "int16")
    capsule = block.__dlpack__()
    at = python.PyCapsule_GetPointer(capsule, b"dltensor")
    used = b"used_dltensor"
    python.PyCapsule_SetName(capsule, used)
    managed = Managed.from_address(at)
    assert (managed.data, list(managed.device), managed.dimensions) == (block.address, [1, 0], 2)
    assert (managed.shape[:2], managed.strides[:2], managed.byte_offset) == ([2, 3], [3, 1], 0)
    assert bytes(managed.dtype) == bytes([0, 16, 1, 0])
    del capsule
    block.free()
    assert live_bytes(arena) > 0
    # A foreign function runs without Python's lock.
    give_back = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)
    together(lambda: give_back(at))
    assert live_bytes(arena) == 0


def test_a_block_of_a_gpu_says_which(fake: dict[str, str]) -> None:
    said = run(
        """
block = poorwill.arena("cuda:1").empty((2, 2), "bfloat16")
print(block.device, block.__dlpack_device__(), block.nbytes)
for stream in (None, 1, 2):
    block.__dlpack__(stream=stream, dl_device=(2, 1))
for wrong in ({"stream": 0}, {"stream": -1}, {"stream": 77}, {"dl_device": (1, 0)}):
    try:
        block.__dlpack__(**wrong)
    except BufferError as error:
        print(str(error).split(",")[0])
""",
        **fake,
    ).splitlines()
    assert said == [
        "cuda:1 (2, 1) 8",
        *(
            f"a block on cuda:1 is not lent to stream {n}: it is freed on the default stream"
            for n in (0, -1, 77)
        ),
        "this block is on cuda:1",
    ]
