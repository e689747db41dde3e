"""Whether what an engine says is an answer that can be recorded. Pure.

Nothing of an engine's words is taken for granted: a piece that has another shape than an answer's, tokens without their
log-probabilities or their prompt, text without its tokens. All of that is one kind of fault: the leg ends there, what
was sound before it stands, and the request is tried again, a bounded number of times.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

Json = dict[str, Any]

Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class Unsound(Exception):
    """What the engine said is no answer, or none that can be recorded."""


class _Entry(msgspec.Struct):
    logprob: float | None


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None  # of a chat completion
    token_logprobs: list[float | None] | None = None  # of a plain one


class _Part(msgspec.Struct):
    index: int = 0
    delta: Json | None = None
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[Token] | None = None
    prompt_token_ids: list[Token] | None = None


class _Plain(_Part):
    logprobs: _Logprobs | None = None


class _Full(_Part):
    logprobs: Json | None = None


class _PlainEvent(msgspec.Struct):
    choices: list[_Plain] = []
    prompt_token_ids: list[Token] | None = None
    error: Any = None


class _FullEvent(msgspec.Struct):
    choices: list[_Full] = []
    prompt_token_ids: list[Token] | None = None
    error: Any = None


Event = _PlainEvent | _FullEvent
_plain, _full = msgspec.json.Decoder(_PlainEvent).decode, msgspec.json.Decoder(_FullEvent).decode


def decoder(full: bool) -> Callable[[bytes], Event]:
    """What reads an event; `full`: with log-probabilities as a client is shown them. It raises ValueError."""
    return _full if full else _plain


class Piece(msgspec.Struct):
    """One choice's part of an event."""

    index: int
    delta: Json
    tokens: list[int]
    values: list[float]  # log-probabilities
    entries: list[Any]  # the same as a client would be shown them
    finish_reason: str | None
    stop_reason: Any


def read(event: Event, choices: int) -> tuple[array[int] | None, list[Piece]]:
    """The prompt's ids of an event, where it has them, and its pieces.

    Raises:
        Unsound: it is no part of an answer with so many choices, or the engine gave the answer up.
    """
    prompt = event.prompt_token_ids
    pieces = []
    for part in event.choices:
        if not 0 <= part.index < choices:
            raise Unsound(f"choice {part.index} of {choices}")
        if part.finish_reason == "abort":
            # Mostly because of a move, of which the next leg then hears; but an engine may do it to every request.
            raise Unsound("the answer was aborted")
        values, entries = _logprobs(part.logprobs)
        delta = {"content": part.text} if part.delta is None else part.delta
        for value in delta.values():
            if type(value) is not str:
                _check(delta)
                break
        tokens = part.token_ids or []
        pieces.append(Piece(part.index, delta, tokens, values, entries, part.finish_reason, part.stop_reason))
        prompt = part.prompt_token_ids or prompt
    # An array takes bytes in half the time of numbers, and prompts are long.
    return array("i", struct.pack(f"{len(prompt)}i", *prompt)) if prompt else None, pieces


def _check(delta: Json) -> None:
    """Texts and calls of tools have the shape that their pieces are put together by."""
    for key in ("content", "reasoning", "reasoning_content"):
        if not isinstance(delta.get(key) or "", str):
            raise Unsound(f"{key} of another shape")
    calls = delta.get("tool_calls") or []
    if not isinstance(calls, list):
        raise Unsound("tool calls of another shape")
    for call in calls:
        function = (call.get("function") or {}) if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or type(call.get("index", 0)) is not int
            or not 0 <= call.get("index", 0) < 512
        ):
            raise Unsound("a tool call of another shape")
        if not all(isinstance(function.get(key) or "", str) for key in ("name", "arguments")):
            raise Unsound("a tool call of another shape")


def _logprobs(given: _Logprobs | Json | None) -> tuple[list[float], list[Any]]:
    if given is None:
        return [], []
    if isinstance(given, _Logprobs):
        if given.content is not None:
            return [entry.logprob for entry in given.content], []
        return given.token_logprobs or [], []
    try:
        if (content := given.get("content")) is not None:
            return [entry["logprob"] for entry in content], content
        values = given.get("token_logprobs") or []
        tops = given.get("top_logprobs") or [None] * len(values)
        offsets = given.get("text_offset") or [0] * len(values)
        return values, list(zip(given.get("tokens") or [], values, tops, offsets, strict=True))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Unsound(f"log-probabilities of another shape: {type(error).__name__}: {error}") from error


def _number(value: Any) -> Any:
    """Fit for a log, in which no word of an engine belongs."""
    return value if value is None or isinstance(value, float) else type(value).__name__


def fault(piece: Piece, prompt: bool, begun: bool, known: int = 0) -> str:
    """Why a piece cannot be recorded, or nothing.

    `prompt` says whether the prompt's ids are known, and `begun` whether there may be text that has no tokens here. Of
    the first `known` tokens, which the engine only repeats, it cannot know the log-probabilities.
    """
    tokens, values = piece.tokens, piece.values
    if len(tokens) != len(values):
        return f"{len(tokens)} tokens with {len(values)} log-probabilities"
    try:
        finite = all(map(math.isfinite, values[known:] if known else values))
    except (TypeError, OverflowError):
        finite = False
    if not finite:
        # Its logits were no numbers: nothing can be trained on this.
        return f"log-probabilities that are no numbers: {[_number(value) for value in values[:8]]}"
    if tokens and not prompt:
        return "tokens without the ids of their prompt"
    if not tokens and not begun and any(value for key, value in piece.delta.items() if key != "role"):
        return "text without the ids of its tokens"
    return ""
