"""What poorwill's plugin assumes about vLLM, compared with the sources of its versions.

Those are all that are `TESTED`, or with little effort one of the oldest minor and one of the newest.

Both vLLM and what is ours are read here and not run: this shows that names and parameters fit.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from poorwill._contract import Found, Need
from poorwill.vllm._environment import TAGS
from poorwill.vllm._generations import ALL, OFFERED, Vllm0_20, of
from poorwill.vllm._offload import WRITING
from poorwill.vllm._versions import CONTRACT, REGISTRY, extensions, known, needs
from vllm_sources import sources_of, tags
from vllm_sources.tree import MissingError, Tree
from vllm_sources.versions import held

OURS = Tree(Path(__file__).parents[1] / "python")
ALLOCATOR_OF_OURS = ("poorwill.vllm.allocator", "Allocator")
BACKEND_OF_OURS = ("poorwill.vllm.backend", "Backend")
WORKER_OF_OURS = ("poorwill.vllm.worker", "Worker")
ALLOCATOR_OF_VLLM = ("vllm.device_allocator.cumem", "CuMemAllocator")
BACKEND_OF_VLLM = ("vllm.device_allocator.sleep_mode_backend", "SleepModeBackend")
WORKER_OF_VLLM = ("vllm.v1.worker.gpu_worker", "Worker")

# What vLLM takes from the module `cumem`. All but the class is left as it is.
FROM_CUMEM = {"CuMemAllocator", "cumem_available"}

# What stands for waking a scheduler alone, and reaches no allocator.
NO_MEMORY = {"scheduling"}


@pytest.fixture(scope="module", params=held())
def version(request: pytest.FixtureRequest) -> str:
    """One after the other, with all of its tests."""
    return str(request.param)


@pytest.fixture(scope="module")
def tree(version: str) -> Iterator[Tree]:
    yield Tree(sources_of(version))
    Tree.forget()


@pytest.fixture(scope="module")
def found(tree: Tree) -> list[tuple[str | None, str]]:
    """Its tags, each with its place."""
    return list(tags.collect(tree))


def test_the_sources_are_those_of_the_version(tree: Tree, version: str) -> None:
    metadata = tree.root / f"vllm-{version}.dist-info" / "METADATA"
    assert f"\nVersion: {version}\n" in metadata.read_text(encoding="utf-8")


# The contract.


def problem(tree: Tree, need: Need) -> str | None:
    try:
        return need.problem(tree.found(need))
    except MissingError as missing:
        return str(missing)


def test_all_that_a_hook_needs_is_there(tree: Tree, version: str) -> None:
    # Without extension points, all of it is needed.
    wrong = {need.name: said for need in needs(version) if (said := problem(tree, need))}
    assert not wrong


def test_no_release_has_an_extension_point_that_is_only_offered(tree: Tree) -> None:
    assert not extensions(tree.found) & OFFERED


def test_what_a_version_is_said_not_to_have_it_has_not(tree: Tree, version: str) -> None:
    concerned = needs(version)
    absent = [need for need in CONTRACT if need not in concerned]
    there = [need.name for need in absent if problem(tree, need) is None]
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


# The tags.


def test_there_is_a_policy_for_every_tag(found: list[tuple[str | None, str]], version: str) -> None:
    assert [(tag, where) for tag, where in found if tag not in TAGS | NO_MEMORY] == []
    names = {tag for tag, _ in found}
    assert names >= {"weights", "kv_cache", "default"}
    later = {"runtime", "workspace", "cudagraph"}
    assert names & later == (later if of(version).has_state_pool else set())


def test_where_pools_for_state_are_is_known_by_a_name(
    found: list[tuple[str | None, str]], version: str
) -> None:
    """Our worker separates by itself what the others have in one pool."""
    opening = {place.partition(":")[0] for tag, place in found if tag == "runtime"}
    for module, has_pool in {
        "vllm.v1.worker.gpu_worker": of(version).has_state_pool,
        "vllm.v1.worker.lora_model_runner_mixin": of(version).has_adapter_pool,
    }.items():
        assert (f"{module.replace('.', '/')}.py" in opening) == has_pool, module


def test_a_planted_tag_is_found(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(
        textwrap.dedent(
            """
            class CuMemAllocator:
                default_tag: str = "mine"

            def load(self, level, reported):
                self.use_memory_pool("one")
                self._maybe_get_memory_pool_context(tag="two" if level else reported)
                self.use_memory_pool(reported)
                self.use_memory_pool(tag=f"of {level}")
                self.use_memory_pool(reported[level])
                self.sleep(offload_tags=("three",) if level == 1 else ())
                if "four" in reported.tags:
                    self.tags |= {"five"}
            """
        )
    )
    assert {tag for tag, _ in tags.collect(Tree(tmp_path))} == {
        *("mine", "one", "two", "three", "four", "five"),
        *("of ", None),
    }


# What stands in the place of vLLM's.


def replacing(ours: Found, theirs: Found) -> str | None:
    """A call that theirs accepts and ours does not.

    With all or only the required arguments, by position or by name.
    """
    if (ours.kind, ours.is_async) != (theirs.kind, theirs.is_async):
        return f"is a {ours.kind}, and theirs a {theirs.kind}" if ours.kind != theirs.kind else "waits or not"
    places = [p for p in theirs.parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = [p for p in theirs.parameters if p.kind is p.KEYWORD_ONLY]
    starred = [p.kind for p in theirs.parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if missing := set(starred) - {p.kind for p in ours.parameters}:
        return f"does not take {missing}"
    signature = inspect.Signature(ours.parameters)
    try:
        bound = signature.bind(*(p.name for p in places), **{p.name: p.name for p in named})
        signature.bind(**{p.name: p.name for p in (*places, *named)})
        signature.bind(**{p.name: p.name for p in (*places, *named) if p.default is p.empty})
    except TypeError as error:
        return str(error)
    misplaced = [name for name, given in bound.arguments.items() if isinstance(given, str) and given != name]
    return f"does not take {misplaced} in their places" if misplaced else None


def replacements(version: str) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Ours that have nothing of vLLM's, and vLLM's."""
    allocator = (ALLOCATOR_OF_OURS, ALLOCATOR_OF_VLLM)
    return [allocator, (BACKEND_OF_OURS, BACKEND_OF_VLLM)] if known(version) >= REGISTRY else [allocator]


def test_ours_have_all_that_vllms_have(tree: Tree, version: str) -> None:
    """So that a caller of ours can pass what vLLM's takes, and no default of vLLM's is left out."""
    for place, original in replacements(version):
        theirs = {name for name in tree.definition(*original).methods() if not name.startswith("_")}
        assert theirs <= OURS.definition(*place).fields(), place


def test_of_an_allocators_own_state_nothing_is_used(tree: Tree) -> None:
    """But for what ours has, too; and of its module nothing but the class and whether it can be had."""
    theirs = tree.definition(*ALLOCATOR_OF_VLLM)
    state = {name for name in theirs.fields() if not name.startswith("_")} - set(theirs.methods())
    state -= OURS.definition(*ALLOCATOR_OF_OURS).fields()
    assert "allocator_and_pools" in state
    used = []
    for path, module in tree.mentioning(*tags.ALLOCATING, "cumem"):
        for node in ast.walk(module) if "device_allocator" not in path else ():
            if isinstance(node, ast.Attribute) and node.attr in state:
                used.append(f"{path}:{node.lineno}: {node.attr}")
            elif isinstance(node, ast.ImportFrom) and node.module == ALLOCATOR_OF_VLLM[0]:
                used += [alias.name for alias in node.names if alias.name not in FROM_CUMEM]
    assert used == []


def test_ours_take_all_that_vllms_take(tree: Tree, version: str) -> None:
    """Every method of ours by the name of one of theirs, called or not."""
    problems = []
    for place, original in (*replacements(version), (WORKER_OF_OURS, WORKER_OF_VLLM)):
        theirs = tree.definition(*original)
        for name, method in OURS.definition(*place).methods().items():
            try:
                their = theirs.member(name).found()
            except MissingError:
                continue
            if name != "__init__" and (said := replacing(method.found(), their)):
                problems.append(f"{place[1]}.{name} {said}")
    assert not problems


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        ("def f(self, tags=None): ...", "def f(self, tags): ...", None),
        ("def f(self, *args, **kwargs): ...", "def f(self, a, *, b): ...", None),
        ("def f(self, tags): ...", "def f(self, tags=None): ...", "missing a required argument: 'tags'"),
        ("def f(self, tag=1): ...", "def f(self, tags): ...", "unexpected keyword argument 'tags'"),
        ("def f(self, tags, level): ...", "def f(self, tags): ...", "missing a required argument: 'level'"),
        ("def f(self, b, a): ...", "def f(self, a, b): ...", "does not take ['b', 'a'] in their places"),
        ("def f(self, *, b=1): ...", "def f(self, *args, b=1): ...", "VAR_POSITIONAL"),
        ("async def f(self): ...", "def f(self): ...", "waits or not"),
        ("def f(self): ...", "@classmethod\n    def f(cls): ...", "is a method, and theirs a classmethod"),
    ],
)
def test_what_cannot_fake_is_found(tmp_path: Path, ours: str, theirs: str, says: str | None) -> None:
    (tmp_path / "two.py").write_text(f"class Ours:\n    {ours}\nclass Theirs:\n    {theirs}\n")
    both = Tree(tmp_path)
    said = replacing(*(both.definition("two", f"{name}.f").found() for name in ("Ours", "Theirs")))
    assert (said is None) if says is None else (said is not None and says in said)


# What our worker knows of vLLM's by other means than the contract.


def test_what_a_failed_sleep_says_is_as_our_worker_knows_it(tree: Tree) -> None:
    """The sentence of one assertion."""
    source = (tree.root / "vllm/v1/worker/gpu_worker.py").read_text(encoding="utf-8")
    assert source.count('assert freed_bytes >= 0, "Memory usage increased after sleeping."') == 1
    ours = (OURS.root / "poorwill/vllm/worker.py").read_text(encoding="utf-8")
    assert '_LESS_FREE = "Memory usage increased after sleeping."' in ours


def test_what_a_profile_beside_others_says_is_as_our_worker_knows_it(tree: Tree) -> None:
    source = (tree.root / "vllm/v1/worker/gpu_worker.py").read_text(encoding="utf-8")
    assert source.count('"Error in memory profiling. "') == 1
    ours = (OURS.root / "poorwill/vllm/worker.py").read_text(encoding="utf-8")
    assert '_MORE_FREE = "Error in memory profiling."' in ours


def test_free_memory_is_read_as_a_start_corrects_it(tree: Tree) -> None:
    """By snapshots, or by one of the two functions that `_starts.measured` replaces."""
    worker = tree.root / "vllm/v1/worker"
    found: set[str] = set()
    for path in (worker / "gpu_worker.py", worker / "gpu_model_runner.py", *worker.glob("gpu/**/*.py")):
        source = path.read_text(encoding="utf-8")
        found |= set(re.findall(r"[\w.]*(?:mem_get_info|get_memory_info)\b", re.sub(r"#.*", "", source)))
    assert found
    assert found <= {"torch.cuda.mem_get_info", "torch.accelerator.get_memory_info"}


def test_what_our_worker_looks_for_by_name_is_listed() -> None:
    """So that a version in which it has another name is noticed, and none does without it unseen."""
    listed = {need.qualname for need in CONTRACT}
    worker = {name for each in ALL for name in (*each.touching, *each.saved)} | set(WRITING)
    assert {f"Worker.{name}" for name in worker} <= listed
    runner = type("GPUModelRunner", (), {"_allocate_kv_cache_tensors": 0, "allocate_uniform_kv_caches": 0})
    assert {f"GPUModelRunner.{name}" for _, name in Vllm0_20().cache_makers(runner)} <= listed
