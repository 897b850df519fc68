"""Lifetimes of offloaded modules: replaced parameters, copies, and how long memory lives. `test_suites.py`
runs it.
"""

import copy
import gc
import io
import pickle
from functools import partial

import pytest
from helpers import together
from offload_models import (
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
from poorwill.offload import PrefetchOffloader, ReplacedError, UvaOffloader

# Replaced parameters


def test_replaced_parameters_are_named_and_offloaded_again(device: str, way: str) -> None:
    model = made(device)
    offloader = UvaOffloader(device=device, parameters=("mlp",))
    first = offloader.offload(model, layers=model.layers)
    used = offloader.used_bytes
    for layer in model.layers[:2]:
        layer.mlp[0].weight = nn.Parameter(layer.mlp[0].weight.detach().to(place(device)).clone() * 2)
    # Also one that is the same Parameter over other memory.
    model.layers[2].mlp[2].bias.data = model.layers[2].mlp[2].bias.data.to(place(device)).clone()
    names = ("layers.0.mlp.0.weight", "layers.1.mlp.0.weight", "layers.2.mlp.2.bias")
    for _ in range(2):
        assert offloader.replaced() == names
        with pytest.raises(ReplacedError, match=r"layers\.0\.mlp\.0\.weight, layers\.1.*again"):
            offloader.check()
    state = bytes_of(model.state_dict())
    report = offloader.again()
    assert report.replaced == names
    assert names_of(report.taken) == set(names)
    assert names_of(report.already) == names_of(first.taken) - set(names)
    assert (report.used_bytes, report.left) == (used, ())
    offloader.check()
    assert bytes_of(model.state_dict()) == state
    resident = copy.deepcopy(model).to(place(device))
    assert is_same(model(words(device)), resident(words(device)))
    assert offloader.again().taken == ()


def test_a_replaced_parameter_that_does_not_fit_stays_known(device: str) -> None:
    module = nn.Linear(16, 16).to(place(device))
    offloader = UvaOffloader(device=device, max_bytes=16 * 17 * 4)
    assert offloader.offload(module).left == ()
    module.weight = nn.Parameter(torch.ones(32, 16, device=place(device)))
    report = offloader.again()
    assert (report.replaced, names_of(report.left)) == (("weight",), {"weight"})
    # The old memory went all the same.
    assert report.used_bytes == 16 * 4
    for _ in range(2):
        with pytest.raises(ReplacedError, match="weight"):
            offloader.check()
        assert offloader.again().replaced == ("weight",)
    module.weight = nn.Parameter(torch.ones(16, 16, device=place(device)))
    assert names_of(offloader.again().taken) == {"weight"}
    offloader.check()


def test_other_names_after_quantising(device: str) -> None:
    module = nn.Linear(16, 16).to(place(device))
    offloader = UvaOffloader(device=device)
    offloader.offload(module)
    del module.weight
    module.packed = nn.Parameter(
        torch.ones(16, 16, dtype=torch.int8, device=place(device)), requires_grad=False
    )
    assert offloader.replaced() == ("weight",)
    report = offloader.again()
    assert (report.replaced, report.gone, names_of(report.taken)) == ((), ("weight",), {"packed"})
    assert report.used_bytes == 16 * 16 + 16 * 4
    offloader.check()


def test_what_is_replaced_comes_before_what_was_left(device: str) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))).to(place(device))
    offloader = UvaOffloader(device=device, max_bytes=2 * 8 * 8 * 4)
    # A list that is gone in a moment; its layers are not.
    first = offloader.offload(nn.ModuleList(model[2:]), name="end")
    assert names_of(first.taken) == {"end.0.weight", "end.1.weight"}
    gc.collect()
    assert offloader.used_bytes == 2 * 8 * 8 * 4
    model[3].weight = nn.Parameter(torch.ones(8, 8, device=place(device)))
    report = offloader.offload(model)
    assert report.replaced == ("end.1.weight",)
    assert names_of(report.left) == {"0.weight", "1.weight"}
    assert names_of(report.taken) == {"3.weight"}
    offloader.check()


@pytest.mark.parametrize("ahead", [None, 1])
def test_forwards_in_inference_mode_and_outside_take_turns(device: str, way: str, ahead: int | None) -> None:
    """Of layers in place or copied in, and of prefetched ones, which are put back in the end."""
    model = made(device)
    with torch.inference_mode():
        quick = model(words(device)).clone()
    with torch.enable_grad():
        slow = model(words(device)).detach()
    with torch.inference_mode():
        if ahead is None:
            UvaOffloader(device=device).offload(model, layers=model.layers)
        else:
            offloader = PrefetchOffloader(model.layers, ahead=ahead, device=device)
    for number in range(3):
        with torch.inference_mode():
            if ahead is not None and number == 2:
                offloader.close()
            assert is_same(model(words(device)).clone(), quick)
        with torch.enable_grad():
            assert is_same(model(words(device)).detach(), slow)
    assert ahead is not None or not any(parameter.is_inference() for parameter in model.parameters())


# Lifetimes and copies


def test_memory_goes_with_the_modules(device: str, way: str) -> None:
    model = made(device)
    offloader = UvaOffloader(device=device)
    offloader.offload(model, layers=model.layers)
    assert not is_nothing_held(device)
    del model
    gc.collect()
    assert offloader.used_bytes == 0
    assert is_nothing_held(device)


def test_a_parameter_outlives_its_module_and_the_offloader(device: str, way: str) -> None:
    model = made(device)
    parameter = model.layers[1].mlp[0].weight
    before = bytes_of({"": parameter})
    offloader = UvaOffloader(device=device)
    offloader.offload(model, layers=model.layers)
    part = parameter[3:5]
    del model, offloader, parameter
    assert not is_nothing_held(device)
    assert bytes_of({"": part})[""] == before[""][3 * 32 * 4 : 5 * 32 * 4]
    del part
    assert is_nothing_held(device)


def test_threads_share_an_offloader(device: str, way: str) -> None:
    models = [made(device, layers=1) for _ in range(5)]
    expected = [model(words(device)) for model in models]
    capacity = sum(nbytes_of(*model.parameters()) for model in models[:3])
    offloader = UvaOffloader(device=device, max_bytes=capacity)

    def work(number: int) -> None:
        # Gradients are turned off in each thread by itself.
        with torch.no_grad():
            for _ in range(8):
                offloader.offload(models[number], name=str(number), layers=models[number].layers)
                assert is_same(models[number](words(device)), expected[number])
                # Of all models, also of those that others call.
                offloader.check()

    together(*(partial(work, number) for number in range(len(models))))
    assert 0 < offloader.used_bytes <= capacity
    assert offloader.again().taken == ()


def test_an_offloader_may_go_first(device: str, way: str) -> None:
    model = made(device)
    expected = model(words(device))
    UvaOffloader(device=device).offload(model, layers=model.layers)
    gc.collect()
    assert is_same(model(words(device)), expected)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_of_a_module_are_independent(device: str, way: str, how: str) -> None:
    model = made(device)
    expected = model(words(device))
    state = bytes_of(model.state_dict())
    UvaOffloader(device=device).offload(model, layers=model.layers)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert other.head.weight is other.embedding.weight
    assert bytes_of(other.state_dict()) == state
    other.to(place(device))
    assert is_same(other(words(device)), expected)
    for parameter in other.parameters():
        parameter.zero_()
    assert bytes_of(model.state_dict()) == state
    assert is_same(model(words(device)), expected)
    # And a copy can be offloaded itself; it keeps nothing of the first.
    del model
    assert is_nothing_held(device)
    UvaOffloader(device=device).offload(other, layers=other.layers)
    assert not bool(other(words(device)).any())


def test_loading_writes_to_the_offloaded_memory(device: str, way: str) -> None:
    model, other = made(device), made(device)
    for parameter in other.parameters():
        parameter.mul_(1.5)
    expected = other(words(device))
    offloader = UvaOffloader(device=device)
    offloader.offload(model, layers=model.layers)
    model.load_state_dict(other.state_dict())
    assert is_same(model(words(device)), expected)
    offloader.check()


def test_pageable_memory_is_copied_or_read(device: str) -> None:
    model = made(device)
    expected = model(words(device))
    report = UvaOffloader(device=device, pin=False).offload(model, layers=model.layers)
    is_read = device.startswith("host")
    assert {part.because is None for part in report.taken} == {is_read}
    assert is_same(model(words(device)), expected)


@pytest.mark.gpu
def test_parameters_on_the_cpu_come_to_the_gpu() -> None:
    model = made("host")
    expected = copy.deepcopy(model).to("cuda:0")(words("cuda:0"))
    report = UvaOffloader(device="cuda:0").offload(model)
    assert report.left == ()
    model.scale = model.scale.to("cuda:0")
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cuda:0")}
    assert is_same(model(words("cuda:0")), expected)
