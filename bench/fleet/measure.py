"""What a router adds to a request, and what a fleet at rest costs its etcd.

    cargo build --release -p poorwill-cli
    python3 bench/fleet/measure.py [--nodes 50] [--models 500] [--requests 2000] [--seconds 30] [--json]

Starts an etcd, nodes with mock engines and a router on this machine, each in a process of its own. Each
model is configured on as many nodes as `--copies` says. One model is awake and asked one request after the
other, in turn by the router and by its node, so that both see the same machine. Needs `etcd` on the path.
"""

import argparse
import contextlib
import http.client
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 10
START_S = 120
PORTS = iter(range(12_000, 32_000))
BODY = json.dumps({"model": "model-0", "prompt": "Tell me.", "max_tokens": 1, "temperature": 0})


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now, below those that the system gives to clients."""
    ports: list[int] = []
    while len(ports) < count:
        port = next(PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports


def until(what: str, is_so: Any) -> None:
    """Waits until a function returns something true."""
    began = time.monotonic()
    while True:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            if is_so():
                return
        if time.monotonic() - began > START_S:
            raise TimeoutError(f"not so within {START_S} s: {what}")
        time.sleep(0.1)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def counter(text: str, name: str) -> float:
    """The value of a metric without labels."""
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " "))


class Fleet:
    """The processes."""

    def __init__(self, poorwill: Path, folder: Path, arguments: argparse.Namespace) -> None:
        self.poorwill, self.folder, self.arguments = poorwill, folder, arguments
        self.processes: list[subprocess.Popen[bytes]] = []
        self.words: list[tuple[str, ...]] = []
        self.controls: list[int] = []
        self.etcd, peer, self.router, self.control = free_ports(4)
        self.fronts = free_ports(arguments.nodes)
        self.start(
            *("etcd", "--data-dir", str(folder / "etcd"), "--listen-peer-urls", f"http://127.0.0.1:{peer}"),
            *("--listen-client-urls", f"http://127.0.0.1:{self.etcd}"),
            *("--advertise-client-urls", f"http://127.0.0.1:{self.etcd}"),
        )
        until("etcd is healthy", lambda: "true" in get(f"http://127.0.0.1:{self.etcd}/health"))

    def start(self, *words: str) -> None:
        self.processes.append(self.spawned(len(self.processes), *words))
        self.words.append(words)

    def spawned(self, nth: int, *words: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"log{nth}").open("ab")
        return subprocess.Popen(words, stdout=log, stderr=log, cwd=self.folder)

    def configured_on(self, model: int) -> list[int]:
        nodes = self.arguments.nodes
        return [(model + copy * 7) % nodes for copy in range(min(self.arguments.copies, nodes))]

    def table(self, more: str) -> str:
        return (
            f'[fleet]\nname = "bench"\netcd = ["http://127.0.0.1:{self.etcd}"]\nlease = "{LEASE_S}s"\n{more}'
        )

    def start_nodes(self) -> None:
        engines = iter(free_ports(self.arguments.models * self.arguments.copies + self.arguments.nodes))
        models: dict[int, list[int]] = {}
        for model in range(self.arguments.models):
            for node in self.configured_on(model):
                models.setdefault(node, []).append(model)
        for node, front in enumerate(self.fronts):
            text = self.table(f'node = "node-{node}"\ndomain = "rack-{node % 5}"\n')
            # A thousand mock engines would measure this machine.
            text = f'state = "state{node}"\n' + text + "prepare = false\n"
            self.controls.append(next(engines))
            text += f'[front]\nlisten = "127.0.0.1:{front}"\n'
            text += f'[control]\nlisten = "127.0.0.1:{self.controls[-1]}"\n'
            text += '[memory]\nmeasure = "processes"\ngpu = "8GiB"\n'
            for model in models.get(node, []):
                listen = f"127.0.0.1:{next(engines)}"
                command = [str(self.poorwill), "mock-engine", "--listen", listen, "--model", f"model-{model}"]
                command += ["--bytes", "16MiB", "--tokens-per-s", "100000"]
                text += f'[[model]]\nname = "model-{model}"\nurl = "http://{listen}"\nneed = "16MiB"\n'
                text += f"command = {json.dumps(command)}\n"
            (self.folder / f"node{node}.toml").write_text(text)
            self.start(str(self.poorwill), "rotate", "--config", f"node{node}.toml")

    def start_router(self) -> None:
        text = self.table("") + f'[front]\nlisten = "127.0.0.1:{self.router}"\n'
        (self.folder / "fleet.toml").write_text(text)
        self.start(str(self.poorwill), "route", "--config", "fleet.toml")
        until("the router listens", lambda: "ok" in get(f"http://127.0.0.1:{self.router}/health"))

    def status(self) -> Any:
        words = [str(self.poorwill), "fleet", "status", "--json"]
        ran = subprocess.run(words, cwd=self.folder, capture_output=True, check=True)
        return json.loads(ran.stdout)

    def end(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def running(poorwill: Path, arguments: argparse.Namespace) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(poorwill, Path(folder), arguments)
        try:
            fleet.start_nodes()
            fleet.start_router()
            yield fleet
        finally:
            fleet.end()


def asked(connection: http.client.HTTPConnection) -> float:
    """How long one request takes, in microseconds."""
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", BODY, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}")
    return (time.perf_counter() - began) * 1e6


def is_served(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        asked(connection)
    except RuntimeError:
        return False
    return True


def latencies(fleet: Fleet) -> dict[str, float]:
    """Of the router, and of the node that it sends the requests to."""
    until("the router serves", lambda: is_served(fleet.router))

    def awake() -> list[int]:
        copies = [copy for copy in fleet.status()["models"] if copy["model"] == "model-0"]
        return [int(copy["node"].split("-")[1]) for copy in copies if copy["stage"] == "awake"]

    until("the model is awake on one node", lambda: len(awake()) == 1)
    [node] = awake()
    ports = {"router": fleet.router, "node": fleet.fronts[node]}
    connections = {name: http.client.HTTPConnection("127.0.0.1", port) for name, port in ports.items()}
    times: dict[str, list[float]] = {name: [] for name in ports}
    for nth in range(fleet.arguments.requests + 100):
        for name, connection in connections.items():
            took = asked(connection)
            if nth >= 100:
                times[name].append(took)
    parts = {name: statistics.quantiles(each, n=100) for name, each in times.items()}
    return {f"{name}_p{part}_us": all_[part - 1] for name, all_ in parts.items() for part in (50, 99)}


def at_rest(fleet: Fleet) -> dict[str, float]:
    """What etcd carries out while nothing changes."""
    url = f"http://127.0.0.1:{fleet.etcd}/metrics"
    names = {"writes": "etcd_server_proposals_applied_total", "puts": "etcd_mvcc_put_total"}
    before, began = get(url), time.monotonic()
    time.sleep(fleet.arguments.seconds)
    after, took = get(url), time.monotonic() - began
    change = {what: counter(after, name) - counter(before, name) for what, name in names.items()}
    return {f"{what}_per_s": value / took for what, value in change.items()}


def parsed(description: str | None, **options: float) -> argparse.Namespace:
    """What the command line says of these options, which have these values if it says nothing."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in options.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--poorwill", type=Path, default=ROOT / "target/release/poorwill")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if shutil.which("etcd") is None or not arguments.poorwill.exists():
        sys.exit(f"needs etcd on the path (Debian: etcd-server) and {arguments.poorwill}")
    return arguments


def main() -> None:
    arguments = parsed(__doc__, nodes=50, models=500, copies=2, requests=2000, seconds=30.0)
    with running(arguments.poorwill.resolve(), arguments) as fleet:
        wanted = sum(len(set(fleet.configured_on(model))) for model in range(arguments.models))
        began = time.monotonic()
        until("every model is placed", lambda: placed(fleet) == wanted)
        figures = {"nodes": arguments.nodes, "models": arguments.models, "placed_s": time.monotonic() - began}
        figures |= at_rest(fleet)
        figures |= latencies(fleet)
    figures["router_adds_p50_us"] = figures["router_p50_us"] - figures["node_p50_us"]
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:24} {value:10.1f}")


def placed(fleet: Fleet) -> int:
    return sum(copy["goal"] != "none" for copy in fleet.status()["models"])


if __name__ == "__main__":
    main()
