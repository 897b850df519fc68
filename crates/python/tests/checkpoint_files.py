"""Safetensors files as tests write them: any types, shapes and beginnings."""

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path

# How many bits an element has.
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}

Spec = tuple[str, str, tuple[int, ...]]


def write(path: Path, specs: Iterable[Spec], *, pad: int = 0, seed: int = 1) -> dict[str, bytes]:
    """A file of tensors by name, type and shape, and what each holds. Its bytes begin `pad` further on."""
    header, contents, rng = {}, {}, random.Random(seed)
    begin = 0
    for name, dtype, shape in specs:
        nbytes = math.prod(shape) * BITS[dtype] // 8
        # Bytes that are a value of every type, also of bool's.
        contents[name] = bytes(rng.choices((0, 1), k=nbytes)) if dtype == "BOOL" else rng.randbytes(nbytes)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + nbytes]}
        begin += nbytes
    said = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(said).to_bytes(8, "little") + said + b"".join(contents.values()))
    return contents
