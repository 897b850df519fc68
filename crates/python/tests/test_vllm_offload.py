"""Weights that vLLM offloads, over the stand-ins for PyTorch and the driver."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from poorwill.vllm._versions import TESTED
from vllm_offload_runs import STUCK_S, SUITES, run_suite
from vllm_sources import needs_sources

HERE = Path(__file__).resolve().parent

pytestmark = needs_sources


@pytest.mark.parametrize("suite", SUITES)
def test_offloaders_keep_their_promises_over_the_stand_ins(suite: str, fake: dict[str, str]) -> None:
    assert " passed" in run_suite(suite, "-p", "pools_on_the_stand_in", **fake)


UNLOCKED = """
import sys
import fake_torch
fake_torch.install(fake_torch.Driver())
from fake_vllm import offloaders
from vllm_offload_models import Layer, expected, contents, held_exactly, is_in_host_memory

layer = Layer(0)
for settings in ({"cpu_offload_gb": 1}, {"offload_group_size": 1}):
    with offloaders.installed(sys.argv[1]) as vllm:
        try:
            vllm.make(**settings).wrap_modules(iter([layer]))
        except Exception as error:
            print(type(error).__name__, error)
        assert contents(layer) == expected(0)
        assert not any(map(is_in_host_memory, layer.parameters()))
"""


@pytest.mark.parametrize("version", TESTED)
def test_memory_that_cannot_be_locked_is_refused(version: str, fake: dict[str, str]) -> None:
    """Never kept pageable in silence, and never left on the GPU in silence."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    failing = {"POORWILL_FAKE_CUDA_FAIL": "cuMemHostRegister_v2:1:1000000", "POORWILL_OFFLOAD": "1"}
    ran = subprocess.run(
        [sys.executable, "-B", "-c", UNLOCKED, version],
        capture_output=True,
        text=True,
        env={**os.environ, **fake, **failing, "PYTHONPATH": path},
        timeout=STUCK_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.splitlines()
    assert len(said) == 2
    for line in said:
        assert line.startswith("OutOfMemoryError")
        assert "page-locking it failed" in line
        assert "set VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1 for pageable memory" in line
