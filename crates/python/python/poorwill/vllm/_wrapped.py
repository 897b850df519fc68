"""Functions of vLLM's objects and modules that do more for a while."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Has a function of an object or a module wrapped for a while, if there is one."""
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
