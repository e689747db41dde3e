"""One request to one engine: the events of its token stream, and how it ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp

from gyre.proxy.routing import Route
from gyre.proxy.sound import Event

_MAX_EVENT = 32 << 20
_MAX_ERROR = 1 << 20


class Moved(Exception):
    """The engine's gate turned the request away, or cancelled it: its cell leaves, or loads other weights."""


class Broken(Exception):
    """The engine failed, or what it said is no answer; `reached` is False where no connection to it came about."""

    def __init__(self, message: str, reached: bool = True) -> None:
        super().__init__(message)
        self.reached = reached


class Closed(Exception):
    """The engine's gate knows that the execution is closed."""


class Refused(Exception):
    """The engine answered with an error that is the client's to see."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"refused with {status}")
        self.status = status
        self.body = body


def headers(secret: str, execution: int, route: Route) -> dict[str, str]:
    """What the gate wants to know of a request."""
    return {
        "Authorization": f"Bearer {secret}",
        "X-Gyre-Execution": str(execution),
        "X-Gyre-Epoch": str(route.epoch),
    }


async def raise_for(response: aiohttp.ClientResponse) -> None:
    """Raise what an engine's answer other than 200 means to a request."""
    body = await response.content.read(_MAX_ERROR)
    if response.status == 409:
        try:
            kind = json.loads(body)["error"]["type"]
        except (ValueError, KeyError, TypeError):
            kind = ""
        if kind == "gyre_moved":
            raise Moved("refused")
        if kind == "gyre_execution_closed":
            raise Closed
    # 401 and 403 concern the run's own key, 404 the engine's routes, 429 its load: nothing a client can change.
    if response.status >= 500 or response.status in (401, 403, 404, 408, 429):
        raise Broken(f"status {response.status}: {body[:200]!r}")
    raise Refused(response.status, body)


async def _blocks(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    buffer = b""
    async for data in content.iter_any():
        buffer += data
        if b"\n\n" not in data and b"\n\n" not in buffer:
            if len(buffer) > _MAX_EVENT:
                raise Broken("an event without end")
            continue
        *blocks, buffer = buffer.split(b"\n\n")
        for block in blocks:
            yield block


def _event(block: bytes) -> tuple[str, bytes]:
    if block.startswith(b"data: ") and b"\n" not in block:
        return "", block[6:]
    name, data = "", b""
    for line in block.split(b"\n"):
        key, _, value = line.partition(b":")
        if key == b"event":
            name = value.strip().decode()
        elif key == b"data":
            data += value.strip()
    return name, data


def _in_stream_error(error: Any) -> Exception:
    status = error.get("code") if isinstance(error, dict) else None
    if isinstance(status, int) and 400 <= status < 500:
        return Refused(status, json.dumps({"error": error}).encode())
    return Broken(f"error in the stream: {str(error)[:200]}")


async def stream(
    session: aiohttp.ClientSession,
    route: Route,
    path: str,
    body: bytes,
    request_headers: dict[str, str],
    admitted: Callable[[Mapping[str, str]], None],
    decode: Callable[[bytes], Event],
) -> AsyncIterator[Event]:
    """The events of an engine's answer, up to its ``[DONE]``; `admitted` is told its headers when it begins.

    Raises:
        Moved, Broken, Closed, Refused: how it ended otherwise.
    """
    try:
        async with session.post(
            route.url + path, data=body, headers={**request_headers, "Content-Type": "application/json"}
        ) as response:
            if response.status != 200:
                await raise_for(response)
            admitted(response.headers)
            async for block in _blocks(response.content):
                name, data = _event(block)
                if name == "gyre":
                    raise Closed if b'"closed": true' in data else Moved("cancelled")
                if data == b"[DONE]":
                    return
                if data:
                    event = decode(data)
                    if event.error:
                        raise _in_stream_error(event.error)
                    yield event
        raise Broken("the stream ended early")
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise Broken(f"{type(error).__name__}: {error}", reached=False) from error
    except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError, ValueError, RecursionError) as error:
        raise Broken(f"{type(error).__name__}: {error}") from error
