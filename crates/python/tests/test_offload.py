"""Host memory for weights without PyTorch, on the host device."""

from functools import partial

import numpy as np
import poorwill
import pytest
from helpers import DEVICE, IS_NOTHING_HELD, MIB, run, together
from poorwill.offload import HostBuffer


def test_a_buffer_is_an_array_of_exactly_its_bytes() -> None:
    buffer = HostBuffer(1_000_003, device=DEVICE)
    assert (buffer.nbytes, buffer.device) == (1_000_003, DEVICE)
    array = np.from_dlpack(buffer)
    assert (array.dtype, array.shape, array.ctypes.data) == (np.dtype("uint8"), (1_000_003,), buffer.address)
    array[:] = 7
    view = np.from_dlpack(buffer.device_view())
    assert (view.ctypes.data, int(view.sum())) == (buffer.address, 7 * 1_000_003)
    view[0] = 9
    assert array[0] == 9
    assert np.from_dlpack(buffer)[0] == 9


def test_arrays_keep_a_buffer_that_was_freed() -> None:
    # In a process of its own, without other host memory of the device.
    script = f"""
import numpy as np
{IS_NOTHING_HELD}
poorwill.arena("{DEVICE}", host_limit="8MiB")
assert is_nothing_held("8MiB", "{DEVICE}")
for keep in ("array", "view", "buffer"):
    buffer = HostBuffer(1 << 20, device="{DEVICE}")
    kept = dict(array=np.from_dlpack(buffer), view=np.from_dlpack(buffer.device_view()), buffer=buffer)
    kept["array"][:] = 5
    if keep != "buffer":
        buffer.free()
        buffer.free()
    del buffer
    kept = kept[keep]
    assert not is_nothing_held("8MiB", "{DEVICE}"), keep
    assert keep == "buffer" or kept.sum() == 5 << 20
    del kept
    assert is_nothing_held("8MiB", "{DEVICE}"), keep
print("done")
"""
    assert run(script) == "done\n"


def test_buffers_of_no_bytes_and_of_too_many_are_refused() -> None:
    for wrong in (0, -1):
        with pytest.raises((ValueError, OverflowError)):
            HostBuffer(wrong, device=DEVICE)
    with pytest.raises(poorwill.OutOfMemoryError):
        HostBuffer(1 << 60, device=DEVICE)
    with pytest.raises((TypeError, ValueError)):
        HostBuffer(8, device=DEVICE, pin="sometimes")  # type: ignore[arg-type]
    buffer = HostBuffer(8, device=DEVICE)
    buffer.free()
    for use in (buffer.device_view, lambda: np.from_dlpack(buffer)):
        with pytest.raises(poorwill.PoorwillError, match="freed"):
            use()


def test_threads_take_and_free_buffers_at_once() -> None:
    def work(number: int) -> None:
        for turn in range(50):
            buffer = HostBuffer(10_000 + turn, device=DEVICE)
            array = np.from_dlpack(buffer)
            array[:] = number
            view = np.from_dlpack(buffer.device_view())
            buffer.free()
            assert (view == number).all()

    together(*(partial(work, number) for number in range(8)))


def test_what_needs_no_tensors_needs_no_pytorch() -> None:
    script = f"""
import sys
sys.modules["torch"] = None
from poorwill import offload
buffer = offload.HostBuffer({MIB}, device="{DEVICE}")
assert offload.policy().uva in (True, False)
for call in (offload.device_view, offload.to_host_view, offload.offload):
    try:
        call(buffer)
    except ImportError as error:
        assert isinstance(error, poorwill.PoorwillError) and "install torch" in str(error), error
    else:
        raise AssertionError(call)
try:
    offload.host_tensor(buffer, 4, "uint8")
except offload.MissingTorchError:
    print("done")
"""
    assert run(script) == "done\n"


# Over the fake of NVIDIA's library


# All that PyTorch's fake needs, before anything of poorwill's asks for PyTorch.
OVER_THE_FAKES = """
import ctypes, gc, os
import fake_torch
fake_torch.install(fake_torch.Driver())
import torch
from poorwill import offload
from poorwill.offload import HostBuffer

def bytes_of(tensor):
    return tensor.numpy_bytes()

def filled(count):
    return torch.frombuffer(bytearray(os.urandom(count)), dtype=torch.uint8)
"""

REFUSED = """
poorwill.arena("cuda:0", limit="64MiB", host_limit="8MiB")
try:
    HostBuffer(1 << 20, device="cuda:0", pin=True)
except poorwill.PoorwillError as error:
    assert str(CODE) in str(error), error
else:
    raise AssertionError("page-locked")
buffer = HostBuffer(1 << 20, device="cuda:0", pin="auto")
assert not buffer.is_pinned and str(CODE) in buffer.pageable_because, buffer.pageable_because
tensor = filled(1 << 20)
before = bytes_of(tensor)
kept = offload.offload(tensor, device="cuda:0")
assert (kept.is_pinned, kept.is_zero_copy) == (False, False)
assert str(CODE) in kept.copies_because, kept.copies_because
assert bytes_of(kept.stage_in()) == bytes_of(kept.host) == before
for call in (offload.to_host_view, offload.device_view):
    try:
        call(tensor, device="cuda:0")
    except poorwill.PoorwillError as error:
        assert "1 MiB" in str(error) and str(CODE) in str(error), error
    else:
        raise AssertionError(call)
assert bytes_of(tensor) == before
# Nothing of what was refused is held.
del buffer, kept
gc.collect()
HostBuffer("8MiB", device="cuda:0", pin=False)
print("done")
"""


@pytest.mark.parametrize("code", [2, 801])
def test_where_locking_is_refused_it_falls_back_or_fails_as_asked(fake: dict[str, str], code: int) -> None:
    """As under a limit on locked memory, and where the driver has no such call."""
    fails = {"POORWILL_FAKE_CUDA_FAIL": f"cuMemHostRegister_v2:1:1000000:{code}"}
    assert run(OVER_THE_FAKES + f"CODE = {code}" + REFUSED, **fake, **fails) == "done\n"


FAULTS = """
poorwill.arena("cuda:0", limit="64MiB", host_limit="8MiB")
cuda = ctypes.CDLL(os.environ["POORWILL_FAKE_LIBCUDA"])
cuda.poorwillFakeDisarm.restype = ctypes.c_uint64

def staged(tensor, device):
    kept = offload.offload(tensor, device=device)
    assert kept.is_zero_copy or "999" in kept.copies_because, kept.copies_because
    reasons.add(kept.copies_because)
    return kept.stage_in()

reasons = set()

HostBuffer(1, device="cuda:0")
for call in (offload.device_view, offload.to_host_view, staged):
    nth, ended, failed = 0, False, 0
    while not ended:
        tensor = filled(100_000)
        before, view = bytes_of(tensor), None
        # The nth call of the driver fails, whether the tensor is made then or goes.
        cuda.poorwillFakeArm(ctypes.c_uint64(nth), ctypes.c_uint64(1))
        try:
            view = call(tensor, device="cuda:0")
        except poorwill.PoorwillError as error:
            assert "999" in str(error), error
            failed += 1
        calls = cuda.poorwillFakeDisarm()
        if view is not None:
            assert bytes_of(view) == before, (call, nth)
            cuda.poorwillFakeArm(ctypes.c_uint64(max(nth - calls, 0)), ctypes.c_uint64(nth >= calls))
            del view
            gc.collect()
            ended = nth >= calls + cuda.poorwillFakeDisarm()
        assert bytes_of(tensor) == before, (call, nth)
        del tensor
        assert is_nothing_held("8MiB", "cuda:0"), (call, nth)
        nth += 1
    # "auto" does not fail, and takes pageable memory.
    assert failed > 0 if call is not staged else len(reasons) > 1, (call, nth)
print("done")
"""


def test_every_call_of_the_driver_may_fail(fake: dict[str, str]) -> None:
    assert run(OVER_THE_FAKES + IS_NOTHING_HELD + FAULTS, **fake) == "done\n"


OUTLIVED = """
arena = poorwill.arena("cuda:0", "outlived", limit="64MiB", host_limit="8MiB")
tensor = filled(1 << 20)
before = bytes_of(tensor)
copied, aliased = offload.to_host_view(tensor, device="cuda:0"), offload.device_view(tensor, device="cuda:0")
kept = offload.offload(tensor, device="cuda:0").host
arena.close()
del arena, tensor
gc.collect()
assert bytes_of(copied) == bytes_of(aliased) == bytes_of(kept) == before
copied.fill_(1)
aliased.fill_(2)
assert (bytes_of(copied)[:1], bytes_of(aliased)[:1], bytes_of(kept)) == (b"\\1", b"\\2", before)
# Another arena of the device finds them held, and is given what they leave.
arena = poorwill.arena("cuda:0", "next", limit="64MiB")
try:
    HostBuffer("8MiB", device="cuda:0")
except poorwill.OutOfMemoryError:
    del copied, kept
gc.collect()
HostBuffer("8MiB", device="cuda:0").free()
print("done")
# The last one ends with the process.
"""


def test_views_outlive_the_arena_and_may_end_with_the_process(fake: dict[str, str]) -> None:
    assert run(OVER_THE_FAKES + OUTLIVED, **fake) == "done\n"


DELETERS = """
import ctypes, gc
from poorwill import _native
from poorwill.offload import HostBuffer

pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi))
rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi))

class Loan:
    '''An array whose owner frees it without the interpreter's lock.'''
    def __init__(self, lender):
        self.capsule = lender.__dlpack__()
        self.managed = pointer(self.capsule, b"dltensor")
        rename(self.capsule, b"used_dltensor")
    def __del__(self):
        # Behind the tensor of 48 bytes: the context and the deleter.
        deleter = ctypes.c_void_p.from_address(self.managed + 56).value
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter)(self.managed)
        ended.append(self)

ended = []
buffer = HostBuffer(1 << 16, device="cuda:0")
inner = Loan(buffer)
outer = Loan(_native.device_view_of(buffer.address, buffer.nbytes, inner, device="cuda:0"))
del inner
gc.collect()
assert ended == []
del outer
gc.collect()
# The one that was kept ends with the view, and not some time later.
assert len(ended) == 2
print("done")
"""


def test_what_is_kept_ends_with_the_view_with_and_without_the_interpreters_lock(fake: dict[str, str]) -> None:
    assert run(DELETERS, **fake) == "done\n"


LENT = """
import ctypes
import numpy as np
from poorwill.offload import HostBuffer

cuda = ctypes.CDLL("libcuda.so.1")
cuda.poorwillFakeDisarm.restype = ctypes.c_uint64

def calls_of_the_end(lend, pin="auto"):
    buffer = HostBuffer(1 << 16, device="cuda:0", pin=pin)
    kept = lend(buffer)
    cuda.poorwillFakeArm(ctypes.c_uint64(0), ctypes.c_uint64(0))
    del kept
    buffer.free()
    return cuda.poorwillFakeDisarm()

# A GPU may copy from locked memory that others know of; of other memory it has made its copies.
assert calls_of_the_end(lambda buffer: None) == 0
assert calls_of_the_end(lambda buffer: buffer.address) > 0
assert calls_of_the_end(np.from_dlpack) > 0
assert calls_of_the_end(lambda buffer: (buffer.address, np.from_dlpack(buffer)), pin=False) == 0
print("done")
"""


def test_locked_memory_that_was_lent_goes_when_the_gpu_is_done(fake: dict[str, str]) -> None:
    assert run(LENT, **fake) == "done\n"
