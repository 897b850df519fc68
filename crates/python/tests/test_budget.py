"""What budgets and claims promise: on the host device, and over a fake of NVIDIA's library."""

import gc
import json
import math
import sys
from types import SimpleNamespace

import poorwill
import pytest
from helpers import run, together

MIB = 1 << 20
GIB = 1 << 30


def test_the_budget_of_a_device_says_where_it_comes_from() -> None:
    budget = poorwill.budget("host:64MiB", "32MiB")
    assert (budget.device, budget.winner) == ("host:64MiB", "user")
    assert (budget.total_bytes, budget.budget_bytes, budget.headroom_bytes) == (64 * MIB, 32 * MIB, 32 * MIB)
    assert (budget.process_used_bytes, budget.unclaimed_bytes) == (0, 32 * MIB)
    assert [(source.name, source.bytes, source.note) for source in budget.sources] == [
        ("capacity", 64 * MIB, None),
        ("capacity_free", 64 * MIB, None),
        ("user", 32 * MIB, None),
    ]
    assert repr(budget) == "<poorwill.Budget host:64MiB: 32 MiB of 64 MiB, from user; 32 MiB unclaimed>"
    assert repr(budget.sources[0]) == "<poorwill.Source capacity: 64 MiB>"
    assert set(budget.sources) == set(poorwill.budget("host:64MiB", "32MiB").sources)
    decided = poorwill.budget("host:64MiB", 0.5).as_dict()
    assert decided["sources"][-1] == {
        "name": "user", "bytes": 32 * MIB, "note": "0.5 of 64 MiB, from capacity"
    }  # fmt: skip
    assert (decided["winner"], decided["budget_bytes"]) == ("user", 32 * MIB)
    assert json.loads(json.dumps(decided)) == decided


def test_a_share_is_what_was_written() -> None:
    for share, text in [(0.92, "0.92"), (1.0, "1.0"), (0.1 + 0.2, "0.3"), (1e-5, "0.00001"), (0.07, "7%")]:
        by_number, by_text = (poorwill.budget("host:23GiB", cap).budget_bytes for cap in (share, text))
        assert by_number == by_text, text


@pytest.mark.parametrize(
    "cap",
    [
        22 * GIB,
        "22GiB",
        "cuda:0=1GiB,host=22528m,0.5",
        {"host": "22g"},
        {"host:1GiB": 22 * GIB, "cuda:0": 0.5},
    ],
)
def test_bytes_in_all_spellings(cap: object) -> None:
    assert poorwill.budget("host:24GiB", cap).budget_bytes == 22 * GIB  # type: ignore[arg-type]


@pytest.mark.parametrize("cap", [None, "cuda:0=1GiB", {"cuda:0": "1GiB"}, {0: 0.5, 1: 0.5}, {}, "48GiB"])
def test_without_a_cap_for_it_all_of_a_device_may_be_used(cap: object) -> None:
    assert poorwill.budget("host:24GiB", cap).budget_bytes == 24 * GIB  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cap", "reason"),
    [
        (math.nan, "`nan` is no budget: it is no number"),
        (math.inf, "`inf` is no budget: it is no number"),
        (-0.5, "`-0.5` is no budget: it is negative"),
        (-1, "`-1` is no budget: it is negative"),
        (2**64, f"`{2**64}` is no budget: it does not fit into 64 bits"),
        (0, "nothing can be loaded"),
        (0.0, "nothing can be loaded"),
        (1e-300, "nothing can be loaded"),
        (1.5, "a share is at most 1.0"),
        (1, "it is one byte"),
        (22, "without a unit it is that many bytes"),
        ("lots", "`lots` is no budget"),
        ({"cuda:0": 1.5}, "a share is at most 1.0"),
        ({0: 0.5, "cuda:0": 0.6}, "two budgets for cuda:0"),
        ({"gpu": 0.5}, "`gpu` names no device"),
    ],
)
def test_what_is_no_cap_is_refused_with_what_would_be(cap: object, reason: str) -> None:
    with pytest.raises(ValueError, match=r"like|known are") as raised:
        poorwill.budget("host:64MiB", cap)  # type: ignore[arg-type]
    assert reason in str(raised.value)


@pytest.mark.parametrize("cap", [True, False, b"1GiB", [0.5], {"host": True}, {"host": None}, {None: 0.5}])
def test_what_no_cap_can_be_made_of_is_a_type_error(cap: object) -> None:
    with pytest.raises(TypeError, match=r'"20GiB" or "0.92", not |a device is an int'):
        poorwill.budget("host:64MiB", cap)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        ("gpu", ValueError, "names no device"),
        ("hip:0", ValueError, "AMD"),
        ("host:x", ValueError, "capacity"),
        (-1, ValueError, "`-1` is no number of a GPU"),
        (2**40, ValueError, "is no number of a GPU"),
        (SimpleNamespace(type="cpu", index=None), ValueError, "is no GPU"),
        (SimpleNamespace(type="cuda", index=-1), ValueError, "is no number of a GPU"),
        (SimpleNamespace(type="cuda", index="0"), TypeError, "index of a device is an int, not str"),
        (SimpleNamespace(type=1, index=0), TypeError, "not SimpleNamespace"),
        (True, TypeError, "not bool"),
        (1.0, TypeError, "not float"),
        (object(), TypeError, "not object"),
        ("host:1k", poorwill.PoorwillError, "granule"),
    ],
)
def test_what_is_no_device_is_refused(device: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as raised:
        poorwill.budget(device)  # type: ignore[arg-type]
    assert type(raised.value) is error


def test_claims_are_named_refused_and_returned() -> None:
    budget = poorwill.budget("host:10GiB")
    weights = budget.claim("weights", "6GiB")
    graphs = budget.claim("cudagraph", GIB)
    assert [(claim.name, claim.bytes, claim.peak_bytes) for claim in budget.claims()] == [
        ("weights", 6 * GIB, None),
        ("cudagraph", GIB, None),
    ]
    assert repr(budget.claims()[0]) == "<poorwill.Claimed weights: 6 GiB>"
    assert (budget.budget_bytes, budget.winner) == (10 * GIB, "capacity")
    with pytest.raises(poorwill.BudgetError, match=r"^cannot claim 4 GiB for `kv_cache`: .* 3 GiB would fit"):
        budget.claim("kv_cache", 4 * GIB)
    graphs.release()
    graphs.release()
    assert (graphs.bytes, graphs.peak_bytes, graphs.over_bytes) == (GIB, None, 0)
    assert repr(graphs) == "<poorwill.Claim cudagraph: 1 GiB, released>"
    cache = budget.claim("kv_cache", " 4 GiB ")
    assert budget.unclaimed_bytes == 0
    del cache
    gc.collect()
    assert (budget.unclaimed_bytes, weights.name) == (4 * GIB, "weights")


def test_claims_are_resized() -> None:
    budget = poorwill.budget("host:10GiB")
    first = budget.claim("a", "4GiB")
    with pytest.raises(poorwill.BudgetError, match="10 GiB would fit"):
        first.resize("11GiB")
    assert first.bytes == 4 * GIB
    first.resize("9.5GiB")
    assert (first.bytes, budget.unclaimed_bytes) == (19 * GIB // 2, GIB // 2)
    first.release()
    with pytest.raises(poorwill.BudgetError, match="`a` has been returned to the budget; claim again"):
        first.resize(1)


def test_a_claim_outlives_the_budget_that_it_is_of() -> None:
    claim = poorwill.budget("host:64MiB").claim("weights", 64 * MIB)
    gc.collect()
    with claim:
        assert claim.bytes == 64 * MIB


@pytest.mark.parametrize(
    ("name", "size", "error", "words"),
    [
        ("", 1, ValueError, "cannot be a tag"),
        ("weights", -1, ValueError, "`-1` is not a size: it is negative"),
        ("weights", 2**64, ValueError, "64 bits"),
        ("weights", "lots", ValueError, "`lots` is not a size"),
        ("weights", 1.5, TypeError, "a size is an int, in bytes, or a text .* not float"),
        ("weights", True, TypeError, "not bool"),
        (None, 1, TypeError, "None"),
    ],
)
def test_what_cannot_be_claimed_by_name_or_size(
    name: object, size: object, error: type[Exception], words: str
) -> None:
    budget = poorwill.budget("host:64MiB")
    with pytest.raises(error, match=words):
        budget.claim(name, size)  # type: ignore[arg-type]
    assert budget.claims() == []


def test_a_block_returns_its_claim() -> None:
    budget = poorwill.budget("host:64MiB")
    with budget.claim("cudagraph", "2MiB") as claim:
        assert budget.unclaimed_bytes == 62 * MIB
        [claimed] = budget.claims()
        assert (claimed.bytes, claimed.peak_bytes) == (2 * MIB, 0)
        with pytest.raises(poorwill.BudgetError, match="watched already"):
            claim.__enter__()
        claim.resize("3MiB")
    assert budget.unclaimed_bytes == 64 * MIB
    assert (claim.bytes, claim.peak_bytes, claim.over_bytes) == (3 * MIB, 0, 0)
    assert repr(claim) == "<poorwill.Claim cudagraph: 3 MiB, at most 0 B taken, released>"
    with pytest.raises(poorwill.BudgetError, match="claim again"), claim:
        pass


def test_a_block_that_fails_returns_its_claim() -> None:
    budget = poorwill.budget("host:64MiB")
    with pytest.raises(KeyError), budget.claim("cudagraph", "2MiB"):
        raise KeyError
    assert budget.unclaimed_bytes == 64 * MIB
    with budget.claim("cudagraph", "2MiB") as claim:
        claim.release()
        assert budget.unclaimed_bytes == 64 * MIB
    watched = budget.claim("cudagraph", "2MiB").__enter__()
    del watched
    gc.collect()
    assert budget.unclaimed_bytes == 64 * MIB


def test_threads_share_a_budget() -> None:
    budget = poorwill.budget("host:64MiB")
    refused: list[poorwill.BudgetError] = []

    def claim_often() -> None:
        for _ in range(50):
            try:
                with budget.claim("mine", "16MiB") as claim:
                    claim.resize("15MiB")
                    assert budget.unclaimed_bytes <= 49 * MIB
            except poorwill.BudgetError as error:
                refused.append(error)

    # With it there is space for three of the others, and for a byte more of it.
    shared = budget.claim("shared", 1)

    def touch_often() -> None:
        for _ in range(50):
            shared.resize(2)
            assert "shared" in repr(shared)
            shared.resize(1)

    together(*[claim_often] * 8, *[touch_often] * 2)
    # A byte short of what is asked for is said in bytes.
    beginnings = ("cannot claim 16 MiB for `mine`", "cannot claim 16777216 B for `mine`")
    assert all(str(error).startswith(beginnings) for error in refused)
    shared.release()
    assert budget.unclaimed_bytes == 64 * MIB


def test_the_current_gpu_is_that_of_pytorch_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_cuda(is_initialized: bool) -> object:
        cuda = SimpleNamespace(is_initialized=lambda: is_initialized, current_device=lambda: 3)
        return SimpleNamespace(cuda=cuda)

    for torch, ordinal in [
        (with_cuda(True), 3),
        (with_cuda(False), 0),
        (SimpleNamespace(), 0),
        (SimpleNamespace(cuda=None), 0),
        (None, 0),
    ]:
        monkeypatch.setitem(sys.modules, "torch", torch)
        # Which GPU a key without a number means shows in which key it collides with.
        with pytest.raises(ValueError, match=f"two budgets for cuda:{ordinal}"):
            poorwill.budget("host:64MiB", {"cuda": 0.5, ordinal: 0.5})
        assert poorwill.budget("host:64MiB", {"cuda": 0.5, ordinal + 1: 0.5}).winner == "capacity"


def test_a_gpu_that_is_not_there_says_so() -> None:
    script = """
asks = [poorwill.budget, lambda: poorwill.budget("cuda:7"), lambda: _native.shared_memory_of_device(7)]
for ask in [*asks, lambda: poorwill.arena(7)]:
    try:
        ask()
    except poorwill.PoorwillError as error:
        print(type(error).__name__, str(error).split(": ")[0])
"""
    said = run(script, CUDA_VISIBLE_DEVICES="")
    assert said == "".join(f"PoorwillError cannot use device cuda:{n}\n" for n in (0, 7, 7, 7))


# Over the fake of NVIDIA's library: a slice of 23 GiB of a card of 24 GiB.

SLICE = {
    "POORWILL_FAKE_CUDA_DEVICES": "24GiB",
    "POORWILL_FAKE_CUDA_SIMULATE": "0:hami=23GiB",
    "CUDA_DEVICE_MEMORY_LIMIT_0": "23552m",
}


def test_bytes_are_bytes_of_the_slice(environment: dict[str, str]) -> None:
    script = """
class Device:  # as torch has them
    type, index = "cuda", 0

caps = ["22GiB", "22g", "22528m", 22 << 30, "cuda:0=22g", {0: "22g"}, {"cuda": "22g"}, {Device(): "22g"}]
budgets = [poorwill.budget(0, cap) for cap in caps]
budgets += [poorwill.budget(device, "22g") for device in (None, "cuda", "cuda:0", Device())]
print({(budget.device, budget.budget_bytes >> 30, budget.winner) for budget in budgets})
print(poorwill.budget().winner, poorwill.budget().budget_bytes >> 30)
"""
    assert run(script, **environment, **SLICE) == "{('cuda:0', 22, 'user')}\ncuda_total 23\n"


def test_shared_memory_is_asked_of_one_gpu(environment: dict[str, str]) -> None:
    script = "print(_native.shared_memory_of_device(1))"
    play = {"POORWILL_FAKE_CUDA_DEVICES": "1GiB,1GiB", "POORWILL_FAKE_CUDA_SIMULATE": "1:shared=99k"}
    assert run(script, **environment, **play) == f"{99 << 10}\n"


def test_a_gpu_that_the_driver_does_not_have_is_a_value_error(environment: dict[str, str]) -> None:
    script = """
from poorwill.triton import shared_memory_budget, shared_memory_pruner
prune = shared_memory_pruner(lambda parameters: 0, device="cuda:2")
for ask in (lambda: shared_memory_budget(2), lambda: prune([])):
    try:
        ask()
    except ValueError as error:
        print(error)
"""
    said = run(script, **environment, POORWILL_FAKE_CUDA_DEVICES="1GiB,1GiB").splitlines()
    assert len(said) == 2
    assert all("there is no GPU 2: the driver shows this process 2" in line for line in said)


# Takes memory of the device as another library in the process does: through calls of its own.
TAKING = """
import ctypes, warnings

class Prop(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("kind", "handles", "place", "device")] + [
        ("meta", ctypes.c_void_p), ("flags", ctypes.c_uint64)
    ]

cuda = ctypes.CDLL("libcuda.so.1")
budget = poorwill.budget(0, "8GiB")
context = ctypes.c_void_p()
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxPushCurrent_v2(context) == 0

def take(size_bytes):
    handle = ctypes.c_uint64()
    prop = Prop(kind=1, place=1, device=0)
    created = cuda.cuMemCreate(
        ctypes.byref(handle), ctypes.c_size_t(size_bytes), ctypes.byref(prop), ctypes.c_ulonglong(0)
    )
    assert created == 0, created
    return handle

def give_back(handle):
    assert cuda.cuMemRelease(handle) == 0
"""


def test_the_peak_is_held_against_the_claim(environment: dict[str, str]) -> None:
    script = """
with budget.claim("cudagraph", "2GiB") as claim:
    kept = take(1 << 30)
    brief = take(1 << 30)
    while claim.peak_bytes < 2 << 30:
        pass
    give_back(brief)
print(claim.peak_bytes >> 30, claim.over_bytes)
with budget.claim("cudagraph", "1GiB") as claim:
    # What was in use before is not its own.
    give_back(take(1 << 30))
print(claim.peak_bytes <= 1 << 30, claim.over_bytes)
"""
    assert run(TAKING + script, **environment, POORWILL_FAKE_CUDA_DEVICES="24GiB") == "2 0\nTrue 0\n"


def test_more_than_was_claimed_is_a_warning_where_it_fits(environment: dict[str, str]) -> None:
    script = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with budget.claim("cudagraph", "1.5GiB") as claim:
        kept = take(2 << 30)
[warning] = caught
print(warning.category.__name__, warning.message)
print(warning.filename, claim.bytes >> 20, claim.peak_bytes >> 20, claim.over_bytes >> 20)
print(budget.claims(), budget.unclaimed_bytes >> 30)
warnings.simplefilter("error")
try:
    with budget.claim("cudagraph", "1.5GiB") as claim:
        more = take(2 << 30)
except poorwill.BudgetWarning as warning:
    print(warning.__context__)
try:
    with budget.claim("cudagraph", "1.5GiB") as claim:
        more = take(2 << 30)
        claim.release()
        raise KeyError("first")
except KeyError as error:
    print(error, error.__context__)
"""
    said = run(TAKING + script, **environment, POORWILL_FAKE_CUDA_DEVICES="24GiB").splitlines()
    assert said == [
        "BudgetWarning `cudagraph` claimed 1.5 GiB and took up to 2 GiB, 512 MiB more, which the rest of the "
        "budget covers; claim 2 GiB for it",
        "<string> 1536 2048 512",
        "[] 8",
        "None",
        "'first' None",
    ]


def test_more_than_the_budget_has_is_an_error(environment: dict[str, str]) -> None:
    script = """
weights = budget.claim("weights", "6GiB")
for last in (None, KeyError("first")):
    try:
        with budget.claim("cudagraph", "1GiB") as claim:
            kept = take(3 << 30)
            if last is not None:
                raise last
    except (poorwill.BudgetError, KeyError) as error:
        print(error, error.__context__)
    print(claim.bytes >> 30, claim.peak_bytes >> 30, claim.over_bytes >> 30, budget.unclaimed_bytes >> 30)
    give_back(kept)
"""
    said = run(TAKING + script, **environment, POORWILL_FAKE_CUDA_DEVICES="24GiB").splitlines()
    assert said == [
        "`cudagraph` claimed 1 GiB and took up to 3 GiB, 2 GiB more, and the budget of 8 GiB has 2 GiB for "
        "it; make it take less, or, for a claim of 3 GiB: release a claim, or raise the budget to 9 GiB (a "
        "share of 0.38) None",
        "1 3 2 2",
        "'first' None",
        "1 3 2 2",
    ]


def test_a_device_that_stops_telling_is_an_error_and_the_claim_is_returned(
    environment: dict[str, str],
) -> None:
    script = """
try:
    with budget.claim("cudagraph", "1GiB") as claim:
        cuda.poorwillFakeArm(ctypes.c_uint64(0), ctypes.c_uint64(1 << 40))
except poorwill.PoorwillError as error:
    print(type(error).__name__, "999" in str(error) or error)
print(budget.claims(), claim.bytes >> 30)
try:
    with budget.claim("cudagraph", "1GiB") as claim:
        print("not here")
except poorwill.PoorwillError as error:
    print(type(error).__name__)
cuda.poorwillFakeDisarm()
with budget.claim("cudagraph", "8GiB") as claim:
    print(claim.peak_bytes)
"""
    said = run(TAKING + script, **environment, POORWILL_FAKE_CUDA_DEVICES="24GiB").splitlines()
    assert said == ["PoorwillError True", "[] 1", "PoorwillError", "0"]
