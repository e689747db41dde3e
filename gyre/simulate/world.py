"""Cells, engines, harness hosts and the trainer of a run in virtual time, around the scheduler's own code. Pure.

The scheduler is `gyre.scheduler.state.SchedulerState`, the very one that drives a run: it is given the same events and
its commands are carried out here, with durations in place of work. Time is a number that jumps from event to event; a
world and its seed give the same events every time.

What a duration is made of:

* An execution holds a slot for its `rollout_s`, at the speed of its engine: with k live executions an engine gives each
  of them `1 / (1 + slowdown * (k - 1))` of a second per second. One that has no slot for the moment stands still.
* A cell takes `to_training_s` from the order to the state TRAINING, joined, and `to_rollout_s` back to a served route.
* A group's training work is cut into equal micro-steps, which the cells in the update claim one at a time, in the order
  in which groups became ready. The update ends when every micro-step is done and every member has reduced.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gyre import events as e
from gyre.cell.machine import State
from gyre.errors import GyreError
from gyre.scheduler import commands as c
from gyre.scheduler.settings import Settings
from gyre.scheduler.state import SchedulerState
from gyre.simulate.costs import Chance, Costs, GroupWork, Tally
from gyre.simulate.stream import Stream


class _Engine:
    """Live executions of one engine, and its clock of work: every live execution gets the same share of its speed."""

    __slots__ = ("live", "work", "since", "speed", "heap", "next_end", "stamp")

    def __init__(self) -> None:
        self.live: dict[int, float] = {}  # execution -> reading of the clock of work at which it ends
        self.work = 0.0
        self.since = 0.0
        self.speed = 1.0
        self.heap: list[tuple[float, int]] = []
        self.next_end = -1.0  # time of the newest event of this engine; -1: none
        self.stamp = 0


@dataclass(slots=True)
class _Try:
    """A try of an execution that runs."""

    number: int
    slot_s: float
    host: int
    version: int  # that its engine held when it began
    at: float


class _Cell:
    __slots__ = ("rank", "incarnation", "alive", "state", "epoch", "version", "order", "member", "busy")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.incarnation = 0
        self.alive = False
        self.state = State.RESTARTING
        self.epoch = 0
        self.version = -1
        self.order = 0  # of the latest order: what an earlier one set going is void
        self.member = False  # of the present update
        self.busy = False  # with a micro-step


class World:
    """Everything outside the scheduler's state, in virtual time."""

    def __init__(
        self,
        settings: Settings,
        work: Callable[[int], GroupWork] | Sequence[GroupWork],
        costs: Costs,
        state: SchedulerState | None = None,
        random: Chance | None = None,
        record: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """`work` gives the work of group number g; `record` is given what a run writes to events.jsonl.

        `random` is needed where costs leave something to chance.
        """
        self.settings = settings
        self.costs = costs
        self.state = state or SchedulerState(settings)
        self.tally = Tally()
        self.now = 0.0
        self.ended: c.EndRun | None = None
        self.decisions = 0  # events handled by the scheduler
        self._work = work if callable(work) else work.__getitem__
        self._record = record
        self._random = random
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._words: deque[e.Event] = deque()
        self._count = 0
        self._tick_at = -1.0
        self._settled = 0  # events after which the time of the next tick was looked up last
        self._engines = {rank: _Engine() for rank in range(settings.engines)}
        self._cells = {rank: _Cell(rank) for rank in range(settings.engines)}
        self._hosts = range(settings.engines, settings.engines + settings.hosts)
        self._host_incarnations = dict.fromkeys(self._hosts, 0)
        self._hosts_down: set[int] = set()
        # executions
        self._where: dict[int, int] = {}  # execution -> engine
        self._left: dict[int, float] = {}  # held executions: slot seconds still to come
        self._started: dict[int, _Try] = {}
        self._stream = Stream(costs, self._work, self.tally, self._cells, self._words.append, self._after)
        self._carry_out: dict[type[c.Command], Callable[[Any], None]] = {
            c.Dispatch: self._nothing,
            c.Grant: self._grant,
            c.CancelExecution: self._cancel,
            c.Close: self._close,
            c.Finished: self._nothing,
            c.Route: self._route,
            c.OrderRole: self._order_role,
            c.OrderSync: self._order_sync,
            c.Supersede: self._nothing,
            c.BuildGroups: self._build_groups,
            c.BeginUpdate: self._begin_update,
            c.Train: self._train,
            c.Feed: self._feed,
            c.DropGroup: self._stream.drop,
            c.SuspendUpdate: self._stream.suspend,
            c.ResumeUpdate: self._stream.resume,
            c.CloseShort: self._stream.close_short,
            c.BarMember: self._stream.bar,
            c.Commit: self._commit,
            c.PublishPolicy: self._nothing,
            c.Log: self._log,
            c.EndRun: self._end,
        }

    # -- time --------------------------------------------------------------------------------------------------------
    def _after(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, call, arguments))

    def run(self, until: float = float("inf")) -> World:
        """Go on until the run ends, or until a time.

        Raises:
            GyreError: nothing is left to happen and the run has not ended.
        """
        if not self.decisions:
            self._begin()
        heap, words = self._heap, self._words
        while self.ended is None:
            if not heap:
                raise GyreError(f"the simulated run is stuck at {self.now:.1f} s: {self.state.snapshot()}")
            if heap[0][0] > until:
                break
            self.now, _, call, arguments = heapq.heappop(heap)
            call(*arguments)
            if words or self._settled != self.decisions:  # mostly not: of a micro-step the scheduler hears nothing
                self._deliver()
        return self

    def _begin(self) -> None:
        settings = self.settings
        self._write(e.RunStarted(0, settings.cells, settings.standalone, settings.hosts))
        self._execute(self.state.start(0.0))
        for rank in self._hosts:
            self._host_up(rank)
        for rank in self._cells:
            self._cell_up(rank)
        for _ in range(self.costs.cell_failures if settings.cells > 1 else 0):
            victim = self._random.randrange(1, settings.cells)
            self._after(self._random.uniform(0, self.costs.horizon_s), self._cell_down, victim)
        for _ in range(self.costs.host_failures):
            victim = self._random.randrange(self._hosts.start, self._hosts.stop)
            self._after(self._random.uniform(0, self.costs.horizon_s), self._host_down, victim)
        self._deliver()

    def _say(self, event: e.Event) -> None:
        self._words.append(event)

    def _deliver(self) -> None:
        """Hand everything that was said to the scheduler, and carry out what it answers, until nothing more is said."""
        words, state = self._words, self.state
        while words and self.ended is None:
            event = words.popleft()
            self._write(event)
            self.decisions += 1
            self._execute(state.handle(event, self.now))
        self._settled = self.decisions
        wake = state.wake_at()
        if wake is not None and wake > self.now and wake != self._tick_at:
            self._tick_at = wake
            self._after(wake - self.now, self._tick, wake)

    def _tick(self, wake: float) -> None:
        if wake == self._tick_at:
            self._tick_at = -1.0
            self.decisions += 1
            self._execute(self.state.handle(e.Tick(), self.now))

    def _execute(self, commands: list[c.Command]) -> None:
        carry_out = self._carry_out
        for command in commands:
            carry_out[type(command)](command)

    def _nothing(self, command: c.Command) -> None:
        """A command that only concerns files, counters or people."""

    def _log(self, command: c.Log) -> None:
        if self._record is not None:
            self._write(command.event)

    def _write(self, event: e.Event) -> None:
        if self._record is not None:
            self._record({"t": round(self.now, 3), "attempt": 1, **e.encode(event)})

    def _end(self, command: c.EndRun) -> None:
        self.ended = command
        for engine in self._engines.values():
            self._advance(engine)
        self._write(e.RunEnded(command.how, command.detail))

    # -- executions --------------------------------------------------------------------------------------------------
    def _advance(self, engine: _Engine) -> None:
        passed = self.now - engine.since
        if passed > 0.0:
            engine.work += passed * engine.speed
            self.tally.served_slot_s += passed * len(engine.live)
        engine.since = self.now

    def _retime(self, rank: int, engine: _Engine) -> None:
        """The set of live executions has changed: the engine's speed, and the time at which the next one ends."""
        live = len(engine.live)
        engine.speed = 1.0 / (1.0 + self.costs.slowdown * (live - 1)) if live else 1.0
        heap, ends = engine.heap, engine.live
        while heap and ends.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        if not heap:
            engine.next_end = -1.0
            engine.stamp += 1
            return
        end = self.now + max(0.0, (heap[0][0] - engine.work) / engine.speed)
        if end != engine.next_end:
            engine.next_end = end
            engine.stamp += 1
            self._after(end - self.now, self._engine_due, rank, engine.stamp)

    def _place(self, n: int, rank: int, slot_s: float) -> None:
        engine = self._engines[rank]
        self._advance(engine)
        self._where[n] = rank
        end = engine.work + slot_s
        engine.live[n] = end
        heapq.heappush(engine.heap, (end, n))
        self._retime(rank, engine)

    def _lift(self, n: int) -> float:
        """Take an execution off its engine; returns the slot seconds that it still needs."""
        rank = self._where.pop(n)
        engine = self._engines[rank]
        self._advance(engine)
        left = engine.live.pop(n) - engine.work
        self._retime(rank, engine)
        return max(0.0, left)

    def _grant(self, command: c.Grant) -> None:
        n = command.n
        durations = self._work(n // self.settings.group_size).rollout_s
        slot_s = durations[n % self.settings.group_size]
        if self.costs.timeout_s is not None:
            slot_s = min(slot_s, self.costs.timeout_s)
        version = self.state.fleet.cells[command.engine].version
        self._started[n] = _Try(command.try_number, slot_s, command.host, version, self.now)
        self._place(n, command.engine, slot_s)

    def _engine_due(self, rank: int, stamp: int) -> None:
        engine = self._engines[rank]
        if stamp != engine.stamp:
            return
        self._advance(engine)
        end, n = heapq.heappop(engine.heap)
        engine.work = max(engine.work, end)  # rounding must not leave a rest too small to be waited for
        del engine.live[n]
        del self._where[n]
        engine.next_end = -1.0
        self._retime(rank, engine)
        self._finish(n)

    def _finish(self, n: int) -> None:
        ended, costs = self._started.pop(n), self.costs
        try_number, slot_s, version = ended.number, ended.slot_s, ended.version
        usable, outcome = True, "completed"
        if costs.random:
            if self._random.random() < costs.try_failed:
                self._say(e.TryFailed(n, try_number, "the sandbox broke"))
                return
            if self._random.random() < costs.failed:
                usable, outcome = False, "failed"
        if costs.timeout_s is not None and slot_s >= costs.timeout_s:
            usable, outcome = False, "timed_out"
        self.tally.rollout_slot_s += slot_s
        score = 1.0 if usable else None
        self._say(e.ExecutionClosed(n, try_number, outcome, score, usable, version if usable else -1, slot_s))

    def _cancel(self, command: c.CancelExecution) -> None:
        self._forget(command.n)

    def _forget(self, n: int) -> None:
        if n in self._where:
            self._lift(n)
        self._left.pop(n, None)
        self._started.pop(n, None)

    def _close(self, command: c.Close) -> None:
        self._forget(command.n)
        event = e.ExecutionClosed(command.n, command.try_number, command.outcome, None, False, -1, 0.0)
        self._say(event)

    def _route(self, command: c.Route) -> None:
        for move in command.moves:
            if move.n not in self._started:
                continue
            left = self._lift(move.n) if move.n in self._where else self._left.pop(move.n)
            if move.engine is None:
                self._left[move.n] = left
            else:
                self._place(move.n, move.engine, left)

    # -- roles -------------------------------------------------------------------------------------------------------
    def _host_up(self, rank: int) -> None:
        self._hosts_down.discard(rank)
        self._host_incarnations[rank] += 1
        self._say(e.RankReady(rank, self._host_incarnations[rank], f"host{rank}"))

    def _host_down(self, rank: int) -> None:
        if rank in self._hosts_down:
            return
        self._hosts_down.add(rank)
        for n in [n for n, running in self._started.items() if running.host == rank]:
            self._forget(n)
        self._say(e.RankLost(rank, self._host_incarnations[rank], "simulated"))
        self._after(self.costs.restart_s, self._host_up, rank)

    def _cell_up(self, rank: int) -> None:
        cell = self._cells[rank]
        cell.incarnation += 1
        cell.alive, cell.state, cell.version, cell.member, cell.busy = True, State.RESTARTING, -1, False, False
        self._say(e.RankReady(rank, cell.incarnation, f"node{rank}", f"http://{rank}"))

    def _cell_down(self, rank: int) -> None:
        cell = self._cells[rank]
        if not cell.alive:
            return
        cell.alive = False
        cell.order += 1
        self._say(e.RankLost(rank, cell.incarnation, "simulated"))
        self._after(self.costs.restart_s, self._cell_up, rank)

    def _reach(self, rank: int, order: int, state: State) -> None:
        cell = self._cells[rank]
        if order == cell.order:
            self._enter(cell, state)

    def _enter(self, cell: _Cell, state: State, version: int = -1) -> None:
        cell.state = state
        self._say(e.RoleReached(cell.rank, cell.incarnation, cell.epoch, state.value, version=version))

    def _serve(self, rank: int, order: int, version: int) -> None:
        cell = self._cells[rank]
        if order == cell.order:
            cell.version = version
            for n in self._engines[rank].live:
                if self._started[n].at == self.now:  # nothing of it is sampled yet
                    self._started[n].version = version
            self._enter(cell, State.ROLLOUT, version)

    def _order_role(self, command: c.OrderRole) -> None:
        cell = self._cells[command.rank]
        if not cell.alive or command.incarnation != cell.incarnation:
            return
        cell.order += 1
        cell.epoch = command.epoch
        if command.target == "training":
            self.tally.moves += 1
            self._enter(cell, State.RELEASING)
            self._after(self.costs.to_training_s, self._reach, cell.rank, cell.order, State.TRAINING)
        elif cell.state in (State.TRAINING, State.RELEASING):
            self._enter(cell, State.RESTORING)
            self._after(self.costs.to_rollout_s, self._serve, cell.rank, cell.order, command.version)
        else:  # it starts, or its order back overtook the order away
            self._after(0.0, self._serve, cell.rank, cell.order, command.version)

    def _order_sync(self, command: c.OrderSync) -> None:
        cell = self._cells[command.rank]
        if cell.alive and command.incarnation == cell.incarnation:
            cell.epoch = command.epoch
            self._after(self.costs.sync_s, self._serve, cell.rank, cell.order, command.version)

    def _build_groups(self, command: c.BuildGroups) -> None:
        for member in command.members:
            self._say(e.GroupsBuilt(member.rank, member.incarnation, command.generation))

    # -- training ----------------------------------------------------------------------------------------------------
    def _feed(self, command: c.Feed) -> None:
        self._stream.feed(command.group, self.state.groups.ready[command.group])

    def _begin_update(self, command: c.BeginUpdate) -> None:
        self._stream.begin(command.update, command.groups, self.state.batch.number - 1)

    def _train(self, command: c.Train) -> None:
        cell = self._cells[command.rank]
        if not cell.alive or command.incarnation != cell.incarnation:
            return
        if cell.rank == 0:
            self._say(e.UpdateOpened(command.update))
        else:
            self._say(e.CellJoined(cell.rank, command.update, command.position))
        self._stream.enter(cell)

    def _commit(self, command: c.Commit) -> None:
        self.tally.committed_at.append(self.now)
        self._say(e.PolicyCommitted(command.version, "", 0.0))
