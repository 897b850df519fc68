"""Other processes off their GPUs and back on them: over the fake of the driver, across processes."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import poorwill
import pytest
from helpers import nvml_beside, run

Target = Callable[..., int]

# Answers each line of its input with a line, so that its caller knows where it is.
TARGET = """
import os, sys
import poorwill
arena = poorwill.arena("cuda:0", limit="512MiB")
block = arena.empty(64 << 20)
address = block.address
print(os.getpid(), flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""

CALLER = """
import json, logging, os, sys, threading
from pathlib import Path
from helpers import assert_restored
logging.basicConfig(format="%(name)s: %(message)s", stream=sys.stdout)

def failure(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except poorwill.HibernateError as error:
        return error.kind, error.pid, error.left, str(error)
    raise AssertionError("it has not failed")
"""


class Targets:
    """Processes with an arena on the fake of a GPU."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.running: dict[int, subprocess.Popen[str]] = {}

    def __call__(self, **more: str) -> int:
        started = subprocess.Popen(
            [sys.executable, "-B", "-c", TARGET],
            env={**self.environment, **more},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        self.running[pid] = started
        return pid

    def ask(self, pid: int, expression: str) -> str:
        """What an expression is in a target, which answers once it may use its GPU."""
        self.send(pid, expression)
        return self.answer(pid)

    def send(self, pid: int, expression: str) -> None:
        stdin = self.running[pid].stdin
        assert stdin is not None
        stdin.write(f"{expression}\n")
        stdin.flush()

    def answer(self, pid: int) -> str:
        stdout = self.running[pid].stdout
        assert stdout is not None
        return stdout.readline().strip()

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.communicate()


@pytest.fixture
def taken(fake: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """An environment in which processes can be taken off."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    return {**fake, **nvml_beside(fake), "XDG_RUNTIME_DIR": str(runtime)}


@pytest.fixture
def targets(taken: dict[str, str]) -> Iterator[Targets]:
    targets = Targets(taken)
    yield targets
    targets.end()


def calling(script: str, taken: dict[str, str]) -> list[str]:
    """The lines that a caller prints."""
    return run(CALLER + script, **taken).splitlines()


# A process of another process


def test_a_process_is_taken_off_and_put_back(targets: Targets, taken: dict[str, str]) -> None:
    pid = targets()
    address = targets.ask(pid, "arena.sleep().released_bytes and address")
    off = f"""
before = poorwill.hibernation({pid})
assert before.state == "running" and not before.obstacles, before
assert _native.process_state({pid}) == "running"
assert before.held and before.host_bytes is not None, before
report = poorwill.hibernate({pid}, wait_max=1.5)
[process] = report.processes
assert process.pid == {pid} and report.total_ms >= process.checkpoint_ms >= 0
assert report.host_bytes == before.host_bytes
assert repr(report).startswith("<poorwill.HibernateReport of 1 process: "), report
assert json.loads(json.dumps(report.as_dict()))["processes"][0]["pid"] == {pid}
for each in (report, process, before, *before.held):
    assert_restored(each)
print(poorwill.hibernation({pid}).state, failure(poorwill.hibernate, {pid})[:3])
"""
    assert calling(off, taken) == [f"checkpointed ('wrong_state', {pid}, {{}})"]
    # It runs on, and what needs its GPU waits. Another process puts it back.
    targets.send(pid, "arena.wake().copied_bytes")
    back = f"""
report = poorwill.resume([{pid}])
assert report.processes[0].pid == {pid} and "restored in" in repr(report.processes[0])
for each in (report, *report.processes):
    assert_restored(each)
print(_native.process_state({pid}), failure(poorwill.resume, {pid})[:3])
"""
    assert calling(back, taken) == [f"running ('wrong_state', {pid}, {{}})"]
    assert targets.answer(pid) == str(64 << 20)
    assert targets.ask(pid, "block.address") == address
    assert targets.ask(pid, "arena.sleep(), arena.wake(verify='all').verified_bytes")[-9:-1] == str(64 << 20)


def test_without_figures_it_goes_on_only_on_request(
    targets: Targets, taken: dict[str, str], tmp_path: Path
) -> None:
    pid = targets()
    (tmp_path / "libnvidia-ml.so.1").unlink()
    script = f"""
for call in (poorwill.hibernate, poorwill.resume):
    kind, _, left, words = failure(call, {pid})
    print(kind, left, "nothing was changed" in words)
    call({pid}, without_space_check=True)
    print(_native.process_state({pid}))
"""
    off, back = (f"{kind} {{}} True" for kind in ("no_figures", "unknown_space"))
    assert calling(script, taken) == [off, "checkpointed", back, "running"]


def test_suspended_communicators_go_on_their_callers_word(targets: Targets, taken: dict[str, str]) -> None:
    ranks = [targets(POORWILL_FAKE_CUDA_CHECKPOINT="suspended") for _ in range(2)]
    script = f"""
kind, pid, left, words = failure(poorwill.hibernate, {ranks})
print(kind, pid == {ranks[0]}, left, "not known to be suspended" in words)
poorwill.hibernate({ranks}, suspended_communicators=1)
print([_native.process_state(pid) for pid in {ranks}])
poorwill.resume({ranks})
print([_native.process_state(pid) for pid in {ranks}])
"""
    refused = "obstacles True {} True"
    assert calling(script, taken) == [refused, str(["checkpointed"] * 2), str(["running"] * 2)]


def test_several_are_one_set(targets: Targets, taken: dict[str, str]) -> None:
    first = targets()
    second = targets(POORWILL_FAKE_CUDA_CHECKPOINT="checkpoint:2")
    third = targets()
    script = f"""
kind, pid, left, words = failure(poorwill.hibernate, ({first}, {second}))
print(kind, pid, left, [_native.process_state(pid) for pid in ({first}, {second})])
print([process.pid for process in poorwill.hibernate([{first}, {third}]).processes])
print(failure(poorwill.resume, {first})[:2])
print([process.pid for process in poorwill.resume(({first}, {third})).processes])
"""
    assert calling(script, taken) == [
        f"out_of_host_memory {second} {{}} ['running', 'running']",
        str([first, third]),
        f"('bad_request', {first})",
        str([first, third]),
    ]


@pytest.mark.parametrize(("shows", "names"), [("communicator", "rank"), ("ipc", "memory shared")])
def test_an_obstacle_is_named_before_anything_is_changed(
    targets: Targets, taken: dict[str, str], shows: str, names: str
) -> None:
    pid = targets(POORWILL_FAKE_CUDA_CHECKPOINT=shows)
    script = f"""
[obstacle] = poorwill.hibernation({pid}).obstacles
kind, pid, left, words = failure(poorwill.hibernate, {pid})
assert obstacle in words and {names!r} in obstacle, (obstacle, words)
print(kind, pid, left, "nothing was changed" in words, poorwill.hibernation({pid}).state)
"""
    assert calling(script, taken) == [f"obstacles {pid} {{}} True running"]


def test_other_threads_run_meanwhile(targets: Targets, taken: dict[str, str], tmp_path: Path) -> None:
    latch = tmp_path / "latch"
    pid = targets(POORWILL_FAKE_CUDA_CHECKPOINT=f"checkpoint:hold:{latch}")
    script = f"""
taking = threading.Thread(target=lambda: print(poorwill.hibernate({pid}).processes[0].pid))
taking.start()
while not Path({str(latch) + ".reached"!r}).exists():
    pass
Path({str(latch)!r}).touch()
taking.join()
"""
    assert calling(script, taken) == [str(pid)]


@pytest.mark.parametrize("step", ["lock", "checkpoint", "restore", "unlock"])
def test_what_a_killed_caller_leaves_is_brought_back(
    targets: Targets, taken: dict[str, str], tmp_path: Path, step: str
) -> None:
    latch = tmp_path / "latch"
    pid = targets(POORWILL_FAKE_CUDA_CHECKPOINT=f"{step}:hold:{latch}")
    killed = f"import poorwill\npoorwill.hibernate({pid})\npoorwill.resume({pid})"
    caller = subprocess.Popen([sys.executable, "-B", "-c", killed], env=taken)
    reached = Path(f"{latch}.reached")
    while not reached.exists():
        assert caller.poll() is None
    caller.kill()
    caller.wait()
    latch.touch()
    script = f"""
try:
    poorwill.resume({pid})
except poorwill.HibernateError as error:
    assert error.kind == "wrong_state", error
print(_native.process_state({pid}))
poorwill.hibernate({pid})
poorwill.resume({pid})
"""
    assert calling(script, taken)[-1] == "running"
    assert targets.ask(pid, "arena.sleep() and arena.wake().copied_bytes") == str(64 << 20)


# By vLLM's server


def is_running(pid: int) -> bool:
    """Whether a process has not ended, whether or not its parent knows."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_server_calls_the_driver_in_a_process_of_its_own(targets: Targets, taken: dict[str, str]) -> None:
    pid = targets()
    script = f"""
from poorwill.vllm import _driver
_driver.open_driver()
print(_driver.process_state({pid}), _driver.take_off(({pid},), wait_max=1.5)["processes"][0]["pid"])
child = _driver._child._process.pid
refused = [failure(_driver.take_off, [each])[0] for each in ({pid}, child)]
print(*refused, _driver.process_state({pid}))
try:
    _driver.take_off([{pid}], wait_max=-1)
except ValueError as error:
    print(error)
# A child that has been killed is an error once, and nothing is lost.
os.kill(child, 9)
try:
    print(_driver.put_back([{pid}])["processes"][0]["pid"])
except poorwill.HibernateError as error:
    assert error.kind == "failed", error
    print(_driver.put_back([{pid}])["processes"][0]["pid"])
assert "libcuda" not in Path("/proc/self/maps").read_text()
print(_driver.process_state({pid}), failure(_native.process_state, os.getppid())[0])
print(_driver._child._process.pid)
"""
    *lines, child = calling(script, taken)
    assert lines == [
        f"running {pid}",
        "wrong_state own_process checkpointed",
        "`-1` is no timeout: it is a number of seconds from 0 on",
        str(pid),
        "running no_device",
    ]
    # It has ended with its server, or is about to.
    while is_running(int(child)):
        pass


# Bad input


def test_each_process_that_cannot_be_taken_off_has_a_sentence(taken: dict[str, str]) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    script = f"""
for call in (poorwill.hibernate, poorwill.resume, poorwill.hibernation):
    for pid in (os.getpid(), {ended.pid}, 1, 2**31 - 1):
        print(*failure(call, pid)[:3])
print(failure(poorwill.hibernate, os.getpid())[3])
print(failure(poorwill.hibernate, [])[0], failure(poorwill.resume, [1, 1])[0])
print(failure(_native.process_state, {ended.pid})[0])
"""
    lines = calling(script, taken)
    kinds = [line.split()[0] for line in lines[:12]]
    assert [kinds[0::4], kinds[1::4], kinds[3::4]] == [
        ["own_process"] * 3,
        ["no_such_process"] * 3,
        ["no_such_process"] * 3,
    ]
    assert set(kinds[2::4]) <= {"no_device", "not_permitted"}
    assert all(line.endswith("{}") for line in lines[:12])
    assert "ask from another process" in lines[12]
    assert lines[13:] == ["bad_request bad_request", "no_such_process"]


CALLS = [poorwill.hibernate, poorwill.resume, poorwill.hibernation]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**32 + 5, 2**70])
def test_numbers_that_are_no_pid(call: Callable[[object], object], pid: int) -> None:
    with pytest.raises(ValueError, match=f"^`{pid}` is no pid: it is a number from 1 to 2147483647$"):
        call(pid)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("pid", [True, 1.0, "1", b"1", None, object()])
def test_values_that_are_no_pid(call: Callable[[object], object], pid: object) -> None:
    with pytest.raises(TypeError, match=rf"an int.*, not {type(pid).__name__}$"):
        call(pid)
    if call is not poorwill.hibernation:
        with pytest.raises(TypeError, match=f"^a pid is an int, not {type(pid).__name__}$"):
            call([1, pid])


@pytest.mark.parametrize("wait_max", [-1, float("nan"), "5s", True])
def test_times_that_are_none(wait_max: object) -> None:
    with pytest.raises((ValueError, TypeError), match="timeout"):
        poorwill.hibernate(1, wait_max=wait_max)  # type: ignore[arg-type]


@pytest.mark.parametrize("host_bytes_max", [-1, "plenty", 1.5, True])
def test_sizes_that_are_none(host_bytes_max: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        poorwill.hibernate(1, host_bytes_max=host_bytes_max)  # type: ignore[arg-type]


def test_a_fork_opens_its_own(targets: Targets, taken: dict[str, str]) -> None:
    pid = targets()
    script = f"""
print(_native.process_state({pid}), flush=True)
child = os.fork()
if child == 0:
    # NVIDIA's driver does not work in a fork; what matters is that nothing hangs.
    try:
        _native.process_state({pid})
    except poorwill.PoorwillError:
        pass
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert calling(script, taken) == ["running", "7"]
