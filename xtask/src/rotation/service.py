"""A rotation that runs for as long as its caller needs it."""

import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# Longer than anything here takes on a slow machine.
HANGS_S = 300


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def running(poorwill: Path, config: str, front: int, environment: Mapping[str, str]) -> Iterator[Path]:
    """Runs a rotation until the block ends; gives the path of its configuration."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rotate.toml"
        path.write_text(config)
        log_path = Path(folder) / "log"
        with log_path.open("wb") as log:
            service = subprocess.Popen(
                [poorwill, "rotate", "--config", path],
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
            )
            try:
                _wait_for(f"http://127.0.0.1:{front}/health", service, log_path)
                yield path
            finally:
                service.terminate()
                service.wait(HANGS_S)


def _wait_for(url: str, service: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + HANGS_S
    while time.monotonic() < until:
        if service.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise SystemExit(f"the rotation did not begin; its log:\n{log.read_text()}")
