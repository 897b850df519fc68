"""Errors of the memory saver."""

from poorwill._native import PoorwillError


class SaverError(PoorwillError):
    """A call of the memory saver cannot be done; nothing was changed."""
