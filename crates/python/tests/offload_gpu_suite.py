"""Weights in host memory, as only a GPU shows them: kernels read them in place. Dropping the last view waits
for work on any stream, and ends no capture.
"""

import gc
import mmap
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from poorwill import offload

pytestmark = pytest.mark.gpu
torch: Any = import_module("torch")

DEVICE = "cuda:0"
# Long enough that who does not wait is far too early.
SPIN_CYCLES = 400_000_000


def weights(rows: int = 512, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 1024, generator=generator).to(torch.bfloat16)


def in_pages_of_its_own() -> Any:
    """A tensor whose pages have nothing else, which PyTorch would take for page-locked while they are."""
    made = weights()
    pages = mmap.mmap(-1, made.nbytes)
    return torch.frombuffer(pages, dtype=made.dtype).view(made.shape).copy_(made)


def pinned_by_pytorch() -> Any:
    return offload.device_view(weights().pin_memory(), device=DEVICE)


VIEWS: dict[str, Callable[[], Any]] = {
    "a copy": lambda: offload.to_host_view(weights(), device=DEVICE),
    "locked in place": lambda: offload.device_view(in_pages_of_its_own(), device=DEVICE),
    "locked by PyTorch": pinned_by_pytorch,
}


@pytest.mark.parametrize("kind", VIEWS)
def test_kernels_compute_the_same_with_weights_in_host_memory(kind: str) -> None:
    view, resident = VIEWS[kind](), weights().to(DEVICE)
    inputs = weights(64, seed=1).to(DEVICE)
    assert view.device == resident.device
    assert torch.equal(torch.nn.functional.linear(inputs, view), torch.nn.functional.linear(inputs, resident))
    assert torch.equal(view, resident)


@pytest.mark.parametrize("kind", VIEWS)
def test_the_last_view_to_go_waits_for_work_on_any_stream(kind: str) -> None:
    view, stream = VIEWS[kind](), torch.cuda.Stream()
    event = torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SPIN_CYCLES)
        read = view.clone()
        event.record()
    assert not event.query()
    del view
    gc.collect()
    assert event.query(), "the memory had gone, and work that reads it had not been done"
    stream.synchronize()
    assert torch.equal(read.cpu(), weights())


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_views_that_go_during_a_capture_do_not_end_it(mode: str) -> None:
    host = weights().pin_memory()
    kept = offload.device_view(host, device=DEVICE)
    doomed = [make() for make in VIEWS.values()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        doubled = kept * 2
        doomed.clear()
        gc.collect()
        more = doubled + 1
    for factor in [1.0, 3.0]:
        host.copy_(weights() * factor)
        graph.replay()
        torch.cuda.synchronize()
        # In place: each replay reads what the host has then.
        assert torch.equal(more.cpu(), weights().mul(factor).mul(2).add(1))
