"""What a rank's start allocates, recorded phase by phase; `test_vllm_suites.py` runs it."""

import importlib
import pickle
from pathlib import Path
from typing import Any

import poorwill
import pytest
from vllm_engines import MIB, Engine, Shape, Start

torch: Any = importlib.import_module("torch")

PHASES = ("load", "profile", "cache", "capture")
# Sizes that nothing else has.
SHAPE = Shape(weights=(33 * MIB, 21 * MIB), transient=MIB)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "made" / "records"
    monkeypatch.setenv("POORWILL_RECORD", str(folder))
    return folder


@pytest.fixture
def records(start: Start) -> Start:
    """Makes engines whose starts are recorded, as where vLLM's worker is imported with the hook."""
    recording = importlib.import_module("poorwill.vllm._recording")
    recording.install(importlib.import_module("vllm.v1.worker.gpu_worker"))
    return start


def is_on() -> bool:
    return bool(torch._C._cuda_isHistoryEnabled())


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def events(path: Path) -> list[tuple[str, int]]:
    trace = pickle.loads(path.read_bytes())["device_traces"][0]
    return [(entry["action"], entry["size"]) for entry in trace]


def test_each_phase_of_a_start_is_a_file(records: Start, folder: Path) -> None:
    engine = records(SHAPE).start()
    assert not is_on()
    assert names(folder) == {f"rank0-{phase}.pickle" for phase in PHASES}
    load, profile, cache, _ = (events(folder / f"rank0-{phase}.pickle") for phase in PHASES)
    for size in SHAPE.weights:
        assert ("alloc", size) in load
        assert ("alloc", size) not in profile
    assert ("alloc", SHAPE.activations) in profile
    caches = [tensor.nbytes for tensor in engine.runner.every_cache()]
    assert all(("alloc", size) in cache for size in caches)
    # What lives when a phase begins is in its file, too.
    segments = pickle.loads((folder / "rank0-profile.pickle").read_bytes())["segments"]
    sizes = [block["requested_size"] for segment in segments for block in segment["blocks"]]
    assert set(SHAPE.weights) <= set(sizes)
    # What sleeps and wakes is not affected.
    engine.worker.sleep(1)
    engine.worker.wake_up()
    assert engine.is_awake()


def test_vllms_own_worker_is_recorded(records: Start, folder: Path) -> None:
    gpu_worker = importlib.import_module("vllm.v1.worker.gpu_worker")
    engine = records(SHAPE)
    model = engine.config.model_config
    model.enable_sleep_mode = model.enable_cumem_allocator = False
    worker = gpu_worker.Worker(engine.config, 0, 3, "nowhere")
    worker.init_device()
    worker.load_model()
    assert names(folder) == {"rank3-load.pickle"}
    assert ("alloc", SHAPE.weights[0]) in events(folder / "rank3-load.pickle")
    worker.__dict__.clear()


def test_engines_of_one_server_have_their_own_files(records: Start, folder: Path) -> None:
    engine = records(SHAPE)
    engine.config.parallel_config.data_parallel_index = 2
    engine.load()
    assert names(folder) == {"dp2-rank0-load.pickle"}


def test_a_load_that_does_not_fit_is_recorded(records: Start, folder: Path) -> None:
    engine = records(Shape(weights=(64 * MIB, 80 * MIB), transient=MIB), POORWILL_BUDGET="128MiB")
    engine.worker.init_device()
    with pytest.raises(poorwill.BudgetError) as refused:
        engine.worker.load_model()
    path = folder / "rank0-load.pickle"
    said = str(refused.value)
    assert said.startswith("the weights do not fit in the 0.12 GiB")
    assert f"`poorwill replay {path}` says what would fit" in said
    assert "POORWILL_RECORD" not in said
    assert "poorwill.record(PATH)" not in said
    assert ("oom", 80 * MIB) in events(path)
    assert not is_on()


def started(engine: Engine) -> None:
    engine.start()
    engine.worker.sleep(1)
    engine.worker.wake_up()
    assert engine.is_awake()


def test_no_start_fails_over_its_folder(
    records: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("POORWILL_RECORD", str(tmp_path / "file" / "records"))
    started(records(SHAPE))
    for phase in PHASES:
        assert f"the start goes on without a record of the {phase}: " in caplog.text


def test_no_start_fails_over_a_record_that_cannot_be_written(
    records: Start, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def dump(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pickle, "dump", dump)
    started(records(SHAPE))
    assert "without a record of the load: " in caplog.text
    assert "No space left on device" in caplog.text
    assert names(folder) == set()
    assert not is_on()


def test_no_start_fails_within_a_record(
    records: Start, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "all.pickle"
    with poorwill.record(path):
        started(records(SHAPE))
    assert f"the record to {path} has not ended" in caplog.text
    assert names(folder) == set()
    assert ("alloc", SHAPE.weights[0]) in events(path)


def test_a_history_of_vllms_stays_on(records: Start, folder: Path) -> None:
    torch.cuda.memory._record_memory_history()
    try:
        started(records(SHAPE))
        assert is_on()
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert ("alloc", SHAPE.weights[0]) in events(folder / "rank0-load.pickle")


def test_nothing_is_recorded_without_the_variable(records: Start, tmp_path: Path) -> None:
    started(records(SHAPE))
    assert list(tmp_path.rglob("*.pickle")) == []
