"""Whether what an engine says is an answer that can be recorded. Pure.

Nothing of an engine's words is taken for granted: a piece that has another shape than an answer's, tokens without their
log-probabilities or their prompt, text without its tokens. All of that is one kind of fault: the leg ends there, what
was sound before it stands, and the request is tried again, a bounded number of times.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


class Unsound(Exception):
    """What the engine said is no answer, or none that can be recorded."""


@dataclass
class Piece:
    """One choice's part of an event."""

    raw: Json
    index: int
    delta: Json
    values: list[float]  # log-probabilities
    entries: list[Json]  # the same as a client would be shown them

    @property
    def tokens(self) -> list[int]:
        """Ids of its tokens."""
        return self.raw.get("token_ids") or []


def read(
    event: Json, choices: int, logprobs: Callable[[Json], tuple[list[float], list[Json]]]
) -> tuple[array[int], list[Piece]]:
    """The prompt's ids of an event, where it has them, and its pieces; `logprobs` finds those of a piece.

    Raises:
        Unsound: it is no part of an answer with so many choices, or the engine gave the answer up.
    """
    try:
        prompt = _ids(event.get("prompt_token_ids") or ())
        pieces = [_piece(raw, choices, logprobs) for raw in event.get("choices") or ()]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Unsound(f"an event that is no part of an answer: {type(error).__name__}: {error}") from error
    if any(piece.raw.get("finish_reason") == "abort" for piece in pieces):
        # Mostly because of a move, of which the next leg then hears; but an engine may do it to every request.
        raise Unsound("the answer was aborted")
    return prompt, pieces


def _ids(tokens: Any) -> array[int]:
    ids = array("i", tokens)
    if ids and min(ids) < 0:
        raise ValueError("a token below 0")
    return ids


def _piece(raw: Json, choices: int, logprobs: Callable[[Json], tuple[list[float], list[Json]]]) -> Piece:
    index, delta = raw.get("index", 0), raw.get("delta") or {}
    if not isinstance(index, int) or not 0 <= index < choices or not isinstance(delta, dict):
        raise ValueError(f"choice {index!r} of {choices}")
    _ids(raw.get("token_ids") or ())
    return Piece(raw, index, dict(delta), *logprobs(raw))


def fault(piece: Piece, prompt: bool, begun: bool) -> str:
    """Why a piece cannot be recorded, or nothing.

    `prompt` says whether the prompt's ids are known, and `begun` whether there may be text that has no tokens here.
    """
    tokens, values = len(piece.tokens), piece.values
    if tokens != len(values):
        return f"{tokens} tokens with {len(values)} log-probabilities"
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        # Its logits were no numbers: nothing can be trained on this.
        return f"log-probabilities that are no numbers: {values}"
    if tokens and not prompt:
        return "tokens without the ids of their prompt"
    words = piece.raw.get("text") or any(value for key, value in piece.delta.items() if key != "role")
    if words and not tokens and not begun:
        return "text without the ids of its tokens"
    return ""
