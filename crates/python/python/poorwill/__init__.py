"""GPU memory runtime for language-model engines: sleep, wake, and verified bytes.

Importing it opens nothing: it needs neither a GPU nor PyTorch.
"""

from poorwill._native import PoorwillError, __version__, parse_bytes

__all__ = ["PoorwillError", "__version__", "parse_bytes"]
