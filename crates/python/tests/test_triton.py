"""`poorwill.triton` keeps Triton's autotuner to what fits; Triton itself is there for a few tests only."""

import csv
import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from poorwill import _native
from poorwill import triton as pruning

TRUTH = Path(__file__).parents[3] / "crates/core/tests/data/shared_memory"
KIB = 1 << 10


@dataclass
class Config:
    """Like `triton.Config`."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    num_stages: int = 3
    num_warps: int = 4

    def all_kwargs(self) -> dict[str, Any]:
        return {**self.kwargs, "num_stages": self.num_stages, "num_warps": self.num_warps}


@dataclass
class Tensor:
    element_bytes: int

    def element_size(self) -> int:
        return self.element_bytes


def sized(*sizes_bytes: int) -> list[Config]:
    """Configurations that say themselves what they take."""
    return [Config({"size_bytes": size_bytes}) for size_bytes in sizes_bytes]


def own_size(parameters: dict[str, Any]) -> int:
    size_bytes: int = parameters["size_bytes"]
    return size_bytes


@pytest.fixture(autouse=True)
def _forget_gpus() -> Iterator[None]:
    pruning._of_gpu.cache_clear()
    yield
    pruning._of_gpu.cache_clear()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two GPUs: an H100, and a card with 99 KiB. Returns the numbers that were asked for."""
    asked: list[int] = []
    kinds = [(9, 0), (12, 0)]

    def shared(ordinal: int) -> int | None:
        asked.append(ordinal)
        if ordinal >= len(kinds):
            raise _native.PoorwillError(f"there is no GPU {ordinal}")
        return _native.shared_memory_of_capability(*kinds[ordinal])

    monkeypatch.setattr(_native, "shared_memory_of_device", shared)
    return asked


def test_imports_without_triton_and_torch() -> None:
    script = "import sys; sys.modules.update(torch=None, triton=None); import poorwill.triton"
    subprocess.run([sys.executable, "-B", "-c", script], check=True)


@pytest.mark.parametrize("device", ["sm_120", (12, 0), "sm_120a"])
def test_a_kind_of_gpu_has_the_budget_of_the_table(device: Any) -> None:
    assert pruning.shared_memory_budget(device) == 99 * KIB


@pytest.mark.parametrize("device", ["sm_61", (6, 1)])
def test_an_unknown_kind_of_gpu_is_refused_with_the_known_ones(device: Any) -> None:
    with pytest.raises(ValueError, match=r"sm_61 is not known; known are sm_70, sm_75, .*, sm_121$"):
        pruning.shared_memory_budget(device)
    with pytest.raises(ValueError, match="sm_61 is not known"):
        pruning.shared_memory_pruner(own_size, device=device)


CPU = SimpleNamespace(type="cpu", index=None)


@pytest.mark.parametrize("device", [-1, "rocm:0", "cuda:x", "cuda:", "", CPU])
def test_what_is_no_gpu_is_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="no GPU"):
        pruning.shared_memory_budget(device)


def test_a_gpu_is_asked_once(gpus: list[int]) -> None:
    same: list[Any] = [1, "cuda:1", SimpleNamespace(type="cuda", index=1)]
    assert [pruning.shared_memory_budget(device) for device in same] == [99 * KIB] * 3
    assert gpus == [1]


def test_where_nothing_can_be_asked_it_is_what_every_gpu_has(gpus: list[int]) -> None:
    assert [pruning.shared_memory_budget(7) for _ in range(2)] == [48 * KIB] * 2
    assert gpus == [7, 7]  # no answer is not remembered


@pytest.mark.parametrize(("is_initialized", "budget_bytes"), [(True, 99 * KIB), (False, 227 * KIB)])
def test_torch_says_which_gpu_is_current_if_it_uses_one(
    gpus: list[int], monkeypatch: pytest.MonkeyPatch, is_initialized: bool, budget_bytes: int
) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: is_initialized, current_device=lambda: 1)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    current: list[Any] = [None, "cuda", SimpleNamespace(type="cuda", index=None)]
    assert [pruning.shared_memory_budget(device) for device in current] == [budget_bytes] * 3


def test_without_a_gpu_it_is_what_every_gpu_has() -> None:
    script = "from poorwill.triton import shared_memory_budget as budget; print(budget(), budget('cuda:1'))"
    without = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "POORWILL_FAKE_LIBCUDA": "/nonexistent"}
    ran = subprocess.run([sys.executable, "-B", "-c", script], env=without, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "49152 49152\n", "")


def test_what_fits_is_kept_in_order() -> None:
    configs = sized(99 * KIB, 1, 98 * KIB, 98 * KIB + 1, 2)
    prune = pruning.shared_memory_pruner(own_size, device="sm_120")
    assert prune(configs, {}) == [configs[1], configs[2], configs[4]]
    assert pruning.shared_memory_pruner(own_size, device="sm_120", margin_bytes=0)(configs, {}) == configs
    assert pruning.shared_memory_pruner(own_size, device="sm_90")(configs, {}, grid=(1,)) == configs


def test_an_empty_list_stays_empty() -> None:
    assert pruning.shared_memory_pruner(own_size, device="sm_90")([]) == []


def test_where_none_fits_the_smallest_is_kept_with_one_warning() -> None:
    configs = sized(300 * KIB, 200 * KIB, 200 * KIB, 250 * KIB)
    prune = pruning.shared_memory_pruner(own_size, device="sm_120")
    with pytest.warns(
        UserWarning, match=r"none of 4 configurations fits sm_120.*size_bytes=204800"
    ) as warned:
        [kept] = prune(configs, {})
    assert kept is configs[1]
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prune(configs, {}) == [kept]


def test_where_none_fits_it_can_be_an_error_that_names_the_sizes() -> None:
    prune = pruning.shared_memory_pruner(own_size, device="sm_120", on_empty="error")
    with pytest.raises(ValueError, match=r"101376 bytes.*takes 307200 bytes.*takes more than any"):
        prune(sized(300 * KIB, pruning.DOES_NOT_FIT_BYTES), {})


def test_a_configuration_without_an_estimate_is_kept_with_one_warning() -> None:
    configs = [Config({"OTHER": 1}), *sized(1, 300 * KIB), Config({"OTHER": 2})]
    prune = pruning.shared_memory_pruner(own_size, device="sm_120")
    with pytest.warns(UserWarning, match=r"no estimate for OTHER=1.*KeyError") as warned:
        assert prune(configs, {}) == [configs[0], configs[1], configs[3]]
    assert len(warned) == 1


def test_bad_arguments_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="margin_bytes is -1"):
        pruning.shared_memory_pruner(own_size, margin_bytes=-1)
    with pytest.raises(ValueError, match='"smallest" or "error"'):
        pruning.shared_memory_pruner(own_size, on_empty="all")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="estimates nothing"):
        pruning.shared_memory_pruner(17)  # type: ignore[arg-type]


def test_an_estimate_of_ones_own_sees_everything_by_name() -> None:
    seen: list[dict[str, Any]] = []

    def estimate(parameters: dict[str, Any]) -> int:
        seen.append(parameters)
        return 0

    configs = [Config({"BLOCK": 64}, num_stages=5, num_warps=8)]
    pruning.shared_memory_pruner(estimate, device="sm_90")(configs, {"x": 1}, y=2)
    assert seen == [{"x": 1, "y": 2, "BLOCK": 64, "num_stages": 5, "num_warps": 8}]


def test_names_and_sizes_of_tiles_can_be_given() -> None:
    estimate = pruning.matmul(block_m="M", block_n=128, a_bytes="a", b_bytes="a", output_bytes="a")
    launch = pruning.Launch(Config({"M": 128, "BLOCK_K": 64}), {"a": Tensor(4)}, {}, [(8, 0)])
    tiles = {"block_m": 128, "block_n": 128, "block_k": 64}
    size_bytes = _native.estimate_matmul(
        (8, 0), **tiles, a_bytes=4, b_bytes=4, output_bytes=4, num_stages=3, num_warps=4
    )
    assert estimate.estimate_bytes(launch) == size_bytes == 128 * KIB


def test_without_a_gpu_tiles_take_what_they_take_where_it_is_most() -> None:
    config = Config({"BLOCK_M": 64, "BLOCK_N": 64, "HEAD_DIM": 64})
    most = pruning.attention().estimate_bytes(pruning.Launch(config))
    known = [pruning.Launch(config, capabilities=[kind]) for kind in _native.known_compute_capabilities()]
    assert most == max(pruning.attention().estimate_bytes(launch) for launch in known)


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_a_delta_rule_for_large_gpus_is_dropped_on_small_ones(element_bytes: int) -> None:
    configs = [Config({"BT": 64, "BV": 64}, num_stages) for num_stages in (1, 4)]
    estimate = pruning.chunk_gated_delta_rule_fwd_h()
    launch: dict[str, Any] = {"k": Tensor(element_bytes), "K": 128}
    assert pruning.shared_memory_pruner(estimate, device="sm_120")(configs, launch) == configs[:1]
    fit = configs if element_bytes == 2 else configs[:1]
    assert pruning.shared_memory_pruner(estimate, device="sm_90")(configs, launch) == fit


def test_the_configuration_of_the_report_is_dropped_where_it_may_not_fit() -> None:
    fits, large = Config({"BT": 64, "BK": 32, "BV": 32}, 2), Config({"BT": 64, "BK": 64, "BV": 64}, 4)
    prune = pruning.shared_memory_pruner(pruning.chunk_fwd_o(), device="sm_120")
    assert prune([fits, large], {}) == [fits]
    # With elements of two bytes, which the launch tells, Triton gives it 72 KiB.
    assert prune([fits, large], {"q": Tensor(2)}) == [fits, large]
    on_90 = pruning.shared_memory_pruner(pruning.chunk_fwd_o(), device="sm_90")
    assert on_90([fits, large], {}) == [fits, large]


def test_kinds_of_gpu_with_the_same_shared_memory_use_it_alike(gpus: list[int]) -> None:
    config = Config({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64})
    assert len(gpus) == 0
    for ordinal, named in enumerate(["sm_90", "sm_120"]):
        here, there = pruning._target(ordinal), pruning._target(named)
        assert set(there.capabilities) < set(here.capabilities)
        sizes = [
            pruning.matmul().estimate_bytes(pruning.Launch(config, capabilities=target.capabilities))
            for target in (here, there)
        ]
        assert sizes[0] == sizes[1]


def truth(kernel: str) -> list[tuple[str, Config, dict[str, int]]]:
    """The recorded rows: kind of GPU, configuration, and everything of the row."""
    with (TRUTH / f"{kernel}.csv").open(newline="") as table:
        rows = [{name: int(value) for name, value in row.items()} for row in csv.DictReader(table)]
    return [(f"sm_{row['sm']}", Config(dict(row), row["num_stages"], row["num_warps"]), row) for row in rows]


ESTIMATES: dict[str, Callable[[dict[str, int]], pruning.Estimator]] = {
    "matmul": lambda _row: pruning.matmul(
        block_m="block_m",
        block_n="block_n",
        block_k="block_k",
        a_bytes="a_bytes",
        b_bytes="b_bytes",
        output_bytes="c_bytes",
    ),
    "attention": lambda _row: pruning.attention(
        block_m="block_m", block_n="block_n", head_dim="head_dim", element_bytes="element_bytes"
    ),
    "chunk_fwd_o": lambda _row: pruning.chunk_fwd_o(
        block_t="block_t",
        block_k="block_k",
        block_v="block_v",
        key_dim="key_dim",
        element_bytes="element_bytes",
        state_v_first="state_v_first",
    ),
    "chunk_gated_delta_rule_fwd_h": lambda row: pruning.chunk_gated_delta_rule_fwd_h(
        block_t="block_t",
        block_v="block_v",
        key_dim=64 * row["k_blocks"],
        element_bytes="element_bytes",
        state_v_first="state_v_first",
    ),
}


@pytest.mark.parametrize("kernel", ESTIMATES)
def test_nothing_is_kept_that_triton_says_does_not_fit(kernel: str) -> None:
    fit = dropped = 0
    for device, config, row in truth(kernel):
        prune = pruning.shared_memory_pruner(ESTIMATES[kernel](row), margin_bytes=0, device=device)
        fits = row["shared_bytes"] <= pruning.shared_memory_budget(device)
        spare = Config({**config.kwargs, **dict.fromkeys(config.kwargs, 0)}, 0, 1)
        is_kept = config in prune([config, spare])
        assert fits or not is_kept, row
        fit += fits
        dropped += fits and not is_kept
    assert dropped <= 0.05 * fit


class FakeKernel:
    """Like a `triton.jit` function, compiled to what its `size_bytes` says."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def warmup(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        if isinstance(kwargs["size_bytes"], Exception):
            raise kwargs["size_bytes"]
        return SimpleNamespace(metadata=SimpleNamespace(shared=kwargs["size_bytes"]))


class OutOfResources(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name
        self.required = 300 * KIB


class PTXASError(Exception):
    pass


def test_exact_compiles_for_the_launch_and_reads_what_is_taken() -> None:
    kernel = FakeKernel()
    tuner = SimpleNamespace(configs=[], fn=kernel, warmup=None)
    configs = sized(99 * KIB, 99 * KIB + 1, 5)
    for given in (kernel, tuner, lambda: tuner):
        prune = pruning.shared_memory_pruner(pruning.exact(given), margin_bytes=0, device="sm_120")
        assert prune(configs, {"x": "X", "y": "Y"}, grid=(7,), warmup=False, z=3) == [configs[0], configs[2]]
    args, kwargs = kernel.calls[0]
    assert args == ("X", "Y")
    assert kwargs == {"grid": (1,), "z": 3, "size_bytes": 99 * KIB, "num_stages": 3, "num_warps": 4}


def test_exact_drops_what_the_compiler_refuses_for_its_size_alone() -> None:
    refused = [OutOfResources("shared memory"), PTXASError("uses too much shared data (0x32000 bytes)")]
    other = [OutOfResources("threads"), PTXASError("no such instruction"), ZeroDivisionError("a bug")]
    configs = [Config({"size_bytes": error}) for error in [*refused, *other]]
    prune = pruning.shared_memory_pruner(pruning.exact(FakeKernel()), device="sm_120")
    with pytest.warns(UserWarning, match="no estimate"):
        assert prune(configs, {}) == configs[2:]


def test_exact_without_a_kernel_says_so() -> None:
    with pytest.raises(TypeError, match="no kernel of Triton's"):
        pruning.exact(17).estimate_bytes(pruning.Launch(Config()))


def test_exact_agrees_with_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "triton_kernels_for_tests.py").write_text(PRODUCT)
    product = importlib.import_module("triton_kernels_for_tests").product
    tiles = [{"M": 64, "N": side, "K": depth} for side in (64, 128) for depth in (32, 128)]
    configs = [triton.Config(each, num_stages=stages) for each in tiles for stages in (2, 4)]
    signature = {name: "*fp16" for name in ("a", "b", "c")} | {"depth": "i32"}
    estimate = pruning.exact(product, signature=signature)
    taken = [estimate.estimate_bytes(pruning.Launch(config, capabilities=[(12, 0)])) for config in configs]
    # The tiles of A and B, as many times as there are stages but one.
    assert taken == [
        2 * (config.num_stages - 1) * config.kwargs["K"] * (config.kwargs["M"] + config.kwargs["N"])
        for config in configs
    ]
    prune = pruning.shared_memory_pruner(estimate, margin_bytes=0, device="sm_120")
    fit = [config for config, size_bytes in zip(configs, taken, strict=True) if size_bytes <= 99 * KIB]
    assert prune(configs, {}) == fit
    assert 0 < len(fit) < len(configs)


def test_tritons_autotuner_takes_a_pruner() -> None:
    pytest.importorskip("triton")
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    configs = sized(300 * KIB, 2, 1)
    prune = pruning.shared_memory_pruner(own_size, device="sm_120")
    tuner = autotuner.Autotuner.__new__(autotuner.Autotuner)
    tuner.configs, tuner.nargs, tuner.perf_model, tuner.early_config_prune = configs, {"x": 1}, None, prune
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuner.prune_configs({"grid": (1,), "warmup": False}) == configs[1:]


PRODUCT = """
import triton
import triton.language as tl


@triton.jit
def product(a, b, c, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, depth, K):
        left = tl.load(a + m[:, None] * depth + start + k[None, :])
        right = tl.load(b + (start + k[:, None]) * N + n[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + m[:, None] * N + n[None, :], total.to(tl.float16))
"""
