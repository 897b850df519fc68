#!/usr/bin/env python3
"""Holds the scripts here to what they say, with scripts in the programs' place; needs no nginx and no oha."""

# There may be no pytest where this runs.
# ruff: noqa: PT009, PT027

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

import figures
import load
import programs
import table

HERE = Path(__file__).resolve().parent
HANGS_S = 60
NGINX = "nginx version: nginx/1.22.1"
OHA_HELP = "--no-tui --latency-correction --output-format <OUTPUT_FORMAT>"


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def stage(model: str, before: str, seconds: float) -> dict:
    return {"event": "stage", "model": model, "before": before, "before_s": seconds, "stage": "next"}


def swap_events() -> list[dict]:
    leaving = [stage("amber", name, 0.01) for name in figures.LEAVING]
    coming = [stage("birch", name, 0.02) for name in figures.COMING]
    resting = [stage("amber", "ready", 9.0), stage("birch", "asleep", 9.0)]
    return [resting[0], *leaving, resting[1], *coming, {"event": "ready", "model": "birch"}]


class Names(unittest.TestCase):
    def test_stages_are_those_that_the_service_reports(self):
        page = (HERE.parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
        for name in (*figures.LEAVING, *figures.COMING, *figures.ENGINES, figures.CANARY):
            self.assertIn(f"`{name}`", page)


class Arithmetic(unittest.TestCase):
    def test_percentiles_are_values_that_were_there(self):
        values = [float(value) for value in range(1, 101)]
        self.assertEqual([figures.percentile(values, share) for share in (0.5, 0.99, 1.0)], [50, 99, 100])
        self.assertEqual(figures.percentile([3.0, 1.0, 2.0], 0.5), 2.0)
        self.assertEqual(figures.percentile([7.0], 0.99), 7.0)
        self.assertEqual(figures.spread([1.0, 9.0]), {"p50": 1.0, "p99": 9.0, "max": 9.0, "count": 2})
        with self.assertRaises(ValueError):
            figures.percentile([], 0.5)

    def test_events_are_counted_wherever_the_bytes_are_cut(self):
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        stream = head + b"".join(b"9\r\ndata: %d\n\n\r\n" % nth for nth in range(3)) + b"0\r\n\r\n"
        for size in range(1, len(stream)):
            events = figures.Events()
            for at in range(0, len(stream), size):
                events.take(at, stream[at : at + size])
            self.assertEqual(len(events.times_ns), 3, size)
        events = figures.Events()
        events.take(5, b"data: 1\n\ndata: 2\n")
        events.take(6, b"\n")
        events.take(7, b"\n")
        self.assertEqual(events.times_ns, [5, 6])

    def test_gaps_leave_the_last_event_out_and_delays_do_not(self):
        own = {"a": [0, 10_000_000, 20_000_000, 20_000_000]}
        seen = {"a": [1_000_000, 11_000_000, 26_000_000, 26_000_000]}
        found = figures.of_streams(own, seen)
        self.assertEqual(found["own_gap_ms"], figures.spread([10.0, 10.0]))
        self.assertEqual(found["gap_ms"], figures.spread([10.0, 15.0]))
        self.assertEqual(found["delay_ms"], figures.spread([1.0, 1.0, 6.0, 6.0]))
        for other in [{}, {"a": [0]}]:
            with self.assertRaises(ValueError):
                figures.of_streams(other, seen)

    def test_what_is_nobodys_in_a_swap_is_the_rotations(self):
        swap = figures.of_swap(swap_events(), "amber", "birch", whole_s=0.25, answer_s=0.01)
        self.assertAlmostEqual(swap["engines_s"], 0.03)
        self.assertAlmostEqual(swap["canary_s"], 0.02)
        self.assertAlmostEqual(swap["own_s"], 0.25 - 0.01 - 0.03 - 0.02)
        self.assertAlmostEqual(swap["untold_s"], 0.25 - 0.01 - 4 * 0.01 - 5 * 0.02)
        found = figures.of_swaps([swap], [{"sleep_s": 0.01, "wake_s": 0.02}])
        self.assertAlmostEqual(found["own_ms"]["p50"], 190.0)
        self.assertAlmostEqual(found["over_direct_ms"], 220.0 - 30.0)

    def test_what_is_no_plain_swap_is_refused(self):
        for events, word in [
            ([*swap_events(), stage("birch", "starting", 1.0)], "starting"),
            (swap_events()[:-3], "measuring"),
            ([], "draining"),
        ]:
            with self.assertRaises(ValueError) as caught:
                figures.of_swap(events, "amber", "birch", 1.0, 0.1)
            self.assertIn(word, str(caught.exception))

    def test_processors_are_read_as_linux_writes_them(self):
        self.assertEqual(figures.cpus_of("0-2, 5"), [0, 1, 2, 5])
        for wrong in ["", "a", "1-", "-1", "0,0", "3-2"]:
            with self.assertRaises(ValueError):
                figures.cpus_of(wrong)

    def test_a_process_may_be_called_anything(self):
        stat = "7 (a) b (c) S 3 7 7 0 -1 4194560 1 0 0 0 11 22 1 1 20 0 1 0 5 0 0"
        self.assertEqual((figures.parent_of(stat), figures.ticks_of(stat)), (3, 33))


class Load(unittest.TestCase):
    def test_bodies_have_the_size_that_was_asked_for(self):
        for size in [256, 1024, 65536]:
            body = load.chat("bench", size)
            self.assertEqual((len(body), json.loads(body)["model"]), (size, "bench"))
        with self.assertRaises(ValueError):
            load.chat("bench", 20)
        self.assertEqual(len(load.answer(1024)), 1024)
        self.assertEqual(json.loads(load.answer(1024))["object"], "chat.completion")

    def test_flags_are_those_that_this_oha_has(self):
        self.assertEqual(load.flags(OHA_HELP)[-2:], ["--output-format", "json"])
        self.assertEqual(load.flags("--no-tui --latency-correction -j, --json")[-1], "--json")
        for lacking in ["--no-tui --json", "--no-tui --latency-correction"]:
            with self.assertRaises(ValueError):
                load.flags(lacking)

    def test_only_answers_count(self):
        said = {
            "summary": {"requestsPerSec": 99.5, "slowest": 0.004},
            "latencyPercentiles": {"p50": 0.001, "p99": 0.002},
            "statusCodeDistribution": {"200": 100},
            "errorDistribution": {},
        }
        found = load.of_oha(json.dumps(said), 100)
        self.assertEqual((found["requests"], found["p50_ms"], found["max_ms"]), (100, 1.0, 4.0))
        for other in [
            {"statusCodeDistribution": {"200": 99}},
            {"statusCodeDistribution": {"200": 100, "503": 1}},
            {"errorDistribution": {"connection refused": 1}},
        ]:
            with self.assertRaises(ValueError):
                load.of_oha(json.dumps({**said, **other}), 100)


class Configurations(unittest.TestCase):
    def test_nginx_is_given_only_what_it_was_built_with(self):
        folder = Path("/nowhere/of ours")
        lacks = programs.nginx_lacks("--without-http_scgi_module --without-http_uwsgi_module")
        text = programs.nginx_conf(folder, lacks, programs.nginx_proxy(1, 2), is_logged=True)
        self.assertIn('fastcgi_temp_path "/nowhere/of ours/fastcgi";', text)
        self.assertNotIn(" scgi_temp_path", text)
        self.assertIn('access_log "/nowhere/of ours/access.log";', text)
        unlogged = programs.nginx_conf(folder, set(), "", is_logged=False)
        self.assertIn("access_log off", unlogged)
        self.assertEqual(text.count("{"), text.count("}"))

    def test_an_engines_answer_is_reported_as_it_is(self):
        self.assertIn(load.answer(1024), programs.nginx_engine(1, load.answer(1024)))
        for wrong in ["$host", "it's", "\\n"]:
            with self.assertRaises(ValueError):
                programs.nginx_engine(1, wrong)

    def test_a_rotation_is_toml(self):
        try:
            import tomllib
        except ImportError:
            self.skipTest("this Python reads no TOML")
        models = [{"name": "a", "port": 3}, {"name": "b", "port": 4, "need": "1GiB", "command": ['x"', "y"]}]
        read = tomllib.loads(programs.rotation_toml(Path('/a "b"'), 1, 2, "8GiB", "", models))
        self.assertEqual(read["front"]["listen"], "127.0.0.1:1")
        self.assertEqual(read["model"][1]["command"], ['x"', "y"])
        self.assertNotIn("command", read["model"][0])


class Processes(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_the_time_of_a_process_is_what_it_says_itself(self):
        before = time.process_time()
        counted = programs.cpu_s(os.getpid())
        self.assertTrue(before <= counted <= time.process_time())

    def test_everybody_is_ended_who_was_started(self):
        with programs.Children(self.folder) as children:
            # One that hears no signal, and one that has left its parent.
            command = ["sh", "-c", "setsid sleep 600 & trap '' TERM; sleep 0.2; exec sleep 5"]
            process = children.start("some", command)
            children.until("some", process, lambda: len(programs.marked(children.mark)) > 1)
            self.assertGreater(len(programs.family(process.pid)), 1)
        self.assertEqual(programs.marked(children.mark), [])

    def test_ends_and_failures_are_reported_with_their_messages(self):
        with programs.Children(self.folder) as children:
            self.assertEqual(children.run(["echo", "words"], HANGS_S), "words\n")
            with self.assertRaisesRegex(programs.Failed, "it broke"):
                children.run(["sh", "-c", "echo it broke >&2; exit 3"], HANGS_S)
            with self.assertRaisesRegex(programs.Failed, "still ran"):
                children.run(["sleep", "600"], 0.01)
            self.assertEqual(programs.marked(children.mark), [])
            process = children.start("gone", ["sh", "-c", "echo no port >&2; exit 4"])
            with self.assertRaisesRegex(programs.Failed, "ended with 4: no port"):
                children.until("gone", process, lambda: False)

    def test_a_tap_sees_what_its_clients_see(self):
        tokens = 4
        engine = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(engine.close)
        threading.Thread(target=stream_twice, args=(engine, tokens), daemon=True).start()
        command = [sys.executable, "-B", str(HERE / "tap.py"), "--to"]
        tap = subprocess.Popen(
            [*command, f"127.0.0.1:{engine.getsockname()[1]}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.addCleanup(tap.stdout.close)
        self.addCleanup(tap.wait)
        self.addCleanup(tap.kill)
        port = int(tap.stdout.readline().split()[-1])
        seen = asyncio.run(load.streams(port, "bench", ["one", "two"], tokens, HANGS_S))
        printed, _ = tap.communicate(timeout=HANGS_S)
        own = json.loads(printed)
        self.assertEqual(set(own), {"one", "two"})
        found = figures.of_streams(own, seen)
        self.assertEqual(found["gap_ms"]["count"], 2 * tokens)
        self.assertEqual(found["delay_ms"]["count"], 2 * (tokens + 2))
        delays = [there - here for name in own for here, there in zip(own[name], seen[name], strict=True)]
        self.assertGreaterEqual(min(delays), 0)


def stream_twice(engine: socket.socket, tokens: int) -> None:
    """Two streams, one after the other."""
    for _ in range(2):
        connection, _ = engine.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\ndata: begin\n\n")
            for nth in range(tokens):
                connection.sendall(b"data: %d\n\n" % nth)
            connection.sendall(b"data: [DONE]\n\n")


class Run(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        version = 'case "$1" in --version) echo "poorwill 0.1.0" ;; *) exec sleep 600 ;; esac'
        self.arguments = {
            "--poorwill": script(self.folder / "poorwill", version),
            "--nginx": script(self.folder / "nginx", f"echo '{NGINX}' >&2"),
            "--oha": script(self.folder / "oha", f"echo 'oha 1.0 {OHA_HELP}'"),
            "--out": str(self.folder / "out.json"),
        }

    def command(self, *more: str, **others: str) -> list[str]:
        arguments = {**self.arguments, **{f"--{name}": value for name, value in others.items()}}
        words = [word for pair in arguments.items() for word in pair]
        return [sys.executable, "-B", str(HERE / "run.py"), *words, *more]

    def test_what_cannot_be_run_is_said_and_ends_with_2(self):
        one = str(min(os.sched_getaffinity(0)))
        no_json = script(self.folder / "old", "echo 'oha --no-tui --latency-correction'")
        fails = script(self.folder / "fails", "echo 'no library' >&2; exit 1")
        for command, words in [
            (self.command(poorwill="/none"), "--poorwill: there is no program"),
            (self.command(poorwill=no_json), "is not poorwill"),
            (self.command(poorwill=fails), "no library"),
            (self.command(nginx="/none"), "--nginx: there is no program"),
            (self.command(nginx=no_json), "is not nginx"),
            (self.command(oha="/none"), "--oha: there is no program"),
            (self.command(oha=no_json), "cannot print JSON"),
            (self.command(only="proxy,other"), "`other` is none of"),
            (self.command(rates="200,0"), "`0` is not a number from 1 on"),
            (self.command(rounds="-1"), "not a number from 1 on"),
            (self.command("--proxy-cpus", "x"), "`x` is no processor"),
            (self.command("--proxy-cpus", "9999"), "no processor 9999"),
            (self.command("--proxy-cpus", one, "--load-cpus", one), "processors of their own"),
            (self.command(out="/none/at/all.json"), "there is no folder"),
            (self.command("--unknown"), "--unknown"),
        ]:
            ran = subprocess.run(command, capture_output=True, text=True)
            self.assertEqual(ran.returncode, 2, (command, ran.stderr))
            self.assertIn(words, ran.stderr.replace("\n", " "))
        self.assertFalse((self.folder / "out.json").exists())

    def run_until_started(self) -> tuple[subprocess.Popen, list[int]]:
        # Its engine listens nowhere, so that it waits.
        environment = {**os.environ, "TMPDIR": str(self.folder)}
        run = subprocess.Popen(self.command(only="swaps"), env=environment, stderr=subprocess.DEVNULL)
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        began = time.monotonic()
        while True:
            folders = list(self.folder.glob("poorwill-rotation-*"))
            if folders and (started := programs.marked(f"{programs.MARK}={folders[0]}")):
                return run, started
            self.assertIsNone(run.poll())
            self.assertLess(time.monotonic() - began, HANGS_S)
            time.sleep(0.01)

    def until_gone(self, pids: list[int]) -> None:
        began = time.monotonic()
        while any(is_there(pid) for pid in pids):
            self.assertLess(time.monotonic() - began, HANGS_S)
            time.sleep(0.01)

    def test_no_process_is_left_after_a_request_to_end(self):
        run, started = self.run_until_started()
        run.send_signal(signal.SIGTERM)
        self.assertEqual(run.wait(HANGS_S), 143)
        self.until_gone(started)
        self.assertEqual(list(self.folder.glob("poorwill-rotation-*")), [])

    def test_no_process_is_left_after_a_kill(self):
        run, started = self.run_until_started()
        run.kill()
        run.wait()
        self.until_gone(started)


def is_there(pid: int) -> bool:
    try:
        return figures.stat_fields(Path(f"/proc/{pid}/stat").read_text())[0] != "Z"
    except OSError:
        return False


class Table(unittest.TestCase):
    def result(self) -> dict:
        def proxied(turn: int, way: str, p50: float, cpu: float | None) -> dict:
            keys = {"round": turn, "way": way, "body_bytes": 1024, "rate": 200}
            return {**keys, "p50_ms": p50, "p99_ms": 9.0, "cpu_us": cpu}

        proxy = [proxied(turn, "direct", 0.1, None) for turn in (1, 2, 3)]
        proxy += [proxied(turn, "nginx", 0.2, 40.0) for turn in (1, 2, 3)]
        proxy += [proxied(turn, "poorwill", p50, 100.0) for turn, p50 in ((1, 0.4), (2, 0.3), (3, 9.0))]
        proxy.append(proxied(1, "llama-swap", 0.5, 300.0))
        proxy.append({"round": 3, "way": "nginx", "body_bytes": 1024, "rate": 500, "failed": "it broke"})
        streams = [
            {
                "round": 1,
                "way": way,
                "streams": 16,
                "tokens": 500,
                "own_gap_ms": figures.spread([10.0]),
                "gap_ms": figures.spread([gap]),
                "delay_ms": figures.spread([delay]),
            }
            for way, gap, delay in [("direct", 10.0, 0.25), ("poorwill", 16.0, 1.0)]
        ]
        swap = figures.of_swap(swap_events(), "amber", "birch", 0.25, 0.01)
        pairs = [{"sleep_s": 0.01, "wake_s": 0.02}]
        return {
            "what": "rotation",
            "began": "2026-01-01T00:00:00+00:00",
            "machine": programs.machine(),
            "versions": {"poorwill": "poorwill 0.1.0", "nginx": f"{NGINX}\nbuilt"},
            "options": {"proxy_cpus": [0], "load_cpus": [1], "rounds": 3, "connections": 32, "seconds": 10},
            "proxy": proxy,
            "streams": streams,
            "swaps": {"each": [swap], "direct": pairs, "figures": figures.of_swaps([swap], pairs)},
        }

    def test_figures_are_medians_and_held_against_their_aims(self):
        said = table.tables(self.result())
        for row in [
            "| 1024 B | 200 | no proxy | 0.10 | 9.00 |  |  |  |",
            "| 1024 B | 200 | poorwill | 0.40 | 9.00 | 100 | **+0.20** | **2.50** (missed) |",
            "| 1024 B | 200 | llama-swap | 0.50 | 9.00 | 300 | +0.30 | 7.50 |",
            "| poorwill | 16.00 | 16.00 | 16.00 | 10.00 | 10.00 | **+6.00** (missed) | 1.00 | 1.00 | 0.75 |",
            "| falling asleep | engine | 10.0 | 10.0 |",
            "| **the rotation's own** |  | **190.0** (missed) | 190.0 |",
            "Failed: round 3, nginx: it broke",
        ]:
            self.assertIn(row, said)
        self.assertIn("nginx/1.22.1, ", said.replace(";", ","))

    def test_rows_have_as_many_cells_as_their_head(self):
        counts = [
            {row.count("|") for row in part.splitlines()}
            for part in table.tables(self.result()).split("\n\n")
            if part.startswith("|")
        ]
        self.assertEqual([len(count) for count in counts], [1, 1, 1])

    def test_a_file_that_is_another_ends_with_2(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "other.json"
            for text in ["{}", "[]", "no JSON", '{"what": "rotation"}']:
                path.write_text(text)
                command = [sys.executable, "-B", str(HERE / "table.py"), str(path)]
                ran = subprocess.run(command, capture_output=True, text=True)
                self.assertEqual((ran.returncode, ran.stdout), (2, ""), ran.stderr)
                self.assertIn("error: ", ran.stderr)


if __name__ == "__main__":
    if sys.platform != "linux":
        print("skipped: rotations are measured on Linux only", file=sys.stderr)
        sys.exit(0)
    unittest.main()
