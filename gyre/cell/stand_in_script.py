"""The answers that a scripted engine replays: a file of one JSON object a line, and which of them a request gets. Pure.

The first line whose conditions all hold is the answer. Conditions: `turn` (answers that the conversation has so far),
`task` and `task_regex` (of the first user message), `last` and `last_regex` (of the last message), `share` (of the
executions). What it says: `content`, `reasoning`, `tool_calls`, `finish_reason`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.cell.stand_in_request import Asked
from gyre.cell.stand_in_text import decode, encode, plain, turn, written
from gyre.errors import UserError

Message = dict[str, Any]

_KEYS = {
    **dict.fromkeys(("task", "task_regex", "last", "last_regex", "content", "reasoning"), (str, "a text")),
    **{"turn": (int, "a number"), "share": ((int, float), "a number"), "tool_calls": (list, "a list")},
    "finish_reason": (str, "stop, length or tool_calls"),
}
_REASONS = ("stop", "length", "tool_calls")


@dataclass(frozen=True)
class Call:
    """A call of a tool; `arguments` is sampled as it is here."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Line:
    """An answer, and when it is given."""

    number: int
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    finish_reason: str = "stop"
    turn: int | None = None
    share: float = 1.0
    task: Callable[[str], bool] | None = None
    last: Callable[[str], bool] | None = None

    @property
    def parts(self) -> list[tuple[str, str]]:
        """What is sampled, as `stand_in_text.turn` gives it."""
        return list(turn(self.reasoning, self.content, [(call.name, call.arguments) for call in self.calls]))

    def answers(self, place: int, share: float, task: str, last: str) -> bool:
        """Whether all conditions hold."""
        if self.turn not in (None, place) or share >= self.share:
            return False
        return (self.task is None or self.task(task)) and (self.last is None or self.last(last))


def share_of(execution: int) -> float:
    """Where an execution lies between 0 and 1: executions in a row are spread evenly."""
    return execution * 0x9E3779B1 % (1 << 32) / (1 << 32)


class Script:
    """All answers of a file."""

    def __init__(self, lines: list[Line], name: str) -> None:
        self._lines = lines
        self._name = name

    def line(self, asked: Asked) -> Line:
        """The answer to a request.

        Raises:
            ValueError: there is none.
        """
        if asked.chat:
            users = [message for message in asked.messages if message["role"] == "user"]
            task = plain(users[0].get("content")) if users else ""
            last = plain(asked.messages[-1].get("content"))
        else:
            task = last = decode(asked.prompt)
        place, share = asked.turns, share_of(asked.execution)
        for line in self._lines:
            if line.answers(place, share, task, last):
                return line
        begins = task if len(task) <= 60 else task[:60] + "..."
        raise ValueError(
            f"no line of {self._name} answers turn {place} of the task {begins!r}; add one, or one without conditions"
        )


def read(path: Path | str) -> Script:
    """The answers of a file.

    Raises:
        UserError: it cannot be read, or a line of it is no answer.
    """
    try:
        return parse(Path(path).read_text(), str(path))
    except OSError as error:
        raise UserError(f"engine.scripted.answers: cannot read {path}: {error.strerror}; correct the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"engine.scripted.answers: {path} is not UTF-8 text; write one JSON object a line") from error


def parse(text: str, name: str) -> Script:
    """The answers in the text of a file called `name`; blank lines are skipped.

    Raises:
        UserError: a line, which is named, is no answer, or there is none.
    """
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                lines.append(_line(line, number))
            except ValueError as error:
                raise UserError(f"engine.scripted.answers: {name}, line {number}: {error}") from error
    if not lines:
        raise UserError(f"engine.scripted.answers: {name} has no answers; write one JSON object a line")
    return Script(lines, name)


def _line(text: str, number: int) -> Line:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON ({error}); write one JSON object a line") from error
    if not isinstance(value, dict):
        raise ValueError("not an object; write one JSON object a line")
    for key, given in value.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, 1, 0.6)
            raise ValueError(f"unknown key {key!r}; " + (f"did you mean {near[0]}?" if near else f"use {_known()}"))
        kind, words = _KEYS[key]
        if not isinstance(given, kind) or isinstance(given, bool):
            raise ValueError(f"{key} must be {words}, not {json.dumps(given)}")
    if not any(value.get(key) for key in ("content", "reasoning", "tool_calls")):
        raise ValueError("an answer that says nothing; give it content, reasoning or tool_calls")
    calls = tuple(_call(call, index) for index, call in enumerate(value.get("tool_calls") or ()))
    reason = value.get("finish_reason", "tool_calls" if calls else "stop")
    if reason not in _REASONS:
        raise ValueError(f"finish_reason must be one of {', '.join(_REASONS)}, not {reason!r}")
    if (reason == "tool_calls") != bool(calls) and reason != "length":
        raise ValueError(f"finish_reason {reason} does not fit an answer {'with' if calls else 'without'} tool_calls")
    if value.get("turn", 0) < 0:
        raise ValueError("turn counts the answers before this one, from 0 on")
    if not 0 < value.get("share", 1) <= 1:
        raise ValueError("share must be above 0 and at most 1")
    return Line(
        number=number,
        content=value.get("content", ""),
        reasoning=value.get("reasoning", ""),
        calls=calls,
        finish_reason=reason,
        turn=value.get("turn"),
        share=float(value.get("share", 1)),
        task=_condition(value, "task"),
        last=_condition(value, "last"),
    )


def _known() -> str:
    return ", ".join(_KEYS)


def _call(value: Any, index: int) -> Call:
    if not isinstance(value, dict) or not set(value) <= {"name", "arguments", "id"}:
        raise ValueError(f"tool_calls[{index}] must be an object of name, arguments and, if you like, id")
    name, arguments, key = value.get("name"), value.get("arguments", {}), value.get("id", "")
    if not isinstance(name, str) or not name:
        raise ValueError(f"tool_calls[{index}]: name must be a text")
    if not isinstance(arguments, dict | str) or not isinstance(key, str):
        raise ValueError(f"tool_calls[{index}]: arguments must be an object, or the text of one, and id a text")
    return Call(name, arguments if isinstance(arguments, str) else written(arguments), key)


def _condition(value: Message, key: str) -> Callable[[str], bool] | None:
    """A test of a message's text: that it contains a text, that a regular expression is found in it, or both."""
    text, pattern = value.get(key), value.get(f"{key}_regex")
    if text is None and pattern is None:
        return None
    try:
        compiled = None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{key}_regex is no regular expression: {error}") from error
    return lambda message: (text is None or text in message) and (compiled is None or bool(compiled.search(message)))


@dataclass(frozen=True)
class Part:
    """A run of an answer's tokens, from `begin` to `end`: what a client sees of it, and of which call."""

    begin: int
    end: int
    what: str


def lay_out(line: Line) -> tuple[list[int], list[Part]]:
    """The tokens of an answer, without the one that ends the turn, and what they are."""
    ids: list[int] = []
    parts = []
    for what, text in line.parts:
        begin = len(ids)
        ids += encode(text)
        parts.append(Part(begin, len(ids), what))
    return ids, parts
