"""What CUDA graphs take of an engine's share of a GPU; `test_vllm_suites.py` runs it.

The arithmetic of the KV cache is vLLM's own, from its sources.
"""

import importlib
import logging
import re
from typing import Any

import poorwill
import pytest
from fake_vllm import worker_parts
from vllm_engines import MIB, Engine, Shape, Start, filled, only

torch: Any = importlib.import_module("torch")

GRAPHS: dict[str, Any] = {"enforce_eager": False, "cudagraph_mode": "FULL"}
SIZES = 4
GRANULE = 2 * MIB
SHARES = (0.95, 0.92, 0.88)


def graphs() -> Any:
    return importlib.import_module("poorwill.vllm._graphs")


def gpu_worker() -> Any:
    return importlib.import_module("vllm.v1.worker.gpu_worker")


def vllm_leaves_the_estimate_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0."""
    monkeypatch.setattr(gpu_worker().envs, "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", False)


def profiles_nothing(engine: Engine) -> Engine:
    """As vLLM's second model runner does before 0.29."""
    engine.runner.profile_cudagraph_memory = lambda: 0
    return engine


def shape(**sizes: Any) -> Shape:
    """One whose small parts take little more than they have."""
    return Shape(**{"builder": 4096, **sizes})


def with_cache(engine: Engine, blocks: int) -> Engine:
    engine.worker.determine_available_memory()
    engine.worker.initialize_from_config(worker_parts.kv_config(engine.shape, blocks))
    return engine


def blocks_of(engine: Engine, size: int) -> int:
    return size // (engine.shape.page * engine.shape.layers)


def refusal(engine: Engine, step: str) -> str:
    with pytest.raises(poorwill.BudgetError) as refused:
        getattr(engine.worker, step)()
    return str(refused.value)


# What is left for the KV cache


@pytest.mark.parametrize("setting", ["gpu_memory_utilization", "POORWILL_BUDGET"])
def test_three_shares_make_three_caches(start: Start, setting: str) -> None:
    caches = []
    for share in SHARES:
        chosen: Any = share if setting == "gpu_memory_utilization" else str(share)
        engine = start(**GRAPHS, **{setting: chosen}).load()
        budget = engine.worker.requested_memory
        assert abs(budget - share * 1024 * MIB) <= 1
        weights = engine.worker._envelope.used_bytes(engine.snapshot())
        available = engine.worker.determine_available_memory()
        taken = engine.worker.cudagraph_memory_estimate
        assert taken >= engine.shape.weights[0]
        caches.append(available)
        # A workspace that a pass leaves behind is in the figure of its activations, or is not.
        lost = budget - available - weights - engine.shape.activations - taken
        assert abs(lost) <= (engine.shape.layers + 2) * GRANULE, (share, lost)
        engine.end()
    first, second, third = caches
    assert first - second == pytest.approx(0.03 * 1024 * MIB, abs=2)
    assert second - third == pytest.approx(0.04 * 1024 * MIB, abs=2)


def test_a_cap_takes_graphs_out_where_vllm_does_not(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = start(**GRAPHS, POORWILL_BUDGET="256MiB").load()
    available = counted.worker.determine_available_memory()
    counted.end()
    vllm_leaves_the_estimate_in(monkeypatch)
    engine = start(**GRAPHS, POORWILL_BUDGET="256MiB").load()
    assert engine.worker.determine_available_memory() == available
    assert engine.worker.available_kv_cache_memory_bytes == available
    engine.end()


def test_without_a_cap_vllms_switch_counts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = start(**GRAPHS, gpu_memory_utilization=0.25).load()
    available = counted.worker.determine_available_memory()
    counted.end()
    vllm_leaves_the_estimate_in(monkeypatch)
    engine = start(**GRAPHS, gpu_memory_utilization=0.25).load()
    more = engine.worker.determine_available_memory() - available
    assert more == engine.worker.cudagraph_memory_estimate > 0


@pytest.mark.parametrize(("cap", "largest"), [("256MiB", 8), ("256MiB", 128), (None, 8)])
def test_graphs_that_are_not_profiled_are_reckoned_with(
    start: Start, version: str, cap: str | None, largest: int
) -> None:
    chosen: dict[str, Any] = {"POORWILL_BUDGET": cap} if cap else {"gpu_memory_utilization": 0.25}
    eager = start(**chosen).load()
    whole = eager.worker.determine_available_memory()
    eager.end()
    engine = profiles_nothing(start(**GRAPHS, **chosen).load())
    engine.runner.compilation_config.max_cudagraph_capture_size = largest
    # 64 tokens make a pass, so that 8 take an eighth of its activations; more than there are take all.
    share = {8: 8, 128: 1}[largest]
    # What a pass leaves behind is in use, and not what it takes for a while.
    passed = engine.shape.activations - (0 if version == "0.20.2" else 4 * MIB)
    reserved = SIZES * MIB + passed // share if cap else 0
    assert whole - engine.worker.determine_available_memory() == reserved


def test_nothing_left_for_a_cache_is_refused_with_what_has_it(start: Start) -> None:
    engine = start(shape(page=4096, transient=MIB), **GRAPHS, POORWILL_BUDGET="76MiB").load()
    said = refusal(engine, "determine_available_memory")
    assert said.startswith("POORWILL_BUDGET=76MiB allows the engine 0.07 GiB of cuda:0, and with 0.0")
    assert "for a pass of the model and 0.02 GiB for CUDA graphs beside the weights nothing is left" in said
    assert "give --enforce-eager" in said
    engine.end()


def test_nothing_left_without_graphs_says_nothing_of_them(start: Start) -> None:
    engine = start(Shape(activations=60 * MIB, transient=MIB), gpu_memory_utilization=0.0859375).load()
    said = refusal(engine, "determine_available_memory")
    assert said.startswith("--gpu-memory-utilization allows the engine 0.09 GiB of cuda:0, and with 0.0")
    assert "graphs" not in said
    assert "--enforce-eager" not in said


@only("0.33.0")
@pytest.mark.parametrize("cap", [None, "256MiB"])
def test_a_cap_is_not_for_the_plan_of_another_start(
    start: Start, monkeypatch: pytest.MonkeyPatch, cap: str | None
) -> None:
    called: list[str] = []

    def apply(worker: Any) -> None:
        called.append("applied")
        worker.cache_config.kv_cache_memory_bytes = 300 * MIB

    monkeypatch.setattr(gpu_worker(), "maybe_apply_startup_plan", apply)
    monkeypatch.setattr(gpu_worker(), "maybe_save_startup_plan", lambda *_: called.append("saved"))
    engine = start(**GRAPHS, **({"POORWILL_BUDGET": cap} if cap else {})).load()
    available = engine.worker.determine_available_memory()
    engine.worker.initialize_from_config(worker_parts.kv_config(engine.shape, 16))
    engine.worker.compile_or_warm_up_model()
    assert called == ([] if cap else ["applied"])
    assert (available == 300 * MIB) == (cap is None)
    assert gpu_worker().maybe_apply_startup_plan is apply


# Profiling


@pytest.mark.parametrize("largest", [None, 0])
def test_a_profile_without_graphs_of_the_model_is_reckoned_with(start: Start, largest: int | None) -> None:
    engine = start(Shape(page=MIB, layers=8), **GRAPHS).load()
    engine.runner.compilation_config.max_cudagraph_capture_size = largest
    assert graphs().profile_cache_bytes(engine.runner) == 8 * MIB


@pytest.mark.parametrize(("is_hybrid", "layers"), [(True, 1), (False, 8)])
def test_layers_of_a_hybrid_model_share_the_profiles_cache(
    start: Start, version: str, is_hybrid: bool, layers: int
) -> None:
    engine = start(Shape(is_hybrid=is_hybrid, page=MIB, layers=8), **GRAPHS).load()
    blocks = 8 if version == "0.20.2" else 4
    assert graphs().profile_cache_bytes(engine.runner) == layers * blocks * MIB


def test_the_graphs_profile_is_refused_with_figures(start: Start, version: str) -> None:
    # The cache for the profile takes 8 blocks of 4 layers, or as many as there are sequences; and two graphs.
    engine = start(Shape(page=8 * MIB, activations=MIB), **GRAPHS, POORWILL_BUDGET="160MiB").load()
    said = refusal(engine, "determine_available_memory")
    assert said.startswith(f"profiling CUDA graphs needs {'0.25' if version == '0.20.2' else '0.13'} GiB")
    assert "max_cudagraph_capture_size" in said
    assert "--enforce-eager" in said
    assert engine.runner.kv_caches == []


def test_a_graphs_profile_that_fits_is_left_alone(start: Start) -> None:
    engine = start(Shape(page=MIB), **GRAPHS).start(blocks=16)
    assert engine.worker.cudagraph_memory_estimate > 0
    engine.worker.sleep(1)
    engine.worker.wake_up()


@pytest.mark.parametrize("setting", [{"POORWILL_BUDGET": "128MiB"}, {"gpu_memory_utilization": 0.125}])
def test_a_profile_ends_at_the_first_graph_beyond_the_budget(
    start: Start, setting: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond vLLM's own share it is logged, once."""
    engine = start(Shape(page=4096, activations=MIB), **GRAPHS, **setting).load()
    begun: list[int] = []

    def profile() -> int:
        for number in range(9):
            engine.runner.capture()
            begun.append(number)
        return 1

    engine.runner.profile_cudagraph_memory = profile
    takes = "profiling CUDA graphs takes the engine to 0.1"
    if "POORWILL_BUDGET" not in setting:
        with caplog.at_level(logging.WARNING, "vllm.poorwill"):
            engine.worker.determine_available_memory()
            # What captured graphs take is another matter, and logged as well.
            for _ in range(2):
                engine.worker._graphs._hold(engine.worker._envelope.requested_bytes + MIB)
        assert caplog.text.count(takes) == caplog.text.count("1 MiB too much") == 1
        assert len(begun) == 9
        return
    said = refusal(engine, "determine_available_memory")
    assert said.startswith(takes)
    assert "of cuda:0, and it may use 0.12 GiB: raise POORWILL_BUDGET or --gpu-memory-utilization" in said
    # Each takes 24 MiB beside weights of 32, and the last is one too much.
    assert len(begun) == 4
    assert engine.runner.profile_cudagraph_memory is profile


@pytest.mark.parametrize("step", ["profiling", "capturing"])
def test_graphs_that_find_no_memory_are_refused_in_words(start: Start, step: str) -> None:
    engine = start(Shape(page=4096), **GRAPHS).load()
    if step == "capturing":
        with_cache(engine, 16)
    taken = filled(torch.cuda.mem_get_info()[0] - 20 * MIB, 1)
    enter = torch.cuda.graph.__enter__
    if step == "capturing":
        said = refusal(engine, "compile_or_warm_up_model")
    else:
        # The share is not what is short: other processes' memory is.
        engine.worker._envelope.free_at_start_bytes -= taken.numel()
        said = refusal(engine, "determine_available_memory")
    assert said.startswith(
        f"{step} CUDA graphs ran out of memory: of the 0.75 GiB that the engine may use of"
    )
    assert "are in use: " in said
    assert "give --enforce-eager (" in said
    assert "Tried to allocate" in said
    assert torch.cuda.graph.__enter__ is enter
    del taken


def test_other_errors_of_a_capture_stay_what_they_are(start: Start) -> None:
    engine = with_cache(start(Shape(page=4096), **GRAPHS).load(), 16)

    def failing() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    engine.runner.capture = failing
    with pytest.raises(RuntimeError, match=r"^operation not permitted") as failed:
        engine.worker.compile_or_warm_up_model()
    assert not isinstance(failed.value, poorwill.PoorwillError)


# Capturing


def fitting(said: str) -> int:
    """The size of a KV cache that a refusal recommends."""
    [found] = re.findall(r"--kv-cache-memory-bytes (\d+)", said)
    return int(found)


def given(start: Start, cache: int, unprofiled: int) -> Engine:
    of = shape(unprofiled=unprofiled)
    engine = start(of, **GRAPHS, kv_cache_memory_bytes=cache, POORWILL_BUDGET="192MiB").load()
    return with_cache(engine, blocks_of(engine, cache))


def test_graphs_count_against_a_cap_with_a_cache_that_is_given(start: Start) -> None:
    cache = 96 * MIB
    engine = given(start, cache, 20 * MIB)
    said = refusal(engine, "compile_or_warm_up_model")
    assert said.startswith(
        "POORWILL_BUDGET=192MiB allows the engine 0.19 GiB of cuda:0, and with 0.04 GiB of"
    )
    assert "GiB are in use, and a pass of the model takes 0.0" in said
    assert "raise POORWILL_BUDGET, give --kv-cache-memory-bytes " in said
    assert (
        "capture fewer sizes (cudagraph_capture_sizes in --compilation-config), or give --enforce-eager"
        in said
    )
    engine.end()
    # What is recommended is what starts.
    assert cache > fitting(said) > 0
    engine = given(start, fitting(said), 20 * MIB)
    engine.worker.compile_or_warm_up_model()
    engine.worker.sleep(1)
    engine.worker.wake_up()


def test_a_cache_that_leaves_no_graphs_is_refused_before_it_is_made(start: Start) -> None:
    of = Shape(weights=(50 * MIB,), transient=MIB, activations=MIB)
    chosen: dict[str, Any] = {"kv_cache_memory_bytes": 48 * MIB, "POORWILL_BUDGET": "128MiB"}
    eager = start(of, **chosen).load()
    assert eager.worker.determine_available_memory() == 48 * MIB
    eager.end()
    engine = start(of, **GRAPHS, **chosen).load()
    engine.config.compilation_config.cudagraph_capture_sizes = list(range(1, 33))
    said = refusal(engine, "determine_available_memory")
    assert (
        "in use with the weights loaded and CUDA graphs of at least 0.03 GiB: raise POORWILL_BUDGET" in said
    )
    assert engine.runner.profiled == 0


def sized(engine: Engine) -> Engine:
    """An engine whose KV cache is what vLLM makes of its share."""
    available = engine.worker.determine_available_memory()
    # vLLM does not know of what builders of metadata keep, a granule before the cache and one behind.
    blocks = blocks_of(engine, available - 2 * GRANULE)
    engine.worker.initialize_from_config(worker_parts.kv_config(engine.shape, blocks))
    return engine


def taking(start: Start, unprofiled: int, **setting: Any) -> Engine:
    """One whose graphs take so much more than their profile has seen."""
    return sized(start(shape(unprofiled=unprofiled), **GRAPHS, **setting).load())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [line for line in said if "CUDA graphs" in line]


CAP: dict[str, Any] = {"POORWILL_BUDGET": "256MiB"}
SHARE: dict[str, Any] = {"gpu_memory_utilization": 0.25}


@pytest.mark.parametrize("setting", [CAP, SHARE])
def test_graphs_as_they_were_profiled_fit(
    start: Start, setting: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = taking(start, 0, **setting)
    engine.worker.compile_or_warm_up_model()
    assert warnings(caplog) == []
    assert engine.worker._graphs.graphs_bytes == engine.shape.weights[0]
    torch.cuda.empty_cache()
    used = engine.worker._envelope.used_bytes(engine.snapshot())
    # By its own arithmetic vLLM rounds some things down.
    assert used + engine.shape.activations <= 256 * MIB + (0 if setting is CAP else 16 * MIB)


def test_graphs_beyond_a_cap_end_the_start(start: Start) -> None:
    engine = taking(start, 80 * MIB, **CAP)
    said = refusal(engine, "compile_or_warm_up_model")
    assert said.startswith("POORWILL_BUDGET=256MiB allows the engine 0.25 GiB of cuda:0, and with 0.")
    assert "GiB of CUDA graphs 0.2" in said
    # A larger share would only make a larger cache.
    assert "raise" not in said
    assert fitting(said) < engine.worker.available_kv_cache_memory_bytes


def test_an_estimate_that_was_a_little_low_is_reported(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(shape(), **GRAPHS, **CAP).load()
    stock = engine.runner.profile_cudagraph_memory
    engine.runner.profile_cudagraph_memory = lambda: stock() - 12 * MIB
    sized(engine)
    engine.worker.compile_or_warm_up_model()
    [said] = warnings(caplog)
    assert "GiB are in use, and a pass of the model takes 0.0" in said
    assert 0 < fitting(said) < engine.worker.available_kv_cache_memory_bytes


def test_graphs_without_an_estimate_are_held_to_the_cap(start: Start) -> None:
    of = shape(activations=32 * MIB)
    engine = sized(profiles_nothing(start(of, **GRAPHS, **CAP).load()))
    said = refusal(engine, "compile_or_warm_up_model")
    assert "GiB are in use, and a pass of the model takes 0.03 GiB for a while, which is " in said


def test_without_a_cap_an_excess_is_a_line_in_the_log(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = taking(start, 80 * MIB, **SHARE)
    engine.worker.compile_or_warm_up_model()
    [said] = warnings(caplog)
    assert said.startswith("--gpu-memory-utilization allows the engine 0.25 GiB of cuda:0, and with 0.")
    assert "raise" not in said


def test_nothing_is_held_against_a_share_that_binds_nothing(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    chosen: dict[str, Any] = {"gpu_memory_utilization": 0.0625, "kv_cache_memory_bytes": 64 * MIB}
    engine = with_cache(start(Shape(unprofiled=80 * MIB), **GRAPHS, **chosen).load(), 256)
    engine.worker.compile_or_warm_up_model()
    assert warnings(caplog) == []


@pytest.mark.parametrize("is_beyond", [False, True])
def test_what_warming_up_takes_counts_too(start: Start, is_beyond: bool) -> None:
    engine = taking(start, 0, **CAP)
    kept: list[Any] = []
    nbytes = 60 * MIB if is_beyond else MIB
    stock = engine.runner._dummy_sampler_run
    engine.runner._dummy_sampler_run = lambda hidden_states: kept.append(filled(nbytes, 3))
    if is_beyond:
        assert "which is " in refusal(engine, "compile_or_warm_up_model")
    else:
        engine.worker.compile_or_warm_up_model()
    assert len(kept) == 1
    engine.runner._dummy_sampler_run = stock
