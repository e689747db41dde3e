"""The gate: an ASGI application in front of an engine's own server, in its process.

It alone says what the engine works on. It knows the cell's role epoch, refuses requests of another epoch and of closed
executions, counts what is live, and ends live work on the engine's side when the cell leaves rollout or takes new
weights. No proxy has to behave for that. What it keeps true (invariant 6): once ``/gyre/close`` has answered with zero,
nothing runs in the engine, and nothing will before ``/gyre/open``.

States: ``closed`` (model requests are refused), ``open`` (they are served), ``held`` (they are parked until admitted).
Live requests that are cancelled are answered with 409 ``gyre_moved``; an event stream that has begun ends with
``event: gyre`` instead, and what it carried before stands. The gate imports no engine: `Control` is all it asks of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from gyre.cell.gate_answer import Answer, Live, Message, Receive, Send, read_body, refuse, send_json
from gyre.errors import GyreError, UserError, WeightsMismatch
from gyre.splice import PromptNote

if TYPE_CHECKING:
    from gyre.cell.kv_source import Source

log = logging.getLogger(__name__)

Scope = dict[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: What a harness's request may reach. Anything else that the engine's server offers is not there, for anybody.
MODEL_PATHS = frozenset({"/v1/chat/completions", "/v1/chat/completions/render", "/v1/completions"})
READ_PATHS = frozenset({"/v1/models", "/metrics", "/version"})

BODY_LIMIT = 256 << 20  # bytes of one model request
ADMIN_BODY_LIMIT = 4 << 20
REQUEST_LIMIT = 8192  # live and parked ones together; a proxy that sends more has lost count
DISCONNECT_SECONDS = 2.0  # for the engine's server to act on a disconnect, before its task is cancelled outright
ANSWER_SECONDS = 10.0  # for a client to take the last words of a cancelled request

#: Where the engine behind the gate leaves what it has to say of a request's prompts; the first is sent along.
prompt_notes: ContextVar[list[PromptNote] | None] = ContextVar("prompt_notes", default=None)


class Control(Protocol):
    """What the gate asks of the engine behind it."""

    async def drain(self) -> None:
        """End whatever the engine still works on; return only once it has no unfinished request."""

    async def resume(self) -> None:
        """Work again. Raises GyreError where weights or KV memory are missing."""

    async def sleep(self) -> Message:
        """Release weights and KV memory."""

    async def wake(self, tags: list[str]) -> Message:
        """Bring back memory (``weights``, ``kv_cache``), not contents."""

    async def load(self, path: str, checksum: str | None, snapshot: int | None) -> Message:
        """Replace the weights in place. Raises WeightsMismatch where they are not the announced ones."""

    async def memory(self) -> Message:
        """Bytes held."""

    def tokens(self) -> int:
        """Tokens sampled since the start."""

    def unfinished(self) -> int:
        """Requests that the engine has taken and not ended, by its own count."""


class Conflict(GyreError):
    """An admin request that does not fit the gate's state."""


class Gate:
    """ASGI application that wraps `app`; `secret` is the run's key and `rank` names this engine in answers.

    With `kv`, the KV blocks of what a closing gate cuts off are handed over to other engines.
    """

    def __init__(self, app: App, *, secret: str, rank: int, control: Control, kv: Source | None = None) -> None:
        self._app = app
        self._bearer = f"Bearer {secret}".encode()
        self._rank = rank
        self._control = control
        self._kv = kv
        self.state = "closed"
        self.epoch = -1
        self.policy = -1
        self._closed: set[int] = set()
        self._live: set[Live] = set()
        self._parked = 0
        self._turn = asyncio.Event()  # set, and replaced, at every change of state
        self._idle = asyncio.Event()
        self._idle.set()
        self._admin = asyncio.Lock()
        self._requests = 0
        self._busy = 0.0
        self._busy_since = 0.0
        self._operations = {
            ("POST", "/gyre/open"): self._open,
            ("POST", "/gyre/hold"): self._hold,
            ("POST", "/gyre/admit"): self._admit,
            ("POST", "/gyre/close"): self._close,
            ("POST", "/gyre/export"): self._export,
            ("POST", "/gyre/sleep"): self._sleep,
            ("POST", "/gyre/wake"): self._wake,
            ("POST", "/gyre/load"): self._load,
            ("GET", "/gyre/memory"): self._memory,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:  # no websocket leads anywhere
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        headers = {name.lower(): value for name, value in scope["headers"]}
        if (method, path) == ("GET", "/health"):
            await self._app(scope, receive, send)
        elif not hmac.compare_digest(headers.get(b"authorization", b""), self._bearer):
            await refuse(send, "gyre_unauthorized", "the run's key is missing or wrong", 401)
        elif method == "POST" and path in MODEL_PATHS:
            await self._model_request(scope, headers, receive, send)
        elif method == "GET" and path in READ_PATHS:
            await self._app(scope, receive, send)
        elif self._kv is not None and path.startswith("/gyre/kv/"):
            await self._kv.http(method, path, receive, send)
        elif path.startswith("/gyre/"):
            await self._admin_request(method, path, headers, receive, send)
        else:
            await refuse(send, "gyre_unknown_path", f"there is no {method} {path}", 404)

    # -- model requests ----------------------------------------------------------------------------------------------
    async def _model_request(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        body = await read_body(headers, receive, send, BODY_LIMIT)
        if body is None:
            return
        try:
            execution, epoch = int(headers[b"x-gyre-execution"]), int(headers[b"x-gyre-epoch"])
        except (KeyError, ValueError):
            await refuse(send, "gyre_bad_request", "X-Gyre-Execution and X-Gyre-Epoch must be numbers", 400)
            return
        gone = asyncio.ensure_future(receive())  # the body is read: the next message can only be a disconnect
        try:
            refusal = await self._admission(execution, epoch, gone)
            if refusal is None:
                await self._run(Live(execution), scope, body, gone, send)
            elif not gone.done():
                words = f"engine {self._rank} does not serve this; look up its route"
                await refuse(send, refusal, words, 503 if refusal == "gyre_busy" else 409)
        finally:
            gone.cancel()

    async def _admission(self, execution: int, epoch: int, gone: asyncio.Future[Message]) -> str | None:
        """Why a request is refused, or None; waits while the gate is held. No await follows the decision."""
        while True:
            if execution in self._closed:
                return "gyre_execution_closed"
            if self.state == "closed" or epoch != self.epoch:
                return "gyre_moved"
            if self._parked + len(self._live) >= REQUEST_LIMIT:
                return "gyre_busy"
            if self.state == "open":
                return None
            self._parked += 1
            try:
                await _first(self._turn.wait(), gone)
            finally:
                self._parked -= 1
            if gone.done():
                return "gyre_moved"

    def _become(self, state: str) -> None:
        self.state = state
        self._turn.set()
        self._turn = asyncio.Event()

    async def _run(self, live: Live, scope: Scope, body: bytes, gone: asyncio.Future[Message], send: Send) -> None:
        self._enter(live)
        own = [(b"x-gyre-policy", b"%d" % self.policy), (b"x-gyre-engine", b"%d" % self._rank)]
        notes: list[PromptNote] = []
        prompt_notes.set(notes)
        answer = Answer(send, live, own, notes)
        rest = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def app_receive() -> Message:
            if (message := next(rest, None)) is not None:
                return message
            await _first(live.cancelled(), gone)
            return {"type": "http.disconnect"}

        # Below spec version 2.4 streaming responses listen for a disconnect, which is how they are cancelled here.
        scope = {**scope, "asgi": {**scope.get("asgi", {}), "spec_version": "2.3"}}
        live.task = asyncio.ensure_future(self._app(scope, app_receive, answer.send))
        try:
            await asyncio.wait({live.task})
        except asyncio.CancelledError:  # the server goes down
            live.task.cancel()
            raise
        finally:
            self._leave(live)
        error = None if live.task.cancelled() else live.task.exception()
        if live.reason is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(answer.end(), ANSWER_SECONDS)
        elif error is not None:
            raise error

    def _enter(self, live: Live) -> None:
        if not self._live:
            self._busy_since = time.monotonic()
        self._live.add(live)
        self._idle.clear()
        self._requests += 1

    def _leave(self, live: Live) -> None:
        self._live.discard(live)
        if not self._live:
            self._busy += time.monotonic() - self._busy_since
            self._idle.set()

    async def _end_live(self, state: str) -> Message:
        """Take no more, cancel what is live, and return when the engine itself has nothing left (invariant 6)."""
        self._become(state)
        for live in list(self._live):
            live.cancel("gyre_moved")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), DISCONNECT_SECONDS)
        for live in list(self._live):
            if live.task is not None:
                live.task.cancel()
        await self._idle.wait()
        await self._control.drain()
        return {"live": len(self._live)}

    # -- admin requests ----------------------------------------------------------------------------------------------
    async def _admin_request(
        self, method: str, path: str, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        body = await read_body(headers, receive, send, ADMIN_BODY_LIMIT)
        if body is None:
            return
        try:
            arguments = json.loads(body or b"{}")
            if (method, path) == ("GET", "/gyre/status"):
                result = self.status()
            elif (method, path) == ("POST", "/gyre/closed"):
                result = self._executions_closed(**arguments)
            elif (operation := self._operations.get((method, path))) is not None:
                inspect.signature(operation).bind(**arguments)
                async with self._admin:
                    result = await operation(**arguments)
            else:
                await refuse(send, "gyre_unknown_path", f"there is no {method} {path}", 404)
                return
        except Exception as error:  # every fault of an operation is the caller's to judge
            kinds = {Conflict: ("gyre_conflict", 409), WeightsMismatch: ("gyre_weights_mismatch", 409)}
            kinds |= {UserError: ("gyre_user_error", 400), TypeError: ("gyre_bad_request", 400)}
            kinds |= {json.JSONDecodeError: ("gyre_bad_request", 400)}
            kind, status = kinds.get(type(error), ("gyre_fault", 500))
            log.error("%s: %s: %s", path, type(error).__name__, error, exc_info=status == 500)
            await refuse(send, kind, str(error) or type(error).__name__, status)
        else:
            await send_json(send, 200, result)

    def status(self) -> Message:
        """Counts of this gate's own: an engine's gauges stand still while it does."""
        busy = self._busy + (time.monotonic() - self._busy_since if self._live else 0.0)
        return {
            "state": self.state,
            "epoch": self.epoch,
            "policy": self.policy,
            "live": len(self._live),
            "unfinished": self._control.unfinished(),
            "parked": self._parked,
            "requests": self._requests,
            "tokens": self._control.tokens(),
            "busy_seconds": round(busy, 6),
        }

    def _executions_closed(self, n: list[int]) -> Message:
        self._closed.update(n)
        for live in list(self._live):
            if live.execution in self._closed:
                live.cancel("gyre_execution_closed")
        return {}

    async def _open(self, epoch: int, policy: int) -> Message:
        if self._live:
            raise Conflict("the gate cannot open under a new epoch with live requests; close it first")
        await self._control.resume()
        self.epoch, self.policy = epoch, policy
        self._opens()
        return self.status()

    def _opens(self) -> None:
        if self._kv is not None:
            self._kv.serve(self.epoch, self.policy)
        self._become("open")

    async def _hold(self) -> Message:
        if self.state == "closed":
            raise Conflict("the gate is closed; there is nothing to hold")
        if self._kv is not None:
            self._kv.hold()
        return await self._end_live("held")

    async def _admit(self, policy: int) -> Message:
        if self.state != "held":
            raise Conflict(f"the gate is {self.state}, not held")
        await self._control.resume()
        self.policy = policy
        self._opens()
        return self.status()

    async def _close(self) -> Message:
        if self._kv is not None:
            self._kv.pin()  # before the first request ends
        return await self._end_live("closed")

    def _demand_quiet(self, what: str) -> None:
        if self.state == "open" or self._live:
            raise Conflict(f"{what} needs a gate that is closed or held and has nothing live")

    async def _export(self) -> Message:
        if self._kv is None:
            raise UserError("this engine hands no KV off; set serving.kv_handoff=true")
        self._demand_quiet("export")
        return await self._kv.export()

    async def _sleep(self) -> Message:
        self._demand_quiet("sleep")
        if self._kv is not None:
            await self._kv.settle()
        return await self._control.sleep()

    async def _wake(self, tags: list[str]) -> Message:
        self._demand_quiet("wake")
        return await self._control.wake(tags)

    async def _load(self, path: str, checksum: str | None = None, snapshot: int | None = None) -> Message:
        self._demand_quiet("load")
        if self._kv is not None:
            await self._kv.settle()
        return await self._control.load(path, checksum, snapshot)

    async def _memory(self) -> Message:
        held = await self._control.memory()
        if self._kv is not None:
            held["bytes"] = held["bytes"] | {"handoff": self._kv.bytes}
        return held


async def _first(wait: Coroutine[Any, Any, Any], gone: asyncio.Future[Message]) -> None:
    """Wait for one of two; `gone` is left alone."""
    task = asyncio.ensure_future(wait)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
