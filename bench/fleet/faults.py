"""What clients of a fleet notice when a part of it is gone.

    cargo build --release -p poorwill-cli
    python3 bench/fleet/faults.py [--nodes 5] [--models 10] [--clients 8] [--away 60] [--kills 10] [--json]

Starts an etcd, nodes with mock engines and a router on this machine, and clients that ask one request after
the other. Then etcd is killed and started again after `--away` seconds; etcd's data are lost; the process of
a node is killed and started at once, its engines live; and a node is killed with its engines. Each waits
until all models answer again.
Needs `etcd` on the path.
"""

import contextlib
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import LEASE_S, Fleet, get, parsed, running, until

Answer = tuple[float, float, str, int]


class Clients:
    """Ask all the time. Of each answer they keep when it was asked for and came, its model and status."""

    def __init__(self, fleet: Fleet, count: int) -> None:
        self.fleet, self.answers, self.is_over = fleet, list[Answer](), False
        self.asked: dict[int, float] = {}
        self.threads = [threading.Thread(target=self.run, args=(nth,)) for nth in range(count)]
        for thread in self.threads:
            thread.start()

    def run(self, number: int) -> None:
        nth = number
        while not self.is_over:
            model = f"model-{nth % self.fleet.arguments.models}"
            began = self.asked[number] = time.monotonic()
            status = ask(self.fleet.router, model)
            self.answers.append((began, time.monotonic(), model, status))
            nth += 1
            time.sleep(0.02)

    def end(self) -> None:
        self.is_over = True
        for thread in self.threads:
            thread.join()

    def since(self, began: float) -> dict[str, Any]:
        """What became of requests from then on, and the longest time without a right answer of a model."""
        now = time.monotonic()
        answers = [answer for answer in list(self.answers) if answer[1] >= began]
        statuses = Counter(answer[3] for answer in answers)
        gaps = []
        for nth in range(self.fleet.arguments.models):
            ends = (end for _, end, of, status in answers if of == f"model-{nth}" and status == 200)
            right = [began, *sorted(ends), now]
            gaps.append(max(later - one for one, later in itertools.pairwise(right)))
        return {
            "answered": statuses[200],
            "refused": sum(count for status, count in statuses.items() if status not in (0, 200)),
            "unanswered": statuses[0],
            "longest_open_s": round(max(0.0, *(now - asked for asked in self.asked.values())), 3),
            "gap_p50_s": round(statistics.median(gaps), 3),
            "gap_max_s": round(max(gaps), 3),
        }


def ask(port: int, model: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps({"model": model, "prompt": "Tell me.", "max_tokens": 4, "temperature": 0})
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    return 0


def all_answer(fleet: Fleet) -> bool:
    return all(ask(fleet.router, f"model-{nth}") == 200 for nth in range(fleet.arguments.models))


def restarts(fleet: Fleet) -> int:
    """How often engines were started again on their node, by the nodes' logs."""
    again = 0
    for nth in range(1, 1 + fleet.arguments.nodes):
        log = (fleet.folder / f"log{nth}").read_text(errors="replace")
        started = Counter(re.findall(r"model=\"?([\w-]+).*stage=starting", log))
        again += sum(count - 1 for count in started.values())
    return again


def engines(node: subprocess.Popen[bytes]) -> list[int]:
    """The processes that a node has started."""
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children")
    threads = Path(f"/proc/{node.pid}/task").iterdir()
    read = ((thread / "children").read_text().split() for thread in threads if children.exists())
    return [int(pid) for pids in read for pid in pids]


@contextlib.contextmanager
def fault(clients: Clients, what: str, figures: dict[str, Any]) -> Iterator[None]:
    began, before = time.monotonic(), restarts(clients.fleet)
    yield
    until("all models answer", lambda: all_answer(clients.fleet))
    time.sleep(1)
    figures[what] = clients.since(began) | {"restarts": restarts(clients.fleet) - before}


def restarted(fleet: Fleet, nth: int) -> None:
    """Starts a process again that has ended."""
    old = fleet.processes[nth]
    old.wait()
    fleet.processes[nth] = fleet.spawned(nth, *fleet.words[nth])


def measure(fleet: Fleet, clients: Clients) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    until("all models answer", lambda: all_answer(fleet))
    with fault(clients, "nothing", figures):
        time.sleep(10)
    with fault(clients, f"etcd away for {fleet.arguments.away:g} s", figures):
        fleet.processes[0].kill()
        time.sleep(fleet.arguments.away)
        restarted(fleet, 0)
        time.sleep(LEASE_S)
    with fault(clients, "etcd's data lost", figures):
        fleet.processes[0].kill()
        fleet.processes[0].wait()
        shutil.rmtree(fleet.folder / "etcd")
        restarted(fleet, 0)
        time.sleep(LEASE_S)
    back = []
    with fault(clients, "a node's process killed, its engines live", figures):
        for kill in range(fleet.arguments.kills):
            node = kill % fleet.arguments.nodes
            fleet.processes[1 + node].kill()
            began = time.monotonic()
            restarted(fleet, 1 + node)
            url = f"http://127.0.0.1:{fleet.controls[node]}/fleet/ready"
            until("the node is back", lambda url=url: "ok" in get(url))
            back.append(time.monotonic() - began)
            time.sleep(1)
    figures["node back"] = {"p50_s": round(statistics.median(back), 3), "max_s": round(max(back), 3)}
    with fault(clients, "a node killed with its engines", figures):
        victims = engines(fleet.processes[1])
        fleet.processes[1].kill()
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(2 * LEASE_S)
    return figures


def main() -> None:
    arguments = parsed(__doc__, nodes=5, models=10, copies=2, clients=8, away=60.0, kills=10)
    with running(arguments.poorwill.resolve(), arguments) as fleet:
        until("every model has answered", lambda: all_answer(fleet))
        clients = Clients(fleet, arguments.clients)
        try:
            figures = measure(fleet, clients)
        finally:
            clients.end()
    if arguments.json:
        print(json.dumps(figures))
    else:
        for what, of in figures.items():
            print(f"{what:44} " + "  ".join(f"{name} {value}" for name, value in of.items()))


if __name__ == "__main__":
    main()
