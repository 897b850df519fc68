"""What only a GPU with PyTorch shows: a claim sees what a graph capture takes, and does not disturb it."""

import warnings
from importlib import import_module
from typing import Any

import poorwill
import pytest

pytestmark = pytest.mark.gpu
torch: Any = import_module("torch")

SIDE = 4096
PRODUCTS = 16


def capture() -> tuple[Any, Any]:
    """A graph that keeps so many products of matrices."""
    x = torch.randn(SIDE, SIDE, device="cuda")
    (x @ x).sum().item()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products = [x @ x for _ in range(PRODUCTS)]
    graph.replay()
    torch.cuda.synchronize()
    return graph, products


@pytest.mark.parametrize("claimed_gib", [4, 1 / 64])
def test_a_claim_sees_the_peak_of_a_capture(claimed_gib: float) -> None:
    budget = poorwill.budget(cap=0.5)
    torch.cuda.empty_cache()
    reserved_bytes = torch.cuda.memory_reserved()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with budget.claim("cudagraph", int(claimed_gib * 2**30)) as claim:
            kept = capture()
    taken_bytes = torch.cuda.memory_reserved() - reserved_bytes
    assert taken_bytes >= PRODUCTS * SIDE * SIDE * 4
    # A context takes a little by itself, and so do libraries that start meanwhile.
    assert taken_bytes <= claim.peak_bytes <= taken_bytes + 2**30
    assert [issubclass(warning.category, poorwill.BudgetWarning) for warning in warned] == (
        [] if claimed_gib > 1 else [True]
    )
    del kept


def test_the_headroom_is_what_pytorch_finds_free() -> None:
    torch.ones(1, device="cuda")
    budget = poorwill.budget()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    assert budget.total_bytes == total_bytes
    assert abs(budget.headroom_bytes - free_bytes) <= total_bytes / 200


def test_the_shared_memory_is_the_devices() -> None:
    properties = torch.cuda.get_device_properties(0)
    expected = properties.shared_memory_per_block_optin
    assert poorwill.triton.shared_memory_budget() == expected
    assert poorwill.triton.shared_memory_budget((properties.major, properties.minor)) == expected
