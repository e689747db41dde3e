"""Open executions: queued, running or being closed; who runs them and who serves them. Pure.

The law: every execution that was dispatched and is not finished is open, and is in exactly one of these places: in the
queue; running on one living host, where it holds room, with its requests on one open engine, where it holds a slot, or
held (all slots are taken); or being closed by the scheduler itself. So w is the number of open executions (invariants 1
and 2), and what engines serve never exceeds their slots.

Grants are in the order of priority, then of n; quotas that were dispatched earlier come first, and a retried execution
keeps its place. Executions that run but are held get slots before new grants.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gyre.errors import InvariantBroken
from gyre.events import ExecutionGranted
from gyre.scheduler.commands import CancelExecution, Close, Command, Finished, Grant, Log, Move
from gyre.scheduler.settings import Settings
from gyre.scheduler.slots import Slots
from gyre.scheduler.waterlevel import Waterlevel


@dataclass(slots=True)
class Execution:
    """An open execution."""

    n: int
    try_number: int = 0  # the latest that was granted, over all attempts of the run
    failures: int = 0  # tries of this attempt that the infrastructure failed
    priority: tuple[int, int] = (0, 0)  # number of its quota, and place within that; lower comes first
    launched: bool = False  # granted in this attempt
    granted_at: float = 0.0  # latest try
    host: int | None = None  # where it runs
    engine: int = -1  # that served it last
    closing: bool = False


class Executions:
    """All open executions, the queue, and the room there is for them."""

    def __init__(self, settings: Settings, emit: Callable[[Command], None]) -> None:
        self._settings = settings
        self._emit = emit
        self.level = Waterlevel()
        self.open: dict[int, Execution] = {}
        self.engines = Slots(self._engine_preference)
        self.hosts = Slots(lambda rank: (0, rank))
        self.incarnations: dict[int, int] = {}  # of hosts, also of lost ones
        self.held: dict[int, None] = {}  # in the order in which they lost their engine
        self._queue: list[tuple[tuple[int, int], int]] = []
        self._quotas = 0
        self._queued: set[int] = set()
        self.closing = 0

    def _engine_preference(self, rank: int) -> tuple[int, int]:
        """Standalone engines first, then the cells that will move last."""
        return (0, rank) if rank >= self._settings.cells else (1, -rank)

    def reserve_order(self) -> list[int]:
        """Open engines in the order in which a leaving cell's executions are put on them: as `with_room`, and full."""
        return sorted(self.engines, key=self._engine_preference)

    # -- coming and going --------------------------------------------------------------------------------------------
    def dispatch(self, groups: Iterable[int]) -> None:
        """The executions of further groups exist and wait in the queue, in the order of `groups`."""
        self._quotas += 1
        size = self._settings.group_size
        for place, group in enumerate(groups):
            self.level.dispatch(size)
            for n in range(group * size, (group + 1) * size):
                self.open[n] = Execution(n, priority=(self._quotas, place))
                self._enqueue(n)

    def reopen(self, execution: Execution) -> None:
        """An execution of an earlier attempt is not closed; the caller sets the counters."""
        self.open[execution.n] = execution
        self._enqueue(execution.n)

    def _enqueue(self, n: int) -> None:
        self._queued.add(n)
        heapq.heappush(self._queue, (self.open[n].priority, n))

    def finished(self, n: int, try_number: int) -> Execution | None:
        """The outcome of execution n is in place; None if that is no news. Frees its room and raises f once."""
        execution = self.open.pop(n, None)
        if execution is None:
            return None
        self._queued.discard(n)
        self.held.pop(n, None)
        self.closing -= execution.closing
        if execution.host is not None and execution.try_number != try_number:
            self._cancel(execution)  # an outcome of a try that had been given up: nobody needs this one any more
        self.engines.release(n)
        self.hosts.release(n)
        if not execution.launched:  # closed while it was queued; p counts it all the same, since f <= p
            self.level.launch()
        self._emit(Finished(n, self.level.p, self.level.finish(), execution.engine))
        return execution

    def _cancel(self, execution: Execution) -> None:
        self._emit(CancelExecution(execution.n, execution.host, self.incarnations[execution.host]))

    def try_failed(self, n: int, try_number: int, reason: str) -> None:
        """The infrastructure failed a try; a late word about an earlier one changes nothing."""
        execution = self.open.get(n)
        if execution is None or execution.host is None or execution.try_number != try_number:
            return
        self.hosts.release(n)
        self._retry(execution, reason)

    def _retry(self, execution: Execution, reason: str) -> None:
        """Queue an execution again that is off its host, or close it where its tries are used up."""
        execution.host = None
        self.held.pop(execution.n, None)
        self.engines.release(execution.n)
        execution.failures += 1
        if execution.failures < self._settings.tries:
            self._enqueue(execution.n)
        else:
            self._close(execution, "failed", f"{reason} (try {execution.failures} of {self._settings.tries})")

    def _close(self, execution: Execution, outcome: str, reason: str) -> None:
        execution.closing = True
        self.closing += 1
        self._emit(Close(execution.n, execution.try_number, outcome, reason))

    def cancel_all(self, reason: str) -> None:
        """End everything that is open."""
        for execution in list(self.open.values()):
            if execution.closing:
                continue
            if execution.host is not None:
                self._cancel(execution)
                self.hosts.release(execution.n)
                execution.host = None
            self.engines.release(execution.n)
            self.held.pop(execution.n, None)
            self._queued.discard(execution.n)
            self._close(execution, "cancelled", reason)

    # -- hosts and engines -------------------------------------------------------------------------------------------
    def host_ready(self, rank: int, incarnation: int) -> None:
        """A harness host runs executions from now on."""
        self.incarnations[rank] = incarnation
        self.hosts.open(rank, self._settings.host_executions)

    def host_lost(self, rank: int, reason: str) -> None:
        """A harness host is gone, and what it ran needs another try."""
        for n in self.hosts.close(rank):
            self._retry(self.open[n], reason)

    def engine_open(self, rank: int) -> None:
        """An engine is in rollout and routed; its slots count."""
        self.engines.open(rank, self._settings.slots)

    def engine_close(self, rank: int) -> tuple[Move, ...]:
        """An engine's slots no longer count; returns where its executions go, or that they are held."""
        leaving = self.engines.close(rank)
        places = self.engines.spread(leaving, self.engines.with_room())
        for n in leaving:
            self.open[n].engine = places.get(n, rank)
            if n not in places:
                self.held[n] = None
        return tuple(Move(n, self.open[n].host, places.get(n)) for n in leaving)

    # -- grants ------------------------------------------------------------------------------------------------------
    def resettle(self) -> tuple[Move, ...]:
        """Give held executions the slots that are free; returns the moves."""
        moves = []
        while self.held and self.engines.free:
            n = next(iter(self.held))
            del self.held[n]
            execution = self.open[n]
            execution.engine = self.engines.take(n)
            moves.append(Move(n, execution.host, execution.engine))
        return tuple(moves)

    def grant(self, now: float) -> None:
        """Grant queued executions, in order, while slots and places are free."""
        while self.engines.free and self.hosts.free and (execution := self._next()):
            n = execution.n
            execution.host = self.hosts.take(n)
            execution.engine = self.engines.take(n)
            execution.try_number += 1
            execution.granted_at = now
            p = None
            if not execution.launched:
                execution.launched, p = True, self.level.launch()
            incarnation = self.incarnations[execution.host]
            self._emit(Grant(n, execution.try_number, execution.host, incarnation, execution.engine, p))
            self._emit(Log(ExecutionGranted(n, execution.try_number, execution.host, execution.engine)))

    def _next(self) -> Execution | None:
        while self._queue:
            _, n = heapq.heappop(self._queue)
            if n in self._queued:
                self._queued.discard(n)
                return self.open[n]
        return None

    @property
    def queued(self) -> int:
        """Executions that wait for their first or next grant."""
        return len(self._queued)

    @property
    def running(self) -> int:
        """Executions on hosts, held or served."""
        return len(self.open) - len(self._queued) - self.closing

    # -- laws --------------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Raise `InvariantBroken` where counters do not add up; O(1)."""
        self.level.check()
        if self.level.w != len(self.open):
            raise InvariantBroken(1, f"w={self.level.w}, but {len(self.open)} executions are open")
        if self.engines.free < 0 or self.hosts.free < 0:
            raise InvariantBroken(4, "more executions are granted than there is room for")

    def check_places(self) -> None:
        """Raise `InvariantBroken` where an execution is in no place or in two; O(executions)."""
        self.engines.check()
        self.hosts.check()
        if self.closing != sum(execution.closing for execution in self.open.values()):
            raise InvariantBroken(2, "executions being closed are miscounted")
        for n, execution in self.open.items():
            running = execution.host is not None
            if running + execution.closing + (n in self._queued) != 1:
                raise InvariantBroken(2, f"execution {n} is in no place or in two: {execution}")
            if running and self.hosts.place(n) != execution.host:
                raise InvariantBroken(2, f"execution {n} holds no place on host {execution.host}")
            if running != ((self.engines.place(n) is not None) + (n in self.held) == 1):
                raise InvariantBroken(6, f"execution {n} runs and is neither served nor held, or both: {execution}")
