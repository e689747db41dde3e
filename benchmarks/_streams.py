"""Clients that cost next to nothing: many streams of one process, and when each token came.

    python benchmarks/_streams.py '{"ports": [...], "keys": [...], "seconds": ..., ...}'      figures as JSON

Every stream is a connection that asks again as soon as it has its answer. A streamed answer's tokens carry the moment
at which the stand-in wrote them, so each of them says by itself how long it was under way.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import uvloop

MARK = b"@"


@dataclass(frozen=True)
class Load:
    """What one process of clients asks, and for how long."""

    ports: list[int]  # taken in turns
    keys: list[str]  # a stream for each
    seconds: float
    warm_seconds: float = 1.0  # at the start, in which nothing counts
    tokens: int = 16  # of an answer
    spread: bool = False  # answers of half to one and a half times as many tokens
    stream: bool = True
    prompt: int = 2000  # words
    seed: int = 0
    start_seconds: float = 0.0  # over which the streams begin


@dataclass
class Seen:
    """Figures of one process of clients; times in nanoseconds."""

    first: array[int] = field(default_factory=lambda: array("q"))  # from the request to its first token
    further: array[int] = field(default_factory=lambda: array("q"))  # from a token's writing to its arrival
    answers: int = 0  # whole, and counted
    all_answers: int = 0
    all_tokens: int = 0
    faults: list[str] = field(default_factory=list)


class Stream(asyncio.Protocol):
    """One client, which asks again and again."""

    def __init__(self, load: Load, key: str, seen: Seen, until: int, counted_from: int, draw: random.Random) -> None:
        self._load, self._key, self._seen, self._draw = load, key, seen, draw
        self._until, self._counted_from = until, counted_from
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: Any = None
        self._asked = 0
        self._rest = b""
        self._length = -1  # of a plain answer, once its head is there
        self._begun = self._first = False  # whether its status, and its first token, are there
        text = " ".join("word" for _ in range(load.prompt))
        messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": text}]
        body = {"model": "policy", "messages": messages, "stream": load.stream, "temperature": 1.0}
        self._body = json.dumps(body).encode()[:-1] + b', "max_tokens": %d}'
        self._tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._tokens = self._load.tokens
        if self._load.spread:
            self._tokens = self._draw.randint(max(1, self._tokens // 2), self._tokens * 3 // 2)
        body = self._body % self._tokens
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {self._key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._begun = self._first = False
        self._rest = b""
        self._asked = time.monotonic_ns()
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if not self._begun:
            if not data.startswith(b"HTTP/1.1 200"):
                self._fault(data[:300].decode("utf-8", "replace"))
                return
            self._begun = True
        if self._load.stream:
            self._streamed(now, data)
        else:
            self._plain(now, data)

    def _streamed(self, now: int, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        if not data.endswith(b"\n"):  # a piece of an event, or of a head
            cut = data.rfind(b"\n") + 1
            data, self._rest = data[:cut], data[cut:]
        elif self._rest:
            self._rest = b""
        parts = data.split(MARK)
        if len(parts) > 1:
            counts, seen = self._asked >= self._counted_from, self._seen
            moments = [int(part) for part in parts[1::2]]
            seen.all_tokens += len(moments)
            if counts:
                if not self._first:
                    seen.first.append(now - self._asked)
                    moments = moments[1:]
                seen.further.extend([now - moment for moment in moments])
            self._first = True
        if data.endswith(b"0\r\n\r\n"):
            self._answered(now, self._first)

    def _plain(self, now: int, data: bytes) -> None:
        self._rest += data
        split = self._rest.find(b"\r\n\r\n")
        if split < 0:
            return
        head = self._rest[:split].lower()
        at = head.find(b"content-length:")
        if at >= 0:
            whole = len(self._rest) - split - 4 >= int(head[at + 15 :].split(b"\r\n", 1)[0])
        else:
            whole = self._rest.endswith(b"0\r\n\r\n")
        if whole:
            self._seen.all_tokens += self._tokens
            self._answered(now, True)

    def _answered(self, now: int, sound: bool) -> None:
        if not sound:
            self._fault("an answer without tokens")
        self._seen.all_answers += 1
        if self._asked >= self._counted_from and now < self._until:
            self._seen.answers += 1
        if now < self._until:
            self._ask()
        else:
            self._transport.close()

    def _fault(self, what: str) -> None:
        self._seen.faults.append(what)
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if time.monotonic_ns() < self._until and not self._seen.faults:
            self._seen.faults.append(f"the connection was closed: {exc}")
        if not self.done.done():
            self.done.set_result(None)


async def ask(load: Load) -> dict[str, Any]:
    """Keep the streams asking; what was seen."""
    loop, seen, draw = asyncio.get_running_loop(), Seen(), random.Random(load.seed)
    begun = time.monotonic_ns()
    counted_from = begun + int(1e9 * load.warm_seconds)
    until = counted_from + int(1e9 * load.seconds)
    used: list[float] = []
    loop.call_later(load.warm_seconds, lambda: used.append(time.process_time()))
    loop.call_later(load.warm_seconds + load.seconds, lambda: used.append(time.process_time()))

    async def one(number: int, key: str) -> None:
        await asyncio.sleep(draw.random() * load.start_seconds)
        stream = Stream(load, key, seen, until, counted_from, draw)
        await loop.create_connection(lambda: stream, "127.0.0.1", load.ports[number % len(load.ports)])
        await stream.done

    gc.freeze()
    gc.disable()
    await asyncio.gather(*(one(number, key) for number, key in enumerate(load.keys)))
    return {
        "first": seen.first.tolist(),
        "further": seen.further.tolist(),
        "answers": seen.answers,
        "all_answers": seen.all_answers,
        "all_tokens": seen.all_tokens,
        "faults": seen.faults[:5],
        "busy": (used[1] - used[0]) / load.seconds if len(used) == 2 else 0.0,
    }


if __name__ == "__main__":
    json.dump(uvloop.run(ask(Load(**json.loads(sys.argv[1])))), sys.stdout)
