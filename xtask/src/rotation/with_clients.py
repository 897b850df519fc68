"""Stock clients against a rotation of two mock engines of which one fits: which calls work.

Each client is a program that prints a line for each call: `ok NAME` or `failed NAME: why`. A client whose
runtime is missing is left out, with the reason. The exit code is 1 if a call failed or a client did not end
by itself.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service import HANGS_S, free_ports, running

HERE = Path(__file__).parent
KEY = "a-key-of-this-matrix"

CONFIG = """
[front]
listen = "127.0.0.1:{front}"
{access}
[control]
listen = "127.0.0.1:{control}"
[memory]
measure = "processes"
gpu = "160MiB"
[every_model]
residence_min = "50ms"
turn_max = "500ms"
slack = "8MiB"
wait_max = "2m"
"""

MODEL = """
[[model]]
name = "{name}"
aliases = ["{name}-alias"]
url = "http://127.0.0.1:{port}"
need = "100MiB"
command = [{poorwill}, "mock-engine", "--listen", "127.0.0.1:{port}", "--model", "{name}", "--bytes", "64MiB"]
"""


@contextmanager
def rotation(poorwill: Path, access: str) -> Iterator[tuple[str, str]]:
    """A running rotation; gives the addresses of the front and of its first engine."""
    front, control, *engines = free_ports(4)
    text = CONFIG.format(front=front, control=control, access=access)
    for name, port in zip(["amber", "birch"], engines, strict=True):
        text += MODEL.format(name=name, port=port, poorwill=json.dumps(str(poorwill)))
    with running(poorwill, text, front, {"POORWILL_CLIENTS_KEY": KEY}):
        yield f"http://127.0.0.1:{front}", f"http://127.0.0.1:{engines[0]}"


def clients(arguments: argparse.Namespace) -> Iterator[tuple[str, list[str] | None, str]]:
    """Name, command, and why it is left out if there is no command."""
    python = str(arguments.python)
    for module in ["openai", "anthropic", "langchain_openai"]:
        yield f"{module}, Python", [python, str(HERE / "client.py"), module], ""
    node = shutil.which("node")
    for module in ["openai", "anthropic"]:
        name = f"{module}, JavaScript"
        if node is None or arguments.node_modules is None:
            yield name, None, "no Node.js with npm here"
        else:
            yield name, [node, str(Path(arguments.node_modules).parent / "client.mjs"), module], ""
    java = shutil.which("java")
    yield (
        "HttpClient, Java",
        [java, str(HERE / "Client.java")] if java else None,
        "" if java else "no JDK 11 or later here",
    )
    curl = shutil.which("curl")
    yield (
        "curl",
        ["bash", str(HERE / "client.sh")] if curl else None,
        "" if curl else "no curl here",
    )
    browsers = [shutil.which(name) for name in ["chromium", "chromium-browser", "google-chrome"]]
    browser = next(filter(None, browsers), None)
    yield (
        "a page, Chromium",
        [python, str(HERE / "browser.py"), browser] if browser else None,
        "" if browser else "no Chromium here",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--poorwill", type=Path, required=True, help="the program")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="has the clients in Python")
    parser.add_argument("--node-modules", type=Path, help="has the clients in JavaScript, beside client.mjs")
    arguments = parser.parse_args()
    passed, failed, left_out = 0, 0, 0
    poorwill, site = arguments.poorwill.resolve(), f"http://127.0.0.1:{free_ports(1)[0]}"
    allowing = f'keys = ["env:POORWILL_CLIENTS_KEY"]\norigins = ["{site}"]'
    with rotation(poorwill, allowing) as (base, _), rotation(poorwill, "") as (refusing, engine):
        environment = {
            **os.environ,
            "POORWILL_BASE": base,
            "POORWILL_KEY": KEY,
            "POORWILL_SITE": site,
            "POORWILL_REFUSING": refusing,
            "POORWILL_REFUSING_ENGINE": engine,
        }
        for name, command, why in clients(arguments):
            if command is None:
                print(f"{name}: left out: {why}")
                left_out += 1
                continue
            ran = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=HANGS_S, check=False
            )
            lines = ran.stdout.splitlines()
            calls = [line for line in lines if line.startswith(("ok ", "failed "))]
            for line in calls:
                print(f"{name}: {line}")
            passed += sum(line.startswith("ok ") for line in calls)
            failed += sum(line.startswith("failed ") for line in calls)
            if ran.returncode != 0 or not calls:
                failed += 1
                print(f"{name}: failed to end: exit code {ran.returncode}\n{ran.stdout}{ran.stderr}")
    print(f"{passed} passed, {failed} failed, {left_out} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
