"""Runs the suites of the plugin in vLLM's own code: over fakes of PyTorch and NVIDIA's driver, over
PyTorch itself, and on a GPU.
"""

import os
from pathlib import Path

import pytest
from helpers import nvml_beside, run
from poorwill.vllm._versions import RUN
from suites import FAKES, marks_of, run_suite
from vllm_sources import VARIABLE, needs_sources
from vllm_sources.versions import played

pytestmark = needs_sources
each_version = pytest.mark.parametrize("version", RUN)
# Beside those that every run of the tests has.
OTHERS = [version for version in played() if version not in RUN]
SUITES = (
    *("vllm_worker_suite", "vllm_unwritten_suite", "vllm_ends_suite", "vllm_allocator_suite"),
    *("vllm_hidden_suite", "vllm_budget_suite", "vllm_graphs_suite", "vllm_connectors_suite"),
    *("vllm_record_suite", "vllm_reports_suite", "vllm_lending_suite"),
    *("vllm_starts_suite", "vllm_others_suite"),
    *("vllm_keep_suite", "vllm_unified_suite"),
)
# What a quick run has of them: starting, sleeping and waking in the newest, and how each of them ends.
QUICK = {
    ("vllm_worker_suite", RUN[-1]),
    ("vllm_unwritten_suite", RUN[-1]),
    ("vllm_hidden_suite", RUN[-1]),
    ("vllm_allocator_suite", RUN[-1]),
    ("vllm_keep_suite", RUN[-1]),
    ("vllm_unified_suite", RUN[-1]),
    ("vllm_lending_suite", RUN[-1]),
    ("vllm_ends_suite", RUN[0]),
    ("vllm_connectors_suite", RUN[0]),
    *((suite, version) for suite in ("vllm_starts_suite", "vllm_others_suite") for version in RUN),
}
each_offloader = pytest.mark.parametrize("suite", ["vllm_offload_suite", "vllm_offload_prefetch_suite"])


@pytest.mark.parametrize(
    ("suite", "version"),
    [
        pytest.param(suite, version, marks=marks_of(suite, is_long=(suite, version) not in QUICK))
        for version in RUN
        for suite in SUITES
    ],
)
def test_a_worker_over_the_fakes(
    subtests: pytest.Subtests, suite: str, version: str, fake: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ("POORWILL_FAKE_LIBCUDA", "POORWILL_EFFORT", VARIABLE)
    for name in list(os.environ):
        if name.startswith(("POORWILL_", "VLLM_", "CUDA_")) and name not in kept:
            monkeypatch.delenv(name)
    if suite == "vllm_starts_suite":
        fake = {**fake, **nvml_beside(fake)}
    if suite == "vllm_unified_suite":
        fake = {**fake, "POORWILL_FAKE_CUDA_SIMULATE": "0:integrated=1,0:capability=12.1"}
    if suite in ("vllm_lending_suite", "vllm_keep_suite"):
        shared = Path(fake["LD_LIBRARY_PATH"]) / "shared"
        shared.mkdir()
        fake = {**fake, "POORWILL_FAKE_CUDA_SHARED": str(shared)}
    # A process can have only so many arenas with tags.
    run_suite(subtests, [suite], *FAKES, "-p", "vllm_engines", "-k", version, environment=fake)


if OTHERS:

    @pytest.mark.every_minor
    @pytest.mark.parametrize("version", OTHERS)
    @pytest.mark.parametrize("suite", [*SUITES[:3], "vllm_starts_suite", "vllm_others_suite"])
    def test_a_worker_of_any_version(
        subtests: pytest.Subtests,
        suite: str,
        version: str,
        fake: dict[str, str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """What our worker promises whichever vLLM it is in, over the worker of each."""
        test_a_worker_over_the_fakes(subtests, suite, version, fake, monkeypatch)


@pytest.mark.parametrize(
    "suite", ["vllm_offload_suite", pytest.param("vllm_offload_prefetch_suite", marks=pytest.mark.long)]
)
def test_offloaders_over_the_fakes(subtests: pytest.Subtests, suite: str, fake: dict[str, str]) -> None:
    run_suite(subtests, [suite], *FAKES, "-p", "vllm_offload_models", environment=fake)


@pytest.mark.real_torch
@each_version
def test_offloaders_over_pytorch(subtests: pytest.Subtests, version: str) -> None:
    run_suite(subtests, ["vllm_offload_torch_suite"], "-k", version)


@pytest.mark.real_torch
@pytest.mark.gpu
@each_offloader
def test_offloaders_on_a_gpu(subtests: pytest.Subtests, suite: str) -> None:
    run_suite(subtests, [suite], "-p", "vllm_offload_models")


UNLOCKED = """
import fake_torch
fake_torch.install(fake_torch.Driver())
from fake_vllm import offloaders
from vllm_offload_models import Layer, expected, contents, is_in_host_memory

layer = Layer(0)
for settings in ({"cpu_offload_gb": 1}, {"offload_group_size": 1}):
    with offloaders.installed("%s") as vllm:
        try:
            vllm.make(**settings).wrap_modules(iter([layer]))
        except Exception as error:
            print(type(error).__name__, error)
        assert contents(layer) == expected(0)
        assert not any(map(is_in_host_memory, layer.parameters()))
"""


@each_version
def test_memory_that_cannot_be_locked_is_refused(version: str, fake: dict[str, str]) -> None:
    """Never kept pageable in silence, and never left on the GPU in silence."""
    failing = {"POORWILL_FAKE_CUDA_FAIL": "cuMemHostRegister_v2:1:1000000", "POORWILL_OFFLOAD": "1"}
    said = run(UNLOCKED % version, **fake, **failing).splitlines()
    assert len(said) == 2
    for line in said:
        assert line.startswith("OutOfMemoryError")
        assert "page-locking it failed" in line
        assert "set VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1 for pageable memory" in line
