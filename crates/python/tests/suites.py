"""Suites: files of tests that need a process of their own, whose environment is there before Python starts.

pytest does not collect a `*_suite.py` by itself. `run_suite` runs some in a child process and tells each of
their tests as a subtest of its caller. A child in which no test has passed is a failure.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers import STUCK_S

HERE = Path(__file__).resolve().parent

# Set where a suite runs.
SUITE = "POORWILL_TEST_SUITE"

# What has pytest run over fakes of PyTorch and NVIDIA's driver.
FAKES = ("-p", "pools_on_the_fake", "-m", "not real_torch")


def marks_of(*suites: str, is_long: bool) -> list[pytest.MarkDecorator]:
    """What a test is marked that runs these suites. They do more with more effort where they use `cases`, let
    calls fail (`calls_of`), or have tests that are long.
    """
    texts = [(HERE / f"{suite}.py").read_text() for suite in suites]
    scales = any(word in text for text in texts for word in ("cases(", "calls_of(", "mark.long"))
    return [pytest.mark.long] * is_long + [pytest.mark.scales] * scales


def run_suite(
    subtests: pytest.Subtests, suites: Sequence[str], *options: str, environment: dict[str, str] | None = None
) -> None:
    """Runs suites, named without `.py`, with options of pytest's, in our environment and what is given."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    # PyTorch's threads wait for each other without sleeping, which takes the processors from other tests.
    own = {"PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1", SUITE: "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        ended = subprocess.run(
            [
                *(sys.executable, "-B", "-m", "pytest", "-q", "-rfEs", f"--junitxml={report}"),
                *("-o", f"faulthandler_timeout={STUCK_S // 3}"),
                # Forks of a process that has threads, which Python warns of.
                *("-W", "ignore:This process:DeprecationWarning"),
                *options,
                *(str(HERE / f"{suite}.py") for suite in suites),
            ],
            env={**inherited, **own, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=STUCK_S,
            check=False,
        )
        said = f"{ended.stdout}\n{ended.stderr}"
        assert report.exists(), said
        cases = list(ElementTree.parse(report).iter("testcase"))
    assert any(len(case) == 0 for case in cases), f"no test has passed\n{said}"
    for case in cases:
        with subtests.test(f"{case.get('classname')}::{case.get('name')}"):
            for outcome in case:
                if outcome.tag == "skipped":
                    pytest.skip(outcome.get("message", ""))
                pytest.fail(outcome.text or said, pytrace=False)
    # Also where a failure was of no test in particular.
    assert ended.returncode == pytest.ExitCode.OK, said
