"""Arenas that lend what sleeps, at a broker in a process of its own, on a device that processes share."""

import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import poorwill
import pytest
from helpers import MIB, assert_restored, eventually, filled, run
from lent_places import end_broker
from poorwill import _environment, _native

SIZE = 16 * MIB
DEVICE_BYTES = 64 * MIB
# A granule stays free beside what is lent.
WHOLE_BYTES = DEVICE_BYTES + 2 * MIB


class Place:
    """A folder with the socket of a broker, and a device of all processes that know the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = str(folder / "broker.sock")
        (folder / "device").mkdir()
        self.device = f"host:{WHOLE_BYTES}@{folder / 'device'}"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-B", "-m", "poorwill", "broker", "--socket", self.socket]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"serving at {self.socket}\n"

    def end(self, by: int = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(by)
            self._process.communicate()
            self._process = None

    def arena(self, lend: bool | str | None = None) -> poorwill.Arena:
        return poorwill.arena(
            self.device, "lending", limit=DEVICE_BYTES, lend=self.socket if lend is None else lend
        )


@pytest.fixture
def place() -> Iterator[Place]:
    # The path of a socket has 107 letters at most.
    with tempfile.TemporaryDirectory() as folder:
        made = Place(Path(folder))
        yield made
        made.end()


@pytest.fixture
def lending(place: Place) -> Iterator[poorwill.Arena]:
    """An arena that lends at a broker that runs."""
    place.start()
    with place.arena() as opened:
        yield opened


def test_what_is_lent_comes_back_without_a_copy(lending: poorwill.Arena) -> None:
    weights = filled(lending, "weights", SIZE)
    expected = weights.copy()
    for _ in range(2):
        asleep = lending.sleep()
        assert (asleep.lent_bytes, asleep.released_bytes, asleep.lend_refused) == (SIZE, 0, None)
        assert lending.stats().lent_bytes == SIZE
        assert "16 MiB lent" in repr(asleep)
        woken = lending.wake(verify="all")
        assert (woken.returned_bytes, woken.copied_bytes) == (SIZE, 0)
        assert "16 MiB returned" in repr(woken)
        assert lending.stats().lent_bytes == 0
        assert (weights == expected).all()
    for report in (asleep, woken, lending.stats()):
        assert_restored(report)


def test_one_sleep_may_release_and_a_later_one_lends(lending: poorwill.Arena) -> None:
    weights = filled(lending, "weights", SIZE)
    expected = weights.copy()
    asleep = lending.sleep(lend=False)
    assert (asleep.lent_bytes, asleep.released_bytes) == (0, SIZE)
    assert lending.wake().returned_bytes == 0
    assert lending.sleep(lend=True).lent_bytes == SIZE
    # What is lent already is released by a sleep that says so.
    assert lending.sleep(lend=False).released_bytes == SIZE
    assert lending.wake().copied_bytes == SIZE
    assert (weights == expected).all()


def test_bytes_that_always_change_stay_until_others_need_the_memory(
    place: Place, lending: poorwill.Arena
) -> None:
    lending.declare("optimizer", changes="volatile")
    optimizer = filled(lending, "optimizer", SIZE)
    expected = optimizer.copy()
    for is_asked in (False, True):
        asleep = lending.sleep()
        assert (asleep.resident_bytes, asleep.lent_bytes, asleep.copied_bytes) == (SIZE, 0, 0)
        assert "16 MiB left in place" in repr(asleep)
        assert lending.stats().resident_bytes == SIZE
        if is_asked:
            free = f"print(_native.free_lent({place.device!r}, socket={place.socket!r}, timeout=600))"
            assert run(free) == f"{SIZE}\n"
            assert lending.stats().resident_bytes == 0
        woken = lending.wake()
        assert (woken.returned_bytes, woken.copied_bytes) == ((0, SIZE) if is_asked else (SIZE, 0))
        assert (optimizer == expected).all()


TAKER = """
arena = poorwill.arena({device!r}, lend={socket!r})
blocks = [arena.empty({size}) for _ in range({blocks})]
print(arena.limit_bytes, arena.stats().mapped_bytes)
"""


@pytest.mark.parametrize(("blocks", "left"), [(2, 2), (3, 1), (4, 0)])
def test_another_process_takes_what_it_lacks(
    place: Place, lending: poorwill.Arena, blocks: int, left: int
) -> None:
    arrays = {tag: filled(lending, tag, SIZE) for tag in ("weights", "runtime")}
    expected = {tag: array.copy() for tag, array in arrays.items()}
    assert lending.sleep().lent_bytes == 2 * SIZE
    # It may have all of the device, however little is free when it opens.
    taker = TAKER.format(device=place.device, socket=place.socket, size=SIZE, blocks=blocks)
    assert run(taker) == f"{WHOLE_BYTES} {blocks * SIZE}\n"
    woken = lending.wake(verify="all")
    assert (woken.returned_bytes, woken.copied_bytes) == (left * SIZE, (2 - left) * SIZE)
    assert all((arrays[tag] == expected[tag]).all() for tag in arrays)


def test_a_broker_that_is_killed_costs_copies_only(place: Place, lending: poorwill.Arena) -> None:
    weights = filled(lending, "weights", SIZE)
    expected = weights.copy()
    assert lending.sleep().lent_bytes == SIZE
    place.end()
    woken = lending.wake(verify="all")
    assert (woken.returned_bytes, woken.copied_bytes) == (0, SIZE)
    assert (weights == expected).all()
    # The next one begins a broker of its own.
    assert lending.sleep().lent_bytes == SIZE
    end_broker(place.socket)
    assert lending.wake(verify="all").copied_bytes == SIZE
    assert (weights == expected).all()


def test_a_broker_that_is_not_there_is_started(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_environment.BROKER, place.socket)
    with place.arena(lend=True) as arena:
        weights = filled(arena, "weights", SIZE)
        expected = weights.copy()
        assert arena.sleep().lent_bytes == SIZE
        # It is the one at the path of the environment.
        assert _native.free_lent(place.device) == SIZE
        assert arena.wake().copied_bytes == SIZE
        assert (weights == expected).all()
    end_broker(place.socket)


def test_lent_memory_is_freed_for_who_goes_by_free_memory(place: Place, lending: poorwill.Arena) -> None:
    weights = filled(lending, "weights", SIZE)
    expected = weights.copy()
    free = "print(_native.free_lent({!r}, socket={!r}, timeout=1))"
    assert run(free.format(place.device, place.socket)) == "0\n"
    lending.sleep()
    assert run(free.format(place.device, f"{place.socket}.none")) == "0\n"
    assert run(free.format(f"host:{DEVICE_BYTES}", place.socket)) == "0\n"
    assert run(free.format(place.device, place.socket)) == f"{SIZE}\n"
    assert lending.wake().returned_bytes == 0
    assert (weights == expected).all()


def test_what_is_lent_is_reclaimable_beside_what_is_free(
    place: Place, lending: poorwill.Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_environment.BROKER, place.socket)
    blocks = [filled(lending, tag, SIZE) for tag in ("weights", "runtime")]
    assert lending.sleep().lent_bytes == 2 * SIZE
    beside = poorwill.budget(place.device)
    assert (beside.headroom_bytes, beside.process_used_bytes) == (WHOLE_BYTES - 2 * SIZE, 0)
    # A broker has a second to answer, which a stalled machine may miss.
    eventually(lambda: beside.reclaimable_bytes == 2 * SIZE)
    assert _native.free_lent(place.device, "1MiB") == SIZE
    eventually(lambda: beside.as_dict()["reclaimable_bytes"] == SIZE)
    eventually(lambda: lending.budget.reclaimable_bytes == SIZE)
    eventually(lambda: poorwill.budget("host:8MiB").reclaimable_bytes == 0)
    place.end()
    assert beside.reclaimable_bytes is None
    assert blocks


LEFT = """
arena = poorwill.arena({device!r}, lend={socket!r}, limit={limit})
arena.declare("optimizer", changes="volatile")
blocks = [arena.empty({size}, tag=tag) for tag in ("weights", "optimizer")]
slept = arena.sleep()
print(slept.lent_bytes, slept.resident_bytes)
"""


def test_what_is_lent_ends_with_its_process(place: Place) -> None:
    place.start()
    left = LEFT.format(device=place.device, socket=place.socket, limit=DEVICE_BYTES, size=SIZE)
    for _ in range(2):
        # The second has all of the device, too.
        assert run(left) == f"{SIZE} {SIZE}\n"
        eventually(lambda: _native.free_lent(place.device, socket=place.socket) == 0)


def test_an_arena_that_does_not_lend_says_so(arena: poorwill.Arena) -> None:
    weights = filled(arena, "weights", SIZE)
    with pytest.raises(poorwill.PoorwillError, match=r"opened without `lend`.*lend=True"):
        arena.sleep(lend=True)
    assert arena.state() == {"weights": "awake"}
    assert arena.sleep(lend=False).released_bytes == SIZE
    arena.wake()
    assert weights.any()


def test_a_broker_that_cannot_be_had_is_warned_of_once(place: Place) -> None:
    nowhere = f"{place.folder}/not/there/broker.sock"
    with place.arena(lend=nowhere) as arena:
        weights = filled(arena, "weights", SIZE)
        expected = weights.copy()
        with pytest.warns(RuntimeWarning, match="released what it was to lend") as warned:
            asleep = arena.sleep()
        assert nowhere in str(warned[0].message)
        assert warned[0].filename == __file__
        assert (asleep.released_bytes, asleep.lent_bytes) == (SIZE, 0)
        assert nowhere in (asleep.lend_refused or "")
        arena.wake()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert arena.sleep().lend_refused is not None
        arena.wake()
        assert (weights == expected).all()


def test_a_sleep_is_reported_also_where_warnings_are_errors(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: raised.append(lost.exc_value))
    with place.arena(lend=f"{place.folder}/not/there/broker.sock") as arena:
        weights = filled(arena, "weights", SIZE)
        assert arena.sleep().released_bytes == SIZE
        arena.wake()
        assert weights.any()
    assert [type(error) for error in raised] == [RuntimeWarning]


def test_options_of_an_open_arena_have_to_agree(place: Place, lending: poorwill.Arena) -> None:
    assert place.arena() == lending
    assert poorwill.arena(place.device, "lending") == lending
    for other in (False, f"{place.socket}.other"):
        with pytest.raises(poorwill.PoorwillError, match=r"is open with lend=\".*broker.sock\", and lend="):
            place.arena(lend=other)


@pytest.mark.parametrize(("lend", "error"), [(3, TypeError), (b"", TypeError), ("", ValueError)])
def test_what_names_no_broker_is_refused(place: Place, lend: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="lend is True, False, or the path of a broker's socket"):
        place.arena(lend=lend)


def test_engines_lend_as_their_environment_says() -> None:
    lending = _environment.lending
    assert [lending({}), lending({"POORWILL_LEND": "0", "POORWILL_BROKER": "/a"})] == [None, None]
    assert lending({"POORWILL_LEND": "1"}) is True
    assert lending({"POORWILL_LEND": "1", "POORWILL_BROKER": " "}) is True
    assert lending({"POORWILL_LEND": "1", "POORWILL_BROKER": "/a"}) == "/a"
    with pytest.raises(ValueError, match="POORWILL_LEND='yes' is neither 0 nor 1"):
        lending({"POORWILL_LEND": "yes"})


SAVER = """
import fake_torch
fake_torch.install(fake_torch.Driver())
import torch
from poorwill.compat.torch_memory_saver import torch_memory_saver as saver

with saver.region("weights", enable_cpu_backup=True):
    weights = torch.empty({size}, dtype=torch.uint8, device="cuda").fill_(5)
saver.pause("weights")
[paused] = saver.last_report()
saver.resume("weights")
[resumed] = saver.last_report()
assert torch.equal(weights, torch.empty_like(weights).fill_(5))
print(paused["lent_bytes"], paused["released_bytes"], resumed["returned_bytes"], resumed["copied_bytes"])
"""


@pytest.mark.parametrize("lends", [True, False])
def test_the_memory_saver_lends_as_its_environment_says(
    place: Place, fake: dict[str, str], lends: bool
) -> None:
    place.start()
    shared = place.folder / "gpus"
    shared.mkdir()
    settings = {"POORWILL_FAKE_CUDA_SHARED": str(shared), "POORWILL_LEND": str(int(lends))}
    said = run(SAVER.format(size=SIZE), **fake, **settings, POORWILL_BROKER=place.socket)
    assert said == (f"{SIZE} 0 {SIZE} 0\n" if lends else f"0 {SIZE} 0 {SIZE}\n")


def test_copies_in_a_neighbours_memory_serve_wakes(place: Place) -> None:
    place.start()
    neighbour = f"host:{WHOLE_BYTES}@{place.folder / 'neighbour'}"
    with poorwill.arena(place.device, "copying", lend=place.socket, peer_copies=[neighbour]) as arena:
        weights = filled(arena, "weights", SIZE)
        expected = weights.copy()
        asleep = arena.sleep(lend=False)
        assert (asleep.peer_bytes, asleep.released_bytes, arena.stats().peer_bytes) == (SIZE, SIZE, SIZE)
        woken = arena.wake(verify="all")
        assert (woken.peer_bytes, woken.read_bytes, woken.verified_bytes) == (SIZE, 0, SIZE)
        assert (weights == expected).all()
        arena.sleep(lend=False)
        assert _native.free_lent(neighbour, socket=place.socket) == SIZE
        woken = arena.wake()
        assert (woken.peer_bytes, woken.copied_bytes) == (0, SIZE)
        assert (weights == expected).all()
        assert poorwill.arena(place.device, "copying", peer_copies=[neighbour]) == arena
        with pytest.raises(poorwill.PoorwillError, match="other peer_copies"):
            poorwill.arena(place.device, "copying", peer_copies=True)


def test_copies_take_a_broker_and_devices(place: Place) -> None:
    with pytest.raises(poorwill.PoorwillError, match="open the arena with lend=True"):
        poorwill.arena(place.device, "wrong", peer_copies=[place.device])
    for wrong in ("cuda:1", 1.5):
        with pytest.raises(TypeError, match="peer_copies are True, False, or a sequence of devices"):
            poorwill.arena(place.device, "wrong", lend=place.socket, peer_copies=cast(Any, wrong))
    with pytest.raises(poorwill.PoorwillError, match=r"cuda:1 has no memory that host.* reaches"):
        poorwill.arena(place.device, "wrong", lend=place.socket, peer_copies=["cuda:1"])
