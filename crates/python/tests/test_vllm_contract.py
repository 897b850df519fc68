"""What poorwill's plugin takes for granted about vLLM, held against the sources of both versions.

vLLM is not imported, and neither is what is ours here: both are read. So this shows that names, parameters
and call sites fit, and nothing about what happens inside.
"""

import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from poorwill.vllm._engine import TOUCHING
from poorwill.vllm._versions import CONTRACT, REGISTRY, TAGS, TESTED, Need, known, needs
from vllm_sources import calls, needs_sources, sources, tags
from vllm_sources.calls import ALLOCATOR, CUMEM, Use
from vllm_sources.likeness import replacing
from vllm_sources.tree import Definition, MissingError, Tree

OURS = Tree(Path(__file__).parents[1] / "python")
ALLOCATOR_OF_OURS = ("poorwill.vllm.allocator", "Allocator")
BACKEND_OF_OURS = ("poorwill.vllm.backend", "Backend")
WORKER_OF_OURS = ("poorwill.vllm.worker", "Worker")
BACKEND_OF_VLLM = ("vllm.device_allocator.sleep_mode_backend", "SleepModeBackend")
WORKER_OF_VLLM = ("vllm.v1.worker.gpu_worker", "Worker")

# What vLLM takes from the module `cumem`. All but the class is left as it is.
FROM_CUMEM = {ALLOCATOR, "cumem_available"}

# Where an allocator or a backend is handed on; that the receivers are followed is the collector's affair.
HANDED_ON = {calls.GETTER, "create_backend", *calls.BACKENDS}

# What stands for waking a scheduler alone, and reaches no allocator.
NO_MEMORY = {"scheduling"}


@cache
def tree(version: str) -> Tree:
    folder = sources()
    assert folder is not None
    path = folder / version
    assert (path / "vllm/__init__.py").is_file(), f"there is no vLLM {version} in {path}; `cargo xtask vllm`"
    return Tree(path)


@cache
def uses(version: str) -> calls.Found:
    return calls.collect(tree(version))


each_version = pytest.mark.parametrize("version", TESTED)
with_registry = pytest.mark.parametrize("version", [v for v in TESTED if known(v) >= REGISTRY])


@needs_sources
@each_version
def test_the_sources_are_those_of_the_version(version: str) -> None:
    metadata = tree(version).root / f"vllm-{version}.dist-info" / "METADATA"
    assert f"\nVersion: {version}\n" in metadata.read_text(encoding="utf-8")


# The contract.


def problem(tree: Tree, need: Need) -> str | None:
    try:
        return need.problem(tree.found(need))
    except MissingError as missing:
        return str(missing)


@needs_sources
@each_version
def test_all_that_a_hook_needs_is_there(version: str) -> None:
    wrong = {need.name: said for need in needs(version) if (said := problem(tree(version), need))}
    assert not wrong


@needs_sources
@each_version
def test_what_a_version_is_said_not_to_have_it_has_not(version: str) -> None:
    absent = [need for need in CONTRACT if need not in needs(version)]
    there = [need.name for need in absent if problem(tree(version), need) is None]
    assert not there, "`since` or `until` is wrong"


@pytest.mark.parametrize(
    ("source", "kind", "parameters", "more", "says"),
    [
        ("def f(self, level=1): ...", "method", ["level"], {"is_whole": True}, None),
        ("def f(self, depth=1): ...", "method", ["level"], {}, "does not take level but (depth)"),
        ("def f(self, level=1, how=0): ...", "method", ["level"], {}, None),
        ("def f(self, level=1, how=0): ...", "method", ["level"], {"is_whole": True}, "takes how, too"),
        ("def f(self, level, how): ...", "method", ["level"], {}, "takes how, too"),
        ("def f(self, mode, level): ...", "method", ["level", "mode"], {}, "and not level, mode first"),
        ("def f(self, *, level): ...", "method", ["level"], {"is_whole": True}, None),
        ("def f(self, *args, **kwargs): ...", "method", ["*args", "**kwargs"], {}, None),
        ("def f(self, **kwargs): ...", "method", ["*args", "**kwargs"], {}, "does not take *args"),
        ("async def f(self): ...", "method", [], {}, "is asynchronous now"),
        ("def f(self): ...", "method", [], {"is_async": True}, "is not asynchronous any more"),
        ("@classmethod\n    def f(cls, name): ...", "classmethod", ["name"], {"is_whole": True}, None),
        ("def f(self, name): ...", "classmethod", ["name"], {}, "is a method and was a classmethod"),
        ("@staticmethod\n    def f(name): ...", "staticmethod", ["name"], {}, None),
        ("@property\n    def f(self): ...", "method", [], {}, "is a value and was a method"),
        ("g = 1", "method", [], {}, "f is missing"),
        ("def g(self): self.f, self.h = 1, 2", "field", [], {}, None),
        ("f: int", "field", [], {}, None),
        ("f: int", "value", [], {}, None),
    ],
)
def test_what_has_changed_is_found(
    tmp_path: Path, source: str, kind: str, parameters: list[str], more: dict[str, bool], says: str | None
) -> None:
    (tmp_path / "base.py").write_text(f"class Base:\n    {source}\n")
    (tmp_path / "planted.py").write_text("from base import Base\nclass Planted(Base):\n    pass\n")
    need = Need("planted", "Planted.f", kind, tuple(parameters), **more)  # type: ignore[arg-type]
    found = problem(Tree(tmp_path), need)
    assert (found is None) if says is None else (found is not None and says in found)


# The call sites.


def refusal(ours: Tree, place: tuple[str, str], use: Use, base: str | None = None) -> str | None:
    """Why a use of vLLM's would fail on ours."""
    owner = ours.definition(*place)
    if not use.attribute:
        return None
    try:
        found = owner.member(use.attribute).found()
    except MissingError:
        in_fields = use.attribute in owner.fields()
        return None if in_fields and use.call is None else f"{use.where}: no {use.attribute}"
    if use.call is None:
        return None
    named = calls.keywords(use.call)
    if found.kind == "value":
        return f"{use.where}: {use.attribute} cannot be called"
    if named is None:
        return f"{use.where}: what {use.attribute} is given cannot be told"
    try:
        inspect.Signature(found.parameters).bind(*use.call.args, **dict.fromkeys(named))
    except TypeError as error:
        return f"{use.where}: {use.attribute}: {error}"
    return None


@needs_sources
@each_version
def test_every_call_of_the_allocator_is_answered_by_ours(version: str) -> None:
    of_allocator = uses(version).of("class", "allocator")
    assert not [said for use in of_allocator if (said := refusal(OURS, ALLOCATOR_OF_OURS, use))]


@needs_sources
@with_registry
def test_every_call_of_a_backend_is_answered_by_ours(version: str) -> None:
    of_backend = uses(version).of("backend class", "backend")
    assert not [said for use in of_backend if (said := refusal(OURS, BACKEND_OF_OURS, use))]


@needs_sources
@each_version
def test_no_use_is_lost(version: str) -> None:
    assert [escape for escape in uses(version).escapes if escape.function not in HANDED_ON] == []


@needs_sources
@each_version
def test_of_the_module_nothing_is_used_that_is_not_there(version: str) -> None:
    assert {use.attribute for use in uses(version).of("module")} <= FROM_CUMEM


@needs_sources
@each_version
def test_the_uses_that_are_known_are_found(version: str) -> None:
    methods = {"sleep", "wake_up", "use_memory_pool", "get_current_usage"}
    of_backend = set()
    if known(version) >= REGISTRY:
        methods |= {"discard", "cudagraph_pool", "release_pools"}
        of_backend = {"suspend", "resume", "discard", "is_supported"}
    assert {use.attribute for use in uses(version).of("allocator")} >= methods
    assert {use.attribute for use in uses(version).of("class")} >= {"get_instance"}
    assert {use.attribute for use in uses(version).of("backend class", "backend")} >= of_backend


PLANTED = """
import torch
from typing import cast
from vllm.device_allocator import get_mem_allocator_instance as memory
from vllm.device_allocator import cumem

class Planted:
    def __init__(self, config):
        self._memory = memory() if config else None
        self.sleep_mode_backend.park(1)
        backend = self.sleep_mode_backend
        backend.unpark()

    def by_class(self):
        from vllm.device_allocator.cumem import CuMemAllocator as Class, conf
        if Class.instance is not None:
            Class.instance.tidy(now=True)
        Class.reset()

    def by_module(self):
        with cumem.CuMemAllocator.get_instance().use_memory_pool(label="weights"):
            cumem.CuMemAllocator.limit = 1

    def by_attribute(self):
        return [self._memory.shrink(*range(2)) for _ in range(2)]

    def by_cast(self):
        allocator = again = cast("CuMemAllocator", memory())
        def later():
            again.sleep(("weights",), "now")
        return later

    def escaping(self, config):
        torch.keep(memory())
        getattr(cumem, "x")
        self.other.memory = self._memory
        name = "vllm.device_allocator.cumem"
        print(config.sleep_mode_backend)
        return memory
"""


@pytest.fixture
def planted(tmp_path: Path) -> Tree:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/planted.py").write_text(PLANTED)
    return Tree(tmp_path)


def test_a_planted_use_is_found(planted: Tree) -> None:
    found = calls.collect(planted)
    seen = {(use.of, use.attribute, use.call is not None) for use in found.uses}
    assert seen == {
        ("getter", "", True),
        ("module", "CuMemAllocator", False),
        ("module", "conf", False),
        ("class", "instance", False),
        ("class", "reset", True),
        ("class", "get_instance", True),
        ("class", "limit", False),
        ("allocator", "tidy", True),
        ("allocator", "use_memory_pool", True),
        ("allocator", "shrink", True),
        ("allocator", "sleep", True),
        ("backend", "park", True),
        ("backend", "unpark", True),
    }
    in_order = sorted(found.escapes, key=lambda escape: int(escape.where.rpartition(":")[2]))
    assert [(escape.of, escape.text) for escape in in_order] == [
        ("allocator", "torch.keep(memory())"),
        ("module", "getattr(cumem, 'x')"),
        ("allocator", "self.other.memory = self._memory"),
        ("module", "name = 'vllm.device_allocator.cumem'"),
        ("getter", "return memory"),
    ]


def test_a_planted_use_that_ours_does_not_answer_is_refused(planted: Tree, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "own.py").write_text(
        textwrap.dedent(
            """
            class Allocator:
                instance: "Allocator | None" = None
                @staticmethod
                def get_instance(): ...
                def use_memory_pool(self, tag=None): ...
                def sleep(self, offload_tags=None): ...
                def shrink(self, *args): ...
                def __init__(self): self.limit = 0
            """
        )
    )
    found = calls.collect(planted).of("class", "allocator")
    said = [refusal(Tree(ours), ("own", "Allocator"), use) for use in found]
    problems = sorted(problem.partition(": ")[2] for problem in said if problem)
    assert problems == [
        "no reset",
        "no tidy",
        "sleep: too many positional arguments",
        "use_memory_pool: got an unexpected keyword argument 'label'",
        "what shrink is given cannot be told",
    ]


# The tags.


@needs_sources
@each_version
def test_there_is_a_policy_for_every_tag(version: str) -> None:
    found = tags.collect(tree(version), uses(version))
    assert [tag for tag in found if tag.name not in TAGS | NO_MEMORY] == []
    names = {tag.name for tag in found}
    assert names >= {"weights", "kv_cache", "default"}
    if known(version) >= REGISTRY:
        assert names >= {"runtime", "workspace", "cudagraph"}


def test_a_planted_tag_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "vllm/device_allocator"
    folder.mkdir(parents=True)
    (folder / "cumem.py").write_text("class CuMemAllocator:\n    default_tag: str = 'mine'\n")
    (tmp_path / "vllm/planted.py").write_text(
        textwrap.dedent(
            """
            from vllm.device_allocator import get_mem_allocator_instance

            class Planted:
                def _pool(self, tag):
                    return get_mem_allocator_instance().use_memory_pool(tag=tag)

                def load(self, level, told):
                    with self._pool("one"), self._pool(tag="two" if level else "three"):
                        pass
                    get_mem_allocator_instance().use_memory_pool()
                    get_mem_allocator_instance().use_memory_pool(f"of {level}")
                    kept = ("four", "five")
                    if level:
                        kept = ("six", *kept)
                    get_mem_allocator_instance().sleep(offload_tags=kept)

                def nobody_calls(self, tag):
                    get_mem_allocator_instance().use_memory_pool(tag)
            """
        )
    )
    planted = Tree(tmp_path)
    found = tags.collect(planted, calls.collect(planted))
    assert {tag.name for tag in found if tag.name} == {"mine", "one", "two", "three", "four", "five", "six"}
    assert sorted(tag.where for tag in found if tag.name is None) == [
        "the callers of nobody_calls",
        "vllm/planted.py:12",
    ]


# What stands in the place of vLLM's.


def places(version: str) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    yield ALLOCATOR_OF_OURS, (CUMEM, ALLOCATOR)
    yield WORKER_OF_OURS, WORKER_OF_VLLM
    if known(version) >= REGISTRY:
        yield BACKEND_OF_OURS, BACKEND_OF_VLLM


@needs_sources
@each_version
def test_ours_take_all_that_vllms_take(version: str) -> None:
    """Every method of ours by the name of one of theirs, called or not."""
    problems = []
    for place, original in places(version):
        theirs = tree(version).definition(*original)
        for name, method in OURS.definition(*place).methods().items():
            try:
                their = theirs.member(name).found()
            except MissingError:
                continue
            if name != "__init__" and (said := replacing(method.found(), their)):
                problems.append(f"{place[1]}.{name} {said}")
    assert not problems


@needs_sources
@with_registry
def test_our_backend_has_all_that_a_backend_has(version: str) -> None:
    """So that nothing is left to a default which says of ours what is not so."""
    theirs = set(tree(version).definition(*BACKEND_OF_VLLM).methods()) - {"__init__"}
    assert theirs <= set(OURS.definition(*BACKEND_OF_OURS).methods())


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        ("def f(self, tags=None): ...", "def f(self, tags): ...", None),
        ("def f(self, tags): ...", "def f(self, tags=None): ...", "demands tags"),
        ("def f(self, tag): ...", "def f(self, tags): ...", "does not take tags"),
        ("def f(self, tags, level): ...", "def f(self, tags): ...", "demands level"),
        ("def f(self, b, a): ...", "def f(self, a, b): ...", "does not take a in its place"),
        ("def f(self, *args, **kwargs): ...", "def f(self, a, *, b): ...", None),
        ("def f(self, *, b=1): ...", "def f(self, *args, b=1): ...", "does not take *args"),
        ("async def f(self): ...", "def f(self): ...", "an async method"),
        ("def f(self): ...", "@classmethod\n    def f(cls): ...", "is a method"),
    ],
)
def test_what_cannot_stand_in_is_found(tmp_path: Path, ours: str, theirs: str, says: str | None) -> None:
    (tmp_path / "two.py").write_text(f"class Ours:\n    {ours}\nclass Theirs:\n    {theirs}\n")
    both = Tree(tmp_path)
    said = replacing(*(both.definition("two", f"{name}.f").found() for name in ("Ours", "Theirs")))
    assert (said is None) if says is None else (said is not None and says in said)


# What our worker knows of vLLM's by other means than the contract.


@needs_sources
@each_version
def test_the_methods_that_allocate_a_cache_are_there(version: str) -> None:
    """What our worker hooks by name where vLLM has no pools for runtime state."""
    runner = tree(version).definition("vllm.v1.worker.gpu_model_runner", "GPUModelRunner")
    makers = ("_allocate_kv_cache_tensors", "allocate_uniform_kv_caches")
    found = [name for name in makers if _has(runner, name)]
    assert found == (list(makers) if known(version) < REGISTRY else [])
    worker = tree(version).definition(*WORKER_OF_VLLM)
    assert _has(worker, "finish_weight_update") == (known(version) >= (0, 22, 0))
    for name in ("_sleep_saved_parameters", "_sleep_saved_draft_buffers", "_weight_update_is_draft"):
        assert (name in worker.fields()) == (known(version) >= REGISTRY)


@needs_sources
@each_version
def test_what_our_worker_knows_of_vllms_by_its_words_is_there(version: str) -> None:
    """The sentence of one assertion, and the methods that are refused while the weights sleep."""
    source = (tree(version).root / "vllm/v1/worker/gpu_worker.py").read_text()
    assert source.count('assert freed_bytes >= 0, "Memory usage increased after sleeping."') == 1
    ours = (OURS.root / "poorwill/vllm/worker.py").read_text()
    assert '_LESS_FREE = "Memory usage increased after sleeping."' in ours
    worker = tree(version).definition(*WORKER_OF_VLLM)
    since_registry = {"start_weight_update", "start_draft_weight_update"}
    since_registry |= {"compute_weight_checksums", "reset_weights"}
    there = {name for name in TOUCHING if _has(worker, name)}
    assert there == (TOUCHING if known(version) >= REGISTRY else TOUCHING - since_registry)


def _has(definition: Definition, name: str) -> bool:
    try:
        definition.member(name)
    except MissingError:
        return False
    return True
