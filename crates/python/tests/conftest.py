"""Fixtures and options of all tests.

Tests say by their marks what they need: `real_torch`, `gpu`. A run chooses them by `-m`; where what they need
is missing, those that were not left out are skipped. With `--no-skips` a skip is a failure. What may do more
where `POORWILL_EFFORT` asks for it is marked `scales`: the tests of a file that uses `cases`, and those that
run suites which do (`marks_of`). `other_versions` are the tests of vLLMs whose sources a quick run does not
fetch. These, and what is marked `long`, also in a suite, do not run with the effort `quick`, unless `-k`
asks for them.
"""

import gc
import importlib.util
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import poorwill
import pytest
from helpers import DEVICE
from poorwill.sglang import _versions as sglang
from poorwill.vllm import _versions as vllm
from suites import SUITE

HERE = Path(__file__).resolve().parent
OTHER_VERSIONS = frozenset(vllm.TESTED + sglang.TESTED) - frozenset(vllm.RUN + sglang.RUN)

# Its assertions report differences, whichever module imports it first.
pytest.register_assert_rewrite("vllm_cores")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped has failed")
    same = "the same, in files whose names begin so"
    parser.addoption("--no-skips-in", metavar="PREFIX", action="append", default=[], help=same)


def pytest_itemcollected(item: pytest.Item) -> None:
    module = getattr(item, "module", None)
    if hasattr(module, "cases"):
        item.add_marker("scales")
    callspec = getattr(item, "callspec", None)
    # Engines of other versions (the fixture `vllm`) run with `--full` and `cargo xtask vllm` only.
    params = {name: value for name, value in (callspec.params.items() if callspec else ()) if name != "vllm"}
    if any(value in OTHER_VERSIONS for value in params.values() if isinstance(value, str)):
        item.add_marker("other_versions")


# Behind the choice by marks, since the order depends on how many are left.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The caller of a suite uses `-k` for its own choice.
    is_named = config.getoption("keyword") and SUITE not in os.environ
    if os.environ.get("POORWILL_EFFORT") == "quick" and not is_named:
        marks = ("long", "other_versions")
        left = [item for item in items if any(item.get_closest_marker(mark) for mark in marks)]
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)
    items[:] = _spread(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _spread(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Orders tests so that each worker begins with some that run suites, which take longest.

    A worker has an equal share of neighbours, and others take from its end what it has not begun.
    """
    suites = [item for item in items if "subtests" in getattr(item, "fixturenames", ())]
    others = [item for item in items if item not in suites]
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        share = (len(items) - len(ordered)) // (workers - worker)
        own = suites[worker::workers]
        rest = max(share - len(own), 0)
        ordered += [*own, *others[:rest]]
        del others[:rest]
    return [*ordered, *others]


def pytest_collection_finish() -> None:
    """What is there before the first test stays: looks for garbage, of which tests make many, pass it by."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    prefixes = tuple(item.config.getoption("--no-skips-in"))
    is_forbidden = item.config.getoption("--no-skips") or item.path.name.startswith(prefixes)
    if report.skipped and is_forbidden and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and nothing may be: {report.longrepr}"
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    # The caller of a suite knows what is there, or simulates it.
    if SUITE in os.environ:
        return
    if item.get_closest_marker("real_torch") and importlib.util.find_spec("torch") is None:
        pytest.skip("there is no PyTorch here")
    if item.get_closest_marker("gpu") and not Path("/dev/nvidiactl").exists():
        pytest.skip("there is no NVIDIA GPU here")


@pytest.fixture
def arena() -> Iterator[poorwill.Arena]:
    opened = poorwill.arena(DEVICE, "tested", limit="64MiB")
    yield opened
    opened.close()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment in which the driver's library is the fake, and scripts find the tests' modules."""
    library = os.environ.get("POORWILL_FAKE_LIBCUDA")
    if library is None or not Path(library).is_file():
        pytest.skip("POORWILL_FAKE_LIBCUDA names no library; `cargo xtask python` builds one")
    (tmp_path / "libcuda.so.1").symlink_to(Path(library).resolve())
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    return {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": path}


@pytest.fixture
def fake(environment: dict[str, str]) -> dict[str, str]:
    """The same, with two small GPUs."""
    return {**environment, "POORWILL_FAKE_CUDA_DEVICES": "1GiB,1GiB"}
