"""Weights that vLLM offloads, over PyTorch: on the CPU, and on a GPU where it finds one."""

from typing import Any

import pytest
from poorwill.vllm._versions import TESTED
from vllm_offload_runs import SUITES, run_suite
from vllm_sources import needs_sources

torch: Any = pytest.importorskip("torch")

pytestmark = needs_sources


@pytest.mark.parametrize("version", TESTED)
def test_offloaders_keep_their_promises_on_the_cpu(version: str) -> None:
    assert " passed" in run_suite("vllm_offload_torch_suite.py", "-k", version)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")
@pytest.mark.parametrize("suite", SUITES)
def test_offloaders_keep_their_promises_on_a_gpu(suite: str) -> None:
    assert " passed" in run_suite(suite)
