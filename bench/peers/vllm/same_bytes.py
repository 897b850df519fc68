#!/usr/bin/env python3
"""Start vLLM several times with the same weights, and print how many granules are the same: JSON lines.

    same_bytes.py --kind small --layers 40 --checkpoint
    same_bytes.py --kind dense --layers 8 --quantization fp8
    same_bytes.py --kind mxfp4 --layers 6

A granule of 2 MiB is the same if all its bytes are, also those that belong to no tensor. Where they differ it
says whether bytes of tensors do, and of which. With `--checkpoint` the weights are read from safetensors
files (`--kind small`), else vLLM makes them up, from the same seed each time.
"""

import argparse
import concurrent.futures
import ctypes
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from common import adopt, conclude, emit, environment, every_line_says
from models import KINDS, write_checkpoint, write_model

GRANULE_BYTES = 2 << 20
NAMES_MAX = 12  # of tensors that differ


def ranges_in(granule: int, tensors: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """What of a granule belongs to tensors: from, to, and whose it is."""
    end = granule + GRANULE_BYTES
    return [
        (max(first, granule) - granule, min(first + size, end) - granule, name)
        for first, size, name in tensors
        if first < end and first + size > granule
    ]


def digests(memory: bytes, ranges: list[tuple[int, int, str]]) -> tuple[str, str]:
    """Of all bytes, and of those in the ranges."""
    kept = bytearray(len(memory))
    for first, end, _ in ranges:
        kept[first:end] = memory[first:end]
    return hashlib.sha1(memory).hexdigest(), hashlib.sha1(kept).hexdigest()


def granules(segments: list[dict], tensors: list[tuple[int, int, str]], read) -> list[dict]:
    """Every granule of a live block: its place, its digests, and whose bytes it has."""

    def one(place: tuple[int, int, int]) -> dict:
        segment, offset, addr = place
        ranges = ranges_in(addr, tensors)
        whole, of_tensors = digests(read(addr, GRANULE_BYTES), ranges)
        names = sorted({name for _, _, name in ranges})
        return {"place": [segment, offset], "whole": whole, "of_tensors": of_tensors, "names": names}

    places = []
    for number, segment in enumerate(segments):
        live: set[int] = set()
        for block in segment["blocks"]:
            if block["kind"] == "live":
                first = (block["addr"] - segment["addr"]) // GRANULE_BYTES
                last = (block["addr"] + block["bytes"] - 1 - segment["addr"]) // GRANULE_BYTES
                live.update(range(first, last + 1))
        places += [(number, nth, segment["addr"] + nth * GRANULE_BYTES) for nth in sorted(live)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        return list(threads.map(one, places))


def compared(starts: list[list[dict]]) -> dict:
    """What the first start has in common with the others, in granules."""
    first, *others = starts
    distinct = [len({granule["whole"] for granule in start}) for start in starts]
    figures: dict = {"granules": [len(start) for start in starts], "distinct": distinct}
    figures |= {"same_place": [], "same_content": []}
    figures |= {"other_bytes_only": [], "tensors_differ": []}
    for other in others:
        by_place = {tuple(granule["place"]): granule for granule in other}
        content = Counter(granule["whole"] for granule in other)
        same_place = same_content = other_bytes = 0
        names: Counter = Counter()
        for granule in first:
            if content[granule["whole"]]:
                content[granule["whole"]] -= 1
                same_content += 1
            there = by_place.get(tuple(granule["place"]))
            if there is None:
                names["(no granule there)"] += 1
            elif there["whole"] == granule["whole"]:
                same_place += 1
            elif there["of_tensors"] == granule["of_tensors"] and there["names"] == granule["names"]:
                other_bytes += 1
            else:
                names.update(granule["names"] or ["(no tensor)"])
        figures["same_place"].append(same_place)
        figures["same_content"].append(same_content)
        figures["other_bytes_only"].append(other_bytes)
        figures["tensors_differ"].append(dict(names.most_common(NAMES_MAX)))
    return figures


def device_reader():
    """Reads device memory by address, from any thread."""
    import torch

    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    torch.cuda.synchronize()
    driver.cuCtxGetCurrent(ctypes.byref(context))

    def read(addr: int, size: int) -> bytes:
        driver.cuCtxSetCurrent(context)
        memory = ctypes.create_string_buffer(size)
        code = driver.cuMemcpyDtoH_v2(memory, ctypes.c_uint64(addr), ctypes.c_size_t(size))
        if code:
            raise RuntimeError(f"cuMemcpyDtoH of {size} bytes at {addr:#x} failed with {code}")
        return memory.raw

    return read


def run_once(options: argparse.Namespace, model: Path) -> list[dict]:
    import engine as engines
    import poorwill

    chosen = engines.settings(
        model,
        mode="poorwill",
        load_format="auto" if options.checkpoint else "dummy",
        kv_gib=options.kv_gib,
        quantization=options.quantization,
    )
    engine = engines.start("poorwill", chosen)
    tensors = [
        (addr, storage.nbytes(), name) for addr, (name, storage) in engines.storages(engine.model).items()
    ]
    segments = [segment for segment in engines.allocator().arena.snapshot() if segment["tag"] == options.tag]
    emit("poorwill", version=poorwill.__version__, segments=len(segments))
    return granules(segments, tensors, device_reader())


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--kind", choices=KINDS, default="small")
    arguments.add_argument("--layers", type=int, default=0, help="0: as many as the kind has")
    arguments.add_argument("--checkpoint", action="store_true", help="weights from files, of --kind small")
    arguments.add_argument("--quantization", default="", help="made while loading: fp8, mxfp8, fp8_per_block")
    arguments.add_argument("--kv-gib", type=float, default=1.0)
    arguments.add_argument("--starts", type=int, default=2)
    arguments.add_argument("--tag", default="weights")
    arguments.add_argument("--label", default="")
    arguments.add_argument("--model", help=argparse.SUPPRESS)
    arguments.add_argument("--into", help=argparse.SUPPRESS)
    options = arguments.parse_args(given)
    if options.checkpoint and options.kind != "small":
        arguments.error("--checkpoint goes with --kind small")
    if options.starts < 2:
        arguments.error("--starts: there is nothing to compare with fewer than 2")
    return options


def start_again(folder: Path, model: Path, number: int) -> list[dict]:
    into = folder / f"{number}.json"
    command = [sys.executable, __file__, *sys.argv[1:], "--model", str(model), "--into", str(into)]
    subprocess.run(command, check=True)
    return json.loads(into.read_text())


def main() -> None:
    options = parsed()
    every_line_says(label=options.label or " ".join([options.kind, options.quantization]).strip())
    if options.into:
        adopt(environment("poorwill", dict(os.environ), VLLM_ENABLE_V1_MULTIPROCESSING="0"))

        def child() -> bool:
            Path(options.into).write_text(json.dumps(run_once(options, Path(options.model))))
            return True

        conclude(child)

    def whole() -> bool:
        with tempfile.TemporaryDirectory(prefix="poorwill-bench-") as given:
            folder = Path(given)
            model = (
                write_checkpoint(folder, options.layers or 4)
                if options.checkpoint
                else write_model(folder, options.kind, options.layers)
            )
            starts = [start_again(folder, model, number) for number in range(options.starts)]
        emit("compared", **compared(starts))
        return True

    conclude(whole)


if __name__ == "__main__":
    main()
