"""Pools over the fakes of PyTorch and NVIDIA's library: all that an allocation passes, without a GPU."""

import pytest
from helpers import Script, cases, run, scripts

PREAMBLE = """
import gc, random, sys, threading
import fake_torch
world = fake_torch.install(fake_torch.Driver(), **DIFFERENCES)
import torch
import poorwill, poorwill.torch
from torch_loads import MIB, dense, experts, moe, take

def used():
    return whole - torch.cuda.mem_get_info()[0]

whole = torch.cuda.mem_get_info()[0]
"""


def over_fakes(
    script: str,
    environment: dict[str, str],
    *,
    peace: str = "assert world.terminations == []",
    **differences: bool,
) -> str:
    """Runs a script over a PyTorch that differs from 2.11 in these ways (`DeviceAllocator`)."""
    program = f"DIFFERENCES = {differences}\n{PREAMBLE}\n{script}\n{peace}\n"
    return run(program, "-X", "dev", **environment)


# The operation that takes the most, and what may lie beside what lived before it.
LARGEST_MIB = {"moe": 2000, "dense": 530, "experts": 768}


@pytest.mark.parametrize("watch", ["operations", "segments"])
@pytest.mark.parametrize("load", ["moe", "dense", pytest.param("experts", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "conf", ["", "max_split_size_mb:20", pytest.param("max_split_size_mb:200", marks=pytest.mark.long)]
)
def test_a_load_maps_what_lives(environment: dict[str, str], load: str, conf: str, watch: str) -> None:
    script = f"""
with poorwill.torch.Pool(poorwill.arena(), "weights", watch="{watch}"):
    # cuBLAS's workspaces stay.
    torch.cuda.current_blas_handle()
whole = torch.cuda.mem_get_info()[0]
low = whole
def take_and_look(*given, take=take):
    global low
    tensor = take(*given)
    low = min(low, torch.cuda.mem_get_info()[0])
    return tensor
import torch_loads
torch_loads.take = take_and_look
beside = {LARGEST_MIB[load] if watch == "segments" else 0} * MIB
for seed in range({len(cases(2))}):
    low = torch.cuda.mem_get_info()[0]
    with poorwill.torch.Pool(poorwill.arena(), "weights", watch="{watch}"):
        kept, peak_live = {load}(torch, random.Random(seed))
    assert whole - low <= 1.05 * peak_live + beside, (whole - low, peak_live)
    live = sum(tensor.nbytes for tensor in kept)
    print((whole - torch.cuda.mem_get_info()[0]) / live, (whole - low) / peak_live)
    del kept
    poorwill.trim()
    assert used() == 0, used()
"""
    said = over_fakes(script, {**environment, "PYTORCH_ALLOC_CONF": conf})
    print(said)
    held = [float(line.split()[0]) for line in said.splitlines()]
    assert max(held) <= 1.02, held


def test_threads_retire_their_own_generations_only(environment: dict[str, str]) -> None:
    script = """
from poorwill.torch import _gpu
from torch_loads import blocks
counts = {"carve": 0, "retire": 0}
def counted(name):
    function = getattr(_gpu.Gpu, name)
    def count(*given):
        counts[name] += 1
        return function(*given)
    setattr(_gpu.Gpu, name, count)
with poorwill.pool():
    torch.cuda.current_blas_handle()
whole = torch.cuda.mem_get_info()[0]
counted("carve")
counted("retire")
kept, begin = [], threading.Barrier(4)
def work(seed):
    begin.wait()
    with poorwill.pool():
        kept.extend(blocks(torch, random.Random(seed), 300, frees=False))
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(kept) == 1200
print(used() / sum(tensor.nbytes for tensor in kept), counts["retire"], counts["carve"])
del kept
poorwill.trim()
assert used() == 0, used()
"""
    said = over_fakes(script, {**environment, "POORWILL_FAKE_CUDA_DEVICES": "64GiB"})
    held, retired, carved = map(float, said.split())
    assert held <= 1.02
    # One each at the end, and those that cached 32 MiB: PyTorch's segments of 20 MiB have some MiB left each.
    assert retired <= 24
    assert carved <= 24


def test_segments_that_pytorch_cuts_are_carved(environment: dict[str, str]) -> None:
    script = """
from torch_loads import blocks
with poorwill.torch.Pool(poorwill.arena(), "weights", watch="segments"):
    torch.cuda.current_blas_handle()
whole = torch.cuda.mem_get_info()[0]
with poorwill.torch.Pool(poorwill.arena(), "weights", watch="segments"):
    kept = blocks(torch, random.Random(0), 1200, frees=True)
print(used() / sum(tensor.nbytes for tensor in kept))
"""
    assert float(over_fakes(script, {**environment, "POORWILL_FAKE_CUDA_DEVICES": "64GiB"})) <= 1.035


@pytest.mark.parametrize("cache_limit", [None, "128MiB"])
def test_a_cache_limit_holds_beside_a_large_model(
    environment: dict[str, str], cache_limit: str | None
) -> None:
    # Without one, a sixty-fourth of what is mapped may be cached.
    script = f"""
from helpers import eventually
arena = poorwill.arena(cache_limit={cache_limit!r})
kept = []
with poorwill.torch.Pool(arena, "weights", watch="segments"):
    torch.cuda.current_blas_handle()
    before = arena.stats().mapped_bytes
    kept.extend(take(torch, 1024) for _ in range(24))
    freed = [take(torch, 25) for _ in range(12)]
    del freed
    kept.append(take(torch, 40))
    live = sum(tensor.nbytes for tensor in kept)
    if arena.cache_limit_bytes is not None:
        eventually(lambda: arena.stats().mapped_bytes - before - live <= 160 * MIB)
    print((arena.stats().mapped_bytes - before - live) // MIB)
"""
    unused_mib = int(over_fakes(script, {**environment, "POORWILL_FAKE_CUDA_DEVICES": "64GiB"}))
    assert (unused_mib > 160) == (cache_limit is None), unused_mib


# What each script is about, what it has in its environment, and the script.
SCRIPTS = """
### a copy in inference mode fits beside what lives
arena = poorwill.arena(limit=f"{256 * MIB}")
host = torch.zeros(224 * MIB, dtype=torch.uint8)
with torch.inference_mode(), arena.pool("weights"):
    tensor = take(torch, 192)
    del tensor
    tensor = host.to("cuda")
    try:
        take(torch, 64)
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("it is more than the limit")

### what may have done something is not tried again
from torch.utils._python_dispatch import TorchDispatchMode

tried = []

class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tried.append(func.name())
        return func(*args, **(kwargs or {}))

class Subclass(torch.Tensor):
    def __torch_dispatch__(self, *args): raise AssertionError

operations = torch.ops_for_tests
arena = poorwill.arena(limit=f"{256 * MIB}")
with Seen(), arena.pool("weights"):
    tensor = take(torch, 160)
    special = Subclass(tensor._library, tensor._storage, tensor.shape, tensor.dtype)
    for name, source, tries in (
        ("aten::clone", tensor, 2),
        ("others::clone", tensor, 1),
        ("aten::clone", special, 1),
    ):
        tried.clear()
        try:
            operations[name](source)
        except torch.OutOfMemoryError as error:
            notes = " ".join(getattr(error, "__notes__", map(str, error.args)))
            assert "poorwill: cannot allocate 160 MiB" in notes, notes
        else:
            raise AssertionError("it is more than the limit")
        assert tried == tries * [name], tried

### emptying makes no pool each time (POORWILL_FAKE_CUDA_DEVICES=4GiB,4GiB)
made = []
torch.cuda.MemPool.__init__ = lambda self, *given, init=torch.cuda.MemPool.__init__: (
    made.append(self), init(self, *given))[1]
other = take(torch, 8, device="cuda:1")
with poorwill.pool(tag="weights"):
    kept = take(torch, 8)
poorwill.trim()
before = len(made)
for _ in range(5):
    poorwill.trim()
assert len(made) == before, (before, len(made))

### an arena that was closed in a scope is opened again
arena = poorwill.arena(name="again")
with arena.pool("weights"):
    arena.close()
    second = poorwill.arena(name="again")
    with second.pool("weights"):
        kept = take(torch, 32)
        gone = take(torch, 64)
        del gone
assert second.stats().mapped_bytes == 32 * MIB, second.stats()
"""

# These hold whether PyTorch asks the pool that was entered first, or last.
NESTED = """
### scopes nest and threads have their own
def tagged():
    return {tag.tag: tag.live_bytes for tag in poorwill.stats().tags if tag.live_bytes}

kept = []
def work(tag):
    with poorwill.pool(tag=tag):
        kept.append(take(torch, 32))

with poorwill.pool(tag="a"):
    kept.append(take(torch, 32))
    with poorwill.pool(tag="b"):
        kept.append(take(torch, 32))
        threads = [threading.Thread(target=work, args=[tag]) for tag in "cd"]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    try:
        with poorwill.pool(tag="b"):
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    kept.append(take(torch, 32))
outside = take(torch, 32)
assert tagged() == {"a": 64 * MIB, "b": 32 * MIB, "c": 32 * MIB, "d": 32 * MIB}, tagged()
kept.clear()
poorwill.trim()
torch.cuda.empty_cache()
assert (tagged(), used()) == ({}, 32 * MIB), (tagged(), used())

### a capture that begins in place keeps out of the scope
graph = torch.cuda.CUDAGraph()
with poorwill.pool(tag="weights"):
    tensor, other = take(torch, 4), take(torch, 4)
    live = poorwill.stats().live_bytes
    with torch.cuda.graph(graph, pool=poorwill.graph_pool()):
        # Needs memory for a while.
        torch.ops_for_tests["aten::clone.out"](tensor, out=other)
    tags = {tag.tag: tag.live_bytes for tag in poorwill.stats().tags}
assert tags["cudagraph"] > 0, tags
"""


@pytest.mark.parametrize("script", scripts(SCRIPTS))
def test_pools(environment: dict[str, str], script: Script) -> None:
    over_fakes(script.text, {**environment, **script.settings})


@pytest.mark.parametrize("first_wins", [False, True])
@pytest.mark.parametrize("script", scripts(NESTED))
def test_pools_in_any_order(environment: dict[str, str], script: Script, first_wins: bool) -> None:
    over_fakes(script.text, environment, first_wins=first_wins)


# Where there is something in the default pool's cache, and what is said of it.
EMPTYING = """
import logging
from types import SimpleNamespace

said = []
log = logging.getLogger("poorwill.torch")
log.addHandler(SimpleNamespace(level=0, handle=lambda record: said.append(record.getMessage())))

def load():
    with poorwill.pool(tag="weights"):
        kept = [take(torch, 40) for _ in range(4)]
        del kept[:2]
        kept.append(take(torch, 40))
    return kept

def served():
    # Four segments that are free, and one that is not.
    tensors = [take(torch, 50) for _ in range(4)]
    return take(torch, 60)

def calls():
    stats = torch.cuda.memory_stats()
    return stats["num_device_alloc"], stats["num_device_free"]
"""


def test_what_emptying_takes_from_the_default_pool_is_logged_once(environment: dict[str, str]) -> None:
    script = f"""{EMPTYING}
live = served()
first = load()
assert len(said) == 1 and "200 MiB in 4 segments" in said[0], said
lives = {{segment["address"] for segment in torch.cuda.memory_snapshot()}}
assert live.data_ptr() in lives, lives
del live
# A second time there is as much to take, and nothing to tell.
live = served()
before = calls()[1]
second = load()
assert calls()[1] - before >= 4, (calls(), before)
assert len(said) == 1, said
"""
    over_fakes(script, environment, empties_default=True)


def test_a_load_beside_an_empty_cache_takes_nothing_from_it(environment: dict[str, str]) -> None:
    script = f"""{EMPTYING}
live = take(torch, 60)
# The first scope puts PyTorch to the test, with a tensor of another pool.
before = load()
freed = []
free = world.machine.free
world.machine.free = lambda address, *given: (freed.append(address), free(address, *given))
kept = load()
assert (freed, said) == ([], []), (freed, said)
"""
    over_fakes(script, environment, empties_default=True)


def test_what_the_default_pool_caches_stays_where_pytorch_leaves_it(environment: dict[str, str]) -> None:
    script = f"""{EMPTYING}
live = served()
kept = load()
del live
before = calls()[0]
live = served()
assert calls()[0] == before, (calls(), before)
assert said == [], said
"""
    over_fakes(script, environment)


@pytest.mark.parametrize("made", ["pool", "graph_pool"])
def test_another_allocator_of_pytorchs_is_refused(environment: dict[str, str], made: str) -> None:
    script = f"""
torch.cuda.get_allocator_backend = lambda: "cudaMallocAsync"
try:
    poorwill.{made}()
except poorwill.PoorwillError as error:
    assert type(error) is poorwill.torch.UnsupportedTorchError, type(error)
    assert "cudaMallocAsync" in str(error), error
else:
    raise AssertionError("it has no pools")
"""
    over_fakes(script, environment)


PRODUCTS = {
    "a product": "torch.mm(square, square)",
    "one into a tensor": "torch.mm(square, square, out=square)",
    "one with a vector": "torch.addmm(vector, square, square)",
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_what_products_keep_is_outside_of_the_pool(environment: dict[str, str], product: str) -> None:
    script = f"""
def multiply(device):
    kind = dict(dtype=torch.float16, device=f"cuda:{{device}}")
    with torch.cuda.device(device), poorwill.pool(tag="weights", device=f"cuda:{{device}}"):
        square, vector = torch.zeros((64, 64), **kind), torch.zeros(64, **kind)
        {PRODUCTS[product]}
    del square, vector
    poorwill.arena(f"cuda:{{device}}").trim()
    left = [tag.live_bytes for tag in poorwill.arena(f"cuda:{{device}}").stats().tags]
    assert not any(left), (device, left)

# Both have a default stream, whose handles are the same.
multiply(0)
multiply(1)
"""
    over_fakes(script, {**environment, "POORWILL_FAKE_CUDA_DEVICES": "4GiB,4GiB"})


ENDS = {
    "tensors and a pool": "pool = poorwill.pool(tag='weights')\nwith pool: kept = take(torch, 32)",
    "a ring": "with poorwill.pool(tag='weights'): ring = [take(torch, 32)]\nring.append(ring)",
    "an open scope": "pool = poorwill.pool(tag='weights')\npool.__enter__()\nkept = take(torch, 32)",
    "a graph": "pool = poorwill.graph_pool(); graph = torch.cuda.CUDAGraph()\n"
    "with torch.cuda.graph(graph, pool=pool): kept = take(torch, 32)",
    "asleep": "with poorwill.pool(tag='weights'): kept = take(torch, 32)\npoorwill.sleep()",
    "a thread": "def work():\n    with poorwill.pool(tag='weights'):\n        kept.append(take(torch, 32))\n"
    "kept = []\nthreading.Thread(target=work).start()",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_in_peace_with(environment: dict[str, str], end: str) -> None:
    over_fakes(ENDS[end], environment)
