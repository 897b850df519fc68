"""What our prefetching offloader promises in vLLM, over fakes of PyTorch and the driver, with the
fake's and vLLM's own offloaders. `test_vllm_suites.py` runs it.
"""

import gc
import importlib
from typing import Any

import poorwill
import pytest
from fake_vllm.offloaders import NO_PIN, NO_UVA, WORKER, Vllm
from vllm_offload_models import (
    BUDGET,
    CUDA,
    EACH,
    PAGE,
    SIZES,
    Layer,
    Part,
    Said,
    content,
    expected,
    forward,
    held_exactly,
    named,
    nn,
    parameter,
    tensor,
    torch,
)


def made(vllm: Vllm, layers: list[Any], step: int = 1, group: int = 1, **settings: Any) -> Any:
    offloader = vllm.make(offload_group_size=group, offload_prefetch_step=step, **settings)
    assert offloader.wrap_modules(iter(layers)) == layers
    return offloader


def hosts(offloader: Any) -> list[Any]:
    return [each.host for each in offloader.weights()]


@pytest.mark.parametrize(("count", "step"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (2, 4), (7, 4)])
def test_every_layer_finds_its_own_weights(
    vllm: Vllm, count: int, step: int, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    monkeypatch.setenv("POORWILL_HOST_BUDGET", str(BUDGET))
    layers = [Layer(number) for number in range(count)]
    offloader = made(vllm, layers, step)
    assert held_exactly(count * EACH, BUDGET)
    offloader.post_init()
    assert offloader.host_bytes == count * EACH
    assert held_exactly(count * EACH, BUDGET)
    for _ in range(3):
        assert forward(layers) == [expected(number) for number in range(count)]
    assert all(each.is_pinned() for each in hosts(offloader))
    assert {each.device for layer in layers for each in layer.parameters()} == {CUDA}
    assert f"of {count} layers, page-locked, and copied to the GPU ahead of their use" in said()


def test_a_layer_too_much_in_a_row_is_what_vllm_gets_wrong(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `_start_prefetch` puts right; the day on which it need not, this says so."""
    monkeypatch.setenv("POORWILL_OFFLOAD", "0")
    layers = [Layer(number) for number in range(3)]
    offloader = made(vllm, layers, 2)
    offloader.post_init()
    forward(layers)
    is_right = forward(layers) == [expected(number) for number in range(3)]
    assert is_right == (vllm.version != "0.20.2")


class Sum(Layer):
    """One that adds its parameters up, on the GPU."""

    def forward(self, x: Any, _: Any = None) -> Any:
        return x + sum(each.double().sum() for each in self.parameters())


# The fake's graphs replay nothing.
@pytest.mark.real_torch
@pytest.mark.parametrize(("count", "step"), [(5, 2), (7, 3), (4, 1), (2, 4)])
def test_layers_in_a_graph_have_their_own_weights_in_each_replay(vllm: Vllm, count: int, step: int) -> None:
    def run(x: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return x

    layers = [Sum(number) for number in range(count)]
    # Sums of bytes, which single precision does not hold.
    x = torch.zeros(1, dtype=torch.float64, device=CUDA)
    right = run(x).item()
    offloader = made(vllm, layers, step)
    offloader.post_init()
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # As vLLM captures and replays.
    offloader.sync_prev_onload()
    with torch.cuda.graph(graph):
        summed = run(x)
        offloader.join_after_forward()
    for number in range(20):
        offloader.sync_prev_onload()
        x.fill_(number)
        graph.replay()
        assert summed.item() == right + number
        # Forwards outside of the graph may come between.
        assert number % 3 or run(x).item() == right + number


def test_host_memory_is_within_its_budget(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POORWILL_HOST_BUDGET", str(2 * EACH - PAGE))
    with pytest.raises(poorwill.OutOfMemoryError) as refused:
        made(vllm, [Layer(0), Layer(1)])
    text = str(refused.value)
    for part in (
        "offloading #1.experts.w2_weight_scale for prefetching",
        "held before",
        "the limit for host",
    ):
        assert part in text, text
    assert "raise --offload-group-size or lower --offload-num-in-group, raise POORWILL_HOST_BUDGET" in text


@pytest.mark.parametrize("switch", [NO_PIN, "POORWILL_DISABLE_PIN"])
def test_it_is_pageable_as_the_switches_say(
    vllm: Vllm, switch: str, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    monkeypatch.setenv(switch, "1")
    layers = [Layer(0), Layer(1)]
    offloader = made(vllm, layers)

    def quantise() -> None:
        layers[0].experts.w2_weight = parameter(9 * PAGE, 50)

    with vllm.loading(layers[0].experts, CUDA):
        quantise()
    offloader.post_init()
    assert not any(each.is_pinned() for each in hosts(offloader))
    assert forward(layers)[1] == expected(1)
    assert f"pageable, since {switch}=1 is set, and copied to the GPU" in said()


def test_only_what_is_meant_is_offloaded(vllm: Vllm, said: Said) -> None:
    layers = [Layer(number) for number in range(4)]
    offloader = made(vllm, layers, group=2, offload_params={"experts.w2_weight", "mlp.w1"})
    offloader.post_init()
    assert [layer.module for layer in offloader.layers] == [layers[1], layers[3]]
    assert offloader.host_bytes == 2 * SIZES["experts.w2_weight"]
    assert forward(layers) == [expected(number) for number in range(4)]
    text = said()
    assert "--offload-params: no layer that is offloaded has a parameter called mlp.w1, so nothing" in text


def test_a_selection_of_nothing_is_reported(vllm: Vllm, said: Said) -> None:
    made(vllm, [Layer(0)], group=2)
    assert "Nothing is offloaded: of 1 layers, --offload-group-size 2" in said()
    made(vllm, [Layer(0)], offload_params={"nowhere"})
    assert "--offload-params nowhere mean none" in said()


# Tied


def test_what_is_tied_in_a_layer_stays_tied(vllm: Vllm) -> None:
    shared = tensor(5 * PAGE, 7)
    layer = Part(
        a=parameter(PAGE, 1), q=nn.Parameter(shared[: 2 * PAGE], False), k=nn.Parameter(shared[PAGE:], False)
    )
    del shared
    offloader = made(vllm, [layer])
    assert offloader.host_bytes == 6 * PAGE
    # A loader writes to one of them.
    layer.q.data.copy_(tensor(2 * PAGE, 9))
    assert content(layer.k) == b"\t" * PAGE + b"\7" * 3 * PAGE
    with vllm.loading(layer, CUDA):
        pass
    offloader.post_init()
    layer.forward = lambda x: x
    assert offloader.host_bytes == 6 * PAGE
    torch.cuda.synchronize()
    assert (content(layer.q), content(layer.k)) == (b"\t" * 2 * PAGE, b"\t" * PAGE + b"\7" * 3 * PAGE)


def test_what_cannot_stay_tied_is_refused(vllm: Vllm) -> None:
    one, other = Layer(0), Layer(1)
    other.norm.weight = one.norm.weight
    said = r"#1.norm.weight and #0.norm.weight are one parameter"
    # Whether or not both are offloaded.
    for group in (1, 2):
        with pytest.raises(poorwill.PoorwillError, match=said):
            made(vllm, [one, other], group=group)
        one, other = Layer(0), Layer(1)
        other.norm.weight = one.norm.weight
    made(vllm, [one, other], offload_params={"experts"}).post_init()
    assert forward([one, other])[0] == expected(0)
    shared = tensor(2 * PAGE, 7)
    layer = Part(q=nn.Parameter(shared, False), k=nn.Parameter(shared[:PAGE], False))
    with pytest.raises(poorwill.PoorwillError, match=r"q shares its memory .* name all of them, or none"):
        made(vllm, [layer], offload_params={"q"})


def test_what_has_no_memory_yet_is_refused(vllm: Vllm) -> None:
    layer = Part(
        a=parameter(PAGE, 1), weight=nn.Parameter(torch.empty(PAGE, dtype=torch.uint8, device="meta"), False)
    )
    with pytest.raises(poorwill.PoorwillError, match=r"#0.weight is to be prefetched .* is on meta"):
        made(vllm, [layer])


# Processed while loading


def test_what_is_replaced_gives_its_memory_back(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POORWILL_HOST_BUDGET", str(2 * EACH))
    layers = [Layer(0), Layer(1)]
    offloader = made(vllm, layers)
    experts = layers[0].experts

    # Within a budget that has no space for both, and none for what vLLM would make of its own.
    def quantise() -> None:
        experts.w2_weight = parameter(9 * PAGE, 50)
        experts.w2_weight_scale.data = tensor(PAGE, 51)

    with vllm.loading(experts, CUDA):
        assert {each.device.type for each in experts.parameters()} == {"cuda"}
        quantise()
    assert {each.device.type for each in experts.parameters()} == {"cpu"}
    held = 2 * EACH - (19 - 9 + 5 - 1) * PAGE
    assert offloader.host_bytes == held
    with vllm.loading(layers[1].experts, CUDA):
        layers[1].experts.w2_weight.data.copy_(tensor(19 * PAGE, 70))
        del layers[1].experts.w2_weight_scale
    held -= 5 * PAGE
    assert offloader.host_bytes == held
    # Outside of that, too, and on the CPU as well.
    layers[1].norm.weight = parameter(2 * PAGE, 80)
    layers[0].norm.weight.data = tensor(PAGE, 81, "cpu")
    offloader.post_init()
    assert offloader.host_bytes == held - 3 * PAGE
    assert all(each.is_pinned() for each in hosts(offloader))
    first = {
        "norm.weight": b"Q" * PAGE,
        "experts.w2_weight": b"2" * 9 * PAGE,
        "experts.w2_weight_scale": b"3" * PAGE,
    }
    second = {"norm.weight": b"P" * 2 * PAGE, "experts.w2_weight": b"F" * 19 * PAGE}
    for _ in range(2):
        assert forward(layers) == [first, second]


def test_an_error_of_ours_is_not_taken_for_a_parameter_that_is_gone(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [Layer(0)]
    offloader = made(vllm, layers)
    prefetch = importlib.import_module("poorwill.vllm._offload_prefetch")

    def fails(*_: Any) -> None:
        raise AttributeError("something else")

    monkeypatch.setattr(prefetch, "hosted", fails)
    layers[0].norm.weight = parameter(2 * PAGE, 80)
    with pytest.raises(AttributeError, match="something else"):
        offloader.post_init()


# Weights that are written anew, and sleeps


@pytest.mark.parametrize("method", ["reload_weights", "update_weights"])
@pytest.mark.parametrize("switch", [None, NO_UVA, NO_PIN])
def test_weights_that_are_written_anew_are_those_of_the_next_forward(
    vllm: Vllm, method: str, switch: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if switch is not None:
        monkeypatch.setenv(switch, "1")
    layers = [Layer(number) for number in range(3)]
    offloader = made(vllm, layers, 2)
    offloader.post_init()
    forward(layers)
    places = {name: each.data_ptr() for name, each in named(layers[2]).items()}
    worker = vllm.module(WORKER).Worker()

    def write() -> None:
        for number, layer in enumerate(layers):
            for at, each in enumerate(layer.parameters()):
                # What a model computes from its weights it computes on the GPU.
                assert each.device.type == ("cpu" if switch else "cuda")
                each.data.copy_(tensor(each.numel(), 100 + 8 * number + at))

    worker.write = write
    getattr(worker, method)(*([] if method == "reload_weights" else [{}]))
    # Graphs know the buffers by their addresses.
    assert {name: each.data_ptr() for name, each in named(layers[2]).items()} == places
    new = [
        {name: bytes([100 + 8 * number + at]) * nbytes for at, (name, nbytes) in enumerate(SIZES.items())}
        for number in range(3)
    ]
    assert forward(layers) == new
    assert forward(layers) == new


def test_an_update_in_several_calls_is_written_where_it_belongs(vllm: Vllm) -> None:
    """As vLLM reloads layer by layer: meanwhile others are in the places of the parameters."""
    layers = [Layer(0), Layer(1)]
    offloader = made(vllm, layers)
    offloader.post_init()
    worker = vllm.module(WORKER).Worker()
    kept = [dict(layer.norm._parameters) for layer in layers]

    def begin() -> None:
        for layer in layers:
            layer.norm.weight = nn.Parameter(torch.empty(3 * PAGE, dtype=torch.uint8, device="meta"), False)

    def end() -> None:
        for number, (layer, parameters) in enumerate(zip(layers, kept, strict=True)):
            parameters["weight"].data.copy_(tensor(3 * PAGE, 200 + number))
            layer.norm.weight = parameters["weight"]

    worker.write = begin
    worker.start_weight_update()
    worker.write = lambda: None
    worker.update_weights({})
    worker.write = end
    worker.finish_weight_update()
    for _ in range(2):
        assert [seen["norm.weight"] for seen in forward(layers)] == [
            bytes([200 + number]) * 3 * PAGE for number in range(2)
        ]


def test_a_write_that_fails_leaves_the_buffers_in_place(vllm: Vllm) -> None:
    layers = [Layer(0), Layer(1)]
    offloader = made(vllm, layers)
    offloader.post_init()
    worker = vllm.module(WORKER).Worker()

    def write() -> None:
        raise RuntimeError("no checkpoint")

    worker.write = write
    with pytest.raises(RuntimeError, match="no checkpoint"):
        worker.reload_weights()
    assert forward(layers) == [expected(0), expected(1)]


@pytest.mark.parametrize("tags", [None, ["weights"], ["kv_cache"]])
def test_buffers_that_were_lost_in_a_sleep_are_filled_by_the_wake(vllm: Vllm, tags: list[str] | None) -> None:
    layers = [Layer(number) for number in range(3)]
    offloader = made(vllm, layers, 2)
    offloader.post_init()
    forward(layers)
    # The first layers are on their way once more, and a sleep waits for that.
    torch.cuda.synchronize()
    for layer in layers:
        for each in layer.parameters():
            each.data.zero_()
    worker = vllm.module(WORKER).Worker()
    worker.wake_up(tags)
    seen = forward(layers)
    if tags == ["kv_cache"]:
        # Nothing accesses weights that sleep.
        assert seen[0] != expected(0)
    else:
        assert seen == [expected(number) for number in range(3)]
    assert worker.calls == ["wake_up"]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("backend", ["uva", "prefetch"])
def test_a_sleep_of_the_pool_leaves_offloaded_weights_right(vllm: Vllm, backend: str, level: int) -> None:
    from poorwill.torch import Pool

    layers = [Layer(number) for number in range(3)]
    arena = poorwill.arena(0, "asleep", limit="64MiB")
    with Pool(arena, "weights", watch="segments"):
        if backend == "uva":
            offloader = vllm.make(cpu_offload_gb=1)
            offloader.wrap_modules(iter(layers))
        else:
            offloader = made(vllm, layers, 2)
        offloader.post_init()
    right = [expected(number) for number in range(3)]
    assert forward(layers) == right
    pooled = arena.stats().live_bytes
    # The buffers are in the pool, and what the GPU reads in host memory is not.
    assert (pooled > 2 * EACH) if backend == "prefetch" else (pooled < EACH)
    arena.sleep(level)
    if backend == "uva":
        assert [content(each) for each in layers[1].parameters()] == list(expected(1).values())
    arena.wake(["weights"])
    vllm.module(WORKER).Worker().wake_up()
    assert forward(layers) == right
    assert forward(layers) == right
    del offloader
    layers.clear()
    vllm.base.set_offloader(vllm.base.NoopOffloader())
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    arena.close()
