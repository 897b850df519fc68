"""Scopes that look after requests for segments, over the fakes: when, and when they come close."""

import pytest
from helpers import Script, run, scripts
from test_torch_pools import over_fakes

# `is_close` tells whether each operation is seen; `pool` is one that would rather not.
PREAMBLE = """
import contextlib
import poorwill.torch
from poorwill.torch import _scope, _watch

def is_close():
    return any(isinstance(mode, _watch.EachOperation) for mode in fake_torch.modes_of_this_thread())

def pool(arena, tag="weights"):
    return poorwill.torch.Pool(arena, tag, watch="segments")

def limit():
    return torch.cuda.memory._snapshot()["allocator_settings"]["max_split_size"]

# A mode of other code.
from torch.utils._python_dispatch import TorchDispatchMode

class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
"""

# What each script is about, what it has in its environment, and the script.
SCRIPTS = """
### operations are not seen while there is headroom
arena = poorwill.arena(limit="4GiB")
before = limit()
with pool(arena):
    assert limit() == 32 * MIB, limit()
    kept = [take(torch, 48) for _ in range(8)]
    gone = [take(torch, 64) for _ in range(8)]
    del gone
    kept.append(take(torch, 96))
    assert not is_close()
    # What was free went when that was asked for.
    assert arena.stats().live_bytes == 480 * MIB, arena.stats()
assert limit() == before, (limit(), before)
assert arena.stats().mapped_bytes == 480 * MIB, arena.stats()

### a lower split limit stays (PYTORCH_ALLOC_CONF=max_split_size_mb:20)
with pool(poorwill.arena()):
    assert limit() == 20 * MIB, limit()
assert limit() == 20 * MIB, limit()

### a lower split limit that ends first leaves the own
before = limit()
others = poorwill.torch.allocator_settings(max_split_size_mb=20)
others.__enter__()
with pool(poorwill.arena()):
    others.__exit__(None, None, None)
    assert 0 < limit() <= 32 * MIB, limit()
assert limit() == before, (limit(), before)

### each operation is seen once headroom is short
arena = poorwill.arena(limit="4GiB")
with pool(arena):
    kept = take(torch, 2048)
    assert not is_close()
    large = take(torch, 1024)
    assert is_close()
    del large
    # That fits only beside what lives.
    large = take(torch, 1984)
    del large
    # And that is tried a second time.
    other = take(torch, 1024)
    again = take(torch, 1000)
assert not is_close()

### headroom on the device counts (POORWILL_FAKE_CUDA_DEVICES=8GiB)
arena = poorwill.arena(limit="7GiB")
others = take(torch, 4500)
with pool(arena):
    assert not is_close()
    kept = take(torch, 2200)
    assert is_close()

### other threads see each operation
seen = []
def work():
    with pool(poorwill.arena()):
        seen.append(is_close())
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert seen == [True], seen

### a mode that is left later is not in the way
arena = poorwill.arena(limit="4GiB")
for own in (False, True):
    with pool(arena):
        with _watch.undisturbed():
            kept = take(torch, 3072)
        with Plain():
            if own:
                # Whose operation that is, the mode itself is not there.
                more = take(torch, 320)
            else:
                _scope._look_afterwards()
            assert is_close() is own
        more = take(torch, 320)
        assert is_close()
    assert fake_torch.modes_of_this_thread() == []
    del kept, more

### products on the streams of the scope keep nothing there
arena = poorwill.arena()
kind = dict(dtype=torch.float16, device="cuda")
with pool(arena):
    square = torch.zeros((64, 64), **kind)
    with torch.cuda.stream(torch.cuda.Stream()):
        other = torch.zeros((64, 64), **kind)
        assert is_close()
        torch.mm(other, other)
    torch.mm(square, square)
del square, other
torch.cuda.synchronize()
arena.trim()
assert arena.stats().live_bytes == 0, arena.stats()

### scopes within each other come close by themselves
roomy, tight = poorwill.arena(limit="4GiB"), poorwill.arena("cuda:0", "tight", limit="512MiB")
with pool(roomy):
    kept = [take(torch, 64)]
    with pool(tight, "more"):
        assert is_close()
        kept.append(take(torch, 64))
    assert not is_close()
    gone = take(torch, 512)
    del gone
    kept.append(take(torch, 544))
    assert roomy.stats().live_bytes == 608 * MIB, roomy.stats()
assert [arena.stats().live_bytes for arena in (roomy, tight)] == [608 * MIB, 64 * MIB]

### scopes of several gpus do not look while another does (POORWILL_FAKE_CUDA_DEVICES=16GiB,16GiB)
# Each takes the other's lock, to shield what is cached there.
from poorwill.torch import _gpu

class Lock:
    def __init__(self):
        self._lock = threading.Lock()

    def __enter__(self):
        assert self._lock.acquire(timeout=600), "this thread holds it"
        # As Python does between two instructions, when another thread was given a segment.
        _scope._afterwards._look_undisturbed()

    def __exit__(self, *_):
        self._lock.release()

first, second = poorwill.arena("cuda:0"), poorwill.arena("cuda:1")
with pool(second):
    kept = [take(torch, 64, "cuda:1")]
    with poorwill.torch.Pool(first, "weights"):
        kept.append(take(torch, 64))
        with _watch.undisturbed():
            gone = [take(torch, 64, "cuda:1"), take(torch, 64)]
            del gone
        for gpu in _gpu._gpus.values():
            gpu._lock = Lock()
        kept.append(take(torch, 96))
assert first.stats().mapped_bytes == 160 * MIB, first.stats()

### a failed load says what the arena said
arena = poorwill.arena(limit="4GiB")
try:
    with pool(arena):
        take(torch, 5000)
except torch.OutOfMemoryError as error:
    notes = " ".join(getattr(error, "__notes__", map(str, error.args)))
    assert "poorwill: cannot allocate 4.88 GiB for `weights`" in notes, notes
else:
    raise AssertionError("it is more than the limit")
assert arena.stats().mapped_bytes == 0, arena.stats()

### a capture in the scope has its own memory
arena = poorwill.arena()
graph = torch.cuda.CUDAGraph()
with pool(arena):
    tensor, other = take(torch, 64), take(torch, 64)
    gone = take(torch, 128)
    del gone
    with torch.cuda.graph(graph, pool=arena.graph_pool()):
        torch.ops_for_tests["aten::clone.out"](tensor, out=other)
        with pool(arena, "more"):
            assert is_close()
    more = take(torch, 256)
tags = {tag.tag: tag.live_bytes for tag in arena.stats().tags}
assert tags["weights"] == 384 * MIB and tags["cudagraph"] > 0, tags

### a pool that is left behind the capture has its own memory
arena = poorwill.arena()
graph = torch.cuda.CUDAGraph()

def live():
    return {tag.tag: tag.live_bytes // MIB for tag in arena.stats().tags}

with pool(arena):
    kept = [take(torch, 64), take(torch, 64)]
    with contextlib.ExitStack() as inner:
        with torch.cuda.graph(graph, pool=arena.graph_pool()):
            torch.ops_for_tests["aten::clone.out"](kept[0], out=kept[1])
            inner.enter_context(pool(arena, "more"))
            torch.ops_for_tests["aten::clone.out"](kept[0], out=kept[1])
        of_graph = live()["cudagraph"]
        kept.append(take(torch, 96))
        assert live() == {"weights": 128, "more": 96, "cudagraph": of_graph}, live()
    kept.append(take(torch, 32))
    assert live() == {"weights": 160, "more": 96, "cudagraph": of_graph}, live()
assert fake_torch.modes_of_this_thread() == []

### an interruption loses nothing
arena = poorwill.arena()
plain = _scope.Scope._take_back_growth
def interrupted(self, step_bytes):
    self.pause()
    raise KeyboardInterrupt
_scope.Scope._take_back_growth = interrupted
with pool(arena):
    try:
        kept = take(torch, 64)
        while True:
            pass
    except KeyboardInterrupt:
        _scope.Scope._take_back_growth = plain
    before = arena.stats().live_bytes
    kept = take(torch, 96)
    assert arena.stats().live_bytes == before + 96 * MIB, arena.stats()

### a beginning that is interrupted leaves nothing
arena = poorwill.arena()
before = limit()
plain = _watch.Afterwards.begin

def interrupted(self, scope):
    plain(self, scope)
    raise KeyboardInterrupt

with pool(arena, "outer"):
    _watch.Afterwards.begin = interrupted
    try:
        with pool(arena):
            pass
    except KeyboardInterrupt:
        _watch.Afterwards.begin = plain
    kept = take(torch, 64)
assert not _scope._afterwards._scopes and limit() == before
tags = {tag.tag: tag.live_bytes for tag in arena.stats().tags}
assert tags["outer"] == 64 * MIB, tags

### the scope of a closed arena interrupts nobody
arena, other = poorwill.arena(), poorwill.arena("cuda:0", "other", limit="4GiB")

def work():
    with pool(other):
        take(torch, 64)

with pool(arena):
    arena.close()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    # Whichever instruction comes next.
    _scope._afterwards._look_undisturbed()

### nothing looks in a fork
import os
with pool(poorwill.arena()):
    kept = take(torch, 64)
    child = os.fork()
    if child == 0:
        try:
            # What another thread of the parent has asked for.
            _scope._afterwards._look_undisturbed()
        except BaseException as error:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not is_close() and _scope._afterwards._scopes

### a pytorch that counts no modes is watched closely
del torch._C._len_torch_dispatch_stack
with pool(poorwill.arena()):
    assert is_close()

### headroom is checked where less is mapped as well (POORWILL_FAKE_CUDA_DEVICES=8GiB)
arena = poorwill.arena(limit="7GiB")
others = []
with pool(arena):
    gone = [take(torch, 1024), take(torch, 1024)]
    del gone
    arena.trim()
    thread = threading.Thread(target=lambda: others.append(take(torch, 6800)))
    thread.start()
    thread.join()
    assert not is_close()
    kept = take(torch, 512)
    assert is_close()

### other ways to watch are none
try:
    poorwill.torch.Pool(poorwill.arena(), "weights", watch="nothing")
except ValueError as error:
    assert "nothing" in str(error) and '"segments"' in str(error), error
else:
    raise AssertionError

### nothing is asked of python when it has ended
# Though a scope was never left.
import atexit
from poorwill import _native

reported = []
tell = _native.torch_call_afterwards
_native.torch_call_afterwards = lambda look: (reported.append(look is not None), tell(look))
left_open = pool(poorwill.arena())
left_open.__enter__()
assert reported == [True], reported
atexit._run_exitfuncs()
assert reported == [True, False], reported
"""


@pytest.mark.parametrize("script", scripts(SCRIPTS))
def test_scopes_that_look_after_requests(environment: dict[str, str], script: Script) -> None:
    over_fakes(PREAMBLE + script.text, {**environment, **script.settings})


def test_a_pytorch_that_asks_the_first_pool_is_watched_closely(environment: dict[str, str]) -> None:
    script = """
with pool(poorwill.arena()):
    assert is_close()
"""
    over_fakes(PREAMBLE + script, environment, first_wins=True)


@pytest.mark.parametrize("mode", ["Plain", "contextlib.nullcontext"])
def test_a_pool_within_a_capture_adds_nothing_to_the_graph(environment: dict[str, str], mode: str) -> None:
    # Within a mode that is left later, the scope around it all cannot see operations.
    script = """
arena = poorwill.arena()
graph = torch.cuda.CUDAGraph()
with pool(arena), MODE():
    tensor, other = take(torch, 64), take(torch, 64)
    with torch.cuda.graph(graph, pool=arena.graph_pool()):
        torch.ops_for_tests["aten::clone.out"](tensor, out=other)
        size = len(graph._work)
        with pool(arena, "more"):
            pass
        assert len(graph._work) == size, (len(graph._work), size)
    before = arena.stats().live_bytes
    more = take(torch, 256)
    assert arena.stats().live_bytes == before + 256 * MIB, arena.stats()
assert fake_torch.modes_of_this_thread() == []
"""
    over_fakes(PREAMBLE + script.replace("MODE", mode), environment)


@pytest.mark.parametrize("watch", ["operations", "segments"])
def test_large_segments_come_in_large_pieces(environment: dict[str, str], watch: str) -> None:
    # Of 32 MiB there would be 192.
    script = """
arena = poorwill.arena(limit="16GiB")
with poorwill.torch.Pool(arena, "weights", watch=WATCH):
    kept = take(torch, 6144)
"""
    few = {**environment, "POORWILL_FAKE_CUDA_FAIL": "cuMemCreate:100:1000000"}
    over_fakes(PREAMBLE + f"WATCH = {watch!r}" + script, few)


NATIVE = """
import threading
import poorwill
from c_symbols import MIB, Functions
from poorwill import _native

arena = poorwill.arena("cuda:0")
functions = Functions.of(arena, "weights")
calls = []

def look():
    assert threading.current_thread() is threading.main_thread()
    calls.append(len(calls))

def settle():
    for _ in range(1000):
        pass
"""


# What each script is about, and the script.
NATIVELY = """
### a call comes between two instructions
# One call for what was asked for since the last, none afterwards.
_native.torch_call_afterwards(look)
functions.alloc(4 * MIB)
settle()
assert calls == [0], calls
thread = threading.Thread(target=lambda: [functions.alloc(4 * MIB) for _ in range(40)])
thread.start()
thread.join()
settle()
assert 2 <= len(calls) <= 41, calls

def fail():
    raise ZeroDivisionError("looked")

_native.torch_call_afterwards(fail)
try:
    functions.alloc(4 * MIB)
    settle()
except ZeroDivisionError as error:
    assert str(error) == "looked"
else:
    raise AssertionError("it was not called")

before = len(calls)
_native.torch_call_afterwards(None)
functions.alloc(4 * MIB)
settle()
assert len(calls) == before, calls

### what is called is let go of when the call is over
import weakref

class Look:
    def __call__(self):
        _native.torch_call_afterwards(None)

look = Look()
there = weakref.ref(look)
_native.torch_call_afterwards(look)
del look
functions.alloc(4 * MIB)
settle()
assert there() is None

### nothing is called in a forked child
import os
import signal
import time
import warnings

signal.signal(signal.SIGUSR1, lambda *_: None)
warnings.simplefilter("ignore", DeprecationWarning)
_native.torch_call_afterwards(look)
ends = []

def fork():
    # The main thread waits, and cannot make the call that is left now.
    time.sleep(0.1)
    functions.alloc(4 * MIB)
    child = os.fork()
    if child == 0:
        before = len(calls)
        # Some Pythons look at what is left only then.
        signal.raise_signal(signal.SIGUSR1)
        settle()
        os._exit(len(calls) - before)
    ends.append(os.waitpid(child, 0)[1])

thread = threading.Thread(target=fork)
thread.start()
thread.join()
assert ends == [0], ends
settle()
assert calls == [0], calls
"""


@pytest.mark.parametrize("script", scripts(NATIVELY))
def test_the_native_half_alone(environment: dict[str, str], script: Script) -> None:
    run(NATIVE + script.text, "-X", "dev", **environment)
