"""Which weights were written since a wake from level 2, in whatever way; `test_vllm_suites.py` runs it."""

import gc
import importlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import poorwill
import pytest
from vllm_engines import LORA, MIB, Engine, Shape, Start, contents, filled, only

torch: Any = importlib.import_module("torch")

KIB = 1 << 10
SMALL = Shape(weights=(512 * KIB, 64 * KIB, 40_000), buffers=(8 * KIB,), transient=MIB)
WITH_LORA = replace(SMALL, lora=LORA.lora)
NAMES = ("layers.0.weight", "layers.1.weight", "layers.2.weight")


def dropped(engine: Engine, tags: list[str] | None = None) -> Engine:
    """After a sleep at level 2 and a wake."""
    engine.prepared()
    engine.worker.sleep(2)
    engine.worker.wake_up(tags)
    return engine


def unwritten(engine: Engine) -> dict[str, Any] | None:
    status = engine.worker.poorwill_status()
    assert (status["unwritten"] is None) == (status["undefined"] == [])
    reported: dict[str, Any] | None = status["unwritten"]
    return reported


def checkpoint(engine: Engine) -> dict[str, Any]:
    return dict(engine.runner.model.checkpoint())


def copied_by_an_extension(engine: Engine) -> None:
    """As a method that an extension of the worker brings."""
    for name, tensor in checkpoint(engine).items():
        engine.runner.model.load_weights([(name, tensor)])


def copied_into_parameters(engine: Engine) -> None:
    for name, tensor in checkpoint(engine).items():
        engine.weights()[name].data.copy_(tensor)


def moved_elsewhere(engine: Engine) -> None:
    """In other memory than before, which no sleep has dropped."""
    for name, tensor in checkpoint(engine).items():
        engine.runner.model.add(name, tensor.to("cuda"))


WRITERS: list[Callable[[Engine], None]] = [
    lambda engine: engine.worker.reload_weights(),
    lambda engine: engine.runner.model.load_weights(),
    copied_by_an_extension,
    copied_into_parameters,
    moved_elsewhere,
]


@pytest.mark.parametrize("tags", [None, ["weights"]])
@pytest.mark.parametrize("write", WRITERS)
def test_every_way_of_writing_counts(
    start: Start, write: Callable[[Engine], None], tags: list[str] | None
) -> None:
    """Also where the bytes are those of before the sleep, and whether the cache is awake by then or not."""
    engine = start(WITH_LORA).start()
    before = contents(engine.kept())
    dropped(engine, tags)
    reported = unwritten(engine)
    assert reported is not None
    assert (reported["tensors"], reported["of_tensors"]) == (3, 3)
    assert reported["bytes"] == reported["of_bytes"] == sum(SMALL.weights)
    write(engine)
    engine.worker.wake_up(None if tags is None else ["kv_cache"])
    assert unwritten(engine) is None
    assert engine.is_awake()
    assert contents(engine.kept()) == before


def test_what_is_left_out_is_named(start: Start) -> None:
    engine = dropped(start(SMALL).start())
    weights = checkpoint(engine)
    for name in NAMES[1:]:
        engine.runner.model.load_weights([(name, weights[name])])
    for _ in range(2):
        assert unwritten(engine) == {
            "tensors": 1,
            "of_tensors": 3,
            "bytes": 512 * KIB,
            "of_bytes": sum(SMALL.weights),
            "is_all": True,
            "is_updating": False,
            "names": ["layers.0.weight"],
        }
    engine.runner.model.load_weights([(NAMES[0], weights[NAMES[0]])])
    assert unwritten(engine) is None


def test_half_a_tensor_is_not_all_of_it(start: Start) -> None:
    engine = start(SMALL).start()
    before = contents(engine.kept())
    dropped(engine)
    weights = checkpoint(engine)
    whole = engine.weights()[NAMES[0]]
    for name in NAMES[1:]:
        engine.runner.model.load_weights([(name, weights[name])])
    halves = (slice(0, 256 * KIB), slice(256 * KIB, 512 * KIB))
    for half, left in zip(halves, (256 * KIB, 0), strict=True):
        whole[half].copy_(weights[NAMES[0]][half])
        reported = unwritten(engine)
        assert (reported["bytes"] if reported else 0) == left
    assert contents(engine.kept()) == before


def test_a_load_that_breaks_off_goes_on_where_it_was(start: Start) -> None:
    engine = start(SMALL).start()
    before = contents(engine.kept())
    dropped(engine)
    weights = checkpoint(engine)

    def broken() -> Any:
        yield NAMES[0], weights[NAMES[0]]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError):
        engine.runner.model.load_weights(broken())
    reported = unwritten(engine)
    # The fake takes all before it writes any.
    assert reported is not None
    assert reported["tensors"] == 3
    engine.runner.model.load_weights([(NAMES[0], weights[NAMES[0]])])
    reported = unwritten(engine)
    assert reported is not None
    assert reported["names"] == list(NAMES[1:])
    engine.runner.model.load_weights([(name, weights[name]) for name in NAMES[1:]])
    assert unwritten(engine) is None
    assert contents(engine.kept()) == before


def test_tied_weights_are_written_once(start: Start) -> None:
    engine = start(SMALL).start()
    engine.runner.model.add("lm_head.0.weight", engine.weights()[NAMES[0]])
    dropped(engine)
    reported = unwritten(engine)
    assert reported is not None
    assert reported["of_tensors"] == 3
    weights = checkpoint(engine)
    for name in ("lm_head.0.weight", *NAMES[1:]):
        engine.runner.model.load_weights([(name, weights[name])])
    assert unwritten(engine) is None


def of_the_pool(engine: Engine, nbytes: int) -> Any:
    with engine.allocator.use_memory_pool("weights"):
        return filled(nbytes, 7)


def as_halves(tensor: Any, *shape: int) -> Any:
    """The bytes as a matrix of numbers of two bytes each."""
    empty = torch.empty(0, dtype=torch.float16, device="cuda")
    return empty.set_(tensor.untyped_storage(), 0, shape, (shape[1], 1))


VIEWS: dict[str, Callable[[Any], Any]] = {
    "turned": lambda tensor: as_halves(tensor, 64, 96).t(),
    "without padding": lambda tensor: as_halves(tensor, 64, 96)[:, :80],
    "columns that fit no word": lambda tensor: as_halves(tensor, 64, 96)[:, 1:4],
    "rows": lambda tensor: as_halves(tensor, 64, 96)[3:17],
    "expanded": lambda tensor: as_halves(tensor, 1, 6144)[:, :1].expand(5, 1),
    "a byte": lambda tensor: tensor[:1],
    "three bytes": lambda tensor: tensor[9:12],
    "nothing": lambda tensor: tensor[:0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_a_tensor_has_of_its_memory_is_what_is_asked_for(start: Start, name: str) -> None:
    engine = start(SMALL).start()
    whole = of_the_pool(engine, 64 * 96 * 2)
    view = VIEWS[name](whole)
    engine.runner.model.add("view.0.weight", view)
    dropped(engine)
    for own in NAMES:
        engine.weights()[own].fill_(1)
    if name != "nothing":
        reported = unwritten(engine)
        assert reported is not None
        assert reported["names"] == ["view.0.weight"]
        assert reported["bytes"] <= view.nbytes
        (view[:1] if name == "expanded" else view).zero_()
    # The bytes between the tensor's elements are never written, and need not be.
    assert unwritten(engine) is None


@pytest.mark.parametrize("attribute", ["drafter", "speculator"])
def test_a_drafters_weights_are_kept(start: Start, attribute: str) -> None:
    """No reload of vLLM's writes them. Those that are the model's as well are the model's."""
    engine = start(SMALL, drafts=attribute).start()
    drafting = getattr(engine.runner, attribute).model
    before = contents(dict(drafting.named_parameters()))
    for level in (2, 1, 2):
        engine.prepared()
        engine.worker.sleep(level)
        engine.worker.wake_up(["weights"])
        if level == 2:
            reported = unwritten(engine)
            assert reported is not None
            assert reported["of_tensors"] == 3
            engine.worker.reload_weights()
        engine.worker.wake_up()
        assert unwritten(engine) is None
        assert contents(dict(drafting.named_parameters())) == before


def test_unloaded_weights_are_zeros_and_not_the_pattern(start: Start) -> None:
    engine = dropped(start(SMALL).start())
    weights = checkpoint(engine)
    engine.weights()[NAMES[0]][: 256 * KIB].copy_(weights[NAMES[0]][: 256 * KIB])
    assert engine.worker.poorwill_mark_restored() == ["weights"]
    after = contents(engine.weights())
    half = bytes(weights[NAMES[0]].numpy_bytes()[: 256 * KIB])
    assert after[NAMES[0]] == half + bytes(256 * KIB)
    assert not any(after[NAMES[1]] + after[NAMES[2]][: 40_000 // 8 * 8])


def test_weights_that_are_nowhere_are_missing(start: Start) -> None:
    """As after an update that broke off, which leaves parameters without memory."""
    engine = start(SMALL).start()
    inside = dict(engine.runner.model._parameters)
    for name, tensor in inside.items():
        engine.runner.model.add(name, torch.empty(tensor.shape, dtype=torch.uint8, device="meta"))
    dropped(engine)
    reported = unwritten(engine)
    assert reported is not None
    assert reported["tensors"] == 3
    # Once they have an address, that is memory which no sleep has dropped.
    engine.runner.model._parameters.update({name: tensor.clone() for name, tensor in inside.items()})
    assert unwritten(engine) is None


@only("0.20.2")
def test_a_worker_is_kept_by_nothing_of_ours(start: Start) -> None:
    """vLLM 0.33 keeps it by itself, in its manager of workspaces."""
    engine = dropped(start(SMALL).start())
    worker = weakref.ref(engine.worker)
    engine.worker.shutdown()
    engine.worker.__dict__.pop("model_runner", None)
    engine.worker = SimpleNamespace(_allocator=None)
    gc.collect()
    assert worker() is None


class Hidden:
    """A tensor that does its operations itself, and shows no memory."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.device, self.is_cuda, self.nbytes = inner, inner.device, True, inner.nbytes

    def data_ptr(self) -> int:
        return 0

    def untyped_storage(self) -> Any:
        raise RuntimeError("there is no storage to ask")

    def numel(self) -> int:
        return int(self.inner.numel())

    def copy_(self, other: Any) -> None:
        self.inner.copy_(other)


class Face(Hidden):
    """One that says of which tensors it is made."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


def with_a(kind: type[Hidden], start: Start) -> Engine:
    engine = start(SMALL).start()
    with engine.allocator.use_memory_pool("weights"):
        engine.runner.model.add("face.3.weight", kind(filled(KIB, 3)))
    return dropped(engine)


def test_a_tensor_that_is_a_face_is_what_it_is_made_of(start: Start) -> None:
    engine = with_a(Face, start)
    reported = unwritten(engine)
    assert reported is not None
    assert reported["of_tensors"] == 4
    weights = checkpoint(engine)
    engine.runner.model.load_weights([(name, weights[name]) for name in NAMES])
    reported = unwritten(engine)
    assert reported is not None
    assert (reported["names"], reported["bytes"]) == (["face.3.weight.inner"], KIB)
    engine.runner.model.load_weights([("face.3.weight", weights["face.3.weight"])])
    assert unwritten(engine) is None


def test_what_cannot_be_seen_counts_after_a_reload_of_all(start: Start) -> None:
    engine = with_a(Hidden, start)
    engine.runner.model.load_weights()
    reported = unwritten(engine)
    assert reported is not None
    assert (reported["tensors"], reported["of_tensors"], reported["is_updating"]) == (0, 3, False)
    engine.worker.reload_weights()
    assert unwritten(engine) is None
    assert engine.is_awake()


def test_what_was_not_dropped_is_left_alone(start: Start) -> None:
    """Weights that lie outside the pool, in host memory, or where state is kept."""
    shape = Shape(weights=(90 * MIB,), outside=(MIB,), offloaded=(2 * MIB,), lora=(3 * MIB,))
    engine = start(shape).start()
    engine.runner.model.add("lora.70.weight", engine.runner.lora[0])
    before = contents(engine.kept())
    dropped(engine)
    reported = unwritten(engine)
    assert reported is not None
    # Weights that the fake offloads within the pool are not checked.
    assert (reported["names"], reported["of_tensors"]) == (["layers.0.weight"], 1)
    after = contents(engine.kept())
    for name in ("outside.0.weight", "lora.70.weight", "rotary.0", "attention.k_scale"):
        assert after[name] == before[name]


def test_a_flow_of_both_levels_goes_on(start: Start) -> None:
    engine = start(SMALL).start()
    before = contents(engine.kept())
    for level in (2, 1, 2, 2, 1):
        engine.prepared()
        engine.events()
        engine.worker.sleep(level)
        engine.worker.wake_up()
        if level == 2:
            engine.runner.model.load_weights()
            # No query in between: the next sleep checks for itself.
            assert engine.worker._preparation is None
        assert contents(engine.kept()) == before
    assert engine.is_awake()


def test_weights_that_are_not_whole_are_not_kept(start: Start) -> None:
    engine = dropped(start(SMALL).start())
    weights = checkpoint(engine)
    engine.runner.model.load_weights([(NAMES[0], weights[NAMES[0]])])
    with pytest.raises(poorwill.PoorwillError, match="weights"):
        engine.worker.sleep(1)
    reported = unwritten(engine)
    assert reported is not None
    assert reported["tensors"] == 2
    # Dropped once more, all are missing.
    dropped(engine)
    reported = unwritten(engine)
    assert reported is not None
    assert reported["tensors"] == 3
    assert engine.worker.poorwill_mark_restored() == ["weights"]
    assert unwritten(engine) is None


@only("0.33.0")
def test_nothing_is_whole_in_the_midst_of_an_update(start: Start) -> None:
    engine = dropped(start(SMALL, weight_transfer_config="trainer").start())
    engine.worker.start_weight_update()
    inside = dict(engine.runner.model._parameters)
    # vLLM has none of them on the GPU meanwhile.
    engine.runner.model._parameters.clear()
    reported = unwritten(engine)
    assert reported is not None
    assert reported["tensors"] == 3
    engine.runner.model._parameters.update(inside)
    engine.worker.update_weights({})
    reported = unwritten(engine)
    assert reported is not None
    assert (reported["tensors"], reported["is_updating"]) == (0, True)
    engine.worker.finish_weight_update()
    assert unwritten(engine) is None


def test_who_wants_vllms_way_has_it(start: Start) -> None:
    engine = dropped(start(SMALL, POORWILL_AFTER_LEVEL2="serve").start())
    assert unwritten(engine) is None
    assert engine.is_awake()
    engine.worker.sleep(1)
    engine.worker.wake_up()
    assert engine.is_awake()
