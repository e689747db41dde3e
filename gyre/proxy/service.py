"""What a proxy answers: the requests of harnesses, each in its own dialect.

    POST /v1/chat/completions, /v1/completions              OpenAI, as engines speak it
    POST /v1/responses; GET and DELETE /v1/responses/{id}   OpenAI's responses
    POST /v1/messages, /v1/messages/count_tokens            Anthropic
    GET /v1/models, /v1/models/{id}                         the one model, in either shape

Whatever is wrong with a request, it gets an error in the shape of its dialect, and the proxy goes on. Nothing that a
client sent, and no token, is ever logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from gyre.proxy import chat, front
from gyre.proxy.connections import Connections
from gyre.proxy.dialects import errors, listing
from gyre.proxy.dialects.calls import Call
from gyre.proxy.dialects.errors import ApiError, Invalid, Json
from gyre.proxy.dialects.intake import Intake
from gyre.proxy.dialects.messages import to_chat
from gyre.proxy.dialects.messages_answer import MessageCall
from gyre.proxy.dialects.openai import OpenAiCall
from gyre.proxy.dialects.reading import decode
from gyre.proxy.dialects.responses_answer import ResponseCall
from gyre.proxy.dialects.responses_store import Store
from gyre.proxy.executions import Execution, Switchboard
from gyre.proxy.limits import Room
from gyre.proxy.relay import Relay, Settings
from gyre.proxy.rendering import count_tokens
from gyre.proxy.upstream import Broken, Closed, Refused

log = logging.getLogger(__name__)

#: The name that stands for the model whatever it is called.
ANY_MODEL = "policy"
_READS = ("GET", "HEAD")


@dataclass(eq=False)
class Client:
    """An execution as its harness sees it."""

    execution: Execution
    room: Room = field(default_factory=Room)
    store: Store = field(default_factory=Store)
    left_out: set[str] = field(default_factory=set)

    def tell(self, left_out: set[str]) -> None:
        """Log what its model is not told of its requests, each kind once."""
        if new := left_out - self.left_out:
            self.left_out |= new
            kinds = ", ".join(sorted(new))
            log.info("execution %d: not for the model here, and left out: %s", self.execution.number, kinds)


class Service:
    """Answers the requests of the executions that are admitted."""

    def __init__(
        self, board: Switchboard, connections: Connections, settings: Settings, models: Iterable[str] = ()
    ) -> None:
        self._board = board
        self._connections = connections
        self._settings = settings
        self._models = (settings.model, ANY_MODEL, *models)
        self._clients: dict[bytes, Client] = {}
        self._key = secrets.token_bytes(32)
        self._room = Room()
        self._streams: set[front.EventStream] = set()
        self._pings: set[asyncio.Task[None]] = set()

    # -- whose request it is -----------------------------------------------------------------------------------------
    def _digest(self, token: str) -> bytes:
        """Tokens are looked up by a keyed digest, so that the time it takes tells nothing of the tokens there are."""
        return hashlib.blake2b(token.encode("utf-8", "surrogateescape"), key=self._key, digest_size=32).digest()

    def admit(self, execution: Execution) -> None:
        """Accept an execution's token from now on."""
        self._clients[self._digest(execution.token)] = Client(execution)

    def dismiss(self, execution: Execution) -> None:
        """Accept it no more."""
        self._clients.pop(self._digest(execution.token), None)

    def _client(self, request: web.BaseRequest) -> Client:
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = (bearer.strip() if scheme.lower() == "bearer" else "", request.headers.get("X-Api-Key", ""))
        for client in [self._clients.get(self._digest(token)) for token in given]:
            if client is not None and not client.execution.closed:
                return client
        raise ApiError(401, "unknown key, or its execution is over", code="invalid_api_key")

    def keep_alive(self) -> None:
        """To be called about every second: tell streaming clients that have heard nothing that they will."""
        for stream in [stream for stream in self._streams if stream.silent]:
            task = asyncio.ensure_future(stream.keep_alive())
            self._pings.add(task)
            task.add_done_callback(self._pings.discard)

    # -- every request -----------------------------------------------------------------------------------------------
    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        path, request_id = request.raw_path.partition("?")[0], front.new_request_id()
        anthropic = front.speaks_anthropic(path, request.headers)
        try:
            return await self._handle(request, path, request_id)
        except ApiError as error:
            response = front.refuse(error, anthropic, request_id)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:  # a fault of ours must not look like an answer
            log.error("a request failed: %s", _where(error))
            fault = ApiError(500, "internal fault of the proxy", code="internal")
            response = front.refuse(fault, anthropic, request_id)
        if not request.content.is_eof():  # the rest of a refused body is not waited for
            response.force_close()
        return response

    async def _handle(self, request: web.BaseRequest, path: str, request_id: str) -> web.StreamResponse:
        method = request.method
        if path == "/":
            _demand(method, *_READS)
            return front.reply({"object": "endpoint", "owned_by": "gyre"})
        client = self._client(request)
        with self._room.enter(client.room):
            if path in _GENERATIONS:
                if method == "GET" and request.headers.get("Upgrade", "").lower() == "websocket":
                    # Agents that would rather have one take this for a no at once, and other errors for a bad moment.
                    raise ApiError(426, "there are no websockets here", code="upgrade_required")
                _demand(method, "POST")
                return await self._generate(request, client, _GENERATIONS[path], request_id)
            if path == "/v1/messages/count_tokens":
                _demand(method, "POST")
                return await self._count(request, client, request_id)
            if path == "/v1/models" or path.startswith("/v1/models/"):
                _demand(method, *_READS)
                return self._model(request, path)
            if path.startswith("/v1/responses/"):
                return self._stored(request, client, path.removeprefix("/v1/responses/"))
        raise ApiError(404, f"there is no {printable(method)} {printable(path)}", code="not_found")

    @contextlib.asynccontextmanager
    async def _body(self, request: web.BaseRequest, client: Client) -> Any:
        """The JSON object that was sent, and its intake, while it is being answered; the execution's end ends it."""
        task, tasks = asyncio.current_task(), client.execution.tasks
        assert task is not None
        tasks.add(task)
        try:
            with self._room.hold(client.room) as grow:
                data = await front.read_body(request, grow)
                if client.execution.closed:
                    raise ApiError(401, "the execution is over", code="invalid_api_key")
                body = decode(data)
                del data  # of a long conversation it is large, and an answer takes long
                yield body, Intake(grow)
        finally:
            tasks.discard(task)

    # -- models ------------------------------------------------------------------------------------------------------
    def _served(self, name: str) -> bool:
        return any(name == known or fnmatchcase(name, known) for known in self._models)

    def _demand_model(self, name: Any) -> None:
        """An empty name means the model that there is."""
        if name and not self._served(name):
            message = f"the model {printable(name)} does not exist; the one served here is {self._settings.model}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def _model(self, request: web.BaseRequest, path: str) -> web.Response:
        anthropic = front.speaks_anthropic(path, request.headers)
        context, name = self._settings.max_context, self._settings.model
        if path == "/v1/models":
            return front.reply(listing.models(name, context, anthropic))
        name = unquote(path.removeprefix("/v1/models/"), errors="replace")
        self._demand_model(name)
        return front.reply(listing.model(name, context, anthropic))

    # -- answers -----------------------------------------------------------------------------------------------------
    async def _generate(
        self, request: web.BaseRequest, client: Client, make: Maker, request_id: str
    ) -> web.StreamResponse:
        async with self._body(request, client) as (body, intake):
            self._demand_model(body.get("model") if isinstance(body.get("model"), str) else None)
            call = make(body, self._settings.max_context, client.store, intake)
            client.tell(intake.left_out)
            try:
                asked = (chat.parse_completion if call.completion else chat.parse)(call.chat)
            except chat.BadRequest as error:
                raise Invalid(str(error)) from error
            return await self._answer(request, client.execution, call, asked, request_id)

    async def _answer(
        self, request: web.BaseRequest, execution: Execution, call: Call, asked: Any, request_id: str
    ) -> web.StreamResponse:
        execution.counts.requests += 1
        headers = {"request-id": request_id, "x-request-id": request_id}
        stream = front.EventStream(request, headers, call.idle) if call.stream else None

        async def show(chunks: list[Json]) -> None:
            assert stream is not None
            await stream.send([event for chunk in chunks for event in call.events(chunk)])

        relay = Relay(asked, execution, self._board, self._connections, self._settings, show if stream else None)
        if stream:
            self._streams.add(stream)
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                given = await relay.run()
            if stream is None:
                response: web.StreamResponse = front.reply(call.answer(given), headers=headers)
            else:
                await stream.send(call.end())
                response = await stream.end(call.last)
            execution.counts.answered += 1
            return response
        except (asyncio.CancelledError, ConnectionError):
            execution.counts.abandoned += 1
            raise
        except Exception as error:
            fault = self._fault(error, execution, relay)
            if stream is None or not stream.begun:
                raise fault from None
            await stream.send(call.failed(fault, request_id))
            return await stream.end(call.last)
        finally:
            if stream:
                stream.close()
                self._streams.discard(stream)

    def _fault(self, error: Exception, execution: Execution, relay: Relay) -> ApiError:
        """What a failed request's client is told; the request is counted as what it was."""
        counts = execution.counts
        match error:
            case Closed():
                counts.abandoned += 1
                return ApiError(410, "the execution is over", code="closed")
            case Refused() if error.status < 500:
                counts.refused += 1
                return self._said(error)
            case Refused():
                counts.fault = relay.fault
                counts.lost += 1
                return self._said(error)
            case TimeoutError():
                fault = f"no engine answered in {self._settings.request_timeout:g} s"
                counts.fault = f"{fault}; last, {relay.fault}" if relay.fault else fault
                counts.lost += 1
                return ApiError(504, counts.fault, code="timeout")
        log.error("execution %d: a request failed: %s", execution.number, _where(error))
        counts.fault = "internal fault of the proxy"
        counts.lost += 1
        return ApiError(500, counts.fault, code="internal")

    def _said(self, error: Refused) -> ApiError:
        return errors.from_engine(error.status, error.body, self._settings.max_context)

    async def _count(self, request: web.BaseRequest, client: Client, request_id: str) -> web.Response:
        async with self._body(request, client) as (body, intake):
            asked = to_chat(body, self._settings.max_context, intake, counting=True)
            client.tell(intake.left_out)
            self._demand_model(asked["model"])
            try:
                async with asyncio.timeout(self._settings.request_timeout):
                    tokens = await count_tokens(
                        asked, client.execution, self._board, self._connections, self._settings.secret
                    )
            except Refused as error:
                raise self._said(error) from None
            except Closed:
                raise ApiError(410, "the execution is over", code="closed") from None
            except (Broken, TimeoutError):
                raise ApiError(502, "no engine counted the tokens", code="engine_failed") from None
            return front.reply({"input_tokens": tokens}, headers={"request-id": request_id})

    def _stored(self, request: web.BaseRequest, client: Client, rest: str) -> web.Response:
        """A response that was given before: again, its input, or never again."""
        identity, _, part = rest.partition("/")
        if part not in ("", "input_items"):
            raise ApiError(404, f"there is no {printable(part)} of a response", code="not_found")
        _demand(request.method, *_READS, *(() if part else ("DELETE",)))
        if part:
            return front.reply(listing.items(client.store.get(identity).input))
        if request.method == "DELETE":
            client.store.delete(identity)
            return front.reply({"id": identity, "object": "response", "deleted": True})
        if request.query.get("stream", "false") != "false":
            raise Invalid("is not offered here for a response that is over", "stream")
        return front.reply(client.store.get(identity).response)


def _where(error: BaseException) -> str:
    """A fault of ours without its words, in which something that a client sent may be."""
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}"


def printable(text: str) -> str:
    """What a client sent, fit for a message."""
    return "".join(c if c.isprintable() else "?" for c in text[:100])


def _demand(method: str, *allowed: str) -> None:
    if method not in allowed:
        names = ", ".join(allowed)
        raise ApiError(405, f"only {names} is possible here", code="method_not_allowed", allow=names)


Maker = Callable[[Json, int, Store, Intake], Call]
_GENERATIONS: dict[str, Maker] = {
    "/v1/chat/completions": lambda body, context, store, intake: OpenAiCall(body),
    "/v1/completions": lambda body, context, store, intake: OpenAiCall(body, completion=True),
    "/v1/messages": lambda body, context, store, intake: MessageCall(body, context, intake),
    "/v1/responses": ResponseCall,
}
