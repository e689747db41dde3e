"""What engines without a model have in common: an OpenAI-compatible server that hands out tokens at a configured rate.

It takes the place of `gyre.cell.engine`: the same child of the same supervisor, the same gate, the same weights to
load and verify, the same answers for a proxy, the extension of requests included (`gyre.splice`). What the answers are
its kinds say: `gyre.cell.timed_engine`, `gyre.cell.scripted_engine`.

It starts in a second (no torch, no vLLM) and wakes up at most 40 times a second, for all its requests at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from gyre.cell.engine import Parent, leave
from gyre.cell.pace import Pace, Stint
from gyre.cell.stand_in_answer import Answer
from gyre.cell.stand_in_request import WRONG, Asked, rendered
from gyre.cell.stand_in_weights import StandInControl
from gyre.errors import EXIT_FAULT, EXIT_OK, EXIT_USER, UserError
from gyre.splice import HEADER

log = logging.getLogger("gyre.engine")

Message = dict[str, Any]
Headers = dict[bytes, bytes]

#: What a kind of stand-in makes of a request. Raises ValueError where it has no answer to it.
Make = Callable[[Asked], Answer]

#: Seconds between two wake-ups that hand out tokens; only the last token of an answer is not kept waiting for one.
INTERVAL_SECONDS = 0.025


# -- pace --------------------------------------------------------------------------------------------------------------
class _Live:
    """An answer under way: it has `shown` tokens, of which the first `kept` came with its request."""

    def __init__(self, answer: Answer, stint: Stint) -> None:
        self.length = answer.length
        self.choices = answer.asked.choices
        self.kept = self.shown = len(answer.asked.kept)
        self.stint = stint
        self.more = asyncio.Event()


class Speed:
    """Hands out tokens to live answers as they become due: one timer for all of them."""

    def __init__(self, tokens_per_second: float, slowdown: float) -> None:
        self._pace = Pace(tokens_per_second, slowdown)
        self._live: set[_Live] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._woke = 0.0
        self.tokens = 0  # sampled since the start

    @property
    def live(self) -> int:
        """Answers that are not whole."""
        return len(self._live)

    async def pieces(self, answer: Answer) -> AsyncIterator[tuple[int, int]]:
        """The tokens of an answer as (begin, end), as they become due; those that came with its request at once."""
        shown = len(answer.asked.kept)
        if shown:
            yield 0, shown
        if shown == answer.length:
            return
        live = _Live(answer, self._pace.begin(answer.length - shown, time.monotonic()))
        self._live.add(live)
        self._arm()
        try:
            while shown < answer.length:
                await live.more.wait()
                live.more.clear()
                if (end := live.shown) > shown:
                    yield shown, end
                    shown = end
        finally:
            self._leave(live)

    def _leave(self, live: _Live) -> None:
        if live in self._live:
            self._live.discard(live)
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
        last = min(pace.due(one.stint, one.length - one.kept) for one in self._live)
        following = min(pace.due(one.stint, one.shown - one.kept + 1) for one in self._live)
        when = min(last, max(following, self._woke + INTERVAL_SECONDS))
        self._timer = asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), self._wake)

    def _wake(self) -> None:
        now = self._woke = time.monotonic()
        for live in list(self._live):
            count = live.kept + self._pace.tokens(live.stint, now)
            if count > live.shown:
                self.tokens += (count - live.shown) * live.choices
                live.shown = count
                live.more.set()
        for live in [one for one in self._live if one.shown >= one.length]:
            self._live.discard(live)
            self._pace.end(now)
        self._arm()


# -- the server --------------------------------------------------------------------------------------------------------
class Server:
    """The ASGI application behind the gate."""

    def __init__(self, speed: Speed, settings: Any, make: Make) -> None:
        self._speed = speed
        self._settings = settings
        self._make = make

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        """Serve one connection scope."""
        if scope["type"] != "http":
            return
        path, headers = scope["path"], {name.lower(): value for name, value in scope["headers"]}
        if path in ("/v1/chat/completions", "/v1/completions"):
            await self._complete(path == "/v1/chat/completions", headers, receive, send)
        elif path in ("/v1/chat/completions/render", "/v1/completions/render"):
            await self._render(path == "/v1/chat/completions/render", receive, send)
        elif path == "/v1/models":
            name = {"id": self._settings.served_name, "object": "model", "created": 0, "owned_by": "gyre"}
            await _say(send, 200, {"object": "list", "data": [name]})
        elif path == "/health":
            await _say(send, 200, {})
        else:
            await _say(send, 404, {"error": {"message": f"this engine has no {path}", "code": 404}})

    async def _complete(
        self, chat: bool, headers: Headers, receive: Callable[[], Awaitable[Message]], send: Any
    ) -> None:
        data = await _body(receive)
        if data is None:
            return
        try:
            execution = int(headers.get(b"x-gyre-execution", b"0"))
            answer = self._make(Asked(json.loads(data), chat, self._settings.max_context, execution))
        except WRONG as error:
            await _refuse(send, error)
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

    async def _render(self, chat: bool, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        """The ids that a prompt would have."""
        data = await _body(receive)
        if data is None:
            return
        try:
            ids = rendered(json.loads(data), chat)
        except WRONG as error:
            await _refuse(send, error)
            return
        entry = {"request_id": f"render-{uuid.uuid4().hex}", "token_ids": ids}
        await _say(send, 200, entry if chat else [entry])

    async def _answer(self, answer: Answer, send: Any) -> None:
        pieces = self._speed.pieces(answer)
        note = (HEADER.encode(), answer.asked.note.encode().encode())
        async with contextlib.aclosing(pieces):
            if not answer.asked.stream:
                async for _ in pieces:
                    pass
                await _begin(send, 200, b"application/json", note)
                await _write(send, answer.piece(0, answer.length), False)
                return
            await _begin(send, 200, b"text/event-stream; charset=utf-8", note)
            async for begin, end in pieces:
                for piece in answer.pieces(begin, end):
                    await _write(send, b"data: " + piece + b"\n\n", True)
            await _write(send, b"data: [DONE]\n\n", False)


async def _body(receive: Callable[[], Awaitable[Message]]) -> bytes | None:
    """A request's body, or None if its client left."""
    data, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        data, more = data + message.get("body", b""), message.get("more_body", False)
    return data


async def _begin(send: Any, status: int, kind: bytes, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *headers]})


async def _write(send: Any, body: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _say(send: Any, status: int, value: Any) -> None:
    await _begin(send, status, b"application/json")
    await _write(send, json.dumps(value).encode(), False)


async def _refuse(send: Any, error: Exception) -> None:
    text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    await _say(send, 400, {"error": {"message": text, "type": "BadRequestError", "param": None, "code": 400}})


# -- the program -------------------------------------------------------------------------------------------------------
async def _serve(settings: Any, parent: Parent, make: Make) -> int:
    import uvicorn

    from gyre.cell.gate import Gate

    speed = Speed(settings.timed["tokens_per_second"], settings.timed["slowdown"])
    control = StandInControl(speed, settings)
    gate = Gate(Server(speed, settings, make), secret=settings.secret, rank=settings.rank, control=control)
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


def main(kind: Callable[[Any], Make]) -> None:
    """Be an engine, a child of a supervisor whose settings come over the socket in GYRE_CHILD_FD; does not return.

    `kind` says for the settings what is made of requests. Raises UserError there where they are no good.
    """
    leave(_main(kind))


def _main(kind: Callable[[Any], Make]) -> int:
    import uvloop

    from gyre.cell.engine_client import EngineSettings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    descriptor = os.environ.pop("GYRE_CHILD_FD", None)
    if descriptor is None:
        print("this is a child of a supervisor: its settings come over a socket, GYRE_CHILD_FD")
        return EXIT_USER
    parent = Parent(socket.socket(fileno=int(descriptor)))
    settings = EngineSettings.decode(parent.settings_line())
    parent.watch()
    try:
        return uvloop.run(_serve(settings, parent, kind(settings)))
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_USER
    except Exception as error:
        log.exception("the engine failed")
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return EXIT_FAULT
