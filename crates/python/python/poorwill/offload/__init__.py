"""Weights in host memory, as PyTorch tensors that a GPU reads in place or gets copies of.

```python
from poorwill import offload

weight = offload.to_host_view(weight)           # copied to host memory once; the GPU reads it there
view = offload.device_view(cpu_tensor)          # the same bytes as the GPU sees them; nothing is copied
kept = offload.offload(weight)                  # for both kinds of system
weight = kept.stage_in()                        # a view where that is allowed, a copy elsewhere

weights = offload.load_checkpoint("model/")     # from files into such memory, held once

offloader = offload.UvaOffloader(max_bytes="40GiB")         # parameters of modules, within a budget
offloader = offload.PrefetchOffloader(model.layers)         # layers, copied in ahead of their use
```

Guarantees:

- `device_view` and `host_tensor` alias and never copy; `to_host_view` and `offload` always copy. If that is
  impossible they raise an error with the reason.
- Type, shape, strides and storage offset stay, also of transposed, sliced or expanded tensors.
- Host memory has exactly the requested size. It lives as long as any tensor made of it, and is freed with
  the last one, whatever else is dropped before.
- `POORWILL_DISABLE_PIN`, `VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY` and
  `VLLM_WEIGHT_OFFLOADING_DISABLE_UVA` apply on every path, and are read in every call (`policy`).
- Memory that a GPU has seen is freed after the work queued by then, on any stream. Dropping the last tensor
  waits for that, and ends no capture of a graph. Memory that a copy of `Offloaded.stage_in` still reads
  stays, too.

Nothing orders the work of the CPU and of a GPU on the same bytes. After a write on one side, wait before the
other side reads, as with any shared memory.

Importing this, `HostBuffer` and `policy` need no PyTorch. Views are for plain tensors; results never require
gradients.
"""

from poorwill._native import HostBuffer
from poorwill.offload._import import MissingTorchError
from poorwill.offload._load import FileReport, HostCheckpoint, LoadReport, load_checkpoint
from poorwill.offload._modules import OffloadedPart, OffloadReport, ReplacedError, UvaOffloader
from poorwill.offload._offloaded import Offloaded, offload
from poorwill.offload._policy import Policy, policy
from poorwill.offload._prefetch import PrefetchOffloader, PrefetchStats
from poorwill.offload._views import device_view, host_tensor, to_host_view

__all__ = [
    "FileReport",
    "HostBuffer",
    "HostCheckpoint",
    "LoadReport",
    "MissingTorchError",
    "OffloadReport",
    "Offloaded",
    "OffloadedPart",
    "Policy",
    "PrefetchOffloader",
    "PrefetchStats",
    "ReplacedError",
    "UvaOffloader",
    "device_view",
    "host_tensor",
    "load_checkpoint",
    "offload",
    "policy",
    "to_host_view",
]
