"""Traces in files: reading one, and making one of a run. `gyre.simulate.workload` says what is in them.

What a run's trace says of an execution: `rollout_s` is slot time, from the grant of its last try to its close (scoring
and the news of it included, since the slot is not free before), less the time in which a request of it was held because
no engine was there to serve it. `train_s` is its share of the cell-seconds in which cells computed the micro-steps of
its update, as the core's own micro-steps say what one takes: shares go by sampled tokens, among the executions that
could be trained on. It is left out where the execution was in no update that was made. (The counters of `Usage` are of
no use here: they are seconds old when an update ends.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gyre.config import load as load_config
from gyre.errors import UserError
from gyre.run_dir import RunDir, read_events, read_json, write_atomic
from gyre.simulate.workload import Entry, Group, Trace, parse, shuffled

__all__ = ["Entry", "Group", "Trace", "export", "load", "parse", "shuffled", "write"]


def load(path: Path | str) -> Trace:
    """Read a trace file.

    Raises:
        UserError: it cannot be read or is no trace; the line is named.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            return parse(file, str(path))
    except OSError as error:
        raise UserError(f"cannot read the trace {path}: {error.strerror}; name a file of JSON lines") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the trace {path} is not UTF-8 text; write one JSON object a line") from error


def export(run: RunDir) -> list[dict[str, Any]]:
    """The trace of a run, as its directory has it now: lines as objects, in the order of the executions.

    Only whole groups are in it, those with no execution open, cancelled or never granted: a group that lacks some
    would cut all others down to its size when the trace is loaded.

    Raises:
        UserError: the directory has no readable config.yaml.
    """
    size = load_config(run.config).scheduler.group_size
    history = _History(size)
    for event in read_events(run.events):
        history.apply(event)
    outcomes = {n: outcome for n in history.known() if isinstance(outcome := read_json(run.outcome(n)), dict)}
    return history.lines(outcomes)


def write(run: RunDir) -> Path | None:
    """Replace the run's trace.jsonl with its present trace; None where there is no whole group yet."""
    lines = export(run)
    if not lines:
        return None
    write_atomic(run.trace, "".join(json.dumps(line) + "\n" for line in lines))
    return run.trace


# -- what a run's events say -----------------------------------------------------------------------------------------
_Update = tuple[int, int]  # attempt and number


class _History:
    """What the events of all attempts say of executions."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._granted: dict[tuple[int, int], float] = {}  # by execution and try: when
        self._failed: dict[tuple[int, int], float] = {}
        self._last_try: dict[int, int] = {}
        self._closed: dict[int, dict[str, Any]] = {}
        self._taken: dict[int, _Update] = {}  # by group: the update that took it last
        self._done: dict[_Update, dict[str, Any]] = {}

    def apply(self, event: dict[str, Any]) -> None:
        """Take in one line of the log."""
        t, attempt = event["t"], event["attempt"]
        match event["kind"]:
            case "execution_granted":
                self._granted[event["n"], event["try_number"]] = t
                self._failed.pop((event["n"], event["try_number"]), None)  # of an attempt before
                self._last_try[event["n"]] = event["try_number"]
            case "try_failed":
                self._failed[event["n"], event["try_number"]] = t
            case "execution_closed":
                self._closed.setdefault(event["n"], event)  # an execution is closed once; later news is old news
            case "group_taken":
                self._taken[event["group"]] = (attempt, event["update"])
            case "update_done":
                self._done[attempt, event["update"]] = event

    def known(self) -> list[int]:
        """Executions that may have an outcome."""
        return sorted(self._closed.keys() | self._last_try.keys())

    def lines(self, outcomes: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """The trace; `outcomes` are the outcome files, by execution."""
        news = outcomes | self._closed  # the event where there is one: it is what the scheduler went by
        shares = self._training_shares(news)
        lines = []
        for group in sorted({n // self._size for n in news}):
            entries = [self._line(n, news.get(n), outcomes.get(n, {}), shares.get(n)) for n in self._members(group)]
            if None not in entries:
                lines += [{"group": group} | entry for entry in entries]
        return lines

    def _members(self, group: int) -> range:
        return range(group * self._size, (group + 1) * self._size)

    def _line(
        self, n: int, news: dict[str, Any] | None, outcome: dict[str, Any], train_s: float | None
    ) -> dict[str, Any] | None:
        """What became of an execution; None where that cannot be said."""
        if news is None or news["outcome"] == "cancelled":
            return None
        held, seconds = outcome.get("held_seconds", 0.0), self._slot_seconds(n, outcome)
        if seconds is None:
            return None
        line = {"rollout_s": round(max(0.0, seconds - held), 3)}
        if train_s is not None:
            line["train_s"] = round(train_s, 3)
        return line | {"tokens": news.get("tokens", 0), "outcome": news["outcome"]}

    def _slot_seconds(self, n: int, outcome: dict[str, Any]) -> float | None:
        """Seconds from the grant of the last try to its end."""
        closed = self._closed.get(n)
        if closed is None:  # the news died with rank 0; what the host measured is the harness alone, without scoring
            return outcome.get("seconds")
        key = (n, closed["try_number"])
        if key not in self._granted:
            return None
        return self._failed.get(key, closed["t"]) - self._granted[key]

    def _training_shares(self, news: dict[int, dict[str, Any]]) -> dict[int, float]:
        """Cell-seconds of training by execution, of those whose update was made."""
        members: dict[_Update, list[int]] = {}
        for group, update in self._taken.items():
            members.setdefault(update, []).extend(n for n in self._members(group) if n in news)
        shares = {}
        metrics = {update: done.get("metrics", {}) for update, done in self._done.items()}
        costs = {update: numbers["cell_seconds"] for update, numbers in metrics.items() if "cell_seconds" in numbers}
        for update in members.keys() & costs.keys():
            weights = {n: news[n].get("tokens", 0) if news[n].get("usable") else 0 for n in members[update]}
            total = sum(weights.values())
            for n, weight in weights.items():
                shares[n] = costs[update] * (weight / total if total else 1 / len(weights))
        return shares
