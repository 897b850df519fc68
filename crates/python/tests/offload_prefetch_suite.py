"""What prefetched layers promise: on the host device and on a GPU, with PyTorch itself.

`test_suites.py` runs it. Outputs are compared bit by bit with those of the same
model with all its parameters resident.
"""

import copy
import gc
import pickle
import random
from itertools import pairwise
from typing import Any

import poorwill
import pytest
from offload_models import (
    Nested,
    bytes_of,
    is_nothing_held,
    is_same,
    made,
    names_of,
    nbytes_of,
    nn,
    place,
    torch,
    words,
)
from poorwill.offload import (
    HostBuffer,
    PrefetchOffloader,
    PrefetchStats,
    ReplacedError,
    UvaOffloader,
    _prefetch,
)
from poorwill.offload._layout import Layout


def addresses(module: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in module.named_parameters()}


# Outputs


@pytest.mark.parametrize("pin", ["auto", False])
@pytest.mark.parametrize("ahead", [0, 1, 2, 4, 9])
@pytest.mark.parametrize("layers", [1, 5])
def test_a_model_computes_the_same_bits(device: str, layers: int, ahead: int, pin: Any) -> None:
    model = made(device, layers)
    state = bytes_of(model.state_dict())
    expected = [model(words(device, seed)) for seed in range(4)]
    parameters = list(model.parameters())
    offloader = PrefetchOffloader(model.layers, ahead=ahead, device=device, pin=pin, within=model)
    assert len(offloader.slots) == min(ahead + 1, layers)
    assert offloader.report.taken_bytes == nbytes_of(*model.layers.parameters())
    assert (offloader.report.left, offloader.report.unmatched) == ((), ())
    fixed = addresses(model)
    for seed in (0, 1, 2, 3, 0):
        assert is_same(model(words(device, seed)), expected[seed])
        assert addresses(model) == fixed
        assert bytes_of(model.state_dict()) == state
    # In order, no layer was ever waited for from its call on.
    assert offloader.stats.copied_at_once == 0
    assert (offloader.stats.copied_ahead > len(offloader.slots)) == (layers > ahead + 1)
    assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True))
    for on in ("device", "host", "device"):
        offloader.close(on=on)
        assert offloader.slots == ()
        assert bytes_of(model.state_dict()) == state
        assert is_same(model(words(device)), expected[0])
    assert {parameter.device for parameter in parameters} == {place(device)}


def test_a_model_that_stays_on_the_host(device: str) -> None:
    model = made(device)
    state = bytes_of(model.state_dict())
    offloader = PrefetchOffloader(model.layers, device=device)
    offloader.close(on="host")
    assert {parameter.device.type for parameter in model.layers.parameters()} == {"cpu"}
    assert bytes_of(model.state_dict()) == state
    with pytest.raises(ValueError, match="device"):
        offloader.close(on="disk")  # type: ignore[arg-type]


def test_layers_share_slots_of_the_largest(device: str) -> None:
    model = made(device)
    offloader = PrefetchOffloader(model.layers, ahead=1, device=device)
    assert len({slot.numel() for slot in offloader.slots}) == 1
    first, second = (slot.data_ptr() for slot in offloader.slots)
    size = offloader.slots[0].numel()
    for number, layer in enumerate(model.layers):
        begin = (first, second)[number % 2]
        spans = sorted((p.data_ptr(), p.data_ptr() + nbytes_of(p)) for p in layer.parameters())
        assert begin == spans[0][0]
        assert spans[-1][1] <= begin + size
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
        assert all(address % 256 == 0 for address, _ in spans) or device.startswith("host")


def test_only_what_is_selected_moves(device: str) -> None:
    model = made(device)
    expected = model(words(device))
    offloader = PrefetchOffloader(model.layers, device=device, parameters=("mlp", "nowhere"))
    assert names_of(offloader.report.taken) == {
        f"{number}.mlp.{part}.{kind}" for number in range(5) for part in (0, 2) for kind in ("weight", "bias")
    }
    assert offloader.report.unmatched == ("nowhere",)
    assert is_same(model(words(device)), expected)
    nothing = PrefetchOffloader(model.layers, device=device, parameters=("nowhere",))
    assert (nothing.slots, nothing.report.taken, nothing.stats) == ((), (), PrefetchStats())
    nothing.close()
    with pytest.raises(TypeError, match="modules"):
        PrefetchOffloader([torch.ones(1)])
    with pytest.raises(ValueError, match="ahead"):
        PrefetchOffloader(model.layers, ahead=-1)
    with pytest.raises(ValueError, match="within"):
        PrefetchOffloader(model.layers, within=model.head)


def test_what_is_tied_to_elsewhere_stays_resident(device: str) -> None:
    model = made(device)
    model.layers[3].mlp[0].bias = model.layers[0].mlp[0].bias
    model.layers[1].norm_too = model.norm
    # In one layer it may be tied as it likes.
    model.layers[2].same = nn.Parameter(model.layers[2].mlp[0].weight.data.t())
    expected = model(words(device))
    offloader = PrefetchOffloader(model.layers, device=device, within=model)
    assert names_of(offloader.report.left) == {
        *("layers.0.mlp.0.bias", "layers.3.mlp.0.bias"),
        *("layers.1.norm_too.weight", "layers.1.norm_too.bias", "norm.weight", "norm.bias"),
    }
    for _ in range(2):
        assert is_same(model(words(device)), expected)
    layer = model.layers[2]
    assert layer.same.data_ptr() == layer.mlp[0].weight.data_ptr()
    offloader.close()
    assert layer.same.data_ptr() == layer.mlp[0].weight.data_ptr()
    assert is_same(model(words(device)), expected)


def test_the_same_layer_twice_stays_resident(device: str) -> None:
    model = made(device)
    model.layers[4] = model.layers[1]
    expected = model(words(device))
    offloader = PrefetchOffloader(model.layers, device=device)
    assert {name.partition(".")[0] for name in names_of(offloader.report.left)} == {"1", "4"}
    assert is_same(model(words(device)), expected)


# Whatever the order


@pytest.mark.parametrize("seed", range(6))
def test_layers_in_any_order_have_their_own_bytes(device: str, seed: int) -> None:
    rng = random.Random(seed)
    model = made(device, 6)
    resident = copy.deepcopy(model)
    offloader = PrefetchOffloader(model.layers, ahead=rng.randrange(4), device=device)
    x = torch.randn(2, 3, 32, device=place(device))
    for _ in range(12):
        for _ in range(rng.randrange(1, 8)):
            number = rng.randrange(6)
            fails = rng.random() < 0.2
            model.layers[number].fails = fails
            if fails:
                with pytest.raises(RuntimeError, match="in the middle"):
                    model.layers[number](x)
            else:
                assert is_same(model.layers[number](x), resident.layers[number](x))
            model.layers[number].fails = False
        assert is_same(model(words(device)), resident(words(device)))
    assert offloader.stats.copied_at_once > 0
    # Once it is in order again, nothing is waited for.
    before = offloader.stats.copied_at_once
    assert is_same(model(words(device)), resident(words(device)))
    assert offloader.stats.copied_at_once == before


def test_an_interrupted_forward_leaves_the_model_usable(device: str) -> None:
    model = made(device)
    expected = model(words(device))
    offloader = PrefetchOffloader(model.layers, ahead=2, device=device)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for number in range(5):
        # PyTorch does not run what follows it.
        handle = model.layers[number].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(words(device))
        handle.remove()
        assert is_same(model(words(device)), expected)
    before = offloader.stats.copied_at_once
    assert is_same(model(words(device)), expected)
    assert offloader.stats.copied_at_once == before


def test_a_layer_within_itself_keeps_its_bytes(device: str) -> None:
    layers = nn.ModuleList(Nested() for _ in range(3)).to(place(device))
    resident = copy.deepcopy(layers)
    x = torch.randn(4, 4, device=place(device))
    offloader = PrefetchOffloader(layers, ahead=1, device=device)
    for _ in range(3):
        for layer, other in zip(layers, resident, strict=True):
            assert is_same(layer(x, 2), other(x, 2))
    assert offloader.stats.copied_at_once == 0


# Failures


def test_every_allocation_may_fail(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(device)
    expected = model(words(device))
    before = addresses(model)
    for nth in range(5):
        count = [0]

        def failing(*args: Any, count: list[int] = count, nth: int = nth, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] > nth:
                raise poorwill.OutOfMemoryError("no host memory for this test")
            return HostBuffer(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(_prefetch, "HostBuffer", failing)
            with pytest.raises(
                poorwill.OutOfMemoryError, match=rf"{nth}\.before\.weight.*nothing was changed"
            ):
                PrefetchOffloader(model.layers, device=device)
        assert addresses(model) == before
        assert is_nothing_held(device)
        assert is_same(model(words(device)), expected)
    PrefetchOffloader(model.layers, device=device)
    assert is_same(model(words(device)), expected)


@pytest.mark.parametrize("nth", [1, 2])
def test_slots_that_cannot_be_had_change_nothing(
    device: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(device)
    before = addresses(model)
    empty, count = torch.empty, [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        count[0] += len(args) == 1 and isinstance(args[0], int) and args[0] > 0
        if count[0] == nth:
            raise RuntimeError("no device memory for this test")
        return empty(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", failing)
        with pytest.raises(poorwill.PoorwillError, match="2 slots of"):
            PrefetchOffloader(model.layers, device=device)
    assert addresses(model) == before
    offloader = PrefetchOffloader(model.layers, device=device)
    expected, fixed = model(words(device)), addresses(model)
    count[0] = 0
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", failing)
        with pytest.raises(poorwill.PoorwillError, match=r"put .* back.*nothing was changed"):
            offloader.close()
    assert addresses(model) == fixed
    assert is_same(model(words(device)), expected)
    offloader.close()
    assert is_same(model(words(device)), expected)


@pytest.mark.parametrize("nth", [1, 17, 60, 63])
def test_an_interrupt_leaves_no_parameter_in_a_slot(
    device: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(device)
    before, expected, count = addresses(model), model(words(device)), [0]
    over, remember = Layout.over, _prefetch._Layer.remember

    def interrupted(what: Any, *rest: Any) -> Any:
        count[0] += 1
        if count[0] == nth:
            raise KeyboardInterrupt
        return over(what, *rest) if isinstance(what, Layout) else remember(what)

    with monkeypatch.context() as patched:
        patched.setattr(Layout, "over", interrupted)
        patched.setattr(_prefetch._Layer, "remember", interrupted)
        with pytest.raises(KeyboardInterrupt):
            PrefetchOffloader(model.layers, device=device)
    # What had all come there is resident again, elsewhere.
    assert addresses(model) == before or nth > 60
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in model.layers)
    assert is_nothing_held(device)
    assert is_same(model(words(device)), expected)
    assert is_same(copy.deepcopy(model)(words(device)), expected)


def test_what_is_not_plain_is_refused(device: str) -> None:
    layers = nn.ModuleList([nn.Linear(4, 4).to(place(device)), nn.Linear(4, 4, device="meta")])
    before = addresses(layers[0])
    with pytest.raises(ValueError, match=r"1\.weight.*meta"):
        PrefetchOffloader(layers, device=device)
    assert addresses(layers[0]) == before


# What must not be done silently


def test_replaced_parameters_are_errors(device: str) -> None:
    model = made(device)
    offloader = PrefetchOffloader(model.layers, device=device)
    model(words(device))
    fresh = nn.Parameter(torch.ones_like(model.layers[3].mlp[0].weight))
    model.layers[3].mlp[0].weight = fresh
    assert offloader.replaced() == ("3.mlp.0.weight",)
    for _ in range(2):
        with pytest.raises(ReplacedError, match=r"3\.mlp\.0\.weight.*close"):
            model(words(device))
    offloader.close()
    assert model.layers[3].mlp[0].weight is fresh
    expected = model(words(device))
    PrefetchOffloader(model.layers, device=device)
    assert is_same(model(words(device)), expected)


def test_moving_the_model_is_seen(device: str) -> None:
    model = made(device)
    PrefetchOffloader(model.layers, device=device)
    model.double()
    with pytest.raises(ReplacedError, match="replaced or moved"):
        model(words(device))


def test_what_is_prefetched_is_not_offloaded_twice(device: str) -> None:
    model = made(device)
    expected = model(words(device))
    offloader = PrefetchOffloader(model.layers[:3], device=device, parameters=("mlp",), within=model)
    for again in (
        lambda: PrefetchOffloader(model.layers, device=device),
        lambda: UvaOffloader(device=device).offload(model),
        lambda: UvaOffloader(device=device).offload(model.layers[1].mlp),
    ):
        with pytest.raises(poorwill.PoorwillError, match="prefetched; close"):
            again()
        assert is_same(model(words(device)), expected)
    # Other layers, and other parameters of these, may be.
    PrefetchOffloader(model.layers[3:], device=device, within=model)
    UvaOffloader(device=device, parameters=("attention",)).offload(model.layers[0])
    assert is_same(model(words(device)), expected)
    offloader.close()
    UvaOffloader(device=device).offload(model.layers[1].mlp)
    assert is_same(model(words(device)), expected)


def test_what_is_made_of_prefetched_parameters_is_an_error(device: str) -> None:
    model = made(device)
    expected, state = model(words(device)), bytes_of(model.state_dict())
    offloader = PrefetchOffloader(model.layers, device=device)
    linears = [model.layers[number].mlp[0] for number in (0, 2)]
    kept = [linear.bias for linear in linears]
    wrong = {
        # At the same address, and anything when its layer is not the one that is called.
        "another over the same": nn.Parameter(kept[1].data),
        "one of another layer": kept[0],
    }
    for made_of in wrong.values():
        linears[1].bias = made_of
        assert offloader.replaced() == ("2.mlp.0.bias",)
        with pytest.raises(ReplacedError, match=r"2\.mlp\.0\.bias"):
            model(words(device))
        with pytest.raises(ReplacedError, match="put back"):
            offloader.close()
    linears[1].bias = nn.Parameter(kept[1].data)
    with pytest.raises(ReplacedError, match=r"layers\.2\.mlp\.0\.bias.*put back"):
        model.state_dict()
    linears[1].bias = kept[1]
    # Also what has no name yet.
    model.layers[4].more = nn.Parameter(kept[0].data)
    with pytest.raises(ReplacedError, match="more"):
        offloader.close()
    del model.layers[4].more
    assert is_same(model(words(device)), expected)
    assert bytes_of(model.state_dict()) == state
    offloader.close()
    assert bytes_of(model.state_dict()) == state


@pytest.mark.parametrize("on", ["device", "host"])
def test_other_layouts_of_the_same_memory_stay(device: str, on: Any) -> None:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5)).to(place(device))
    x = torch.randn(2, 8, device=place(device))
    offloader = PrefetchOffloader(layers, ahead=1, device=device)
    for layer in layers:
        layer.weight.data = layer.weight.data.t()
    expected = [layer(x) for layer in layers]
    state = layers.state_dict()
    offloader.close(on=on)
    assert bytes_of(layers.state_dict()) == bytes_of(state)
    layers.to(place(device))
    assert all(is_same(layer(x), out) for layer, out in zip(layers, expected, strict=True))


def test_backward_through_other_layers_bytes_is_an_error(device: str) -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))).to(place(device)).requires_grad_(False)
    resident = copy.deepcopy(layers)
    x = torch.randn(2, 8, device=place(device), requires_grad=True)
    with torch.enable_grad():
        (expected,) = torch.autograd.grad(resident(x).sum(), x)
        offloader = PrefetchOffloader(layers, ahead=1, device=device)
        out = layers(x).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, x)
        # With a slot for each nothing is overwritten.
        offloader.close()
        PrefetchOffloader(layers, ahead=4, device=device)
        assert is_same(torch.autograd.grad(layers(x).sum(), x)[0], expected)


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, while it compiles
@pytest.mark.parametrize("when", ["before", "afterwards"])
def test_a_compiled_model_computes_the_same_bits(device: str, when: str) -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).to(place(device))
    x = torch.randn(2, 8, device=place(device))
    expected = layers(x)
    torch._dynamo.reset()
    compiled = torch.compile(layers, backend="eager")
    if when == "before":
        assert is_same(compiled(x), expected)
    offloader = PrefetchOffloader(layers, device=device)
    for _ in range(4):
        assert is_same(compiled(x), expected)
    assert offloader.stats.copied_ahead > 4
    offloader.close()
    assert is_same(compiled(x), expected)
    del compiled
    torch._dynamo.reset()


def test_copies_and_loads_are_refused(device: str) -> None:
    model = made(device)
    expected, state = model(words(device)), copy.deepcopy(model.state_dict())
    offloader = PrefetchOffloader(model.layers, device=device)
    for module in (model, model.layers[4], model.layers[4].mlp[0]):
        with pytest.raises(poorwill.PoorwillError, match="copy"):
            copy.deepcopy(module)
        with pytest.raises(poorwill.PoorwillError, match="pickle"):
            pickle.dumps(module)
        with pytest.raises(poorwill.PoorwillError, match="load"):
            module.load_state_dict(module.state_dict())
    assert is_same(model(words(device)), expected)
    # A state of a part is right, too.
    part = model.layers[4].mlp[0].state_dict()
    assert bytes_of(part)["weight"] == bytes_of(state)["layers.4.mlp.0.weight"]
    offloader.close()
    model.load_state_dict(state)
    assert is_same(copy.deepcopy(model)(words(device)), expected)
    assert is_same(pickle.loads(pickle.dumps(model))(words(device)), expected)


def test_memory_goes_with_the_offloader_and_the_model(device: str) -> None:
    model = made(device)
    expected = model(words(device))
    PrefetchOffloader(model.layers, device=device)
    gc.collect()
    # The layers keep what they need.
    assert is_same(model(words(device)), expected)
    assert not is_nothing_held(device)
    del model
    assert is_nothing_held(device)
    model = made(device)
    offloader = PrefetchOffloader(model.layers, device=device)
    offloader.close()
    assert is_nothing_held(device)


# Graphs


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [0, 1, 3, 9])
def test_graphs_and_forwards_take_turns(ahead: int) -> None:
    device = "cuda:0"
    model = made(device)
    inputs = [words(device, seed) for seed in range(3)]
    expected = [model(each) for each in inputs]
    offloader = PrefetchOffloader(model.layers, ahead=ahead, device=device)
    still = inputs[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(still)
    torch.cuda.current_stream().wait_stream(side)
    captured = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(still)
        captured.append((graph, out))
    rng = random.Random(ahead)
    for _ in range(30):
        chosen = rng.randrange(3)
        step = rng.random()
        if step < 0.5:
            graph, out = rng.choice(captured)
            still.copy_(inputs[chosen])
            graph.replay()
            assert is_same(out, expected[chosen])
        elif step < 0.8:
            assert is_same(model(inputs[chosen]), expected[chosen])
        else:
            model.layers[3].fails = True
            with pytest.raises(RuntimeError, match="in the middle"):
                model(inputs[chosen])
            model.layers[3].fails = False
            offloader.settle()


@pytest.mark.gpu
def test_a_capture_of_some_layers_is_settled() -> None:
    model = made("cuda:0")
    x = torch.randn(2, 3, 32, device="cuda:0")

    def part() -> Any:
        return model.layers[2](model.layers[1](x))

    expected = part()
    offloader = PrefetchOffloader(model.layers, ahead=1, device="cuda:0")
    part()
    offloader.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = part()
        offloader.settle()
    for _ in range(3):
        model(words("cuda:0"))
        graph.replay()
        assert is_same(out, expected)


@pytest.mark.gpu
def test_pageable_memory_is_not_captured() -> None:
    model = made("cuda:0")
    expected = model(words("cuda:0"))
    PrefetchOffloader(model.layers, device="cuda:0", pin=False)
    still = words("cuda:0")
    model(still)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(poorwill.PoorwillError, match="pageable"), torch.cuda.graph(graph):
        model(still)
    assert is_same(model(still), expected)


@pytest.mark.gpu
def test_forwards_on_other_streams_wait_for_one_another() -> None:
    model = made("cuda:0")
    expected = [model(words("cuda:0", seed)) for seed in range(8)]
    PrefetchOffloader(model.layers, ahead=1, device="cuda:0")
    streams = [torch.cuda.Stream() for _ in range(3)]
    inputs = [words("cuda:0", seed) for seed in range(8)]
    torch.cuda.synchronize()
    found = []
    for number, each in enumerate(inputs):
        with torch.cuda.stream(streams[number % 3]):
            found.append(model(each))
    torch.cuda.synchronize()
    assert all(is_same(one, other) for one, other in zip(found, expected, strict=True))
