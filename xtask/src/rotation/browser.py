"""Calls of a page in headless Chromium: `browser.py CHROMIUM`.

The page comes from an origin that one front allows. A second front, without keys, does not, and its engine
has to see nothing of what the page sends.
"""

import http.server
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
HANGS_S = 120
ASK = b'{"model": "amber", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello."}]}'


class Site(http.server.BaseHTTPRequestHandler):
    """Serves the page, and takes its lines."""

    lines: list[str]
    is_done: threading.Event

    def do_GET(self) -> None:
        is_page = urllib.parse.urlsplit(self.path).path == "/page"
        text = (HERE / "page.html").read_bytes() if is_page else b""
        self.send_response(200 if is_page else 404)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["content-length"])).decode()
        self.lines.extend(text.splitlines())
        self.send_response(204)
        self.end_headers()
        self.is_done.set()

    def log_message(self, *_: object) -> None:
        pass


def seen(engine: str) -> int:
    """How many tokens of prompts the engine has seen."""
    with urllib.request.urlopen(f"{engine}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    counts = re.findall(r"^vllm:prompt_tokens_total(?:{.*})? (\d+)", text, re.MULTILINE)
    if len(counts) != 1:
        raise SystemExit(f"the engine counts no prompts:\n{text}")
    return int(counts[0])


def main() -> None:
    site, base = os.environ["POORWILL_SITE"], os.environ["POORWILL_BASE"]
    refusing, engine = os.environ["POORWILL_REFUSING"], os.environ["POORWILL_REFUSING_ENGINE"]
    Site.lines, Site.is_done = [], threading.Event()
    address = urllib.parse.urlsplit(site)
    server = http.server.ThreadingHTTPServer((address.hostname, address.port), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # So that its engine is awake, and could be asked.
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(f"{refusing}/v1/chat/completions", ASK, headers)
    with urllib.request.urlopen(asked, timeout=HANGS_S):
        before = seen(engine)
    query = {"allowed": base, "key": os.environ["POORWILL_KEY"], "refusing": refusing}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = ["--headless", "--disable-gpu", "--no-first-run", f"--user-data-dir={folder}"]
        if os.getuid() == 0:
            options.append("--no-sandbox")
        browser = subprocess.Popen(
            [sys.argv[1], *options, f"{site}/page?{urllib.parse.urlencode(query)}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        is_done = Site.is_done.wait(HANGS_S)
        browser.terminate()
        _, said = browser.communicate()
    print("\n".join(Site.lines))
    if not is_done:
        sys.exit(f"the page did not end: {said.decode(errors='replace')[-2000:]}")
    after = seen(engine)
    name = "without leave: the engine saw nothing"
    print(f"ok {name}" if after == before else f"failed {name}: {before} tokens before, {after} after")


main()
