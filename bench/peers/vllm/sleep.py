#!/usr/bin/env python3
"""Start vLLM with made-up weights, put it to sleep and wake it, check it, and print JSON lines.

    sleep.py --mode poorwill --kind dense --kv-gib 8 --graphs --cycles 3 --by-tag --level2
    sleep.py --mode cumem --kind moe --quantization mxfp8 --max-split-mib 20 --kv-gib 4 --cycles 1
    sleep.py --mode poorwill --kind dense --kv-gib 8 --cycles 30 --summary
    sleep.py --mode poorwill --kind moe --quantization mxfp8 --kv-gib 0.5 --free-gib 21 --cycles 1
    sleep.py --mode poorwill --kind dense --kv-gib 8 --graphs --offload-graphs --expandable
    sleep.py --mode none --kind dense --kv-gib 8 --graphs --throughput

vLLM runs in this process, for its allocator and its model are looked at. With mode cumem a subclass of its
allocator counts, and does nothing else; with mode poorwill the installed package's plugin does everything
by itself. Which class is in place is checked and printed.

After the start the weights that are plain numbers are overwritten, so that tokens depend on every layer.
Earlier backups are useless for the first sleep, unless it is prepared again (`--first prepared`). Tokens of
quantised models hardly depend on their weights: `bytes_equal` counts there, which compares sums over the
bytes of every parameter.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from common import (
    EXPANDABLE,
    MODES,
    Ballast,
    adopt,
    conclude,
    difference,
    emit,
    environment,
    every_line_says,
    gib,
    host_memory,
    install_entry_point,
    utilization,
)
from models import write_model

ORDERS = [["weights", "kv_cache"], ["kv_cache", "weights"]]


class Measured:
    """An engine that is asleep or awake, and what it has to be like when it is awake."""

    def __init__(self, engine, host_before: dict[str, float], normal: bool):
        from engine import fingerprint

        self.engine = engine
        self.normal = normal
        self.host_before = host_before
        self.prints = fingerprint(engine.model)
        self.tokens = engine.tokens()

    def checks(self) -> dict[str, bool]:
        from engine import fingerprint, same

        equal = same(self.prints, fingerprint(self.engine.model))
        return {"bytes_equal": equal, "tokens_equal": self.engine.tokens() == self.tokens}

    def sleep(self, level: int) -> dict:
        """Sleeps, and says what came of it."""
        from engine import timed, used_memory

        self.engine.reported()
        awake = used_memory()
        seconds = timed(self.engine.llm.sleep, level=level)
        asleep = used_memory()
        status_figures = {"sleep_reported": self.engine.reported()}
        if self.engine.mode == "poorwill":
            status_figures["host_held_gib"] = gib(self.engine.status()["host_bytes"])
        return {
            "level": level,
            "sleep_s": round(seconds, 4),
            "used_awake_gib": gib(awake),
            "used_asleep_gib": gib(asleep),
            "host_added": difference(host_memory(), self.host_before),
            **status_figures,
        }

    def wake(self, tags: list[str] | None = None) -> dict:
        from engine import timed, used_memory

        seconds = timed(self.engine.llm.wake_up, tags=tags)
        name = "_".join(["wake", *(tags or [])])
        figures = {f"{name}_s": round(seconds, 4), f"{name}_reported": self.engine.reported()}
        return {**figures, f"used_after_{name}_gib": gib(used_memory())}

    def cycle(self, number: int) -> dict:
        return {"cycle": number, **self.sleep(1), **self.wake(), **self.checks()}

    def by_tag(self, tags: list[str]) -> dict:
        record = self.sleep(1)
        for tag in tags:
            record |= self.wake([tag])
        return {"tags": tags, **record, **self.checks()}

    def dropped(self, seed: int) -> dict:
        """Level 2, and the weights written again by us: where all of them can be, they are compared."""
        from engine import fill_weights

        record = {**self.sleep(2), **self.wake()}
        _, left = fill_weights(self.engine.model, seed, self.normal)
        if self.engine.mode == "poorwill":
            record["undefined"] = self.engine.status()["undefined"]
            if left:
                # What is quantised stays as the wake has it.
                record["restored"] = self.engine.llm.collective_rpc("poorwill_mark_restored")[0]
        return record if left else {**record, **self.checks()}


def summary(cycles: list[dict]) -> dict:
    """What many cycles have in common; none of them the first of its process."""
    figures: dict = {"cycles": len(cycles)}
    for name in ["sleep_s", "wake_s"]:
        took = [cycle[name] for cycle in cycles]
        figures[name] = {"median": statistics.median(took), "min": min(took), "max": max(took)}
    for name in ["bytes_equal", "tokens_equal"]:
        figures[name] = all(cycle[name] for cycle in cycles)
    for name in ["used_asleep_gib", "used_after_wake_gib", "host_held_gib"]:
        seen = [cycle[name] for cycle in cycles if name in cycle]
        if seen:
            figures[name] = {"min": min(seen), "max": max(seen)}
    figures["host_added"] = cycles[-1]["host_added"]
    return figures


def run(options: argparse.Namespace, ballast: Ballast | None, folder: Path) -> bool:
    """Whether all that was checked is as it was."""
    import engine as engines

    free, total = (ballast.free(), ballast.total()) if ballast else (0, 1)
    if ballast:
        emit("card", free_gib=gib(free), total_gib=gib(total))
    before_start = host_memory()
    if options.mode == "cumem" and not options.no_counting:
        install_entry_point(folder / "plugin")
    chosen = engines.settings(
        write_model(folder, options.kind, options.layers),
        mode=options.mode,
        kv_gib=options.kv_gib,
        utilization=utilization(free, total, options.free_gib, options.utilization),
        graphs=options.graphs,
        quantization=options.quantization,
        moe_backend=options.moe_backend,
        attention=options.attention,
        offload_graphs=options.offload_graphs,
    )
    engine = engines.start(options.mode, chosen, options.max_split_mib)
    normal = options.fill == "normal"
    if not options.no_fill:
        filled, left = engines.fill_weights(engine.model, options.seed, normal)
        emit("overwritten", tensors=filled, left=left)
    if options.throughput:
        rates = engine.throughput()
        emit("throughput", tokens_per_s=rates, median=statistics.median(rates))
    measured = Measured(engine, before_start, normal)
    emit("reference", tokens=measured.tokens, repeatable=engine.tokens() == measured.tokens)
    if options.mode == "none":
        return True
    ours = options.mode == "poorwill"
    if ours:
        emit("before", reported=engine.reported(), status=engine.status())
    if ours and options.first == "prepared":
        seconds = engine.prepare()
        emit("prepared", prepare_s=round(seconds, 4), reported=engine.reported(), status=engine.status())

    cycles = []
    for number in range(1, options.cycles + 1):
        cycles.append(measured.cycle(number))
        if number == 1 or not options.summary:
            emit("cycle", first=options.first if number == 1 else None, **cycles[-1])
    if options.summary and len(cycles) > 1:
        emit("summary", **summary(cycles[1:]))
    if options.changed:
        engines.fill_weights(engine.model, options.seed + 1, normal)
        measured = Measured(engine, before_start, normal)
        cycles.append(measured.cycle(0))
        emit("changed", **cycles[-1])
    for tags in ORDERS if options.by_tag else []:
        cycles.append(measured.by_tag(tags))
        emit("by_tag", **cycles[-1])
    seed = options.seed + bool(options.changed)
    for _ in range(2 if options.level2 else 0):
        cycles.append(measured.dropped(seed))
        emit("level2", **cycles[-1])
    if ours:
        emit("after", status=engine.status())
    return all(cycle.get(name, True) for cycle in cycles for name in ["bytes_equal", "tokens_equal"])


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--mode", "--sleep-mode", choices=MODES, required=True)
    arguments.add_argument("--kind", choices=["dense", "moe", "mxfp4", "small"], default="dense")
    arguments.add_argument("--layers", type=int, default=0, help="0: as many as the kind has")
    arguments.add_argument("--quantization", default="", help="made while loading: fp8, mxfp8, fp8_per_block")
    arguments.add_argument("--kv-gib", type=float, default=0, help="0: what --utilization leaves")
    arguments.add_argument("--utilization", type=float, default=0.9)
    arguments.add_argument(
        "--graphs", nargs="?", const="compile", default="", choices=["compile", "nocompile"]
    )
    arguments.add_argument("--offload-graphs", action="store_true", help="graphs sleep, too: vLLM 0.32 on")
    arguments.add_argument("--expandable", action="store_true", help="with PyTorch's expandable segments")
    arguments.add_argument("--moe-backend", default="")
    arguments.add_argument("--attention", default="", help="for example TRITON_ATTN")
    arguments.add_argument(
        "--max-split-mib", type=int, default=0, help="while loading, as newer vLLMs set it"
    )
    arguments.add_argument("--cycles", type=int, default=3, help="of level 1")
    arguments.add_argument("--summary", action="store_true", help="one line for all cycles but the first")
    arguments.add_argument(
        "--first",
        choices=["as-is", "prepared", "cold"],
        default="as-is",
        help="prepared: backed up again once the weights are overwritten; cold: nothing in the background",
    )
    arguments.add_argument("--changed", action="store_true", help="a cycle with all weights overwritten")
    arguments.add_argument("--by-tag", action="store_true", help="wake tag by tag, in both orders")
    arguments.add_argument("--level2", action="store_true", help="twice, the weights written again by us")
    arguments.add_argument("--throughput", action="store_true", help="tokens a second of a fixed batch")
    arguments.add_argument("--no-fill", action="store_true", help="leave the made-up weights as they are")
    arguments.add_argument("--fill", choices=["uniform", "normal"], default="uniform", help="new weights")
    arguments.add_argument("--no-counting", action="store_true", help="cumem without the subclass")
    arguments.add_argument("--free-gib", type=float, help="have only so much of the card free")
    arguments.add_argument("--seed", type=int, default=1234)
    arguments.add_argument("--label", default="")
    options = arguments.parse_args(given)
    if options.offload_graphs and not options.graphs:
        arguments.error("--offload-graphs goes with --graphs")
    if options.expandable and options.max_split_mib:
        arguments.error("--expandable and --max-split-mib are two settings of which only one can be made")
    return options


def main() -> None:
    options = parsed()
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if options.first == "cold":
        more["POORWILL_PREPARE"] = "0"
    if options.expandable:
        more |= EXPANDABLE
    adopt(environment(options.mode, dict(os.environ), **more))
    every_line_says(mode=options.mode, label=options.label or options.quantization or options.kind)

    def whole() -> bool:
        # Only a card that is to be full gets a second process: it takes memory for itself.
        ballast = None if options.free_gib is None else Ballast(options.free_gib)
        with tempfile.TemporaryDirectory(prefix="poorwill-bench-") as folder:
            equal = run(options, ballast, Path(folder))
        emit("done", equal=equal)
        return equal

    conclude(whole)


if __name__ == "__main__":
    main()
