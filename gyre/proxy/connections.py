"""Connections to engines: as much of HTTP/1.1 as it takes to ask one and to read its answer as it comes.

A proxy reads every token of every answer by itself, so what a piece of an answer costs is what the proxy costs. Here a
piece is cut out of what came, and whoever reads is woken once for all that came together. Connections are kept for a
while after an answer, for the next request; one that is left in the middle of an answer is broken, which tells the
engine that nobody waits for the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

CONNECT_SECONDS = 10.0
#: Servers drop idle connections after 5 s; they are not to do it while a request is on its way.
IDLE_SECONDS = 2.0
#: The end of an answer's stream is waited for so long after the answer is whole, before its connection is broken.
LINGER_SECONDS = 1.0
_MAX_HEAD = 1 << 16
_MAX_LINE = 256  # of the length of a chunk
_MAX_UNREAD = 1 << 20


class Lost(Exception):
    """The connection failed, or what came is no HTTP; `reached` is False where none came about."""

    def __init__(self, message: str, reached: bool = True) -> None:
        super().__init__(message)
        self.reached = reached


@lru_cache(maxsize=1024)
def _place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise Lost(f"{url} is no address of an engine", reached=False)
    return parts.hostname, parts.port or 80


class Connections:
    """Those of one proxy, by engine."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], list[Connection]] = {}
        self._all: set[Connection] = set()

    async def post(self, url: str, path: str, headers: Mapping[str, str], body: bytes) -> Connection:
        """Send a request; the connection has the answer's head once this returns. `close` it, whatever it says.

        Raises:
            Lost: there is no answer.
        """
        place = _place(url)
        words = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST {path} HTTP/1.1\r\nHost: {place[0]}:{place[1]}\r\n{words}Content-Length: {len(body)}\r\n\r\n"
        while True:
            kept = self._kept(place)
            connection = kept or await self._connect(place)
            try:
                await connection.ask(head.encode("latin-1"), body)
                return connection
            except BaseException as error:
                connection.close()
                # One that was kept may have been closed just then by the other side, which tells nothing of the engine.
                if not (isinstance(error, Lost) and kept):
                    raise

    def _kept(self, place: tuple[str, int]) -> Connection | None:
        idle = self._idle.get(place)
        while idle:
            connection = idle.pop()
            if connection.usable():
                return connection
            connection.abort()
        return None

    async def _connect(self, place: tuple[str, int]) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(lambda: Connection(self, place), *place)
        except TimeoutError as error:
            raise Lost("no connection in time", reached=False) from error
        except OSError as error:
            raise Lost(f"{type(error).__name__}: {error}", reached=False) from error
        self._all.add(connection)
        return connection

    def keep(self, connection: Connection) -> None:
        """An answer has ended; its connection can take another request."""
        self._idle.setdefault(connection.place, []).append(connection)

    def gone(self, connection: Connection) -> None:
        """A connection is closed."""
        self._all.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._idle[connection.place].remove(connection)

    def look(self) -> None:
        """To be called about every second: let go of connections that are not used."""
        for place, idle in list(self._idle.items()):
            for connection in [one for one in idle if not one.usable()]:
                connection.abort()
            if not idle:
                self._idle.pop(place, None)

    def close(self) -> None:
        """Break all of them."""
        for connection in list(self._all):
            connection.abort()


class Connection(asyncio.Protocol):
    """One connection, which carries one request at a time."""

    def __init__(self, owner: Connections, place: tuple[str, int]) -> None:
        self.place = place
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._reader: asyncio.Future[None] | None = None  # who waits for more
        self._pieces: list[bytes] = []  # of the body, not read yet
        self._unread = 0
        self._buffer = b""  # what cannot be cut yet
        self._busy = False
        self._head = False  # whether the present answer's is there
        self._ended = False
        self._fault = ""
        self._chunked = self._until_closed = self._reusable = False
        self._left = 0  # bytes that the body, or its present chunk, still has
        self._paused = False
        self._idle_since = 0.0
        self._linger: asyncio.TimerHandle | None = None

    # -- the one who asks --------------------------------------------------------------------------------------------
    def usable(self) -> bool:
        """Whether it can take a request now."""
        return not self._fault and not self._busy and self._loop.time() - self._idle_since < IDLE_SECONDS

    async def ask(self, head: bytes, body: bytes) -> None:
        """Send a request, and wait for the head of the answer. Raises Lost."""
        self._busy, self._head, self._ended = True, False, False
        self._buffer, self._left = b"", 0
        if len(body) < _MAX_HEAD:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])
        while not self._head:
            self._demand_sound()
            await self._wait()

    async def read(self) -> bytes:
        """What came of the body since the last time, or once something does; nothing at its end. Raises Lost."""
        while not self._pieces:
            if self._ended:
                return b""
            self._demand_sound()
            await self._wait()
        pieces, self._pieces, self._unread = self._pieces, [], 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read_all(self, limit: int) -> bytes:
        """The whole body, or its first `limit` bytes. Raises Lost."""
        body = b""
        while len(body) < limit and (data := await self.read()):
            body += data
        return body[:limit]

    def close(self, whole: bool = False) -> None:
        """Let go of it; `whole` says that of the answer only the end of its stream may be missing."""
        self._pieces, self._unread = [], 0
        if self._ended and self._reusable and not self._fault:
            self._busy, self._idle_since = False, self._loop.time()
            self._owner.keep(self)
        elif whole and self._head and self._reusable and not self._fault:
            self._linger = self._loop.call_later(LINGER_SECONDS, self.abort)
            if self._paused:
                self._paused = False
                self._transport.resume_reading()
        else:
            self.abort()

    def abort(self) -> None:
        """Break it."""
        self._fault = self._fault or "left"
        self._owner.gone(self)
        if self._transport is not None:
            self._transport.abort()

    def _demand_sound(self) -> None:
        if self._fault:
            raise Lost(self._fault)

    async def _wait(self) -> None:
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # -- the event loop ----------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It came about."""
        self._transport = transport

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is closed, by whichever side."""
        if self._head and self._until_closed and exc is None:
            self._ended = True
        self._fault = self._fault or (f"{type(exc).__name__}: {exc}" if exc else "the connection was closed")
        if self._linger is not None:
            self._linger.cancel()
        self._owner.gone(self)
        self._wake()

    def data_received(self, data: bytes) -> None:
        """Something came."""
        if self._fault:
            return
        try:
            if not self._busy or self._ended:
                raise Lost("more than an answer")
            if not self._head:
                data = self._take_head(data)
            if self._head:
                self._take_body(data)
        except (Lost, ValueError) as error:
            self._fault = f"no HTTP: {error}"
            self._transport.abort()
        if self._linger is not None:
            self._pieces, self._unread = [], 0
            if self._ended:
                self._linger.cancel()
                self._linger = None
                self.close()
        elif self._unread > _MAX_UNREAD and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def _take_head(self, data: bytes) -> bytes:
        """Read the head once it is whole; what follows it."""
        data = self._buffer + data
        head, found, rest = data.partition(b"\r\n\r\n")
        if len(head) > _MAX_HEAD:
            raise Lost("a head without end")
        if not found:
            self._buffer = data
            return b""
        self._buffer = b""
        first, *lines = head.decode("latin-1").split("\r\n")
        version, code, *_ = first.split(" ", 2)
        if version not in ("HTTP/1.1", "HTTP/1.0") or not (code.isdigit() and len(code) == 3):
            raise Lost(f"a first line {first[:80]!r}")
        if code[0] == "1":
            return self._take_head(rest)
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        self.status, self.headers, self._head = int(code), headers, True
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = headers.get("content-length", "")
        self._until_closed = not self._chunked and not length and code not in ("204", "304")
        keeps = headers.get("connection", "keep-alive" if version == "HTTP/1.1" else "close").lower()
        self._reusable = keeps == "keep-alive" and not self._until_closed
        self._left = 0 if self._chunked or not length else _size(length.encode(), 10)
        self._ended = not self._chunked and not self._until_closed and not self._left
        return rest

    def _take_body(self, data: bytes) -> None:
        if self._chunked:
            self._take_chunks(data)
        elif self._until_closed:
            self._add(data)
        else:
            left = self._left
            self._add(data[:left])
            self._left -= min(left, len(data))
            self._ended = not self._left
            if len(data) > left:
                raise Lost("more than an answer")

    def _add(self, data: bytes) -> None:
        if data:
            self._pieces.append(data)
            self._unread += len(data)

    def _take_chunks(self, data: bytes) -> None:
        """Cut chunks out of what came; of the present one `_left` bytes are missing, its line's end included."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        at, size = 0, len(data)
        while at < size:
            if self._left:
                end = at + self._left
                if end > size:
                    # The line's end may be cut: it is no part of the piece.
                    inside = min(size, end - 2)
                    self._add(data[at:inside])
                    self._left = end - inside
                    self._buffer = data[inside:]
                    return
                if data[end - 2 : end] != b"\r\n":
                    raise Lost("a chunk of another length")
                self._add(data[at : end - 2])
                self._left, at = 0, end
                continue
            line = data.find(b"\r\n", at)
            if line < 0:
                if size - at > _MAX_LINE:
                    raise Lost("a chunk without a length")
                break
            length = _size(data[at:line].partition(b";")[0], 16)
            if not length:
                if data[line + 2 : line + 4] == b"\r\n":  # no trailers, as always
                    self._finish(size - line - 4)
                    return
                end = data.find(b"\r\n\r\n", line)
                if end < 0:
                    if size - at > _MAX_HEAD:
                        raise Lost("trailers without end")
                    break
                self._finish(size - end - 4)
                return
            self._left, at = length + 2, line + 2
        self._buffer = data[at:]

    def _finish(self, more: int) -> None:
        self._ended, self._buffer = True, b""
        if more:
            raise Lost("more than an answer")


def _size(text: bytes, base: int) -> int:
    text = text.strip()
    if not text.isalnum():  # signs and underlines are no digits here
        raise Lost(f"a length {text[:40]!r}")
    return int(text, base)
