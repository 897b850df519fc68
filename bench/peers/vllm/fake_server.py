#!/usr/bin/env python3
"""Answers as vLLM's server with poorwill should, for the tests of server.py; with flaws by name it does
something wrong.

    fake_server.py PORT CARD FLAWS

CARD is a file where it writes its engine's process and the memory that this has of the card. Nothing here
goes by the clock: what takes long ends when that happens for which server.py waits.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

port, card, flaws = int(sys.argv[1]), sys.argv[2], set(sys.argv[3].split(","))
# The engine is a process that waits, and its name says what it is.
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "EngineCore"])
GIB = 1 << 30
TAGS = ["weights", "kv_cache"]
lock = threading.Condition()
sleeping, level, paused, undefined, sleeps, salt = set(), 0, False, False, 0, 0
hibernating = False
away = "the engine hibernates: ask /hibernate/resume first"
not_ready = "the weights were dropped by a level 2 sleep: call reload_weights"


def size():
    asleep = bool(sleeping) and "keeps_memory" not in flaws
    with open(card + ".new", "w") as file:
        held = 0 if hibernating and "stays" not in flaws else GIB // 2 if asleep else 8 * GIB
        file.write(f"{engine.pid} {held}")
    os.replace(card + ".new", card)


def dead():
    return engine.poll() is not None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *arguments):
        pass

    def say(self, status, body=None):
        data = (body if isinstance(body, str) else json.dumps(body or {})).encode()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        path = urlparse(self.path).path
        if path == "/health":
            if dead():
                self.say(503)
            elif undefined and not sleeping and "gibberish" not in flaws:
                self.say(503, {"error": not_ready})
            else:
                self.say(200)
        elif path == "/is_sleeping":
            self.say(200, {"is_sleeping": bool(sleeping) or paused})
        elif path == "/is_hibernating":
            state = "checkpointed" if hibernating else "running"
            self.say(200, {"is_hibernating": hibernating, "processes": [{"pid": engine.pid, "state": state}]})
        elif path == "/metrics":
            count = 0 if "no_metrics" in flaws else sleeps
            self.say(200, f"poorwill_operation_seconds_count {2.0 * count}\npoorwill_host_bytes 5.0\n")
        else:
            self.say(404)

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length) or b"{}")
        url = urlparse(self.path)
        query = parse_qs(url.query)
        if dead():
            return self.say(500, {"error": "the engine is dead"})
        routes = {
            "/sleep": self.sleep,
            "/wake_up": self.wake,
            "/v1/completions": self.complete,
            "/collective_rpc": self.rpc,
            "/resume": self.resume,
            "/hibernate": self.hibernate,
            "/hibernate/resume": self.come_back,
        }
        if hibernating and not url.path.startswith("/hibernate") and "wakes_it" not in flaws:
            return self.say(503 if url.path == "/v1/completions" else 409, {"error": away})
        routes[url.path](query, body)

    def sleep(self, query, body):
        global level, paused, undefined, sleeps, salt
        wanted = query.get("level", ["1"])[0]
        if wanted not in ("0", "1", "2") and "takes_any_level" not in flaws:
            return self.say(400, {"error": f"level {wanted} is none of 0, 1, 2"})
        wanted = int(wanted) if wanted in "012" else 1
        with lock:
            if query.get("mode") == ["wait"]:
                for request in running:
                    request["end"] = True
                lock.notify_all()
                lock.wait_for(lambda: not running)
            if sleeping and level != wanted:
                if "changes_level" not in flaws:
                    return self.say(400, {"error": f"it sleeps at level {level} already"})
            if wanted == 0:
                paused = True
                return self.say(200)
            if query.get("mode") != ["keep"]:
                for request in running:
                    request["end"] = request["aborted"] = True
            if "sleeps_long" in flaws and os.environ.get("POORWILL_PREPARE") == "0":
                engine.wait()
                return self.say(500, {"error": "the engine is dead"})
            sleeping.update(TAGS)
            level, undefined, sleeps = wanted, undefined or wanted == 2, sleeps + 1
            salt += "forgets" in flaws
            lock.notify_all()
            size()
        self.say(200)

    def wake(self, query, body):
        global paused
        tags = query.get("tags") or TAGS
        unknown = [tag for tag in tags if tag not in [*TAGS, "scheduling"]]
        if unknown and "takes_any_tag" not in flaws:
            return self.say(400, {"error": f"no tag {unknown[0]}: there are weights, kv_cache, scheduling"})
        with lock:
            sleeping.difference_update(tags)
            if not sleeping:
                paused = False
                for request in running:
                    request["end"] = True
            lock.notify_all()
            size()
        self.say(200)

    def hibernate(self, query, body):
        global hibernating
        if query.get("wait_max") == ["nonsense"]:
            return self.say(400, {"error": "wait_max is no number"})
        if not sleeping:
            return self.say(409, {"error": "the engine is awake"})
        hibernating = True
        size()
        self.say(200, {"status": "hibernating"})

    def come_back(self, query, body):
        global hibernating
        hibernating = False
        size()
        self.say(200, {"status": "resumed"})

    def resume(self, query, body):
        self.say(500 if undefined or sleeping else 200, {"error": not_ready})

    def rpc(self, query, body):
        global undefined
        with lock:
            undefined = False
            lock.notify_all()
        self.say(200, {"results": [None]})

    def complete(self, query, body):
        # Refused as soon as it is known; waiting while it may still come right.
        count = body["max_tokens"]
        request = {"aborted": False, "end": False}
        with lock:
            if undefined and not sleeping and "gibberish" not in flaws:
                return self.say(503, {"error": {"message": not_ready, "code": 503}})
            blind = "gibberish" in flaws or ("serves_half" in flaws and len(sleeping) == 1)
            while not blind and (sleeping or paused or undefined):
                lock.wait(0.02)
                if dead():
                    return self.say(500, {"error": "the engine is dead"})
            running.append(request)
            if count > 100:
                lock.wait_for(lambda: request["end"], 20)
            made = 30 if request["aborted"] else count
            running.remove(request)
            lock.notify_all()
        first = 77 if undefined or sleeping else salt
        choice = {
            "token_ids": [first + at for at in range(made)],
            "finish_reason": "abort" if made < count else "length",
        }
        self.say(200, {"choices": [choice]})


running = []
size()


def end(*arguments):
    engine.kill()
    engine.wait()
    os._exit(0)


signal.signal(signal.SIGTERM, end)
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
