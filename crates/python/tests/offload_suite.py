"""What weights in host memory promise of PyTorch's tensors: on a GPU, and over the fake of PyTorch.

`test_suites.py` runs it. Every promise is one of the host device, too, which needs no GPU. Bytes are
compared as they are, never as numbers.
"""

import copy
import gc
import itertools
import mmap
import pickle
import random
import weakref
from functools import partial
from typing import Any

import poorwill
import pytest
from helpers import cases, together
from offload_tensors import (
    DTYPES,
    KIB,
    LIMIT,
    MIB,
    content,
    copied,
    filled,
    is_nothing_held,
    layout,
    named_layouts,
    place,
    random_tensor,
    settled,
    torch,
)
from poorwill import offload
from poorwill.offload import HostBuffer

# What aliases


def test_a_device_view_is_the_same_bytes(device: str) -> None:
    tensor = filled(64 * KIB, 1)
    view = offload.device_view(tensor, device=device)
    assert view.device == place(device)
    assert content(view) == content(tensor)
    # Both ways, and through what is made of either.
    tensor[100:200].fill_(7)
    assert content(view[100:200]) == b"\7" * 100
    view[300:400].fill_(9)
    assert content(tensor[300:400]) == b"\t" * 100
    assert content(view) == content(tensor)


def test_views_of_one_tensor_are_of_one_memory(device: str) -> None:
    tensor = filled(8 * KIB, 2)
    first, second = (offload.device_view(tensor, device=device) for _ in range(2))
    part = offload.device_view(tensor[1000:3000], device=device)
    assert first.data_ptr() == second.data_ptr() == part.data_ptr() - 1000
    first.zero_()
    assert not any(content(second) + content(part) + content(tensor))
    del first, part
    settled()
    # One that is gone takes nothing from the others.
    second.fill_(3)
    assert content(tensor) == b"\3" * (8 * KIB)
    assert content(offload.device_view(tensor, device=device)) == b"\3" * (8 * KIB)


def test_tensors_over_a_buffer_share_it(device: str) -> None:
    buffer = HostBuffer(4 * KIB, device=device)
    assert buffer.nbytes == 4 * KIB
    whole = offload.host_tensor(buffer, 4 * KIB, torch.uint8)
    numbers = offload.host_tensor(buffer, (16, 32), torch.float32, offset_bytes=2 * KIB)
    assert layout(numbers) == (torch.float32, (16, 32), (32, 1), 512)
    assert numbers.data_ptr() == whole.data_ptr() + 2 * KIB == buffer.address + 2 * KIB
    whole.fill_(1)
    assert content(numbers) == b"\1" * (2 * KIB)
    view = offload.device_view(numbers, device=device)
    view.zero_()
    assert content(whole) == b"\1" * (2 * KIB) + bytes(2 * KIB)


@pytest.mark.gpu
def test_memory_that_pytorch_has_locked_is_not_copied() -> None:
    tensor = torch.empty(64 * KIB, dtype=torch.uint8, pin_memory=True)
    tensor.copy_(filled(64 * KIB, 3))
    view = offload.device_view(tensor, device="cuda:0")
    view[:KIB].zero_()
    assert content(tensor[:KIB]) == bytes(KIB)
    assert content(view) == content(tensor)


@pytest.mark.parametrize("whole_first", [True, False])
def test_tensors_that_share_pages_have_views_or_are_refused(device: str, whole_first: bool) -> None:
    memory = mmap.mmap(-1, 64 * KIB)
    sizes = [100, 8 * KIB, 30, 4 * KIB, 20 * KIB + 7, 10_000]
    ends = list(itertools.accumulate(sizes))
    tensors = [
        torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=end - size)
        for size, end in zip(sizes, ends, strict=True)
    ]
    rng = random.Random(1)
    for _ in cases(20, least=5):
        # Once all of it is locked, so is every part.
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        whole_view = offload.device_view(whole, device=device) if whole_first else None
        views, refusals = {}, []
        for number in rng.sample(range(len(tensors)), len(tensors)):
            try:
                views[number] = offload.device_view(tensors[number], device=device)
            except ValueError as error:
                refusals.append(str(error))
        assert views
        assert not refusals or (device.startswith("cuda") and not whole_first)
        assert all("share a page" in refusal for refusal in refusals)
        for number in rng.sample(list(views), len(views)):
            value = rng.randrange(256)
            tensors[number].fill_(value)
            assert content(views[number]) == bytes([value]) * sizes[number]
            del views[number]
        del whole_view, whole


# What copies


@pytest.mark.parametrize("source", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_what_is_copied_is_independent(device: str, source: str) -> None:
    tensor = filled(64 * KIB, 4).to(source)
    before = content(tensor)
    view = offload.to_host_view(tensor, device=device)
    kept = offload.offload(tensor, device=device)
    assert view.device == place(device)
    assert (kept.host.device, kept.stage_in().device) == (torch.device("cpu"), place(device))
    tensor.zero_()
    assert content(view) == content(kept.host) == content(kept.stage_in()) == before
    view.fill_(5)
    assert content(kept.host) == before
    assert not any(content(tensor))


@pytest.mark.gpu
def test_without_a_device_it_is_the_one_of_the_tensor() -> None:
    last = torch.cuda.device_count() - 1
    tensor = filled(KIB, 5).to(f"cuda:{last}")
    assert offload.to_host_view(tensor).device == torch.device(f"cuda:{last}")
    assert offload.offload(tensor).device == torch.device(f"cuda:{last}")
    assert offload.device_view(filled(KIB, 6)).device == torch.device("cuda:0")


# Layouts


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_layout_stays(device: str, dtype: str) -> None:
    rng = random.Random(f"{device} {dtype}")
    for tensor in (*named_layouts().values(), *(random_tensor(rng, dtype) for _ in range(40))):
        check_layout(tensor, device)


def check_layout(tensor: Any, device: str) -> None:
    kept = offload.offload(tensor, device=device)
    made = [
        offload.device_view(tensor, device=device),
        offload.to_host_view(tensor, device=device),
        *(kept.host, kept.stage_in()),
    ]
    expected = content(tensor)
    for other in made:
        assert layout(other) == layout(tensor)
        assert content(other) == expected
    # No more memory than up to the last element.
    span = 1 + sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + span) * tensor.element_size()
    assert [other.untyped_storage().nbytes() for other in made[1:]] == [needed] * 3
    assert made[0].untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_tensors_without_elements_have_views_without_memory(device: str, shape: tuple[int, ...]) -> None:
    empty = torch.empty(*shape, dtype=torch.float32)
    nothing_left = filled(8, 7, "float32")[5:5]
    for tensor in (empty, nothing_left):
        kept = offload.offload(tensor, device=device)
        for made in (offload.to_host_view(tensor, device=device), kept.stage_in(), kept.host):
            assert layout(made) == layout(tensor)
        assert kept.is_zero_copy
        assert kept.stage_in().device == place(device)
    assert is_nothing_held(device)
    assert layout(offload.device_view(empty, device=device)) == layout(empty)
    assert layout(offload.device_view(nothing_left, device=device)) == layout(nothing_left)


@pytest.mark.real_torch
@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of half-width complex numbers
@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "int8", "uint16", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    ],
)
def test_types_that_few_operations_know_stay(device: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    flat = filled(8 * kind.itemsize, 31)
    flat.bitwise_and_(1)  # what a bool may be
    tensor = torch.empty(0, dtype=kind).set_(flat.untyped_storage(), 1, (2, 3), (1, 2))
    kept = offload.offload(tensor, device=device)
    for made in (
        offload.device_view(tensor, device=device),
        offload.to_host_view(tensor, device=device),
        *(kept.host, kept.stage_in()),
    ):
        assert layout(made) == layout(tensor)
        seen = torch.empty(0, dtype=torch.uint8, device=made.device).set_(
            made.untyped_storage(), 0, (7 * kind.itemsize,), (1,)
        )
        assert content(seen) == content(flat[: 7 * kind.itemsize])


@pytest.mark.real_torch
def test_lazy_conjugations_and_signs_stay(device: str) -> None:
    tensor = torch.randn(6, dtype=torch.complex64).conj()
    for lazy in (tensor, tensor.imag):
        for made in (offload.device_view(lazy, device=device), offload.to_host_view(lazy, device=device)):
            assert (made.is_conj(), made.is_neg()) == (lazy.is_conj(), lazy.is_neg())
            assert torch.equal(made.cpu(), lazy)


def test_views_require_no_gradients(device: str) -> None:
    tensor = filled(64, 8, "float32").requires_grad_()
    kept = offload.offload(tensor, device=device)
    assert not offload.device_view(tensor, device=device).requires_grad
    assert not offload.to_host_view(tensor, device=device).requires_grad
    assert not kept.host.requires_grad
    assert not kept.stage_in().requires_grad
    assert tensor.requires_grad


# Lifetimes


def test_a_view_outlives_what_it_was_made_of(device: str) -> None:
    data = bytearray(random.Random(9).randbytes(64 * KIB))
    expected = bytes(data)
    tensor = torch.frombuffer(data, dtype=torch.uint8)
    del data
    view = offload.device_view(tensor[KIB:], device=device)[KIB:]
    del tensor
    settled()
    others = [filled(64 * KIB, number) for number in range(8)]
    assert content(view) == expected[2 * KIB :]
    del others


class Kept(bytearray):
    """Bytes whose end can be seen."""


def test_a_view_keeps_the_memory_and_lets_go_of_it(device: str) -> None:
    data = Kept(64 * KIB)
    kept = weakref.ref(data)
    tensor = torch.frombuffer(data, dtype=torch.uint8)
    parts = [offload.device_view(tensor, device=device)]
    parts += [parts[0][KIB:], parts[0].view(64, KIB).t()]
    del tensor, data
    while parts:
        settled()
        assert kept() is not None
        parts.pop(0)
    settled()
    assert kept() is None


def test_a_copy_is_given_back_with_its_last_tensor(device: str) -> None:
    view = offload.to_host_view(filled(3 * MIB + 1, 10), device=device)
    assert not is_nothing_held(device)
    expected = content(view)
    part = view[MIB:]
    del view
    assert not is_nothing_held(device)
    assert content(part) == expected[MIB:]
    del part
    assert is_nothing_held(device)


def test_parts_of_what_was_offloaded_keep_it(device: str) -> None:
    kept = offload.offload(filled(2 * MIB, 11), device=device)
    expected = content(kept.host)
    staged, host = kept.stage_in(), kept.host
    end = weakref.ref(kept)
    del kept
    settled()
    assert end() is None
    assert content(staged) == expected
    del staged
    settled()
    assert content(host) == expected
    assert not is_nothing_held(device)
    del host
    assert is_nothing_held(device)


def test_a_buffer_that_was_freed_stays_for_its_tensors(device: str) -> None:
    buffer = HostBuffer(MIB, device=device)
    tensor = offload.host_tensor(buffer, MIB, torch.uint8).fill_(6)
    view = offload.device_view(tensor, device=device)
    buffer.free()
    del buffer, tensor
    assert not is_nothing_held(device)
    assert content(view) == b"\6" * MIB
    del view
    assert is_nothing_held(device)


@pytest.mark.real_torch
@pytest.mark.parametrize("how", [copy.deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))])
@pytest.mark.parametrize("count", [0, KIB])
def test_copies_of_what_was_offloaded_alias_themselves(device: str, how: Any, count: int) -> None:
    tensor = torch.empty(0) if count == 0 else filled(count, 32).view(32, 32).t()
    kept = offload.offload(tensor, device=device)
    other = how(kept)
    assert (other.device, other.is_pinned, other.is_zero_copy) == (kept.device, kept.is_pinned, True)
    assert layout(other.host) == layout(other.stage_in()) == layout(tensor)
    assert content(other.stage_in()) == content(tensor)
    other.host.fill_(3)
    assert content(other.stage_in()) == b"\3" * count
    assert content(kept.stage_in()) == content(tensor)
    assert copy.copy(kept).stage_in().data_ptr() == kept.stage_in().data_ptr()


def test_a_copy_under_way_keeps_what_it_reads(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", "1")
    for number in cases(20, least=5):
        kept = offload.offload(filled(MIB, number), device=device)
        expected = content(kept.host)
        staged = kept.stage_in()
        is_queued = kept.is_pinned
        del kept
        gc.collect()
        if is_queued:
            # Complete or not, no call has checked since.
            with pytest.raises(poorwill.OutOfMemoryError):
                HostBuffer(LIMIT, device=device)
        assert content(staged) == expected
    assert is_queued == (not device.startswith("host"))
    del staged
    settled()
    # The next call lets go of the last copy's.
    last = offload.offload(filled(KIB, 1), device=device)
    del last
    assert is_nothing_held(device)


def test_threads_make_and_drop_views_at_once(device: str) -> None:
    shared = filled(16 * KIB, 12)
    expected = content(shared)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        kept: list[tuple[Any, bytes]] = []
        for _ in range(40):
            if rng.random() < 0.4:
                kept.append((offload.device_view(shared, device=device), expected))
            elif rng.random() < 0.5:
                own = filled(rng.randrange(1, 8 * KIB), rng.randrange(1 << 30))
                kept.append((offload.device_view(own, device=device), copied(own)))
            else:
                own = filled(rng.randrange(1, 8 * KIB), rng.randrange(1 << 30))
                kept.append((offload.offload(own, device=device).stage_in(), copied(own)))
            if rng.random() < 0.5:
                view, was = kept.pop(rng.randrange(len(kept)))
                assert copied(view) == was

    together(*(partial(work, seed) for seed in range(6)))
    assert is_nothing_held(device)
