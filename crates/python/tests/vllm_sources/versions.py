"""Which versions' sources a run of the tests takes.

    python -m vllm_sources.versions quick

prints them for an effort, one in a line, and `cargo xtask` fetches these. With `run` in the place of an
effort they are those whose code the tests run, and no others.
"""

import os
import sys

from poorwill.vllm._versions import RUN, TESTED, parse


def held(effort: str | None = None) -> tuple[str, ...]:
    """Those that the contract is held against: all, or with the effort `quick` those of `RUN`, one of the
    oldest minor and one of the newest. If none is given, it is that of this process.
    """
    effort = os.environ.get("POORWILL_EFFORT", "usual") if effort is None else effort
    return RUN if effort == "quick" else TESTED


def played(effort: str | None = None) -> tuple[str, ...]:
    """Those whose engines and workers are run with our hooks: of each minor its last; with the effort `quick`
    those of `RUN`.
    """
    effort = os.environ.get("POORWILL_EFFORT", "usual") if effort is None else effort
    last = {parse(version)[:2]: version for version in TESTED}
    return RUN if effort == "quick" else tuple(last.values())


PINNED = ("0.24.0", "0.29.0", "0.31.0")
"""Those that frameworks for training pin (`test_framework_pins`), of TESTED."""


def trained(effort: str | None = None) -> tuple[str, ...]:
    """Those by whose code the calls of trainers run: `played`, and beyond a quick run what trainers pin."""
    effort = os.environ.get("POORWILL_EFFORT", "usual") if effort is None else effort
    return RUN if effort == "quick" else tuple(dict.fromkeys((*played(effort), *PINNED)))


if __name__ == "__main__":
    [_, asked] = sys.argv
    print(*(RUN if asked == "run" else held(asked)), sep="\n")
