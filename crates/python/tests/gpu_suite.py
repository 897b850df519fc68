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


two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(1, 0),
    reason="there is one GPU, or none that reaches it",
)


@two_gpus
def test_another_gpu_uses_memory_of_a_pool() -> None:
    """Before and after a sleep. Without access the first copy fails, and the strided one ends the context."""
    other = torch.arange(1 << 20, device="cuda:1", dtype=torch.float32)
    expected = other.cpu()
    arena = poorwill.arena("cuda:0", "used by another", limit="256MiB")
    with arena.pool("weights"):
        here = torch.zeros(1 << 20, device="cuda:0")
    for _ in range(2):
        here.zero_().copy_(other)
        assert torch.equal(here.cpu(), expected)
        here.zero_()[::2].copy_(other[::2])
        assert torch.equal(here[::2].cpu(), expected[::2])
        assert torch.equal(here.to("cuda:1").cpu(), here.cpu())
        assert torch.equal(other[::2].to("cuda:0"), here[::2])
        arena.sleep()
        arena.wake()
    del here
    torch.cuda.empty_cache()
    arena.close()
