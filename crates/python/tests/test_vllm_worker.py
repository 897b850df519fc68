"""Runs the suites of our worker in vLLM's own code, over the stand-ins for PyTorch and NVIDIA's driver."""

import os

import pytest
from poorwill.vllm._versions import TESTED
from vllm_offload_runs import run_suite
from vllm_sources import VARIABLE, needs_sources


@needs_sources
@pytest.mark.parametrize("version", TESTED)
@pytest.mark.parametrize("suite", ["worker", "ends", "allocator", "budget"])
def test_engines_keep_their_promises_over_the_stand_ins(
    suite: str, version: str, fake: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("POORWILL_", "VLLM_", "CUDA_")) and name not in (
            "POORWILL_FAKE_LIBCUDA",
            VARIABLE,
        ):
            monkeypatch.delenv(name)
    plugins = ("-p", "pools_on_the_stand_in", "-p", "vllm_engines")
    # A process can have only so many arenas with tags.
    assert " passed" in run_suite(f"vllm_{suite}_suite.py", *plugins, "-k", version, **fake)
