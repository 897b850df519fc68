"""Properties of a PyTorch operation that are needed before it runs."""

import re
from dataclasses import dataclass
from typing import Any

from poorwill.torch._import import torch


@dataclass(frozen=True)
class Operation:
    """Properties of an operation."""

    allocates: bool
    """Whether it may return new tensors, and not only its arguments or views of them."""
    multiplies: bool
    """Whether it may use cuBLAS."""
    is_repeatable: bool
    """Whether a retry repeats no side effect."""


# Words in the names of operations that use cuBLAS, or that consist of such. In inference mode those appear as
# one operation.
_PRODUCTS = frozenset(
    "addbmm addmm addmv addr attention baddbmm bilinear bmm cdist cell chain conv convolution cov dot einsum "
    "gru inner linalg linear lstm lu matmul matrix mm mv pinverse rnn sspaddmm tensordot vdot".split()
)
_WORD = re.compile("[a-z]+")

# They change running averages, which their schemas omit.
_CHANGING_UNSAID = re.compile("(batch|instance)_norm")

_operations: dict[Any, Operation] = {}


def operation(func: Any) -> Operation:
    """The properties of a dispatch mode's function."""
    known = _operations.get(func)
    if known is None:
        known = _operations[func] = _examined(func)
    return known


def _examined(func: Any) -> Operation:
    schema = getattr(func, "_schema", None)
    if schema is None:
        # A higher-order operator may do anything.
        return Operation(allocates=True, multiplies=True, is_repeatable=False)
    space, _, name = str(schema.name).partition("::")
    return Operation(
        # Composite operations appear as one in inference mode. They may return a copy where the schema says
        # view: `to`, `contiguous`, `reshape`.
        allocates=any(value.alias_info is None for value in schema.returns)
        or func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd),
        multiplies=not _PRODUCTS.isdisjoint(_WORD.findall(name)),
        # Operations that are not PyTorch's own may have unstated effects, such as messages to other
        # processes.
        is_repeatable=space == "aten" and not schema.is_mutable and not _CHANGING_UNSAID.search(name),
    )
