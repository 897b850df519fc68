"""How processes end that have pools, on a GPU: in any order, without a crash and without a word."""

import pytest
from helpers import Script, run, scripts

pytestmark = pytest.mark.gpu

BEGIN = """
import gc, os, sys, threading
import torch
import poorwill

MIB = 1 << 20
arena = poorwill.arena("cuda:0", limit="2GiB")


def filled(value, nbytes=32 * MIB):
    return torch.full((nbytes,), value, dtype=torch.uint8, device="cuda")


def captured():
    x = filled(1, MIB)
    graph, pool = torch.cuda.CUDAGraph(), poorwill.graph_pool()
    with torch.cuda.graph(graph, pool=pool):
        y = x + 1
    return x, y, graph, pool


"""

# What each process does behind the beginning above, by what is special about it.
ENDINGS = """
### tensors alive
with poorwill.pool():
    kept = filled(1)

### asleep
with poorwill.pool():
    kept = filled(1)
poorwill.sleep()

### prepared
with poorwill.pool():
    kept = filled(1, 1 << 30)
preparing = poorwill.prepare_sleep()

### graphs alive
kept = captured()
kept[2].replay()

### graphs asleep
kept = captured()
poorwill.sleep()

### pools alive
pool = poorwill.pool()
with pool:
    kept = filled(1)
cycle = [pool]
cycle.append(cycle)

### inside a scope
pool = poorwill.pool()
pool.__enter__()
kept = filled(1)

### an exception in a scope
try:
    with poorwill.pool():
        kept = filled(1)
        raise KeyError
except KeyError:
    pass

### exit in a scope
with poorwill.pool():
    kept = filled(1)
    sys.exit(0)

### arena closed first
with poorwill.pool():
    kept = filled(1)
torch.cuda.synchronize()
arena.close()

### arena closed, then freed
with poorwill.pool():
    kept = filled(1)
torch.cuda.synchronize()
arena.close()
del kept
gc.collect()
torch.cuda.empty_cache()

### a thread at work, which Python waits for
def work():
    with poorwill.pool("t"):
        for n in range(500):
            filled(n % 256, 3 * MIB)
threading.Thread(target=work).start()

### generations in a cycle
class Box: pass
box = Box()
box.box = box
with poorwill.pool():
    box.kept = filled(1)
    gone = filled(2, 256 * MIB)
    del gone
    box.more = filled(3)
del box

### a fork
with poorwill.pool():
    kept = filled(1)
pid = os.fork()
if pid == 0:
    del arena
    gc.collect()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0

### a fork that calls
with poorwill.pool():
    kept = filled(1)
pid = os.fork()
if pid == 0:
    try:
        arena.sleep()
    except poorwill.PoorwillError as error:
        os._exit(0 if "fork" in str(error) else 1)
    os._exit(2)
assert os.waitpid(pid, 0)[1] == 0
poorwill.sleep()
poorwill.wake()
assert bool((kept == 1).all())
"""


@pytest.mark.parametrize("ending", scripts(ENDINGS))
def test_a_process_ends_quietly(ending: Script) -> None:
    assert run(BEGIN + ending.text, "-W", "error") == ""


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_pools_work_with_expandable_segments_elsewhere(name: str) -> None:
    script = """
with poorwill.pool():
    kept = filled(7)
slept = poorwill.sleep()
assert slept.released_bytes >= kept.numel(), slept
poorwill.wake()
assert bool((kept == 7).all())
"""
    run(BEGIN + script, **{name: "expandable_segments:True"})
