"""A start beside other processes, which take and give back memory meanwhile; `test_vllm_suites.py` runs it.

NVML's fake lists this process. The other's memory is really this one's, and is taken off what NVML says.
"""

import functools
import importlib
import logging
from collections.abc import Iterator
from typing import Any

import poorwill
import pytest
from fake_torch import driver
from fake_vllm import worker_parts
from vllm_engines import BLOCKS, MIB, Engine, Shape, Start, acting, filled

torch: Any = importlib.import_module("torch")

GRAPHS: dict[str, Any] = {"enforce_eager": False, "cudagraph_mode": "FULL"}
FOREVER = "3600"
OTHERS_BYTES = 160 * MIB
OWN = -1


class Tenant:
    """Another process on the GPU."""

    def __init__(self) -> None:
        self._driver = driver.Driver()
        self._address = self.nbytes = 0
        self.figure: int | None = OWN
        """What NVML says of this process: the truth, another figure, or nothing."""

    def take(self, nbytes: int = OTHERS_BYTES) -> None:
        self._address = self._driver.allocate(nbytes, 0, 0)
        assert self._address
        self.nbytes = nbytes

    def free(self) -> None:
        if self.nbytes:
            self._driver.free(self._address, self.nbytes, 0, 0)
            self.nbytes = 0


class Seen:
    """A budget with NVML's figure of this process without the tenant's memory."""

    def __init__(self, budget: Any, tenant: Tenant) -> None:
        self._budget = budget
        real = budget.process_used_bytes
        assert real is not None
        self.process_used_bytes = tenant.figure
        if tenant.figure == OWN:
            self.process_used_bytes = real - tenant.nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._budget, name)


@pytest.fixture
def tenant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tenant]:
    made = Tenant()
    native: Any = importlib.import_module("poorwill._native")
    stock = native.budget
    monkeypatch.setattr(native, "budget", lambda *given: Seen(stock(*given), made))
    yield made
    made.free()


def figures(engine: Engine) -> tuple[int, ...]:
    """What the start makes of the GPU's memory."""
    worker = engine.worker
    if not hasattr(engine.runner, "model"):
        worker.load_model()
    available = worker.determine_available_memory()
    worker.initialize_from_config(worker_parts.kv_config(engine.shape, BLOCKS))
    worker.compile_or_warm_up_model()
    graphs = worker._graphs
    assert graphs is not None
    found = (
        available,
        int(worker.requested_memory),
        int(worker.cudagraph_memory_estimate),
        int(graphs.graphs_bytes),
    )
    # Beside others it is measured as by everybody again.
    assert engine.snapshot().free_memory == torch.cuda.mem_get_info()[0]
    engine.end()
    return found


def opened(start: Start, **settings: Any) -> Engine:
    engine = start(Shape(builder=4096), **GRAPHS, **settings)
    engine.worker.init_device()
    return engine


MOMENTS = ("load_model", "profile_run", "initialize_kv_cache", "capture")
CAPS = pytest.mark.parametrize(
    "cap", [{"gpu_memory_utilization": 0.5}, {"POORWILL_BUDGET": "512MiB"}], ids=["share", "cap"]
)


@CAPS
@pytest.mark.parametrize("takes", [False, True], ids=["gives-back", "takes"])
def test_a_start_measures_what_is_its_own(
    start: Start, tenant: Tenant, cap: dict[str, Any], takes: bool
) -> None:
    alone = figures(opened(start, **cap))
    assert alone[0] > 0
    assert alone[2] > 0
    for moment in MOMENTS:
        if not takes:
            tenant.take()
        act = tenant.take if takes else tenant.free
        assert figures(acting(opened(start, **cap), moment, act)) == alone, moment
        assert bool(tenant.nbytes) == takes
        tenant.free()


def test_a_cap_still_bounds_what_is_its_own(start: Start, tenant: Tenant) -> None:
    """Also where someone else gives back as much."""
    tenant.take()
    engine = acting(opened(start, POORWILL_BUDGET="128MiB"), "load_model", tenant.free)
    engine.worker.load_model()
    taken = filled(128 * MIB, 1)
    with pytest.raises(poorwill.BudgetError, match="nothing is left for a KV cache"):
        engine.worker.determine_available_memory()
    del taken


def test_without_nvml_the_gpu_is_measured_as_by_vllm(
    start: Start, tenant: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    tenant.figure = None
    with caplog.at_level(logging.DEBUG, "vllm.poorwill"):
        alone = figures(opened(start))
    assert "the start measures all of cuda:0, as NVML does not list this process" in caplog.text
    smaller = figures(acting(opened(start), "profile_run", tenant.take))
    assert alone[0] - smaller[0] == OTHERS_BYTES
    engine = acting(opened(start, gpu_memory_utilization=0.5), "profile_run", tenant.free)
    engine.worker.load_model()
    with pytest.raises(AssertionError, match="Error in memory profiling"):
        engine.worker.determine_available_memory()
    assert "NVML does not list this process, so what others give back" in caplog.text


@pytest.mark.parametrize("figure", [MIB, None])
def test_a_figure_that_is_no_longer_ours_is_given_up(
    start: Start,
    tenant: Tenant,
    caplog: pytest.LogCaptureFixture,
    figure: int | None,
) -> None:
    """One of another process with our number, in a container with its own."""
    alone = figures(opened(start))
    engine = opened(start)
    tenant.figure = figure
    assert figures(engine)[0] == alone[0]
    [warned] = [line for line in caplog.messages if "goes on with the free memory of cuda:0" in line]
    assert warned.startswith("NVML")


# Waiting


class Looks:
    """Counts the looks at the GPU, and has the tenant give back before one of them."""

    def __init__(self, tenant: Tenant, monkeypatch: pytest.MonkeyPatch, frees_before: int) -> None:
        self.count = 0
        snapshot = importlib.import_module("vllm.utils.mem_utils").MemorySnapshot
        measure = snapshot.measure

        # Keeps the mark of what our hook has corrected already.
        @functools.wraps(measure)
        def measured(of: Any) -> None:
            self.count += 1
            if self.count == frees_before:
                tenant.free()
            measure(of)

        monkeypatch.setattr(snapshot, "measure", measured)


@CAPS
def test_a_start_waits_for_what_the_engine_before_gives_back(
    start: Start,
    tenant: Tenant,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cap: dict[str, Any],
) -> None:
    alone = figures(opened(start, **cap))
    tenant.take(600 * MIB)
    engine = start(Shape(builder=4096), **GRAPHS, **cap, POORWILL_WAKE_TIMEOUT=FOREVER)
    looks = Looks(tenant, monkeypatch, frees_before=4)
    with caplog.at_level(logging.INFO, "vllm.poorwill"):
        engine.worker.init_device()
    assert looks.count == 4
    assert "GiB that another process gave back" in caplog.text
    assert figures(engine) == alone


def test_what_is_free_is_not_waited_for(
    start: Start, tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant.take()
    engine = start(POORWILL_WAKE_TIMEOUT=FOREVER)
    looks = Looks(tenant, monkeypatch, frees_before=2)
    engine.worker.init_device()
    assert looks.count == 1


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"gpu_memory_utilization": 0.5}, ValueError, "is less than desired GPU memory utilization"),
        ({"POORWILL_BUDGET": "512MiB"}, poorwill.BudgetError, "POORWILL_BUDGET=512MiB allows 0.50 GiB"),
    ],
)
@pytest.mark.parametrize("is_listed", [True, False])
def test_what_does_not_come_is_refused_with_what_is_missing(
    start: Start, tenant: Tenant, is_listed: bool, settings: dict[str, Any], error: type[Exception], says: str
) -> None:
    tenant.figure = OWN if is_listed else None
    tenant.take(600 * MIB)
    engine = start(**settings, POORWILL_WAKE_TIMEOUT="0")
    with pytest.raises(error) as refused:
        engine.worker.init_device()
    said = str(refused.value)
    assert type(refused.value) is error
    assert says in said
    assert "After 0.0 s (POORWILL_WAKE_TIMEOUT) 0.0" in said
    held = "other processes hold 0.59 GiB" if is_listed else "this process and others hold 0."
    assert f"GiB are missing, and {held}" in said
    assert "`nvidia-smi` names them" in said


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"gpu_memory_utilization": 1.0}, ValueError), ({"POORWILL_BUDGET": "1GiB"}, poorwill.BudgetError)],
)
def test_what_no_waiting_brings_is_refused_at_once(
    start: Start, tenant: Tenant, settings: dict[str, Any], error: type[Exception]
) -> None:
    """More than the GPU has beside this process."""
    own = filled(100 * MIB, 1)
    tenant.take()
    engine = start(**settings, POORWILL_WAKE_TIMEOUT=FOREVER)
    with pytest.raises(error, match=r"After 0\.0 s"):
        engine.worker.init_device()
    del own
