"""A scheduler's state with a test in the place of everything else: each word is said by hand."""

from __future__ import annotations

from typing import Any

from gyre import events as e
from gyre.scheduler import commands as c
from gyre.scheduler.invariants import check_thoroughly
from gyre.scheduler.policy import Elastic, Policy
from gyre.scheduler.settings import Settings
from gyre.scheduler.state import SchedulerState

ROLLOUT_STATES = ["RESTORING", "SYNCING", "ROLLOUT"]
TRAINING_STATES = ["DRAINING", "RELEASING", "TRAINING"]


class Hand:
    """Says words and keeps the commands that they lead to."""

    def __init__(self, state: SchedulerState | None = None, policy: Policy | None = None, **settings: Any) -> None:
        numbers = {"cells": 3, "slots": 4, "batch_groups": 2, "group_size": 2, "updates": 3, "lookahead": 0.0}
        self.settings = Settings(**{**numbers, "supply_hold": 0.0, **settings})
        self.state = state or SchedulerState(self.settings, policy or Elastic.plain())
        self.now = 0.0
        self.log: list[c.Command] = []
        self.latest: list[c.Command] = []
        self.granted: dict[int, c.Grant] = {}
        self._keep(self.state.start(self.now))

    def _keep(self, commands: list[c.Command]) -> None:
        check_thoroughly(self.state)
        self.latest = commands
        self.log += commands
        for command in commands:
            if isinstance(command, c.Grant):
                self.granted[command.n] = command

    def say(self, event: e.Event) -> list[c.Command]:
        self._keep(self.state.handle(event, self.now))
        return self.latest

    def wait(self, seconds: float) -> list[c.Command]:
        self.now += seconds
        return self.say(e.Tick())

    def of(self, kind: type[c.Command]) -> list[Any]:
        """Commands of a kind that the latest word led to."""
        return [command for command in self.latest if isinstance(command, kind)]

    def all(self, kind: type[c.Command]) -> list[Any]:
        return [command for command in self.log if isinstance(command, kind)]

    def facts(self, kind: type[e.Event]) -> list[Any]:
        return [command.event for command in self.all(c.Log) if isinstance(command.event, kind)]

    # -- ranks -------------------------------------------------------------------------------------------------------
    def begin(self) -> Hand:
        """Every rank reports, and all engines serve."""
        for rank in range(self.settings.engines):
            self.cell(rank)
        for rank in range(self.settings.engines, self.settings.engines + self.settings.hosts):
            self.host(rank)
        return self

    def host(self, rank: int, incarnation: int = 1) -> None:
        self.say(e.RankReady(rank, incarnation, "host"))

    def cell(self, rank: int, incarnation: int = 1) -> None:
        """A cell is started, and loads what it is told to."""
        self.say(e.RankReady(rank, incarnation, "node", f"http://{rank}"))
        self.reach(rank, "SYNCING", "ROLLOUT")
        self.build()

    def build(self) -> None:
        """Every member builds the latest prefix groups."""
        if orders := self.all(c.BuildGroups):
            for member in orders[-1].members:
                self.say(e.GroupsBuilt(member.rank, member.incarnation, orders[-1].generation))

    def reach(self, rank: int, *states: str, version: int | None = None) -> None:
        cell = self.state.fleet.cells[rank]
        version = self.state.fleet.published if version is None else version
        for state in states:
            self.say(e.RoleReached(rank, cell.incarnation, cell.epoch, state, version=version))

    def to_training(self, rank: int) -> None:
        self.reach(rank, *TRAINING_STATES)

    def to_rollout(self, *ranks: int) -> None:
        for rank in ranks:
            self.reach(rank, *ROLLOUT_STATES)

    def order(self, rank: int) -> c.OrderRole | None:
        """The latest role that a cell was ordered to."""
        return next((o for o in reversed(self.all(c.OrderRole)) if o.rank == rank), None)

    # -- executions --------------------------------------------------------------------------------------------------
    def close(self, *numbers: int, usable: bool = True, version: int | None = None) -> list[c.Command]:
        """Executions close, each with the try that was granted last."""
        before = len(self.log)
        version = self.state.fleet.published if version is None else version
        for n in numbers:
            outcome = "completed" if usable else "failed"
            tries = self.granted[n].try_number if n in self.granted else 0
            score = 1.0 if usable else None
            self.say(e.ExecutionClosed(n, tries, outcome, score, usable, version if usable else -1, 1.0))
        self.latest = self.log[before:]
        return self.latest

    # -- training ----------------------------------------------------------------------------------------------------
    @property
    def update(self) -> int:
        return self.state.update.number

    def open(self) -> None:
        self.say(e.UpdateOpened(self.update))

    def join(self, rank: int, position: int) -> None:
        self.say(e.CellJoined(rank, self.update, position))

    def take(self, *groups: int) -> None:
        for group in groups:
            self.say(e.GroupTaken(group, self.update))

    def ended(self, rank: int, how: str, update: int | None = None) -> None:
        cell = self.state.fleet.cells[rank]
        self.say(e.TrainingEnded(rank, cell.incarnation, update or self.update, how))

    def step(self, *satellites: int) -> None:
        """The update is done, its members say so."""
        update = self.update
        self.say(e.UpdateDone(update, 1 + len(satellites), {}, 1.0))
        for rank in (0, *satellites):
            self.ended(rank, "done", update)

    def commit(self) -> None:
        self.say(e.PolicyCommitted(self.state.batch.number, "sum", 1.0))
