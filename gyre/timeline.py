"""What a run looked like over time, folded from its events: cells, waterlevel, capacity, ready groups. Pure.

It serves logs of real runs and of simulated ones alike; the only clock is the `t` that events carry.

Conservation: w = d - f, where an execution counts once however often it is dispatched, tried or reported, in whatever
attempt; a group is ready from its `GroupReady` until it is taken or dropped, or the next attempt begins; and capacity
is the slots of the cells in rollout (`gyre.timeline_cells`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gyre.timeline_cells import Cells, Record, Segment


@dataclass
class Steps:
    """A step curve: from `times[i]` on (seconds) it has the value `values[i]`."""

    times: list[float] = field(default_factory=list)
    values: list[int] = field(default_factory=list)

    def add(self, t: float, value: int) -> None:
        """Let it have a value from t on, which is not before its last time."""
        if self.times and self.times[-1] == t:
            self.times.pop()
            self.values.pop()
        if not self.values or self.values[-1] != value:
            self.times.append(t)
            self.values.append(value)


@dataclass
class Attempt:
    """One start of the run; times in seconds."""

    number: int
    start: float
    version: int  # of the policy that it went on from
    end: float = 0.0  # of its last event
    how: str = ""  # completed, interrupted, failed, was killed; empty while it runs


@dataclass
class Timeline:
    """A run over time, in seconds of the clock of its events."""

    slots: int  # per cell
    start: float = 0.0
    end: float = 0.0
    cells: int = 0  # that train and roll out; the rows behind theirs are standalone engines
    rows: list[list[Segment]] = field(default_factory=list)  # by rank
    capacity: Steps = field(default_factory=Steps)  # slots of the engines in rollout
    waterlevel: Steps = field(default_factory=Steps)  # w = d - f, executions queued or running
    running: Steps = field(default_factory=Steps)  # p - f, executions that were launched and are not closed
    ready: Steps = field(default_factory=Steps)  # groups that can be taken and are not
    published: list[tuple[float, int]] = field(default_factory=list)  # when, and which policy version
    attempts: list[Attempt] = field(default_factory=list)


def fold(records: Iterable[Record], slots: int, max_lag: int = 2, trainers: int = 0) -> Timeline:
    """The timeline of a run's events in the order of the log; O(records).

    Args:
        records: the objects of events.jsonl.
        slots: executions that a cell serves at a time.
        max_lag: policy versions that an engine may be behind while it serves.
        trainers: cells of a fixed split that only train.
    """
    folding = Fold(slots, max_lag, trainers)
    for record in records:
        folding.apply(record)
    return folding.timeline()


class Fold:
    """The fold in the making: `apply` each record, in the order of the log, then take the `timeline`."""

    def __init__(self, slots: int, max_lag: int = 2, trainers: int = 0) -> None:
        self.d = 0
        self.ready: set[int] = set()
        self._slots = slots
        self._cells = Cells(max_lag, trainers)
        self._line = Timeline(slots)
        self._now: float | None = None
        self._closed: set[int] = set()
        self._launched: set[int] = set()  # in this attempt, and not closed
        self._group_size = 0
        self._handlers = {name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_on_")}

    @property
    def w(self) -> int:
        """Executions that are queued or running."""
        return self.d - len(self._closed)

    @property
    def running(self) -> int:
        """Executions that were launched in this attempt and are not closed."""
        return len(self._launched)

    @property
    def capacity(self) -> int:
        """Slots of the cells and engines in rollout."""
        return self._cells.serving * self._slots

    def timeline(self) -> Timeline:
        """What has been folded so far, up to the time of the last record."""
        line, now = self._line, self._now or 0.0
        line.end, line.rows = now, self._cells.rows(now)
        if line.attempts and not line.attempts[-1].how:
            line.attempts[-1].end = now
        return line

    def apply(self, record: Record) -> None:
        """Take in one record; of kinds that say nothing about the timeline only the time is taken."""
        kind, t = record["kind"], record["t"]
        if self._now is None:
            self._now = self._line.start = t
        if kind == "run_started":
            self._attempt_over("was killed")  # with its last event
        self._now = now = max(self._now, t)
        concerns_cells = self._cells.apply(now, record)
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(record, now)
        if concerns_cells or handler is not None:
            self._note(now)

    def _note(self, now: float) -> None:
        line = self._line
        line.capacity.add(now, self.capacity)
        line.waterlevel.add(now, self.w)
        line.running.add(now, self.running)
        line.ready.add(now, len(self.ready))

    # -- attempts ----------------------------------------------------------------------------------------------------
    def _on_run_started(self, record: Record, now: float) -> None:
        line, version = self._line, record["version"]
        self._cells.begin(now, record["cells"] + record["standalone"], version, line.start)
        self.ready.clear()  # what is ready at a resume is said again
        line.cells = max(line.cells, record["cells"])
        line.attempts.append(Attempt(record.get("attempt", len(line.attempts) + 1), now, version))

    def _on_run_ended(self, record: Record, now: float) -> None:
        self._attempt_over(record["how"])

    def _attempt_over(self, how: str) -> None:
        if not self._line.attempts or (attempt := self._line.attempts[-1]).how:
            return
        attempt.end, attempt.how = self._now or 0.0, how
        self._cells.end(attempt.end, f"attempt {attempt.number} {how}")
        self._launched.clear()
        self._note(attempt.end)

    def _on_policy_published(self, record: Record, now: float) -> None:
        self._line.published.append((now, record["version"]))

    # -- executions and groups ---------------------------------------------------------------------------------------
    def _on_quota_published(self, record: Record, now: float) -> None:
        self.d = max(self.d, record["last"] + 1)

    def _on_execution_granted(self, record: Record, now: float) -> None:
        n = record["n"]
        self.d = max(self.d, n + 1)  # the news of its quota may have died with rank 0
        if n not in self._closed:
            self._launched.add(n)

    def _on_execution_closed(self, record: Record, now: float) -> None:
        self._close(record["n"])

    def _close(self, n: int) -> None:
        self.d = max(self.d, n + 1)
        self._closed.add(n)
        self._launched.discard(n)

    def _close_group(self, group: int) -> None:
        """A settled group's executions are closed, though the news may have died with rank 0."""
        for n in range(group * self._group_size, (group + 1) * self._group_size):
            self._close(n)

    def _on_group_ready(self, record: Record, now: float) -> None:
        self._group_size = len(record["rewards"]) or self._group_size
        self._close_group(record["group"])
        self.ready.add(record["group"])

    def _on_group_dropped(self, record: Record, now: float) -> None:
        self._close_group(record["group"])
        self.ready.discard(record["group"])

    def _on_group_taken(self, record: Record, now: float) -> None:
        self.ready.discard(record["group"])
