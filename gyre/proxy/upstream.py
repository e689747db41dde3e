"""One request to one engine: the events of its token stream, and how it ended."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from gyre.proxy.connections import Connection, Connections, Lost
from gyre.proxy.routing import Route
from gyre.proxy.sound import Event

_MAX_EVENT = 32 << 20
_MAX_ERROR = 1 << 20
_KIND = re.compile(r"[\w.-]{1,60}", re.ASCII)


class Moved(Exception):
    """The engine's gate turned the request away, or cancelled it: its cell leaves, or loads other weights."""


class Broken(Exception):
    """The engine failed, or what it said is no answer.

    `reached` is False where no connection to it came about; `lost` says that it broke off, as one does that dies.
    """

    def __init__(self, message: str, reached: bool = True, lost: bool = False) -> None:
        super().__init__(message)
        self.reached = reached
        self.lost = lost


class Closed(Exception):
    """The engine's gate knows that the execution is closed."""


class Refused(Exception):
    """The engine answered with an error that is the client's to see."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"refused with {status}")
        self.status = status
        self.body = body

    @property
    def kind(self) -> str:
        """What kind of error the engine called it."""
        return _kind(self.body)


def _kind(body: bytes) -> str:
    """An engine's name for an error, fit for a log. Its message may quote what a client sent, and is never logged."""
    try:
        error = json.loads(body)
        kind = (error.get("error") or error).get("type")
    except (ValueError, AttributeError, RecursionError):
        kind = None
    return kind if isinstance(kind, str) and _KIND.fullmatch(kind) else "no type"


def headers(secret: str, execution: int, route: Route) -> dict[str, str]:
    """What the gate wants to know of a request."""
    return {
        "Authorization": f"Bearer {secret}",
        "X-Gyre-Execution": str(execution),
        "X-Gyre-Epoch": str(route.epoch),
        "Content-Type": "application/json",
    }


async def post(
    connections: Connections, route: Route, path: str, body: bytes, request_headers: Mapping[str, str]
) -> Connection:
    """Ask an engine; its answer has begun once this returns, and is to be read and closed.

    Raises:
        Moved, Broken, Closed, Refused: there is no answer.
    """
    connection = None
    try:
        connection = await connections.post(route.url, path, request_headers, body)
        if connection.status == 200:
            return connection
        _raise_for(connection.status, await connection.read_all(_MAX_ERROR))
    except Lost as error:
        raise Broken(str(error), error.reached, lost=True) from error
    finally:
        if connection is not None and connection.status != 200:
            connection.close()


def _raise_for(status: int, body: bytes) -> NoReturn:
    """Raise what an engine's answer other than 200 means to a request."""
    kind = _kind(body)
    if status == 409 and kind == "gyre_moved":
        raise Moved("refused")
    if status == 409 and kind == "gyre_execution_closed":
        raise Closed
    # 401 and 403 concern the run's own key, 404 the engine's routes, 429 its load: nothing a client can change.
    if status >= 500 or status in (401, 403, 404, 408, 429):
        raise Broken(f"status {status} ({kind})")
    raise Refused(status, body)


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
    status, body = error.get("code") if isinstance(error, dict) else None, json.dumps({"error": error}).encode()
    if isinstance(status, int) and 400 <= status < 500:
        return Refused(status, body)
    return Broken(f"error in the stream ({status if isinstance(status, int) else 'no status'}, {_kind(body)})")


class Stream:
    """The events of an engine's answer, as they come."""

    def __init__(self, connection: Connection, decode: Callable[[bytes], Event]) -> None:
        self._connection = connection
        self._decode = decode
        self._rest = b""

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the answer, their names in lower case."""
        return self._connection.headers

    async def blocks(self) -> list[bytes]:
        """What came since the last time, or once something does, cut into whole events to be read one by one.

        Raises:
            Broken: nothing more will come.
        """
        try:
            data = await self._connection.read()
        except Lost as error:
            raise Broken(str(error), lost=True) from error
        if not data:
            raise Broken("the stream ended early", lost=True)
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > _MAX_EVENT:
            raise Broken("an event without end")
        return blocks

    def event(self, block: bytes) -> Event | None:
        """One event; None where there is nothing in it.

        Raises:
            Moved, Broken, Closed, Refused: the stream ends with it.
        """
        name, data = _event(block)
        if name == "gyre":
            raise Closed if b'"closed": true' in data else Moved("cancelled")
        if data == b"[DONE]":
            raise Broken("the stream ended before the answer")
        if not data:
            return None
        try:
            event = self._decode(data)
        except (ValueError, RecursionError) as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        if event.error:
            raise _in_stream_error(event.error)
        return event

    def close(self, whole: bool) -> None:
        """Read no more; `whole` says that the answer was."""
        self._connection.close(whole)
