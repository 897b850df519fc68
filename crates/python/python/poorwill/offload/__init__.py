"""Weights that live in host memory: PyTorch's tensors there that a GPU reads in place, or gets copies of.

    from poorwill import offload

    weight = offload.to_host_view(weight)           # copied to host memory once; the GPU reads it there
    view = offload.device_view(cpu_tensor)          # the same bytes as the GPU sees them; nothing is copied
    kept = offload.offload(weight)                  # for both kinds of system
    weight = kept.stage_in()                        # a view where that is allowed, a copy elsewhere

    weights = offload.load_checkpoint("model/")     # from files into such memory, held once

    offloader = offload.UvaOffloader(max_bytes="40GiB")         # parameters of modules, within a budget
    offloader = offload.PrefetchOffloader(model.layers)         # layers, copied in ahead of their use

What is promised:

- `device_view` and `host_tensor` alias and never copy, `to_host_view` and `offload` always copy. Where that
  is impossible there is an error that says why, and never the other thing silently.
- Type, shape, strides and storage offset stay what they were, whether a tensor is transposed, sliced or
  expanded.
- Host memory has exactly the size that was asked for. It lives as long as any tensor made of it, whatever
  became of the objects and names that it was made with, and is given back with the last one.
- `POORWILL_DISABLE_PIN`, `VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY` and
  `VLLM_WEIGHT_OFFLOADING_DISABLE_UVA` count on every path, and are looked at in every call (`policy`).
- What a GPU has seen is given back when the work that it has by then is done, on whatever stream: dropping
  the last tensor waits for that, and ends no capture of a graph. Nor does anything go that a copy of
  `Offloaded.stage_in` still reads.

Nobody puts work of the CPU and of a GPU on the same bytes in order: whoever writes on one side waits before
the other reads, as with any memory that two share.

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
