"""Runs the suites: over fakes of PyTorch and NVIDIA's driver, over PyTorch itself, and on a GPU.

What is marked `real_torch` needs PyTorch, and what is marked `gpu` a GPU that PyTorch finds.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from poorwill.sglang import _versions as sglang
from suites import FAKES, marks_of, run_suite

OFFLOADING = ("offload_suite", "offload_paths_suite")
# Where the fixtures of a suite are.
TENSORS = ("-p", "offload_tensors")
MODELS = (*TENSORS, "-p", "offload_models")
FIXTURES = {
    **dict.fromkeys((*OFFLOADING, "offload_load_suite"), TENSORS),
    **dict.fromkeys(("offload_modules_suite", "offload_lifetimes_suite", "offload_prefetch_suite"), MODELS),
}
# Versions of SGLang that differ in what several ranks do.
APART = ("0.5.12", "0.5.15.post1", "0.5.23")
# Left out of a quick run, which has pools by operations, and SGLang over the memory saver.
LONG = {
    *("pools by segments", "pools of PyTorch 2.13", "the memory saver"),
    *(f"ranks of SGLang {version}" for version in APART),
    "threads and a slow driver",
}
SLOW_DRIVER = "cuMemCreate:50,cuMemUnmap:300,cuEventRecord:200,cuEventQuery:100"


def like(version: str) -> dict[str, str]:
    """Has the fake of SGLang be like a version."""
    return {"POORWILL_TEST_SGLANG": version}


# By name: the suites, the simulated GPUs, and what else is in their environment.
OVER_FAKES: dict[str, tuple[tuple[str, ...], str, dict[str, str]]] = {
    "pools by operations": (("pools_suite",), "16GiB,16GiB", {"POORWILL_TEST_WATCH": "operations"}),
    "pools by segments": (("pools_suite",), "16GiB,16GiB", {"POORWILL_TEST_WATCH": "segments"}),
    "pools of PyTorch 2.13": (("pools_suite",), "16GiB,16GiB", {"POORWILL_TEST_PYTORCH": "empties_default"}),
    "records": (("record_suite",), "1GiB,1GiB", {}),
    "the memory saver": (("saver_suite",), "16GiB,16GiB", {}),
    "the memory saver without memory": (("saver_waits_suite",), "1GiB", {}),
    **{f"SGLang {version}": (("sglang_suite",), "16GiB,16GiB", like(version)) for version in sglang.TESTED},
    **{f"ranks of SGLang {version}": (("sglang_ranks_suite",), "64MiB", like(version)) for version in APART},
    "offloaded tensors": (OFFLOADING, "4GiB,4GiB", {}),
    "loaded tensors": (("offload_load_suite",), "4GiB,4GiB", {}),
}
# The functions that PyTorch calls for segments, without PyTorch.
OVER_THE_DRIVER: dict[str, tuple[str, dict[str, str]]] = {
    "calls": ("symbols_suite", {}),
    "carving": ("symbols_carving_suite", {}),
    "threads": ("symbols_threads_suite", {}),
    "threads and a slow driver": ("symbols_threads_suite", {"POORWILL_FAKE_CUDA_DELAY": SLOW_DRIVER}),
}
OVER_PYTORCH = (*FIXTURES, "offload_transformers_suite")
ON_A_GPU = (
    *OVER_PYTORCH,
    "offload_gpu_suite",
    "gpu_suite",
    "record_suite",
    "saver_suite",
    "saver_waits_suite",
    "sglang_suite",
    "pools_exit_suite",
    "pools_models_suite",
)


def of_other_version(run: str) -> list[pytest.MarkDecorator]:
    """What a run is marked that is of an SGLang which a quick run leaves out."""
    version = run.rpartition("SGLang ")[2]
    return [pytest.mark.other_versions] * (version in sglang.TESTED and version not in sglang.RUN)


def marked(suites_of: Mapping[str, Iterable[str]]) -> list[Any]:
    return [
        pytest.param(run, marks=[*marks_of(*suites, is_long=run in LONG), *of_other_version(run)])
        for run, suites in suites_of.items()
    ]


@pytest.mark.parametrize("run", marked({run: suites for run, (suites, *_) in OVER_FAKES.items()}))
def test_over_the_fakes(subtests: pytest.Subtests, fake: dict[str, str], run: str) -> None:
    suites, devices, more = OVER_FAKES[run]
    environment = {**fake, "POORWILL_FAKE_CUDA_DEVICES": devices, **more}
    run_suite(subtests, suites, *FAKES, *FIXTURES.get(suites[0], ()), environment=environment)


@pytest.mark.parametrize("run", marked({run: [suite] for run, (suite, _) in OVER_THE_DRIVER.items()}))
def test_over_the_driver(subtests: pytest.Subtests, fake: dict[str, str], run: str) -> None:
    suite, more = OVER_THE_DRIVER[run]
    environment = {**fake, "POORWILL_FAKE_CUDA_DEVICES": "128GiB,4GiB", **more}
    run_suite(subtests, [suite], environment=environment)


@pytest.mark.real_torch
@pytest.mark.parametrize("suite", OVER_PYTORCH)
def test_over_pytorch(subtests: pytest.Subtests, suite: str) -> None:
    run_suite(subtests, [suite], *FIXTURES.get(suite, ()), "-m", "not gpu")


@pytest.mark.real_torch
@pytest.mark.gpu
@pytest.mark.parametrize("suite", ON_A_GPU)
def test_on_a_gpu(subtests: pytest.Subtests, suite: str) -> None:
    run_suite(subtests, [suite], *FIXTURES.get(suite, ()), "-m", "gpu")


@pytest.mark.real_torch
@pytest.mark.gpu
@pytest.mark.parametrize("watch", ["operations", "segments"])
def test_pools_on_a_gpu(subtests: pytest.Subtests, watch: str) -> None:
    run_suite(subtests, ["pools_suite"], environment={"POORWILL_TEST_WATCH": watch})
