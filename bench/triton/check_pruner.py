"""Hold the pruner against a GPU: what it keeps launches, and what it drops does not.

    python bench/triton/check_pruner.py [--configs 40] [--seed 0]

Random configurations of a matrix product and of attention are launched one by one, without an autotuner. A
configuration that fits runs; one that does not raises `OutOfResources`. Beside it stand what `exact` with no
margin decides, and the estimates. Needs PyTorch, Triton and a GPU. Prints one JSON object; exit code 1 if
`exact` was wrong once, or an estimate kept what does not fit.
"""

import argparse
import json
import random
import sys
import time
import warnings
from typing import Any

import kernels
import poorwill.triton as pruning
import torch
import triton
from triton.runtime.errors import OutOfResources

SIZE = 512
HEADS = 2


def matmul_configs(generator: random.Random, count: int) -> list[triton.Config]:
    return [
        triton.Config(
            {
                "BLOCK_M": generator.choice([32, 64, 128, 256]),
                "BLOCK_N": generator.choice([32, 64, 128, 256]),
                "BLOCK_K": generator.choice([32, 64, 128]),
            },
            num_stages=generator.randint(1, 6),
            num_warps=generator.choice([4, 8]),
        )
        for _ in range(count)
    ]


def attention_configs(generator: random.Random, count: int) -> list[triton.Config]:
    return [
        triton.Config(
            {
                "BLOCK_M": generator.choice([32, 64, 128]),
                "BLOCK_N": generator.choice([32, 64, 128, 256]),
            },
            num_stages=generator.randint(1, 6),
            num_warps=generator.choice([4, 8]),
        )
        for _ in range(count)
    ]


def matmul_arguments() -> dict[str, Any]:
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.float16) for _ in range(2))
    c = torch.empty(SIZE, SIZE, device="cuda", dtype=torch.float16)
    return {
        "a_ptr": a,
        "b_ptr": b,
        "c_ptr": c,
        "rows": SIZE,
        "columns": SIZE,
        "depth": SIZE,
        "a_stride": SIZE,
        "b_stride": SIZE,
        "c_stride": SIZE,
    }


def attention_arguments(head_dim: int) -> dict[str, Any]:
    q, k, v, o = (torch.randn(HEADS, SIZE, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "o_ptr": o,
        "queries": SIZE,
        "keys": SIZE,
        "q_stride": head_dim,
        "kv_stride": head_dim,
        "scale": 0.1,
    }


def launches(kernel: Any, config: triton.Config, arguments: dict[str, Any], options: dict[str, Any]) -> bool:
    grid = (SIZE // 32, HEADS if kernel is kernels.attention else SIZE // 32)
    try:
        kernel[grid](*arguments.values(), **options, **config.all_kwargs())
    except OutOfResources as error:
        if error.name != "shared memory":
            raise
        return False
    torch.cuda.synchronize()
    return True


def check(kernel: Any, configs: list[triton.Config], arguments: Any, options: Any, estimate: Any) -> Any:
    started = time.monotonic()
    exact = pruning.shared_memory_pruner(pruning.exact(kernel), margin_bytes=0)
    rough = pruning.shared_memory_pruner(estimate, margin_bytes=0)
    tally = {"configs": len(configs), "fit": 0}
    tally |= {f"{way}_{what}": 0 for way in ("exact", "estimate") for what in ("wrong_keeps", "wrong_drops")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # One at a time, each beside one that fits anywhere: alone it would be kept as the smallest.
        tiny = triton.Config(dict.fromkeys(configs[0].kwargs, 32), num_stages=1, num_warps=4)
        for config in configs:
            kept = {
                "exact": config in exact([tiny, config], arguments, **options),
                "estimate": config in rough([tiny, config], arguments, **options),
            }
            fits = launches(kernel, config, arguments, options)
            tally["fit"] += fits
            for way, is_kept in kept.items():
                tally[f"{way}_wrong_keeps"] += is_kept and not fits
                tally[f"{way}_wrong_drops"] += fits and not is_kept
    return tally | {"seconds": round(time.monotonic() - started, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    generator = random.Random(given.seed)
    matmul_options = {"B_BY_COLUMNS": False, "SUM_TYPE": triton.language.float32}
    attention_options = {"HEAD_DIM": 128, "IS_CAUSAL": True}
    report = {
        "gpu": torch.cuda.get_device_name(),
        "triton": triton.__version__,
        "shared_memory_budget_bytes": pruning.shared_memory_budget(),
        "matmul": check(
            kernels.matmul,
            matmul_configs(generator, given.configs),
            matmul_arguments(),
            matmul_options,
            pruning.matmul(),
        ),
        "attention": check(
            kernels.attention,
            attention_configs(generator, given.configs),
            attention_arguments(128),
            attention_options,
            pruning.attention(element_bytes="q_ptr"),
        ),
    }
    print(json.dumps(report))
    tallies = [report["matmul"], report["attention"]]
    wrong = ("exact_wrong_keeps", "exact_wrong_drops", "estimate_wrong_keeps")
    return int(any(tally[what] for tally in tallies for what in wrong))


if __name__ == "__main__":
    sys.exit(main())
