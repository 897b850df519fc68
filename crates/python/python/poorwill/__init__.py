"""GPU memory runtime for language-model engines: sleep, wake, and verified bytes.

Importing it opens nothing: it needs neither a GPU nor PyTorch.
"""

from poorwill import triton
from poorwill._native import (
    Arena,
    Budget,
    BudgetError,
    BudgetWarning,
    Claim,
    Claimed,
    ClosedError,
    PoorwillError,
    Source,
    __version__,
    arena,
    budget,
    parse_bytes,
)

__all__ = [
    "Arena",
    "Budget",
    "BudgetError",
    "BudgetWarning",
    "Claim",
    "Claimed",
    "ClosedError",
    "PoorwillError",
    "Source",
    "__version__",
    "arena",
    "budget",
    "parse_bytes",
    "triton",
]
