"""Anthropic messages from chat completions: the answer, whole and as events. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from gyre.proxy.dialects import errors, hidden
from gyre.proxy.dialects.calls import Event, choice_of, counts_of, reasoning_of
from gyre.proxy.dialects.errors import ApiError, Json
from gyre.proxy.dialects.intake import Intake
from gyre.proxy.dialects.messages import BROKEN, thinking_is, to_chat


def _stop(finish: str | None, stopped_by: Any, called: bool) -> tuple[str, str | None]:
    """Anthropic's reason why an answer ended, and the stop sequence that did it."""
    if finish == "length":
        return "max_tokens", None
    if finish == "content_filter":
        return "refusal", None
    if finish == "stop" and isinstance(stopped_by, str):
        return "stop_sequence", stopped_by
    return ("tool_use" if called else "end_turn"), None


def _usage(prompt: int, sampled: int) -> Json:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, "output_tokens": sampled, **cached}


def _input(arguments: str) -> Json:
    """A tool's input."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError, ValueError):
        value = None
    return value if isinstance(value, dict) else {BROKEN: arguments}


def _message(given: Json, content: list[Json], usage: Json) -> Json:
    identity = str(given.get("id")).removeprefix("chatcmpl-")
    message = {"id": f"msg_{identity}", "type": "message", "role": "assistant", "model": given.get("model")}
    return {**message, "content": content, "stop_reason": None, "stop_sequence": None, "usage": usage}


class MessageCall:
    """One request for a message."""

    def __init__(self, body: Json, max_context: int, intake: Intake | None = None) -> None:
        self.chat = to_chat(body, max_context, intake)
        self.stream = bool(self.chat.get("stream"))
        self.completion = False
        self.last = b""
        self._thinking = thinking_is(body)
        self._begun = False
        self._pinged = False
        self._index = -1  # of the newest block
        self._open: str | None = None  # its type, while it is open
        self._tool = -1  # the tool call that the open block is
        self._called = False
        self._thought = ""
        self._finish: tuple[str | None, Any] = (None, None)
        self._counts = (0, 0)

    # -- whole -------------------------------------------------------------------------------------------------------
    def answer(self, given: Json) -> Json:
        """The message."""
        choice = choice_of(given)
        said = choice.get("message") or {}
        content: list[Json] = []
        if (thought := reasoning_of(said)) and self._thinking != "disabled":
            content.append({"type": "thinking", **self._signed(thought)})
        if text := said.get("content"):
            content.append({"type": "text", "text": text})
        calls = said.get("tool_calls") or []
        for call in calls:
            function = call["function"]
            block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
            content.append({**block, "input": _input(function.get("arguments") or "")})
        if not content:  # agents take the first block to be there
            content.append({"type": "text", "text": ""})
        message = _message(given, content, _usage(*counts_of(given)))
        reason, by = _stop(choice.get("finish_reason"), choice.get("stop_reason"), bool(calls))
        return {**message, "stop_reason": reason, "stop_sequence": by}

    def _signed(self, thought: str) -> Json:
        if self._thinking == "omitted":
            return {"thinking": "", "signature": hidden.seal(thought)}
        return {"thinking": thought, "signature": hidden.signature(thought)}

    # -- as events ---------------------------------------------------------------------------------------------------
    def events(self, chunk: Json) -> list[Event]:
        """Events of a chunk: the beginning of the message, and beginnings, pieces and ends of its blocks."""
        found: list[Event] = []
        if chunk.get("usage"):
            self._counts = counts_of(chunk)
        if not self._begun:
            self._begun = True
            self._counts = (len(chunk.get("prompt_token_ids") or ()) or self._counts[0], self._counts[1])
            message = _message(chunk, [], _usage(self._counts[0], 0))
            found.append(self._event("message_start", message=message))
        choice = choice_of(chunk)
        delta = choice.get("delta") or {}
        if (thought := reasoning_of(delta)) and self._thinking != "disabled":
            found += self._think(thought)
        if text := delta.get("content"):
            found += self._begin("text", {"type": "text", "text": ""})
            found.append(self._delta({"type": "text_delta", "text": text}))
        for call in delta.get("tool_calls") or ():
            found += self._call(call)
        if reason := choice.get("finish_reason"):
            self._finish = (reason, choice.get("stop_reason"))
        return found

    def _think(self, thought: str) -> list[Event]:
        found = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        self._thought += thought
        if self._thinking != "omitted":
            found.append(self._delta({"type": "thinking_delta", "thinking": thought}))
        return found

    def _call(self, call: Json) -> list[Event]:
        function, index = call.get("function") or {}, call.get("index", 0)
        found: list[Event] = []
        if index != self._tool or self._open != "tool_use":
            block = {"type": "tool_use", "id": call.get("id") or f"toolu_{index}", "name": function.get("name") or ""}
            self._tool, self._called = index, True
            found += self._close() + self._begin("tool_use", {**block, "input": {}})
        if arguments := function.get("arguments"):
            found.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return found

    def end(self) -> list[Event]:
        """The last block's end, and the message's."""
        found = [] if self._index >= 0 else self._begin("text", {"type": "text", "text": ""})
        found += self._close()
        reason, by = _stop(*self._finish, self._called)
        delta = {"stop_reason": reason, "stop_sequence": by}
        found.append(self._event("message_delta", delta=delta, usage=_usage(*self._counts)))
        return [*found, self._event("message_stop")]

    def failed(self, error: ApiError, request_id: str) -> list[Event]:
        """The error, as an event."""
        return [("error", errors.anthropic(error, request_id))]

    def idle(self) -> Event | None:
        """A ping, once the message has begun."""
        return self._event("ping") if self._begun else None

    def _begin(self, kind: str, block: Json) -> list[Event]:
        if self._open == kind and kind != "tool_use":
            return []
        found = self._close()
        self._index, self._open = self._index + 1, kind
        found.append(self._event("content_block_start", index=self._index, content_block=block))
        if not self._pinged:
            self._pinged = True
            found.append(self._event("ping"))
        return found

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        found: list[Event] = []
        if self._open == "thinking":
            signed, self._thought = self._signed(self._thought), ""
            found.append(self._delta({"type": "signature_delta", "signature": signed["signature"]}))
        self._open = None
        return [*found, self._event("content_block_stop", index=self._index)]

    def _delta(self, delta: Json) -> Event:
        return self._event("content_block_delta", index=self._index, delta=delta)

    @staticmethod
    def _event(kind: str, **words: Any) -> Event:
        return kind, {"type": kind, **words}
