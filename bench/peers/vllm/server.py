#!/usr/bin/env python3
"""Take vLLM's HTTP server through everything that can be asked of it around sleeping.

Writes a small checkpoint, and starts the server with it, in several processes and with the routes for
sleeping (`VLLM_SERVER_DEV_MODE=1`). It goes through the steps below in order. Each prints a JSON line with
`ok` and what was seen. A failed step does not prevent the others: the state is repaired first, with a new
server if needed. With vLLM's own allocator the same steps say what differs.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from common import (
    GIB,
    Ballast,
    emit,
    environment,
    every_line_says,
    gib,
    host_memory,
    install_entry_point,
)
from models import layers_for, write_checkpoint
from web import NEW_TOKENS, Answer, Pending, Server, free_port, server_command

LONG_TOKENS = 600
LOOK_S = 1.5  # how long a request is watched for not being answered
SLACK_GIB = 0.1
HIBERNATED_GIB = 0.01  # what a hibernating engine may hold of the card


class Visitor:
    """A server, its tokens when all is well, and how to have it well again."""

    def __init__(self, options: argparse.Namespace, model: Path, log: Path, ballast):
        self.options, self.model, self.log, self.ballast = options, model, log, ballast
        self.port = free_port()
        self.server: Server | None = None
        self.tokens: list[int] | None = None
        self.free_at_start = ballast.free()

    @property
    def client(self):
        return self.server.client

    @property
    def ours(self) -> bool:
        return self.options.mode == "poorwill"

    def begin(self, **more: str) -> dict:
        """Starts a server at the same port as ever."""
        words = ["--kv-cache-memory-bytes", str(int(self.options.kv_gib * GIB))]
        words += ["--gpu-memory-utilization", str(self.options.utilization)]
        begun = environment(self.options.mode, dict(os.environ), VLLM_SERVER_DEV_MODE="1", **more)
        self.server = Server(server_command(self.model, self.port, words), begun, self.port, self.log)
        seconds = self.server.wait_until_ready()
        answer = self.client.complete()
        if self.tokens is None:
            self.tokens = answer.tokens()
        return {"ready_s": round(seconds, 1), "right": self.right(answer), "engine": self.server.engine()}

    def right(self, answer: Answer) -> bool:
        """Whether these are the tokens that there always were."""
        return answer.good and self.tokens is not None and answer.tokens() == self.tokens

    def well(self) -> bool:
        """Awake, healthy, and right."""
        return self.right(self.client.complete()) and self.client.get("/health").good

    def restore(self) -> str | None:
        """Brings a server in order that a step has left otherwise; says how."""
        if self.server and self.server.runs:
            if self.client.sleeps() is False and self.right(self.client.complete(limit_s=20)):
                return None
            self.client.wake()
            if self.right(self.client.complete(limit_s=20)):
                return "woken"
            self.client.rpc("reload_weights")
            if self.right(self.client.complete(limit_s=20)):
                return "reloaded"
        if self.server:
            self.server.stop()
            self.ballast.settled(self.free_at_start)
        self.begin()
        return "started again"

    def used_gib(self) -> float:
        """What the server has of the card."""
        return round((self.free_at_start - self.ballast.free()) / GIB, 3)


def waits_or_refuses(pending: Pending) -> dict:
    """The result of a request that was sent without a server to serve it."""
    if pending.waits(LOOK_S):
        return {"waits": True}
    return {"waits": False, "answer": pending.result().brief(), "refused": pending.result().refused}


def outcome(visitor: Visitor, first: dict, pending: Pending) -> tuple[bool, dict]:
    """Whether a request that waited is right now, or was refused; never may it hang or be wrong."""
    if not first["waits"]:
        return bool(first["refused"]), first
    answer = pending.result()
    return visitor.right(answer), {**first, "right": visitor.right(answer), "then": answer.brief()}


def says(answer: Answer, *words: str) -> bool:
    """A refusal that names what it has to."""
    return answer.refused and all(word.lower() in answer.text.lower() for word in words)


# Each step takes the visitor, and returns whether all was well and what was seen.


def level_1(visitor: Visitor) -> tuple[bool, dict]:
    client, used = visitor.client, visitor.used_gib()
    before = client.sleeps()
    slept, asleep, left = client.sleep(1), client.sleeps(), visitor.used_gib()
    health = client.get("/health")
    woke, after = client.wake(), client.sleeps()
    right = visitor.right(client.complete())
    ok = slept.good and woke.good and (before, asleep, after) == (False, True, False) and right
    seen = {
        "sleep": slept.brief(),
        "wake": woke.brief(),
        "is_sleeping": [before, asleep, after],
        "used_gib": [used, left, visitor.used_gib()],
        "health_asleep": health.brief(),
        "right": right,
    }
    return ok and health.good and used - left > visitor.options.gib * 0.9, seen


def request_while_asleep(visitor: Visitor) -> tuple[bool, dict]:
    visitor.client.sleep(1)
    pending = Pending(visitor.client.complete)
    first = waits_or_refuses(pending)
    woke = visitor.client.wake()
    ok, seen = outcome(visitor, first, pending)
    return ok and woke.good and visitor.well(), seen


def by_tag(visitor: Visitor, order: list[str]) -> tuple[bool, dict]:
    """A request that is sent between the two tags waits or is refused as well."""
    client = visitor.client
    slept, first_wake = client.sleep(1), client.wake(order[0])
    between = client.sleeps()
    pending = Pending(client.complete)
    first = waits_or_refuses(pending)
    second_wake = client.wake(order[1])
    ok, seen = outcome(visitor, first, pending)
    after = client.sleeps()
    good = slept.good and first_wake.good and second_wake.good and between is True and after is False
    seen |= {"order": order, "is_sleeping": [between, after]}
    seen |= {"wakes": [first_wake.brief(), second_wake.brief()]}
    return ok and good and visitor.well(), seen


def weights_then_kv_cache(visitor: Visitor) -> tuple[bool, dict]:
    return by_tag(visitor, ["weights", "kv_cache"])


def kv_cache_then_weights(visitor: Visitor) -> tuple[bool, dict]:
    return by_tag(visitor, ["kv_cache", "weights"])


def unknown_tag(visitor: Visitor) -> tuple[bool, dict]:
    client = visitor.client
    client.sleep(1)
    alone, still = client.wake("nonsense"), client.sleeps()
    mixed, as_before = client.wake("weights", "nonsense"), client.sleeps()
    woke = client.wake()
    awake = client.wake("nonsense")
    seen = {
        "asleep": alone.brief(),
        "beside_a_known_one": mixed.brief(),
        "awake": awake.brief(),
        "is_sleeping": [still, as_before],
    }
    ok = (
        says(alone, "nonsense", "weights", "kv_cache") and says(mixed, "nonsense") and says(awake, "nonsense")
    )
    return ok and still is True and as_before is True and woke.good and visitor.well(), seen


def levels_that_there_are_not(visitor: Visitor) -> tuple[bool, dict]:
    answers = {level: visitor.client.sleep(level) for level in ["7", "-1", "abc"]}
    sleeping = visitor.client.sleeps()
    seen: dict = {level: answer.brief() for level, answer in answers.items()}
    ok = all(answer.refused for answer in answers.values()) and says(answers["7"], "7", "level")
    return ok and sleeping is False and visitor.well(), {**seen, "is_sleeping": sleeping}


def level_0(visitor: Visitor) -> tuple[bool, dict]:
    client, used = visitor.client, visitor.used_gib()
    slept, asleep, left = client.sleep(0), client.sleeps(), visitor.used_gib()
    pending = Pending(client.complete)
    first = waits_or_refuses(pending)
    woke = client.wake("scheduling")
    ok, seen = outcome(visitor, first, pending)
    seen |= {"used_gib": [used, left], "is_sleeping": asleep, "wake": woke.brief()}
    return ok and slept.good and woke.good and asleep is True and visitor.well(), seen


def twice_and_at_another_level(visitor: Visitor) -> tuple[bool, dict]:
    client = visitor.client
    first, again, other = client.sleep(1), client.sleep(1), client.sleep(2)
    sleeping, woke = client.sleeps(), client.wake()
    right = visitor.right(client.complete())
    seen = {"again": again.brief(), "level_2": other.brief(), "is_sleeping": sleeping, "right": right}
    ok = first.good and again.good and says(other, "level") and sleeping is True and woke.good
    return ok and right and visitor.well(), seen


def woken_twice(visitor: Visitor) -> tuple[bool, dict]:
    first = visitor.client.wake()
    visitor.client.sleep(1)
    answers = [first, visitor.client.wake(), visitor.client.wake()]
    seen = {"answers": [answer.brief() for answer in answers]}
    return all(answer.good for answer in answers) and visitor.well(), seen


def in_flight(visitor: Visitor, mode: str) -> tuple[bool, dict]:
    """A long request is under way when the sleep comes."""
    client = visitor.client
    pending = Pending(lambda: client.complete(LONG_TOKENS))
    pending.waits(1.0)
    slept = client.sleep(1, mode)
    asleep = client.sleeps()
    woke = client.wake()
    answer = pending.result()
    made, finish = len(answer.tokens() or []), answer.finish()
    whole = answer.good and made == LONG_TOKENS
    ended = whole or answer.refused or (answer.good and finish == "abort")
    ok = whole if mode in ("wait", "keep") else ended
    begins_right = (answer.tokens() or [])[:NEW_TOKENS] == visitor.tokens
    if whole:
        ok = ok and begins_right
    seen = {
        "sleep": slept.brief(),
        "request": {"status": answer.status, "seconds": answer.seconds, "tokens": made, "finish": finish},
        "begins_right": begins_right,
        "is_sleeping": asleep,
    }
    return ok and slept.good and asleep is True and woke.good and visitor.well(), seen


def in_flight_aborted(visitor: Visitor) -> tuple[bool, dict]:
    return in_flight(visitor, "abort")


def in_flight_awaited(visitor: Visitor) -> tuple[bool, dict]:
    return in_flight(visitor, "wait")


def in_flight_kept(visitor: Visitor) -> tuple[bool, dict]:
    return in_flight(visitor, "keep")


def metrics_move(visitor: Visitor) -> tuple[bool, dict]:
    before = visitor.client.metrics()
    visitor.client.sleep(1)
    visitor.client.wake()
    after = visitor.client.metrics()
    moved = {name: round(after[name] - before.get(name, 0.0), 6) for name in after}
    moved = {name: by for name, by in moved.items() if by}
    counted = moved.get("poorwill_operation_seconds_count", 0) >= 2
    ok = counted and "poorwill_host_bytes" in after and visitor.well()
    return ok, {"families": sorted(after), "moved": moved, "host_gib": gib(after.get("poorwill_host_bytes"))}


def level_2(visitor: Visitor) -> tuple[bool, dict]:
    """Between the wake and the reload no request is served, and each gets the reason."""
    client = visitor.client
    slept = client.sleep(2)
    early = Pending(client.complete)
    first = waits_or_refuses(early)
    woke = client.wake()
    health, answer = client.get("/health"), client.complete(limit_s=20)
    stream, resumed = client.complete(stream=True, limit_s=20), client.ask("/resume")
    again = client.complete(limit_s=20)
    reloaded = client.rpc("reload_weights")
    healthy, right = client.get("/health"), visitor.right(client.complete())
    ok, early_seen = outcome(visitor, first, early)
    seen = {
        "sleep": slept.brief(),
        "wake": woke.brief(),
        "sent_asleep": early_seen,
        "health": health.brief(),
        "generate": answer.brief(),
        "stream": stream.brief(),
        "resume": resumed.brief(),
        "generate_again": again.brief(),
        "reload": reloaded.brief(),
        "health_after": healthy.status,
        "right_after": right,
    }
    reported = "reload_weights" in stream.text
    refused = health.status == 503 and answer.status == 503 and says(answer, "reload_weights") and reported
    refused = refused and resumed.refused and again.refused
    return ok and refused and slept.good and woke.good and reloaded.good and healthy.good and right, seen


def level_2_by_tag(visitor: Visitor) -> tuple[bool, dict]:
    """As one reloads who wants the KV cache's room for it."""
    client = visitor.client
    slept, woke = client.sleep(2), client.wake("weights")
    reloaded = client.rpc("reload_weights")
    between, pending = client.sleeps(), Pending(client.complete)
    first = waits_or_refuses(pending)
    last = client.wake("kv_cache")
    ok, seen = outcome(visitor, first, pending)
    seen |= {"is_sleeping": between, "reload": reloaded.brief()}
    good = slept.good and woke.good and reloaded.good and last.good and between is True
    return ok and good and visitor.well(), seen


def level_2_marked(visitor: Visitor) -> tuple[bool, dict]:
    """Weights that are written by other means are reported so; here none were, and the tokens show that."""
    client = visitor.client
    client.sleep(2)
    client.wake()
    before, marked = client.get("/health"), client.rpc("poorwill_mark_restored")
    after, answer = client.get("/health"), client.complete(limit_s=20)
    reloaded = client.rpc("reload_weights")
    seen = {
        "health": [before.status, after.status],
        "marked": marked.brief(),
        "generate": answer.status,
        "right_by_chance": visitor.right(answer),
    }
    ok = before.status == 503 and marked.good and after.good and answer.good and reloaded.good
    return ok and visitor.well(), seen


def level_1_after_reload(visitor: Visitor) -> tuple[bool, dict]:
    """What was reloaded is what is backed up."""
    return level_1(visitor)


def many_cycles(visitor: Visitor) -> tuple[bool, dict]:
    right, sleeps, wakes = [], [], []
    for _ in range(10):
        sleeps.append(visitor.client.sleep(1).seconds)
        wakes.append(visitor.client.wake().seconds)
        right.append(visitor.right(visitor.client.complete()))
    return all(right), {"right": right, "sleep_s": sleeps, "wake_s": wakes}


def hibernated(visitor: Visitor) -> tuple[bool, dict]:
    """Off the card: until it is back, what needs the card is refused at once, and it is healthy."""
    client = visitor.client
    awake, bad = client.ask("/hibernate"), client.ask("/hibernate?wait_max=nonsense")
    slept, left = client.sleep(1), visitor.used_gib()
    away, rest = client.ask("/hibernate"), visitor.used_gib()
    states, health = client.get("/is_hibernating"), client.get("/health")
    again = client.ask("/hibernate")
    refused = {
        "wake": client.wake(),
        "sleep": client.sleep(1),
        "rpc": client.rpc("poorwill_status"),
        "generate": client.complete(limit_s=20),
        "stream": client.complete(stream=True, limit_s=20),
    }
    back = client.ask("/hibernate/resume")
    asleep, woke = client.sleeps(), client.wake()
    right = visitor.right(client.complete())
    seen = {
        "awake": awake.brief(),
        "bad": bad.brief(),
        "hibernate": away.brief(),
        "used_gib": [left, rest],
        "states": states.brief(),
        "health": health.status,
        "again": again.brief(),
        "refused": {name: answer.brief() for name, answer in refused.items()},
        "resume": back.brief(),
        "wake": woke.brief(),
        "right": right,
    }
    ok = awake.status == 409 and bad.status == 400 and slept.good and away.good and again.good
    ok = ok and rest <= HIBERNATED_GIB and health.good and '"checkpointed"' in states.text
    said = {name: answer.status for name, answer in refused.items()}
    ok = ok and said == {"wake": 409, "sleep": 409, "rpc": 409, "generate": 503, "stream": 503}
    return ok and back.good and asleep is True and woke.good and right and visitor.well(), seen


def stop_and_start(visitor: Visitor) -> tuple[bool, dict]:
    """Asleep, and asked to end: the next one starts at the same port, in all of the memory."""
    visitor.client.sleep(1)
    seconds = visitor.server.stop()
    free = visitor.ballast.settled(visitor.free_at_start)
    given_back = visitor.free_at_start - free <= SLACK_GIB * GIB
    started = visitor.begin()
    seen = {"stop_s": round(seconds, 2), "exit_code": visitor.server.stopped, "missing_gib": None, **started}
    seen["missing_gib"] = gib(visitor.free_at_start - free)
    return given_back and started["right"], seen


def killed(visitor: Visitor, asleep: bool) -> tuple[bool, dict]:
    """No call may hang, all memory is released, and the next server starts at the same port."""
    if visitor.server:
        visitor.server.stop()
        visitor.ballast.settled(visitor.free_at_start)
    host = host_memory()
    begun = visitor.begin(POORWILL_PREPARE="0")
    client, pid = visitor.client, visitor.server.engine()
    sleeping = Pending(lambda: client.sleep(1))
    if asleep:
        sleeping.result()
    else:
        time.sleep(visitor.options.kill_after_s)
    os.kill(pid, signal.SIGKILL)
    answer = sleeping.result()
    late = client.complete(limit_s=20)
    health = client.get("/health", limit_s=20)
    stop_s = visitor.server.stop()
    free = visitor.ballast.settled(visitor.free_at_start)
    again = visitor.begin()
    in_the_middle = not answer.good
    seen = {
        "begun": begun,
        "killed": pid,
        "sleep": answer.brief(),
        "in_the_middle": in_the_middle,
        "generate": late.brief(),
        "health": health.brief(),
        "stop_s": round(stop_s, 2),
        "missing_gib": gib(visitor.free_at_start - free),
        "host_available_gib": [host.get("MemAvailable"), host_memory().get("MemAvailable")],
        "again": again,
    }
    ok = in_the_middle != asleep and not (answer.hung or late.hung or health.hung) and not late.good
    ok = ok and not health.good and visitor.free_at_start - free <= SLACK_GIB * GIB
    return ok and again["right"], seen


def killed_in_a_sleep(visitor: Visitor) -> tuple[bool, dict]:
    return killed(visitor, asleep=False)


def killed_asleep(visitor: Visitor) -> tuple[bool, dict]:
    return killed(visitor, asleep=True)


STEPS = [
    level_1,
    request_while_asleep,
    weights_then_kv_cache,
    kv_cache_then_weights,
    unknown_tag,
    levels_that_there_are_not,
    level_0,
    twice_and_at_another_level,
    woken_twice,
    in_flight_aborted,
    in_flight_awaited,
    in_flight_kept,
    metrics_move,
    level_2,
    level_2_by_tag,
    level_2_marked,
    level_1_after_reload,
    many_cycles,
    hibernated,
    stop_and_start,
    killed_in_a_sleep,
    killed_asleep,
]


# Those that start a server of their own.
ALONE = [killed_in_a_sleep, killed_asleep]


def take(visitor: Visitor, step) -> bool:
    """One step, whatever comes of it."""
    start = time.monotonic()
    try:
        repaired = None if step in ALONE else visitor.restore()
        ok, seen = step(visitor)
        if repaired:
            seen["before_that"] = repaired
    except Exception as error:
        traceback.print_exc()
        ok, seen = False, {"error": f"{type(error).__name__}: {error}"[:3000]}
    emit("step", step=step.__name__, ok=ok, seconds=round(time.monotonic() - start, 2), **seen)
    return ok


def run(options: argparse.Namespace, folder: Path) -> bool:
    model = write_checkpoint(folder, layers_for(options.gib))
    if options.mode == "cumem" and options.counting:
        install_entry_point(folder / "plugin")
    log = folder / "server.log"
    with Ballast() as ballast:
        visitor = Visitor(options, model, log, ballast)
        wanted = options.only.split(",") if options.only else None
        steps = [step for step in STEPS if not wanted or step.__name__ in wanted]
        try:
            if any(step not in ALONE for step in steps):
                emit("server", **visitor.begin(), used_gib=visitor.used_gib())
            good = [take(visitor, step) for step in steps]
        finally:
            if visitor.server:
                visitor.server.stop()
                # Beside the JSON lines, to find out why.
                sys.stderr.write(visitor.server.last_words(200_000))
        missing = visitor.free_at_start - ballast.settled(visitor.free_at_start)
        emit("end", missing_gib=gib(missing), ok=missing <= SLACK_GIB * GIB)
    return all(good) and missing <= SLACK_GIB * GIB


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--mode", choices=["cumem", "poorwill"])
    arguments.add_argument("--gib", type=float, default=3, help="size of the checkpoint")
    arguments.add_argument("--kv-gib", type=float, default=2)
    arguments.add_argument("--utilization", type=float, default=0.5)
    arguments.add_argument("--kill-after-s", type=float, default=0.05, help="from the request to the kill")
    arguments.add_argument("--counting", action="store_true", help="cumem with the subclass that counts")
    arguments.add_argument("--only", help="names of steps, with commas between")
    arguments.add_argument("--list", action="store_true", help="print the names of the steps")
    options = arguments.parse_args(given)
    if options.mode is None and not options.list:
        arguments.error("--mode is needed: cumem or poorwill")
    return options


def main() -> None:
    options = parsed()
    if options.list:
        print("\n".join(step.__name__ for step in STEPS))
        return
    every_line_says(mode=options.mode, label="server")
    good = False
    try:
        with tempfile.TemporaryDirectory(prefix="poorwill-bench-") as folder:
            good = run(options, Path(folder))
        emit("done", ok=good)
    except Exception as error:
        traceback.print_exc()
        emit("failed", error=f"{type(error).__name__}: {error}"[:3000])
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
