"""What every cell of a run did with its time, folded from its events. Pure.

The law: at every time a cell is in exactly one state, so its segments follow each other without gap or overlap; and it
is in `CellState.ROLLOUT` exactly while the scheduler counts its slots. Words of another incarnation or epoch, and words
that come twice or late, change nothing here either: the rules are those of `gyre.scheduler.fleet`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from gyre.cell.machine import State

Record = dict[str, Any]


class CellState(IntEnum):
    """What a cell does with its time. The names of the members are what people read, in lower case."""

    ROLLOUT = 0  # routed: its slots count
    TO_TRAINING = 1  # ordered to training, until it has the device
    IN_UPDATE = 2  # a member of an open update
    WAITING = 3  # in training, between updates
    TO_ROLLOUT = 4  # ordered to rollout, or loading a policy, until it is routed
    STARTING = 5  # its engine is being started
    DOWN = 6  # lost, failed, or no attempt is under way


@dataclass(frozen=True, slots=True)
class Segment:
    """A time, in seconds, that a cell spent in one state; `reason` is of its latest move or loss."""

    start: float
    end: float
    state: CellState
    reason: str = ""


#: The ways to the two roles; a report that does not lead further is late or repeated.
_TO_TRAINING = (State.ROLLOUT, State.DRAINING, State.HANDOFF, State.RELEASING, State.TRAINING)
_TO_ROLLOUT = (State.RESTARTING, State.RESTORING, State.SYNCING, State.ROLLOUT)


@dataclass(slots=True)
class _Cell:
    """A cell in one attempt, as far as its slots and its segments need it; see `gyre.scheduler.fleet.Cell`."""

    incarnation: int = 0
    epoch: int = 0
    floor: int = 0  # lowest epoch whose failures are news
    up: bool = False
    lost: bool = False
    dedicated: bool = False  # one that only ever trains: it is never routed
    trains: bool = False  # its goal is training
    state: State = State.RESTARTING
    version: int = -1
    routed: bool = False
    update: int | None = None  # that it is a member of
    over: int = 0  # latest update that its part is over in

    def looks(self) -> CellState:
        """What it does with its time."""
        if not self.up:
            waits = self.state is State.RESTARTING and not self.lost
            return CellState.STARTING if waits else CellState.DOWN
        if not self.trains:
            return CellState.ROLLOUT if self.routed else CellState.TO_ROLLOUT
        if self.state is not State.TRAINING:
            return CellState.TO_TRAINING
        return CellState.WAITING if self.update is None else CellState.IN_UPDATE

    def progress(self, state: State) -> int:
        """How far a state is on the way to the goal; -1 where it is not on the way."""
        way = _TO_TRAINING if self.trains else _TO_ROLLOUT
        return way.index(state) if state in way else -1


@dataclass(slots=True)
class _Row:
    """The segments of a cell over all attempts, and the one that is still open."""

    since: float
    state: CellState = CellState.DOWN
    reason: str = ""
    closed: list[Segment] = field(default_factory=list)

    def show(self, now: float, state: CellState, reason: str | None = None) -> None:
        """It is in a state from now on; None: for the reason it had."""
        reason = self.reason if reason is None else reason
        if (state, reason) != (self.state, self.reason):
            if now > self.since:
                self.closed.append(Segment(self.since, now, self.state, self.reason))
            self.since, self.state, self.reason = now, state, reason

    def until(self, now: float) -> list[Segment]:
        """All segments, the open one cut off."""
        return [*self.closed, Segment(self.since, now, self.state, self.reason)] if now > self.since else [*self.closed]


class Cells:
    """All cells and standalone engines of a run, by rank; every method takes the time of its record, in seconds."""

    def __init__(self, max_lag: int, trainers: int = 0) -> None:
        """`max_lag`: versions that an engine may be behind and serve; `trainers`: cells that only train, the first."""
        self.serving = 0  # in rollout: their slots count
        self._max_lag = max_lag
        self._trainers = trainers
        self._cells: list[_Cell] = []
        self._rows: list[_Row] = []
        self._now = 0.0
        self._published = 0
        self._stepped = 0  # latest update of this attempt that the core took the step of
        self._handlers = {name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_on_")}

    def begin(self, now: float, engines: int, version: int, start: float) -> None:
        """An attempt begins; ranks that were not known before were down since `start`."""
        self._now = now
        self._rows += [_Row(start) for _ in range(engines - len(self._rows))]
        self._cells = [_Cell(lost=rank >= engines, dedicated=rank < self._trainers) for rank in range(len(self._rows))]
        self._published, self._stepped = version, 0
        for rank in range(len(self._rows)):
            self._show(rank, "")

    def end(self, now: float, reason: str) -> None:
        """The attempt is over: all are down."""
        self._now = now
        for rank, cell in enumerate(self._cells):
            self._down(cell, State.FAILED, True)
            self._show(rank, reason)

    def apply(self, now: float, record: Record) -> bool:
        """Take in one record; False if its kind says nothing about cells."""
        handler = self._handlers.get(record["kind"])
        if handler is None:
            return False
        self._now = now
        handler(record)
        return True

    def rows(self, now: float) -> list[list[Segment]]:
        """The segments so far, by rank."""
        return [row.until(now) for row in self._rows]

    def _show(self, rank: int, reason: str | None = None) -> None:
        self._rows[rank].show(self._now, self._cells[rank].looks(), reason)

    def _cell(self, record: Record) -> _Cell | None:
        """The cell of a record's rank; None for hosts."""
        return self._cells[record["rank"]] if record["rank"] < len(self._cells) else None

    # -- life and roles ----------------------------------------------------------------------------------------------
    def _route(self, cell: _Cell, routed: bool) -> None:
        if cell.routed != routed:
            cell.routed = routed
            self.serving += 1 if routed else -1

    def _down(self, cell: _Cell, state: State, lost: bool) -> None:
        self._route(cell, False)
        cell.epoch += 1
        cell.floor = cell.epoch
        cell.up, cell.lost, cell.state, cell.trains, cell.update = False, lost, state, False, None

    def _on_rank_ready(self, record: Record) -> None:
        cell = self._cell(record)
        if cell is None or record["incarnation"] < cell.incarnation:
            return
        newer = record["incarnation"] > cell.incarnation
        if cell.up and newer and record["rank"] == 0:
            return  # a core that starts again is another attempt's
        if not newer and (cell.up or cell.lost):
            return
        if cell.up:
            self._down(cell, State.FAILED, True)
        cell.incarnation, cell.up, cell.lost, cell.state, cell.version = (
            record["incarnation"], True, False, State.RESTARTING, -1,
        )  # fmt: skip
        self._show(record["rank"])

    def _on_rank_lost(self, record: Record) -> None:
        cell = self._cell(record)
        if cell is None or record["rank"] == 0:
            return
        if record["incarnation"] > cell.incarnation or (record["incarnation"] == cell.incarnation and not cell.lost):
            cell.incarnation = record["incarnation"]
            self._down(cell, State.FAILED, True)
            self._show(record["rank"], f"lost: {record['reason']}")

    def _on_move_started(self, record: Record) -> None:
        cell = self._cell(record)
        if cell is None:
            return
        cell.epoch, cell.trains, cell.update = record["epoch"], record["target"].lower() == "training", None
        cell.up, cell.lost = True, False  # only those that live are ordered about
        if cell.trains:
            self._route(cell, False)
            cell.state = State.ROLLOUT
        elif cell.state is State.ROLLOUT:
            cell.state = State.DRAINING  # ordered away, which it has not answered yet; its next ROLLOUT is news
        self._show(record["rank"], record["reason"])

    def _on_role_reached(self, record: Record) -> None:
        cell, state = self._cell(record), State(record["state"])
        if cell is None or record["incarnation"] != cell.incarnation:
            return
        if state is State.FAILED:
            self._failed(cell, record)
        elif not cell.up:
            if state is State.RESTARTING and not cell.lost:
                cell.state = state
                self._show(record["rank"])
        elif record["epoch"] == cell.epoch:
            self._reached(cell, state, record)

    def _failed(self, cell: _Cell, record: Record) -> None:
        training_core = record["rank"] == 0 and cell.trains and cell.state is State.TRAINING
        if cell.up and cell.floor <= record["epoch"] <= cell.epoch and not training_core:  # of which the attempt ends
            self._down(cell, State.FAILED, False)
            self._show(record["rank"], f"failed: {record.get('detail', '')}".removesuffix(": "))

    def _reached(self, cell: _Cell, state: State, record: Record) -> None:
        version = record.get("version", -1)
        synced = state is cell.state is State.ROLLOUT and not cell.trains and version > cell.version
        if cell.progress(state) <= cell.progress(cell.state) and not synced:
            return
        cell.state = state
        if state is State.ROLLOUT and not cell.trains:
            cell.version = version
            behind = self._published - version
            if not cell.dedicated and (behind <= 0 or (cell.routed and behind <= self._max_lag)):
                self._route(cell, True)
        self._show(record["rank"])

    def _on_policy_published(self, record: Record) -> None:
        self._published = record["version"]
        for rank, cell in enumerate(self._cells):
            if cell.routed and cell.version < self._published - self._max_lag:
                self._route(cell, False)
                self._show(rank, f"more than {self._max_lag} behind policy {self._published}")

    # -- training ----------------------------------------------------------------------------------------------------
    def _on_update_opened(self, record: Record) -> None:
        if self._cells:
            self._join(0, record["update"])

    def _on_cell_joined(self, record: Record) -> None:
        if self._cell(record) is not None:
            self._join(record["rank"], record["update"])

    def _join(self, rank: int, update: int) -> None:
        cell = self._cells[rank]
        if cell.up and cell.trains and update > max(cell.over, self._stepped):
            cell.state, cell.update = State.TRAINING, update
            self._show(rank)

    def _on_training_ended(self, record: Record) -> None:
        cell, update = self._cell(record), record["update"]
        if cell is None or not cell.up or not cell.trains or record["incarnation"] != cell.incarnation:
            return
        if record["how"] == "failed":
            if record["rank"] != 0:  # it is barred, and starts again; where the core fails, the attempt ends
                self._down(cell, State.FAILED, True)
                self._show(record["rank"], f"its part in update {update} failed: {record.get('detail', '')}")
            return
        if record["how"] != "suspended":  # after that it may join again
            cell.over = max(cell.over, update)
        if cell.update == update:
            cell.update = None
            self._show(record["rank"])

    def _on_update_done(self, record: Record) -> None:
        self._stepped = max(self._stepped, record["update"])
        for rank, cell in enumerate(self._cells):
            if cell.update is not None and cell.update <= self._stepped:
                cell.update = None
                self._show(rank)
