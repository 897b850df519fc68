"""Packages that are imported anew for a while: fakes, and what of ours stands on them."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def imported_anew(name: str) -> Iterator[None]:
    """For a block the package and `poorwill`'s of its name are not there; afterwards both are as before."""

    def found() -> list[str]:
        roots = (name, f"poorwill.{name}")
        return [each for each in sys.modules if any(f"{each}.".startswith(f"{root}.") for root in roots)]

    before = {each: sys.modules.pop(each) for each in found()}
    package = sys.modules.get("poorwill")
    attributes = {} if package is None else package.__dict__
    ours = attributes.pop(name, None)
    try:
        yield
    finally:
        for each in found():
            del sys.modules[each]
        sys.modules.update(before)
        attributes.pop(name, None)
        if ours is not None:
            attributes[name] = ours
