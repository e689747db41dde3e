"""How long a prompt is: asked of the engine that would answer it, which alone knows its chat template."""

from __future__ import annotations

import logging
from typing import Any

import aiohttp
import msgspec

from gyre.proxy.executions import Execution, Switchboard
from gyre.proxy.routing import Route
from gyre.proxy.upstream import Broken, Moved, headers, raise_for

log = logging.getLogger(__name__)

PATH = "/v1/chat/completions/render"
MAX_TRIES = 10
_PAUSE = 0.1


async def count_tokens(
    chat: dict[str, Any],
    execution: Execution,
    board: Switchboard,
    session: aiohttp.ClientSession,
    secret: str,
) -> int:
    """The number of tokens that the messages of a chat completion are rendered to, wherever the execution is routed.

    Raises:
        Refused, Closed: the engine finds fault with the request, or the execution is over.
        Broken: no engine gave a sound answer.
    """
    body = msgspec.json.encode({key: value for key, value in chat.items() if key != "model"})
    failed: Route | None = None
    failures = 0
    while True:
        with execution.hold():
            route = await board.route(execution.number, failed, _PAUSE)
        failed = route
        try:
            return await _render(session, route, headers(secret, execution.number, route), body)
        except Moved:
            pass
        except Broken as error:
            failures += error.reached
            log.info("execution %d: engine %d counts no tokens", execution.number, route.engine)
            if failures >= MAX_TRIES:
                raise


async def _render(session: aiohttp.ClientSession, route: Route, head: dict[str, str], body: bytes) -> int:
    try:
        request = session.post(route.url + PATH, data=body, headers={**head, "Content-Type": "application/json"})
        async with request as response:
            if response.status != 200:
                await raise_for(response)
            given = msgspec.json.decode(await response.read())
            return len(given["token_ids"])
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise Broken(f"{type(error).__name__}: {error}", reached=False) from error
    except (aiohttp.ClientError, ConnectionError, LookupError, TypeError, ValueError) as error:
        raise Broken(f"{type(error).__name__}: {error}") from error
