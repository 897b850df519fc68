"""Checkpoints in host memory without PyTorch, on the host device."""

import json
import os
from pathlib import Path

import numpy as np
import poorwill
import pytest
from checkpoint_files import BITS, Spec, write
from helpers import DEVICE, IS_NOTHING_HELD, run
from poorwill import _native, offload


def test_bytes_of_every_type(tmp_path: Path) -> None:
    specs: list[Spec] = [(f"{dtype} {shape}", dtype, shape) for dtype in BITS for shape in ((8,), (3, 5, 16))]
    path = tmp_path / "x.safetensors"
    for pad in (0, 1, 501):
        contents = write(path, [*specs, ("empty", "F32", (0, 4))], pad=pad)
        pieces, report = _native.load_checkpoint([path], list(BITS), device=DEVICE, readers=2)
        assert [(piece.name, piece.dtype, piece.shape) for piece in pieces[:-1]] == specs
        for piece in pieces[:-1]:
            array = np.from_dlpack(piece)
            assert (array.ctypes.data, array.tobytes()) == (piece.address, contents[piece.name])
            seen = np.from_dlpack(piece.device_view())
            assert (seen.ctypes.data, seen.nbytes) == (piece.address, piece.nbytes)
            assert piece.address % (report["alignment_bytes"] or 1) == 0
        empty = pieces[-1]
        assert (empty.nbytes, empty.address, empty.shape) == (0, 0, (0, 4))
        with pytest.raises(ValueError, match="no memory"):
            np.from_dlpack(empty)
        assert report["bytes"] == sum(map(len, contents.values()))
        assert report["files"][0]["path"] == path
        read = [report[f"{method}_bytes"] for method in ("direct", "staged", "buffered")]
        assert sum(read) == report["bytes"]


def test_several_files_and_an_index(tmp_path: Path) -> None:
    first = write(tmp_path / "1.safetensors", [("a", "U8", (70_000,)), ("b", "U8", (5,))])
    second = write(tmp_path / "2.safetensors", [("c", "F64", (700,))], seed=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}')
    shards = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for paths in ([tmp_path], [index], shards, [str(shard) for shard in shards]):
        pieces, report = _native.load_checkpoint(paths, ["U8", "F64"], device=DEVICE)
        found = {piece.name: np.from_dlpack(piece).tobytes() for piece in pieces}
        assert found == {**first, **second}
        assert len(report["files"]) == 2


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    def load(*paths: str | Path) -> object:
        return _native.load_checkpoint(paths, ["U8"], device=DEVICE)

    with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
        load(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="no checkpoint was named"):
        load()
    torn = tmp_path / "torn.safetensors"
    write(torn, [("a", "U8", (1000,))])
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.raises(poorwill.PoorwillError, match=r'torn\.safetensors: tensor "a" ends at byte'):
        load(torn)
    with pytest.raises((ValueError, poorwill.PoorwillError)):
        load("a\0b")
    with pytest.raises(TypeError):
        load(7)  # type: ignore[arg-type]
    write(torn, [("a", "U8", (1000,))])
    for readers in (0, 257):
        with pytest.raises(ValueError, match="1 to 256"):
            _native.load_checkpoint([torn], ["U8"], device=DEVICE, readers=readers)
    with pytest.raises(ValueError, match="tensor `a` is of U8"):
        _native.load_checkpoint([torn], ["F32"], device=DEVICE)


def test_without_pytorch_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, [("a", "U8", (10,))])
    script = f"""
import sys
sys.modules["torch"] = None
from poorwill import offload
try:
    offload.load_checkpoint({str(path)!r}, device="{DEVICE}")
except offload.MissingTorchError:
    print("missing")
"""
    assert run(script) == "missing\n"
    assert offload.load_checkpoint is not None


HELD = f"""
import numpy as np
from pathlib import Path
from poorwill import _native
{IS_NOTHING_HELD}
poorwill.arena("{DEVICE}", host_limit=LIMIT)
"""


def test_what_does_not_fit_is_refused_and_nothing_is_held(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, [("a", "U8", (9 << 20,))])
    script = f"""
LIMIT = "8MiB"
{HELD}
for _ in range(3):
    try:
        _native.load_checkpoint([{str(path)!r}], ["U8"], device="{DEVICE}")
    except poorwill.OutOfMemoryError as error:
        assert error.needed_bytes == 9 << 20
        for word in ("9 MiB", "8 MiB", "held before"):
            assert word in str(error), error
        print("refused")
    assert is_nothing_held(LIMIT, "{DEVICE}")
"""
    assert run(script) == "refused\n" * 3


def test_a_signal_ends_a_load_before_all_was_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    nbytes = 1 << 30
    # Four tensors of a quarter each, with nothing on the disk.
    part = nbytes // 4
    header = {
        str(n): {"dtype": "U8", "shape": [part], "data_offsets": [n * part, (n + 1) * part]} for n in range(4)
    }
    said = json.dumps(header).encode()
    path.write_bytes(len(said).to_bytes(8, "little") + said)
    os.truncate(path, 8 + len(said) + nbytes)
    script = f"""
import ctypes, functools, signal
LIMIT = "1100MiB"
{HELD}
class Alarm(Exception):
    pass

def ring(*_):
    raise Alarm

def have_read():
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar:"))

signal.signal(signal.SIGALRM, ring)
load = functools.partial(_native.load_checkpoint, [{str(path)!r}], ["U8"], device="{DEVICE}", readers=1)
# Python runs handlers between its own steps, and there is none between these: the load has to stop.
steps = [functools.partial(getattr(ctypes.CDLL(None), "raise"), signal.SIGALRM), load]
before = have_read()
try:
    list(map(functools.partial.__call__, steps))
except Alarm:
    print("ended", have_read() - before < {nbytes})
assert is_nothing_held(LIMIT, "{DEVICE}")
"""
    assert run(script) == "ended True\n"


def test_other_threads_run_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    contents = write(path, [("a", "U8", (30 << 20,))])
    script = f"""
import threading
LIMIT = "200MiB"
{HELD}
found = []

def load():
    pieces, _ = _native.load_checkpoint([{str(path)!r}], ["U8"], device="{DEVICE}")
    found.append(int(np.from_dlpack(pieces[0]).sum(dtype=np.int64)))

threads = [threading.Thread(target=load) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*set(found))
assert is_nothing_held(LIMIT, "{DEVICE}")
"""
    assert run(script) == f"{sum(contents['a'])}\n"
