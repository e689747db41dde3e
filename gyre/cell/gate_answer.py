"""What passes through the gate: bodies that are bounded, answers that can still become refusals, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from gyre.errors import GyreError
from gyre.splice import HEADER, PromptNote

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_SECONDS = 60.0  # for a client to send its whole request


class BodyTooLarge(GyreError):
    """A request sends more than it may."""


class Live:
    """One admitted model request."""

    def __init__(self, execution: int) -> None:
        self.execution = execution
        self.reason: str | None = None  # why it was cancelled
        self.task: asyncio.Task[None] | None = None
        self._cancelled = asyncio.Event()

    def cancel(self, reason: str) -> None:
        """Have the engine's server believe that the client is gone."""
        self.reason = self.reason or reason
        self._cancelled.set()

    async def cancelled(self) -> None:
        """Wait for a cancellation."""
        await self._cancelled.wait()


class Answer:
    """What the client gets: the engine's answer, unless the request is cancelled before it is complete."""

    def __init__(self, send: Send, live: Live, headers: list[tuple[bytes, bytes]], notes: list[PromptNote]) -> None:
        self._send = send
        self._live = live
        self._headers = headers
        self._notes = notes
        self._start: Message | None = None
        self._begun = self._complete = self._stream = False
        self._tail = b""

    async def send(self, message: Message) -> None:
        """Pass a message on; the start waits for the first piece of body, so that it can still become a refusal."""
        if self._live.reason is not None:
            return
        if message["type"] == "http.response.start":
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self._stream = kind.startswith(b"text/event-stream")
            self._start = {**message, "headers": [*message.get("headers", ()), *self._headers]}
            return
        if self._complete:
            return
        if self._start is not None:
            start, self._start = self._start, None
            if self._stream and (refusal := _first_error(message.get("body", b""))) is not None:
                await self._refused(start, *refusal)
                return
            if self._notes:
                start["headers"].append((HEADER.encode(), self._notes[0].encode().encode()))
            self._begun = True
            await self._send(start)
        self._complete = not message.get("more_body", False)
        self._tail = message.get("body", b"")[-2:] or self._tail
        await self._send(message)

    async def _refused(self, start: Message, status: int, body: bytes) -> None:
        """Answer what a stream begins with, an error, as the plain refusal that it is."""
        self._begun = self._complete = True
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-type"]
        headers.append((b"content-type", b"application/json"))
        await self._send({**start, "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def end(self) -> None:
        """Say the last words of a cancelled request."""
        if self._complete:
            return
        moved = self._live.reason == "gyre_moved"
        if not self._begun:
            await refuse(self._send, self._live.reason or "gyre_moved", "cancelled here; look up its route")
        elif self._stream:
            gap = "" if self._tail in (b"", b"\n\n") else "\n\n"
            words = json.dumps({"moved": True} if moved else {"moved": False, "closed": True})
            body = f"{gap}event: gyre\ndata: {words}\n\n".encode()
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        else:  # half a plain answer cannot be taken back: break the connection
            raise ConnectionAbortedError("cancelled in the middle of an answer")


async def read_body(headers: dict[bytes, bytes], receive: Receive, send: Send, limit: int) -> bytes | None:
    """The whole body, or None if the client left or has been told that it sends too much, or too slowly."""
    try:
        announced = headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced[:20]) > limit:
            raise BodyTooLarge(f"a body may have {limit} bytes")
        async with asyncio.timeout(BODY_SECONDS):
            return await _read(receive, limit)
    except TimeoutError:
        await refuse(send, "gyre_slow_body", f"the body did not come within {BODY_SECONDS:.0f} s", 408)
    except BodyTooLarge as error:
        await refuse(send, "gyre_large_body", str(error), 413)
    return None


async def _read(receive: Receive, limit: int) -> bytes | None:
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > limit:
            raise BodyTooLarge(f"a body may have {limit} bytes")
        if not message.get("more_body", False):
            return b"".join(pieces)


def _first_error(event: bytes) -> tuple[int, bytes] | None:
    """Status and body of a refusal, where the first event of a stream is one: engines check some of a request late."""
    if not event.startswith(b'data: {"error"'):
        return None
    body = event[6:].split(b"\n", 1)[0]
    with contextlib.suppress(ValueError, TypeError, KeyError):
        status = json.loads(body)["error"]["code"]
        if isinstance(status, int) and 400 <= status <= 599:
            return status, body
    return None


async def send_json(send: Send, status: int, value: Message) -> None:
    """A whole answer in JSON."""
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(value).encode(), "more_body": False})


async def refuse(send: Send, kind: str, message: str, status: int = 409) -> None:
    """An answer that says why there is none."""
    await send_json(send, status, {"error": {"type": kind, "message": message}})
