"""One chat request from the client's question to its one complete answer, over as many engines as it takes.

The law (invariant 7): a request gets exactly one complete answer, or its execution closes, or its client leaves. An
engine that goes away in the middle only ends a leg; the next leg goes to the engine the route table names by then and
continues from the tokens that were already sampled. Where an option cannot be carried over (tools, a grammar, penalties
that count sampled tokens, several choices) the answer starts over instead, and is shown to a streaming client only
when it is whole, so that nothing that was shown is ever taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from gyre.proxy import chat, sound
from gyre.proxy.chat import ChatRequest, Choice, Json
from gyre.proxy.executions import Execution, Switchboard
from gyre.proxy.recorder import CallRecord, Span
from gyre.proxy.routing import Route
from gyre.proxy.text import TextStream
from gyre.proxy.upstream import Broken, Moved, Refused, headers, stream

log = logging.getLogger(__name__)

#: Legs of a request that ended in anything but a sound answer or a move, without a further token between them, after
#: which the client is told. An engine that cannot be reached never counts: requests that no engine can take are held.
MAX_FAILURES = 30
#: A request that an engine has not begun to answer for so long counts as held: its gate may have parked it for a
#: change of weights, or its engine has no room.
PARKED_SECONDS = 1.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0


@dataclass(frozen=True)
class Settings:
    """What the proxy is told when it starts."""

    secret: str
    max_context: int
    request_timeout: float = 1800.0
    tokenizer: Any = None  # of the model, to continue answers; without one they start over
    parsed: bool = False  # engines parse reasoning or tool calls
    model: str = "policy"


class Relay:
    """Answers one request. `show` is given the pieces of a streamed answer; None for a plain one."""

    def __init__(
        self,
        request: ChatRequest,
        execution: Execution,
        board: Switchboard,
        session: aiohttp.ClientSession,
        settings: Settings,
        show: Callable[[Json], Awaitable[None]] | None,
    ) -> None:
        self._request = request
        self._execution = execution
        self._board = board
        self._session = session
        self._settings = settings
        self._show = show
        self._live = show is not None and not request.buffered
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model or settings.model,
        }
        self._prompt = array("i")
        self._choices = [Choice() for _ in range(request.choices)]
        self._text: TextStream | None = None
        self._shown_role = False
        self._begun = time.monotonic()
        self._started = time.time()
        self._first_token = 0.0
        self._held_at_start = execution.held_seconds
        self._legs = 0
        self._rerouted = self._continued = self._restarted = False
        self.fault = ""  # the last thing that an engine did wrong

    # -- the whole request -------------------------------------------------------------------------------------------
    async def run(self) -> Json:
        """Go over engines until the answer is whole; returns the plain answer. Whatever happens, it is recorded.

        Raises:
            Refused, Closed: no engine will answer this request.
        """
        complete = False
        try:
            await self._until_whole()
            if self._show is not None:
                await self._show_end()
            complete = True
            return chat.response(self._request, self._head, self._prompt, self._choices)
        finally:
            self._record(complete)

    async def _until_whole(self) -> None:
        failed: Route | None = None
        pause, failures, most = _FIRST_PAUSE, 0, 0
        while not self._whole:
            with self._execution.hold():
                route = await self._board.route(self._execution.number, failed, pause)
            kept = len(self._choices[0].sampled)
            if self._legs:
                self._issue_again(kept)
            self._legs += 1
            try:
                await self._leg(route)
                continue
            except Moved:
                pass
            except (Broken, sound.Unsound, TimeoutError) as error:
                log.info("execution %d: engine %d: %s", self._execution.number, route.engine, str(error) or "left")
                if isinstance(error, sound.Unsound) or (isinstance(error, Broken) and error.reached):
                    failures += 1
                    self.fault = f"engine {route.engine}: {error}"
            # Of an answer that starts over only more tokens than ever are a step forward.
            if (sampled := sum(len(choice.sampled) for choice in self._choices)) > most:
                pause, failures, most = _FIRST_PAUSE, 0, sampled
            if failures >= MAX_FAILURES:
                raise self._given_up(failures)
            pause = min(_LONGEST_PAUSE, 2 * pause) if failed and failed.same_place(route) else _FIRST_PAUSE
            failed = route

    def _given_up(self, failures: int) -> Refused:
        self.fault = f"no sound answer in {failures} tries, the last from {self.fault}"
        log.error("execution %d: %s", self._execution.number, self.fault)
        return Refused(502, json.dumps(chat.error(self.fault, "server_error", "engine_failed")).encode())

    @property
    def _whole(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    def _issue_again(self, kept: int) -> None:
        """Count a further leg, and throw away what it cannot continue from."""
        self._rerouted = True
        if not self._request.continuable:
            self._restarted = self._restarted or any(choice.sampled for choice in self._choices)
            self._choices = [Choice() for _ in range(self._request.choices)]
        elif kept:
            self._continued = True

    async def _leg(self, route: Route) -> None:
        """One engine's part; returns when the answer is whole or raises what ended it."""
        kept = self._choices[0].sampled
        if kept and not await self._prepare_continuation():
            return
        if kept:
            body = chat.continuation(self._request, self._prompt, kept, self._settings.max_context)
            path, take = chat.COMPLETION_PATH, self._take_completion
        else:
            body, path, take = chat.first_leg(self._request), chat.CHAT_PATH, self._take_chat
        spans = [Span(route.engine, route.epoch, route.policy) for _ in self._choices]
        hold = contextlib.ExitStack()
        parked = asyncio.get_running_loop().call_later(
            PARKED_SECONDS, lambda: hold.enter_context(self._execution.hold())
        )

        def admitted(policy: int) -> None:
            parked.cancel()
            hold.close()
            for span in spans:
                span.policy = policy

        head = headers(self._settings.secret, self._execution.number, route)
        events = stream(self._session, route, path, json.dumps(body).encode(), head, admitted)
        try:
            async with self._board.leg(self._execution.number, route), contextlib.aclosing(events):
                async for event in events:
                    await take(event, spans)
                    if self._whole:
                        return
        finally:
            parked.cancel()
            hold.close()
        if not self._whole:
            raise Broken("the stream ended before the answer")

    # -- pieces of answers -------------------------------------------------------------------------------------------
    async def _take_chat(self, event: Json, spans: list[Span]) -> None:
        prompt, pieces = sound.read(event, len(self._choices), chat.chat_logprobs)
        self._prompt = prompt or self._prompt
        for piece in pieces:
            choice, delta = self._choices[piece.index], piece.delta
            self._demand_sound(spans[piece.index], piece)
            if self._request.hides_reasoning:
                delta = {key: value for key, value in delta.items() if not key.startswith("reasoning")}
            self._sample(choice, spans[piece.index], piece)
            choice.merge(delta)
            if self._live:
                shown = {key: value for key, value in delta.items() if key != "role" and value is not None}
                await self._show_piece(piece.index, shown, piece.raw, piece.entries)

    async def _take_completion(self, event: Json, spans: list[Span]) -> None:
        _, pieces = sound.read(event, 1, lambda piece: chat.completion_logprobs(piece, self._request.top_logprobs))
        for piece in pieces:
            self._demand_sound(spans[0], piece)
            text = self._own_text(piece.raw, piece.values, piece.entries)
            self._sample(self._choices[0], spans[0], piece)
            self._choices[0].merge({"content": text})
            if self._live:
                await self._show_piece(0, {"content": text}, piece.raw, piece.entries)

    def _demand_sound(self, span: Span, piece: sound.Piece) -> None:
        """Refuse tokens that cannot be recorded, before anything is made of them: another try may well be right."""
        echoed = bool(self._request.body.get("echo"))
        if fault := sound.fault(piece, bool(self._prompt), span.tokens > 0 or echoed):
            log.error("execution %d: engine %d: %s", self._execution.number, span.engine, fault)
            raise sound.Unsound(fault)

    def _own_text(self, piece: Json, values: list[float], entries: list[Json]) -> str:
        """Text of a continuation's tokens; a stop string cuts the piece short and finishes it."""
        assert self._text is not None
        tokens = piece.get("token_ids") or []
        silent_last = piece.get("finish_reason") == "stop" and not self._request.keep_stop
        for position, token in enumerate(tokens):
            stop = self._text.push(token, silent=silent_last and position == len(tokens) - 1)
            if stop is not None:
                piece |= {"token_ids": tokens[: position + 1], "finish_reason": "stop", "stop_reason": stop}
                del values[position + 1 :], entries[position + 1 :]
                break
        return self._text.delta(finished=piece.get("finish_reason") is not None)

    def _sample(self, choice: Choice, span: Span, piece: sound.Piece) -> None:
        if piece.tokens and not self._first_token:
            self._first_token = time.monotonic() - self._begun
        choice.sample(span, piece.tokens, piece.values)
        if self._request.logprobs:
            choice.shown_logprobs.extend(piece.entries)
        if reason := piece.raw.get("finish_reason"):
            choice.finish(reason, piece.raw.get("stop_reason"))

    async def _prepare_continuation(self) -> bool:
        """Make ready to go on after the tokens that are kept; False if they turn out to be the whole answer."""
        choice = self._choices[0]
        if self._text is None:
            self._text = self._text_so_far()
        if len(choice.sampled) < chat.room(self._request, len(self._prompt), self._settings.max_context):
            return True
        delta = {"content": self._text.delta(finished=True)}
        choice.merge(delta)
        choice.finish("length")
        if self._live:
            await self._show_piece(0, delta, {"finish_reason": "length"}, [])
        return False

    def _text_so_far(self) -> TextStream:
        """The text of the tokens that are kept, of which the first engine may have held the end back."""
        request, choice = self._request, self._choices[0]
        text = TextStream(
            self._settings.tokenizer,
            self._prompt,
            request.stop,
            request.keep_stop,
            request.body.get("min_tokens") or 0,
            request.body.get("skip_special_tokens") is not False,
        )
        for token in choice.sampled:
            text.push(token)
        if not text.skip(choice.message.get("content", "")):
            log.warning("execution %d: own text differs from the engine's", self._execution.number)
        return text

    # -- the streaming client ----------------------------------------------------------------------------------------
    async def _show_piece(self, index: int, delta: Json, piece: Json, entries: list[Json]) -> None:
        assert self._show is not None
        if not self._shown_role:
            self._shown_role = True
            for other in range(self._request.choices):
                await self._show(chat.chunk(self._head, other, {"role": "assistant", "content": ""}))
        finish, tokens = piece.get("finish_reason"), piece.get("token_ids")
        logprobs = {"content": entries} if self._request.logprobs and entries else None
        ids = tokens if self._request.token_ids and tokens else None
        if any(delta.values()) or finish or logprobs or ids:
            rest = {"logprobs": logprobs, "token_ids": ids, "stop_reason": piece.get("stop_reason")}
            await self._show(chat.chunk(self._head, index, delta, finish_reason=finish, **rest))

    async def _show_end(self) -> None:
        """What remains to be shown of a whole answer: all of it, where it was held back."""
        assert self._show is not None
        if not self._live:
            for index, choice in enumerate(self._choices):
                delta = dict(choice.message)
                if calls := delta.get("tool_calls"):
                    delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
                piece = {"token_ids": list(choice.sampled), "stop_reason": choice.stop_reason}
                piece["finish_reason"] = choice.finish_reason
                await self._show_piece(index, delta, piece, choice.shown_logprobs)
        if self._request.include_usage:
            await self._show(chat.usage_chunk(self._head, len(self._prompt), self._choices))

    # -- the record --------------------------------------------------------------------------------------------------
    def _record(self, complete: bool) -> None:
        counts = self._execution.counts
        counts.rerouted += self._rerouted
        counts.continued += self._continued
        counts.restarted += self._restarted
        for choice in self._choices:
            if not self._prompt or (not choice.sampled and not complete):
                continue
            self._execution.record(
                CallRecord(
                    prompt=self._prompt,
                    sampled=choice.sampled,
                    logprobs=choice.logprobs,
                    spans=choice.spans,
                    sampling=self._request.sampling,
                    trainable=complete and not self._request.masked,
                    masked=self._request.masked or ("" if complete else "abandoned"),
                    finish_reason=choice.finish_reason,
                    started=self._started,
                    seconds=time.monotonic() - self._begun,
                    first_token_seconds=self._first_token,
                    held_seconds=self._execution.held_seconds - self._held_at_start,
                    legs=self._legs,
                )
            )
