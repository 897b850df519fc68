"""PyTorch's tensors in memory that can be put to sleep: `with poorwill.pool(tag="weights"):`.

PyTorch's caching allocator sits above ours and keeps what its user has freed. What makes it give that
back, so that a load maps what lives and little more, is how a scope is built:

- A scope is a row of *generations*, each a `torch.cuda.MemPool` over one of our allocators. One that is
  *retired* serves no allocation any more, and its tensors stay as they are. Of retired generations
  PyTorch gives every segment back that holds no tensor when its cache is emptied; while a scope is open
  that touches nothing else, and waits for nothing.
- The scope sees every operation before it runs, or looks after each request for a segment (`Pool`'s
  `watch`). When PyTorch's cache has grown by 32 MiB, or where requests are seen by a sixty-fourth of what is
  mapped, the generation is retired, another one begun, and the cache emptied.
- The free parts of a retired generation's segments that still hold a tensor are never handed out again,
  so their granules are given back as well: the segments are *carved*.
- What does not fit is tried a second time when everything was given back, unless the operation changes
  its arguments.

Nothing of this minds a split limit, synchronises the device, or records an event; looking after requests
sets one. That is PyTorch 2.11; of a later one, which is put to the test when the first scope is entered,
emptying the cache may take more (`_emptying`).
"""

from poorwill._settings import allocator_settings
from poorwill.torch._import import UnsupportedTorchError
from poorwill.torch._pools import GraphPool, Pool, graph_pool, library, settle

__all__ = [
    "GraphPool",
    "Pool",
    "UnsupportedTorchError",
    "allocator_settings",
    "graph_pool",
    "library",
    "settle",
]
