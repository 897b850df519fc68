"""Puts NumPy arrays to sleep and wakes them, on any machine: `python -m poorwill.demo`.

The memory is the host device's, shared with NumPy by DLPack, so it needs neither a GPU nor PyTorch. Every
byte is compared after each wake. The exit code is 0 for success, 1 for wrong bytes or an error, and 2 for
wrong usage.
"""

import argparse
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import poorwill

MIB = 1 << 20

SIZES_MIB = (64, 16 << 10)


@dataclass(frozen=True)
class Row:
    """The result for one array."""

    tag: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    asleep: str
    expected: str
    found: str
    address_kept: bool

    @property
    def is_right(self) -> bool:
        return self.found == self.expected and self.address_kept


@dataclass(frozen=True)
class Cycle:
    """One sleep and the wake after it."""

    changed_bytes: int
    sleep: poorwill.SleepReport
    wake: poorwill.WakeReport

    def as_text(self) -> list[str]:
        asleep, awake = self.sleep, self.wake
        changed = f"with {_size(self.changed_bytes)} changed" if self.changed_bytes else "for the first time"
        return [
            f"asleep {changed}: {_size(asleep.released_bytes)} released, {_size(asleep.copied_bytes)} "
            f"copied, {_size(asleep.discarded_bytes)} dropped, in {asleep.seconds:.3f} s",
            f"awake again: {_size(awake.copied_bytes)} copied back, {_size(awake.verified_bytes)} verified "
            f"by digest, {_size(awake.zeroed_bytes)} zeroed, in {awake.seconds:.3f} s",
        ]


@dataclass(frozen=True)
class Shown:
    """The demo's results."""

    device: str
    rows: list[Row]
    cycles: list[Cycle]

    @property
    def is_right(self) -> bool:
        return all(row.is_right for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "arrays": [{**vars(row), "shape": list(row.shape)} for row in self.rows],
            "cycles": [
                {
                    "changed_bytes": cycle.changed_bytes,
                    "sleep": cycle.sleep.as_dict(),
                    "wake": cycle.wake.as_dict(),
                }
                for cycle in self.cycles
            ],
            "ok": self.is_right,
        }

    def as_text(self) -> str:
        heads = ("tag", "array", "size", "asleep", "after waking", "address")
        lines = [
            (
                row.tag,
                f"{row.dtype} {'x'.join(map(str, row.shape))}",
                _size(row.bytes),
                row.asleep,
                row.found if row.is_right else f"{row.found}, not {row.expected}",
                "the same" if row.address_kept else "another",
            )
            for row in self.rows
        ]
        text = [f"NumPy arrays on {self.device}", "", *_table([heads, *lines]), ""]
        for cycle in self.cycles:
            text += cycle.as_text()
        return "\n".join([*text, "", "Every byte is right." if self.is_right else "Not every byte is right."])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo, and returns the exit code."""
    about = "Puts NumPy arrays to sleep and wakes them, without a GPU."
    parser = argparse.ArgumentParser(prog="python -m poorwill.demo", description=about)
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--size", type=_demo_size, default=96 * MIB, help="of all arrays: 64MiB to 16GiB")
    chosen = parser.parse_args(arguments)
    try:
        numpy = importlib.import_module("numpy")
    except ImportError as error:
        return _failed(f"the demo needs NumPy ({error}): pip install numpy")
    if _version(numpy) < (2, 2):
        older = f"NumPy {numpy.__version__} makes arrays of lent memory that cannot be written to"
        return _failed(f"the demo needs NumPy 2.2 ({older}): pip install --upgrade numpy")
    try:
        shown = show(numpy, chosen.size)
    except poorwill.PoorwillError as error:
        return _failed(str(error))
    try:
        print(json.dumps(shown.as_dict()) if chosen.json else shown.as_text(), flush=True)
    except OSError as error:
        # Otherwise Python flushes again at exit, and fails with another code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _failed(f"what was found cannot be printed: {error}")
    return 0 if shown.is_right else 1


def show(numpy: Any, size_bytes: int) -> Shown:
    """Takes arrays of `size_bytes` through two cycles, and compares them."""
    arena = poorwill.arena(f"host:{2 * size_bytes}", "demo")
    try:
        return _show(numpy, arena, size_bytes)
    finally:
        arena.close()


def _show(numpy: Any, arena: poorwill.Arena, size_bytes: int) -> Shown:
    columns = 1024
    blocks = [
        arena.empty((size_bytes * 2 // 3 // (4 * columns), columns), "float32", "weights"),
        arena.empty(size_bytes // 4, "uint8", "kv_cache"),
        arena.empty(size_bytes // 16 // 8, "int64", "runtime"),
    ]
    # They keep their addresses. Nothing may access them while they sleep.
    arrays = [numpy.from_dlpack(block) for block in blocks]
    noise = numpy.random.default_rng(7)
    for array in arrays:
        array[...] = noise.integers(0, 100, array.shape, dtype=numpy.uint8)

    weights = arrays[0]
    asleep: dict[str, str] = {}
    found = ["identical" for _ in arrays]
    kept = [True for _ in arrays]
    cycles = []
    for changed in (0, MIB // 4 // columns):
        weights[:changed] += 1
        before = [_digest(array) for array in arrays]
        slept = arena.sleep()
        asleep = dict(arena.state())
        woken = arena.wake(verify="all")
        cycles.append(Cycle(changed * columns * 4, slept, woken))
        for nth, (array, digest) in enumerate(zip(arrays, before, strict=True)):
            now = "identical" if _digest(array) == digest else "wrong" if array.any() else "zeros"
            # A wrong result stays wrong, and zeros that were zeros before count as identical.
            if found[nth] != "wrong" and now != "identical":
                found[nth] = now
            kept[nth] &= numpy.from_dlpack(blocks[nth]).ctypes.data == array.ctypes.data
    rows = [
        Row(
            tag=block.tag,
            dtype=block.dtype,
            shape=block.shape,
            bytes=block.nbytes,
            asleep=asleep[block.tag].removeprefix("asleep_").replace("_", " "),
            expected="zeros" if block.tag == "kv_cache" else "identical",
            found=found[nth],
            address_kept=kept[nth],
        )
        for nth, block in enumerate(blocks)
    ]
    return Shown(arena.device, rows, cycles)


def _version(numpy: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in numpy.__version__.split(".")[:2])


def _digest(array: Any) -> bytes:
    return hashlib.blake2b(array.data).digest()


def _size(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.10g} MiB" if size_bytes % MIB == 0 else f"{size_bytes / MIB:.2f} MiB"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _demo_size(text: str) -> int:
    try:
        size_bytes = poorwill.parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not SIZES_MIB[0] <= size_bytes / MIB <= SIZES_MIB[1]:
        raise argparse.ArgumentTypeError(f"`{text}` is not between 64MiB and 16GiB")
    return size_bytes


def _failed(why: str) -> int:
    print(f"poorwill.demo: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
