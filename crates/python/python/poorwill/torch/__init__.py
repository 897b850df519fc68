"""PyTorch's tensors in memory that can sleep: `with poorwill.pool(tag="weights"):`.

PyTorch's caching allocator sits above ours and keeps freed memory. A scope makes it release that, so that a
load maps little more than what lives:

- A scope is a row of *generations*, each a `torch.cuda.MemPool` over one of our allocators. A *retired* one
  serves no more allocations, and its tensors stay as they are. When its cache is emptied, PyTorch frees a
  retired generation's segments that hold no tensor. While a scope is open that affects nothing else, and
  waits for nothing.
- The scope checks before every operation, or after each request for a segment (`Pool`'s `watch`). It acts
  when PyTorch's cache has grown by 32 MiB, or in the second mode by a sixty-fourth of what is mapped. Then
  it retires the generation, begins another, and empties the cache.
- Free parts of a retired segment that still holds a tensor are never handed out again. So their granules are
  released as well: the segments are *carved*.
- A failed allocation is retried after everything is released, unless the operation changes its arguments.

None of this changes a split limit, synchronises the device, or records an event; only checks after requests
set a split limit. That holds for PyTorch 2.11. Later versions are tested when the first scope is entered;
there, emptying the cache may cost more (`_emptying`).
"""

from poorwill._settings import allocator_settings
from poorwill._torch_version import UnsupportedTorchError
from poorwill.torch._outside import Outside
from poorwill.torch._pools import GraphPool, Pool, graph_pool, library, settle

__all__ = [
    "GraphPool",
    "Outside",
    "Pool",
    "UnsupportedTorchError",
    "allocator_settings",
    "graph_pool",
    "library",
    "settle",
]
