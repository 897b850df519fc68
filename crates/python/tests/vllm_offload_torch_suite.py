"""Our offloaders in vLLM over PyTorch itself, on the CPU, with vLLM's own sources: what only real parameters,
`functional_call` and compiling show. `test_vllm_suites.py` runs it, a version at a time: the compiler keeps
vLLM's modules for the whole process.

vLLM offloads nothing of a model on the CPU, so its guards are removed from a copy of its sources. The host
device takes the role of the GPU, and streams that do nothing that of CUDA's.
"""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import offloaders
from fake_vllm.offloaders import NO_PIN, NO_UVA, WORKER, Vllm

torch: Any = pytest.importorskip("torch")
nn: Any = pytest.importorskip("torch.nn")

HOST = "host:256MiB"
VERSIONS = ("0.20.2", "0.33.0")
WIDTH = 24
GUARDS = {
    "uva.py": [
        ('if device == torch.device("cpu"):', "if False:"),
        ('if p.device.type == "cpu" or getattr(', "if getattr("),
        ('if first is None or first.device.type == "cpu":', "if first is None:"),
    ],
    "prefetch.py": [
        ('assert self.device != torch.device("cpu")', "assert True"),
        ('assert self.device.type != "cpu"', "assert True"),
    ],
}


class Idle:
    """A stream, or an event, of a machine that does everything at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    record_event = wait_event = wait_stream = synchronize = record


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def unguarded(version: str, into: Path) -> Path:
    """A copy of the offloaders that takes models on the CPU."""
    for path in offloaders.folder(version).glob("*.py"):
        text = path.read_text()
        found = [guard for guard in GUARDS.get(path.name, ()) if guard[0] in text]
        assert bool(found) == (path.name in GUARDS), path
        for guard, instead in found:
            text = text.replace(guard, instead)
        (into / path.name).write_text(text)
    return into


def register(library: Any, op_name: str, op_func: Any, mutates_args: Any = ("x",), **_: Any) -> None:
    """As vLLM registers its operations, so that a compiler takes them as they are."""
    name = "input_tensor" if op_name == "wait_prefetch" else "output_tensor"
    library.define(f"{op_name}(Tensor(a0!) {name}, SymInt layer_idx) -> ()")
    library.impl(op_name, op_func, dispatch_key="CPU")
    library._register_fake(op_name, lambda *_: None)


@pytest.fixture
def vllm(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    for name in ("POORWILL_HOST_BUDGET", "POORWILL_DISABLE_PIN", NO_PIN, NO_UVA):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("POORWILL_OFFLOAD", "1")
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Idle)
    monkeypatch.setattr(torch.cuda, "current_stream", Idle)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    library = torch.library.Library("vllm", "FRAGMENT")
    monkeypatch.setattr(offloaders, "_register", lambda **given: register(library, **given))
    with offloaders.installed(version, offloaders=unguarded(version, tmp_path)) as made:
        utilities = made.module("vllm.utils.platform_utils")
        utilities.is_pin_memory_available = utilities.is_uva_available = lambda: True
        for name in ("base", "uva"):
            module = made.module(f"{offloaders.OFFLOADER}.{name}")
            for each in ("is_pin_memory_available", "is_uva_available"):
                if hasattr(module, each):
                    setattr(module, each, lambda: True)
        memory = importlib.import_module("poorwill.vllm._offload_memory")
        monkeypatch.setattr(memory, "DEVICES", ("cpu",))
        monkeypatch.setattr(memory, "home", lambda device: HOST)
        yield made
    library._destroy()
    torch._dynamo.reset()


class Weight(nn.Parameter):  # type: ignore[misc]
    """A parameter of a class of its own, as vLLM's are."""

    def __new__(cls, data: Any, *_: Any) -> Any:
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data: Any, weight_loader: str = "") -> None:
        self.weight_loader = weight_loader

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.up.weight = Weight(torch.randn(3 * WIDTH, WIDTH, generator=generator), "loads")
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        # Not contiguous, and the first and the last of one storage.
        self.down.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH, generator=generator).t())
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self, wrap: Any, count: int = 3) -> None:
        super().__init__()
        # What linear layers begin with is of the process's own generator.
        generator = torch.manual_seed(7)
        self.layers = nn.ModuleList(wrap(Layer(generator) for _ in range(count)))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def inputs() -> Any:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))


def right(count: int = 3, scale: float = 1.0) -> Any:
    model = Model(list, count)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(scale)
        return model(inputs())


def run(model: Any) -> Any:
    with torch.no_grad():
        return model(inputs())


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="eager", **options)


def test_parameters_stay_what_they_are(vllm: Vllm) -> None:
    offloader = vllm.make(cpu_offload_gb=1)
    model = Model(offloader.wrap_modules)
    before = {
        name: (type(each), each.shape, each.stride(), each.dtype)
        for name, each in Model(list).named_parameters()
    }
    after = {
        name: (type(each), each.shape, each.stride(), each.dtype) for name, each in model.named_parameters()
    }
    assert after == before
    assert model.layers[1].up.weight.weight_loader == "loads"
    assert offloader.host_bytes == sum(each.numel() * 4 for each in model.parameters())
    offloader.post_init()
    assert torch.equal(run(model), right())


def test_what_is_read_in_place_compiles(vllm: Vllm) -> None:
    offloader = vllm.make(cpu_offload_gb=1)
    model = Model(offloader.wrap_modules)
    offloader.post_init()
    assert torch.equal(run(compiled(model, fullgraph=True)), right())


@pytest.mark.parametrize("switches", [(NO_UVA,), (NO_UVA, NO_PIN), ("POORWILL_DISABLE_PIN",)])
def test_what_is_copied_in_is_copied_by_a_forward_around_it(
    vllm: Vllm, switches: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in switches:
        monkeypatch.setenv(name, "1")
    offloader = vllm.make(cpu_offload_gb=1, cpu_offload_params={"up", "down.weight"})
    model = Model(offloader.wrap_modules)
    offloader.post_init()
    assert not offloader.uva_offloading
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    assert all("forward" in layer.__dict__ for layer in model.layers)
    for _ in range(2):
        assert torch.equal(run(model), right())


def test_that_compiles_where_vllms_own_does(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_UVA, "1")

    def result(switch: str) -> Any:
        monkeypatch.setenv("POORWILL_OFFLOAD", switch)
        monkeypatch.setenv(NO_PIN, "1")
        torch._dynamo.reset()
        offloader = vllm.make(cpu_offload_gb=1)
        model = Model(offloader.wrap_modules)
        offloader.post_init()
        try:
            return run(compiled(model, fullgraph=True))
        except torch._dynamo.exc.Unsupported as error:
            return str(error).partition("\n")[0]

    ours, stock = result("1"), result("0")
    assert type(ours) is type(stock), (ours, stock)
    if not isinstance(ours, str):
        assert torch.equal(ours, right())


class Wrapped(torch.Tensor):  # type: ignore[misc]
    """A tensor that does its operations itself, as some ways of quantising make them."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def test_what_is_no_plain_tensor_is_left_and_named(vllm: Vllm, caplog: pytest.LogCaptureFixture) -> None:
    offloader = vllm.make(cpu_offload_gb=1)
    model = Model(offloader.wrap_modules)
    held = offloader.host_bytes
    quantised = nn.Parameter(Wrapped(torch.zeros(3 * WIDTH, WIDTH)), requires_grad=False)
    freed = model.layers[1].up.weight.numel() * 4
    model.layers[1].up._parameters["weight"] = quantised
    with caplog.at_level("INFO"):
        offloader.post_init()
    assert model.layers[1].up.weight is quantised
    assert offloader.host_bytes == held - freed
    assert "1 parameters that were meant cannot be offloaded and stay on the GPU: #1.up.weight" in caplog.text
    assert "a Wrapped does its operations itself" in caplog.text


def prefetched(vllm: Vllm, monkeypatch: pytest.MonkeyPatch, count: int, step: int) -> tuple[Any, Any]:
    # CPU memory is not page-locked here, which vLLM would miss.
    monkeypatch.setenv(NO_PIN, "1")
    offloader = vllm.make(offload_group_size=1, offload_prefetch_step=step)
    model = Model(offloader.wrap_modules, count)
    offloader.post_init()
    return offloader, model


@pytest.mark.parametrize(("count", "step"), [(3, 1), (3, 2), (4, 2)])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_prefetched_layers_compute_the_same(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch, count: int, step: int, is_compiled: bool
) -> None:
    offloader, model = prefetched(vllm, monkeypatch, count, step)
    assert offloader.host_bytes == sum(each.numel() * 4 for each in Model(list, count).parameters())
    called = compiled(model, fullgraph=True) if is_compiled else model
    for _ in range(3):
        assert torch.equal(run(called), right(count))


def test_prefetched_layers_are_written_anew(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = prefetched(vllm, monkeypatch, 3, 2)
    run(model)
    worker = vllm.module(WORKER).Worker()

    def write() -> None:
        with torch.no_grad():
            for layer, other in zip(model.layers, Model(list).layers, strict=True):
                theirs = dict(other.named_parameters())
                for name, each in layer.named_parameters():
                    each.copy_(theirs[name] * 2)

    worker.write = write
    worker.reload_weights()
    assert torch.equal(run(model), right(scale=2.0))
    assert torch.equal(run(model), right(scale=2.0))
