"""The scheduler: event in, commands out. Pure.

`SchedulerState.handle` is the whole of it. It records what an event says (here), applies the rules that follow from the
state of things (`rules`), and returns commands (`commands`) for a loop, a simulator or a test to carry out in order.

The law: 0 <= f <= p <= d and w = d - f, where w is the number of open executions (`waterlevel`, `executions`); every
group dispatched is pending, ready, taken, trained or dropped (`groups`); the slots of the engines in rollout cover w
whenever a cell leaves them (`fleet`). Words that are late, repeated, or of an earlier incarnation or epoch change
nothing, so that events may come in any order that their senders can produce.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from gyre.cell.machine import State
from gyre.errors import GyreError, InvariantBroken
from gyre.events import (
    CellJoined,
    Event,
    ExecutionClosed,
    GroupDropped,
    GroupReady,
    GroupsBuilt,
    GroupTaken,
    PolicyCommitted,
    RankLost,
    RankReady,
    RoleReached,
    Tick,
    TrainingEnded,
    TryFailed,
    UpdateDone,
    UpdateOpened,
)
from gyre.scheduler import acts, invariants, rules
from gyre.scheduler import cursor as cursors
from gyre.scheduler.burst import Batch, Phase, Update
from gyre.scheduler.commands import BarMember, Command, Feed, Log
from gyre.scheduler.executions import Executions
from gyre.scheduler.fleet import TRAINING, Cell, Fleet
from gyre.scheduler.generations import Generation
from gyre.scheduler.groups import Group, Groups
from gyre.scheduler.measures import Lookahead, Measures
from gyre.scheduler.policy import Decision, Elastic, Policy
from gyre.scheduler.settings import Settings
from gyre.scheduler.waterlevel import Supply, Waterlevel


class SchedulerState:
    """Everything the scheduler knows of one attempt of a run."""

    def __init__(
        self,
        settings: Settings,
        policy: Policy | None = None,
        task_of: Callable[[int], Hashable] | None = None,
    ) -> None:
        """`task_of` names the task of a group number, if groups of one task are to be expected to take alike."""
        self.settings = settings
        self.policy: Policy = policy or Elastic()
        self.measures = Measures(task_of)
        self.executions = Executions(settings, self.emit)
        self.groups = Groups(settings.group_size)
        self.fleet = Fleet(settings, self.executions, self.measures, self.emit)
        self.generation = Generation()
        self.supply = Supply()
        self.lookahead = Lookahead(settings.lookahead, settings.adapt_lookahead)
        self.batch: Batch
        self.update: Update
        self.committed = 0  # policy version
        self.finishing = False  # all batches are trained
        self.ended = ""  # how the attempt ended
        self.decision = Decision(False, "", "")
        self.said: dict[int | None, str] = {}  # the latest reason of every cell, by its code
        self.restored: list[Group] = []  # groups found closed at a resume
        self.missing: tuple[int, ...] = ()  # executions found without a spec at a resume
        self.resumed = False
        self._started = False
        self._commands: list[Command] = []
        acts.begin_batch(self)

    @classmethod
    def resume(
        cls,
        settings: Settings,
        cursor: Mapping[str, Any] | None,
        issued: Mapping[int, int],
        closed: Iterable[ExecutionClosed],
        policy: Policy | None = None,
        task_of: Callable[[int], Hashable] | None = None,
    ) -> SchedulerState:
        """The state of an attempt that goes on from a commit, or from the start where `cursor` is None.

        Args:
            settings: of the run; its group size must be that of the first attempt.
            cursor: what the `Commit` command of the commit carried.
            issued: every execution with a spec on disk, and the highest number of its tries (0: none).
            closed: every outcome on disk. This set is frozen: later outcomes of earlier attempts must not be reported.

        Raises:
            UserError: the configuration no longer fits what was dispatched.
        """
        state = cls(settings, policy, task_of)
        state.resumed = True
        cursors.restore(state, dict(cursor) if cursor else None, issued, closed)
        acts.begin_batch(state)
        return state

    @property
    def level(self) -> Waterlevel:
        """d, p, f and w. The loop sets the store's counters to these before the first command."""
        return self.executions.level

    @property
    def now(self) -> float:
        """The time of the present event, or of the latest one."""
        return self.measures.now

    def emit(self, command: Command) -> None:
        """Add a command to what the present event results in."""
        self._commands.append(command)

    # -- the interface -----------------------------------------------------------------------------------------------
    def start(self, now: float) -> list[Command]:
        """Begin the attempt: the first quota, and what a resume found ready. To be called once, before any event."""
        if self._started:
            raise GyreError("the scheduler has started already")
        self._started = True
        self.measures.now = now
        for group in self.restored:
            self._settle_group(group)
        self.restored = []
        quota = self.settings.quota(self.committed, self.groups.outstanding, self.lookahead.value)
        acts.dispatch(self, quota, "resume" if self.resumed else "burst", self.missing)
        if self.committed >= self.settings.batches:
            self.finishing = True
            self.executions.cancel_all("the run has trained all its batches")
        return self._settle(now)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take an event at time `now` (seconds on any clock that does not go back) and return what is to be done.

        Nothing happens any more once `ended` is set.

        Raises:
            InvariantBroken: the events contradict each other, or the scheduler does.
        """
        commands = [] if self._started else self.start(now)
        if self.ended:
            return commands
        self.measures.now = now
        _HANDLERS[type(event)](self, event)
        return commands + self._settle(now)

    def wake_at(self) -> float | None:
        """When time alone may lead to a decision, as far as is known now; None: only events can.

        Whoever drives the state should see to a `Tick` at that time, or tick regularly.
        """
        if self.finishing:
            return None
        since, dry = self.supply.since, self.update.dry_since
        times = [] if since is None else [since + self.settings.supply_hold]
        if dry is not None and self.executions.queued and not self.executions.engines.free:
            times.append(dry + self.measures.to_training_s + self.measures.to_rollout_s)
        return min((time for time in times if time > self.now), default=None)

    def _settle(self, now: float) -> list[Command]:
        rules.settle(self, now)
        invariants.check(self)
        commands, self._commands = self._commands, []
        return commands

    # -- ranks -------------------------------------------------------------------------------------------------------
    def _rank_ready(self, event: RankReady) -> None:
        if event.rank >= self.settings.engines:
            self._host_ready(event)
            return
        cell = self.fleet.cells[event.rank]
        if cell.up and event.incarnation > cell.incarnation:
            if event.rank == 0:
                return  # a core that starts again is another attempt's
            self._cell_down(cell, State.FAILED, True)
        if self.fleet.ready(event):
            self.generation.dirty = True

    def _host_ready(self, event: RankReady) -> None:
        executions, rank = self.executions, event.rank
        if event.incarnation <= executions.incarnations.get(rank, 0):
            return
        if rank in executions.hosts:
            executions.host_lost(rank, f"harness host {rank} was started again")
        executions.host_ready(rank, event.incarnation)
        self.fleet.route_all(rank)

    def _rank_lost(self, event: RankLost) -> None:
        if event.rank >= self.settings.engines:
            self._host_lost(event)
            return
        cell = self.fleet.cells[event.rank]
        if event.rank == 0:
            return  # the loss of the core ends the attempt, which is not decided here
        if event.incarnation > cell.incarnation or (event.incarnation == cell.incarnation and not cell.lost):
            self._leave_update(cell)
            cell.incarnation = event.incarnation
            self._cell_down(cell, State.FAILED, True)

    def _host_lost(self, event: RankLost) -> None:
        executions, rank = self.executions, event.rank
        if event.incarnation < executions.incarnations.get(rank, 0):
            return
        if rank in executions.hosts:
            executions.host_lost(rank, f"harness host {rank} was lost: {event.reason}")
            self.fleet.supersede(rank, event.incarnation)
        executions.incarnations[rank] = event.incarnation

    def _cell_down(self, cell: Cell, state: State, lost: bool) -> None:
        """A cell is gone for now; its part in the running update goes back to the others."""
        self._leave_update(cell)
        self.fleet.down(cell, state, lost)
        self.generation.break_at(cell.rank)

    def _leave_update(self, cell: Cell) -> None:
        """A member's part in the running update is void."""
        update = self.update
        if update.running and (cell.rank in update.joined or cell.rank == update.joining):
            self.emit(BarMember(update.number, cell.rank, cell.incarnation))
        self._part_ended(cell)

    def _part_ended(self, cell: Cell) -> None:
        update = self.update
        cell.job = None
        if cell.rank in update.joined:
            update.joined.remove(cell.rank)
        if update.joining == cell.rank:
            update.joining = None
            self.fleet.arrived(cell.rank)

    def _role_reached(self, event: RoleReached) -> None:
        cell = self.fleet.cells[event.rank]
        if event.state != State.FAILED:
            self.fleet.reached(event)
            return
        # The report may have crossed an order under a later epoch; it is news unless it is older than the last failure.
        if not cell.up or event.incarnation != cell.incarnation or not cell.floor <= event.epoch <= cell.epoch:
            return
        if cell.rank == 0 and cell.goal == TRAINING and cell.state is State.TRAINING:
            acts.end(self, "failed", f"the core failed in training: {event.detail}")
            return
        self._cell_down(cell, State.FAILED, False)

    # -- executions --------------------------------------------------------------------------------------------------
    def _execution_closed(self, event: ExecutionClosed) -> None:
        execution = self.executions.finished(event.n, event.try_number)
        if execution is None:
            return
        if execution.host is not None and execution.try_number == event.try_number:
            self.measures.execution(self.groups.of(event.n), self.now - execution.granted_at)
        group = self.groups.close(event)
        if group is not None:
            self._settle_group(group)

    def _settle_group(self, group: Group) -> None:
        """A group whose executions are all closed is ready, or is dropped."""
        fault = self.groups.fault(group, self.committed, self.settings.max_staleness)
        if fault:
            self.groups.drop(group.number)
            self.emit(Log(GroupDropped(group.number, fault)))
            return
        self.groups.admit(group)
        self.emit(Log(GroupReady(group.number, group.rewards)))
        self.emit(Feed(group.number, tuple(outcome.n for outcome in group.usable)))

    def _try_failed(self, event: TryFailed) -> None:
        self.executions.try_failed(event.n, event.try_number, event.reason)

    # -- training ----------------------------------------------------------------------------------------------------
    def _group_taken(self, event: GroupTaken) -> None:
        if self.groups.take(event.group, event.update):
            if event.update != self.update.number:
                raise InvariantBroken(8, f"group {event.group} was taken by update {event.update}, not the present one")
            self.update.take()
            self.batch.taken += 1

    def _update_opened(self, event: UpdateOpened) -> None:
        if event.update == self.update.number and self.update.phase is Phase.OPENING:
            self._opened()

    def _opened(self) -> None:
        self.update.phase, self.update.joined = Phase.OPEN, [0]
        self.fleet.arrived(0)

    def _cell_joined(self, event: CellJoined) -> None:
        update = self.update
        if event.update != update.number or event.rank != update.joining:
            return
        update.joining = None
        update.joined.append(event.rank)
        self.fleet.arrived(event.rank)

    def _training_ended(self, event: TrainingEnded) -> None:
        cell = self.fleet.cells[event.rank]
        if not cell.up or event.incarnation != cell.incarnation or event.update != cell.job:
            return
        current = event.update == self.update.number
        if event.how == "suspended" and current and self.update.phase is not Phase.SUSPENDING:
            return  # a word of an earlier suspension
        if event.how == "failed":
            self._part_failed(cell, event)
            return
        if current and event.how != "suspended":
            self.update.closed = True
        if current:
            self._part_ended(cell)
        else:
            self.fleet.arrived(cell.rank)
        cell.job = None

    def _part_failed(self, cell: Cell, event: TrainingEnded) -> None:
        """A member that failed is barred for good as this incarnation, so it has to start again to be of any use."""
        if cell.rank == 0:
            acts.end(self, "failed", f"update {event.update} failed on the core: {event.detail}")
        else:
            self._cell_down(cell, State.FAILED, True)

    def _update_done(self, event: UpdateDone) -> None:
        if event.update != self.update.number or not self.update.running:
            return
        if self.update.phase is Phase.OPENING:  # its opening was not heard of
            self._opened()
        self.update.stepped = self.update.closed = True
        self.measures.update(self.update.groups, event.cell_seconds)

    def _policy_committed(self, event: PolicyCommitted) -> None:
        if self.update.phase is Phase.COMMITTING and event.version == self.batch.number:
            self.committed = event.version

    def _groups_built(self, event: GroupsBuilt) -> None:
        cell = self.fleet.cells[event.rank]
        if cell.up and event.incarnation == cell.incarnation and event.generation == self.generation.number:
            self.generation.built(cell.rank, cell.life)

    def _tick(self, event: Tick) -> None:
        """Time has passed; the rules see to it."""

    # -- what people see ---------------------------------------------------------------------------------------------
    def snapshot(self) -> dict[str, Any]:
        """The state for the live view: pure data, O(cells). Keys beside `cells` and `phase` are `SchedulerStatus`'s."""
        level, settings = self.level, self.settings
        return {
            "d": level.d,
            "p": level.p,
            "f": level.f,
            "capacity": self.fleet.capacity,
            "ready": len(self.groups.ready),
            "batch_groups": self.batch.groups,
            "taken": self.batch.taken,
            "batch": self.batch.number,
            "batches": settings.batches,
            "update": self.update.number,
            "updates": settings.updates,
            "version": self.fleet.published,
            "prefix": len(self.fleet.training),
            "gate": self.decision.reason,
            "phase": self.ended or self.update.phase.value,
            "cells": [self._cell_snapshot(cell) for cell in self.fleet.cells.values()],
        }

    def _cell_snapshot(self, cell: Cell) -> dict[str, Any]:
        return {
            "rank": cell.rank,
            "incarnation": cell.incarnation,
            "up": cell.up,
            "goal": cell.goal,
            "state": cell.state.value,
            "epoch": cell.epoch,
            "version": cell.version,
            "routed": cell.routed,
            "live": len(self.executions.engines.held(cell.rank)),
            "slots": self.settings.slots,
            "doing": self._doing(cell),
        }

    def _doing(self, cell: Cell) -> str:
        if not cell.up:
            return "starting" if not cell.life else "lost" if cell.lost else "restarting its engine"
        if cell.job is not None:
            verb = "training in" if cell.rank in self.update.joined else "joining"
            return f"{verb} update {cell.job}"
        if cell.syncing:
            return f"loading policy {self.fleet.published}"
        if cell.routed:
            return f"serving {len(self.executions.engines.held(cell.rank))} executions"
        return f"on its way to {cell.goal}" if cell.state.lower() != cell.goal else "waiting"


_HANDLERS: dict[type[Event], Callable[[SchedulerState, Any], None]] = {
    RankReady: SchedulerState._rank_ready,
    RankLost: SchedulerState._rank_lost,
    RoleReached: SchedulerState._role_reached,
    ExecutionClosed: SchedulerState._execution_closed,
    TryFailed: SchedulerState._try_failed,
    GroupTaken: SchedulerState._group_taken,
    UpdateOpened: SchedulerState._update_opened,
    CellJoined: SchedulerState._cell_joined,
    TrainingEnded: SchedulerState._training_ended,
    UpdateDone: SchedulerState._update_done,
    PolicyCommitted: SchedulerState._policy_committed,
    GroupsBuilt: SchedulerState._groups_built,
    Tick: SchedulerState._tick,
}
