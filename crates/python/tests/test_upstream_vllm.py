"""What is offered to vLLM in `contrib/upstream/vllm`: they fit, and the plugin needs less with them."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm.loader import Loader
from nccl_fakes import World
from poorwill.vllm import _communicators, _peers
from poorwill.vllm._generations import OFFERED
from poorwill.vllm._versions import extensions, needs
from suites import FAKES, run_suite
from vllm_sources import VARIABLE, needs_sources, sources_of
from vllm_sources.patched import PATCHES, VERSION, apply, patches, sizes
from vllm_sources.tree import MissingError, Tree

pytestmark = needs_sources
README = (PATCHES / "README.md").read_text(encoding="utf-8")

# Core cases of the suites that every version has.
CORE = (
    *("level_1_brings_everything_back", "waking_by_tag", "level_2_says_what_is_gone"),
    *("nothing_is_in_use_when_everything_was_freed", "weights_are_written_when_they_are_awake"),
)

# What is tested of offloaders that vLLM's own functions are replaced to make.
BY_REPLACING = (
    *("ours_are_vllms_with_the_same_arguments", "an_unknown_offloader_is_refused"),
    *("no_offloader_of_vllms_made", "is_what_vllm_gets_wrong", "another_vllm_is_refused"),
    "supports_tower_offload",
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a version with all patches."""
    return apply(sources_of(VERSION), tmp_path_factory.mktemp("vllm") / VERSION, patches())


def rows(root: Path) -> int:
    tree = Tree(root)
    return len(needs(VERSION, extended=extensions(tree.found)))


def problems(root: Path) -> dict[str, str]:
    tree, wrong = Tree(root), {}
    for need in needs(VERSION, extended=extensions(tree.found)):
        try:
            problem = need.problem(tree.found(need))
        except MissingError as missing:
            problem = str(missing)
        if problem is not None:
            wrong[need.name] = problem
    return wrong


def test_all_that_is_needed_of_the_patched_one_is_there(sources: Path) -> None:
    assert extensions(Tree(sources).found) >= OFFERED
    assert problems(sources) == {}


def test_each_patch_fits_alone(tmp_path: Path) -> None:
    """So that each can be offered, and taken, by itself."""
    stock = sources_of(VERSION)
    for patch in patches():
        root = apply(stock, tmp_path / patch.stem, [patch])
        assert problems(root) == {}
        assert extensions(Tree(root).found) & OFFERED, patch.name


def test_the_page_says_how_many_rows_are_left(sources: Path) -> None:
    [stated] = re.findall(r"^\*\*(\d+) rows\*\* .* \*\*(\d+)\*\* ", README, re.MULTILINE)
    assert tuple(map(int, stated)) == (rows(sources_of(VERSION)), rows(sources))
    total = tuple(map(sum, zip(*map(sizes, patches()), strict=True)))
    assert f"+{total[0]} -{total[1]} lines" in README


def test_the_page_says_how_large_each_patch_is(tmp_path: Path) -> None:
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in README.splitlines()
        if line.startswith("| [")
    ]
    stock = sources_of(VERSION)
    all_rows = rows(stock)
    found = []
    for patch in patches():
        added, removed = sizes(patch)
        root = apply(stock, tmp_path / patch.stem, [patch])
        found.append((f"[{patch.name}]({patch.name})", f"+{added} -{removed}", f"-{all_rows - rows(root)}"))
    assert [(name, size, fewer) for name, size, fewer, *_ in table] == found


@pytest.fixture
def patched(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suites find these sources, and no settings."""
    kept = ("POORWILL_FAKE_LIBCUDA", "POORWILL_EFFORT")
    for name in list(os.environ):
        if name.startswith(("POORWILL_", "VLLM_", "CUDA_")) and name not in kept:
            monkeypatch.delenv(name)
    monkeypatch.setenv(VARIABLE, str(sources.parent))


COMMUNICATORS = "vllm.distributed.device_communicators"
PARALLEL = "vllm.distributed.parallel_state"


class Tensor:
    """As much of a tensor as has an address."""

    nbytes = 77

    def data_ptr(self) -> int:
        return 0x3000


class Group:
    """One of vLLM's, as far as it is registered."""

    unique_name, world_size, ranks = "tp:0", 2, (0, 1)

    def __init__(self, device: Any) -> None:
        self.device_communicator = device
        self.device_group = self

    def _get_backend(self, _: Any) -> Any:
        raise RuntimeError("No backend type associated with device type cuda")


def instance(of: Any, **fields: Any) -> Any:
    made = of.__new__(of)
    vars(made).update(fields)
    return made


@pytest.mark.usefixtures("patched")
def test_communicators_of_the_patched_one_say_what_ours_would_find(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("base_device_communicator", "cuda_communicator", "custom_all_reduce", "all2all")
    loader = Loader(VERSION, [PARALLEL, *(f"{COMMUNICATORS}.{name}" for name in names)])
    segments = [{"address": 0x5000, "total_size": 30}, {"address": 0x6000, "total_size": 12}]
    pool = SimpleNamespace(snapshot=lambda: segments)
    loader.give(f"{COMMUNICATORS}.pynccl_allocator", _mem_pool=pool)
    workspaces = {"_fi_ar_workspace": object(), "_fi_ar_quant_workspace": None}
    loader.give(f"{COMMUNICATORS}.flashinfer_all_reduce", **workspaces)
    modules = [PARALLEL, *(f"{COMMUNICATORS}.{name}" for name in names)]
    modules += [f"{COMMUNICATORS}.{name}" for name in ("pynccl_allocator", "flashinfer_all_reduce")]
    for name in ("vllm", "vllm.distributed", *modules):
        monkeypatch.setitem(sys.modules, name, loader.module(name))
    monkeypatch.setattr(_peers, "_allocation_bytes", {0x1000: 8 << 20, 0x2000: 9 << 20}.get)
    assert _communicators.are_described()
    of: dict[str, Any] = {name: loader.module(f"{COMMUNICATORS}.{name}") for name in names}
    reduce = instance(
        of["custom_all_reduce"].CustomAllreduce,
        **{"disabled": False, "rank": 1, "meta_ptrs": [0x7000, 0x1000], "buffer_ptrs": [0x8000, 0x2000]},
        **{"_capture_registered": True, "mnnvl_buffer": Tensor(), "mnnvl_multimem_rs_buffer": None},
    )
    # It would free them.
    del type(reduce).__del__
    silent = {"ca_comm": None, "symm_mem_comm": None, "fi_pcie_ipc_ar_comm": None, "pynccl_comm": None}
    cuda, experts = of["cuda_communicator"].CudaCommunicator, of["all2all"]
    loud = {
        "ca_comm": reduce,
        "symm_mem_comm": SimpleNamespace(buffer=Tensor()),
        "fi_pcie_ipc_ar_comm": SimpleNamespace(workspace=object()),
        "pynccl_comm": SimpleNamespace(disabled=False, comm=7, nccl=SimpleNamespace(lib=World(1).library(0))),
    }
    devices = [
        instance(cuda, **loud, all2all_manager=instance(experts.DeepEPLLAll2AllManager)),
        instance(cuda, **silent, all2all_manager=instance(experts.AgRsAll2AllManager)),
        instance(cuda, **silent, all2all_manager=None),
        None,
    ]
    for device in devices:
        group = Group(device)
        parallel = loader.module(PARALLEL)
        parallel._register_group(group)
        assert list(_communicators.groups(parallel)) == [group]
        places = sorted((each.nbytes or 0, each.addresses) for each in _peers.find())
        own = sorted(
            (each.nbytes or 0, each.addresses) for each in _peers._shared(parallel, _peers._allocation_bytes)
        )
        assert places == own
        torch = SimpleNamespace(device=lambda name: name)
        found = [each.key for each in _communicators._communicators(torch, parallel)]
        assert found == ([("tp:0", (0, 1))] if device is devices[0] else [])
        del group
    assert any("custom all-reduce, signals" in each.name for each in _described(parallel, devices[0]))


def _described(parallel: Any, device: Any) -> Any:
    group = Group(device)
    parallel._register_group(group)
    return _peers.find()


OFFLOADING = (*FAKES, "-p", "vllm_offload_models")
WORKING = (*FAKES, "-p", "vllm_engines")


@pytest.mark.usefixtures("patched")
def test_offloaders_in_the_patched_one(subtests: pytest.Subtests, fake: dict[str, str]) -> None:
    run_suite(subtests, ["vllm_upstream_offload_suite"], *OFFLOADING, environment=fake)


@pytest.mark.usefixtures("patched")
def test_a_worker_in_the_patched_one(subtests: pytest.Subtests, fake: dict[str, str]) -> None:
    run_suite(subtests, ["vllm_upstream_suite"], *WORKING, environment=fake)


@pytest.mark.long
@pytest.mark.usefixtures("patched")
def test_both_do_what_they_do_in_others(subtests: pytest.Subtests, fake: dict[str, str]) -> None:
    chosen = f"{VERSION} and not ({' or '.join(BY_REPLACING)})"
    suites = ["vllm_offload_suite", "vllm_offload_prefetch_suite"]
    run_suite(subtests, suites, *OFFLOADING, "-k", chosen, environment=fake)
    core = f"{VERSION} and ({' or '.join(CORE)})"
    run_suite(subtests, ["vllm_worker_suite"], *WORKING, "-k", core, environment=fake)
