"""`poorwill.triton.exact` asks Triton's compiler; Triton itself is there for a few tests only."""

import importlib
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from poorwill import triton as pruning
from triton_fakes import KIB, Config, sized


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


class FakeHeuristics:
    """Like `triton.heuristics`: adds arguments on the way down."""

    def __init__(self, fn: Any, **values: Any) -> None:
        self.fn = fn
        self.values = values

    def warmup(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn.warmup(*args, **kwargs, **self.values)


class FakeTuner:
    """Like `triton.autotune`: being asked to compile, it would prune again."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.configs: list[Config] = []

    def warmup(self, *_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError("the autotuner was started from within its pruner")


def test_exact_compiles_for_the_launch_and_reads_what_is_taken() -> None:
    kernel = FakeKernel()
    tuner = FakeTuner(kernel)
    configs = sized(99 * KIB, 99 * KIB + 1, 5)
    for given in (kernel, tuner, lambda: tuner):
        prune = pruning.shared_memory_pruner(pruning.exact(given), margin_bytes=0, device="sm_120")
        assert prune(configs, {"x": "X", "y": "Y"}, grid=(7,), warmup=False, z=3) == [configs[0], configs[2]]
    args, kwargs = kernel.calls[0]
    assert args == ("X", "Y")
    assert kwargs == {"grid": (1,), "z": 3, "size_bytes": 99 * KIB, "num_stages": 3, "num_warps": 4}


def test_exact_goes_below_the_autotuner_wherever_it_stands() -> None:
    for wrap, added in (
        (lambda kernel: FakeHeuristics(FakeTuner(kernel), above=1), {}),
        (lambda kernel: FakeTuner(FakeHeuristics(kernel, below=2)), {"below": 2}),
        (lambda kernel: FakeHeuristics(FakeTuner(FakeHeuristics(kernel, below=2)), above=1), {"below": 2}),
        (lambda kernel: FakeHeuristics(FakeHeuristics(FakeTuner(FakeTuner(kernel)), a=1), b=1), {}),
        (lambda kernel: FakeHeuristics(kernel, alone=3), {"alone": 3}),
    ):
        kernel = FakeKernel()
        launch = pruning.Launch(sized(5)[0], {"x": "X"}, {"grid": (7,), "above": 1})
        assert pruning.exact(wrap(kernel)).estimate_bytes(launch) == 5
        [(args, kwargs)] = kernel.calls
        assert args == ("X",)
        own = {"grid": (1,), "above": 1, "size_bytes": 5, "num_stages": 3, "num_warps": 4}
        assert kwargs == own | added


def test_exact_drops_what_the_compiler_refuses_for_its_size_alone() -> None:
    refused = [OutOfResources("shared memory"), PTXASError("uses too much shared data (0x32000 bytes)")]
    other = [
        OutOfResources("threads"),
        PTXASError("no such instruction"),
        PTXASError("Arguments mismatch for instruction 'ld.shared.b32'"),
        PTXASError("Repro command: ptxas -v /mnt/shared/tmp1.ptx: Internal Triton PTX codegen error"),
        PTXASError("too much data in /mnt/shared data/tmp1.ptx"),
        ZeroDivisionError("a bug"),
    ]
    configs = [Config({"size_bytes": error}) for error in [*refused, *other]]
    prune = pruning.shared_memory_pruner(pruning.exact(FakeKernel()), device="sm_120")
    with pytest.warns(UserWarning, match="no estimate"):
        assert prune(configs, {}) == configs[2:]


def test_exact_without_a_kernel_says_so() -> None:
    with pytest.raises(TypeError, match="no kernel of Triton's"):
        pruning.exact(17).estimate_bytes(pruning.Launch(Config()))


@pytest.fixture
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel of Triton's; its source has to be a file."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    (tmp_path / f"{KERNELS}.py").write_text(PRODUCT)
    return importlib.import_module(KERNELS).product


@pytest.mark.real_torch
def test_exact_agrees_with_triton(product: Any) -> None:
    triton: Any = importlib.import_module("triton")
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


@pytest.mark.real_torch
def test_exact_compiles_once_for_each_configuration_below_heuristics(
    product: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton: Any = importlib.import_module("triton")
    runs: list[dict[str, Any]] = []

    def run(_self: Any, *_args: Any, **kwargs: Any) -> Any:
        runs.append(kwargs)
        return SimpleNamespace(metadata=SimpleNamespace(shared=kwargs["N"] * KIB))

    monkeypatch.setattr(triton.JITFunction, "run", run)
    prune = pruning.shared_memory_pruner(pruning.exact(lambda: kernel), device="sm_120")
    configs = [triton.Config({"N": side}) for side in (16, 32, 128)]
    tuned = triton.autotune(
        configs=configs,
        key=["depth"],
        prune_configs_by={"early_config_prune": prune},
        do_bench=lambda call, quantiles: (call(), [1.0] * len(quantiles))[1],
    )(product)
    kernel: Any = triton.heuristics({"M": lambda arguments: arguments["depth"] // 2})(tuned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel[(1,)]("A", "B", "C", 64, K=16)
    compiled = [given["N"] for given in runs if given["warmup"]]
    assert compiled == [16, 32, 128]
    assert [given["N"] for given in runs if not given["warmup"]] == [16, 32, 16]
    assert {(given["M"], given["K"]) for given in runs} == {(32, 16)}


@pytest.mark.real_torch
def test_exact_takes_constants_from_wherever_a_launch_has_them(product: Any) -> None:
    triton: Any = importlib.import_module("triton")
    signature = {name: "*fp16" for name in ("a", "b", "c")} | {"depth": "i32"}

    def taken(config: Any, constants: dict[str, Any], options: dict[str, Any]) -> int:
        estimate = pruning.exact(product, signature=signature, constants=constants)
        return estimate.estimate_bytes(pruning.Launch(config, {}, options, [(8, 0)]))

    def tiles(m: int, n: int, k: int, stages: int = 3) -> int:
        return 2 * (stages - 1) * k * (m + n)

    config = triton.Config({"N": 64})
    # K has a default in the kernel. What is more to the point counts: launches more than constants.
    assert taken(config, {"M": 64}, {}) == tiles(64, 64, 32)
    assert taken(config, {"M": 64, "K": 64}, {}) == tiles(64, 64, 64)
    assert taken(config, {"M": 64, "K": 64}, {"M": 128, "K": 128, "grid": (1,)}) == tiles(128, 64, 128)
    assert taken(config, {}, {"M": 32, "N": 16}) == tiles(32, 64, 32)
    assert taken(triton.Config({"N": 64}, num_stages=5), {"M": 64}, {}) == tiles(64, 64, 32, 5)


@pytest.mark.real_torch
def test_exact_gives_the_compiler_every_option_of_a_configuration(
    product: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton: Any = importlib.import_module("triton")
    compiler = importlib.import_module("triton.compiler")
    given: list[dict[str, Any]] = []

    def compile(_source: Any, target: Any, options: dict[str, Any]) -> Any:
        given.append(options)
        return SimpleNamespace(metadata=SimpleNamespace(shared=7))

    monkeypatch.setattr(compiler, "compile", compile)
    kwargs = {"M": 64, "N": 64, "enable_fp_fusion": False}
    config = triton.Config(kwargs, num_stages=2, num_warps=8, num_ctas=2, maxnreg=96)
    estimate = pruning.exact(product, signature=dict.fromkeys("abc", "*fp16") | {"depth": "i32"})
    assert estimate.estimate_bytes(pruning.Launch(config, {}, {}, [(9, 0)])) == 7
    own = {"num_stages": 2, "num_warps": 8, "num_ctas": 2, "maxnreg": 96}
    assert given == [{"enable_fp_fusion": False} | own]


class NamedKernel(FakeKernel):
    arg_names: ClassVar[list[str]] = ["x", "BLOCK"]
    params: ClassVar[list[Any]] = []


@pytest.mark.parametrize("given", [{"signature": {"x": "*fp16", "y": "i32"}}, {"constants": {"y": 1}}])
def test_exact_refuses_names_that_the_kernel_has_not(given: dict[str, Any]) -> None:
    given = {"signature": {"x": "*fp16"}} | given
    wrong = r"the kernel has no y, which (signature|constants) names; it has x, BLOCK"
    for kernel in (NamedKernel(), FakeHeuristics(FakeTuner(NamedKernel()))):
        with pytest.raises(ValueError, match=wrong):
            pruning.exact(kernel, **given)
    prune = pruning.shared_memory_pruner(pruning.exact(lambda: NamedKernel(), **given), device="sm_90")
    with pytest.raises(ValueError, match=wrong):
        prune(sized(1, 2))


KERNELS = "triton_kernels_for_tests"
PRODUCT = """
import triton
import triton.language as tl


@triton.jit
def product(a, b, c, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr = 32):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, depth, K):
        left = tl.load(a + m[:, None] * depth + start + k[None, :])
        right = tl.load(b + (start + k[:, None]) * N + n[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + m[:, None] * N + n[None, :], total.to(tl.float16))
"""
