#!/usr/bin/env python3
"""A trainer and an engine that take turns on one GPU: what moving memory takes in each step.

Two processes; JSON lines. In a step the engine sleeps, the trainer wakes, changes all that it has, sleeps,
and the engine wakes. The engine has weights and a cache that is dropped, the trainer weights and optimizer
states that change in every step. What both have fits to the share `--fit`: the rest of the card is taken.
All bytes but the cache's are compared in every step.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parent / "vllm"))

GIB, MIB = 1 << 30, 1 << 20
BLOCK = 96 * MIB
CONTEXTS_GIB = 4  # of both processes, what they compare with, and what lending keeps free


class Saver:
    """torch_memory_saver, with backups in host memory of all but the cache. Their buffers stay, or do not."""

    def __init__(self, keeps: bool):
        import torch_memory_saver

        self._saver = torch_memory_saver.torch_memory_saver
        self._saver.hook_mode = "torch"
        self._saver.retain_cpu_backup = keeps
        self._tags: list[str] = []

    def pool(self, tag: str):
        self._tags.append(tag)
        return self._saver.region(tag=tag, enable_cpu_backup=tag != "kv_cache")

    def sleep(self) -> dict:
        for tag in self._tags:
            self._saver.pause(tag)
        return {}

    def wake(self) -> dict:
        for tag in self._tags:
            self._saver.resume(tag)
        return {}


class Poorwill:
    """This project's package. What changes in every step says so."""

    def __init__(self, lends: bool):
        import poorwill

        self._poorwill, self._lends = poorwill, lends
        self._arena = poorwill.arena(lend=True) if lends else poorwill.arena()
        self._arena.declare("states", changes="volatile")

    def pool(self, tag: str):
        return self._poorwill.pool(tag=tag)

    def sleep(self) -> dict:
        report = self._poorwill.sleep(level=1, lend=self._lends)
        return {"copied": report.copied_bytes}

    def wake(self) -> dict:
        return {"copied": self._poorwill.wake().copied_bytes}


FACES = {
    "tms": (Saver, False),
    "tms-retain": (Saver, True),
    "poorwill": (Poorwill, False),
    "poorwill-lending": (Poorwill, True),
}


def serve(options: argparse.Namespace) -> None:
    """One of the two: does what each line of standard input says, and answers with a line."""
    import torch

    # Kept by PyTorch's own pool, for comparing.
    torch.empty(6 * BLOCK, dtype=torch.uint8, device="cuda")
    face, switch = FACES[options.allocator]
    allocator = face(switch)
    tensors: dict[str, list] = {}
    for tag, gib in json.loads(options.holds).items():
        with allocator.pool(tag):
            blocks = range(round(gib * GIB / BLOCK))
            tensors[tag] = [torch.empty(BLOCK // 4, dtype=torch.int32, device="cuda") for _ in blocks]
    for held in tensors.values():
        for nth, tensor in enumerate(held):
            tensor.random_(generator=torch.Generator(device="cuda").manual_seed(nth))
    step = 0

    def work() -> dict:
        """Compares all bytes and changes those that change in every step. A dropped cache is written anew."""
        nonlocal step
        wrong = 0
        for tag, held in tensors.items():
            for nth, tensor in enumerate(held):
                if tag == "kv_cache":
                    tensor.fill_(step)
                    continue
                generator = torch.Generator(device="cuda").manual_seed(nth)
                expected = torch.empty_like(tensor).random_(generator=generator)
                if tag == "states":
                    expected += step
                    wrong += not torch.equal(expected, tensor)
                    tensor += 1
                else:
                    wrong += not torch.equal(expected, tensor)
        step += 1
        return {"wrong": wrong}

    actions = {"sleep": allocator.sleep, "wake": allocator.wake, "work": work}
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        torch.cuda.synchronize()
        began = time.perf_counter()
        done = actions[line.strip()]()
        torch.cuda.synchronize()
        print(
            json.dumps({**done, "seconds": round(time.perf_counter() - began, 4)}),
            flush=True,
        )


class Process:
    """A script that answers each line with one of JSON, the first one when it is ready."""

    def __init__(self, script: str, *words: str):
        pipe = subprocess.PIPE
        command = [sys.executable, script, *words]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self._answer()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        while line and not line.startswith("{"):
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended with code {self._process.wait()}")
        return json.loads(line)

    def __call__(self, what: str) -> dict:
        self._process.stdin.write(f"{what}\n")
        return self._answer()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def run(options: argparse.Namespace) -> bool:
    from common import Ballast

    engine_holds = {"weights": options.engine_gib, "kv_cache": options.cache_gib}
    whole_gib = options.engine_gib + options.cache_gib + options.trainer_gib
    good = True
    with contextlib.ExitStack() as stack:
        stack.enter_context(Ballast(whole_gib * options.fit + CONTEXTS_GIB))
        words = [__file__, "--allocator", options.allocator, "--holds"]
        engine = stack.enter_context(contextlib.closing(Process(*words, json.dumps(engine_holds))))
        engine("sleep")
        trainer_holds = {"states": options.trainer_gib}
        trainer = stack.enter_context(contextlib.closing(Process(*words, json.dumps(trainer_holds))))
        trainer("sleep")
        engine("wake")
        for step in range(options.steps):
            rows = [engine("sleep"), trainer("wake")]
            works = [trainer("work")]
            rows += [trainer("sleep"), engine("wake")]
            works.append(engine("work"))
            wrong = sum(work["wrong"] for work in works)
            good = good and not wrong
            copied = [row.get("copied") for row in rows]
            figures = {
                "allocator": options.allocator,
                "fit": options.fit,
                "step": step,
                "moved_s": round(sum(row["seconds"] for row in rows), 4),
                "each_s": [row["seconds"] for row in rows],
                "copied_gib": [None if nbytes is None else round(nbytes / GIB, 2) for nbytes in copied],
                "wrong": wrong,
            }
            print(json.dumps(figures), flush=True)
    return good


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--allocator", choices=list(FACES), required=True)
    arguments.add_argument("--engine-gib", type=float, default=16, help="the engine's weights")
    arguments.add_argument("--cache-gib", type=float, default=8, help="the engine's cache")
    arguments.add_argument("--trainer-gib", type=float, default=24, help="the trainer's weights and states")
    arguments.add_argument(
        "--fit",
        type=float,
        default=1.0,
        help="how much of both fits, at least the larger",
    )
    arguments.add_argument("--steps", type=int, default=4)
    arguments.add_argument("--holds", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    sizes = [options.engine_gib, options.cache_gib, options.trainer_gib, options.fit, options.steps]
    if min(sizes) <= 0:
        arguments.error("sizes, --fit and --steps are more than 0")
    if options.holds:
        serve(options)
    elif not run(options):
        sys.exit(1)


if __name__ == "__main__":
    main()
