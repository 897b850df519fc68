"""What clients do: an open loop of requests by oha, and streams whose events are timed here."""

import asyncio
import json
import time

from figures import Events

WORDS = "A quick look at how rivers carry sand from the hills to the sea, and what that does to their banks. "


def chat(model: str, bytes_: int) -> bytes:
    """A chat completion whose body has just so many bytes."""

    def body(text: str) -> bytes:
        messages = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": text}]
        return json.dumps(
            {"model": model, "messages": messages, "max_tokens": 128, "temperature": 0}
        ).encode()

    left = bytes_ - len(body(""))
    if left < 0:
        raise ValueError(f"a body of {bytes_} bytes has no space for a question")
    return body((WORDS * (left // len(WORDS) + 1))[:left])


def answer(bytes_: int) -> str:
    """What an engine answers to that, in about so many bytes."""

    def whole(text: str) -> str:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
        usage = {"prompt_tokens": 180, "completion_tokens": 128, "total_tokens": 308}
        return json.dumps(
            {
                "id": "chatcmpl-0",
                "object": "chat.completion",
                "created": 0,
                "model": "bench",
                "choices": [choice],
                "usage": usage,
            }
        )

    left = max(bytes_ - len(whole("")), 0)
    return whole((WORDS * (left // len(WORDS) + 1))[:left])


def flags(oha_help: str) -> list[str]:
    """What this oha calls what is needed of it."""
    for needed in ["--latency-correction", "--no-tui"]:
        if needed not in oha_help:
            raise ValueError(f"this oha has no {needed}; install a later one")
    if "--output-format" in oha_help:
        return ["--no-tui", "--latency-correction", "--output-format", "json"]
    if "--json" in oha_help:
        return ["--no-tui", "--latency-correction", "--json"]
    raise ValueError("this oha cannot print JSON; install a later one")


def oha_command(
    oha: str, flags: list[str], url: str, body: str, rate: int, seconds: float, connections: int
) -> list[str]:
    count = max(int(rate * seconds), 1)
    return [
        *[oha, *flags, "-q", str(rate), "-n", str(count), "-c", str(connections), "-m", "POST"],
        *["-T", "application/json", "-D", body, url],
    ]


def of_oha(printed: str, asked: int) -> dict:
    """Its figures in milliseconds. Whatever was not answered with 200 makes it no measurement."""
    said = json.loads(printed)
    codes = {str(code): count for code, count in (said.get("statusCodeDistribution") or {}).items()}
    errors = said.get("errorDistribution") or {}
    done = codes.get("200", 0)
    if done != asked or errors or set(codes) - {"200"}:
        raise ValueError(f"{done} of {asked} requests were answered with 200: {codes} {errors}")
    percentiles = said["latencyPercentiles"]
    return {
        "requests": done,
        "per_s": said["summary"]["requestsPerSec"],
        "p50_ms": percentiles["p50"] * 1000,
        "p99_ms": percentiles["p99"] * 1000,
        "max_ms": said["summary"]["slowest"] * 1000,
    }


class Stream(asyncio.Protocol):
    """A client of one stream."""

    def __init__(self, request: bytes, events: int, over: asyncio.Future):
        self.request, self.expected, self.over = request, events, over
        self.events = Events()
        self.head = b""

    def connection_made(self, transport):
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data):
        self.events.take(time.monotonic_ns(), data)
        if len(self.head) < 12:
            self.head += data[:12]
        if len(self.events.times_ns) >= self.expected:
            self.transport.close()

    def connection_lost(self, _):
        if not self.over.done():
            self.over.set_result(None)


def stream_request(model: str, name: str, tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": f"Tell me of {name}."}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
    )
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: {name}\r\n"
        f"Connection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


async def streams(
    port: int, model: str, names: list[str], tokens: int, limit_s: float
) -> dict[str, list[int]]:
    """Asks for all streams at once; when each event of each came."""
    loop = asyncio.get_running_loop()

    async def one(name: str) -> list[int]:
        over = loop.create_future()
        # What it begins with, the tokens, and `[DONE]`.
        request, expected = stream_request(model, name, tokens), tokens + 2
        _, stream = await loop.create_connection(lambda: Stream(request, expected, over), "127.0.0.1", port)
        await over
        if not stream.head.startswith(b"HTTP/1.1 200"):
            raise ValueError(f"stream {name} was answered with {stream.head!r}")
        if len(stream.events.times_ns) != expected:
            raise ValueError(f"stream {name} had {len(stream.events.times_ns)} events, not {expected}")
        return stream.events.times_ns

    each = await asyncio.wait_for(asyncio.gather(*map(one, names)), limit_s)
    return dict(zip(names, each, strict=True))
