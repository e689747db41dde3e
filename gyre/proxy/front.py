"""The proxy's HTTP server: connections that are bounded in size, number and time, and answers as events.

It is aiohttp's low-level server: whatever a client sends comes to one handler, or is refused here with an error that
names no part of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from gyre.proxy import limits
from gyre.proxy.dialects import errors
from gyre.proxy.dialects.calls import Event
from gyre.proxy.dialects.errors import ApiError, Json

log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

KEEP_ALIVE_SECONDS = 5.0
_OPENAI_PATHS = ("/v1/chat/", "/v1/completions", "/v1/responses")
_ENCODER = msgspec.json.Encoder()


def speaks_anthropic(path: str, headers: Any) -> bool:
    """Whether a request expects Anthropic's words: its path says so, or its headers where both have such a path."""
    if path.startswith(_OPENAI_PATHS):
        return False
    return path.startswith("/v1/messages") or "anthropic-version" in headers


def reply(value: Json, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """An answer in JSON."""
    return web.Response(body=_ENCODER.encode(value), status=status, headers=headers, content_type="application/json")


def refuse(error: ApiError, anthropic: bool, request_id: str) -> web.Response:
    """An error, in the dialect's own shape."""
    shape = errors.anthropic(error, request_id) if anthropic else errors.openai(error)
    headers = {"request-id" if anthropic else "x-request-id": request_id}
    if error.status in (429, 503):
        headers["Retry-After"] = "1"
    if error.allow:
        headers["Allow"] = error.allow
    return reply(shape, error.status, headers)


def new_request_id() -> str:
    """A name for a request, for its answer and for a person who asks."""
    return f"req_{uuid.uuid4().hex}"


class _Connection(web.RequestHandler):
    """One connection; one that sends no request in time, or sends none at all, is closed."""

    __slots__ = ("_late", "_stalled_at", "_stalled_since")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._late = self._loop.call_later(limits.HEADER_SECONDS, self._hurry)
        self._stalled_at, self._stalled_since = 0, 0.0
        if (sock := transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.WRITE_BUFFER)
        if self._manager.is_full():
            self._give_up(ApiError(503, "the proxy has too many connections"))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._late.cancel()
        super().connection_lost(exc)

    def _hurry(self) -> None:
        if not self._request_count:
            self._give_up(ApiError(408, "no request came in time", code="timeout"))

    def _give_up(self, error: ApiError) -> None:
        if self.transport is not None:
            body = _ENCODER.encode(errors.openai(error))
            head = f"HTTP/1.1 {error.status} Refused\r\nContent-Type: application/json\r\nConnection: close\r\n"
            self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.force_close()

    def look(self, now: float) -> None:
        """Break the connection of a client that has taken nothing of what waits for it for too long."""
        if (transport := self.transport) is None:
            return
        waiting = transport.get_write_buffer_size()
        if not waiting or waiting != self._stalled_at:
            self._stalled_at, self._stalled_since = waiting, now
        elif now - self._stalled_since >= limits.STALL_SECONDS:
            transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is not HTTP, or too large, gets an error without a word of it; the connection closes."""
        if isinstance(exc, ConnectionError) or request.writer.output_size > 0:
            raise ConnectionError("the client is gone, or has a part of an answer")
        if status >= 500:
            log.error("a request failed: %s", type(exc).__name__)
            error = ApiError(status, "internal fault of the proxy", code="internal")
        elif isinstance(exc, LineTooLong):
            error = ApiError(431, f"the first line or a header is larger than {limits.MAX_LINE} bytes")
        elif isinstance(exc, BadHttpMessage) and "Too many" in str(exc):
            error = ApiError(431, f"there are more than {limits.MAX_HEADERS} headers")
        else:
            error = ApiError(400, "this is no HTTP request that is understood here")
        response = refuse(error, False, new_request_id())
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Name the kind of fault alone: what a client sent may be in its words. A body's fault is the client's own."""
        fault = kw.get("exc_info")
        level = logging.DEBUG if isinstance(fault, web.RequestPayloadError) else logging.ERROR
        log.log(level, "a connection failed: %s", type(fault).__name__)


class Front(web.Server):
    """Listens on loopback, and hands every request to `handler`."""

    def __init__(self, handler: Handler) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._sockets: asyncio.Server | None = None
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Every client's request takes another connection, to an engine.
        self._most = min(limits.MAX_CONNECTIONS, files // 2 if files > 0 else limits.MAX_CONNECTIONS)

    def __call__(self) -> web.RequestHandler:
        """A new connection."""
        return _Connection(
            self,
            loop=self._loop,
            access_log=None,
            keepalive_timeout=limits.IDLE_SECONDS,
            lingering_time=limits.LINGER_SECONDS,
            max_line_size=limits.MAX_LINE,
            max_field_size=limits.MAX_LINE,
            max_headers=limits.MAX_HEADERS,
        )

    def is_full(self) -> bool:
        """Whether there are more connections than there may be."""
        return len(self._connections) > self._most

    async def listen(self) -> int:
        """Listen on a free port of loopback; returns it."""
        self._sockets = await self._loop.create_server(self, "127.0.0.1", 0, backlog=1024)
        return self._sockets.sockets[0].getsockname()[1]

    def look(self) -> None:
        """To be called about every second."""
        now = time.monotonic()
        for connection in self.connections:
            connection.look(now)

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._sockets is not None:
            self._sockets.close()
        await self.shutdown(0.5)


async def read_body(request: web.BaseRequest, grow: Callable[[int], None]) -> bytes:
    """The body of a request; `grow` is told of each of its pieces, and raises where there is no room for it.

    Raises:
        ApiError: it is too large or slow, or is not what its headers say; the connection has to be closed.
    """
    if (request.content_length or 0) > limits.MAX_BODY:
        raise ApiError(413, f"the body is larger than {limits.MAX_BODY} bytes", code="request_too_large")
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    pieces = []
    try:
        if request.content.is_eof():  # all of it came with the headers, as most do
            grow(request.content.total_bytes)
            return request.content.read_nowait()
        async with asyncio.timeout(limits.BODY_SECONDS):
            while piece := await request.content.readany():
                grow(len(piece))
                pieces.append(piece)
    except TimeoutError as error:
        raise ApiError(408, "the body did not come in time", code="timeout") from error
    except (aiohttp.ClientPayloadError, aiohttp.http_exceptions.HttpProcessingError, web.RequestPayloadError) as error:
        raise ApiError(400, "the body is not what its headers say") from error
    return b"".join(pieces)


class EventStream:
    """A streaming client: server-sent events, with comments while there is nothing to say."""

    def __init__(self, request: web.BaseRequest, headers: dict[str, str], idle: Callable[[], Event | None]) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )
        self._idle = idle
        self._starting = asyncio.Lock()
        self._started = False
        self._pending = b""  # what is not written yet
        self._writing = 0
        self._over = False
        self._last = time.monotonic()

    @property
    def begun(self) -> bool:
        """Whether the client has been sent a status."""
        return self._response.prepared

    async def _write(self, data: bytes, sign: bool = False) -> None:
        """Write; a sign of life is no reason to begin with an answer that is over by then.

        Who is cancelled before it was written leaves it to the next.
        """
        self._pending += data
        self._last = time.monotonic()
        self._writing += 1
        try:
            if not self._started:
                async with self._starting:  # words and a sign of life may both be the first
                    if sign and self._over:
                        return
                    if not self._started:
                        await self._response.prepare(self._request)
                        self._started = True
            pending, self._pending = self._pending, b""
            if pending:
                await self._response.write(pending)
        finally:
            self._writing -= 1

    async def send(self, events: list[Event]) -> None:
        """Send events; they are sent, with the next ones, even where this is cancelled."""
        if events:
            await self._write(b"".join(map(_encoded, events)))

    @property
    def silent(self) -> bool:
        """Whether the client has been told nothing for a while; never of one that is slow to read."""
        return not self._writing and time.monotonic() - self._last >= KEEP_ALIVE_SECONDS

    async def keep_alive(self) -> None:
        """Say that the answer is still to come."""
        if self._over:
            return
        event = self._idle()
        with contextlib.suppress(ConnectionError):
            await self._write(b": waiting\n\n" if event is None else _encoded(event), sign=True)

    def close(self) -> None:
        """No signs of life from now on: the answer is over, or another one is given in its place."""
        self._over = True

    async def end(self, last: bytes) -> web.StreamResponse:
        """Finish the stream with its last words."""
        self._over = True
        if last or self._pending or not self.begun:
            await self._write(last)
        await self._response.write_eof()
        return self._response


def _encoded(event: Event) -> bytes:
    name, data = event
    head = b"data: " if name is None else b"event: " + name.encode() + b"\ndata: "
    return head + _ENCODER.encode(data) + b"\n\n"
