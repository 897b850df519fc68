"""The error of standing in, which the import hook itself does without until there is one."""

from poorwill._native import PoorwillError


class StandInError(PoorwillError, ImportError):
    """Our module cannot take the place of the other package."""
