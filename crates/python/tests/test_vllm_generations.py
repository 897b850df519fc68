"""The adapters for vLLM's generations: the right one is chosen, and what each says is so in the sources."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from poorwill.vllm import _generations
from poorwill.vllm._generations import ALL, Vllm0_20, Vllm0_25, Vllm0_30, Vllm0_33, of
from poorwill.vllm._versions import UnsupportedVllmError, known
from vllm_sources import sources_of
from vllm_sources.tree import MissingError, Tree
from vllm_sources.versions import held

WORKER = "vllm.v1.worker.gpu_worker"
FIRST_RUNNER = "vllm.v1.worker.gpu_model_runner"
SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner"
CORE = "vllm.v1.engine.core"


@pytest.mark.parametrize(
    ("version", "generation"),
    [
        ("0.20.0", Vllm0_20),
        ("0.20.2", Vllm0_20),
        ("0.25.0", Vllm0_25),
        ("0.25.1+cu129", Vllm0_25),
        ("0.30.0rc2", Vllm0_30),
        ("0.33.9", Vllm0_33),
    ],
)
def test_the_adapter_is_the_last_that_is_not_newer(version: str, generation: type) -> None:
    assert type(of(version)) is generation


@pytest.mark.parametrize("version", ["0.19.1", "0.34.0", "unknown"])
def test_there_is_none_for_what_is_not_known(version: str) -> None:
    with pytest.raises(UnsupportedVllmError, match=re.escape(version)):
        of(version)


def test_each_generation_says_something_that_the_one_before_does_not() -> None:
    sinces = [each.since for each in ALL]
    assert sinces == sorted(set(sinces))
    for before, each in pairwise(ALL):
        assert each.__mro__[1] is before
        assert set(vars(each)) - {"since", "__doc__", "__module__", "__qualname__"}


# What they say, beside what the sources show


class Sources:
    """Those of one version."""

    def __init__(self, version: str) -> None:
        self.tree = Tree(sources_of(version))

    def text(self, module: str) -> str:
        return self.tree.path(module).read_text(encoding="utf-8")

    def has(self, module: str, qualname: str) -> bool:
        try:
            self.tree.definition(module, qualname)
        except (MissingError, FileNotFoundError):
            return False
        return True

    def worker_fields(self, pattern: str) -> set[str]:
        return set(re.findall(rf"self\.({pattern})\b", self.text(WORKER)))


EVER_TOUCHING = frozenset().union(*(each.touching for each in ALL))
RUNNERS = (FIRST_RUNNER, SECOND_RUNNER)

FACTS: dict[str, tuple[Callable[[Any], Any], Callable[[Sources], Any]]] = {
    "touching": (
        lambda vllm: vllm.touching,
        lambda seen: {name for name in EVER_TOUCHING if seen.has(WORKER, f"Worker.{name}")},
    ),
    "saved": (lambda vllm: vllm.saved, lambda seen: seen.worker_fields(r"_sleep_(?:saved|rebuild)_\w+")),
    "restores at any wake": (
        lambda vllm: vllm.restores_at_any_wake,
        lambda seen: "wake_weights" not in seen.text(WORKER),
    ),
    "resets scales": (
        lambda vllm: vllm.resets_scales,
        lambda seen: any("def init_fp8_kv_scales" in seen.text(module) for module in RUNNERS),
    ),
    "bounds the profile by requests": (
        lambda vllm: vllm.bounds_profile_by_requests,
        lambda seen: bool(
            re.search(
                r"min\(\s*self\.max_num_reqs,\s*self\.compilation_config\.max_cudagraph_capture_size",
                seen.text(FIRST_RUNNER),
            )
        ),
    ),
    "has a pool for state": (
        lambda vllm: vllm.has_state_pool,
        lambda seen: 'context(tag="runtime")' in seen.text(WORKER),
    ),
    "has a pool for adapters": (
        lambda vllm: vllm.has_adapter_pool,
        lambda seen: 'tag="runtime"' in seen.text("vllm.v1.worker.lora_model_runner_mixin"),
    ),
    "releases the cache": (
        lambda vllm: vllm.releases_cache,
        lambda seen: seen.has(CORE, "EngineCore.release_kv_cache_memory"),
    ),
    "suspends by": (
        lambda vllm: vllm.suspend.__qualname__.partition(".")[0],
        lambda seen: (
            "Vllm0_30"
            if seen.has(WORKER, "Worker.sleep_mode_backend")
            else "Vllm0_25"
            if seen.has(WORKER, "Worker._get_sleep_mode_backend")
            else "Vllm0_20"
        ),
    ),
    "suspends communicators": (
        lambda vllm: vllm.resumes_communicators.__qualname__ != "Vllm0_20.resumes_communicators",
        lambda seen: "suspend_device_comms()" in seen.text(WORKER),
    ),
    "agrees on a pause": (
        lambda vllm: vllm.pauses_together,
        lambda seen: "self.pending_pause" in seen.text(CORE),
    ),
    "updates have an end": (
        lambda vllm: vllm.is_updating.__qualname__ != "Vllm0_20.is_updating",
        lambda seen: bool(seen.worker_fields("_weight_update_active")),
    ),
    "caches are made among other things": (
        lambda vllm: bool(
            vllm.cache_makers(
                type(
                    "FirstRunner",
                    (),
                    {"_allocate_kv_cache_tensors": None, "allocate_uniform_kv_caches": None},
                )()
            )
        ),
        lambda seen: "def _allocate_kv_cache_tensors" in seen.text(FIRST_RUNNER),
    ),
    "tags alone say what sleeps": (
        lambda vllm: vllm.tell_asleep.__qualname__ != "Vllm0_20.tell_asleep",
        lambda seen: "self.is_sleeping = " not in seen.text("vllm.v1.executor.abstract"),
    ),
    "requests may come to be ended": (
        lambda vllm: vllm.is_aborted.__qualname__ != "Vllm0_20.is_aborted",
        lambda seen: "abort_immediately" in seen.text("vllm.v1.request"),
    ),
    "requests are added to": (
        lambda vllm: vllm.is_known.__qualname__ != "Vllm0_20.is_known",
        lambda seen: "def has_request(" in seen.text("vllm.v1.core.sched.scheduler"),
    ),
    "refusals say why": (
        lambda vllm: vllm.answer_refused.__qualname__ != "Vllm0_20.answer_refused",
        lambda seen: "RequestError" in seen.text(CORE),
    ),
}


@pytest.mark.parametrize("version", held())
@pytest.mark.parametrize("fact", FACTS)
def test_what_an_adapter_says_is_so(version: str, fact: str) -> None:
    said, seen = FACTS[fact]
    assert said(of(version)) == seen(Sources(version))


@pytest.mark.parametrize("version", [version for version in held() if known(version) < (0, 29, 0)])
def test_the_second_runners_cache_is_made_by_a_function_of_its_module(version: str) -> None:
    assert "init_kv_cache(\n" in Sources(version).text(SECOND_RUNNER)
    assert _generations._SECOND_RUNNER == SECOND_RUNNER
