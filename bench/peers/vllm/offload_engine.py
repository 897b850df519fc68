#!/usr/bin/env python3
"""A vLLM engine with a part of its weights in host memory, beside one with all of them on the GPU.

The offloaders are vLLM's own or poorwill's drop-in (`POORWILL_OFFLOAD=1`). Prints JSON lines.

    offload_engine.py --whose none --tokens-file /tmp/tokens.json     # writes what the others compare with
    offload_engine.py --whose vllm --way uva --tokens-file /tmp/tokens.json
    offload_engine.py --whose poorwill --way prefetch --graphs --sleep --tokens-file /tmp/tokens.json

Each starts vLLM in this process over the same checkpoint of random numbers. Of that 60 % are in host memory
(`uva`), or every other layer (`prefetch`). Greedy tokens are compared with those in the file. With `--sleep`
poorwill's sleep mode is on too, and the engine sleeps and wakes between.
"""

import argparse
import json
import os
from pathlib import Path

from common import (
    adopt,
    conclude_in_a_folder,
    difference,
    emit,
    environment,
    every_line_says,
    gib,
    host_memory,
)
from models import write_checkpoint

LAYERS = 16
SHARE = 0.6  # of the weights, with uva
CYCLES = 3
MOST_HOST = 1.01  # of the weights' bytes that are offloaded, what poorwill may hold of host memory


def offloading(way: str, weights_gib: float) -> dict:
    """What vllm.LLM is given of a way."""
    if way == "uva":
        return {"offload_backend": "uva", "cpu_offload_gb": round(SHARE * weights_gib, 2)}
    return {
        "offload_backend": "prefetch",
        "offload_group_size": 2,
        "offload_num_in_group": 1,
        "offload_prefetch_step": 1,
    }


def compared(tokens: list[list[int]], reference: Path, writes: bool) -> bool:
    """Whether the tokens are those of the file, which is written if that is this run's part."""
    if writes:
        reference.write_text(json.dumps(tokens))
        return True
    return json.loads(reference.read_text()) == tokens


def offloaded_bytes(offloader, model) -> int:
    """Of the weights that are in host memory, as they are there."""
    layers = getattr(offloader, "module_offloaders", None)
    if layers is not None:
        return sum(each.offloaded_bytes for layer in layers for each in layer._param_offloaders.values())
    moved = [one for one in model.parameters() if getattr(one, "_vllm_is_uva_offloaded", False)]
    return sum(parameter.nbytes for parameter in moved)


def host_figures(offloader, model) -> dict:
    """Host memory beside the weights in it; the offloader's own account is there with poorwill's alone."""
    weights, held = offloaded_bytes(offloader, model), getattr(offloader, "host_bytes", None)
    figures = {"offloaded_gib": gib(weights), "host_held_gib": gib(held)}
    if held is None:
        return figures
    return {**figures, "host_ok": 0 < weights <= held <= MOST_HOST * weights}


def run(options: argparse.Namespace, folder: Path) -> bool:
    import engine as engines

    mode = "poorwill" if options.sleep else "none"
    path = write_checkpoint(folder, LAYERS)
    weights_gib = sum(file.stat().st_size for file in path.glob("*.safetensors")) / (1 << 30)
    chosen = engines.settings(
        path,
        mode=mode,
        load_format="auto",
        kv_gib=1,
        utilization=0.5,
        graphs="compiled" if options.graphs else "",
    )
    if options.whose != "none":
        chosen |= offloading(options.way, weights_gib)
    host = host_memory()
    engine = engines.start(mode, chosen)
    from vllm.model_executor import offloader

    kind = type(offloader.get_offloader())
    name = f"{kind.__module__}.{kind.__qualname__}"
    if (kind.__module__.split(".")[0] == "poorwill") != (options.whose == "poorwill"):
        raise RuntimeError(f"whose {options.whose}, but the offloader is a {name}")
    writes = options.whose == "none" and not options.sleep
    equal = compared(engine.tokens(), options.tokens_file, writes)
    held = {} if options.whose == "none" else host_figures(offloader.get_offloader(), engine.model)
    good = equal and held.get("host_ok", True)
    emit(
        "engine",
        weights_gib=round(weights_gib, 3),
        offloader=name,
        host_added_gib=difference(host_memory(), host),
        tokens_equal=equal,
        **held,
        tokens_per_s=engine.throughput(options.rounds) if options.rounds else None,
    )
    for cycle in range(1, CYCLES + 1 if options.sleep else 1):
        sleep_s = engines.timed(engine.llm.sleep, level=1)
        asleep = engines.used_memory()
        wake_s = engines.timed(engine.llm.wake_up)
        equal = compared(engine.tokens(), options.tokens_file, False)
        good = good and equal
        emit(
            "cycle",
            cycle=cycle,
            sleep_s=round(sleep_s, 3),
            wake_s=round(wake_s, 3),
            asleep_used_bytes=asleep,
            tokens_equal=equal,
        )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--whose", choices=["none", "vllm", "poorwill"], required=True)
    parser.add_argument("--way", choices=["uva", "prefetch"], help="how weights get to the GPU")
    parser.add_argument("--graphs", action="store_true", help="compiled, with CUDA graphs")
    parser.add_argument("--sleep", action="store_true", help="poorwill's sleep mode, and cycles of it")
    parser.add_argument("--rounds", type=int, default=3, help="of the throughput; 0 for none")
    parser.add_argument("--tokens-file", type=Path, required=True, help="tokens to compare with")
    options = parser.parse_args()
    if (options.whose == "none") != (options.way is None):
        parser.error("--way goes with --whose vllm and --whose poorwill")
    if options.whose == "vllm" and options.sleep:
        parser.error("--sleep goes with --whose none and --whose poorwill")
    more = {"POORWILL_OFFLOAD": "1"} if options.whose == "poorwill" else {}
    start = {name: value for name, value in os.environ.items() if name != "POORWILL_OFFLOAD"}
    mode = "poorwill" if options.sleep else "none"
    adopt(environment(mode, start, VLLM_ENABLE_V1_MULTIPROCESSING="0", **more))
    every_line_says(whose=options.whose, way=options.way, graphs=options.graphs, sleep=options.sleep)
    conclude_in_a_folder(lambda folder: run(options, folder))


if __name__ == "__main__":
    main()
