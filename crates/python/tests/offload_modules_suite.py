"""What offloaded modules promise: on the host device and on a GPU, with PyTorch itself.

`test_suites.py` runs it. Outputs are compared bit by bit with those of the same
model with all its parameters resident.
"""

import copy
from typing import Any

import poorwill
import pytest
from offload_models import (
    NO_UVA,
    Nested,
    bytes_of,
    is_same,
    made,
    names_of,
    nbytes_of,
    nn,
    place,
    torch,
    words,
)
from poorwill import offload
from poorwill.offload import HostBuffer, UvaOffloader
from poorwill.offload._layout import Layout

# Outputs


def test_a_model_computes_the_same_bits(device: str, way: str) -> None:
    model = made(device)
    before = bytes_of(model.state_dict())
    expected = [model(words(device, seed)) for seed in range(3)]
    parameters = list(model.parameters())
    offloader = UvaOffloader(device=device)
    report = offloader.offload(model, layers=[*model.layers, model.embedding])
    assert report.used_bytes == report.taken_bytes == report.selected_bytes == nbytes_of(*parameters)
    assert names_of(report.taken) == set(dict(model.named_parameters(remove_duplicate=False)))
    assert (report.left, report.already, report.replaced, report.gone) == ((), (), (), ())
    assert {part.because is None for part in report.taken} == {way == "in place"}
    for _ in range(2):
        assert all(is_same(model(words(device, seed)), out) for seed, out in enumerate(expected))
        assert bytes_of(model.state_dict()) == before
    # The Parameters are those they were, and so is what is said of them.
    assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True))
    assert model.head.weight is model.embedding.weight
    resting = place(device) if way == "in place" else torch.device("cpu")
    assert {parameter.device for parameter in parameters} == {resting}
    assert offloader.replaced() == ()
    offloader.check()


def test_layers_given_one_by_one_share_the_budget(device: str, way: str) -> None:
    model = made(device)
    expected = model(words(device))
    capacity = sum(nbytes_of(*layer.parameters()) for layer in model.layers[:2]) + 1000
    offloader = UvaOffloader(max_bytes=capacity, device=device)
    reports = [offloader.offload(layer, name=f"layers.{number}") for number, layer in enumerate(model.layers)]
    assert [bool(report.left) for report in reports] == [False, False, True, True, True]
    assert reports[0].used_bytes == nbytes_of(*model.layers[0].parameters())
    assert reports[-1].used_bytes == offloader.used_bytes <= capacity
    # What comes later and is small enough was taken.
    assert any(report.taken for report in reports[2:])
    assert all(name.startswith("layers.1.") for name in names_of(reports[1].taken))
    assert is_same(model(words(device)), expected)
    used = offloader.used_bytes
    again = offloader.offload(model.layers[0], name="layers.0")
    assert (again.taken, again.used_bytes) == ((), used)
    assert names_of(again.already) == names_of(reports[0].taken)


def test_parameters_are_selected_by_whole_segments(device: str) -> None:
    class Experts(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.w2_weight = nn.Parameter(torch.ones(8, 8))
            self.w2_weight_scale = nn.Parameter(torch.ones(8))

    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = Experts()
    model.other = Experts()
    model.to(place(device))
    offloader = UvaOffloader(parameters=("experts.w2_weight", "mlp.w2"), device=device)
    report = offloader.offload(model)
    assert names_of(report.taken) == {"mlp.experts.w2_weight"}
    assert report.unmatched == ("mlp.w2",)
    with pytest.raises(TypeError, match="several"):
        UvaOffloader(parameters="w2_weight")
    with pytest.raises(ValueError, match="segment"):
        UvaOffloader(parameters=("w2..weight",))
    with pytest.raises(ValueError, match="less than nothing"):
        UvaOffloader(max_bytes=-1)
    with pytest.raises(TypeError, match="Module"):
        offloader.offload(torch.ones(2))


def test_attributes_and_layouts_stay(device: str, way: str) -> None:
    class Own(nn.Parameter):  # type: ignore[misc]
        pass

    module = nn.Module()
    base = torch.randn(12, 20, device=place(device))
    for name, tensor in {
        "transposed": base.clone().t(),
        "sliced": base.clone()[3:7, 5:17:3],
        "expanded": base.clone()[0].expand(6, 20),
        "scalar": base.clone()[2, 3],
        "empty": base.new_empty(0, 4),
        "narrow": base.to(torch.bfloat16),
    }.items():
        setattr(module, name, Own(tensor, requires_grad=name != "narrow"))
        getattr(module, name).loader = name
    before = {
        name: (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.requires_grad)
        for name, tensor in module.named_parameters()
    }
    state = bytes_of(module.state_dict())
    report = UvaOffloader(device=device).offload(module)
    assert names_of(report.taken) == set(before) - {"empty"}
    for name, tensor in module.named_parameters():
        assert type(tensor) is Own
        assert tensor.loader == name
        assert tensor.is_leaf
        assert before[name] == (
            *(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.requires_grad),
        )
    assert bytes_of(module.state_dict()) == state


def test_what_engines_say_of_parameters_stays(device: str, way: str) -> None:
    class Loaded(nn.Parameter):  # type: ignore[misc]
        """As vLLM's: attributes behind properties, and its own `__torch_function__`."""

        def __new__(cls, data: Any, **_: Any) -> Any:
            return super().__new__(cls, data=data, requires_grad=False)

        def __init__(self, data: Any, *, weight_loader: Any, output_dim: int) -> None:
            self._weight_loader, self._output_dim = weight_loader, output_dim

        @property
        def weight_loader(self) -> Any:
            return self._weight_loader

        @property
        def output_dim(self) -> int:
            return int(self._output_dim)

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    class Layer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            data = torch.randn(8, 8, device=place(device))
            self.weight = Loaded(data, weight_loader=self.load, output_dim=1)

        def load(self, parameter: Any, loaded: Any) -> None:
            parameter.data.copy_(loaded)

        def forward(self, x: Any) -> Any:
            return x @ self.weight

    layer = Layer()
    parameter, x = layer.weight, torch.randn(3, 8, device=place(device))
    offloader = UvaOffloader(device=device)
    offloader.offload(layer)
    assert layer.weight is parameter
    assert (type(parameter), parameter.output_dim, parameter.requires_grad) == (Loaded, 1, False)
    # What is loaded afterwards comes to the host memory.
    other = torch.randn(8, 8, device=place(device))
    parameter.weight_loader(parameter, other)
    assert is_same(layer(x), x @ other)
    # Another Parameter over the same memory is no other memory.
    layer.weight = nn.Parameter(parameter.data.t(), requires_grad=False)
    offloader.check()
    assert is_same(layer(x), x @ other.t())


def test_what_a_lazy_module_has_not_made_is_named(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)).to(place(device))
    with pytest.raises(ValueError, match=r"cannot offload 1\.weight.*uninitialized"):
        UvaOffloader(device=device).offload(model)
    assert UvaOffloader(device=device, parameters=("0",)).offload(model).taken_bytes == 4 * 5 * 4


# What is tied


def test_what_shares_memory_is_moved_once_and_stays_tied(device: str, way: str) -> None:
    shared = torch.randn(6, 8, device=place(device))
    model = nn.Module()
    for name, tensor in {"whole": shared, "rows": shared[2:4], "turned": shared.t()}.items():
        setattr(model, name, nn.Module())
        getattr(model, name).weight = nn.Parameter(tensor)
    model.same = nn.Module()
    model.same.weight = model.whole.weight
    model.register_buffer("seen", shared[5])
    model.register_buffer("apart", shared[0].clone())
    apart = model.apart.data_ptr()
    # One name is enough for all.
    report = UvaOffloader(device=device, parameters=("rows",)).offload(model)
    assert report.used_bytes == nbytes_of(shared)
    assert [set(part.names) for part in report.taken] == [
        {"whole.weight", "rows.weight", "turned.weight", "same.weight", "seen"}
    ]
    assert model.same.weight is model.whole.weight
    assert model.apart.data_ptr() == apart
    model.whole.weight.fill_(3)
    assert bool(
        (model.rows.weight == 3).all() and (model.turned.weight == 3).all() and (model.seen == 3).all()
    )
    model.rows.weight.fill_(4)
    assert bool((model.same.weight[2:4] == 4).all() and (model.turned.weight[:, 4:] == 3).all())
    assert not bool((shared == 3).any())


def test_tied_weights_given_apart_are_taken_once(device: str, way: str) -> None:
    model = made(device)
    expected = model(words(device))
    offloader = UvaOffloader(device=device)
    first = offloader.offload(model.embedding, name="embedding")
    second = offloader.offload(model.head, name="head")
    assert (first.taken_bytes, second.taken_bytes) == (nbytes_of(model.head.weight), 0)
    assert [set(part.names) for part in second.already] == [{"embedding.weight", "head.weight"}]
    assert offloader.used_bytes == nbytes_of(model.head.weight)
    assert is_same(model(words(device)), expected)


def test_a_module_in_a_layer_and_outside_of_it_is_brought_in_for_both(device: str, way: str) -> None:
    model = made(device)
    model.layers[1].between = model.norm
    expected = model(words(device))
    UvaOffloader(device=device).offload(model, layers=model.layers)
    if way == "copied":
        seen = []
        model.norm.register_forward_hook(lambda module, *_: seen.append(module.weight.data_ptr()))
        at_rest = model.norm.weight.data_ptr()
        model(words(device))
        # Once in its layer, and once outside of it.
        assert len(seen) == 2
        assert at_rest not in seen
    assert is_same(model(words(device)), expected)


# Failures


@pytest.mark.parametrize("selected", [(), ("mlp",)])
def test_every_allocation_may_fail(
    device: str, way: str, selected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(device, layers=2)
    expected = model(words(device))
    state = bytes_of(model.state_dict())
    made_of: Any = HostBuffer
    allowed = 0
    count = [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] > allowed:
            raise poorwill.OutOfMemoryError("no host memory for this test")
        return made_of(*args, **kwargs)

    while True:
        fresh = copy.deepcopy(model)
        offloader = UvaOffloader(device=device, parameters=selected, max_bytes="1MiB")
        count[0], said = 0, ""
        with monkeypatch.context() as patched:
            patched.setattr(poorwill.offload._offloaded, "HostBuffer", failing)
            try:
                offloader.offload(fresh, layers=fresh.layers)
                ended = True
            except poorwill.OutOfMemoryError as error:
                ended, said = False, str(error)
        assert ended or f"{offloader.used_bytes} bytes are offloaded" in said
        assert ended or ("cannot offload" in said and f"{1 << 20} bytes for max_bytes" in said)
        assert is_same(fresh(words(device)), expected)
        assert bytes_of(fresh.state_dict()) == state
        # Where it ended, it goes on.
        report = offloader.offload(fresh, layers=fresh.layers)
        assert len(report.already) == (allowed if not ended else count[0])
        assert is_same(fresh(words(device)), expected)
        if ended:
            break
        allowed += 1
    assert allowed > 3


def test_the_machine_s_own_refusal_is_one(device: str, way: str) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(4096, 1024))
    model.to(place(device))
    state = bytes_of(model.state_dict())
    offloader = UvaOffloader(device=device)
    with pytest.raises(poorwill.OutOfMemoryError, match=r"2\.weight"):
        offloader.offload(model)
    assert offloader.used_bytes == nbytes_of(*model[:2].parameters())
    assert bytes_of(model.state_dict()) == state


def test_what_is_not_plain_is_refused_before_anything_is_moved(device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta")).to_empty(device="meta")
    model[0] = nn.Linear(8, 8).to(place(device))
    address = model[0].weight.data_ptr()
    offloader = UvaOffloader(device=device)
    with pytest.raises(ValueError, match=r"1\.weight.*meta"):
        offloader.offload(model)
    assert (model[0].weight.data_ptr(), offloader.used_bytes) == (address, 0)
    # What is not selected may be anything.
    assert UvaOffloader(device=device, parameters=("0",)).offload(model).taken_bytes == 8 * 9 * 4
    # A sparse parameter has no memory of its own.
    sparse = nn.Module()
    sparse.weight = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"weight.*dense"):
        UvaOffloader(device=device).offload(sparse)


def test_a_forward_that_raises_leaves_the_module_usable(device: str, way: str) -> None:
    model = made(device)
    expected = model(words(device))
    UvaOffloader(device=device).offload(model, layers=model.layers)
    at_rest = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    model.layers[2].fails = True
    for _ in range(3):
        with pytest.raises(RuntimeError, match="in the middle"):
            model(words(device))
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == at_rest
    model.layers[2].fails = False
    assert is_same(model(words(device)), expected)


def test_a_copy_that_fails_leaves_the_module_usable(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_UVA, "1")
    model = made(device, layers=2)
    expected = model(words(device))
    UvaOffloader(device=device).offload(model, layers=model.layers)
    at_rest = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    stage_in = offload.Offloaded.stage_in
    for nth in range(1, 12):
        count = [0]

        def failing(kept: Any, stream: Any = None, count: list[int] = count, nth: int = nth) -> Any:
            count[0] += 1
            if count[0] == nth:
                raise poorwill.OutOfMemoryError("no device memory for this test")
            return stage_in(kept, stream)

        with monkeypatch.context() as patched:
            patched.setattr(offload.Offloaded, "stage_in", failing)
            with pytest.raises(poorwill.OutOfMemoryError):
                model(words(device))
        assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == at_rest
    assert is_same(model(words(device)), expected)


def test_modules_in_lists_of_lists_are_layers(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_UVA, "1")
    where = []

    class Seen(nn.Linear):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            where.append(self.weight.data_ptr())
            return super().forward(x)

    inner = [Seen(4, 4).to(place(device)) for _ in range(3)]
    lists = nn.ModuleList([nn.ModuleList(inner[:1]), nn.ModuleDict({"a": nn.ModuleList(inner[1:])})])
    whole = nn.Sequential(nn.Identity())
    whole.lists = lists
    for root, layers in ((lists, ()), (whole, lists)):
        UvaOffloader(device=device).offload(root, layers=layers)
        at_rest = [module.weight.data_ptr() for module in inner]
        for module in inner:
            module(torch.ones(1, 4, device=place(device)))
        # None of them was used where it rests.
        assert not set(where) & set(at_rest)
        assert len(where) == 3
        where.clear()


def test_unused_weights_are_not_copied_in(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_UVA, "1")
    module = nn.Linear(8, 8).to(place(device))
    UvaOffloader(device=device).offload(module)
    module.weight = nn.Parameter(torch.ones(8, 8, device=place(device)))
    count, stage_in = [0], offload.Offloaded.stage_in

    def counting(kept: Any, stream: Any = None) -> Any:
        count[0] += 1
        return stage_in(kept, stream)

    with monkeypatch.context() as patched:
        patched.setattr(offload.Offloaded, "stage_in", counting)
        module(torch.ones(1, 8, device=place(device)))
    assert count == [1]


@pytest.mark.parametrize("nth", range(1, 7))
def test_interrupted_moves_leave_the_module_usable(
    device: str, way: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(device, layers=1)
    expected, count = model(words(device)), [0]
    before = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    over = Layout.over

    def interrupted(layout: Layout, flat: Any) -> Any:
        count[0] += 1
        if count[0] == nth:
            raise KeyboardInterrupt
        return over(layout, flat)

    offloader = UvaOffloader(device=device)
    with monkeypatch.context() as patched:
        patched.setattr(Layout, "over", interrupted)
        with pytest.raises(KeyboardInterrupt):
            offloader.offload(model, layers=model.layers)
    moved = {name for name, tensor in model.named_parameters() if tensor.data_ptr() != before[name]}
    report = offloader.offload(model, layers=model.layers)
    assert {name for name in names_of(report.already) if name in before} == moved
    assert is_same(model(words(device)), expected)


def test_a_layer_within_itself_is_brought_in_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_UVA, "1")

    module = Nested().to(place(device))
    x = torch.randn(4, 4, device=place(device))
    expected = module(x, 3)
    UvaOffloader(device=device).offload(module)
    at_rest = module.weight.data_ptr()
    assert is_same(module(x, 3), expected)
    assert module.weight.data_ptr() == at_rest
