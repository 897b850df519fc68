"""vLLM's kernels are tuned within the GPU's shared memory where `POORWILL_TRITON=1` asks for it.

The kernels are those of vLLM's sources, over a fake of Triton or Triton itself. The GPU only reports figures.
"""

import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_vllm.loader import Loader
from poorwill import _native
from poorwill import triton as pruning
from poorwill.vllm import _environment, _hooks, _imports, _platform, _triton, _versions
from poorwill.vllm._hooks import TritonHook
from poorwill.vllm._platform import ConfigurationError
from poorwill.vllm._versions import RUN, UnsupportedVllmError
from triton_fakes import KIB, Config, FakeJit, Tensor, fake_triton
from vllm_sources import needs_sources
from vllm_sources.versions import held

each_version = pytest.mark.parametrize("version", held())
STATE, OUTPUT = _triton.ESTIMATES
SM_90: pruning.Capability = (9, 0)


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a worker that has just begun, on an H200."""
    for name in (_environment.TRITON, _environment.TRITON_SHARED_MEMORY):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(_hooks, "_refusals", [])
    monkeypatch.setattr(_imports, "_waiting", {})
    monkeypatch.setattr(_imports, "_done", set())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    shared_bytes = _native.shared_memory_of_capability(*SM_90)
    monkeypatch.setattr(_native, "shared_memory_of_device", lambda ordinal: shared_bytes)
    pruning._of_gpu.cache_clear()
    yield
    pruning._of_gpu.cache_clear()


def switched(monkeypatch: pytest.MonkeyPatch, shared_memory: str | None = None, switch: str = "1") -> None:
    monkeypatch.setenv(_environment.TRITON, switch)
    if shared_memory is not None:
        monkeypatch.setenv(_environment.TRITON_SHARED_MEMORY, shared_memory)


def runs(
    monkeypatch: pytest.MonkeyPatch, version: str, *, is_cuda: bool = True, has_triton: bool = True
) -> None:
    """What the process has imported of vLLM."""
    platform = SimpleNamespace(is_cuda=lambda: is_cuda, device_name="rocm")
    contents: dict[str, tuple[str, Any]] = {
        "vllm.version": ("__version__", version),
        "vllm.platforms": ("current_platform", platform),
        "vllm.triton_utils": ("HAS_TRITON", has_triton),
    }
    for name, (attribute, value) in contents.items():
        module = ModuleType(name)
        vars(module)[attribute] = value
        monkeypatch.setitem(sys.modules, name, module)


def package(version: str) -> str:
    """Where the kernels are."""
    [name] = {hook.module.rpartition(".")[0] for hook in hooks(version)}
    return name


def hooks(version: str) -> list[TritonHook]:
    return [hook for hook in _hooks.TRITON_HOOKS if _versions.needs(version, hook.module)]


def sources(
    version: str, triton: Any, tl: Any = None, outside: tuple[str, ...] = ()
) -> dict[str, ModuleType]:
    """The modules with the kernels, run from vLLM's sources on a GPU with much shared memory, by name."""
    names = [hook.module for hook in hooks(version)]
    ops = package(version)
    loader = Loader(version, [*names, *([f"{ops}.op"] if outside else [])], outside)
    loader.give("vllm.triton_utils", triton=triton, **({} if tl is None else {"tl": tl}))
    utilities = {"check_shared_mem": lambda: True, "is_nvidia_hopper": True, "use_cuda_graph": False}
    loader.give(f"{ops}.utils", FLA_CHUNK_SIZE=64, is_gather_supported=True, **utilities)
    return {name: loader.module(name) for name in names}


def imported(monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType]) -> dict[str, Any]:
    """The kernels by name, after the modules were imported in a process in which the plugin is."""
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    importlib.import_module("poorwill.vllm").register()
    return {name: kernel for module in modules.values() for name, kernel in kernels(module).items()}


def kernels(module: ModuleType) -> dict[str, Any]:
    return {name: vars(module)[name] for name in _triton.ESTIMATES if name in vars(module)}


def launch(kernel: Any, name: str, keys: int) -> None:
    """As vLLM launches them: the state's arguments by name, those of the output partly by their places."""
    tensor = Tensor(2)
    sizes = {"T": 256, "H": 16, "Hg": 16, "K": keys, "V": 128, "BT": 64}
    if name == OUTPUT:
        kernel[(1,)](tensor, tensor, tensor, tensor, tensor, tensor, None, None, 1.0, **sizes)
        return
    tensors = dict.fromkeys(("k", "v", "w", "v_new", "g", "h"), tensor)
    nothing = dict.fromkeys(("gk", "h0", "ht", "cu_seqlens", "chunk_offsets"))
    tuner = _versions.tuner_of(kernel)
    more = {"USE_EXP2": False} if "USE_EXP2" in tuner.arg_names else {}
    kernel[(1,)](**tensors, **nothing, **sizes, **more)


def innermost(kernel: Any) -> FakeJit:
    while not isinstance(kernel, FakeJit):
        kernel = kernel.fn
    return kernel


def tried(kernel: Any) -> list[dict[str, Any]]:
    """What was compiled, as its configuration says."""
    names = ("BK", "BV", "num_warps", "num_stages")
    compiled = innermost(kernel).compiled
    return [{name: each[name] for name in names if name in each} for each in compiled]


def estimated_bytes(name: str, config: Any, keys: int) -> int:
    tensors = {"k": Tensor(2), "q": Tensor(2)}
    given = pruning.Launch(config, tensors, {"K": keys, "BT": 64}, [SM_90])
    return _triton.ESTIMATES[name].estimate_bytes(given)


# Kernels of vLLM's sources, over a fake of Triton.


@needs_sources
@each_version
@pytest.mark.parametrize("budget_kib", [99, 64])
@pytest.mark.parametrize("keys", [128, 256])
@pytest.mark.parametrize("name", [STATE, OUTPUT])
def test_what_would_not_fit_is_gone_before_it_is_compiled(
    monkeypatch: pytest.MonkeyPatch, version: str, budget_kib: int, keys: int, name: str
) -> None:
    switched(monkeypatch, f"{budget_kib}KiB")
    runs(monkeypatch, version)
    kernel = imported(monkeypatch, sources(version, fake_triton()))[name]
    configs = _versions.tuner_of(kernel).configs
    sizes = [estimated_bytes(name, config, keys) for config in configs]
    fit = [config for config, taken in zip(configs, sizes, strict=True) if taken <= (budget_kib - 1) * KIB]
    assert len(fit) < len(configs)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        launch(kernel, name, keys)
    stays = fit or [configs[sizes.index(min(sizes))]]
    assert tried(kernel) == [config.all_kwargs() for config in stays]
    assert ["none of" in str(each.message) for each in warned] == [True] * (not fit)


@needs_sources
@each_version
def test_another_number_of_keys_is_pruned_anew(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    switched(monkeypatch, "99KiB")
    runs(monkeypatch, version)
    kernel = imported(monkeypatch, sources(version, fake_triton()))[STATE]
    counts = []
    for keys in (64, 128, 64):
        launch(kernel, STATE, keys)
        counts.append(len(tried(kernel)))
    assert 0 < counts[0] < counts[1] == counts[2]


@needs_sources
@each_version
@pytest.mark.parametrize("switch", [None, "0", " "])
def test_without_the_switch_nothing_is_touched(
    monkeypatch: pytest.MonkeyPatch, version: str, switch: str | None
) -> None:
    if switch is not None:
        switched(monkeypatch, "99KiB", switch)
    runs(monkeypatch, version)
    modules = sources(version, fake_triton())
    before = {name: dict(vars(module)) for name, module in modules.items()}
    found = imported(monkeypatch, modules)
    assert {name: dict(vars(module)) for name, module in modules.items()} == before
    assert [_versions.tuner_of(kernel).early_config_prune for kernel in found.values()] == [None, None]
    assert not set(_imports._waiting) & {hook.module for hook in _hooks.TRITON_HOOKS}
    launch(found[STATE], STATE, 128)
    assert len(tried(found[STATE])) == len(_versions.tuner_of(found[STATE]).configs)


@needs_sources
@each_version
def test_where_everything_fits_everything_is_tried(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """No limit of the environment's, or one above what the GPU has."""
    for shared_memory in (None, "1GiB"):
        switched(monkeypatch, shared_memory)
        runs(monkeypatch, version)
        monkeypatch.setattr(_imports, "_done", set())
        kernel = imported(monkeypatch, sources(version, fake_triton()))[OUTPUT]
        launch(kernel, OUTPUT, 128)
        configs = _versions.tuner_of(kernel).configs
        fit = [each for each in configs if estimated_bytes(OUTPUT, each, 128) <= 226 * KIB]
        assert tried(kernel) == [config.all_kwargs() for config in fit]
        assert len(fit) > len(configs) // 2


@needs_sources
@each_version
def test_a_second_time_changes_nothing(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    switched(monkeypatch)
    runs(monkeypatch, version)
    modules = sources(version, fake_triton())
    tuners = [_versions.tuner_of(kernel) for kernel in imported(monkeypatch, modules).values()]
    first = [tuner.early_config_prune for tuner in tuners]
    assert all(isinstance(each, _triton.Fitting) and each.stock is None for each in first)
    importlib.import_module("poorwill.vllm").register()
    for module in modules.values():
        _triton.install(module)
    assert all(tuner.early_config_prune is each for tuner, each in zip(tuners, first, strict=True))


@needs_sources
@each_version
def test_a_pruner_of_vllms_own_comes_first(
    monkeypatch: pytest.MonkeyPatch, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    switched(monkeypatch, "99KiB")
    runs(monkeypatch, version)
    modules = sources(version, fake_triton())
    asked = []

    def own(configs: Any, named_args: Any, **options: Any) -> list[Any]:
        asked.append((len(configs), set(named_args), set(options)))
        return [config for config in configs if config.num_warps == 4]

    [module] = [module for module in modules.values() if hasattr(module, OUTPUT)]
    _versions.tuner_of(vars(module)[OUTPUT]).early_config_prune = own
    kernel = imported(monkeypatch, modules)[OUTPUT]
    configs = _versions.tuner_of(kernel).configs
    with caplog.at_level(logging.INFO, "vllm.poorwill"):
        launch(kernel, OUTPUT, 128)
        launch(kernel, OUTPUT, 64)
    [first, _] = asked
    assert first[0] == len(configs)
    assert {"q", "h", "scale"} <= first[1]
    assert {"K", "BT", "USE_G", "grid"} <= first[2]
    left = [config for config in configs if config.num_warps == 4]
    fit = [config for config in left if estimated_bytes(OUTPUT, config, 128) <= 98 * KIB]
    assert 0 < len(fit) < len(left)
    assert tried(kernel)[: len(fit)] == [config.all_kwargs() for config in fit]
    assert f"{OUTPUT} is tuned among {len(fit)} of {len(left)} configurations" in caplog.messages


@needs_sources
@each_version
def test_the_estimates_know_how_the_state_lies(version: str) -> None:
    """Values by rows: the kernels that they are made for have a switch for it, and vLLM's have none."""
    for module in sources(version, fake_triton()).values():
        for kernel in kernels(module).values():
            names = innermost(kernel).arg_names
            assert not [name for name in names if "FIRST" in name or "TRANSPOSE" in name]


# What Triton 3.7 and 3.8 take for the output where one tile holds all keys. A tile of each operand bounds it;
# the estimate made for 3.6 does not.
ONE_TILE = [
    ((8, 0), {"BK": 128, "BV": 64}, 2, 4, 128, 4, 69632),
    ((8, 0), {"BK": 128, "BV": 128}, 8, 4, 128, 4, 98304),
    ((8, 0), {"BK": 64, "BV": 32}, 2, 3, 64, 2, 17408),
    ((9, 0), {"BK": 128, "BV": 128}, 2, 4, 64, 4, 73728),
]


@pytest.mark.parametrize(
    ("capability", "tiles", "num_warps", "num_stages", "keys", "element_bytes", "taken_bytes"), ONE_TILE
)
def test_newer_tritons_take_no_more_than_is_estimated(
    capability: pruning.Capability,
    tiles: dict[str, int],
    num_warps: int,
    num_stages: int,
    keys: int,
    element_bytes: int,
    taken_bytes: int,
) -> None:
    config = Config(tiles, num_stages, num_warps)
    given = pruning.Launch(config, {"q": Tensor(element_bytes)}, {"K": keys, "BT": 64}, [capability])
    estimate = _triton.ESTIMATES[OUTPUT]
    assert isinstance(estimate, _triton.Output)
    assert estimate.looped.estimate_bytes(given) < taken_bytes <= estimate.estimate_bytes(given)


# What does not fit, on modules made here.


def module(name: str, kernel: str, *parameters: str, is_tuned: bool = True) -> ModuleType:
    """A module with a kernel that takes these."""
    triton = fake_triton()
    made = ModuleType(name)
    function = eval(f"lambda {', '.join(parameters)}: None")
    configs = [Config({"BV": side}) for side in (32, 64)]
    vars(made)[kernel] = triton.autotune(configs, ["K"])(triton.jit(function)) if is_tuned else function
    return made


OPS = "vllm.third_party.flash_linear_attention.ops"
FITTING = ("q", "K", "BT", "BK", "BV")


def hook(name: str) -> TritonHook:
    [found] = [hook for hook in _hooks.TRITON_HOOKS if hook.module == name]
    return found


@pytest.mark.parametrize(
    ("version", "made", "says"),
    [
        ("0.33.0", module(f"{OPS}.chunk_o", OUTPUT, "q", "K"), r"does not take BT, BK, BV but \(q, K\)"),
        ("0.33.0", module(f"{OPS}.chunk_o", "other", *FITTING), "chunk_fwd_kernel_o is missing"),
        (
            "0.33.0",
            module(f"{OPS}.chunk_o", OUTPUT, *FITTING, is_tuned=False),
            "is a function and was a kernel",
        ),
        ("0.25.1", module(f"{OPS}.chunk_o", OUTPUT, *FITTING), r"chunk_o is not expected in it"),
        ("0.34.0", module(f"{OPS}.chunk_o", OUTPUT, *FITTING), "newer than what poorwill knows"),
    ],
)
def test_a_vllm_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, made: ModuleType, says: str
) -> None:
    switched(monkeypatch)
    runs(monkeypatch, version)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    with pytest.raises(UnsupportedVllmError, match=says) as refused:
        hook(made.__name__).wait()
    assert "unset POORWILL_TRITON to do without poorwill" in str(refused.value)


def test_where_there_is_no_triton_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    switched(monkeypatch)
    runs(monkeypatch, "0.33.0", has_triton=False)
    made = module(f"{OPS}.chunk_o", OUTPUT, *FITTING, is_tuned=False)
    before = vars(made)[OUTPUT]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    hook(made.__name__).wait()
    assert vars(made)[OUTPUT] is before


def test_gpus_of_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    switched(monkeypatch)
    runs(monkeypatch, "0.33.0", is_cuda=False)
    made = module(f"{OPS}.chunk_o", OUTPUT, *FITTING)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    with pytest.raises(
        ConfigurationError, match=r"POORWILL_TRITON=1 is for .*NVIDIA.*runs on rocm: unset it"
    ):
        hook(made.__name__).wait()


@pytest.mark.parametrize("text", ["plenty", "0", "-1", "0KiB"])
def test_a_size_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """With the configuration, before anything is started, and where the kernels are."""
    switched(monkeypatch, text)
    runs(monkeypatch, "0.33.0")
    says = f"POORWILL_TRITON_SHARED_MEMORY='{text}' is no size above 0: write it like 99KiB"
    with pytest.raises(ValueError, match=says):
        _platform.decide_triton()
    with pytest.raises(ValueError, match=says):
        _triton.install(module(f"{OPS}.chunk_o", OUTPUT, *FITTING))
    # A process without the setting is not affected.
    monkeypatch.setenv(_environment.TRITON, "0")
    _platform.decide_triton()


def test_a_switch_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    switched(monkeypatch, switch="yes")
    runs(monkeypatch, "0.33.0")
    with pytest.raises(ValueError, match="POORWILL_TRITON='yes' is neither 0 nor 1"):
        _platform.decide_triton()
    made = module(f"{OPS}.chunk_o", OUTPUT, *FITTING)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    with pytest.raises(ValueError, match="POORWILL_TRITON='yes' is neither 0 nor 1"):
        importlib.import_module("poorwill.vllm").register()


# With the configuration, before anything is started.


def laid_out(monkeypatch: pytest.MonkeyPatch, root: Path, version: str, *modules: str) -> None:
    """A vLLM of files which must not be imported."""
    monkeypatch.syspath_prepend(root)
    for name in modules:
        path = root.joinpath(*name.split(".")).with_suffix(".py")
        for folder in [*path.parents][: len(name.split(".")) - 1]:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").write_text("raise AssertionError('imported')")
        path.write_text("raise AssertionError('imported')")
    runs(monkeypatch, version)


def test_kernels_that_have_gone_are_missed_at_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    switched(monkeypatch)
    laid_out(monkeypatch, tmp_path, "0.33.0", f"{OPS}.chunk_o")
    with pytest.raises(UnsupportedVllmError, match=r"ops\.chunk_delta_h is missing.*unset POORWILL_TRITON"):
        _platform.decide_triton()
    laid_out(monkeypatch, tmp_path, "0.33.0", f"{OPS}.chunk_delta_h")
    _platform.decide_triton()
    # They were elsewhere before.
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__path__=[str(tmp_path / "vllm")]))
    runs(monkeypatch, "0.25.1")
    with pytest.raises(UnsupportedVllmError, match=r"layers\.fla\.ops\.chunk_delta_h is missing"):
        _platform.decide_triton()
    runs(monkeypatch, "0.33.0")
    _platform.decide_triton()


def test_where_the_kernels_are_is_known_of_each_version() -> None:
    assert package("0.20.0") == package("0.25.1") == "vllm.model_executor.layers.fla.ops"
    assert package("0.26.0") == package("0.33.0") == OPS


def test_a_vllm_that_is_not_known_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    switched(monkeypatch)
    laid_out(monkeypatch, tmp_path, "0.34.0", *(hook.module for hook in _hooks.TRITON_HOOKS))
    with pytest.raises(UnsupportedVllmError, match=r"0\.34\.0.*unset POORWILL_TRITON"):
        _platform.decide_triton()


def test_a_vllm_that_is_not_to_tune_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    switched(monkeypatch)
    laid_out(monkeypatch, tmp_path, "0.33.0", *(f"{OPS}.{name}" for name in ("chunk_o", "chunk_delta_h")))
    settings = ModuleType("vllm.envs")
    monkeypatch.setitem(sys.modules, "vllm.envs", settings)
    for is_first, refused in ((False, False), (True, True)):
        vars(settings)[_platform.FIRST_CONFIG] = is_first
        if refused:
            with pytest.raises(
                ConfigurationError, match=r"VLLM_TRITON_FORCE_FIRST_CONFIG.*unset one of them"
            ):
                _platform.decide_triton()
        else:
            _platform.decide_triton()


def test_it_is_decided_with_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    class CudaPlatformBase:
        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None: ...

    cuda = ModuleType("vllm.platforms.cuda")
    vars(cuda)["CudaPlatformBase"] = CudaPlatformBase
    _platform.install(cuda)
    runs(monkeypatch, "0.33.0")
    config: Any = SimpleNamespace(model_config=None, parallel_config=None)
    CudaPlatformBase.check_and_update_config(config)
    switched(monkeypatch, "none")
    with pytest.raises(ValueError, match="POORWILL_TRITON_SHARED_MEMORY='none'"):
        CudaPlatformBase.check_and_update_config(config)


# Triton itself.


@pytest.mark.real_torch
@needs_sources
@pytest.mark.parametrize("version", RUN)
@pytest.mark.parametrize("name", [STATE, OUTPUT])
def test_tritons_autotuner_compiles_what_fits_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, name: str
) -> None:
    """What the compiler says each takes on an H200, beside what is compiled with 99 KiB."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton: Any = importlib.import_module("triton")
    switched(monkeypatch, "99KiB")
    runs(monkeypatch, version)
    tl = importlib.import_module("triton.language")
    kernel = imported(monkeypatch, sources(version, triton, tl, outside=("triton",)))[name]
    tuner = _versions.tuner_of(kernel)
    compiled: list[tuple[int, ...]] = []

    def run(_self: Any, *_args: Any, **kwargs: Any) -> None:
        compiled.append(
            tuple(kwargs[each] for each in ("BK", "BV", "num_warps", "num_stages") if each in kwargs)
        )

    monkeypatch.setattr(triton.JITFunction, "run", run)
    tuner._do_bench = lambda call, quantiles: (call(), [1.0] * len(quantiles))[1]
    launch(kernel, name, 128)
    configs = {
        tuple([*each.kwargs.values(), each.num_warps, each.num_stages]): each for each in tuner.configs
    }
    assert 0 < len(set(compiled)) < len(configs)
    exact = pruning.exact(tuner, signature=signature(name), constants=constants(tuner))

    def taken_bytes(config: Any) -> int:
        return exact.estimate_bytes(pruning.Launch(config, capabilities=[SM_90]))

    # Compiling takes seconds, so those that take most of either.
    *_, gone = by_size(name, [config for each, config in configs.items() if each not in compiled])
    if version == "0.20.2" and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        # Its kernels take block pointers, which went with Triton 3.9. What is not compiled is not reported.
        with pytest.raises(triton.CompilationError, match="Block pointers have been removed"):
            taken_bytes(gone)
        return
    assert taken_bytes(gone) > 99 * KIB
    for kept in by_size(name, [configs[each] for each in set(compiled)])[-2:]:
        assert taken_bytes(kept) <= 99 * KIB


def by_size(name: str, configs: list[Any]) -> list[Any]:
    return sorted(configs, key=lambda config: estimated_bytes(name, config, 128))


def signature(name: str) -> dict[str, str]:
    tensors = {STATE: ("k", "v", "w", "v_new", "h"), OUTPUT: ("q", "k", "v", "h", "o")}[name]
    more = {"scale": "fp32"} if name == OUTPUT else {}
    return dict.fromkeys(tensors, "*bf16") | {"g": "*fp32", "T": "i32"} | more


def constants(tuner: Any) -> dict[str, Any]:
    everything = {
        **{"H": 16, "Hg": 16, "K": 128, "V": 128, "BT": 64, "USE_G": True, "USE_GK": False},
        **{"USE_INITIAL_STATE": False, "STORE_FINAL_STATE": False, "SAVE_NEW_VALUE": True},
        **{"IS_VARLEN": False, "USE_EXP2": False},
    }
    return {each: value for each, value in everything.items() if each in tuner.arg_names}
