"""What becomes of arenas, blocks, claims and buffers when a process forks, and when it ends."""

from pathlib import Path
from textwrap import indent

import pytest
from checkpoint_files import write
from helpers import MIB, run

FORKED = """
import gc, os, sys
import numpy
SETUP
child = os.fork()
if child == 0:
    for number, use in enumerate([USES]):
        try:
            use()
        except poorwill.PoorwillError as error:
            assert f"belongs to process {os.getppid()}" in str(error), error
        else:
            raise AssertionError(number)
IN_CHILD
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(IN_PARENT)
"""

# What the parent has, what is tried in the child, how that goes on, and what the parent finds afterwards.
FORKS = {
    "arenas": (
        """
arena, named = poorwill.arena("host:64MiB"), poorwill.arena("host:64MiB", "named")
block = arena.empty(1 << 20)
preparation = arena.prepare_sleep()
""",
        "lambda: arena.limit_bytes, arena.sleep, arena.wake, arena.stats, arena.close, lambda: arena.budget, "
        "lambda: preparation.is_ended, preparation.wait, preparation.cancel",
        """
assert arena.name == "default" and "another process" in repr(preparation)
own = poorwill.arena("host:32MiB")
assert own != arena and own == poorwill.arena("host:32MiB") and own.stats().live_bytes == 0
""",
        ("(preparation.wait(), named.close(), arena.sleep().tags)[-1]", "['weights']"),
    ),
    "holds": (
        """
arena = poorwill.arena("host:64MiB")
block = arena.empty(1 << 20)
hold, other = arena.hold("weights", "NIXL"), arena.hold("weights", "UCX")
""",
        "hold.end, hold.__enter__, arena.held, lambda: arena.hold('weights', 'mine')",
        """
assert "another process" in repr(hold)
del hold, other
gc.collect()
own = poorwill.arena("host:32MiB")
mine = own.empty(1 << 20)
with own.hold("weights", "mine"):
    assert own.held()["weights"]["holders"] == ["mine"]
own.sleep()
""",
        ("arena.held()['weights']['holders']", "['NIXL', 'UCX']"),
    ),
    "blocks": (
        """
arena = poorwill.arena("host:64MiB")
block, other = arena.empty(1 << 20), arena.empty(1 << 20)
array, capsule = numpy.from_dlpack(other), block.__dlpack__()
array[:] = 5
""",
        "block.free, block.__dlpack__, lambda: arena.empty(1)",
        """
assert "another process" in repr(block) and "another process" in repr(arena)
del block, other, array, capsule
gc.collect()
own = poorwill.arena("host:32MiB")
mine = numpy.from_dlpack(own.empty(1 << 20))
mine[:] = 3
own.sleep()
own.wake()
assert (mine == 3).all()
""",
        ("(array == 5).all(), arena.stats().live_bytes >> 20", "True 2"),
    ),
    "claims": (
        """
budget = poorwill.budget("host:64MiB")
held, watched = budget.claim("weights", "16MiB"), budget.claim("cudagraph", "2MiB")
watched.__enter__()
""",
        'lambda: budget.claim("kv_cache", 1), budget.claims, lambda: budget.unclaimed_bytes, held.release, '
        "lambda: held.resize(1), held.__enter__, lambda: held.bytes, lambda: watched.peak_bytes",
        """
assert (budget.budget_bytes, held.name) == (64 << 20, "weights")
assert "another process" in repr(budget) and "another process" in repr(held)
del held
gc.collect()
with poorwill.budget("host:64MiB").claim("weights", 5) as own:
    assert own.bytes == 5
""",
        ("budget.unclaimed_bytes >> 20", "46"),
    ),
    "buffers": (
        """
from poorwill.offload import HostBuffer
buffer = HostBuffer(1 << 20, device="host:64MiB")
view = buffer.device_view()
""",
        "buffer.device_view, buffer.__dlpack__, view.__dlpack__, buffer.free",
        "del buffer, view",
        ("view.nbytes >> 20", "1"),
    ),
    "checkpoints": (
        """pieces, _ = _native.load_checkpoint(["x.safetensors"], ["U8"], device="host:64MiB")""",
        "lambda: numpy.from_dlpack(pieces[0])",
        "del pieces",
        ("numpy.from_dlpack(pieces[0]).size", "1000"),
    ),
}


@pytest.mark.parametrize("what", FORKS)
def test_a_forked_child_has_nothing_and_opens_its_own(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a process of its own, so that no thread of the test runner is there when it forks.
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x.safetensors", [("a", "U8", (1000,))])
    setup, uses, in_child, (in_parent, said) = FORKS[what]
    script = FORKED.replace("SETUP", setup).replace("USES", uses).replace("IN_PARENT", in_parent)
    assert run(script.replace("IN_CHILD", indent(in_child, "    "))) == f"{said}\n"


ENDS = {
    "": "",
    "closed": "arena.close()",
    "preparing": "arena.prepare_sleep()",
    "exit": "raise SystemExit",
    "a block": "del arena, array, capsule",
    "an array": "del arena, block, capsule",
    "an arena": "del block, array, capsule",
    "a claim": 'claim = poorwill.budget("host:512MiB").claim("cudagraph", "2MiB").__enter__()',
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_without_output(end: str) -> None:
    script = f"""
import threading
import numpy
arena = poorwill.arena("host:512MiB")
block = arena.empty({128 * MIB})
array, capsule = numpy.from_dlpack(block), block.__dlpack__()
array[:] = 1
preparation = arena.prepare_sleep()
def forever():
    while True:
        try:
            arena.stats()
        except (poorwill.ClosedError, NameError):
            pass
threading.Thread(target=forever, daemon=True).start()
print("end")
{ENDS[end]}
"""
    assert run(script) == "end\n"
