"""One request from the client's question to its one complete answer, over as many engines as it takes.

The law (invariant 7): a request gets exactly one complete answer, or its execution closes, or its client leaves. An
engine that goes away in the middle only ends a leg. The next leg is the same request to the engine that the route table
names by then, with the tokens that were already sampled, which that engine repeats before it goes on. Where an option
cannot be carried over (a grammar, penalties that count sampled tokens, several choices) the answer starts over instead,
and is shown to a streaming client only when it is whole, so that nothing that was shown is ever taken back.

Should an engine make another text of the tokens that it repeats than a streaming client was shown (a parser whose
answer depends on how its text comes in pieces may), the request ends as lost, with that reason: what was shown cannot
be taken back, and what would follow would be the end of another text, maybe half a call of a tool. Trying again would
not help, since it is not by chance.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gyre.proxy import answer, chat, sound
from gyre.proxy.admission import Entry
from gyre.proxy.answer import Choice, Differs
from gyre.proxy.chat import Json, Request
from gyre.proxy.connections import Connections
from gyre.proxy.dialects.errors import ApiError, openai
from gyre.proxy.encoding import encode
from gyre.proxy.executions import UNANSWERED, Execution, Switchboard
from gyre.proxy.history import Found, Place
from gyre.proxy.recorder import CallRecord, Span
from gyre.proxy.routing import Route
from gyre.proxy.upstream import Broken, Moved, Refused, Stream, headers, post
from gyre.splice import HEADER, PromptNote, digest

log = logging.getLogger(__name__)

#: Legs of a request that ended in anything but a sound answer or a move, without a further token between them, after
#: which the client is told. An engine that cannot be reached never counts: requests that no engine can take are held.
MAX_FAILURES = 30
#: Of these, legs whose connection broke off: should the request be what engines die of, no more of them follow.
MAX_DEATHS = 3
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
    model: str = "policy"
    slots: int = UNANSWERED  # requests that an engine is sent before it has begun to answer them


class Relay:
    """Answers one request. `show` is given the pieces of a streamed answer; None for a plain one."""

    def __init__(
        self,
        request: Request,
        execution: Execution,
        board: Switchboard,
        connections: Connections,
        settings: Settings,
        show: Callable[[list[Json]], Awaitable[None]] | None,
    ) -> None:
        self._request = request
        self._execution = execution
        self._board = board
        self._connections = connections
        self._settings = settings
        self._show = show
        self._constrained: bool | None = None  # what engines have said of it
        self._live = False  # whether the client is shown what comes as it comes, which is known once an engine begins
        self._head = {
            "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model or settings.model,
        }
        self._decode = sound.decoder(full=request.logprobs)
        self._found = execution.history.find(request.rendering, request.messages) if request.is_chat else Found(b"")
        self._choices = [Choice() for _ in range(request.choices)]
        self._prompt = array("i")
        self._sequence: array[int] | None = None  # that an engine was told to go on from, until it has said its prompt
        self._note: PromptNote | None = None
        self._spliced = self._accepted = False  # `_accepted`: an engine has begun with it
        self._place: Place | None = None  # where its last leg was
        self._begun_stream = False
        self._new: list[Json] = []  # pieces of a streamed answer that are not shown yet
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
            return answer.response(self._request, self._head, self._prompt, self._choices)
        finally:
            self._record(complete)

    async def _until_whole(self) -> None:
        failed: Route | None = None
        pause, failures, deaths, most = _FIRST_PAUSE, 0, 0, 0
        while not self._whole:
            with self._execution.hold():
                route, entry = await self._board.enter(self._execution.number, failed, pause)
            try:
                if self._legs:
                    self._issue_again()
                self._legs += 1
                await self._leg(route, entry)
                continue
            except (Moved, Broken, Refused, Differs, sound.Unsound, TimeoutError) as error:
                failures += self._is_failure(error, route)
                deaths += isinstance(error, Broken) and error.lost and error.reached
            finally:
                entry.release()
            # Of an answer that starts over only more tokens than ever are a step forward.
            if (sampled := sum(len(choice.sampled) for choice in self._choices)) > most:
                pause, failures, deaths, most = _FIRST_PAUSE, 0, 0, sampled
            if failures >= MAX_FAILURES or deaths >= MAX_DEATHS:
                self.fault = f"no sound answer in {failures} tries, the last from {self.fault}"
                raise self._failed()
            pause = min(_LONGEST_PAUSE, 2 * pause) if failed and failed.same_place(route) else _FIRST_PAUSE
            failed = route

    def _is_failure(self, error: Exception, route: Route) -> bool:
        """Whether what ended a leg counts as an engine's failure; raises what is the end of the request."""
        if isinstance(error, Moved):
            return False
        if isinstance(error, Differs):
            self.fault = f"engine {route.engine}: {error}; the answer cannot go on"
            raise self._failed() from error
        if isinstance(error, Refused):
            # Of a request that one engine has begun to answer, another finds no fault that a client could mend.
            if error.status >= 500 or not self._accepted or self._legs == 1:
                raise error
            error = Broken(f"refused with {error.status} ({error.kind})")
        log.info("execution %d: engine %d: %s", self._execution.number, route.engine, str(error) or "left")
        if isinstance(error, TimeoutError) or (isinstance(error, Broken) and not error.reached):
            return False
        self.fault = f"engine {route.engine}: {error}"
        return True

    def _failed(self) -> Refused:
        log.error("execution %d: %s", self._execution.number, self.fault)
        return Refused(502, encode(openai(ApiError(502, self.fault, code="engine_failed"))))

    @property
    def _whole(self) -> bool:
        for choice in self._choices:  # asked for every token: a loop is quicker than a generator
            if choice.finish_reason is None:
                return False
        return True

    def _issue_again(self) -> None:
        """Count a further leg, and throw away what it cannot continue from."""
        self._rerouted = True
        if self._continuable:
            (choice,) = self._choices
            self._continued = self._continued or bool(choice.sampled)
            choice.begin_leg(shown=self._live)
        else:
            self._restarted = self._restarted or any(choice.sampled for choice in self._choices)
            self._choices = [Choice() for _ in range(self._request.choices)]
            self._prompt, self._note, self._spliced = array("i"), None, False

    @property
    def _continuable(self) -> bool:
        """Whether another engine can go on; of some requests only an engine that has begun can tell."""
        shown = self._live and self._begun_stream  # which is never taken back, whatever a later engine says
        return shown or self._request.continuable_under(self._constrained)

    def _progress(self, route: Route) -> chat.Progress:
        progress = chat.Progress(messages=self._found.messages, handoff=self._handoff(route))
        if self._prompt:
            progress.prompt, progress.kept = self._prompt, self._choices[0].sampled
        elif self._found.node is not None:
            self._sequence = self._found.node.sequence()
            if self._request.text_only:
                progress.history = self._found.known(self._sequence)
        return progress

    def _handoff(self, route: Route) -> Json | None:
        """Where the keys and values of what came before can be had, if that is elsewhere."""
        known = self._found.node.place if self._found.node else None
        last = self._place or known or self._execution.place
        if last is None or not last.kv or not route.kv or (last.engine, last.epoch) == (route.engine, route.epoch):
            return None
        return {"address": last.kv, "epoch": last.epoch, "policy": last.policy}

    async def _leg(self, route: Route, entry: Entry) -> None:
        """One engine's part; returns when the answer is whole or raises what ended it."""
        body = encode(chat.leg(self._request, self._progress(route)))
        spans = [Span(route.engine, route.epoch, route.policy) for _ in self._choices]
        hold = contextlib.ExitStack()
        parked = asyncio.get_running_loop().call_later(
            PARKED_SECONDS, lambda: hold.enter_context(self._execution.hold())
        )

        head = headers(self._settings.secret, self._execution.number, route)
        try:
            async with self._board.leg(self._execution.number, route):
                connection = await post(self._connections, route, self._request.path, body, head)
                del body  # of a long conversation it is large, and an answer takes long
                stream = Stream(connection, self._decode)
                try:
                    parked.cancel()
                    hold.close()
                    entry.release()
                    self._admitted(stream.headers, route, spans)
                    while not self._whole:
                        await self._take_all(stream, spans)
                finally:
                    stream.close(self._whole)
        finally:
            parked.cancel()
            hold.close()

    def _admitted(self, given: Mapping[str, str], route: Route, spans: list[Span]) -> None:
        """An engine begins to answer; what it says of that in its headers."""
        try:
            policy = int(given.get("x-gyre-policy", route.policy))
            note = PromptNote.decode(given[HEADER]) if HEADER in given else None
        except ValueError as error:
            raise Broken(f"a header of another shape: {error}") from error
        if note is not None and not self._prompt:
            self._note = note
        if note is not None and note.constrained is not None:
            self._constrained = bool(self._constrained) or note.constrained
        if not self._begun_stream:
            self._live = self._show is not None and self._continuable
        for span in spans:
            span.policy = policy
        self._place = self._execution.place = Place(route.engine, route.epoch, policy, route.kv)

    # -- pieces of answers -------------------------------------------------------------------------------------------
    async def _take_all(self, stream: Stream, spans: list[Span]) -> None:
        """What came since the last time; what is sound of it is shown, whatever follows."""
        blocks = await stream.blocks()
        try:
            for block in blocks:
                if (event := stream.event(block)) is not None:
                    self._take(event, spans)
                    if self._whole:
                        return
        finally:
            await self._show_new()

    def _take(self, event: sound.Event, spans: list[Span]) -> None:
        prompt, pieces = sound.read(event, len(self._choices))
        if prompt is not None:
            self._take_prompt(prompt)
        for piece in pieces:
            choice, span = self._choices[piece.index], spans[piece.index]
            self._demand_sound(choice, span, piece)
            if piece.tokens and not self._first_token:
                self._first_token = time.monotonic() - self._begun
            old = choice.sample(span, piece.tokens, piece.values)
            delta = choice.merge(piece.delta)
            entries, tokens = piece.entries[old:], piece.tokens[old:]
            if entries:
                choice.entries.extend(entries)
            if piece.finish_reason:
                choice.finish(piece.finish_reason, piece.stop_reason)
            if self._live:
                finish = (piece.finish_reason, piece.stop_reason)
                self._show_piece(piece.index, delta, finish, entries, tokens)

    def _take_prompt(self, prompt: array[int]) -> None:
        self._accepted = True
        if not self._prompt:
            self._prompt = prompt
            known, self._sequence = self._sequence, None
            self._spliced = known is not None and prompt[: len(known)] == known
        elif prompt != self._prompt:
            raise sound.Unsound("another prompt than the one it was asked for")

    def _demand_sound(self, choice: Choice, span: Span, piece: sound.Piece) -> None:
        """Refuse tokens that cannot be recorded, before anything is made of them: another try may well be right."""
        if fault := sound.fault(piece, bool(self._prompt), choice.repeated > 0, len(choice.sampled) - choice.repeated):
            log.error("execution %d: engine %d: %s", self._execution.number, span.engine, fault)
            raise sound.Unsound(fault)

    # -- the streaming client ----------------------------------------------------------------------------------------
    def _show_piece(
        self,
        index: int,
        delta: Mapping[str, Any],
        finish: tuple[str | None, Any],
        entries: list[Any],
        tokens: list[int],
    ) -> None:
        request, head = self._request, self._head
        if not self._begun_stream:
            self._begun_stream = True
            for other in range(request.choices):
                if (first := answer.first_chunk(request, head, other, self._prompt)) is not None:
                    self._new.append(first)
        if "role" in delta or request.hides_reasoning:
            delta = {key: value for key, value in answer.visible(request, delta).items() if key != "role"}
        if any(delta.values()) or finish[0] or entries or (tokens and request.token_ids):
            self._new.append(answer.chunk(request, head, index, delta, finish, entries, tokens))

    async def _show_new(self) -> None:
        """Show what is not shown yet."""
        if self._new and self._show is not None:
            new, self._new = self._new, []
            await self._show(new)

    async def _show_end(self) -> None:
        """What remains to be shown of a whole answer: all of it, where it was held back."""
        if not self._live:
            for index, choice in enumerate(self._choices):
                delta = dict(choice.message)
                if calls := delta.get("tool_calls"):
                    delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
                finish = (choice.finish_reason, choice.stop_reason)
                self._show_piece(index, delta, finish, choice.entries, list(choice.sampled))
        if self._request.include_usage:
            self._new.append(answer.usage_chunk(self._request, self._head, len(self._prompt), self._choices))
        await self._show_new()

    # -- the record --------------------------------------------------------------------------------------------------
    def _record(self, complete: bool) -> None:
        counts = self._execution.counts
        counts.rerouted += self._rerouted
        counts.continued += self._continued
        counts.restarted += self._restarted
        if not self._prompt:
            return
        counts.spliced += self._spliced
        counts.forked += self._found.changed or (self._found.node is not None and not self._spliced)
        note = self._note or PromptNote((len(self._prompt), digest(self._prompt)), False, 0)
        drift = note.drift if self._spliced else 0
        masked = self._request.masked_under(self._constrained)
        counts.drifted += drift > 0
        counts.drift_tokens += drift
        for choice in self._choices:
            if not choice.sampled and not complete:
                continue
            record = CallRecord(
                prompt=self._prompt,
                sampled=choice.sampled,
                logprobs=choice.logprobs,
                spans=choice.spans,
                sampling=self._request.sampling,
                trainable=complete and not masked,
                masked=masked or ("" if complete else "abandoned"),
                finish_reason=choice.finish_reason,
                started=self._started,
                seconds=time.monotonic() - self._begun,
                first_token_seconds=self._first_token,
                held_seconds=self._execution.held_seconds - self._held_at_start,
                legs=self._legs,
                spliced=self._spliced,
                drift=drift,
                rendered=note.rendered,
            )
            answered = (self._found.asked, choice.message) if complete else (b"", None)
            try:
                self._execution.record(record, self._found.node, self._place, *answered)
            except OSError as error:
                self.fault = f"the record of a call could not be written: {error.strerror}"
                if complete:  # an answer without its record is none
                    raise self._failed() from error
                log.error("execution %d: %s", self._execution.number, self.fault)
