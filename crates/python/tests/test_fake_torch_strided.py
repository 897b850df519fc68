"""The stand-in for PyTorch: strides, storages and lent memory are what NumPy makes of the same."""

import gc
import random
import sys
from collections.abc import Iterator
from typing import Any

import fake_torch
import numpy as np
import pytest
from fake_torch import strided


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in fake_torch.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with fake_torch.installed(fake_torch.Paper()):
        yield sys.modules["torch"]


def numbered(torch: Any, count: int) -> tuple[Any, Any]:
    """A tensor, and NumPy's array of the same memory."""
    memory = bytearray(np.arange(count, dtype=np.float32).tobytes())
    return torch.frombuffer(memory, dtype=torch.float32), np.frombuffer(memory, np.float32)


def test_any_strides_read_and_write_what_those_of_numpy_do(torch: Any) -> None:
    rng = random.Random(1)
    for _ in range(200):
        shape = [rng.randrange(1, 5) for _ in range(rng.randrange(4))]
        strides = [rng.choice([0, 1, 2, 5]) for _ in shape]
        offset = rng.randrange(4)
        tensor, array = numbered(torch, offset + strided.span(shape, strides) + 3)
        steps = tuple(4 * stride for stride in strides)
        seen = np.lib.stride_tricks.as_strided(array[offset:], tuple(shape), steps, writeable=True)
        made = tensor.as_strided(shape, strides, offset)
        assert made.is_contiguous() == seen.flags.c_contiguous
        assert made.numpy_bytes() == made.contiguous().numpy_bytes() == seen.tobytes()
        assert (made.stride(), made.storage_offset()) == (tuple(strides), offset)
        before = array.copy()
        made.zero_()
        written = np.lib.stride_tricks.as_strided(before[offset:], tuple(shape), steps, writeable=True)
        written[...] = 0
        assert np.array_equal(array, before)


def test_slices_are_those_of_numpy(torch: Any) -> None:
    tensor, array = numbered(torch, 60)
    matrix, rows = tensor.view(6, 10), array.reshape(6, 10)
    for cut in [slice(2, 5), (slice(None), slice(1, 9, 3)), (slice(4, 4), slice(2, None))]:
        assert matrix[cut].shape == rows[cut].shape
        assert matrix[cut].numpy_bytes() == rows[cut].tobytes()
        assert matrix.t().numpy_bytes() == rows.T.tobytes()
    assert matrix[0:1].expand(4, 10).numpy_bytes() == np.broadcast_to(rows[0:1], (4, 10)).tobytes()
    with pytest.raises(RuntimeError, match="view size"):
        matrix.t().view(60)


def test_a_tensor_is_set_within_its_storage_and_device_only(torch: Any) -> None:
    tensor, array = numbered(torch, 10)
    storage = tensor.untyped_storage()
    made = torch.empty(0, dtype=torch.float32).set_(storage, 2, (4, 2), (2, 1))
    assert made.data_ptr() == tensor.data_ptr() + 8
    assert made.numpy_bytes() == array[2:].tobytes()
    with pytest.raises(RuntimeError, match="resize"):
        made.set_(storage, 3, (4, 2), (2, 1))
    with pytest.raises(RuntimeError, match="bounds"):
        tensor.as_strided((11,), (1,))
    with pytest.raises(RuntimeError, match="device"):
        torch.empty(0, dtype=torch.float32, device="cuda").set_(storage, 0, (1,), (1,))


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_lent_memory_goes_back_with_its_last_tensor(torch: Any, version: tuple[int, int] | None) -> None:
    lent = np.arange(100, dtype=np.uint8)

    class Lender:
        """NumPy with the old protocol, or the one with versions."""

        def __dlpack__(self, **asked: Any) -> Any:
            if version is None and "max_version" in asked:
                raise TypeError("no such argument")
            return lent.__dlpack__(**asked)

        def __dlpack_device__(self) -> Any:
            return lent.__dlpack_device__()

    before = sys.getrefcount(lent)
    tensor = torch.from_dlpack(Lender())
    part = tensor[10:20]
    part.fill_(255)
    assert list(lent[8:12]) == [8, 9, 255, 255]
    del tensor
    gc.collect()
    assert sys.getrefcount(lent) == before + 1
    del part
    gc.collect()
    assert sys.getrefcount(lent) == before
