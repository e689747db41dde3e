"""Cells and standalone engines: their roles, routes and policy versions. Pure.

The law: an engine is routed, and its slots count, only while its cell is in ROLLOUT by its own word, under the epoch it
was last ordered to, and not more than `max_lag` versions behind (invariant 6). Routes are withdrawn and slots reserved
elsewhere before a cell is ordered away; it is routed again only after its word that it holds the current version. Words
of another incarnation or epoch, and words that come twice or late, change nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gyre.cell.machine import State
from gyre.errors import InvariantBroken
from gyre.events import MoveStarted, RankReady, RoleReached
from gyre.scheduler.commands import (
    Command,
    EngineRoute,
    Log,
    Member,
    Move,
    OrderRole,
    OrderSync,
    Route,
    Supersede,
)
from gyre.scheduler.executions import Executions
from gyre.scheduler.measures import Measures
from gyre.scheduler.settings import Settings

ROLLOUT, TRAINING = "rollout", "training"

#: How far a state is on the way to a role; reports that do not lead further are late or repeated.
_PROGRESS: dict[str, dict[State, int]] = {
    TRAINING: {State.ROLLOUT: 0, State.DRAINING: 1, State.HANDOFF: 2, State.RELEASING: 3, State.TRAINING: 4},
    ROLLOUT: {State.RESTARTING: 0, State.RESTORING: 1, State.SYNCING: 2, State.ROLLOUT: 3},
}


@dataclass
class Cell:
    """A cell or standalone engine, as far as it is known here."""

    rank: int
    incarnation: int = 0  # newest known; 0: never heard of
    life: int = 0  # raised when it dies or fails
    up: bool = False  # it obeys orders
    lost: bool = False  # this incarnation is gone for good
    url: str = ""
    kv: str | None = None  # where its engine leaves KV blocks
    epoch: int = 0
    floor: int = 0  # lowest epoch whose failures are news
    goal: str = ROLLOUT
    state: State = State.RESTARTING
    version: int = -1  # that its engine holds
    routed: bool = False
    syncing: bool = False
    ordered_at: float = 0.0  # when it was ordered to its role
    returning: bool = False  # from training
    job: int | None = None  # update it was ordered into and has not ended

    @property
    def member(self) -> Member:
        """Its identity as a member of prefix groups."""
        return Member(self.rank, self.incarnation, self.epoch)


def _remove(ranks: list[int], rank: int) -> bool:
    """Take a rank out, and whether it was in; cells leave from the end, so that is where it is looked for first."""
    if ranks and ranks[-1] == rank:
        ranks.pop()
    elif rank in ranks:
        ranks.remove(rank)
    else:
        return False
    return True


class Fleet:
    """All engines, and the orders to them."""

    def __init__(
        self, settings: Settings, executions: Executions, measures: Measures, emit: Callable[[Command], None]
    ) -> None:
        self._settings = settings
        self._measures = measures
        self._executions = executions
        self._emit = emit
        self.cells = {rank: Cell(rank) for rank in range(settings.engines)}
        self.published = 0
        self.training: list[int] = []  # cells ordered to training, in the order of their moves
        self._dedicated = 0  # of them, those that only ever train
        self.bound: set[int] = set()  # living engines in rollout or on their way there
        self.lives: dict[int, int] = {}  # of the living cells that can train
        self.moving: list[int] = []  # cells on their way into training, until they have joined, in order
        self.unready: set[int] = set()  # unrouted engines that may have to be ordered to another version
        self._rolling: int | None = None
        self._to_sync: deque[int] = deque()
        self._unheard = set(self.cells)
        self._routes = 0

    @property
    def core(self) -> Cell:
        """Cell 0."""
        return self.cells[0]

    @property
    def capacity(self) -> int:
        """Slots of all engines now in rollout."""
        return self._executions.engines.capacity

    @property
    def complete(self) -> bool:
        """Whether every cell has been heard of."""
        return not self._unheard

    @property
    def slots(self) -> int:
        """Slots of all living engines that ever serve, in rollout or not."""
        return (len(self.bound) + len(self.training) - self._dedicated) * self._settings.slots

    def dedicated(self, rank: int) -> bool:
        """Whether a cell only ever trains: its engine is never routed, and its slots never count."""
        return rank < self._settings.trainers

    def available(self, cell: Cell) -> bool:
        """Whether a cell stands in rollout, from where it could be ordered to training."""
        if self.dedicated(cell.rank):
            return cell.up and cell.goal == ROLLOUT and cell.state is State.ROLLOUT
        return cell.routed and not cell.syncing

    # -- life --------------------------------------------------------------------------------------------------------
    def ready(self, event: RankReady) -> bool:
        """An engine was started; False if that is no news. It is brought to the current policy before it serves."""
        cell = self.cells[event.rank]
        again = event.incarnation == cell.incarnation and not cell.up and not cell.lost
        if event.incarnation < cell.incarnation or not (again or event.incarnation > cell.incarnation):
            return False
        cell.incarnation, cell.url, cell.kv = event.incarnation, event.url, event.kv
        cell.up, cell.lost, cell.state, cell.version = True, False, State.RESTARTING, -1
        self._unheard.discard(cell.rank)
        if cell.rank < self._settings.cells:
            self.lives[cell.rank] = cell.life
        self.order_rollout(cell, "started")
        return True

    def down(self, cell: Cell, state: State, lost: bool) -> None:
        """An engine failed, or its whole rank is lost: it is unrouted, and nothing is expected of it."""
        moves = self._withdraw(cell)
        cell.life += 1
        cell.epoch += 1
        cell.floor = cell.epoch
        cell.up, cell.lost, cell.state, cell.version, cell.goal = False, lost, state, -1, ROLLOUT
        cell.job, cell.syncing = None, False
        self.bound.discard(cell.rank)
        self.unready.discard(cell.rank)
        self.lives.pop(cell.rank, None)
        self._unheard.discard(cell.rank)
        self._left_training(cell)
        if self._rolling == cell.rank:
            self._rolling = None
        if moves is not None:
            self.route({cell.rank: None}, moves)
        if lost:
            self.supersede(cell.rank, cell.incarnation)

    def supersede(self, rank: int, incarnation: int) -> None:
        """Have an incarnation that is given up leave, in case it still lives."""
        self._emit(Supersede(rank, incarnation))

    def _left_training(self, cell: Cell) -> None:
        if _remove(self.training, cell.rank):
            self._dedicated -= self.dedicated(cell.rank)
        self.arrived(cell.rank)

    def arrived(self, rank: int) -> None:
        """A cell is not on its way into training any more."""
        _remove(self.moving, rank)

    # -- routes ------------------------------------------------------------------------------------------------------
    def route(
        self, engines: dict[int, EngineRoute | None], moves: Iterable[Move] = (), host: int | None = None
    ) -> None:
        """Publish a difference to the route table, under the next version."""
        self._routes += 1
        self._emit(Route(self._routes, engines, tuple(moves), host))

    def route_all(self, host: int) -> None:
        """Tell a new host every route."""
        routed = {cell.rank: self._entry(cell) for cell in self.cells.values() if cell.routed}
        self.route(routed, host=host)

    @staticmethod
    def _entry(cell: Cell) -> EngineRoute:
        return EngineRoute(cell.url, cell.epoch, cell.version, cell.kv)

    def _admit(self, cell: Cell) -> None:
        """Route an engine that holds a version it may serve."""
        self.unready.discard(cell.rank)
        if not cell.routed:
            cell.routed = True
            self._executions.engine_open(cell.rank)
        self.route({cell.rank: self._entry(cell)}, self._executions.resettle())

    def _withdraw(self, cell: Cell) -> tuple[Move, ...] | None:
        """Take an engine's slots out of the count; returns where its executions go, None if it was not routed."""
        if not cell.routed:
            return None
        cell.routed = False
        return self._executions.engine_close(cell.rank)

    def resettle(self) -> None:
        """Give executions that lost their engine the slots that have become free."""
        if self._executions.held and self._executions.engines.free:
            self.route({}, self._executions.resettle())

    # -- roles -------------------------------------------------------------------------------------------------------
    def order_training(self, cell: Cell, reason: str) -> None:
        """Reserve slots elsewhere, withdraw the route under the next epoch, and order the cell away, in this order.

        Raises:
            InvariantBroken: the capacity left does not cover the waterlevel (4).
        """
        left, w = self.capacity - self._settings.slots, self._executions.level.w
        if not self.available(cell) or (cell.routed and left < w):
            raise InvariantBroken(4, f"cell {cell.rank} must not leave: {left} slots left for a waterlevel of {w}")
        moves = self._withdraw(cell)
        cell.epoch += 1
        cell.goal = TRAINING
        self.bound.discard(cell.rank)
        self.training.append(cell.rank)
        self._dedicated += self.dedicated(cell.rank)
        self.moving.append(cell.rank)
        if moves is not None:
            self.route({cell.rank: None}, moves)
        self._order(cell, ROLLOUT, reason, [move.n for move in moves or ()])

    def order_rollout(self, cell: Cell, reason: str) -> None:
        """Order a cell to the current policy and to rollout, from whatever it does.

        A cell whose part in an update is ending obeys when it has ended; there is nothing to wait for here.
        """
        source = cell.goal if cell.goal == TRAINING else cell.state.lower()
        if cell.state is State.ROLLOUT:
            cell.state = State.DRAINING  # ordered away, which it has not answered yet; its next ROLLOUT is news
        cell.epoch += 1
        cell.returning = cell.state is State.TRAINING
        cell.goal, cell.job = ROLLOUT, None
        if not self.dedicated(cell.rank):
            self.bound.add(cell.rank)
        self._left_training(cell)
        self._order(cell, source, reason, [])

    def _order(self, cell: Cell, source: str, reason: str, rerouted: list[int]) -> None:
        cell.ordered_at = self._measures.now
        snapshot = self.published * self._settings.updates_per_batch
        self._emit(Log(MoveStarted(cell.rank, cell.epoch, source, cell.goal, reason, rerouted)))
        self._emit(OrderRole(cell.rank, cell.incarnation, cell.epoch, cell.goal, self.published, snapshot))

    def reached(self, event: RoleReached) -> bool:
        """A cell entered a state; False if that is no news."""
        cell, state = self.cells[event.rank], State(event.state)
        if not cell.up or event.incarnation != cell.incarnation or event.epoch != cell.epoch:
            return False
        progress = _PROGRESS[cell.goal]
        if progress.get(state, -1) <= progress.get(cell.state, -1) and not self._synced(cell, state, event.version):
            return False
        cell.state = state
        if state is State.TRAINING:
            self._measures.moved(TRAINING, cell.ordered_at)
        if state is State.ROLLOUT and cell.goal == ROLLOUT:
            self._serve(cell, event.version)
        return True

    @staticmethod
    def _synced(cell: Cell, state: State, version: int) -> bool:
        return state is cell.state is State.ROLLOUT and cell.goal == ROLLOUT and version > cell.version

    def _serve(self, cell: Cell, version: int) -> None:
        cell.version, cell.syncing = version, False
        if cell.returning:
            cell.returning = False
            self._measures.moved(ROLLOUT, cell.ordered_at)
        if self._rolling == cell.rank:
            self._rolling = None
        if self.dedicated(cell.rank):
            return
        if version >= self.published or (cell.routed and version >= self.published - self._settings.max_lag):
            self._admit(cell)
        else:
            self.unready.add(cell.rank)

    # -- versions ----------------------------------------------------------------------------------------------------
    def publish(self, version: int) -> None:
        """A policy version is committed: engines in rollout are to be synced, those too far behind are unrouted."""
        self.published = version
        behind = [rank for rank in self._executions.reserve_order() if self.cells[rank].version < version]
        self._to_sync = deque(behind)
        for rank in behind:
            cell = self.cells[rank]
            if cell.version < version - self._settings.max_lag:
                self.route({rank: None}, self._withdraw(cell) or ())
                self.unready.add(rank)

    def sync(self) -> None:
        """Order what may load the published policy now: engines that serve nobody at once, the others one by one."""
        for rank in sorted(self.unready):
            if not self.cells[rank].syncing:  # else it is heard of again
                self._order_sync(self.cells[rank])
        self.unready.clear()
        while self._rolling is None and self._to_sync:
            cell = self.cells[self._to_sync.popleft()]
            if cell.routed and not cell.syncing and cell.version < self.published:
                self._rolling = cell.rank
                self._order_sync(cell)

    def _order_sync(self, cell: Cell) -> None:
        cell.syncing = True
        snapshot = self.published * self._settings.updates_per_batch
        self._emit(OrderSync(cell.rank, cell.incarnation, cell.epoch, self.published, snapshot))

    # -- laws --------------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Raise `InvariantBroken` where routes, roles and counts do not agree; O(cells)."""
        for cell in self.cells.values():
            serving = cell.up and cell.goal == ROLLOUT and cell.state is State.ROLLOUT
            if cell.routed and not serving:
                raise InvariantBroken(6, f"cell {cell.rank} is routed: {cell}")
            if cell.routed != (cell.rank in self._executions.engines):
                raise InvariantBroken(6, f"cell {cell.rank} is routed or has slots, but not both: {cell}")
            if (cell.rank in self.bound) != (cell.up and cell.goal == ROLLOUT and not self.dedicated(cell.rank)):
                raise InvariantBroken(5, f"cell {cell.rank} is not where it is bound: {cell}")
            if (cell.rank in self.training) != (cell.goal == TRAINING):
                raise InvariantBroken(5, f"cell {cell.rank} is not in the training set, or should not be: {cell}")
