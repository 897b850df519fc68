"""What loading a checkpoint into host memory promises of PyTorch's tensors: over the fake, and over
PyTorch.

`test_suites.py` runs it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import poorwill
import pytest
from checkpoint_files import BITS, Spec, write
from offload_tensors import content, is_nothing_held, layout, place, settled, torch
from poorwill import offload

NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}
KNOWN = [dtype for dtype, name in NAMES.items() if hasattr(torch, name)]
UNKNOWN = [dtype for dtype in BITS if dtype not in KNOWN]


def test_every_type_that_pytorch_has(device: str, tmp_path: Path) -> None:
    assert {"U8", "BF16", "F32", "I64"} <= set(KNOWN)
    specs: list[Spec] = [(dtype, dtype, (5, 3, 8)) for dtype in KNOWN]
    path = tmp_path / "x.safetensors"
    contents = write(path, specs, pad=3)
    loaded = offload.load_checkpoint(path, device=device)
    assert (list(loaded), len(loaded)) == (KNOWN, len(KNOWN))
    for dtype in KNOWN:
        tensor = loaded[dtype]
        shape = (5, 3, 4) if dtype == "F4" else (5, 3, 8)
        stride = shape[-1]
        assert layout(tensor) == (getattr(torch, NAMES[dtype]), shape, (3 * stride, stride, 1), 0)
        assert tensor.device == torch.device("cpu")
        # A storage of its own, so that taking all of a tensor's storage takes no other tensor.
        storage = tensor.untyped_storage()
        assert storage.nbytes() == len(contents[dtype])
        flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (storage.nbytes(),), (1,))
        assert content(flat) == contents[dtype]


def test_shapes_odd_places_and_nothing(device: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    specs: list[Spec] = [
        *(("large", "U8", (3_000_001,)), ("scalar", "F32", ()), ("empty", "BF16", (3, 0, 2))),
        *(("wide", "I64", (1, 1, 7)), ("row", "F16", (9, 11))),
    ]
    for pad in (0, 1, 2, 7):
        contents = write(path, specs, pad=pad, seed=pad)
        loaded = offload.load_checkpoint([path], device=device, readers=1 + pad)
        for name, _, shape in specs:
            assert tuple(loaded[name].shape) == shape
            assert content(loaded[name]) == contents[name]
        assert loaded["empty"].untyped_storage().nbytes() == 0
        assert loaded.report.readers == 1 + pad


def test_views_and_offloaded_tensors_are_the_same_memory(device: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    contents = write(path, [("first", "F32", (100, 30)), ("second", "BF16", (77, 8))])
    loaded = offload.load_checkpoint(path, device=device)
    for name, expected in contents.items():
        view, kept = offload.device_view(loaded[name], device=device), loaded.offloaded(name)
        assert (view.device, kept.device) == (place(device), place(device))
        assert content(view) == content(kept.stage_in()) == content(kept.host) == expected
        assert (kept.is_zero_copy, kept.is_pinned) == (True, loaded.report.pinned)
        assert kept.host.data_ptr() == loaded[name].data_ptr()
        # A copy has memory of its own, of the same kind.
        again, asked = kept.__reduce__()
        other = again(*asked)
        assert other.is_pinned == kept.is_pinned
        loaded[name].fill_(0)
        assert content(view) == content(kept.stage_in()) == content(loaded[name]) != expected
        assert layout(view) == layout(kept.stage_in()) == layout(loaded[name])
        assert content(other.stage_in()) == content(other.host) == expected


@pytest.mark.gpu
def test_a_page_locked_buffer_is_seen_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    contents = write(path, [("a", "U8", (100_001,)), ("b", "U8", (5,))])
    loaded = offload.load_checkpoint(path, device="cuda:0")
    assert (loaded.report.pinned, loaded.report.pageable_because) == (True, None)
    # What would have to be locked for a view is refused now.
    monkeypatch.setenv("POORWILL_DISABLE_PIN", "1")
    for name, expected in contents.items():
        assert content(offload.device_view(loaded[name], device="cuda:0")) == expected
    # Its slab has all that the limit allows.
    del loaded
    settled()
    pageable = offload.load_checkpoint(path, device="cuda:0")
    assert not pageable.report.pinned
    assert pageable.report.pageable_because == "POORWILL_DISABLE_PIN=1 is set"
    with pytest.raises(poorwill.PoorwillError, match="POORWILL_DISABLE_PIN"):
        offload.device_view(pageable["a"], device="cuda:0")
    kept = pageable.offloaded("a")
    assert (kept.is_zero_copy, content(kept.stage_in())) == (False, contents["a"])


def test_no_views_where_the_environment_says_so(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    contents = write(path, [("a", "U8", (1001,)), ("empty", "U8", (0,))])
    loaded = offload.load_checkpoint(path, device=device)
    monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", "1")
    for name, expected in contents.items():
        kept = loaded.offloaded(name)
        assert kept.copies_because == "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=1 is set"
        assert content(kept.stage_in()) == expected


def test_memory_stays_as_long_as_any_tensor(device: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    contents = write(path, [("a", "U8", (2_000_000,)), ("b", "U8", (1000,))])
    keeps: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda loaded: loaded["b"],
        "part": lambda loaded: loaded["b"][10:20],
        "view": lambda loaded: offload.device_view(loaded["b"], device=device),
        "offloaded": lambda loaded: loaded.offloaded("b"),
        "staged": lambda loaded: loaded.offloaded("b").stage_in(),
    }
    for name, keep in keeps.items():
        kept = keep(offload.load_checkpoint(path, device=device))
        assert not is_nothing_held(device), name
        tensor = kept.host if name == "offloaded" else kept
        assert content(tensor) == (contents["b"][10:20] if name == "part" else contents["b"])
        del kept, tensor
        assert is_nothing_held(device), name


def test_a_type_that_pytorch_has_not_is_refused_before_anything_is_read(device: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    assert UNKNOWN
    for dtype in UNKNOWN:
        write(path, [("first", "U8", (100,)), ("strange\n", dtype, (4, 8))])
        with pytest.raises(ValueError, match=rf"tensor `strange\\n` is of {dtype}, of which") as raised:
            offload.load_checkpoint(path, device=device)
        assert "\n" not in str(raised.value)
        assert is_nothing_held(device)


@pytest.mark.real_torch
def test_halves_of_a_pair_are_refused(device: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, [("odd", "F4", (2, 3))])
    with pytest.raises(ValueError, match=r"tensor `odd` is of F4 and has the shape \[2, 3\]"):
        offload.load_checkpoint(path, device=device)
