"""How unwritten weights are seen, over PyTorch's tensors; `vllm_unwritten_suite.py` has what comes of it."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.real_torch

DTYPES = (
    *("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)

# Each from a function that makes a tensor of a shape.
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "a matrix": lambda empty: empty(64, 96),
    "a matrix that is turned": lambda empty: empty(96, 64).t(),
    "experts that are turned": lambda empty: empty(4, 64, 96).transpose(1, 2),
    "columns": lambda empty: empty(64, 128)[:, :80],
    "columns that fit no word": lambda empty: empty(64, 128)[:, 1:4],
    "rows behind others": lambda empty: empty(64, 96)[7:],
    "a number": lambda empty: empty(),
    "a few": lambda empty: empty(3),
    "an odd number": lambda empty: empty(7, 5),
}


@pytest.fixture(scope="module")
def unwritten() -> Any:
    return importlib.import_module("poorwill.vllm._unwritten")


def filled(unwritten: Any, tensor: Any) -> Any:
    elements = unwritten._elements(tensor)
    elements.fill_(unwritten._of_size(elements.element_size()))
    return tensor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_format_and_layout_shows_what_is_missing(unwritten: Any, layout: str, dtype: str) -> None:
    torch: Any = importlib.import_module("torch")

    def empty(*shape: int) -> Any:
        return torch.empty(shape, dtype=getattr(torch, dtype))

    tensor = LAYOUTS[layout](empty)
    with torch.no_grad():
        tensor.zero_()
        assert unwritten.missing_bytes(tensor) == 0
        filled(unwritten, tensor)
        missing = unwritten.missing_bytes(tensor)
        assert tensor.nbytes - 7 <= missing <= tensor.nbytes
        if tensor.is_floating_point() and dtype != "float8_e8m0fnu" and missing == tensor.nbytes:
            assert bool(torch.isnan(tensor.to(torch.float32)).any())
        # The first element alone; what is a byte has neighbours.
        tensor[(0,) * tensor.dim()] = 0
        left = unwritten.missing_bytes(tensor)
        assert left < missing
        # Single bytes may have any value: once one was written, nothing is known of the others.
        assert left == 0 or unwritten._elements(tensor).element_size() > 1
        tensor.zero_()
        assert unwritten.missing_bytes(tensor) == 0


def test_parameters_of_inference_can_be_filled(unwritten: Any) -> None:
    torch: Any = importlib.import_module("torch")
    with torch.inference_mode():
        parameter = torch.nn.Parameter(torch.zeros(64, 64), requires_grad=False)
    learning = torch.nn.Parameter(torch.zeros(64, 64))
    for tensor in (parameter, learning):
        assert unwritten.missing_bytes(filled(unwritten, tensor)) == tensor.nbytes
