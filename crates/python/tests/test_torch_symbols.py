"""The functions that PyTorch calls for segments, without PyTorch, over the fake of NVIDIA's library."""

import pytest
from helpers import run


def test_there_are_256_routes(fake: dict[str, str]) -> None:
    script = """
import poorwill
from c_symbols import MIB, Functions
from poorwill import _native
arenas = [poorwill.arena("cuda:0", name, limit="64MiB") for name in ("one", "two")]
pairs = [(arena, f"t{number}") for number in range(128) for arena in arenas]
addresses = [_native.torch_allocator(*pair) for pair in pairs]
assert len(set(addresses)) == 256
for make in (_native.torch_allocator, _native.torch_make_default):
    try:
        make(arenas[0], "one-too-many")
    except poorwill.PoorwillError as error:
        print(type(error).__name__, error)
assert [_native.torch_allocator(*pair) for pair in pairs] == addresses
last = Functions.of(*pairs[-1])
segment = last.alloc(4 * MIB)
assert [tag.tag for tag in arenas[1].stats().tags if tag.live_bytes] == ["t127"]
last.free(segment, 4 * MIB)
_native.torch_make_default(*pairs[-1])
# What was closed stays counted.
arenas[0].close()
try:
    _native.torch_allocator(poorwill.arena("cuda:0", "three"), "weights")
except poorwill.PoorwillError:
    print("full")
"""
    words = (
        "PoorwillError this process has had 256 pairs of an arena and a tag, the most there can be: use "
        "arenas and tags again instead of opening others"
    )
    assert run(script, **fake).splitlines() == [words, words, "full"]


# How a process ends that has segments.
ENDINGS = {
    "segments alive": "kept = functions.alloc(20 * MIB)",
    "carved": """
kept = functions.alloc(20 * MIB)
assert _native.torch_carve(_native.torch_moment(), [(kept, 20 * MIB, [(kept + 4 * MIB, 8 * MIB)])]) == 8 * MIB
""",
    "asleep": """
kept = functions.alloc(20 * MIB)
arena.sleep()
""",
    "closed": """
kept = functions.alloc(20 * MIB)
arena.close()
""",
    "work under way": """
kept = functions.alloc(20 * MIB, stream)
gpu.pause(stream, 200_000)
gpu.fill(0, kept, 20 * MIB, 1, stream)
functions.free(kept, 20 * MIB, stream)
""",
    "threads at work": """
import threading
def forever():
    while True:
        functions.free(functions.alloc(20 * MIB, stream), 20 * MIB, stream)
for _ in range(3):
    threading.Thread(target=forever, daemon=True).start()
""",
    "freed by Python's last objects": """
import atexit
class Tensor:
    def __init__(self):
        self.place = functions.alloc(20 * MIB, stream)
    def __del__(self, free=functions.free, stream=stream):
        free(self.place, 20 << 20, stream)
kept = [Tensor() for _ in range(4)]
kept.append(kept)
atexit.register(arena.close)
""",
}


@pytest.mark.parametrize("keeps_gil", [False, True], ids=["", "with the interpreter's lock"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_without_output(fake: dict[str, str], ending: str, keeps_gil: bool) -> None:
    script = f"""
import poorwill
from c_symbols import MIB, Functions, Gpu
from poorwill import _native
gpu = Gpu()
stream = gpu.new_stream(0)
arena = poorwill.arena("cuda:0", limit="256MiB")
functions = Functions.of(arena, "weights", keeps_gil={keeps_gil})
{ENDINGS[ending]}
print("end")
"""
    assert run(script, **fake) == "end\n"
