"""What the memory saver promises over pools: on a GPU, and over fakes of PyTorch and the driver.

`test_suites.py` runs it. Every misuse that ends a process with torch_memory_saver is here as an error or a
no-op that is logged.
"""

import gc
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import poorwill
import pytest
from helpers import together
from poorwill.compat.torch_memory_saver import SaverError, TorchMemorySaver, _pools

torch: Any = import_module("torch")

MIB = 1 << 20
NAMES = map("saver-{}".format, itertools.count())
TAGS = map("tag-{}".format, itertools.count())


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchMemorySaver]:
    # Each test has arenas of its own.
    monkeypatch.setattr(_pools, "ARENA", next(NAMES))
    saver = TorchMemorySaver()
    yield saver
    gc.collect()
    torch.cuda.synchronize()
    arenas = list(arenas_of(saver).values()) if saver._impl is not None else []
    del saver
    for arena in arenas:
        arena.wake()
        arena.close()


@pytest.fixture
def tag() -> str:
    return next(TAGS)


def pools_of(saver: TorchMemorySaver) -> _pools.Pools:
    pools = saver._used()
    assert isinstance(pools, _pools.Pools)
    return pools


def arenas_of(saver: TorchMemorySaver) -> dict[int, poorwill.Arena]:
    return pools_of(saver)._arenas


def filled(nbytes: int, seed: int, device: str = "cuda:0") -> Any:
    return torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(seed % 251 + 1)


def same(tensor: Any, seed: int) -> bool:
    return bool(torch.equal(tensor, filled(tensor.numel(), seed, tensor.device)))


def bytes_of(tensor: Any) -> bytes:
    return bytes(tensor.tolist()) if not hasattr(tensor, "numpy_bytes") else tensor.numpy_bytes()


def mapped_bytes(saver: TorchMemorySaver, ordinal: int = 0) -> int:
    return arenas_of(saver)[ordinal].stats().mapped_bytes


def backup_bytes(saver: TorchMemorySaver, name: str) -> int:
    [of_tag] = [of_tag for of_tag in arenas_of(saver)[0].stats().tags if of_tag.tag == name]
    return of_tag.backup_bytes


def regions(saver: TorchMemorySaver, tag: str, **backup: Any) -> list[Any]:
    with saver.region(tag, **backup):
        return [filled(size, seed) for seed, size in enumerate([24 * MIB, 3 * MIB, 5000])]


def is_kept(tensors: list[Any]) -> bool:
    return all(same(tensor, seed) for seed, tensor in enumerate(tensors))


HOST: Any = {"enable_cpu_backup": True}
MMAP: Any = {"enable_cpu_backup": True, "cpu_backup_backend": "mmap"}


@pytest.mark.parametrize("stored", ["viewable", "compact"])
@pytest.mark.parametrize("backup", [HOST, MMAP], ids=["pinned", "mmap"])
def test_bytes_come_back_to_their_addresses(
    saver: TorchMemorySaver, tag: str, backup: Any, stored: Any
) -> None:
    saver.stored = stored
    tensors = regions(saver, tag, **backup)
    places = [tensor.data_ptr() for tensor in tensors]
    for _ in range(3):
        saver.pause(tag)
        assert mapped_bytes(saver) == 0
        saver.resume(tag)
        assert is_kept(tensors)
        assert [tensor.data_ptr() for tensor in tensors] == places


def test_without_a_backup_nothing_is_copied(saver: TorchMemorySaver, tag: str) -> None:
    tensors = regions(saver, tag)
    saver.pause(tag)
    [slept] = saver.last_report()
    assert slept["copied_bytes"] == 0
    assert mapped_bytes(saver) == 0
    saver.resume(tag)
    for seed, tensor in enumerate(tensors):
        tensor.fill_(seed + 1)
    assert is_kept(tensors)


def test_one_tag_has_both(saver: TorchMemorySaver, tag: str) -> None:
    kept, dropped = regions(saver, tag, **HOST), regions(saver, tag)
    saver.pause(tag)
    assert mapped_bytes(saver) == 0
    saver.resume(tag)
    assert is_kept(kept)
    assert not is_kept(dropped)


def test_tags_are_paused_alone_and_all_together(saver: TorchMemorySaver) -> None:
    tags = [next(TAGS) for _ in range(3)]
    tensors = {tag: regions(saver, tag, **HOST) for tag in tags}
    whole = mapped_bytes(saver)
    saver.pause(tags[0])
    assert 0 < mapped_bytes(saver) < whole
    assert is_kept(tensors[tags[1]])
    saver.pause()
    assert mapped_bytes(saver) == 0
    saver.resume(tags[2])
    assert is_kept(tensors[tags[2]])
    saver.resume(None)
    assert all(map(is_kept, tensors.values()))


# What ends a process elsewhere


def test_a_second_pause_or_resume_does_nothing_and_is_logged(
    saver: TorchMemorySaver, tag: str, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = regions(saver, tag, **HOST)
    saver.resume(tag)
    saver.pause(tag)
    saver.pause(tag)
    saver.pause()
    saver.resume(tag)
    saver.resume()
    assert is_kept(tensors)
    logged = [record.getMessage() for record in caplog.records if record.name == _pools.logger.name]
    assert logged == [
        f"resume({tag!r}) does nothing: `{tag}` is active already",
        f"pause({tag!r}) does nothing: `{tag}` is paused already",
        "pause(None) does nothing: everything is paused already",
        "resume(None) does nothing: everything is active already",
    ]


def test_an_unknown_tag_does_nothing(
    saver: TorchMemorySaver, tag: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    saver.pause(tag)
    tensors = regions(saver, next(TAGS), **HOST)
    saver.pause(tag)
    saver.resume(tag)
    assert is_kept(tensors)
    assert [record.getMessage() for record in caplog.records if record.name == _pools.logger.name] == [
        f"{call}({tag!r}) does nothing: there is no memory under `{tag}`"
        for call in ("pause", "pause", "resume")
    ]


def test_tensors_die_after_their_region_and_while_it_is_paused(saver: TorchMemorySaver, tag: str) -> None:
    tensors = regions(saver, tag, **HOST)
    del tensors[1]
    torch.cuda.empty_cache()
    saver.pause(tag)
    del tensors[1]
    gc.collect()
    torch.cuda.empty_cache()
    saver.resume(tag)
    assert same(tensors[0], 0)
    tensors.clear()
    torch.cuda.empty_cache()
    saver.pause(tag)
    saver.resume(tag)


def test_a_region_of_a_paused_tag_is_refused(saver: TorchMemorySaver, tag: str) -> None:
    tensors = regions(saver, tag, **HOST)
    saver.pause(tag)
    with pytest.raises(poorwill.PoorwillError, match="wake it first"), saver.region(tag, **HOST):
        pytest.fail("entered")
    saver.resume(tag)
    assert is_kept(tensors)


BAD: dict[str, tuple[Callable[[TorchMemorySaver], Any], type[Exception], str]] = {
    "backups exclude each other": (
        lambda saver: saver.region("a", enable_cpu_backup=True, enable_disk_backup=True),
        ValueError,
        "give one of them",
    ),
    "a kind of host memory without backup": (
        lambda saver: saver.region("a", cpu_backup_backend="mmap"),
        ValueError,
        "enable_cpu_backup=True",
    ),
    "an unknown kind": (
        lambda saver: saver.region("a", enable_cpu_backup=True, cpu_backup_backend="paper"),  # type: ignore
        ValueError,
        "pinned or mmap",
    ),
    "an empty tag": (lambda saver: saver.region(""), ValueError, "at least one character"),
    "no tag": (lambda saver: saver.region(None), ValueError, "not None"),  # type: ignore
    "a negative margin": (lambda saver: setattr(saver, "memory_margin_bytes", -1), ValueError, "0 or more"),
    "the margin is read": (lambda saver: saver.memory_margin_bytes, NotImplementedError, "not read"),
    "the mode is read": (lambda saver: saver.hook_mode, AttributeError, "not read"),
    "an unknown mode": (lambda saver: setattr(saver, "hook_mode", "paper"), ValueError, "preload"),
    "leaving no region": (lambda saver: saver.disable().__enter__(), AssertionError, "enter region"),
    "disk without a folder": (
        lambda saver: saver.region("a", enable_disk_backup=True).__enter__(),
        SaverError,
        "set_disk_backup_dir",
    ),
    "a backup of host memory": (
        lambda saver: saver.get_cpu_backup(torch.empty(8, dtype=torch.uint8)),
        ValueError,
        "on a GPU",
    ),
    "a backup of what no region has": (
        lambda saver: saver.get_cpu_backup(filled(8, 0)),
        SaverError,
        "no region has the 8 bytes",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_misuse_is_an_error(saver: TorchMemorySaver, what: str) -> None:
    call, kind, message = BAD[what]
    with pytest.raises(kind, match=message):
        call(saver)
    tensors = regions(saver, next(TAGS), **HOST)
    saver.pause()
    saver.resume()
    assert is_kept(tensors)


def test_the_mode_is_settled_by_the_first_use(saver: TorchMemorySaver) -> None:
    saver.hook_mode = "torch"
    assert saver.enabled
    assert saver._impl is None
    saver._ensure_initialized()
    saver.hook_mode = "torch"
    with pytest.raises(AssertionError, match="set it before"):
        saver.hook_mode = "preload"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TMS_INIT_ENABLE", "maybe", "neither on nor off"),
        ("TMS_RETAIN_CPU_BACKUP", "2", "neither on nor off"),
        ("TMS_INIT_CPU_BACKUP_BACKEND", "paper", "pinned or mmap"),
        ("TMS_INIT_ENABLE", "1", "started without the library"),
    ],
)
def test_a_bad_environment_is_an_error(
    saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SaverError, match=message), saver.region("a", enable_cpu_backup=True):
        pass


# Regions


def test_regions_nest(saver: TorchMemorySaver) -> None:
    outer, inner = next(TAGS), next(TAGS)
    symbols: Any = pools_of(saver)._binary_wrapper.cdll
    with saver.region(outer, **HOST):
        first = filled(4 * MIB, 0)
        with saver.region(inner):
            dropped = filled(4 * MIB, 1)
            assert symbols.tms_get_current_tag() == inner.encode()
            assert not symbols.tms_get_enable_cpu_backup()
        second = filled(4 * MIB, 2)
        assert symbols.tms_get_current_tag() == outer.encode()
        assert symbols.tms_get_enable_cpu_backup()
    assert not symbols.tms_get_interesting_region()
    saver.pause(inner)
    assert same(first, 0)
    assert same(second, 2)
    saver.pause()
    saver.resume()
    assert same(first, 0)
    assert same(second, 2)
    assert not same(dropped, 1)


def test_what_is_allocated_while_disabled_stays_awake_and_goes_back(
    saver: TorchMemorySaver, tag: str
) -> None:
    symbols: Any = pools_of(saver)._binary_wrapper.cdll
    with saver.region(tag, **HOST):
        inside = filled(4 * MIB, 0)
        before = torch.cuda.memory_reserved()
        with saver.disable():
            assert not symbols.tms_get_interesting_region()
            outside = filled(32 * MIB, 1)
            with saver.region(tag, **HOST):
                again = filled(4 * MIB, 2)
            outside_too = filled(32 * MIB, 3)
        assert symbols.tms_get_interesting_region()
        last = filled(4 * MIB, 4)
    saver.pause(tag)
    assert mapped_bytes(saver) == 0
    assert same(outside, 1)
    assert same(outside_too, 3)
    saver.resume(tag)
    assert same(inside, 0)
    assert same(again, 2)
    assert same(last, 4)
    del outside, outside_too
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 64 * MIB


def test_the_symbols_leave_a_region_and_return(saver: TorchMemorySaver, tag: str) -> None:
    symbols: Any = pools_of(saver)._binary_wrapper.cdll
    with saver.region(tag, **HOST):
        symbols.tms_set_interesting_region(False)
        symbols.tms_set_interesting_region(False)
        outside = filled(4 * MIB, 1)
        symbols.tms_set_interesting_region(True)
        symbols.tms_set_interesting_region(True)
        inside = filled(4 * MIB, 2)
    saver.pause(tag)
    assert same(outside, 1)
    saver.resume(tag)
    assert same(inside, 2)


def test_threads_have_regions_of_their_own(saver: TorchMemorySaver) -> None:
    tags = [next(TAGS) for _ in range(2)]
    kept: dict[str, Any] = {}
    barrier = threading.Barrier(2)

    def work(number: int) -> None:
        with saver.region(tags[number], **HOST):
            barrier.wait()
            kept[tags[number]] = [filled((3 + number) * MIB, seed) for seed in range(4)]
            barrier.wait()

    together(lambda: work(0), lambda: work(1))
    saver.pause(tags[0])
    assert is_kept(kept[tags[1]])
    saver.resume(tags[0])
    assert is_kept(kept[tags[0]])


def test_an_error_inside_a_region_leaves_it(saver: TorchMemorySaver, tag: str) -> None:
    kept = []

    def fails() -> None:
        with saver.region(tag, **HOST):
            kept.append(filled(4 * MIB, 0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    outside = filled(4 * MIB, 1)
    saver.pause(tag)
    assert same(outside, 1)
    saver.resume(tag)
    assert same(kept[0], 0)


# Several GPUs


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU here")


@needs_two
def test_a_pause_takes_all_gpus(saver: TorchMemorySaver, tag: str) -> None:
    tensors = []
    for ordinal in range(2):
        with torch.cuda.device(ordinal), saver.region(tag, **HOST):
            tensors.append(filled(8 * MIB, ordinal, f"cuda:{ordinal}"))
    saver.pause(tag)
    assert [mapped_bytes(saver, ordinal) for ordinal in range(2)] == [0, 0]
    saver.resume(tag)
    assert all(same(tensor, ordinal) for ordinal, tensor in enumerate(tensors))


@needs_two
def test_a_pause_that_fails_on_one_gpu_is_undone_on_the_other(saver: TorchMemorySaver, tag: str) -> None:
    tensors = []
    for ordinal in range(2):
        with torch.cuda.device(ordinal), saver.region(tag, **HOST):
            tensors.append(filled(8 * MIB, ordinal, f"cuda:{ordinal}"))
    with saver.region(tag):
        dropped = filled(8 * MIB, 5, f"cuda:{torch.cuda.current_device()}")
    with (
        arenas_of(saver)[1].hold(tag, "a network card"),
        pytest.raises(poorwill.PoorwillError, match="network"),
    ):
        saver.pause(tag)
    assert all(same(tensor, ordinal) for ordinal, tensor in enumerate(tensors))
    assert same(dropped, 5)
    saver.pause(tag)
    saver.resume(tag)
    assert all(same(tensor, ordinal) for ordinal, tensor in enumerate(tensors))


# Backups


def test_a_backup_is_read_while_paused(saver: TorchMemorySaver, tag: str) -> None:
    tensors = regions(saver, tag, **HOST)
    assert saver.get_cpu_backup(tensors[0]) is None
    expected = [bytes_of(tensor.cpu()) for tensor in tensors]
    saver.pause(tag)
    for zero_copy in (False, True):
        read = [saver.get_cpu_backup(tensor, zero_copy=zero_copy) for tensor in tensors]
        assert [bytes_of(tensor) for tensor in read] == expected
        assert all(str(tensor.device) == "cpu" for tensor in read)
        assert [tuple(tensor.shape) for tensor in read] == [tuple(tensor.shape) for tensor in tensors]
    saver.resume(tag)
    assert saver.get_cpu_backup(tensors[0]) is None


def test_a_retained_backup_has_the_bytes_of_the_last_pause(saver: TorchMemorySaver, tag: str) -> None:
    saver.retain_cpu_backup = True
    assert saver.retain_cpu_backup
    [tensor, *_] = tensors = regions(saver, tag, **MMAP)
    assert saver.get_cpu_backup(tensor) is None
    saver.pause(tag)
    place = saver.get_cpu_backup(tensor, zero_copy=True).data_ptr()
    saver.resume(tag)
    tensor.fill_(77)
    seen = saver.get_cpu_backup(tensor, zero_copy=True)
    assert seen.data_ptr() == place
    assert set(bytes_of(seen)) == {1}
    del seen
    saver.pause(tag)
    seen = saver.get_cpu_backup(tensor, zero_copy=True)
    assert seen.data_ptr() == place
    assert set(bytes_of(seen)) == {77}
    del seen
    saver.retain_cpu_backup = False
    saver.resume(tag)
    assert saver.get_cpu_backup(tensor) is None
    assert same(tensors[1], 1)


def test_a_backup_that_is_looked_at_stays_as_it_is(saver: TorchMemorySaver, tag: str) -> None:
    [tensor, *_] = regions(saver, tag, **HOST)
    saver.pause(tag)
    seen = saver.get_cpu_backup(tensor, zero_copy=True)
    saver.resume(tag)
    tensor.fill_(77)
    saver.pause(tag)
    assert set(bytes_of(seen)) == {1}
    assert set(bytes_of(saver.get_cpu_backup(tensor))) == {77}
    saver.resume(tag)
    assert set(bytes_of(tensor.cpu())) == {77}


def test_only_what_was_asked_to_be_viewable_is_read_without_a_copy(saver: TorchMemorySaver, tag: str) -> None:
    saver.stored = "compact"
    with saver.region(tag, **HOST):
        # Longer than what is stored at one place.
        tensor = filled(72 * MIB, 5)
    saver.pause(tag)
    with pytest.raises(poorwill.PoorwillError):
        saver.get_cpu_backup(tensor, zero_copy=True)
    assert set(bytes_of(saver.get_cpu_backup(tensor))) == {6}
    saver.resume(tag)


def test_a_region_without_backup_has_none_to_read(saver: TorchMemorySaver, tag: str) -> None:
    [tensor, *_] = regions(saver, tag)
    saver.pause(tag)
    with pytest.raises(SaverError, match="enable_cpu_backup=True"):
        saver.get_cpu_backup(tensor)
    saver.resume(tag)


def test_mmap_gives_host_memory_back_with_each_resume(saver: TorchMemorySaver, tag: str) -> None:
    tensors = regions(saver, tag, **MMAP)
    saver.pause(tag)
    assert backup_bytes(saver, f"{tag}.mmap") > 0
    saver.resume(tag)
    assert backup_bytes(saver, f"{tag}.mmap") == 0
    assert is_kept(tensors)


def test_other_host_memory_is_kept_unless_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch, saver: TorchMemorySaver, tag: str
) -> None:
    monkeypatch.setenv("POORWILL_KEEP_BACKUPS", "0")
    tensors = regions(saver, tag, **HOST)
    saver.pause(tag)
    saver.resume(tag)
    assert backup_bytes(saver, tag) == 0
    assert is_kept(tensors)


def test_disk(saver: TorchMemorySaver, tag: str, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    saver.set_disk_backup_dir(str(folder))
    assert folder.is_dir()
    tensors = regions(saver, tag, enable_disk_backup=True)
    saver.set_disk_backup_dir(str(folder))
    with pytest.raises(SaverError, match="before it"):
        saver.set_disk_backup_dir(str(tmp_path))
    for _ in range(2):
        saver.pause(tag)
        disk = arenas_of(saver)[0].stats().disk
        assert disk is not None
        assert disk.used_bytes > 0
        assert backup_bytes(saver, f"{tag}.disk") == 0
        assert set(bytes_of(saver.get_cpu_backup(tensors[0]))) == {1}
        with pytest.raises(poorwill.PoorwillError):
            saver.get_cpu_backup(tensors[0], zero_copy=True)
        saver.resume(tag)
        assert is_kept(tensors)


def test_the_margin_stays_free(saver: TorchMemorySaver, tag: str) -> None:
    tensors = regions(saver, tag, **HOST)
    free_bytes, _ = torch.cuda.mem_get_info()
    saver.memory_margin_bytes = free_bytes - 40 * MIB
    with saver.region(tag, **HOST):
        small = filled(2 * MIB, 7)
        with pytest.raises(torch.OutOfMemoryError):
            filled(64 * MIB, 8)
        saver.memory_margin_bytes = 0
        large = filled(64 * MIB, 8)
    assert is_kept(tensors)
    assert same(small, 7)
    assert same(large, 8)


# CUDA graphs


@pytest.mark.parametrize("shares", [False, True])
def test_graphs_are_paused_and_replayed(saver: TorchMemorySaver, tag: str, shares: bool) -> None:
    handle = torch.cuda.graph_pool_handle() if shares else None
    graphs, outputs, inputs = [], [], filled(6 * MIB, 3)
    stream = torch.cuda.Stream()
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with saver.cuda_graph(graph, pool=handle, stream=stream, tag=tag, enable_cpu_backup=True):
            outputs.append(inputs.clone())
        graphs.append(graph)
    assert len(pools_of(saver)._graph_pools) == int(shares)
    for seed in (11, 12):
        inputs.fill_(seed)
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        before = [bytes_of(output.cpu()) for output in outputs]
        assert all(set(content) == {seed} for content in before)
        saver.pause(tag)
        assert mapped_bytes(saver) == 0
        saver.resume(tag)
        assert [bytes_of(output.cpu()) for output in outputs] == before


def test_a_pause_during_a_capture_is_refused(saver: TorchMemorySaver, tag: str) -> None:
    tensors = regions(saver, tag, **HOST)
    graph, inputs = torch.cuda.CUDAGraph(), filled(MIB, 3)
    with saver.cuda_graph(graph, tag=next(TAGS), enable_cpu_backup=True):
        output = inputs.clone()
        with pytest.raises(poorwill.PoorwillError):
            saver.pause(tag)
    graph.replay()
    torch.cuda.synchronize()
    assert same(output, 3)
    assert is_kept(tensors)
    saver.pause(tag)
    saver.resume(tag)
    assert is_kept(tensors)
