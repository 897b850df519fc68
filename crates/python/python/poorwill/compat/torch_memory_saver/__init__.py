"""The calls of torch_memory_saver 0.0.10, with Poorwill's memory: verified, copied only where it changed.

`torch_memory_saver` is the one instance. What others call *pause* and *resume* are a sleep and a wake. Where
the other package ends the process, this one raises an error or does nothing, and says so. What differs is in
docs/rl.md.

- `_saver` is the public object, and `_kinds` what the tags of its regions are in an arena.
- `_pools` has regions as pools of PyTorch's, in an arena for each GPU.
- `_process` has all GPU memory of the process, by a library that was loaded before (`LD_PRELOAD`).

With an older PyTorch than pools need, the import fails: code that can do without torch_memory_saver does
then, and no pause fails later.
"""

from poorwill._torch_version import refuse_older_installed
from poorwill.compat._import_hook import SWITCH
from poorwill.compat.torch_memory_saver._preload import configure_subprocess
from poorwill.compat.torch_memory_saver._saver import SaverError, TorchMemorySaver

__all__ = ["SaverError", "TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]

refuse_older_installed(instead=f", or unset {SWITCH} to have torch_memory_saver's own package")

torch_memory_saver = TorchMemorySaver()
