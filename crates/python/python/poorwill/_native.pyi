__all__ = ["PoorwillError", "__version__", "parse_bytes"]

__version__: str

class PoorwillError(Exception):
    """What poorwill could not do, and what would help."""

def parse_bytes(text: str, /) -> int:
    """How many bytes a size like "24GiB", "1.5GiB", "512m" or "1048576" stands for.

    Units are powers of 1024, except for "kB", "MB", "GB" and so on, which are powers of 1000.
    Raises ValueError for anything else.
    """
