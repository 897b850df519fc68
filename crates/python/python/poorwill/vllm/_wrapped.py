"""Temporary wrappers of functions of vLLM's objects and modules."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Wraps a function of an object or a module for a while, if it has one."""
    if not hasattr(owner, name):
        yield
        return
    is_own = name in vars(owner)
    stock = getattr(owner, name)
    setattr(owner, name, wrap(stock))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, stock)
        else:
            delattr(owner, name)
