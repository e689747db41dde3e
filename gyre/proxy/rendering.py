"""How long a prompt is: asked of the engine that would answer it, which alone knows its chat template."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from gyre.proxy.connections import Connections, Lost
from gyre.proxy.encoding import encode
from gyre.proxy.executions import Execution, Switchboard
from gyre.proxy.routing import Route
from gyre.proxy.upstream import Broken, Moved, headers, post

log = logging.getLogger(__name__)

PATH = "/v1/chat/completions/render"
MAX_TRIES = 10
_PAUSE = 0.1
_MAX_ANSWER = 256 << 20


async def count_tokens(
    chat: dict[str, Any],
    execution: Execution,
    board: Switchboard,
    connections: Connections,
    secret: str,
) -> int:
    """The number of tokens that the messages of a chat completion are rendered to, wherever the execution is routed.

    Raises:
        Refused, Closed: the engine finds fault with the request, or the execution is over.
        Broken: no engine gave a sound answer.
    """
    body = encode({key: value for key, value in chat.items() if key != "model"})
    failed: Route | None = None
    failures = 0
    while True:
        with execution.hold():
            route = await board.route(execution.number, failed, _PAUSE)
        failed = route
        try:
            return await _render(connections, route, headers(secret, execution.number, route), body)
        except Moved:
            pass
        except Broken as error:
            failures += error.reached
            log.info("execution %d: engine %d counts no tokens", execution.number, route.engine)
            if failures >= MAX_TRIES:
                raise


async def _render(connections: Connections, route: Route, head: dict[str, str], body: bytes) -> int:
    connection = await post(connections, route, PATH, body, head)
    try:
        return len(msgspec.json.decode(await connection.read_all(_MAX_ANSWER))["token_ids"])
    except (Lost, LookupError, TypeError, ValueError) as error:
        raise Broken(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
