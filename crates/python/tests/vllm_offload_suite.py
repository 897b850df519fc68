"""How our offloaders replace vLLM's, and what our UVA offloader promises.

Over the fakes of PyTorch and the driver, with the fake's and vLLM's own offloaders. `test_vllm_suites.py`
runs it.
"""

import gc
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import poorwill
import pytest
from fake_vllm import offloaders
from fake_vllm.offloaders import NO_PIN, NO_UVA, OFFLOADER, OTHER_RUNNER, RUNNER, WORKER, Vllm
from poorwill.offload import HostBuffer
from vllm_offload_models import (
    BUDGET,
    CUDA,
    EACH,
    GIB,
    PAGE,
    SIZES,
    Layer,
    Part,
    Said,
    content,
    contents,
    expected,
    held_exactly,
    is_in_host_memory,
    named,
    nn,
    parameter,
    tensor,
    torch,
)

MARK = "_vllm_is_uva_offloaded"


# Whose offloader it is


def ours(vllm: Vllm) -> Any:
    return vllm.module("poorwill.vllm._offload")


@pytest.mark.parametrize("value", [None, "0", ""])
def test_without_the_switch_nothing_is_touched(
    version: str, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv("POORWILL_OFFLOAD", value)
    with offloaders.installed(version) as vllm:
        assert type(vllm.make(cpu_offload_gb=1)) is vllm.module(f"{OFFLOADER}.uva").UVAOffloader
        hooked = [vllm.base.create_offloader]
        hooked += [vllm.module(offloaders.LOADING).device_loading_context]
        hooked += [vllm.module(WORKER).Worker.wake_up, vllm.module(WORKER).Worker.reload_weights]
        assert not any("poorwill" in (each.__module__ or "") for each in hooked)
        assert not any(hasattr(each, "__poorwill__") for each in hooked)


@pytest.mark.parametrize("is_late", [False, True])
def test_ours_are_vllms_with_the_same_arguments(
    version: str, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POORWILL_OFFLOAD", "1")
    with offloaders.installed(version, is_late=is_late) as vllm:
        places = [vllm.base, vllm.module(OFFLOADER), vllm.module(RUNNER)]
        places += [vllm.module(OTHER_RUNNER)] if vllm.has_prefix else []
        assert {each.create_offloader for each in places} == {ours(vllm).create_offloader}
        uva = vllm.make(cpu_offload_gb=0.5, cpu_offload_params={"w2_weight"})
        assert isinstance(uva, vllm.module(f"{OFFLOADER}.uva").UVAOffloader)
        assert (uva.cpu_offload_max_bytes, uva.cpu_offload_params) == (GIB // 2, {"w2_weight"})
        assert (uva.cpu_offload_bytes, uva.uva_offloading, uva.pin_memory) == (0, True, True)
        asked: dict[str, Any] = {
            "offload_group_size": 3,
            "offload_num_in_group": 2,
            "offload_prefetch_step": 4,
        }
        prefetch = vllm.make(**asked, offload_params={"w2_weight"})
        assert isinstance(prefetch, vllm.module(f"{OFFLOADER}.prefetch").PrefetchOffloader)
        assert type(prefetch).__name__ == "PrefetchOffloader"
        assert (prefetch.group_size, prefetch.num_in_group, prefetch.prefetch_step) == (3, 2, 4)
        assert prefetch.offload_params == {"w2_weight"}
        assert ours(vllm).current() is prefetch
        assert type(vllm.make()) is vllm.base.NoopOffloader
        assert ours(vllm).current() is None
        # What vLLM makes by itself stays what it was.
        stock = vllm.module(f"{OFFLOADER}.prefetch").PrefetchOffloader(1, 1, 1)
        [layer] = stock.wrap_modules(iter([Layer(0)]))
        assert type(next(iter(stock.module_offloaders[0]._param_offloaders.values()))).__module__ == (
            f"{OFFLOADER}.prefetch"
        )
        del layer


@pytest.mark.parametrize("value", ["yes", "2", "on"])
def test_a_switch_that_is_neither_is_refused(vllm: Vllm, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POORWILL_OFFLOAD", value)
    with pytest.raises(ValueError, match=f"POORWILL_OFFLOAD='{value}' is neither 0 nor 1"):
        vllm.make(cpu_offload_gb=1)
    platform = vllm.module("poorwill.vllm._platform")
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        platform.decide_offload()


@pytest.mark.parametrize("name", ["POORWILL_DISABLE_PIN", "POORWILL_HOST_BUDGET"])
def test_other_switches_are_read_before_anything_is_loaded(
    vllm: Vllm, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "maybe")
    with pytest.raises((ValueError, poorwill.PoorwillError), match=name):
        vllm.make(cpu_offload_gb=1)


def test_another_vllm_is_refused(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.module("vllm.version"), "__version__", "0.99.0")
    with pytest.raises(poorwill.PoorwillError, match=r"vLLM 0\.99\.0.*unset POORWILL_OFFLOAD"):
        vllm.make(cpu_offload_gb=1)
    with pytest.raises(poorwill.PoorwillError, match=r"vLLM 0\.99\.0"):
        vllm.module("poorwill.vllm._platform").decide_offload()


def test_what_does_not_fit_is_refused_and_no_offloader_of_vllms_made(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offloaders.installed(version) as vllm:
        operators = vllm.module(f"{OFFLOADER}.prefetch_ops")
        del operators._wait_prefetch_impl
        monkeypatch.setenv("POORWILL_OFFLOAD", "1")
        vllm.module("poorwill.vllm").register()
        with pytest.raises(poorwill.PoorwillError) as refused:
            vllm.make(cpu_offload_gb=1)
    assert f"{OFFLOADER}.prefetch_ops._wait_prefetch_impl is missing" in str(refused.value)
    assert f"vLLM {version}" in str(refused.value)


def test_an_unknown_offloader_is_refused(vllm: Vllm) -> None:
    class Other(vllm.base.BaseOffloader):  # type: ignore[misc, name-defined]
        def wrap_modules(self, modules_generator: Any, prefix: str = "") -> Any:
            return list(modules_generator)

    ours(vllm)._stock = lambda config: Other()
    with pytest.raises(poorwill.PoorwillError, match="vLLM has made a Other"):
        vllm.make(cpu_offload_gb=1)


def test_other_platforms_are_refused(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.module("vllm.platforms"), "current_platform", offloaders.Platform("xpu"))
    with pytest.raises(poorwill.PoorwillError, match=r"NVIDIA's GPUs.*runs on xpu.*unset it"):
        vllm.make(cpu_offload_gb=1)
    assert type(vllm.make()) is vllm.base.NoopOffloader


# In place


def wrapped(vllm: Vllm, layers: list[Any], **settings: Any) -> Any:
    offloader = vllm.make(**{"cpu_offload_gb": 1, **settings})
    assert offloader.wrap_modules(iter(layers)) == layers
    return offloader


def test_the_gpu_reads_offloaded_parameters_in_host_memory(vllm: Vllm, said: Said) -> None:
    layers = [Layer(number) for number in range(3)]
    before = torch.cuda.memory_allocated()
    offloader = wrapped(vllm, layers)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before - 3 * EACH
    for number, layer in enumerate(layers):
        assert contents(layer) == expected(number)
        for each in layer.parameters():
            assert (each.device, is_in_host_memory(each), getattr(each, MARK)) == (CUDA, True, True)
    assert offloader.cpu_offload_bytes == offloader.host_bytes == 3 * EACH
    # Loaders write to them as ever.
    named(layers[1])["norm.weight"].data.copy_(tensor(3 * PAGE, 99))
    assert content(layers[1].norm.weight) == b"c" * 3 * PAGE
    offloader.post_init()
    assert contents(layers[2]) == expected(2)
    assert "Weights in Poorwill's host memory: 0.00 GiB of the 1.00 GiB" in said()
    assert "page-locked, and read in place" in said()


def test_host_memory_is_exact_and_within_its_budget(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POORWILL_HOST_BUDGET", str(3 * EACH - PAGE))
    layers = [Layer(number) for number in range(3)]
    offloader = vllm.make(cpu_offload_gb=1)
    with pytest.raises(poorwill.OutOfMemoryError) as refused:
        offloader.wrap_modules(iter(layers))
    text = str(refused.value)
    for part in (
        "#2.experts.w2_weight_scale",
        f"{5 * PAGE} bytes",
        "held before",
        "the limit for host memory is",
    ):
        assert part in text, text
    assert "lower --cpu-offload-gb, raise POORWILL_HOST_BUDGET" in text
    # The model can be used.
    assert [contents(layer) for layer in layers] == [expected(number) for number in range(3)]
    assert held_exactly(3 * EACH - 5 * PAGE, 3 * EACH - PAGE)


def test_modules_are_offloaded_one_by_one(vllm: Vllm) -> None:
    peaks = []

    def built() -> Any:
        for number in range(4):
            peaks.append(torch.cuda.memory_allocated())
            yield Layer(number, {"weight": 3_000_000})

    gc.collect()
    vllm.make(cpu_offload_gb=1).wrap_modules(built())
    assert max(peaks) - peaks[0] < 3_000_000


def test_the_limit_is_kept_to(vllm: Vllm, said: Said) -> None:
    layers = [Layer(number) for number in range(3)]
    offloader = wrapped(vllm, layers, cpu_offload_gb=(EACH + 12 * PAGE) / GIB)
    taken = {
        (number, name)
        for number, layer in enumerate(layers)
        for name, each in named(layer).items()
        if is_in_host_memory(each)
    }
    # What is too large is left, and later smaller ones are not.
    assert taken == {(0, name) for name in SIZES} | {
        (1, "norm.weight"),
        (1, "experts.w2_weight_scale"),
        (2, "norm.weight"),
    }
    assert offloader.cpu_offload_bytes <= offloader.cpu_offload_max_bytes
    assert not hasattr(layers[1].experts.w2_weight, MARK)
    offloader.post_init()
    assert [contents(layer) for layer in layers] == [expected(number) for number in range(3)]
    assert "stay on the GPU" in said()


def test_names_are_meant_as_vllm_means_them(vllm: Vllm) -> None:
    layers = [Layer(0), Layer(1)]
    wrapped(vllm, layers, cpu_offload_params={"experts.w2_weight"})
    for layer in layers:
        assert [name for name, each in named(layer).items() if is_in_host_memory(each)] == [
            "experts.w2_weight"
        ]


@pytest.mark.parametrize("version", ["0.33.0"], indirect=True)
def test_names_of_towers_have_their_prefix(vllm: Vllm) -> None:
    tower, layer, other = Layer(0), Layer(1), Layer(2)
    offloader = vllm.make(cpu_offload_gb=1, cpu_offload_params={"visual.norm"})
    assert (
        offloader.supports_tower_offload
        is vllm.module(f"{OFFLOADER}.uva").UVAOffloader.supports_tower_offload
    )
    offloader.wrap_modules(iter([layer]))
    offloader.wrap_modules(iter([tower]), prefix="visual")
    offloader.wrap_modules(iter([other]), prefix="other.visual")
    found = [
        [name for name, each in named(module).items() if is_in_host_memory(each)]
        for module in (layer, tower, other)
    ]
    assert found == [[], ["norm.weight"], ["norm.weight"]]
    # A module that is handed over again is not taken twice.
    held = offloader.host_bytes
    offloader.wrap_modules(iter([tower]), prefix="visual")
    assert offloader.host_bytes == held


def test_a_name_that_no_parameter_has_is_reported(vllm: Vllm, said: Said) -> None:
    offloader = wrapped(vllm, [Layer(0)], cpu_offload_params={"mlp.w2", "norm"})
    offloader.post_init()
    assert "--cpu-offload-params: no parameter is called mlp.w2, so nothing is offloaded for it" in said()
    assert "experts.w2_weight_scale" in said()


def test_an_unknown_budget_is_an_error(vllm: Vllm, said: Said) -> None:
    layers = [Layer(0)]
    offloader = vllm.make("uva")
    offloader.wrap_modules(iter(layers))
    offloader.post_init()
    assert not any(map(is_in_host_memory, layers[0].parameters()))
    assert "Nothing is offloaded: --offload-backend uva has a budget of 0 bytes" in said()


def test_what_is_tied_stays_tied(vllm: Vllm) -> None:
    shared = tensor(5_000, 7)
    layer = Part(
        a=parameter(100, 1), q=nn.Parameter(shared[:2_000], False), k=nn.Parameter(shared[2_000:], False)
    )
    other = Part(b=parameter(100, 2), again=layer.a)
    del shared
    offloader = wrapped(vllm, [layer, other])
    assert offloader.host_bytes == 5_200
    assert other.again is layer.a
    assert layer.k.data_ptr() == layer.q.data_ptr() + 2_000
    assert (content(layer.q), content(layer.k)) == (b"\7" * 2_000, b"\7" * 3_000)


def test_what_is_on_the_cpu_stays_there(vllm: Vllm) -> None:
    mixed = Part(weight=parameter(1_000, 3), table=parameter(5_000, 4, "cpu"))
    offloader = wrapped(vllm, [mixed])
    offloader.post_init()
    assert (mixed.table.device.type, offloader.host_bytes) == ("cpu", 1_000)
    on_cpu = Part(table=parameter(5_000, 4, "cpu"))
    offloader.wrap_modules(iter([on_cpu]))
    assert on_cpu.table.device.type == "cpu"


def test_what_has_no_memory_yet_is_offloaded_when_it_has(vllm: Vllm) -> None:
    layer = Part(
        norm=parameter(100, 1),
        weight=nn.Parameter(torch.empty(4_000, dtype=torch.uint8, device="meta"), False),
    )
    offloader = wrapped(vllm, [layer])
    assert offloader.host_bytes == 100
    layer.weight = parameter(3_333, 5)
    offloader.post_init()
    assert offloader.host_bytes == 3_433
    assert is_in_host_memory(layer.weight)
    assert getattr(layer.weight, MARK)


# Copied in


@pytest.mark.parametrize("switches", [(NO_UVA,), (NO_PIN,), ("POORWILL_DISABLE_PIN",), (NO_UVA, NO_PIN)])
def test_where_the_gpu_must_not_read_it_a_forward_copies_it_in(
    vllm: Vllm, switches: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    for name in switches:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("POORWILL_HOST_BUDGET", str(BUDGET))
    layers = [Layer(number) for number in range(2)]
    offloader = wrapped(vllm, layers, cpu_offload_params={"experts"})
    assert (offloader.uva_offloading, offloader.pin_memory) == (False, switches == (NO_UVA,))
    assert offloader.cpu_offload_params == {"experts"}
    assert offloader.cpu_offload_max_bytes == GIB
    held = 2 * (EACH - 3 * PAGE)
    assert offloader.cpu_offload_bytes == offloader.host_bytes == held
    assert held_exactly(held, BUDGET)
    weight = layers[0].experts.w2_weight
    assert (weight.device.type, weight.is_pinned()) == ("cpu", switches == (NO_UVA,))
    assert not hasattr(weight, MARK)
    for _ in range(2):
        seen: list[Any] = []
        for layer in layers:
            layer(tensor(8, 1), seen)
        assert seen == [expected(0), expected(1)]
        assert weight.device.type == "cpu"
    weight.data.copy_(tensor(19 * PAGE, 77))
    seen = []
    layers[0](tensor(8, 1), seen)
    assert seen[0]["experts.w2_weight"] == b"M" * 19 * PAGE
    offloader.post_init()
    # Once, however often it is looked at.
    assert layers[0].forward.__name__ == "forward"
    assert held_exactly(held, BUDGET)
    because = next(name for name in (*switches[::-1],))
    assert f"{because}=1 is set, and copied to the GPU" in said() or f"since {because}=1 is set" in said()


# Processed while loading


def processed(vllm: Vllm, module: Any, process: Callable[[], None]) -> None:
    with vllm.loading(module, CUDA):
        assert {each.device.type for each in module.parameters()} <= {"cuda"}
        process()


@pytest.mark.parametrize("is_read_in_place", [True, False])
def test_what_is_replaced_while_loading_goes_back_to_memory_of_ours(
    vllm: Vllm, is_read_in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POORWILL_HOST_BUDGET", str(BUDGET))
    if not is_read_in_place:
        monkeypatch.setenv(NO_UVA, "1")
    layers = [Layer(0), Layer(1)]
    offloader = wrapped(vllm, layers)
    assert held_exactly(2 * EACH, BUDGET)
    experts = layers[0].experts

    def quantise() -> None:
        experts.w2_weight = parameter(9 * PAGE, 50)
        experts.w2_weight_scale.data = tensor(PAGE, 51)
        experts.extra = parameter(2 * PAGE, 52)

    processed(vllm, experts, quantise)
    held = (3 + 9 + 1 + 2) * PAGE + EACH
    # What was given back is there for others, and new memory was made in it.
    rest = HostBuffer(BUDGET - 2 * EACH, device=0)
    HostBuffer(2 * EACH - held - 5 * PAGE, device=0).free()
    del rest
    assert offloader.cpu_offload_bytes == offloader.host_bytes == held
    assert contents(experts) == {
        "w2_weight": b"2" * 9 * PAGE, "w2_weight_scale": b"3" * PAGE, "extra": b"4" * 2 * PAGE
    }  # fmt: skip
    for each in experts.parameters():
        assert getattr(each, MARK, False) is is_read_in_place
        assert each.device.type == ("cuda" if is_read_in_place else "cpu")

    # Changed where it is, and removed.
    def scale() -> None:
        experts.w2_weight.data.copy_(tensor(9 * PAGE, 60))
        del experts.extra

    processed(vllm, experts, scale)
    assert contents(experts) == {"w2_weight": b"<" * 9 * PAGE, "w2_weight_scale": b"3" * PAGE}
    assert offloader.host_bytes == held - 2 * PAGE
    # What has nothing of ours is vLLM's affair.
    processed(vllm, Part(other=parameter(5, 1)), lambda: None)
    offloader.post_init()
    assert offloader.host_bytes == held - 2 * PAGE
    if not is_read_in_place:
        seen: list[Any] = []
        layers[0](tensor(8, 1), seen)
        assert seen[0]["experts.w2_weight"] == b"<" * 9 * PAGE


def test_what_is_replaced_elsewhere_is_offloaded_when_the_model_is_loaded(vllm: Vllm) -> None:
    layers = [Layer(0), Layer(1)]
    offloader = wrapped(vllm, layers)
    layers[1].experts.w2_weight = parameter(40_009, 44)
    assert not is_in_host_memory(layers[1].experts.w2_weight)
    offloader.post_init()
    assert is_in_host_memory(layers[1].experts.w2_weight)
    assert content(layers[1].experts.w2_weight) == b"," * 40_009
    assert offloader.host_bytes == 2 * EACH - 19 * PAGE + 40_009


def test_what_does_not_fit_again_is_named(vllm: Vllm, said: Said) -> None:
    layers = [Layer(0)]
    offloader = wrapped(vllm, layers, cpu_offload_gb=(EACH + 10) / GIB)
    layers[0].experts.w2_weight = parameter(120_000, 44)
    offloader.post_init()
    assert not is_in_host_memory(layers[0].experts.w2_weight)
    assert "1 parameters that were offloaded have been replaced" in said()
    assert "#0.experts.w2_weight (120000 B)" in said()
    assert offloader.host_bytes == EACH - 19 * PAGE


def test_with_experts_that_are_moved_nothing_is_moved_again(
    vllm: Vllm, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [Layer(0)]
    offloader = wrapped(vllm, layers)
    config: Any = ModuleType("config")
    config.parallel_config = config
    config.enable_eplb = True
    uva = importlib.import_module("poorwill.vllm._offload_uva")
    monkeypatch.setattr(uva._config, "get_current_vllm_config_or_none", lambda: config)
    layers[0].experts.w2_weight.data = tensor(120_000, 44)
    offloader.post_init()
    assert not is_in_host_memory(layers[0].experts.w2_weight)
    assert "since --enable-eplb is on: #0.experts.w2_weight (120000 B)" in said()
    # A sleep has to know that it is on the GPU.
    assert not hasattr(layers[0].experts.w2_weight, MARK)


def test_host_memory_goes_with_the_model(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POORWILL_HOST_BUDGET", str(BUDGET))
    layers = [Layer(0)]
    offloader = wrapped(vllm, layers)
    offloader.post_init()
    assert held_exactly(EACH, BUDGET)
    layers.clear()
    assert offloader.host_bytes == 0
    assert held_exactly(0, BUDGET)
