#!/usr/bin/env python3
"""Record how much shared memory Triton gives kernels: record.py [--rows N] [--seed N] [--only KERNEL] FOLDER.

Draws random configurations of four kernels, compiles each for five kinds of GPU, and writes one table per
kernel into FOLDER. No GPU is needed, and neither is PyTorch: the compiler gets its target explicitly, and
stops as soon as it has laid out shared memory. So configurations that fit no GPU are in the tables, too.

    pip install triton==3.6.0
    pip install --no-deps flash-linear-attention==0.6.0 fla-core==0.6.0
    python bench/triton/record.py crates/triton/tests/data

It takes a few minutes. The same seed draws the same configurations. `--fix` draws among those alone that have
this value, as in `--only chunk_fwd_o --fix block_t=64`.
"""

import argparse
import csv
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gated_delta_rule
import kernels
import triton
import triton.language as tl
from compiler import shared_bytes

CAPABILITIES = [75, 80, 86, 90, 120]
ROWS_DEFAULT = 300  # of a kernel on a kind of GPU
DRAWS_MAX = 100_000
FLOATS = {2: "fp16", 4: "fp32"}
ELEMENTS = {1: "i8", **FLOATS}
WARPS = [1, 2, 4, 8, 16]
STAGES = [1, 2, 3, 4, 5, 6]

Row = dict[str, int]


@dataclass
class Launch:
    """What the compiler has to know of a launch: types of what is passed, and compile-time constants."""

    types: dict[str, str]
    constants: dict[str, Any]


@dataclass
class Kernel:
    """A kernel, the configurations to draw from, and how a configuration becomes a launch."""

    function: Callable[[], "triton.JITFunction[Any]"]
    choices: dict[str, list[int]]
    launch: Callable[[Row], Launch]


def matmul_launch(row: Row) -> Launch:
    whole = row["a_bytes"] == 1
    a, b = ELEMENTS[row["a_bytes"]], ELEMENTS[row["b_bytes"]]
    c = "i32" if whole else FLOATS[row["c_bytes"]]
    pointers = {"a_ptr": f"*{a}", "b_ptr": f"*{b}", "c_ptr": f"*{c}"}
    sizes = ["rows", "columns", "depth", "a_stride", "b_stride", "c_stride"]
    return Launch(
        types=pointers | dict.fromkeys(sizes, "i32"),
        constants={
            "BLOCK_M": row["block_m"],
            "BLOCK_N": row["block_n"],
            "BLOCK_K": row["block_k"],
            "B_BY_COLUMNS": bool(row["b_by_columns"]),
            "SUM_TYPE": tl.int32 if whole else tl.float32,
        },
    )


def attention_launch(row: Row) -> Launch:
    element = FLOATS[row["element_bytes"]]
    pointers = dict.fromkeys(["q_ptr", "k_ptr", "v_ptr", "o_ptr"], f"*{element}")
    sizes = dict.fromkeys(["queries", "keys", "q_stride", "kv_stride"], "i32")
    return Launch(
        types=pointers | sizes | {"scale": "fp32"},
        constants={
            "BLOCK_M": row["block_m"],
            "BLOCK_N": row["block_n"],
            "HEAD_DIM": row["head_dim"],
            "IS_CAUSAL": bool(row["is_causal"]),
        },
    )


def output_launch(row: Row) -> Launch:
    element = FLOATS[row["element_bytes"]]
    types = dict.fromkeys(["q", "k", "v", "h", "o"], f"*{element}") | {"scale": "fp32", "T": "i32"}
    optional = {
        "g": ("use_g", "*fp32"),
        "cu_seqlens": ("is_varlen", "*i64"),
        "chunk_indices": ("is_varlen", "*i64"),
    }
    types |= {name: kind for name, (switch, kind) in optional.items() if row[switch]}
    return Launch(
        types=types,
        constants={
            "H": 16,
            "HV": 16,
            "K": row["key_dim"],
            "V": 128,
            "BT": row["block_t"],
            "BK": row["block_k"],
            "BV": row["block_v"],
            "USE_G": bool(row["use_g"]),
            "USE_G_GAMMA": False,
            "STATE_V_FIRST": bool(row["state_v_first"]),
            "IS_VARLEN": bool(row["is_varlen"]),
        },
    )


def state_launch(row: Row) -> Launch:
    element = FLOATS[row["element_bytes"]]
    types = dict.fromkeys(["k", "v", "w", "h"], f"*{element}") | {"T": "i32"}
    optional = {
        "v_new": ("save_new_value", f"*{element}"),
        "g": ("use_g", "*fp32"),
        "gk": ("use_gk", "*fp32"),
        "h0": ("use_state", "*fp32"),
        "ht": ("use_state", "*fp32"),
        "cu_seqlens": ("is_varlen", "*i64"),
        "chunk_offsets": ("is_varlen", "*i64"),
    }
    types |= {name: kind for name, (switch, kind) in optional.items() if row[switch]}
    return Launch(
        types=types,
        constants={
            "H": 16,
            "HV": 16,
            "K": 64 * row["k_blocks"],
            "V": 128,
            "BT": row["block_t"],
            "BV": row["block_v"],
            "USE_G": bool(row["use_g"]),
            "USE_GK": bool(row["use_gk"]),
            "USE_INITIAL_STATE": bool(row["use_state"]),
            "STORE_FINAL_STATE": bool(row["use_state"]),
            "SAVE_NEW_VALUE": bool(row["save_new_value"]),
            "STATE_V_FIRST": bool(row["state_v_first"]),
            "IS_VARLEN": bool(row["is_varlen"]),
        },
    )


SIDES = [16, 32, 64, 128, 256]
SWITCH = [0, 1]

KERNELS = {
    "matmul": Kernel(
        function=lambda: kernels.matmul,
        choices={
            "block_m": SIDES,
            "block_n": SIDES,
            "block_k": SIDES,
            "a_bytes": [1, 2, 2, 4],
            "b_bytes": [1, 2, 2, 4],
            "c_bytes": [2, 4],
            "b_by_columns": SWITCH,
        },
        launch=matmul_launch,
    ),
    "attention": Kernel(
        function=lambda: kernels.attention,
        choices={
            "block_m": SIDES,
            "block_n": SIDES,
            "head_dim": SIDES,
            "element_bytes": [2, 2, 4],
            "is_causal": SWITCH,
        },
        launch=attention_launch,
    ),
    "chunk_fwd_o": Kernel(
        function=lambda: gated_delta_rule.kernel("chunk_o", "chunk_fwd_kernel_o"),
        choices={
            "block_t": [16, 32, 64, 128],
            "block_k": [16, 32, 64, 128],
            "block_v": [16, 32, 64, 128],
            "key_dim": [64, 128, 256],
            "element_bytes": [2, 2, 4],
            "use_g": SWITCH,
            "state_v_first": SWITCH,
            "is_varlen": SWITCH,
        },
        launch=output_launch,
    ),
    "chunk_gated_delta_rule_fwd_h": Kernel(
        function=lambda: gated_delta_rule.kernel(
            "chunk_delta_h", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"
        ),
        choices={
            "block_t": [16, 32, 64, 128],
            "block_v": [16, 32, 64, 128],
            "k_blocks": [1, 2, 3, 4],
            "element_bytes": [2, 2, 4],
            "use_g": SWITCH,
            "use_gk": SWITCH,
            "use_state": SWITCH,
            "save_new_value": SWITCH,
            "state_v_first": SWITCH,
            "is_varlen": SWITCH,
        },
        launch=state_launch,
    ),
}


def draws(kernel: Kernel, capability: int, generator: random.Random, fixed: Row) -> Iterator[Row]:
    """Configurations, none of them twice, until new ones become rare."""
    seen: set[tuple[int, ...]] = set()
    choices = kernel.choices | {"num_stages": STAGES, "num_warps": WARPS}
    choices |= {name: [value] for name, value in fixed.items()}
    for _ in range(DRAWS_MAX):
        row = {name: generator.choice(values) for name, values in choices.items()}
        if makes_sense(row, capability) and tuple(row.values()) not in seen:
            seen.add(tuple(row.values()))
            yield row


def makes_sense(row: Row, capability: int) -> bool:
    """Whether Triton takes it: a product of bytes needs 32 of them and gives integers, and sm_75 has none."""
    if "a_bytes" in row:
        a, b, c = row["a_bytes"], row["b_bytes"], row["c_bytes"]
        if a == 1:
            return b == 1 and c == 4 and row["block_k"] >= 32 and capability >= 80
        return b in (a, 1) if a == 2 else b == a and c == 4
    return True


def record(name: str, kernel: Kernel, rows: int, seed: int, fixed: Row, folder: Path) -> None:
    function = kernel.function()
    refused: Counter[str] = Counter()
    lines = []
    for capability in CAPABILITIES:
        generator = random.Random(f"{seed} {name} {capability}")
        taken = 0
        for row in itertools.islice(draws(kernel, capability, generator, fixed), 2 * rows):
            launch = kernel.launch(row)
            try:
                shared = shared_bytes(
                    function, launch.types, launch.constants, capability, row["num_stages"], row["num_warps"]
                )
            except (AssertionError, ValueError, RuntimeError, triton.CompilationError) as error:
                refused[f"sm_{capability}: {str(error).strip().splitlines()[-1:]}"] += 1
                continue
            lines.append({"sm": capability} | row | {"shared_bytes": shared})
            taken += 1
            if taken == rows:
                break
        print(f"{name} sm_{capability}: {taken} rows", file=sys.stderr)
    for why, times in refused.most_common():
        print(f"{name}: refused {times} times: {why}", file=sys.stderr)
    with (folder / f"{name}.csv").open("w", newline="") as table:
        writer = csv.DictWriter(table, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=ROWS_DEFAULT, help="of each kernel on each kind of GPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(KERNELS), help="record this kernel alone")
    parser.add_argument("--fix", type=fixed_choice, action="append", default=[], metavar="NAME=N")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, kernel in KERNELS.items():
        if options.only in (None, name):
            unknown = dict(options.fix).keys() - kernel.choices.keys() - {"num_stages", "num_warps"}
            if unknown:
                parser.error(f"{name} has no {', '.join(sorted(unknown))}; --only picks a kernel")
            record(name, kernel, options.rows, options.seed, dict(options.fix), options.folder)


def fixed_choice(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    return name, int(value)


if __name__ == "__main__":
    main()
