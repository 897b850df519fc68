"""What is to be known of an operation of PyTorch's before it runs."""

import re
from dataclasses import dataclass
from typing import Any

from poorwill.torch._import import torch


@dataclass(frozen=True)
class Operation:
    """What is to be known of an operation."""

    allocates: bool
    """Whether it may return new tensors, and not only its arguments or views of them."""
    multiplies: bool
    """Whether it may use cuBLAS."""
    is_repeatable: bool
    """Whether trying it a second time does nothing twice."""


# Words in the names of operations that use cuBLAS, or that are made of such ones: in inference mode those are
# seen as a whole.
_PRODUCTS = frozenset(
    "addbmm addmm addmv addr attention baddbmm bilinear bmm cdist cell chain conv convolution cov dot einsum "
    "gru inner linalg linear lstm lu matmul matrix mm mv pinverse rnn sspaddmm tensordot vdot".split()
)
_WORD = re.compile("[a-z]+")

# They change running averages, which their schemas do not say.
_CHANGING_UNSAID = re.compile("(batch|instance)_norm")

_operations: dict[Any, Operation] = {}


def operation(func: Any) -> Operation:
    """What is to be known of what a dispatch mode is given."""
    known = _operations.get(func)
    if known is None:
        known = _operations[func] = _examined(func)
    return known


def _examined(func: Any) -> Operation:
    schema = getattr(func, "_schema", None)
    if schema is None:
        # An operator of higher order may do anything.
        return Operation(allocates=True, multiplies=True, is_repeatable=False)
    space, _, name = str(schema.name).partition("::")
    return Operation(
        # What is made of other operations is seen as a whole in inference mode, and may return a copy where
        # its schema speaks of a view: `to`, `contiguous`, `reshape`.
        allocates=any(value.alias_info is None for value in schema.returns)
        or func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd),
        multiplies=not _PRODUCTS.isdisjoint(_WORD.findall(name)),
        # Others than PyTorch's own may do what they do not say: send messages to other processes, say.
        is_repeatable=space == "aten" and not schema.is_mutable and not _CHANGING_UNSAID.search(name),
    )
