"""The proxy of a harness host: `python -m gyre.proxy.server`, a child of the host's supervisor.

It listens on loopback only, and accepts a token only while the execution it belongs to lives. Operations of the
supervisor: start, routes, register, held, close, totals. Requests: chat completions and the list of models.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from gyre.child import AsyncEndpoint
from gyre.errors import ChildFailed
from gyre.proxy import chat
from gyre.proxy.executions import Execution, Switchboard
from gyre.proxy.relay import Relay, Settings
from gyre.proxy.upstream import Closed, Refused

log = logging.getLogger(__name__)

MAX_BODY = 32 << 20
KEEP_ALIVE_SECONDS = 5.0
_EXECUTION = web.RequestKey("execution", Execution)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _error(status: int, message: str, kind: str = "invalid_request_error", code: str | None = None) -> web.Response:
    return web.json_response(chat.error(message, kind, code), status=status)


class EventStream:
    """A streaming client: server-sent events, with comments while there is nothing to say."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        self._lock = asyncio.Lock()
        self._last = time.monotonic()

    @property
    def begun(self) -> bool:
        """Whether the client has been sent a status."""
        return self._response.prepared

    async def _write(self, data: bytes) -> None:
        async with self._lock:
            if not self._response.prepared:
                await self._response.prepare(self._request)
            self._last = time.monotonic()
            await self._response.write(data)

    async def send(self, event: Any) -> None:
        """Send one JSON event."""
        await self._write(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")

    async def keep_alive(self) -> None:
        """Send a comment if nothing was sent for a while; a client that is slow to read hears nothing more."""
        if not self._lock.locked() and time.monotonic() - self._last >= KEEP_ALIVE_SECONDS:
            with contextlib.suppress(ConnectionError):
                await self._write(b": waiting\n\n")

    async def end(self) -> web.StreamResponse:
        """Finish the stream as OpenAI does."""
        await self._write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response


class Proxy:
    """The HTTP side and the supervisor's operations, around the executions and the switchboard."""

    def __init__(self) -> None:
        self._board = Switchboard()
        self._executions: dict[int, Execution] = {}
        self._tokens: dict[str, Execution] = {}
        self._streams: set[EventStream] = set()
        self._settings = Settings(secret="", max_context=0)
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self._ticker: asyncio.Task[None] | None = None

    # -- operations --------------------------------------------------------------------------------------------------
    async def start(self, tokenizer: str | None = None, **settings: Any) -> dict[str, Any]:
        """Listen; returns the port."""
        self._settings = Settings(**settings)
        self._board.doors.limit = self._settings.slots
        self._session = aiohttp.ClientSession(
            # Servers drop idle connections after 5 s; they are not to do it while a request is on its way.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
            read_bufsize=1 << 16,
            trust_env=False,
        )
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, keepalive_timeout=75.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        self._ticker = asyncio.create_task(self._tick(), name="keep alive")
        return {"port": self._runner.addresses[0][1]}

    async def routes(self, version: int, engines: dict[str, Any], moves: dict[str, int]) -> None:
        """A difference to the route table."""
        self._board.apply(version, engines, moves)

    async def register(self, execution: int, try_number: int, token: str, engine: int, record_path: str) -> None:
        """Accept a try's token from now on."""
        if old := self._executions.get(execution):
            await self._remove(old)
        entry = Execution(execution, try_number, token, Path(record_path))
        self._board.table.assign(execution, engine)
        self._executions[execution] = self._tokens[token] = entry

    def _entry(self, execution: int, try_number: int) -> Execution:
        entry = self._executions.get(execution)
        if entry is None or entry.try_number != try_number:
            raise ChildFailed(f"try {try_number} of execution {execution} is not registered")
        return entry

    async def held(self, execution: int, try_number: int) -> dict[str, Any]:
        """Seconds in which a try's requests were held, and whether one is now."""
        entry = self._entry(execution, try_number)
        return {"seconds": entry.held_seconds, "now": entry.held}

    async def close(self, execution: int, try_number: int) -> dict[str, Any]:
        """End a try's requests, make its records durable and count them."""
        entry = self._entry(execution, try_number)
        await self._remove(entry)
        return asdict(entry.counts)

    async def totals(self) -> dict[str, Any]:
        """For the live view."""
        live = [len(entry.tasks) for entry in self._executions.values()]
        held = sum(entry.held for entry in self._executions.values())
        totals = {"executions": len(self._executions), "requests": sum(live), "held": held}
        return {**totals, "engines": self._board.totals()}

    async def _remove(self, entry: Execution) -> None:
        self._tokens.pop(entry.token, None)
        await entry.close()
        if self._executions.get(entry.number) is entry:
            del self._executions[entry.number]
            self._board.table.forget(entry.number)

    async def stop(self) -> None:
        """Stop listening and let go of everything."""
        if self._ticker:
            self._ticker.cancel()
        for entry in list(self._executions.values()):
            await self._remove(entry)
        if self._runner:
            await self._runner.cleanup()
        if self._session:
            await self._session.close()

    # -- requests ----------------------------------------------------------------------------------------------------
    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whose request it is; every error leaves in OpenAI's shape."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else request.headers.get("X-Api-Key", "")
        entry = self._tokens.get(token)
        if entry is None:
            return _error(401, "unknown key, or its execution is over", "authentication_error", "invalid_api_key")
        request[_EXECUTION] = entry
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is larger than {MAX_BODY} bytes")
        except web.HTTPException as error:
            return _error(error.status, f"{error.reason}: {request.method} {request.path}", code="not_found")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for stream in list(self._streams):
                await stream.keep_alive()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card(self._settings.model)]})

    async def _model(self, request: web.Request) -> web.Response:
        return web.json_response(self._card(request.match_info["model"]))

    def _card(self, name: str) -> dict[str, Any]:
        context = self._settings.max_context
        return {"id": name, "object": "model", "created": 0, "owned_by": "gyre", "max_model_len": context}

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        entry = request[_EXECUTION]
        try:
            body = json.loads(await request.read())
            asked = chat.parse(body)
        except (ValueError, RecursionError):
            return _error(400, "the body is not JSON")
        except chat.BadRequest as error:
            return _error(400, str(error))
        task = asyncio.current_task()
        assert task is not None
        entry.tasks.add(task)
        try:
            return await self._relay(request, entry, asked)
        finally:
            entry.tasks.discard(task)

    async def _relay(self, request: web.Request, entry: Execution, asked: chat.Request) -> web.StreamResponse:
        assert self._session is not None
        entry.counts.requests += 1
        stream = EventStream(request) if asked.stream else None
        relay = Relay(asked, entry, self._board, self._session, self._settings, stream.send if stream else None)
        if stream:
            self._streams.add(stream)
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                answer = await relay.run()
            reply = web.json_response(answer) if stream is None else await stream.end()
            entry.counts.answered += 1
            return reply
        except Closed:
            entry.counts.abandoned += 1
            return await self._say(stream, 410, chat.error("the execution is over", "invalid_request_error", "closed"))
        except Refused as error:
            if error.status < 500:
                entry.counts.refused += 1
            else:
                self._lost(entry, relay.fault)
            return await self._say(stream, error.status, _json(error.body))
        except TimeoutError:
            fault = f"no engine answered in {self._settings.request_timeout:g} s"
            self._lost(entry, f"{fault}; last, {relay.fault}" if relay.fault else fault)
            return await self._say(stream, 504, chat.error(entry.counts.fault, "server_error", "timeout"))
        except (asyncio.CancelledError, ConnectionError):
            entry.counts.abandoned += 1
            raise
        except Exception:  # a fault of ours must not look like an answer
            log.exception("execution %d: a request failed", entry.number)
            self._lost(entry, "internal fault of the proxy")
            return await self._say(stream, 500, chat.error("internal fault of the proxy", "server_error", "internal"))
        finally:
            if stream:
                self._streams.discard(stream)

    @staticmethod
    def _lost(entry: Execution, fault: str) -> None:
        entry.counts.lost += 1
        entry.counts.fault = fault

    async def _say(self, stream: EventStream | None, status: int, error: Any) -> web.StreamResponse:
        """Answer with an error, in the stream where one has begun."""
        if stream is None or not stream.begun:
            return web.json_response(error, status=status)
        await stream.send(error)
        return await stream.end()


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return chat.error(body.decode("utf-8", "replace"), "invalid_request_error")


async def main() -> None:
    """Serve until the supervisor closes."""
    proxy, endpoint = Proxy(), AsyncEndpoint()
    operations = ("start", "routes", "register", "held", "close", "totals")
    try:
        await endpoint.serve({name: getattr(proxy, name) for name in operations})
    finally:
        await proxy.stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    uvloop.run(main())
