"""How our worker keeps an engine in its share of a GPU; `test_vllm_suites.py` runs it."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import poorwill
import pytest
from vllm_engines import MIB, Shape, Start, filled, free_bytes

torch: Any = importlib.import_module("torch")


def snapshot() -> Any:
    """What vLLM measures, as our hook leaves it."""
    return importlib.import_module("vllm.utils.mem_utils").MemorySnapshot(device="cuda:0")


def measured(device: int = 0) -> tuple[int, int]:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


# A whole card


def test_on_a_whole_card_nothing_changes(start: Start) -> None:
    engine = start().load()
    assert (engine.worker.init_snapshot.free_memory, engine.worker.init_snapshot.total_memory) == (
        engine.free_at_start,
        1024 * MIB,
    )
    assert engine.worker.requested_memory == 768 * MIB
    seen = snapshot()
    assert (seen.free_memory, seen.total_memory) == measured()
    assert seen.cuda_memory == seen.total_memory - seen.free_memory


def test_what_was_given_back_does_not_count_as_torchs(start: Start) -> None:
    engine = start(Shape(weights=(5 * MIB,) * 6, transient=100 * MIB)).load()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    mapped = engine.reserved_at_start + engine.arena.stats().mapped_bytes
    # Segments that were carved have holes, which PyTorch knows nothing of.
    assert reserved > mapped
    seen = snapshot()
    assert seen.torch_memory == mapped
    assert seen.non_torch_memory == seen.cuda_memory - mapped == 0
    default = filled(40 * MIB, 1)
    seen = snapshot()
    assert seen.torch_memory == mapped + 40 * MIB
    assert seen.non_torch_memory == 0
    del default


def test_what_is_held_on_another_gpu_does_not_count(start: Start) -> None:
    engine = start(Shape(weights=(5 * MIB,) * 6, transient=100 * MIB)).load()
    torch.cuda.empty_cache()
    mapped = engine.reserved_at_start + engine.arena.stats().mapped_bytes
    others = poorwill.arena("cuda:1", "others")
    with others.pool("weights"):
        held = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda:1")
    assert snapshot().torch_memory == mapped
    native = importlib.import_module("poorwill._native")
    both, first, second = (native.torch_segments(ordinal)[1] for ordinal in (None, 0, 1))
    assert second == 200 * MIB
    assert both == first + second
    assert native.torch_segments(2) == (0, 0)
    del held
    others.close()
    torch.cuda.set_device(0)


def test_the_profile_sees_what_there_is(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start().load()
    gpu_worker = importlib.import_module("vllm.v1.worker.gpu_worker")
    stock, results = gpu_worker.memory_profiling, []

    @contextlib.contextmanager
    def memory_profiling(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with stock(*args, **kwargs) as result:
            results.append(result)
            yield result

    monkeypatch.setattr(gpu_worker, "memory_profiling", memory_profiling)
    mapped = engine.reserved_at_start + engine.arena.stats().mapped_bytes
    available = engine.worker.determine_available_memory()
    [result] = results
    assert result.non_torch_increase == 0
    used = engine.free_at_start - result.after_profile.free_memory + engine.reserved_at_start
    assert used == result.after_profile.torch_memory
    assert used >= mapped
    # What is left is the envelope without the weights and without what a pass takes for a while.
    lost = engine.worker.requested_memory - available - engine.shape.activations
    assert sum(engine.shape.weights) <= lost <= used + 8 * MIB


def test_snapshots_are_hooked_once(start: Start) -> None:
    engine = start().load()
    budget = importlib.import_module("poorwill.vllm._budget")
    memory = importlib.import_module("vllm.utils.mem_utils")
    hooked = memory.MemorySnapshot.measure
    budget.install(memory)
    assert memory.MemorySnapshot.measure is hooked
    assert engine.worker.init_snapshot.total_memory == 1024 * MIB


# The user's cap


@pytest.mark.parametrize(
    ("cap", "is_bytes"), [("256MiB", 256 * MIB), ("0.5", 512 * MIB), ("25%", 256 * MIB), ("0.75", 768 * MIB)]
)
def test_the_cap_stands_for_the_utilization(start: Start, cap: str, is_bytes: int) -> None:
    engine = start(gpu_memory_utilization=0.999, POORWILL_BUDGET=cap).load()
    assert engine.worker.requested_memory == is_bytes
    assert engine.arena.limit_bytes == is_bytes
    available = engine.worker.determine_available_memory()
    assert available <= is_bytes - sum(engine.shape.weights)


@pytest.mark.parametrize("cap", ["1GiB", "0.95"])
def test_a_cap_beyond_what_is_free_is_refused(start: Start, cap: str) -> None:
    taken = filled(100 * MIB, 1)
    engine = start(POORWILL_BUDGET=cap, POORWILL_WAKE_TIMEOUT="0")
    with pytest.raises(poorwill.BudgetError) as refused:
        engine.worker.init_device()
    assert f"POORWILL_BUDGET={cap} allows" in str(refused.value)
    assert "only 0.90 GiB of it is free: lower POORWILL_BUDGET" in str(refused.value)
    del taken


def test_weights_of_another_process_come_out_of_the_cap(start: Start) -> None:
    engine = start(POORWILL_BUDGET="512MiB").load()
    request = importlib.import_module("poorwill.vllm._budget").request_under("512MiB")
    snapshot, cache = engine.worker.init_snapshot, engine.worker.cache_config
    assert request(snapshot, cache) == request(snapshot, cache, 0) == 512 * MIB
    assert request(snapshot, cache, 384 * MIB) == 128 * MIB
    with pytest.raises(poorwill.BudgetError) as refused:
        request(snapshot, cache, 512 * MIB)
    said = "POORWILL_BUDGET=512MiB allows 0.50 GiB of cuda:0, 0.50 GiB of them for weights in another process"
    assert str(refused.value) == f"{said}: raise POORWILL_BUDGET"
    taken = filled(800 * MIB, 1)
    with pytest.raises(poorwill.BudgetError, match=r"in another process, and only 0\.\d\d GiB of it is free"):
        request(type(snapshot)(device="cuda:0"), cache, 128 * MIB)
    del taken


def test_the_cap_is_not_for_an_engine_that_sleeps_otherwise(start: Start) -> None:
    gpu_worker = importlib.import_module("vllm.v1.worker.gpu_worker")
    stock = gpu_worker.request_memory
    taken = filled(900 * MIB, 1)
    refused = start(POORWILL_BUDGET="256MiB", POORWILL_WAKE_TIMEOUT="0")
    with pytest.raises(poorwill.BudgetError):
        refused.worker.init_device()
    assert gpu_worker.request_memory is stock
    del taken
    engine = start().load()
    assert engine.worker.requested_memory == 256 * MIB
    assert gpu_worker.request_memory is stock
    other = gpu_worker.Worker(engine.config, 0, 0, "nowhere")
    other.init_device()
    assert other.requested_memory == 768 * MIB


def test_without_a_cap_vllms_own_check_stands(start: Start) -> None:
    taken = filled(300 * MIB, 1)
    engine = start(POORWILL_WAKE_TIMEOUT="0")
    with pytest.raises(ValueError, match="is less than desired GPU memory utilization"):
        engine.worker.init_device()
    del taken


# What cannot fit


@pytest.mark.parametrize("cache", [{}, {"kv_cache_memory_bytes": 32 * MIB}])
def test_weights_that_do_not_fit_are_refused_with_the_setting(start: Start, cache: dict[str, int]) -> None:
    engine = start(Shape(weights=(64 * MIB, 80 * MIB), transient=MIB), POORWILL_BUDGET="128MiB", **cache)
    engine.worker.init_device()
    with pytest.raises(poorwill.BudgetError) as refused:
        engine.worker.load_model()
    said = str(refused.value)
    assert said.startswith("the weights do not fit in the 0.12 GiB that the engine may use of cuda:0")
    assert "raise POORWILL_BUDGET or --gpu-memory-utilization" in said
    assert "80 MiB" in said
    assert said.endswith(
        "with POORWILL_RECORD=FOLDER the load is recorded, and `poorwill replay` says what would fit"
    )
    assert "poorwill.record(PATH)" not in said
    [load] = engine.events()
    assert load["operation"] == "load"
    assert load["error"].startswith("BudgetError: the weights do not fit")


def test_weights_that_leave_nothing_are_refused_before_the_profile(start: Start) -> None:
    engine = start(
        Shape(weights=(64 * MIB, 58 * MIB), transient=MIB, buffers=()), POORWILL_BUDGET="128MiB"
    ).load()
    # What others of the process take counts, too.
    taken = filled(10 * MIB, 1)
    with pytest.raises(poorwill.BudgetError) as refused:
        engine.worker.determine_available_memory()
    said = str(refused.value)
    assert said.startswith("of the 0.12 GiB that the engine may use of cuda:0, 0.1")
    assert "nothing is left for a KV cache: raise POORWILL_BUDGET" in said
    assert engine.runner.profiled == 0
    del taken


def test_a_cache_whose_size_is_given_is_bound_by_nothing(start: Start) -> None:
    shape = Shape(weights=(100 * MIB, 90 * MIB))
    engine = start(shape, gpu_memory_utilization=0.125, kv_cache_memory_bytes=32 * MIB).start()
    assert engine.worker.requested_memory == 128 * MIB
    assert engine.arena.limit_bytes > 1000 * MIB
    engine.worker.sleep(1)
    assert free_bytes() == engine.free_at_start
    engine.worker.wake_up()


# A cap, and a cache whose size is given


def test_a_cap_bounds_an_engine_whose_cache_is_given(start: Start) -> None:
    engine = start(Shape(page=MIB // 2), kv_cache_memory_bytes=64 * MIB, POORWILL_BUDGET="160MiB")
    engine.start(blocks=32)
    assert engine.arena.limit_bytes == 160 * MIB
    assert engine.arena.stats().mapped_bytes >= sum(engine.shape.weights) + 64 * MIB
    engine.worker.sleep(1)
    assert free_bytes() == engine.free_at_start
    engine.worker.wake_up()


def refusal_of(said: str, why: str) -> bool:
    """Whether it is that of a cache in 128 MiB, and says what to change."""
    begin = "POORWILL_BUDGET=128MiB allows the engine 0.12 GiB of cuda:0, and the KV cache of "
    settings = "--kv-cache-memory-bytes (kv_cache_memory_bytes)", "raise POORWILL_BUDGET, lower --kv-cache"
    return said.startswith(begin) and why in said and all(setting in said for setting in settings)


@pytest.mark.parametrize("cache", [128 * MIB, 1024 * MIB])
def test_a_cache_that_leaves_no_weights_is_refused_before_they_load(start: Start, cache: int) -> None:
    engine = start(kv_cache_memory_bytes=cache, POORWILL_BUDGET="128MiB")
    with pytest.raises(poorwill.BudgetError) as refused:
        engine.worker.init_device()
    assert refusal_of(str(refused.value), "leaves nothing for weights")
    assert free_bytes() == engine.free_at_start


def test_a_cache_that_does_not_fit_beside_the_weights_is_refused_before_the_profile(start: Start) -> None:
    engine = start(
        Shape(weights=(80 * MIB,), transient=MIB), kv_cache_memory_bytes=64 * MIB, POORWILL_BUDGET="128MiB"
    ).load()
    with pytest.raises(poorwill.BudgetError) as refused:
        engine.worker.determine_available_memory()
    said = str(refused.value)
    assert refusal_of(said, "does not fit beside the 0.08 GiB in use with the weights loaded: raise")
    assert "the KV cache of 0.06 GiB" in said
    assert (engine.runner.profiled, engine.runner.kv_caches) == (0, [])


def test_what_a_pass_takes_comes_out_of_the_cap_before_the_cache(start: Start) -> None:
    engine = start(
        Shape(activations=64 * MIB), kv_cache_memory_bytes=64 * MIB, POORWILL_BUDGET="128MiB"
    ).load()
    with pytest.raises(poorwill.BudgetError) as refused:
        engine.worker.determine_available_memory()
    assert refusal_of(str(refused.value), "GiB in use after a pass of the model: raise")
    assert (engine.runner.profiled, engine.runner.kv_caches) == (1, [])


# A slice


@pytest.fixture
def slice_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver speaks of the whole card, and the environment of a half."""
    monkeypatch.setenv("CUDA_DEVICE_MEMORY_LIMIT_0", "512m")


@pytest.mark.usefixtures("slice_of_a_card")
def test_a_slice_is_all_there_is(start: Start) -> None:
    engine = start().load()
    assert engine.worker.init_snapshot.total_memory == 512 * MIB
    assert engine.worker.init_snapshot.free_memory == 512 * MIB
    assert engine.worker.init_snapshot.cuda_memory == 0
    assert engine.worker.requested_memory == engine.arena.limit_bytes == 384 * MIB
    mapped = engine.reserved_at_start + engine.arena.stats().mapped_bytes
    seen = snapshot()
    assert (seen.total_memory, seen.torch_memory) == (512 * MIB, mapped)
    assert seen.free_memory <= 512 * MIB
    available = engine.worker.determine_available_memory()
    assert available < 384 * MIB


@pytest.mark.usefixtures("slice_of_a_card")
def test_a_share_is_one_of_the_slice(start: Start) -> None:
    assert start(POORWILL_BUDGET="0.5").load().worker.requested_memory == 256 * MIB
