"""What a trace says: how long the executions of a run take, group by group. Pure.

A trace is JSON Lines, one execution a line:

    {"group": 0, "rollout_s": 164.3, "train_s": 12.5, "tokens": 4100, "outcome": "completed"}

`group` (a whole number or a string) is the task; `rollout_s` the seconds in which the execution holds a slot of an
engine; the optional `train_s` its training work in cell-seconds, `tokens` what was sampled for it, `outcome` how it
ended. Other keys are ignored. `gyre.simulate.trace` reads such files, and makes one of a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from gyre.errors import UserError

#: Groups of fewer executions are dropped where there are larger ones.
SMALLEST_GROUP = 4
#: Thirty years in seconds: what is longer is no duration but a time of day, or milliseconds.
LONGEST = 1e9


class Shuffler(Protocol):
    """`random.Random`, or whatever else shuffles."""

    def shuffle(self, x: list[Any], /) -> None:
        """Put a list into another order, in place."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One execution."""

    rollout_s: float  # seconds it holds a slot
    train_s: float | None = None  # cell-seconds of training; None where the trace does not say
    tokens: int | None = None  # sampled
    outcome: str = "completed"


Group = tuple[Entry, ...]


@dataclass(frozen=True)
class Trace:
    """Groups of executions, all of one size, in the order of the file."""

    name: str
    groups: tuple[Group, ...]

    @property
    def size(self) -> int:
        """Executions in a group."""
        return len(self.groups[0])

    @property
    def executions(self) -> int:
        """Executions in all groups."""
        return len(self.groups) * self.size

    @property
    def mean_rollout_s(self) -> float:
        """Mean seconds in which an execution holds its slot."""
        return math.fsum(entry.rollout_s for group in self.groups for entry in group) / self.executions


def parse(lines: Iterable[str], name: str) -> Trace:
    """The trace of some lines; `name` is what messages call it. Blank lines are skipped.

    Groups of fewer than 4 executions are dropped, or, where no group has 4, those that are smaller than the largest
    one. The others are cut to the size of the smallest that is left, in the order of the lines.

    Raises:
        UserError: there is no execution, a line is not one, or no group has two; it says which line.
    """
    by_label: dict[int | str, list[Entry]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            label, entry = _parse_line(line, f"{name}, line {number}")
            by_label.setdefault(label, []).append(entry)
    if not by_label:
        raise UserError(f"the trace {name} is empty; write one execution a line, as JSON with `group` and `rollout_s`")
    largest = max(map(len, by_label.values()))
    if largest == 1:
        raise UserError(
            f"the trace {name} has only groups of one; give all executions of a task the same number in `group`"
        )
    kept = [group for group in by_label.values() if len(group) >= min(SMALLEST_GROUP, largest)]
    size = min(map(len, kept))
    return Trace(name, tuple(tuple(group[:size]) for group in kept))


def shuffled(trace: Trace, groups: int, random: Shuffler) -> list[Group]:
    """`groups` groups of a trace: round after round over all of them, every round in a fresh random order."""
    order: list[Group] = []
    while len(order) < groups:
        turn = list(trace.groups)
        random.shuffle(turn)
        order += turn
    return order[: max(0, groups)]


# -- one line --------------------------------------------------------------------------------------------------------
def _parse_line(line: str, where: str) -> tuple[int | str, Entry]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON; write one execution a line, as a JSON object") from error
    if not isinstance(data, dict):
        raise UserError(f"{where} is not a JSON object; write an object with `group` and `rollout_s`")
    for key in ("group", "rollout_s"):
        if key not in data:
            raise UserError(f"{where} has no `{key}`; every execution needs `group` and `rollout_s`")
    label = data["group"]
    if not isinstance(label, int | str) or isinstance(label, bool):
        raise UserError(f"{where}: `group` is {_shown(label)}; it must be a whole number or a string")
    rollout_s = _seconds(data["rollout_s"], "rollout_s", where)
    train_s = data.get("train_s")
    tokens, outcome = data.get("tokens"), data.get("outcome", "completed")
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0):
        raise UserError(f"{where}: `tokens` is {_shown(tokens)}; it must be a whole number, 0 or more")
    if not isinstance(outcome, str):
        raise UserError(f"{where}: `outcome` is {_shown(outcome)}; it must be a word such as completed or timed_out")
    train_s = None if train_s is None else _seconds(train_s, "train_s", where)
    return label, Entry(rollout_s, train_s, tokens, outcome)


def _seconds(value: Any, key: str, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UserError(f"{where}: `{key}` is {_shown(value)}; it must be a number of seconds")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: `{key}` is {_shown(value)}; it must be a finite number of seconds")
    if value < 0:
        raise UserError(f"{where}: `{key}` is negative ({_shown(value)}); it must be 0 or more seconds")
    if value > LONGEST:
        raise UserError(f"{where}: `{key}` is more than {LONGEST:g} seconds; it must be a duration in seconds")
    return float(value)


def _shown(value: Any) -> str:
    """A value as the file has it, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
