"""What every dialect makes of a request. Pure."""

from __future__ import annotations

from typing import Any, Protocol

from gyre.proxy.dialects.errors import ApiError, Json

#: One server-sent event: its name, where the dialect names its events, and its data.
Event = tuple[str | None, Json]


class Call(Protocol):
    """One request: what an engine is to be asked, and how the answer is told."""

    chat: Json  # the body of the chat completion (or plain completion) that stands for it
    stream: bool
    completion: bool  # without messages

    def answer(self, given: Json) -> Json:
        """The plain answer, from that of the chat completion."""

    def events(self, chunk: Json) -> list[Event]:
        """The events that a chunk of the streamed chat completion gives."""

    def end(self) -> list[Event]:
        """The events after the last chunk."""

    def failed(self, error: ApiError, request_id: str) -> list[Event]:
        """How a stream that has begun says that it ends early."""

    def idle(self) -> Event | None:
        """What a stream says when there is nothing to say; None for a comment."""

    @property
    def last(self) -> bytes:
        """What the dialect puts after the last event."""


def choice_of(chunk: Json) -> Json:
    """The one choice of a chunk or an answer; empty where it has none, as the chunk with the counts."""
    choices = chunk.get("choices")
    return choices[0] if choices else {}


def reasoning_of(message: Json) -> str:
    """The reasoning of a message or delta, whichever name it has."""
    return message.get("reasoning") or message.get("reasoning_content") or ""


def counts_of(given: Json) -> tuple[int, int]:
    """Tokens of the prompt and of the answer, as far as a chunk or an answer has them."""
    usage: Any = given.get("usage") or {}
    return usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
