"""What is offered to vLLM in `contrib/upstream/vllm`: the patches fit, and the plugin needs less with them."""

import os
import re
from pathlib import Path

import pytest
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


def test_the_page_says_how_large_each_patch_is(tmp_path: Path) -> None:
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in README.splitlines() if ".patch" in line
    ]
    stock = sources_of(VERSION)
    all_rows = rows(stock)
    found = []
    for patch in patches():
        added, removed = sizes(patch)
        root = apply(stock, tmp_path / patch.stem, [patch])
        found.append((f"[{patch.name}]({patch.name})", f"+{added} −{removed}", f"−{all_rows - rows(root)}"))
    assert [(name, size, fewer) for name, size, fewer, *_ in table] == found


@pytest.fixture
def patched(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suites find these sources, and no settings."""
    kept = ("POORWILL_FAKE_LIBCUDA", "POORWILL_EFFORT")
    for name in list(os.environ):
        if name.startswith(("POORWILL_", "VLLM_", "CUDA_")) and name not in kept:
            monkeypatch.delenv(name)
    monkeypatch.setenv(VARIABLE, str(sources.parent))


@pytest.mark.usefixtures("patched")
def test_offloaders_in_the_patched_one(subtests: pytest.Subtests, fake: dict[str, str]) -> None:
    suites = ["vllm_upstream_offload_suite", "vllm_offload_suite", "vllm_offload_prefetch_suite"]
    chosen = f"{VERSION} and not ({' or '.join(BY_REPLACING)})"
    run_suite(subtests, suites, *FAKES, "-p", "vllm_offload_models", "-k", chosen, environment=fake)


@pytest.mark.usefixtures("patched")
def test_a_worker_in_the_patched_one(subtests: pytest.Subtests, fake: dict[str, str]) -> None:
    run_suite(subtests, ["vllm_upstream_suite"], *FAKES, "-p", "vllm_engines", environment=fake)
    core = f"{VERSION} and ({' or '.join(CORE)})"
    run_suite(subtests, ["vllm_worker_suite"], *FAKES, "-p", "vllm_engines", "-k", core, environment=fake)
