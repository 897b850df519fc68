#!/usr/bin/env python3
"""Drop the weights of a real checkpoint at level 2, and load them again with `reload_weights`.

Writes a small checkpoint of random numbers, starts vLLM with it in this process, and goes through cycles of
sleep, wake, and reload. Between the wake and the reload poorwill has to refuse to generate; vLLM's own
allocator lets it answer with whatever the memory holds. Every other cycle wakes tag by tag, with the reload
in between, as one does to have the room of the KV cache for it. Prints JSON lines.
"""

import argparse
import faulthandler
import os
from pathlib import Path

from common import (
    MODES,
    adopt,
    conclude_in_a_folder,
    emit,
    environment,
    every_line_says,
    host_memory,
    install_entry_point,
)
from models import CHECKPOINT_GIB, layers_for, write_checkpoint

HANGS_S = 60


def attempt(action) -> dict:
    """What an action that may be refused came to."""
    try:
        value = action()
    except Exception as error:
        names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
        ours = any(name.startswith("poorwill.") and name.endswith("PoorwillError") for name in names)
        return {"refused": True, "error_type": names[0], "poorwill_error": ours, "error": str(error)[:2000]}
    return {"refused": False, "value": value}


def refusal(engine, reference: list) -> dict:
    """What comes of generating with weights that are not there."""
    faulthandler.dump_traceback_later(HANGS_S, exit=True)  # who never answers has failed
    seen = attempt(engine.tokens)
    faulthandler.cancel_dump_traceback_later()
    if not seen["refused"]:
        seen["tokens_equal"] = seen.pop("value") == reference
    return seen


def judged(mode: str, record: dict) -> bool:
    """Whether a cycle went as it has to."""
    tried = record["before_reload"]
    as_meant = mode != "poorwill" or tried is None or (tried["refused"] and tried["poorwill_error"])
    return as_meant and record["tokens_equal"] and record["bytes_equal"]


def run(options: argparse.Namespace, folder: Path) -> bool:
    import engine as engines

    layers = layers_for(options.gib)
    path = write_checkpoint(folder, layers)
    before = host_memory()
    if options.mode == "cumem":
        install_entry_point(folder / "plugin")
    chosen = engines.settings(
        path,
        mode=options.mode,
        load_format="auto",
        kv_gib=options.kv_gib,
        utilization=0.5,
        graphs=options.graphs,
    )
    engine = engines.start(options.mode, chosen)
    prints, reference = engines.fingerprint(engine.model), engine.tokens()
    emit("reference", tokens=reference, layers=layers, host=before)
    good = True
    for number in range(1, options.cycles + 1):
        by_tag = number % 2 == 0
        record: dict = {"cycle": number, "by_tag": by_tag}
        awake = engines.used_memory()
        record["sleep_s"] = round(engines.timed(engine.llm.sleep, level=2), 4)
        record["freed_gib"] = round((awake - engines.used_memory()) / (1 << 30), 3)
        record["wake_s"] = round(engines.timed(engine.llm.wake_up, tags=["weights"] if by_tag else None), 4)
        if options.mode == "poorwill":
            record["undefined"] = engine.status()["undefined"]
        # By tag the KV cache is not there yet either, and a request would wait for it.
        record["before_reload"] = None if by_tag else refusal(engine, reference)
        record["reload_s"] = round(engines.timed(engine.llm.collective_rpc, "reload_weights"), 4)
        if by_tag:
            record["wake_kv_cache_s"] = round(engines.timed(engine.llm.wake_up, tags=["kv_cache"]), 4)
        record["tokens_equal"] = engine.tokens() == reference
        record["bytes_equal"] = engines.same(prints, engines.fingerprint(engine.model))
        record["reported"] = engine.reported()
        record["ok"] = judged(options.mode, record)
        emit("reload", **record)
        good = good and record["ok"]
    # What was loaded again has to be backed up as what it is now.
    sleep_s = engines.timed(engine.llm.sleep, level=1)
    wake_s = engines.timed(engine.llm.wake_up)
    equal = engine.tokens() == reference
    emit("level1_after", sleep_s=round(sleep_s, 4), wake_s=round(wake_s, 4), tokens_equal=equal, ok=equal)
    return good and equal


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--mode", choices=[mode for mode in MODES if mode != "none"], required=True)
    arguments.add_argument("--gib", type=float, default=CHECKPOINT_GIB, help="size of the checkpoint")
    arguments.add_argument("--kv-gib", type=float, default=2)
    arguments.add_argument("--graphs", nargs="?", const="compile", default="")
    arguments.add_argument("--cycles", type=int, default=5)
    options = arguments.parse_args()
    adopt(environment(options.mode, dict(os.environ), VLLM_ENABLE_V1_MULTIPROCESSING="0"))
    every_line_says(mode=options.mode, label="reload")
    conclude_in_a_folder(lambda folder: run(options, folder))


if __name__ == "__main__":
    main()
