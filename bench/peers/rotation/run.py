#!/usr/bin/env python3
"""Measure `poorwill rotate` beside nginx and beside its engines, in one go, into one JSON file.

Three parts: `proxy` (requests at a rate, one core for the proxy), `streams` (gaps between tokens), and
`swaps` (two models of which one fits). The order of the routes to the engine rotates from round to round.
table.py reads the file.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

import load
import swaps
from figures import cpus_of, of_streams
from programs import (
    Children,
    Failed,
    Missing,
    ask,
    end,
    family_cpu_s,
    found,
    free_ports,
    llama_swap_yaml,
    machine,
    nginx_engine,
    nginx_lacks,
    nginx_proxy,
    pinned,
    rotation_toml,
    said,
    stand_in,
    start_llama_swap,
    start_nginx,
    start_rotation,
    until_ready,
)

HERE = Path(__file__).resolve().parent
PARTS = ("proxy", "streams", "swaps")
ROUTES = ("direct", "nginx", "poorwill")
# Where it is given.
LLAMA_SWAP = "llama-swap"
# The same proxies without a line of log for each request.
UNLOGGED = ("nginx-unlogged", "poorwill-unlogged")
MODEL = "bench"
ANSWER_BYTES = 1024
TOKENS_PER_S = 100  # a token each 10 ms
IDLE_LOAD = 0.5


def rotated(names: tuple[str, ...], turn: int) -> list[str]:
    """The names, each turn beginning with the next."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def answers(port: int) -> bool:
    """Whether a request is answered. llama-swap starts its model for the first."""
    return ask(port, "POST", "/v1/chat/completions", json.loads(load.chat(MODEL, 1024)))[0] == 200


def routes_of(programs: dict) -> tuple[str, ...]:
    return (*ROUTES, LLAMA_SWAP) if LLAMA_SWAP in programs else ROUTES


def proxies(
    children: Children, programs: dict, cpus: list[int], to: int, routes: tuple[str, ...]
) -> dict[str, tuple[int, subprocess.Popen]]:
    """Starts those that are wanted in front of an engine: where each listens, and its process."""
    started = {}
    for way in routes:
        is_logged = not way.endswith("-unlogged")
        front, control = free_ports(2)
        name = f"{way}-to-{to}"
        if way.startswith("nginx"):
            server = nginx_proxy(front, to)
            process = start_nginx(
                children, programs["nginx"], programs["nginx_lacks"], name, cpus, server, is_logged
            )
            children.until_answers(name, process, front)
        elif way == LLAMA_SWAP:
            yaml = llama_swap_yaml(MODEL, to)
            process = start_llama_swap(children, programs[LLAMA_SWAP], name, cpus, front, yaml)
            children.until(name, process, lambda port=front: answers(port))
        else:
            models = [{"name": MODEL, "port": to}]
            toml = rotation_toml(children.folder / name, front, control, "1GiB", "", models)
            level = "info" if is_logged else "warn"
            process = start_rotation(children, programs["poorwill"], name, cpus, toml, level)
            until_ready(children, name, process, control)
        started[way] = (front, process)
    return started


def measure_proxy(children: Children, programs: dict, options: argparse.Namespace) -> list[dict]:
    (engine,) = free_ports(1)
    server = nginx_engine(engine, load.answer(ANSWER_BYTES))
    lacks = programs["nginx_lacks"]
    upstream = start_nginx(children, programs["nginx"], lacks, "engine", options.load_cpus, server, False)
    children.until_answers("engine", upstream, engine)
    usual = routes_of(programs)
    started = proxies(children, programs, options.proxy_cpus, engine, (*usual[1:], *UNLOGGED))
    bodies = {}
    for bytes_ in options.bodies:
        bodies[bytes_] = children.folder / f"body-{bytes_}.json"
        bodies[bytes_].write_bytes(load.chat(MODEL, bytes_))
    measured = []

    def once(way: str, bytes_: int, rate: int, seconds: float) -> tuple[dict, list[str]]:
        port, process = started.get(way, (engine, None))
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        count = max(int(rate * seconds), 1)
        command = load.oha_command(
            programs["oha"],
            programs["oha_flags"],
            url,
            str(bodies[bytes_]),
            rate,
            seconds,
            options.connections,
        )
        command = pinned(options.load_cpus, command)
        before_s = family_cpu_s(process.pid) if process else None
        printed = children.run(command, seconds * 3 + 60)
        used_s = family_cpu_s(process.pid) - before_s if process else None
        figures = load.of_oha(printed, count)
        figures["cpu_us"] = used_s * 1e6 / count if process else None
        return figures, command

    middle = options.rates[len(options.rates) // 2]
    for turn in range(options.rounds):
        for bytes_ in options.bodies:
            for rate in options.rates:
                has_unlogged = rate == middle and bytes_ == options.bodies[0]
                routes = (*usual, *UNLOGGED) if has_unlogged else usual
                for way in rotated(routes, turn):
                    record = {"round": turn + 1, "way": way, "body_bytes": bytes_, "rate": rate}
                    try:
                        once(way, bytes_, rate, min(1.0, options.seconds))
                        figures, record["command"] = once(way, bytes_, rate, options.seconds)
                        record |= figures
                    except (Failed, ValueError, KeyError) as error:
                        record["failed"] = f"{type(error).__name__}: {error}"
                    measured.append(record)
                    tell_proxy(record)
    for _, process in started.values():
        end(process)
    end(upstream)
    return measured


def tell_proxy(record: dict) -> None:
    what = f"{record['round']} {record['way']} {record['body_bytes']} B at {record['rate']}/s"
    if "failed" in record:
        return tell(f"{what}: {record['failed']}")
    cpu = f", CPU {record['cpu_us']:.0f} us a request" if record["cpu_us"] is not None else ""
    return tell(f"{what}: p50 {record['p50_ms']:.3f} ms, p99 {record['p99_ms']:.3f} ms{cpu}")


class Tapped:
    """An engine behind a tap that records when what came out."""

    def __init__(self, children: Children, engine: int, cpus: list[int]):
        command = pinned(cpus, [sys.executable, "-B", str(HERE / "tap.py"), "--to", f"127.0.0.1:{engine}"])
        self.process = children.start("tap", command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        line = self.process.stdout.readline().decode()
        if not line.startswith("listening on "):
            raise Failed(f"the tap does not listen: {children.log('tap')}")
        self.port = int(line.split()[-1])

    def times(self) -> dict[str, list[int]]:
        printed, _ = self.process.communicate(timeout=30)
        return json.loads(printed)


def measure_streams(children: Children, programs: dict, options: argparse.Namespace) -> list[dict]:
    (engine,) = free_ports(1)
    command = stand_in(programs["poorwill"], engine, MODEL, "1MiB", TOKENS_PER_S)
    process = children.start("streaming", pinned(options.load_cpus, command))
    children.until_answers("streaming", process, engine)
    tapped = Tapped(children, engine, options.load_cpus)
    routes = routes_of(programs)
    started = proxies(children, programs, options.proxy_cpus, tapped.port, routes[1:])
    os.sched_setaffinity(0, options.load_cpus)  # the clients are here
    limit_s = options.tokens / TOKENS_PER_S * 4 + 30
    at_client, measured = {}, []
    for turn in range(options.rounds):
        for way in rotated(routes, turn):
            port = started[way][0] if way in started else tapped.port
            record = {"round": turn + 1, "way": way, "streams": options.streams, "tokens": options.tokens}
            names = [f"{way}-{turn + 1}-{nth}" for nth in range(options.streams)]
            try:
                # Connections and caches are those of a proxy that has been in use.
                asyncio.run(load.streams(port, MODEL, [f"warm-{name}" for name in names], 20, limit_s))
                came = asyncio.run(load.streams(port, MODEL, names, options.tokens, limit_s))
                at_client[way, turn] = came
            except (OSError, ValueError, TimeoutError, asyncio.TimeoutError) as error:
                record["failed"] = f"{type(error).__name__}: {error}"
            measured.append(record)
            tell(f"{turn + 1} {way}: {options.streams} streams of {options.tokens} tokens")
    os.sched_setaffinity(0, options.cpus)
    at_engine = tapped.times()
    for record in measured:
        came = at_client.get((record["way"], record["round"] - 1))
        if came is not None:
            try:
                record |= of_streams(at_engine, came)
            except ValueError as error:
                record["failed"] = str(error)
    for _, one in started.values():
        end(one)
    end(process)
    return measured


def positive(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number from 1 on")
    return number


def several(text: str) -> list[int]:
    return [positive(part.strip()) for part in text.split(",")]


def cpu_list(text: str) -> list[int]:
    try:
        return cpus_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parts(text: str) -> list[str]:
    wanted = text.split(",")
    if unknown := [part for part in wanted if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"`{unknown[0]}` is none of {', '.join(PARTS)}")
    return wanted


def read_options(argv: list[str] | None) -> argparse.Namespace:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--poorwill", required=True, help="poorwill's program, built for release")
    arguments.add_argument("--out", required=True, type=Path, help="JSON file to write")
    arguments.add_argument("--oha", default="oha")
    arguments.add_argument("--nginx", default="nginx")
    arguments.add_argument("--llama-swap", help="its program, to be measured as well")
    arguments.add_argument("--only", type=parts, default=list(PARTS), metavar="PARTS", help=",".join(PARTS))
    arguments.add_argument("--rounds", type=positive, default=3)
    arguments.add_argument("--rates", type=several, default=[200, 500, 1000], help="requests a second")
    arguments.add_argument("--bodies", type=several, default=[1024, 65536], help="bytes of a request's body")
    arguments.add_argument("--seconds", type=positive, default=10, help="how long each rate lasts")
    arguments.add_argument("--connections", type=positive, default=32)
    arguments.add_argument("--streams", type=positive, default=16, help="how many at a time")
    arguments.add_argument("--tokens", type=positive, default=500, help="of each stream, 10 ms apart")
    arguments.add_argument("--swaps", type=positive, default=20)
    arguments.add_argument("--proxy-cpus", type=cpu_list, help="the first that there is, if not said")
    arguments.add_argument("--load-cpus", type=cpu_list, help="for engine and clients; all the others")
    options = arguments.parse_args(argv)
    options.cpus = sorted(os.sched_getaffinity(0))
    options.proxy_cpus = options.proxy_cpus or options.cpus[:1]
    others = [cpu for cpu in options.cpus if cpu not in options.proxy_cpus]
    options.load_cpus = options.load_cpus or others
    if missing := [cpu for cpu in options.proxy_cpus + options.load_cpus if cpu not in options.cpus]:
        arguments.error(f"there is no processor {missing[0]} here; there are {options.cpus}")
    if not options.load_cpus or set(options.load_cpus) & set(options.proxy_cpus):
        arguments.error("the proxy and its clients need processors of their own: two at least")
    if not options.out.resolve().parent.is_dir():
        arguments.error(f"--out: there is no folder {options.out.resolve().parent}")
    try:
        options.programs = read_programs(options)
    except (Missing, ValueError) as error:
        arguments.error(str(error))
    return options


def read_programs(options: argparse.Namespace) -> dict:
    """Where the programs are that the parts need, and which versions."""
    programs: dict = {
        "poorwill": found(options.poorwill, "--poorwill", "cargo build --release -p poorwill-cli makes it")
    }
    versions = {"poorwill": said([programs["poorwill"], "--version"], "--poorwill")}
    if not versions["poorwill"].startswith("poorwill "):
        raise Missing(
            f"--poorwill: `{options.poorwill}` says `{versions['poorwill'][:80]}`, and is not poorwill"
        )
    if {"proxy", "streams"} & set(options.only):
        found("taskset", "taskset", "it is part of util-linux")
        programs["nginx"] = found(options.nginx, "--nginx", "install nginx-light, or say where it is")
        versions["nginx"] = said([programs["nginx"], "-V"], "--nginx")
        if "nginx version" not in versions["nginx"]:
            raise Missing(f"--nginx: `{options.nginx}` is not nginx")
        programs["nginx_lacks"] = nginx_lacks(versions["nginx"])
        if options.llama_swap:
            programs[LLAMA_SWAP] = found(options.llama_swap, "--llama-swap", "build it from its source")
            versions[LLAMA_SWAP] = "llama-swap " + said([programs[LLAMA_SWAP], "-version"], "--llama-swap")
    if "proxy" in options.only:
        programs["oha"] = found(options.oha, "--oha", "cargo install oha --locked, or say where it is")
        versions["oha"] = said([programs["oha"], "--version"], "--oha")
        programs["oha_flags"] = load.flags(said([programs["oha"], "--help"], "--oha"))
    programs["versions"] = versions
    return programs


def main(argv: list[str] | None = None) -> int:
    options = read_options(argv)
    programs = options.programs
    # So that everybody is ended who was started, whatever ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    result = {
        "what": "rotation",
        "began": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.argv],
        "machine": machine(),
        "versions": programs["versions"],
        "options": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(options).items()
            if name != "programs"
        },
    }
    busy = result["machine"]["load_average_before"][0]
    if busy > IDLE_LOAD:
        tell(f"the load average is {busy:.2f}: figures that count need a machine with nothing else to do")
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="poorwill-rotation-") as folder,
        Children(Path(folder)) as children,
    ):
        try:
            if "proxy" in options.only:
                result["proxy"] = measure_proxy(children, programs, options)
            if "streams" in options.only:
                result["streams"] = measure_streams(children, programs, options)
            if "swaps" in options.only:
                result["swaps"] = swaps.measure(children, programs["poorwill"], options.swaps)
        except (Failed, OSError) as error:
            result["failed"] = str(error)
            tell(f"error: {error}")
        result["started"] = children.commands
    result["seconds"] = time.monotonic() - began
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    failures = [one for part in ("proxy", "streams") for one in result.get(part, []) if "failed" in one]
    tell(f"{options.out}: {result['seconds']:.0f} s, {len(failures)} measurements failed")
    return 1 if failures or "failed" in result else 0


if __name__ == "__main__":
    sys.exit(main())
