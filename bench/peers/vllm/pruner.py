#!/usr/bin/env python3
"""Tune vLLM's two kernels of the gated delta rule as they are, and with Poorwill's pruner under budgets of
shared memory, and print JSON lines.

    pruner.py                          # 99 and 64 KiB, as on smaller GPUs
    pruner.py --budgets-kib 48 --keys 64

No engine is started. Each call of vLLM's functions that launch the kernels has a process of its own, which
compiles everything anew. The plugin gets there as in any process of vLLM's. For each kernel it counts the
configurations, those that a pruner left, those that were compiled, and the size of the largest. All inputs
are small whole numbers, so that sums are exact in any order and results are the same bits with any
configuration.
"""

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import adopt, conclude_in_a_folder, emit, environment

KIB = 1 << 10
PACKAGES = [
    "vllm.third_party.flash_linear_attention.ops",  # from 0.26 on
    "vllm.model_executor.layers.fla.ops",
]
STATE = "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"
OUTPUT = "chunk_fwd_kernel_o"
KERNELS = {"chunk_delta_h": STATE, "chunk_o": OUTPUT}
HEADS, VALUES, CHUNK, CHUNKS = 4, 128, 64, 3
CHILD_S = 240
SPARSE = 32  # of so many elements, one is not zero


class Watched:
    """A kernel of which it is seen what its autotuner leaves and what is compiled."""

    def __init__(self, kernel: Any) -> None:
        self.configurations = self.kept = 0
        self.compiled: list[Any] = []
        self.tried = 0
        tuner = kernel
        while not hasattr(tuner, "prune_configs"):
            tuner = tuner.fn
        jit = tuner
        while not hasattr(jit, "_do_compile"):
            jit = jit.fn
        prune, do_compile = tuner.prune_configs, jit._do_compile

        def prune_configs(arguments: Any) -> list[Any]:
            left = prune(arguments)
            self.configurations, self.kept = len(tuner.configs), len(left)
            return left

        def compile_one(*args: Any, **options: Any) -> Any:
            self.tried += 1
            made = do_compile(*args, **options)
            self.compiled.append(made)
            return made

        tuner.prune_configs, jit._do_compile = prune_configs, compile_one

    def figures(self) -> dict[str, int]:
        return {
            "configurations": self.configurations,
            "kept": self.kept,
            "compiled": self.tried,
            "largest_shared_bytes": max((made.metadata.shared for made in self.compiled), default=0),
        }


def operations() -> dict[str, Any]:
    """vLLM's modules with the kernels, by the names that they have in every version."""
    for package in PACKAGES:
        try:
            return {name: importlib.import_module(f"{package}.{name}") for name in KERNELS}
        except ModuleNotFoundError as error:
            if error.name is None or not package.startswith(error.name):
                raise
    raise RuntimeError(f"this vLLM has none of {', '.join(PACKAGES)}")


def tuned(modules: dict[str, Any], keys: int) -> dict[str, Any]:
    """Runs both functions once, which tunes their kernels. Returns what they compute."""
    torch = importlib.import_module("torch")
    generator = torch.Generator("cuda").manual_seed(0)

    def numbers(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        drawn = torch.randint(0, 2 * SPARSE, shape, generator=generator, device="cuda")
        return ((drawn == 0).to(torch.float32) - (drawn == 1).to(torch.float32)).to(dtype)

    tokens = CHUNK * CHUNKS
    g = torch.zeros(1, tokens, HEADS, device="cuda")
    q, k, w = (numbers(1, tokens, HEADS, keys) for _ in range(3))
    values = numbers(1, tokens, HEADS, VALUES)
    start = numbers(1, HEADS, VALUES, keys, dtype=torch.float32)
    h, v_new, final = modules["chunk_delta_h"].chunk_gated_delta_rule_fwd_h(
        k=k, w=w, u=values, g=g, initial_state=start, output_final_state=True
    )
    states = numbers(1, CHUNKS, HEADS, VALUES, keys)
    output = modules["chunk_o"].chunk_fwd_o(q=q, k=k, v=values, h=states, g=g, scale=0.125)
    torch.cuda.synchronize()
    return {name: made.cpu() for name, made in dict(h=h, v_new=v_new, final=final, output=output).items()}


def child(keys: int, into: Path) -> bool:
    """A process that tunes once, as its environment says, and leaves behind what was computed and seen."""
    importlib.import_module("vllm.plugins").load_general_plugins()
    modules = operations()
    watched = {name: Watched(vars(modules[module])[name]) for module, name in KERNELS.items()}
    results = tuned(modules, keys)
    seen = {name: each.figures() for name, each in watched.items()}
    importlib.import_module("torch").save({"results": results, "seen": seen}, into)
    return True


def ran(keys: int, budget_kib: int | None, folder: Path) -> dict[str, Any]:
    """What such a process has left behind."""
    name = f"{budget_kib or 'stock'}"
    chosen = environment("none", dict(os.environ), TRITON_CACHE_DIR=str(folder / f"cache-{name}"))
    for variable in ("POORWILL_TRITON", "POORWILL_TRITON_SHARED_MEMORY"):
        chosen.pop(variable, None)
    if budget_kib is not None:
        chosen |= {"POORWILL_TRITON": "1", "POORWILL_TRITON_SHARED_MEMORY": f"{budget_kib}KiB"}
    into = folder / f"{name}.pt"
    command = [sys.executable, "-B", __file__, "--keys", str(keys), "--into", str(into)]
    subprocess.run(command, env=chosen, stdout=sys.stderr, check=True, timeout=CHILD_S)
    return importlib.import_module("torch").load(into)


def equal(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether all results are the same bits."""
    same = importlib.import_module("torch").equal
    return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)


def good(seen: dict[str, int], stock: dict[str, int], budget_bytes: int) -> bool:
    """Whether nothing was compiled but what was kept, and all of that fits; one may stay that does not."""
    fits = seen["largest_shared_bytes"] <= budget_bytes or seen["kept"] == 1
    are_gone = seen["kept"] < seen["configurations"] or stock["largest_shared_bytes"] <= budget_bytes
    all_were_tried = stock["compiled"] == stock["configurations"] == seen["configurations"]
    return 1 <= seen["kept"] == seen["compiled"] and fits and are_gone and all_were_tried


def run(options: argparse.Namespace, folder: Path) -> bool:
    stock = ran(options.keys, None, folder)
    for name, seen in stock["seen"].items():
        emit("stock", kernel=name, keys=options.keys, **seen)
    all_good = True
    for budget_kib in options.budgets_kib:
        pruned = ran(options.keys, budget_kib, folder)
        same = equal(pruned["results"], stock["results"])
        for name, seen in pruned["seen"].items():
            ok = same and good(seen, stock["seen"][name], budget_kib * KIB)
            all_good = all_good and ok
            emit("pruned", kernel=name, budget_kib=budget_kib, keys=options.keys, **seen, equal=same, ok=ok)
    return all_good


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budgets-kib", type=int, nargs="+", default=[99, 64], help="what a block may have")
    parser.add_argument("--keys", type=int, choices=[64, 128, 256], default=128, help="size of a head's keys")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.budgets_kib) < 1:
        parser.error("--budgets-kib are 1 or more")
    if options.into:
        child(options.keys, options.into)
        return
    adopt(environment("none", dict(os.environ)))
    conclude_in_a_folder(lambda folder: run(options, folder))


if __name__ == "__main__":
    main()
