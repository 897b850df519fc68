"""What the environment's switches, staging and bad input do to tensors in host memory.

`test_suites.py` runs it, as `offload_suite.py`.
"""

import os
from typing import Any

import poorwill
import pytest
from offload_tensors import HOST, KIB, MIB, SWITCHES, content, filled, layout, named_layouts, place, torch
from poorwill import offload
from poorwill.offload import HostBuffer, Offloaded

# Switches


NO_PIN = {"POORWILL_DISABLE_PIN": "1"}
NO_PIN_OF_VLLM = {"VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY": "1"}
NO_UVA = {"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1"}
OFF = dict.fromkeys(SWITCHES, "0")


@pytest.mark.parametrize(
    ("environment", "pin", "uva"),
    [
        ({}, True, True),
        (OFF, True, True),
        (NO_PIN, False, True),
        (NO_PIN_OF_VLLM, False, True),
        (NO_UVA, True, False),
        (NO_PIN | NO_PIN_OF_VLLM, False, True),
        (NO_PIN | NO_UVA, False, False),
        (NO_PIN_OF_VLLM | NO_UVA, False, False),
        (OFF | NO_UVA, True, False),
    ],
    ids=lambda value: (
        "+".join(f"{name}={said}" for name, said in value.items()) if isinstance(value, dict) else None
    ),
)
@pytest.mark.parametrize("asked", [True, "auto", False])
def test_switches_count_on_every_path(
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    pin: bool,
    uva: bool,
    asked: Any,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    is_host = device.startswith("host")
    if is_host and asked is True and pin:
        # What is asked for may be refused there.
        asked = "auto"
    allowed = offload.policy()
    assert (allowed.pin, allowed.uva) == (pin, uva)
    named = {name for name, value in environment.items() if value == "1"}
    for is_allowed, because, switches in (
        (pin, allowed.pin_because, SWITCHES[:2]),
        (uva, allowed.uva_because, SWITCHES[2:]),
    ):
        assert (because is None) == is_allowed
        assert is_allowed or any(name in str(because) for name in named.intersection(switches))

    buffer = HostBuffer(4 * KIB, device=device, pin=asked)
    if not pin:
        assert not buffer.is_pinned
        assert any(name in str(buffer.pageable_because) for name in named) or not asked
    elif asked is False:
        assert not buffer.is_pinned
    elif not is_host:
        assert (buffer.is_pinned, buffer.pageable_because) == (True, None)

    if not uva:
        with pytest.raises(poorwill.PoorwillError, match=SWITCHES[2]):
            buffer.device_view()

    tensor = filled(4 * KIB, 13)
    expected = content(tensor)
    kept = offload.offload(tensor, device=device, pin=asked)
    assert kept.is_pinned == buffer.is_pinned
    # The host device reads all memory.
    reads_copy = uva and (is_host or buffer.is_pinned)
    assert kept.is_zero_copy == reads_copy
    assert (kept.copies_because is None) == reads_copy
    assert content(kept.stage_in()) == expected
    assert (kept.stage_in().data_ptr() == kept.stage_in().data_ptr()) or not reads_copy

    if reads_copy:
        assert content(offload.to_host_view(tensor, device=device, pin=asked)) == expected
    else:
        with pytest.raises(poorwill.PoorwillError):
            offload.to_host_view(tensor, device=device, pin=asked)
    if uva and (pin or is_host):
        assert content(offload.device_view(tensor, device=device)) == expected
    else:
        with pytest.raises(poorwill.PoorwillError) as refused:
            offload.device_view(tensor, device=device)
        assert any(name in str(refused.value) for name in named)
        assert uva or "stage_in" in str(refused.value)


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", ["yes", "2", " 1"])
def test_switches_that_are_neither_on_nor_off_are_errors(
    device: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    for call in (offload.device_view, offload.to_host_view, offload.offload):
        with pytest.raises(poorwill.PoorwillError, match=name):
            call(filled(64, 1), device=device)
    with pytest.raises(poorwill.PoorwillError, match=name):
        offload.policy()


# Staging


def test_staging_in_copies_nothing_where_it_need_not(device: str) -> None:
    kept = offload.offload(filled(KIB, 14), device=device)
    assert (kept.is_zero_copy, kept.copies_because) == (True, None)
    first, second = kept.stage_in(), kept.stage_in()
    assert first is not second
    assert first.data_ptr() == second.data_ptr()
    kept.host.fill_(8)
    assert content(first) == content(second) == b"\x08" * KIB
    assert isinstance(kept, Offloaded)
    assert kept.device == place(device)
    assert str(place(device)) in repr(kept)
    assert "zero copy" in repr(kept)
    assert f"{KIB} B, [{KIB}] of torch.uint8" in repr(kept)


@pytest.mark.parametrize("pin", [False, "auto"])
def test_staging_in_copies_where_it_must(
    device: str, monkeypatch: pytest.MonkeyPatch, pin: bool | str
) -> None:
    monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", "1")
    tensor = named_layouts()["columns"]
    kept = offload.offload(tensor, device=device, pin=pin)  # type: ignore[arg-type]
    assert not kept.is_zero_copy
    assert "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA" in str(kept.copies_because)
    first, second = kept.stage_in(), kept.stage_in()
    assert first.data_ptr() != second.data_ptr()
    assert layout(first) == layout(tensor)
    first.zero_()
    assert content(second) == content(kept.host) == content(tensor)
    kept.host.zero_()
    assert not any(content(kept.stage_in()))
    assert content(second) == content(tensor)
    # What was decided stays.
    monkeypatch.delenv("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA")
    assert not kept.is_zero_copy


@pytest.mark.gpu
def test_staging_in_is_queued_on_the_stream_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", "1")
    kept = offload.offload(filled(MIB, 15), device="cuda:0")
    stream = torch.cuda.Stream()
    before = torch.cuda.current_stream()
    staged = kept.stage_in(stream)
    assert torch.cuda.current_stream() == before
    before.wait_stream(stream)
    assert content(staged) == content(kept.host)
    # Its memory is the stream's, for the next allocation there.
    address = staged.data_ptr()
    del staged
    with torch.cuda.stream(stream):
        again = torch.empty(MIB, dtype=torch.uint8, device="cuda:0")
    assert again.data_ptr() == address


@pytest.mark.gpu
def test_staging_in_is_captured_by_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", "1")
    kept = offload.offload(filled(KIB, 16), device="cuda:0")
    kept.stage_in()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        staged = kept.stage_in()
    kept.host.fill_(4)
    graph.replay()
    torch.cuda.synchronize()
    assert content(staged) == b"\4" * KIB


# Bad input


CALLS = [offload.device_view, offload.to_host_view, offload.offload]


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_tensor_is_refused(device: str, call: Any) -> None:
    for thing in (None, [1, 2], bytearray(8), "tensor"):
        with pytest.raises(TypeError, match=r"torch\.Tensor"):
            call(thing, device=device)

    class Own(torch.Tensor):  # type: ignore[misc]
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("nobody asks it")

    own = Own.__new__(Own)
    with pytest.raises(TypeError, match="made of"):
        call(own, device=device)


@pytest.mark.parametrize("call", CALLS)
def test_what_has_no_memory_is_refused(device: str, call: Any) -> None:
    with pytest.raises(ValueError, match="meta"):
        call(torch.empty(4, device="meta"), device=device)


@pytest.mark.real_torch
@pytest.mark.parametrize("left_bytes", [0, 8])
@pytest.mark.parametrize("call", CALLS)
def test_storages_that_lost_their_memory_are_refused(device: str, call: Any, left_bytes: int) -> None:
    tensor = torch.arange(8, dtype=torch.float32)
    tensor.untyped_storage().resize_(left_bytes)
    with pytest.raises(ValueError, match=rf"sees 32 bytes of a storage .* to {left_bytes}"):
        call(tensor, device=device)
    # PyTorch makes it larger when asked the wrong way.
    assert tensor.untyped_storage().nbytes() == left_bytes


@pytest.mark.real_torch
@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of what it has in trial
@pytest.mark.parametrize("call", CALLS)
def test_what_is_not_dense_is_refused(device: str, call: Any) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    quantised = torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8)
    for tensor in (torch.eye(3).to_sparse(), nested, quantised):
        with pytest.raises(ValueError, match="dense tensors"):
            call(tensor, device=device)


@pytest.mark.gpu
def test_a_device_view_is_of_host_memory() -> None:
    with pytest.raises(ValueError, match="to_host_view"):
        offload.device_view(torch.empty(4, device="cuda:0"))


@pytest.mark.gpu
def test_streams_of_other_devices_are_refused() -> None:
    stream = torch.cuda.Stream()
    with pytest.raises(ValueError, match="stream"):
        offload.offload(filled(4, 1), device=HOST).stage_in(stream)
    if torch.cuda.device_count() > 1:
        with pytest.raises(ValueError, match="cuda:0"):
            offload.offload(filled(4, 1), device="cuda:1").stage_in(stream)


def test_tensors_over_a_buffer_have_to_fit(device: str) -> None:
    buffer = HostBuffer(100, device=device)
    too_large: list[tuple[Any, str, int]] = [*((101, "uint8", 0), ((5, 6), "float32", 0)), (24, "float32", 8)]
    for shape, dtype, offset in too_large:
        with pytest.raises(ValueError, match="100"):
            offload.host_tensor(buffer, shape, getattr(torch, dtype), offset_bytes=offset)
    with pytest.raises(ValueError, match="multiples of 4"):
        offload.host_tensor(buffer, 4, torch.float32, offset_bytes=2)
    with pytest.raises(ValueError, match="offset_bytes"):
        offload.host_tensor(buffer, 4, torch.float32, offset_bytes=-4)
    with pytest.raises(ValueError, match="shape"):
        offload.host_tensor(buffer, (4, -1), torch.float32)
    with pytest.raises(TypeError):
        offload.host_tensor(buffer, 2.5, torch.float32)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dtype"):
        offload.host_tensor(buffer, 4, "float32")
    assert offload.host_tensor(buffer, 23, torch.float32, offset_bytes=8).numel() == 23
    assert offload.host_tensor(buffer, (3, 0), torch.float32).numel() == 0


@pytest.mark.gpu
def test_a_forked_child_gets_errors() -> None:
    tensor = filled(KIB, 17)
    kept = offload.offload(tensor, device="cuda:0")
    expected = content(kept.host)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for call in CALLS:
                with pytest.raises(poorwill.PoorwillError):
                    call(tensor, device="cuda:0")
            code = 7
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert content(kept.stage_in()) == expected
