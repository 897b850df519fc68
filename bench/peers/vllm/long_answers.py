#!/usr/bin/env python3
"""Two engines of vLLM behind `poorwill rotate` give long answers in streams, on a card on which one fits.

First the streams of each engine run alone: their tokens and their time are what the rest is compared with.
Then those of all engines run together, and turns are cut after a slice, or end with their requests.
Prints JSON lines; the line `together` has the figures.

    long_answers.py --mode poorwill-lending --models FOLDER   # cut turns, then whole ones (--slices 2,0)
    long_answers.py --mode cumem --models FOLDER              # vLLM's own computes kept requests again
    long_answers.py --mode poorwill --models FOLDER --canary beside --spoil   # and one with wrong weights
    long_answers.py --mode stand-in --tokens 400              # simulated engines, without a GPU
"""

import argparse
import math
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import conclude_in_a_folder, emit, every_line_says
from rotation import STAND_IN_BESIDE_MIB, STAND_IN_MIB, STATUS_S, Rotation
from taken import grown, medians, said
from turns import GRAPHS, MODES, run
from web import PROMPT, Client, families

PAUSE_S = 0.5  # a longer gap between two tokens is a wait for its model


class Stream:
    """One long answer: what it said, and when its parts came."""

    def __init__(self, rotation: Rotation, model: str, nth: int):
        self.rotation, self.model, self.nth = rotation, model, nth
        self.at: list[float] = []
        self.said: list[int] | str | None = None
        self.brief: dict = {}

    def run(self) -> "Stream":
        options = self.rotation.options
        prompt = f"Tell me {self.nth}" if options.plays else [token + self.nth for token in PROMPT]
        began = time.monotonic()
        answer = self.rotation.front.stream(
            options.tokens,
            more={"model": self.model, "prompt": prompt},
            limit_s=options.limit_s,
            on_event=lambda: self.at.append(time.monotonic() - began),
        )
        self.said, self.brief = said(answer), answer.brief()
        return self

    def waits(self) -> list[float]:
        """Until its first part, and each pause between two."""
        gaps = [after - before for before, after in zip(self.at, self.at[1:], strict=False)]
        return [*self.at[:1], *(gap for gap in gaps if gap > PAUSE_S)]


def run_all(rotation: Rotation, names: list[str], count: int) -> tuple[list[Stream], float]:
    """So many streams of each of these engines at a time, and the seconds that they took."""
    streams = [Stream(rotation, name, nth) for nth in range(count) for name in names]
    began = time.monotonic()
    with ThreadPoolExecutor(len(streams)) as pool:
        list(pool.map(Stream.run, streams))
    return streams, time.monotonic() - began


def percentile(values: list[float], share: float) -> float | None:
    ordered = sorted(values)
    return round(ordered[math.ceil(share * len(ordered)) - 1], 3) if ordered else None


def cuts(rotation: Rotation) -> float:
    metrics = families(rotation.control.get("/metrics", limit_s=STATUS_S).text)
    return metrics.get("poorwill_rotate_cuts_total", 0)


def alone(rotation: Rotation, count: int) -> tuple[dict, float, int]:
    """What each stream says alone, the seconds of all engines, and how many say something else when they are
    asked again: batches change tokens."""
    truth, seconds, differ = {}, 0.0, 0
    for name in rotation.names:
        rotation.front.stream(8, more={"model": name}, limit_s=200)
        streams, took = run_all(rotation, [name], count)
        again, _ = run_all(rotation, [name], count) if rotation.options.twice else (streams, 0)
        differ += sum(one.said != other.said for one, other in zip(streams, again, strict=True))
        truth |= {(name, one.nth): one.said for one in streams}
        seconds += took
    return truth, seconds, differ


def together(
    rotation: Rotation, count: int, slice_s: float, truth: dict, alone_s: float, differ: int
) -> bool:
    """The streams of all engines at a time, and their line; whether all said what they said alone."""
    rotation.slice(slice_s)
    before, cut_before, began_ms = rotation.counts(), cuts(rotation), time.time_ns() // 1_000_000
    streams, seconds = run_all(rotation, rotation.names, count)
    after = rotation.counts()
    whole = [one for one in streams if one.said]
    equal = [one for one in whole if one.said == truth[one.model, one.nth]]
    waits = [wait for one in streams for wait in one.waits()]
    swaps = [swap for (at_ms, _), swap in sorted(rotation.swaps.items()) if at_ms >= began_ms]
    emit(
        "together",
        slice_s=slice_s,
        streams=len(streams),
        whole=len(whole),
        equal=len(equal),
        differ_alone_twice=differ if rotation.options.twice else None,
        seconds=round(seconds, 2),
        of_alone=round(alone_s / seconds, 3),
        waits={"count": len(waits), "p50": percentile(waits, 0.5), "p99": percentile(waits, 0.99)},
        wait_max_s=percentile(waits, 1.0),
        first_s=percentile([one.at[0] for one in streams if one.at], 0.99),
        cuts=cuts(rotation) - cut_before,
        swap_s=[percentile([swap["whole_s"] for swap in swaps], share) for share in [0.5, 1.0]],
        coming_s=[percentile([swap["total_s"] for swap in swaps], share) for share in [0.5, 1.0]],
        coming_phases_s=medians(pair for swap in swaps for pair in swap["phases"]),
        leaving_phases_s=medians(pair for swap in swaps for left in swap["left"] for pair in left["phases"]),
        starts=after["starts"],
        copied_gib=grown(after["engines"], before["engines"]),
        failed={name: after["failed"][name] - before["failed"][name] for name in after["failed"]},
    )
    for one in [one for one in streams if one not in equal][:4]:
        pairs = zip(one.said or [], truth[one.model, one.nth] or [], strict=False)
        at = next((nth for nth, (a, b) in enumerate(pairs) if a != b), None)
        emit("differs", model=one.model, nth=one.nth, at=at, parts=len(one.at), **one.brief)
    return len(equal) == len(streams) and set(after["starts"].values()) == {1}


def compare(rotation: Rotation) -> bool:
    options, good = rotation.options, True
    for name in rotation.names:
        # Its first use, and what is compiled for it, is no part of it.
        emit("first", model=name, **rotation.front.stream(8, more={"model": name}, limit_s=200).brief())
    for count in options.streams:
        truth, alone_s, differ = alone(rotation, count)
        emit(
            "alone", streams=count, seconds=round(alone_s, 2), whole=sum(bool(one) for one in truth.values())
        )
        for slice_s in options.slices:
            good = together(rotation, count, slice_s, truth, alone_s, differ) and good
    return (spoiled(rotation) if options.spoil else True) and good


def spoiled(rotation: Rotation) -> bool:
    """An engine gets another one's weights while it is awake, and comes back with them: no wrong answer ends
    well, and the next engine answers right."""
    first, second = rotation.names[:2]
    truth = Stream(rotation, first, 0).run().said
    asked = {"method": "reload_weights", "kwargs": {"weights_path": str(rotation.models[1])}}
    wrote = Client(rotation.ports[first]).ask("/collective_rpc", asked, limit_s=120)
    Stream(rotation, second, 0).run()
    wrong = Stream(rotation, first, 0).run()
    after = Stream(rotation, first, 0).run()
    starts = rotation.counts()["starts"][first]
    emit(
        "spoiled",
        wrote=wrote.status,
        wrong_said=bool(wrong.said),
        wrong_parts=len(wrong.at),
        wrong=wrong.brief,
        after_right=after.said == truth,
        starts=starts,
    )
    return wrote.good and wrong.said in (None, truth) and after.said == truth and starts == 2


def parsed() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--poorwill", default="poorwill", help="the program that rotates")
    parser.add_argument("--models", type=Path, help="folder for checkpoints; without it they are removed")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--gib", type=float, default=8, help="weights of each")
    parser.add_argument("--kv-gib", type=float, default=5, help="KV cache of each")
    parser.add_argument("--fit", type=float, default=1.3, help="how many engines the free memory is for")
    parser.add_argument("--streams", default="4", help="of each engine; several numbers, one after the other")
    parser.add_argument("--tokens", type=int, default=4000, help="of each stream")
    parser.add_argument(
        "--slices", default="2", help="in seconds, as above; 0: turns end with their requests"
    )
    parser.add_argument("--spoil", action="store_true", help="with an engine that has wrong weights at last")
    parser.add_argument("--canary", choices=["none", "before", "beside"], default="none")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--twice", action="store_true", help="alone twice, to see what batches change")
    parser.add_argument("--limit-s", type=float, default=560, help="for everything")
    options = parser.parse_args()
    options.streams = [int(number) for number in options.streams.split(",")]
    options.slices = [float(seconds) for seconds in options.slices.split(",")]
    least = [options.engines, *options.streams, options.tokens, options.gib, options.kv_gib, options.fit]
    if min(least) <= 0:
        parser.error("--engines, --streams, --tokens, --gib, --kv-gib and --fit are more than 0")
    options.plays, options.lends = options.mode.startswith("stand-in"), options.mode.endswith("-lending")
    options.gpu_mib = int(options.fit * (STAND_IN_MIB + STAND_IN_BESIDE_MIB))
    options.stand_in_tokens_per_s = 100
    options.rules = f'slice_max = "{options.slices[0]}s"'
    options.engine_words = ["--max-model-len", "6144", *([] if options.eager else GRAPHS)]
    return options


def main() -> None:
    options = parsed()
    if not (program := shutil.which(options.poorwill)):
        raise SystemExit(f"there is no program {options.poorwill}: build it, and say where with --poorwill")
    options.poorwill = str(Path(program).resolve())
    every_line_says(mode=options.mode, label="long answers")
    conclude_in_a_folder(lambda folder: run(options, folder, lambda rotation, _: compare(rotation)))


if __name__ == "__main__":
    main()
