"""Poorwill in the place of other packages, under their names and with their calls.

`poorwill.compat.torch_memory_saver` stands for `torch_memory_saver`. With `POORWILL_TORCH_MEMORY_SAVER=1` in
the environment it is what `import torch_memory_saver` gives, in every Python process of the installation.
"""

from poorwill.compat._import_hook import SWITCH, stand_in

__all__ = ["SWITCH", "stand_in"]
