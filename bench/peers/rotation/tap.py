#!/usr/bin/env python3
"""A proxy before an engine that records when each event of each stream came out.

So the times at the engine and at the client behind another proxy are of one stream and one clock. Its first
line of output is its address. It ends with its input, and prints the times by `X-Request-Id`.
"""

import argparse
import asyncio
import json
import re
import sys
import time

from figures import Events

NAMED = re.compile(rb"\r\nx-request-id: *([!-~]+)\r\n", re.IGNORECASE)


class Tap:
    def __init__(self, host: str, port: int):
        self.engine = (host, port)
        self.streams: dict[str, Events] = {}


class Door(asyncio.Protocol):
    """A connection of a client of the engine."""

    def __init__(self, tap: Tap):
        self.tap = tap
        self.stream: Events | None = None
        self.waiting: list[bytes] = []
        self.engine: asyncio.Transport | None = None

    def connection_made(self, transport):
        self.transport = transport
        self.connecting = asyncio.ensure_future(self.connect())

    async def connect(self):
        try:
            loop = asyncio.get_running_loop()
            self.engine, _ = await loop.create_connection(lambda: Engine(self), *self.tap.engine)
        except OSError:
            self.transport.abort()
            return
        for piece in self.waiting:
            self.engine.write(piece)

    def data_received(self, data):
        if named := NAMED.search(data):
            self.stream = self.tap.streams.setdefault(named[1].decode(), Events())
        if self.engine:
            self.engine.write(data)
        else:
            self.waiting.append(data)

    def connection_lost(self, _):
        self.connecting.cancel()
        if self.engine:
            self.engine.abort()


class Engine(asyncio.Protocol):
    """The connection to the engine that goes with it."""

    def __init__(self, door: Door):
        self.door = door

    def data_received(self, data):
        now_ns = time.monotonic_ns()
        if self.door.stream:
            self.door.stream.take(now_ns, data)
        self.door.transport.write(data)

    def connection_lost(self, _):
        self.door.transport.close()


async def serve(host: str, port: int) -> dict[str, list[int]]:
    loop, tap = asyncio.get_running_loop(), Tap(host, port)
    server = await loop.create_server(lambda: Door(tap), "127.0.0.1", 0)
    print(f"listening on {server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)
    server.close()
    return {name: stream.times_ns for name, stream in tap.streams.items()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--to", required=True, metavar="HOST:PORT", help="where the engine is")
    options = arguments.parse_args()
    host, _, port = options.to.rpartition(":")
    if not host or not port.isdigit():
        arguments.error(f"--to is `{options.to}`; write it like 127.0.0.1:8000")
    print(json.dumps(asyncio.run(serve(host, int(port)))))


if __name__ == "__main__":
    main()
