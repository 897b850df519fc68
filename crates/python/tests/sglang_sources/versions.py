"""Which versions' sources a run of the tests takes.

    python -m sglang_sources.versions quick

prints them for an effort, one in a line, and `cargo xtask` fetches these. With `run` in the place of an
effort they are those of a quick run.
"""

import os
import sys

from poorwill.sglang._versions import RUN, TESTED


def held(effort: str | None = None) -> tuple[str, ...]:
    """Those that the contract is held against: all, or with the effort `quick` those of `RUN`. If none is
    given, it is that of this process.
    """
    effort = os.environ.get("POORWILL_EFFORT", "usual") if effort is None else effort
    return RUN if effort in ("quick", "run") else TESTED


if __name__ == "__main__":
    [_, asked] = sys.argv
    print(*held(asked), sep="\n")
