"""The arithmetic: percentiles, what a stream's chunks say, what a swap's stages say, and what is in /proc."""

import itertools
import math
import statistics

NS_PER_MS = 1e6

# Stages of the model that leaves, and of the one that comes, as `poorwill rotate` calls them.
LEAVING = ("draining", "measuring before sleep", "falling asleep", "releasing memory")
COMING = ("finding memory", "waking", "confirming", "canary", "measuring")
# Of these, the time in which the engine sleeps and wakes is the engine's own.
ENGINES = ("falling asleep", "waking")
CANARY = "canary"


def percentile(values: list[float], share: float) -> float:
    """The least of the values that this share of all are no greater than."""
    if not values:
        raise ValueError("there are no values")
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def spread(values: list[float]) -> dict[str, float]:
    return {
        "p50": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
        "max": max(values),
        "count": len(values),
    }


def median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


class Events:
    """When each event of a stream had come, in the bytes as they are on the wire.

    An event ends with an empty line, and JSON has none. Nor have the head of an answer and the frames of its
    body, whose lines end with CR LF.
    """

    def __init__(self):
        self.times_ns: list[int] = []
        self._tail = b""

    def take(self, now_ns: int, piece: bytes) -> None:
        piece = self._tail + piece
        self.times_ns.extend([now_ns] * piece.count(b"\n\n"))
        ends_open = piece.endswith(b"\n") and not piece.endswith(b"\n\n")
        self._tail = b"\n" if ends_open else b""


def gaps_ms(times_ns: list[int]) -> list[float]:
    """Between each token and the event before it. The last event, `[DONE]`, comes with the last token."""
    tokens = times_ns[:-1]
    return [(after - before) / NS_PER_MS for before, after in itertools.pairwise(tokens)]


def of_streams(at_engine: dict[str, list[int]], at_client: dict[str, list[int]]) -> dict:
    """Gaps at the engine's door and at the client, and how long each chunk was under way in between."""
    own, seen, delays = [], [], []
    for name, client in at_client.items():
        engine = at_engine.get(name)
        if engine is None or len(engine) != len(client):
            came = "none" if engine is None else str(len(engine))
            raise ValueError(f"stream {name}: {came} events left the engine, and {len(client)} came")
        own += gaps_ms(engine)
        seen += gaps_ms(client)
        delays += [(there - here) / NS_PER_MS for here, there in zip(engine, client, strict=True)]
    return {"own_gap_ms": spread(own), "gap_ms": spread(seen), "delay_ms": spread(delays)}


def of_swap(events: list[dict], leaves: str, comes: str, whole_s: float, answer_s: float) -> dict:
    """Whose each second of a swap was.

    `events` are those of the service in the swap. `whole_s` is the duration of the request that forced it,
    and `answer_s` that of one whose model is ready. What neither the engines nor the canary took is the
    rotation's own, also where no stage tells of it.
    """
    stages: dict[str, float] = {}
    for event in events:
        if event["event"] != "stage":
            continue
        known = {leaves: LEAVING, comes: COMING}.get(event["model"], ())
        if event["before"] in known:
            stages[event["before"]] = stages.get(event["before"], 0.0) + event["before_s"]
        elif event["before"] not in ("ready", "asleep"):
            raise ValueError(f"{event['model']} came out of `{event['before']}`, which is not part of a swap")
    if missing := [stage for stage in (*LEAVING, *COMING) if stage not in stages]:
        raise ValueError(f"the swap has no stage {', '.join(missing)}")
    engines_s = sum(stages[stage] for stage in ENGINES)
    return {
        "comes": comes,
        "whole_s": whole_s,
        "answer_s": answer_s,
        "engines_s": engines_s,
        "canary_s": stages[CANARY],
        "own_s": whole_s - answer_s - engines_s - stages[CANARY],
        "untold_s": whole_s - answer_s - sum(stages.values()),
        "stages": stages,
    }


def of_swaps(each: list[dict], direct: dict) -> dict:
    """All swaps, beside the same engine's sleeps and wakes without a service in between."""
    own_ms = [swap["own_s"] * 1000 for swap in each]
    stages = {stage: spread([swap["stages"][stage] * 1000 for swap in each]) for stage in (*LEAVING, *COMING)}
    without_ms = [(swap["whole_s"] - swap["answer_s"] - swap["canary_s"]) * 1000 for swap in each]
    direct_ms = [pair["sleep_s"] * 1000 + pair["wake_s"] * 1000 for pair in direct]
    return {
        "whole_ms": spread([swap["whole_s"] * 1000 for swap in each]),
        "engines_ms": spread([swap["engines_s"] * 1000 for swap in each]),
        "canary_ms": spread([swap["canary_s"] * 1000 for swap in each]),
        "own_ms": spread(own_ms),
        "untold_ms": spread([swap["untold_s"] * 1000 for swap in each]),
        "stages_ms": stages,
        "direct_ms": spread(direct_ms),
        # Of medians, for the engine's own time differs from one wake to the next by more than this.
        "over_direct_ms": percentile(without_ms, 0.5) - percentile(direct_ms, 0.5),
    }


def stat_fields(text: str) -> list[str]:
    """The fields of /proc/PID/stat from the third on; the second may have anything in it."""
    return text[text.rindex(")") + 2 :].split()


def parent_of(text: str) -> int:
    return int(stat_fields(text)[1])


def ticks_of(text: str) -> int:
    """What a process has used of the processors, its threads together, in clock ticks."""
    user, system = stat_fields(text)[11:13]
    return int(user) + int(system)


def cpus_of(text: str) -> list[int]:
    """Processors as Linux lists them: `0-2,5`."""
    cpus: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()) or part.endswith("-"):
            raise ValueError(f"`{part}` is no processor; write them like 0 or 0-2,5")
        cpus += range(int(first), int(last or first) + 1)
    if not cpus or len(set(cpus)) < len(cpus):
        raise ValueError(f"`{text}` names no processor, or one twice")
    return cpus
