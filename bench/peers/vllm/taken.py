"""What requests to a rotation and its swaps come to: draws, answers, sums and medians."""

import itertools
import math
import random
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from common import in_gib
from web import Answer

COPIES = re.compile(
    r'poorwill_(copied|skipped|lent|returned)_bytes_total\{[^}]*operation="(sleep|wake|prepare)"[^}]*\} (\S+)'
)


@dataclass(frozen=True)
class Taken:
    """A request, in milliseconds of the clock that swaps have."""

    model: str
    began_ms: int
    ended_ms: int
    right: bool
    first_s: float | None = None

    @property
    def seconds(self) -> float:
        return (self.ended_ms - self.began_ms) / 1000

    def waited_for(self, swap: dict) -> bool:
        return swap["model"] == self.model and self.began_ms <= swap["at_unix_ms"] <= self.ended_ms


def draws(names: list[str], exponent: float, seed: int) -> Iterator[str]:
    """Names by Zipf's law, the first one most often; the same for the same seed."""
    weights = [1 / place**exponent for place in range(1, len(names) + 1)]
    chosen = random.Random(seed)
    while True:
        yield chosen.choices(names, weights)[0]


def said(answer: Answer) -> list[int] | str | None:
    """The whole answer, as tokens or as a simulated engine's text; None where it is none or cut off."""
    if not answer.good or answer.finish() != "length":
        return None
    tokens = answer.tokens()
    return answer.json()["choices"][0].get("text") if tokens is None else tokens


def spread(seconds: Iterable[float]) -> dict | None:
    if not (ordered := sorted(seconds)):
        return None
    rank = math.ceil(0.9 * len(ordered)) - 1
    figures = {"p50": statistics.median(ordered), "p90": ordered[rank], "max": ordered[-1]}
    return {"count": len(ordered), **{name: round(value, 4) for name, value in figures.items()}}


def medians(phases: Iterable[list]) -> dict[str, float]:
    """The median seconds of each phase, from pairs of all swaps."""
    found: dict[str, list[float]] = {}
    for phase, seconds in phases:
        found.setdefault(phase, []).append(seconds)
    return {phase: round(statistics.median(seconds), 4) for phase, seconds in found.items()}


def summary(taken: list[Taken], swaps: list[dict]) -> dict:
    """Requests and swaps in figures."""
    swapped = [one for one in taken if any(one.waited_for(swap) for swap in swaps)]
    others = [one for one in taken if one not in swapped]
    left = [model["phases"] for swap in swaps for model in swap["left"]]
    return {
        "requests": len(taken),
        "right": sum(one.right for one in taken),
        "by_model": dict(sorted(Counter(one.model for one in taken).items())),
        "request_s": spread(one.seconds for one in taken),
        "with_swap_s": spread(one.seconds for one in swapped),
        "without_swap_s": spread(one.seconds for one in others),
        "first_token_with_swap_s": spread(one.first_s for one in swapped if one.first_s),
        "first_token_without_swap_s": spread(one.first_s for one in others if one.first_s),
        "swaps": len(swaps),
        "paths": dict(Counter(swap["path"] for swap in swaps)),
        "coming_s": spread(swap["total_s"] for swap in swaps),
        "swap_s": spread(swap["whole_s"] for swap in swaps),
        "coming_phases_s": medians(itertools.chain(*(swap["phases"] for swap in swaps))),
        "leaving_phases_s": medians(itertools.chain(*left)),
    }


def copies(texts: Iterable[str]) -> Counter:
    """Bytes by operation and kind in engines' metrics, such as `wake_copied_bytes`."""
    sums: Counter = Counter()
    for line in itertools.chain(*(text.splitlines() for text in texts)):
        if found := COPIES.match(line):
            sums[f"{found[2]}_{found[1]}_bytes"] += float(found[3])
    return sums


def grown(after: dict | None, before: dict | None) -> dict | None:
    """By how much sums grew, in GiB; None where they are not known."""
    if after is None or before is None:
        return None
    return in_gib({name: after[name] - before.get(name, 0) for name in sorted(after)})
