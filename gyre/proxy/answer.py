"""One answer as it grows, over as many engines as it takes, and what a client is shown of it. Pure.

An engine that goes on with an answer begins it anew: it repeats the tokens that are kept, and makes text, reasoning and
calls of tools of all of them. So the message is built again from its beginning, and a streaming client is shown only
what goes beyond what it has been shown already.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gyre.proxy.chat import Json, Request
from gyre.proxy.recorder import Span
from gyre.proxy.sound import Unsound

#: Pieces of a text that are held before they are joined: one by one, a long text would be copied for each token.
_PIECES = 256


class Differs(Exception):
    """What an engine makes of the tokens it repeats is not what the client was shown of them."""


@dataclass
class Choice:
    """One of the answers to a request. Token ids are int32, log-probabilities float32."""

    sampled: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    spans: list[Span] = field(default_factory=list)
    entries: list[Any] = field(default_factory=list)  # log-probabilities as the client is shown them
    finish_reason: str | None = None
    stop_reason: Any = None
    repeated: int = 0  # of `sampled`, what the present engine has said
    again: Json | None = None  # the message as the present engine builds it, until it is where `message` is
    _message: Json = field(default_factory=dict)
    _new: dict[str, list[str]] = field(default_factory=dict)  # pieces of text that are not in `_message` yet

    @property
    def message(self) -> Json:
        """As far as it is known; for a streaming client, as far as it was shown."""
        if self._new:
            for key, pieces in self._new.items():
                _add(self._message, {key: "".join(pieces)})
            self._new = {}
        return self._message

    def begin_leg(self, shown: bool) -> None:
        """Another engine goes on; `shown` says that the client has the message as far as it is."""
        self.repeated = 0
        if shown:
            self.again = {} if self.message else None
        else:
            self._message, self._new = {}, {}

    def sample(self, span: Span, tokens: list[int], logprobs: list[float]) -> int:
        """Take an engine's tokens, under its span; returns how many of them only repeat what is kept.

        Raises:
            Unsound: they are other ones.
        """
        old = min(len(self.sampled) - self.repeated, len(tokens))
        if old:
            if self.sampled[self.repeated : self.repeated + old] != array("i", tokens[:old]):
                raise Unsound("other tokens than those that were kept")
            self.repeated += old
            tokens, logprobs = tokens[old:], logprobs[old:]
        if tokens:
            if not self.spans or self.spans[-1] is not span:
                self.spans.append(span)
            self.sampled.extend(tokens)
            self.logprobs.extend(logprobs)
            span.tokens += len(tokens)
            self.repeated += len(tokens)
        return old

    def merge(self, delta: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add a delta to the message; returns what of it goes beyond what was there.

        Raises:
            Differs: it cannot follow on what was there.
        """
        if self.again is None:
            for key, value in delta.items():
                if isinstance(value, str):
                    self._add_text(key, value)
                elif value is not None:
                    _add(self.message, {key: value})
            return delta
        _add(self.again, delta)
        more = _beyond(self.message, self.again)
        _add(self.message, more)
        if self.repeated >= len(self.sampled) and not _beyond(self.again, self.message):
            self.again = None
        return more

    def _add_text(self, key: str, text: str) -> None:
        if key == "role":
            return
        pieces = self._new.setdefault(key, [])
        pieces.append(text)
        if len(pieces) >= _PIECES:
            pieces[:] = ["".join(pieces)]

    def finish(self, reason: str, stop_reason: Any = None) -> None:
        """The answer is whole.

        Raises:
            Unsound: it ended before the tokens that were kept.
            Differs: more of it was shown than there is, and not only white space.
        """
        if self.repeated < len(self.sampled):
            raise Unsound("an end before the tokens that were kept")
        if self.again is not None and any(_words(value) for value in _beyond(self.again, self.message).values()):
            raise Differs("a shorter text than was shown")
        self.again = None
        self.finish_reason, self.stop_reason = reason, stop_reason


def _words(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _add(message: Json, delta: Mapping[str, Any]) -> None:
    for key, value in delta.items():
        if value is None or key == "role":
            continue
        if key == "tool_calls":
            _add_calls(message.setdefault(key, []), value)
        elif isinstance(value, str) and isinstance(known := message.get(key, ""), str):
            message[key] = known + value
        else:
            message[key] = value


def _add_calls(calls: list[Json], deltas: list[Json]) -> None:
    """Calls of tools come in pieces: a name and id first, then parts of the arguments. The first id stands."""
    for delta in deltas:
        index = delta.get("index", len(calls))
        while len(calls) <= index:
            calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        call, function = calls[index], delta.get("function") or {}
        call["id"] = call["id"] or delta.get("id")
        call["type"] = delta.get("type") or call["type"]
        call["function"]["name"] = function.get("name") or call["function"]["name"]
        call["function"]["arguments"] += function.get("arguments") or ""


def _beyond(shorter: Json, longer: Json) -> Json:
    """The delta from one message to another that begins with it; nothing for what the second has not reached yet."""
    more: Json = {}
    for key, value in longer.items():
        known = shorter.get(key)
        if key == "tool_calls":
            if calls := _calls_beyond(known or [], value):
                more[key] = calls
        elif isinstance(value, str):
            if rest := _rest(key, known or "", value):
                more[key] = rest
        elif known != value:
            if known is not None:
                raise Differs(f"another {key} than was shown")
            more[key] = value
    return more


def _rest(name: str, known: str, value: str) -> str:
    if value.startswith(known):
        return value[len(known) :]
    if not known.startswith(value):
        raise Differs(f"another {name} than was shown")
    return ""


def _calls_beyond(known: list[Json], calls: list[Json]) -> list[Json]:
    more = []
    for index, call in enumerate(calls):
        function = call["function"]
        if index >= len(known) or not known[index]["function"]["name"]:
            if function["name"]:
                more.append({"index": index, **call, "function": dict(function)})
            continue
        before = known[index]["function"]
        if function["name"] and function["name"] != before["name"]:
            raise Differs("another tool than was shown")
        if rest := _rest("argument", before["arguments"], function["arguments"]):
            more.append({"index": index, "function": {"arguments": rest}})
    return more


# -- what a client is answered ---------------------------------------------------------------------------------------
def usage(prompt: int, choices: list[Choice]) -> Json:
    """Token counts of an answer."""
    sampled = sum(len(choice.sampled) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def visible(request: Request, message: Mapping[str, Any]) -> Json:
    """The fields of a message or delta that the client wants to see."""
    hidden = ("reasoning", "reasoning_content") if request.hides_reasoning else ()
    return {key: value for key, value in message.items() if key not in hidden}


def _logprobs(request: Request, entries: list[Any]) -> Json:
    if request.is_chat:
        return {"content": entries}
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [entry[i] for entry in entries] for i, name in enumerate(names)}


def response(request: Request, head: Json, prompt: array[int], choices: list[Choice]) -> Json:
    """The plain answer; `head` has id, created and model."""
    shown = []
    for index, choice in enumerate(choices):
        entry: Json = {"index": index, "finish_reason": choice.finish_reason, "logprobs": None}
        if request.is_chat:
            message = {"role": "assistant", "content": None, **visible(request, choice.message)}
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
            entry["message"] = message
        else:
            entry["text"] = choice.message.get("content", "")
        if request.logprobs:
            entry["logprobs"] = _logprobs(request, choice.entries)
        if choice.stop_reason is not None:
            entry["stop_reason"] = choice.stop_reason
        if request.token_ids:
            entry["token_ids"] = list(choice.sampled)
            if not request.is_chat:
                entry["prompt_token_ids"] = list(prompt)
        shown.append(entry)
    kind = "chat.completion" if request.is_chat else "text_completion"
    answer = {**head, "object": kind, "choices": shown, "usage": usage(len(prompt), choices)}
    if request.token_ids and request.is_chat:
        answer["prompt_token_ids"] = list(prompt)
    return answer


def _event(request: Request, head: Json, choices: list[Json]) -> Json:
    return {**head, "object": "chat.completion.chunk" if request.is_chat else "text_completion", "choices": choices}


def chunk(
    request: Request,
    head: Json,
    index: int,
    delta: Mapping[str, Any],
    finish: tuple[str | None, Any] = (None, None),
    entries: list[Any] | None = None,
    tokens: list[int] | None = None,
) -> Json:
    """One piece of a streamed answer; `finish` is why it ended, and at what."""
    choice: Json = {"index": index, "finish_reason": finish[0]}
    if request.is_chat:
        choice["delta"] = delta
    else:
        choice |= {"text": delta.get("content") or "", "logprobs": None}
    if finish[1] is not None:
        choice["stop_reason"] = finish[1]
    if entries and request.logprobs:
        choice["logprobs"] = _logprobs(request, entries)
    if tokens and request.token_ids:
        choice["token_ids"] = tokens
    return _event(request, head, [choice])


def first_chunk(request: Request, head: Json, index: int, prompt: array[int]) -> Json | None:
    """What a streamed answer begins with: the role, and the prompt's ids where they are asked for."""
    if not request.is_chat and not request.token_ids:
        return None
    event = chunk(request, head, index, {"role": "assistant", "content": ""} if request.is_chat else {})
    if request.token_ids:
        (event if request.is_chat else event["choices"][0])["prompt_token_ids"] = list(prompt)
    return event


def usage_chunk(request: Request, head: Json, prompt: int, choices: list[Choice]) -> Json:
    """The last piece of a streamed answer, where the client asked for counts."""
    return {**_event(request, head, []), "usage": usage(prompt, choices)}
