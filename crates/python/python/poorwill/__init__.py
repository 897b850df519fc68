"""GPU memory runtime for language-model engines: sleep, wake, and verified bytes.

Importing it opens nothing: it needs neither a GPU nor PyTorch.
"""

from poorwill import triton
from poorwill._native import (
    Budget,
    BudgetError,
    BudgetWarning,
    Claim,
    Claimed,
    PoorwillError,
    Source,
    __version__,
    budget,
    parse_bytes,
)

__all__ = [
    "Budget",
    "BudgetError",
    "BudgetWarning",
    "Claim",
    "Claimed",
    "PoorwillError",
    "Source",
    "__version__",
    "budget",
    "parse_bytes",
    "triton",
]
