"""A second simulator of the policies, written from the rules alone and sharing no code with the scheduler.

It knows neither messages nor ranks: cells are counts, a move takes its time and cannot fail, and training is a fluid
that flows through the groups one after the other, in the order in which they became ready. What the simulator around
the scheduler's own code says about a policy has to agree with what comes out here; where it is faster, it flatters.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

NEVER = float("inf")
ROUNDING = 1e-9


@dataclass(frozen=True)
class Machine:
    """Cells of slots, batches of groups, and what a move costs; times in seconds."""

    cells: int
    slots: int
    batch_groups: int
    batches: int
    lookahead: float = 0.25
    to_training_s: float = 8.5
    to_rollout_s: float = 3.5
    fraction: float = 0.25
    hold_s: float = 10.0


@dataclass
class Outcome:
    """What a run came to."""

    makespan_s: float = 0.0
    moves: int = 0
    dispatched: int = 0
    staleness: list[int] = field(default_factory=list)

    @property
    def staleness_mean(self) -> float:
        return sum(self.staleness) / len(self.staleness)


class Reference:
    """What all policies have in common: the queue, the slots, ready groups, and the fluid of training."""

    def __init__(self, machine: Machine, groups: list[tuple[tuple[float, ...], float]]) -> None:
        """`groups` in the order of dispatch: slot seconds of each execution, and cell-seconds of training."""
        self.machine, self.groups = machine, groups
        self.out = Outcome()
        self.now = 0.0
        self.rollout_cells = machine.cells
        self.queue: deque[tuple[int, float]] = deque()
        self.running: list[tuple[float, int]] = []
        self.open = [len(durations) for durations, _ in groups]
        self.oldest = [NEVER] * len(groups)
        self.ready: deque[int] = deque()  # closed, and nothing of it is trained yet
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.timer_count = 0
        self.members = 0  # cells that train
        self.left = 0.0  # cell-seconds of the group that is being trained on
        self.taken = 0  # groups of the present batch
        self.trained = 0  # batches

    # -- the policy --------------------------------------------------------------------------------------------------
    def may_take(self) -> bool:
        """Whether training may begin with the next ready group."""
        return True

    def decide(self) -> None:
        """Anything may have changed."""

    def committed(self, quota: int) -> None:
        """A batch is trained, and so many executions are about to be dispatched."""

    def wake(self) -> float:
        """When time alone may change the mind."""
        return NEVER

    # -- the world ---------------------------------------------------------------------------------------------------
    @property
    def w(self) -> int:
        return len(self.queue) + len(self.running)

    @property
    def remaining(self) -> int:
        return self.machine.batch_groups - self.taken

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.timer_count += 1
        heapq.heappush(self.timers, (self.now + seconds, self.timer_count, call))

    def run(self) -> Outcome:
        machine = self.machine
        self.dispatch(self.next_quota(int((1 + machine.lookahead) * machine.batch_groups)))
        self.settle()
        while self.trained < machine.batches:
            self.step()
        self.out.makespan_s = self.now
        return self.out

    def next_quota(self, groups: int) -> int:
        return min(groups, self.machine.batches * self.machine.batch_groups - self.out.dispatched)

    def dispatch(self, count: int) -> None:
        first = self.out.dispatched
        self.out.dispatched += count
        for number in range(first, self.out.dispatched):
            self.queue.extend((number, seconds) for seconds in self.groups[number][0])

    def step(self) -> None:
        """On to the next thing that happens."""
        worked_off = self.now + self.left / self.members if self.left and self.members else NEVER
        ended = self.running[0][0] if self.running else NEVER
        timer = self.timers[0][0] if self.timers else NEVER
        then = min(worked_off, ended, timer, self.wake())
        assert self.now <= then < NEVER, "the reference is stuck"
        if self.left:
            self.left -= self.members * (then - self.now)
            if then == worked_off or self.left < ROUNDING:
                self.left = 0.0
        self.now = then
        while self.running and self.running[0][0] <= then:
            number = heapq.heappop(self.running)[1]
            self.open[number] -= 1
            if not self.open[number]:
                self.ready.append(number)
        while self.timers and self.timers[0][0] <= then:
            heapq.heappop(self.timers)[2]()
        self.settle()

    def settle(self) -> None:
        while True:
            self.grant()
            self.take()
            if self.taken == self.machine.batch_groups and not self.left:
                self.commit()
                continue
            before = (self.rollout_cells, self.members)
            self.decide()
            if before == (self.rollout_cells, self.members):
                return

    def grant(self) -> None:
        while self.queue and len(self.running) < self.rollout_cells * self.machine.slots:
            number, seconds = self.queue.popleft()
            self.oldest[number] = min(self.oldest[number], self.trained)
            heapq.heappush(self.running, (self.now + seconds, number))

    def take(self) -> None:
        while self.members and not self.left and self.ready and self.remaining and self.may_take():
            number = self.ready.popleft()
            self.taken += 1
            self.left = self.groups[number][1]
            self.out.staleness.append(int(self.trained - self.oldest[number]))

    def commit(self) -> None:
        self.trained += 1
        self.taken = 0
        quota = self.next_quota(self.machine.batch_groups)
        if self.trained < self.machine.batches:
            self.committed(quota * len(self.groups[0][0]))
        self.dispatch(quota)


class Split(Reference):
    """Some cells only roll out, the others only train: from the first ready group on, or when all are there."""

    def __init__(self, machine: Machine, groups: list, rollout_cells: int, streaming: bool) -> None:
        super().__init__(machine, groups)
        self.rollout_cells, self.streaming = rollout_cells, streaming
        self.after(machine.to_training_s, self.join)

    def join(self) -> None:
        self.members = self.machine.cells - self.rollout_cells
        self.out.moves = self.members

    def may_take(self) -> bool:
        return self.streaming or len(self.ready) >= self.remaining


class Colocated(Reference):
    """All cells roll out until nothing is open; then all train; then all go back."""

    def decide(self) -> None:
        if self.rollout_cells and not self.w and len(self.ready) >= self.remaining:
            self.rollout_cells = 0
            self.out.moves += self.machine.cells
            self.after(self.machine.to_training_s, self.join)

    def join(self) -> None:
        self.members = self.machine.cells

    def committed(self, quota: int) -> None:
        self.members = 0
        self.after(self.machine.to_rollout_s, self.back)

    def back(self) -> None:
        self.rollout_cells = self.machine.cells


class Plain(Reference):
    """One cell at a time, the core first, when the others cover w and the supply has sufficed for the hold."""

    def __init__(self, machine: Machine, groups: list) -> None:
        super().__init__(machine, groups)
        self.gone = 0  # cells in training or on their way
        self.late = 0  # of them, those that came after the window had closed
        self.moving = 0  # the number of the move that is under way; 0: none
        self.since = NEVER  # since when the supply suffices

    def supplied(self) -> bool:
        threshold = min(self.machine.fraction * self.machine.batch_groups, self.remaining)
        return self.remaining > 0 and min(len(self.ready), self.remaining) >= threshold

    def decide(self) -> None:
        if not self.supplied():
            self.since = NEVER
            return
        self.since = min(self.since, self.now)
        if self.moving or self.now < self.since + self.machine.hold_s:
            return
        if self.rollout_cells and (self.rollout_cells - 1) * self.machine.slots >= self.w:
            self.rollout_cells -= 1
            self.gone += 1
            self.out.moves += 1
            self.moving = number = self.out.moves
            self.after(self.machine.to_training_s, lambda: self.arrived(number))

    def wake(self) -> float:
        hold_over = self.since + self.machine.hold_s
        return hold_over if hold_over > self.now else NEVER

    def arrived(self, number: int) -> None:
        if number != self.moving:
            return  # it was turned back on its way
        self.moving = 0
        if self.remaining:
            self.members += 1
        else:
            self.late += 1

    def committed(self, quota: int) -> None:
        machine = self.machine
        self.since = NEVER
        stays = self.supplied() and (machine.cells - 1) * machine.slots >= self.w + quota
        self.members = int(stays)
        returning = self.gone - self.members
        self.gone, self.late, self.moving = self.members, 0, 0
        for _ in range(returning):
            self.after(machine.to_rollout_s, self.back)

    def back(self) -> None:
        self.rollout_cells += 1
