"""An engine's sources as tests read them: with all modules that mention a word."""

import ast
from collections.abc import Iterator

from poorwill import _sources
from poorwill._sources import Definition as Definition
from poorwill._sources import MissingError as MissingError


class Tree(_sources.Tree):
    """A folder that packages lie in."""

    def mentioning(self, *words: str) -> Iterator[tuple[str, ast.Module]]:
        """Every module in which one of the words stands, with its path from the root."""
        for path in sorted(self.root.rglob("*.py")):
            content = path.read_bytes()
            if any(word.encode() in content for word in words):
                module = ".".join(path.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")
                yield path.relative_to(self.root).as_posix(), self.parsed(module)
