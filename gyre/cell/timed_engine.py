"""A timed engine: an OpenAI-compatible server that emits tokens at a configured rate and computes nothing.

`python -m gyre.cell.timed_engine` takes the place of `gyre.cell.engine` where `engine.kind` is timed: the same child of
the same supervisor, the same gate, the same weights to load and verify, the same answers for a proxy. Token ids and
log-probabilities depend on a token's place in its sequence alone, so an answer that goes on elsewhere goes on as if it
had never moved. An answer has as many tokens as were asked for: no token ends it, and stop strings are not looked for.

It starts in a second (no torch, no vLLM) and wakes up at most 40 times a second, for all its requests at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy

from gyre.cell.engine import Parent, leave
from gyre.cell.pace import Pace
from gyre.cell.timed_answer import Answer
from gyre.checksum_groups import MASK, Sums, accumulate, combine, group_of
from gyre.errors import EXIT_FAULT, EXIT_OK, EXIT_USER, GyreError, UserError, WeightsMismatch

log = logging.getLogger("gyre.engine")

Message = dict[str, Any]

#: Seconds between two wake-ups that hand out tokens; only the last token of an answer is not kept waiting for one.
INTERVAL_SECONDS = 0.025
_INTEGERS = {1: numpy.int8, 2: numpy.int16, 4: numpy.int32, 8: numpy.int32}
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2}


# -- answers -----------------------------------------------------------------------------------------------------------
class Speed:
    """Hands out tokens to live answers as they become due: one timer for all of them."""

    def __init__(self, tokens_per_second: float, slowdown: float) -> None:
        self._pace = Pace(tokens_per_second, slowdown)
        self._live: set[Answer] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._woke = 0.0
        self.tokens = 0  # sampled since the start

    @property
    def live(self) -> int:
        """Answers that are not whole."""
        return len(self._live)

    async def pieces(self, answer: Answer) -> AsyncIterator[tuple[int, int]]:
        """The tokens of an answer as (begin, end), as they become due."""
        answer.stint = self._pace.begin(answer.length, time.monotonic())
        self._live.add(answer)
        self._arm()
        shown = 0
        try:
            while shown < answer.length:
                await answer.more.wait()
                answer.more.clear()
                if (end := answer.shown) > shown:
                    yield shown, end
                    shown = end
        finally:
            self._leave(answer)

    def _leave(self, answer: Answer) -> None:
        if answer in self._live:
            self._live.discard(answer)
            self._pace.end(time.monotonic())
            self._arm()

    def _arm(self) -> None:
        """Set the timer for the next token that is due, but not before the interval unless it is an answer's last."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._live:
            return
        pace = self._pace
        last = min(pace.due(one.stint, one.length) for one in self._live)
        following = min(pace.due(one.stint, one.shown + 1) for one in self._live)
        when = min(last, max(following, self._woke + INTERVAL_SECONDS))
        self._timer = asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), self._wake)

    def _wake(self) -> None:
        now = self._woke = time.monotonic()
        for answer in list(self._live):
            count = self._pace.tokens(answer.stint, now)
            if count > answer.shown:
                self.tokens += (count - answer.shown) * answer.choices
                answer.shown = count
                answer.more.set()
        for answer in [one for one in self._live if one.shown >= one.length]:
            self._live.discard(answer)
            self._pace.end(now)
        self._arm()


# -- the server --------------------------------------------------------------------------------------------------------
class Server:
    """The ASGI application behind the gate."""

    def __init__(self, speed: Speed, settings: Any) -> None:
        self._speed = speed
        self._settings = settings

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        """Serve one connection scope."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path in ("/v1/chat/completions", "/v1/completions"):
            await self._complete(path == "/v1/chat/completions", receive, send)
        elif path == "/v1/models":
            name = {"id": self._settings.served_name, "object": "model", "created": 0, "owned_by": "gyre"}
            await _say(send, 200, {"object": "list", "data": [name]})
        elif path == "/health":
            await _say(send, 200, {})
        else:
            await _say(send, 404, {"error": {"message": f"a timed engine has no {path}", "code": 404}})

    async def _complete(self, chat: bool, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        data, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            data, more = data + message.get("body", b""), message.get("more_body", False)
        try:
            answer = Answer(json.loads(data), chat, self._settings.max_context)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            text = f"{type(error).__name__}: {error}"
            await _say(send, 400, {"error": {"message": text, "type": "BadRequestError", "code": 400}})
            return
        answering = asyncio.ensure_future(self._answer(answer, send))
        gone = asyncio.ensure_future(receive())  # the body is read: it can only be a disconnect
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answering.cancel()
            gone.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)
        if answering.done() and not answering.cancelled() and (error := answering.exception()) is not None:
            raise error

    async def _answer(self, answer: Answer, send: Any) -> None:
        pieces = self._speed.pieces(answer)
        async with contextlib.aclosing(pieces):
            if not answer.stream:
                async for _ in pieces:
                    pass
                await _begin(send, 200, b"application/json")
                await _write(send, answer.piece(0, answer.length), False)
                return
            await _begin(send, 200, b"text/event-stream; charset=utf-8")
            async for begin, end in pieces:
                await _write(send, b"data: " + answer.piece(begin, end) + b"\n\n", True)
            await _write(send, b"data: [DONE]\n\n", False)


async def _begin(send: Any, status: int, kind: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})


async def _write(send: Any, body: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _say(send: Any, status: int, value: Message) -> None:
    await _begin(send, status, b"application/json")
    await _write(send, json.dumps(value).encode(), False)


# -- weights -----------------------------------------------------------------------------------------------------------
def array_sums(bits: numpy.ndarray) -> tuple[int, int]:
    """What `gyre.checksum` adds up over one tensor, from its elements' bits as integers; exact, as there."""
    plain = mixed = 0
    for part in numpy.array_split(bits, max(1, bits.size >> 20)):
        m = part.astype(numpy.int32)
        plain += int(m.sum(dtype=numpy.int64))
        m *= numpy.int32(-1640531527)
        m ^= m >> 15
        m *= numpy.int32(-2048144777)
        mixed += int(m.sum(dtype=numpy.int64))
    return plain & MASK, mixed & MASK


def read_weights(path: Path) -> dict[str, numpy.ndarray]:
    """A copy of the tensors of a safetensors file, as the integers that their bits are."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        length = int.from_bytes(data[:8], "little")
        table, found = json.loads(data[8 : 8 + length]), {}
        for name, entry in table.items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                found[name] = numpy.frombuffer(data[begin:end], _INTEGERS[_BYTES[entry["dtype"]]])
        return found


class TimedControl:
    """What the gate asks of a timed engine (`gyre.cell.gate.Control`)."""

    def __init__(self, speed: Speed, settings: Any) -> None:
        self._speed = speed
        self._settings = settings
        self._weights: dict[str, numpy.ndarray] | None = {}  # None while its memory is released
        self._kv: bytearray | None = bytearray(settings.slots * settings.max_context)  # a byte for a token
        self._loaded = False

    async def drain(self) -> None:
        """Wait for the last of what the gate has cancelled."""
        for _ in range(200):
            if not self._speed.live:
                return
            await asyncio.sleep(0.01)
        raise GyreError(f"{self._speed.live} requests are unfinished after a cancel")

    async def resume(self) -> None:
        """Allow requests."""
        if not self._loaded or self._kv is None:
            raise GyreError("the engine cannot serve: weights or KV memory are missing")

    async def sleep(self) -> Message:
        """Release weights and KV memory; it takes the configured time."""
        await asyncio.sleep(self._settings.timed["sleep_seconds"])
        self._weights = self._kv = None
        self._loaded = False
        return await self.memory()

    async def wake(self, tags: list[str]) -> Message:
        """Take memory back; that of the weights takes the configured time."""
        if unknown := set(tags) - {"weights", "kv_cache"}:
            raise UserError(f"unknown tags {sorted(unknown)}; use weights and kv_cache")
        if "weights" in tags and self._weights is None:
            await asyncio.sleep(self._settings.timed["wake_seconds"])
            self._weights = {}
        if "kv_cache" in tags and self._kv is None:
            self._kv = bytearray(self._settings.slots * self._settings.max_context)
        return await self.memory()

    async def load(self, path: str, checksum: str | None, snapshot: int | None) -> Message:
        """Copy a snapshot, and compare what was copied with what was announced."""
        if self._weights is None:
            raise GyreError("the weights' memory is released; wake it before a load")
        begun, self._loaded = time.monotonic(), False
        self._weights, sums = await asyncio.to_thread(_load, Path(path))
        actual = combine(sums)
        if checksum is not None and actual != checksum:
            raise WeightsMismatch(f"snapshot {snapshot} at {path} has checksum {actual}, announced was {checksum}")
        self._loaded = True
        return {"checksum": actual, "snapshot": snapshot, "seconds": time.monotonic() - begun}

    async def memory(self) -> Message:
        """Bytes held."""
        pages = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
        sizes = {line.split()[0]: int(line.split()[1]) << 10 for line in pages}
        held = {"weights": sum(one.nbytes for one in (self._weights or {}).values()), "kv": len(self._kv or b"")}
        return {"bytes": held, "rss": sizes["Rss:"], "pss": sizes["Pss:"]}

    def tokens(self) -> int:
        """Tokens sampled since the start."""
        return self._speed.tokens

    def unfinished(self) -> int:
        """Answers under way."""
        return self._speed.live


def _load(path: Path) -> tuple[dict[str, numpy.ndarray], Sums]:
    weights: dict[str, numpy.ndarray] = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        weights |= read_weights(file)
    sums: Sums = {}
    for name, bits in weights.items():
        accumulate(sums, group_of(name), array_sums(bits))
    return weights, sums


# -- the program -------------------------------------------------------------------------------------------------------
async def _serve(settings: Any, parent: Parent) -> int:
    import uvicorn

    from gyre.cell.gate import Gate

    speed = Speed(settings.timed["tokens_per_second"], settings.timed["slowdown"])
    gate = Gate(
        Server(speed, settings), secret=settings.secret, rank=settings.rank, control=TimedControl(speed, settings)
    )
    options = {"access_log": False, "log_level": "warning", "timeout_graceful_shutdown": 1, "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(gate, timeout_keep_alive=300, **options))
    server.capture_signals = contextlib.nullcontext  # its own handlers would send the signal again
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
    with socket.create_server((settings.host, settings.port), backlog=1024) as sock:
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        parent.say("ready", url=f"http://{settings.host}:{sock.getsockname()[1]}", pid=os.getpid())
        await serving
    return EXIT_OK


def main() -> int:
    """Entry point: a child of a supervisor, whose settings come over the socket in GYRE_CHILD_FD."""
    import uvloop

    from gyre.cell.engine_client import EngineSettings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    descriptor = os.environ.pop("GYRE_CHILD_FD", None)
    if descriptor is None:
        print("usage: python -m gyre.cell.timed_engine, with a socket GYRE_CHILD_FD over which settings come")
        return EXIT_USER
    parent = Parent(socket.socket(fileno=int(descriptor)))
    settings = EngineSettings.decode(parent.settings_line())
    parent.watch()
    try:
        return uvloop.run(_serve(settings, parent))
    except Exception as error:
        log.exception("the engine failed")
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return EXIT_FAULT


if __name__ == "__main__":
    leave(main())
