"""What no policy is expected to beat: the capacity bound, and a run whose slots switch for free. Pure.

The *bound* is the work over the cells: no run can be faster, whatever its order. The *ideal* keeps the quotas and the
order of dispatch, and lets every slot switch for free between an execution and its share, 1 / slots, of a training
cell, rollout first. It falls short of the bound only where one execution is longer than the rest of its batch. A policy
that grants executions in a better order than that of dispatch can be faster than the ideal, and so, now and then, can
one that trains while the ideal still executes: its next quota is dispatched sooner. With one quota, nothing is.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from gyre.scheduler.settings import Settings
from gyre.simulate.costs import GroupWork

#: Work in cell-seconds below which nothing is left to do but what rounding made of it.
_NOTHING = 1e-9


def bound(settings: Settings, groups: Sequence[GroupWork]) -> float:
    """Seconds that the work would take all cells without ever idling."""
    rollout = sum(sum(group.rollout_s) for group in groups) / settings.slots
    return (rollout + sum(group.train_s for group in groups)) / settings.cells


def ideal(settings: Settings, groups: Sequence[GroupWork]) -> float:
    """Seconds until the last batch is trained, of groups dispatched in this order.

    Training is a fluid: groups that are ready, at most those of the present batch, are worked on by whatever slots hold
    no execution. A batch's quota is dispatched when the batch before it is trained.
    """
    return _Ideal(settings, groups).run()


class _Ideal:
    def __init__(self, settings: Settings, groups: Sequence[GroupWork]) -> None:
        self._settings = settings
        self._groups = groups
        self._slots = settings.cells * settings.slots
        self._queue: deque[tuple[int, float]] = deque()
        self._running: list[tuple[float, int]] = []  # end, group
        self._open = [len(group.rollout_s) for group in groups]
        self._ready: deque[int] = deque()  # beyond the present batch
        self._dispatched = 0
        self._work = 0.0  # cell-seconds of the present batch that are ready
        self._admitted = 0  # groups of the present batch that are ready or trained
        self._now = 0.0

    def run(self) -> float:
        settings = self._settings
        self._dispatch(settings.outstanding_groups(settings.lookahead))
        trained = 0
        while trained < settings.batches:
            if self._admitted == settings.batch_groups and self._work <= _NOTHING:
                trained += 1
                self._next_batch()
            else:
                self._advance()
        return self._now

    def _dispatch(self, count: int) -> None:
        last = min(len(self._groups), self._dispatched + count)
        for number in range(self._dispatched, last):
            self._queue.extend((number, seconds) for seconds in self._groups[number].rollout_s)
        self._dispatched = last
        self._grant()

    def _grant(self) -> None:
        while self._queue and len(self._running) < self._slots:
            number, seconds = self._queue.popleft()
            heapq.heappush(self._running, (self._now + seconds, number))

    def _next_batch(self) -> None:
        self._admitted, self._work = 0, 0.0
        self._dispatch(self._settings.batch_groups)
        while self._ready and self._admitted < self._settings.batch_groups:
            self._admit(self._ready.popleft())

    def _admit(self, number: int) -> None:
        self._admitted += 1
        self._work += self._groups[number].train_s

    def _advance(self) -> None:
        """Go on to the next end of an execution or of the work that is ready."""
        speed = (self._slots - len(self._running)) / self._settings.slots
        worked_off = self._now + self._work / speed if speed and self._work > _NOTHING else float("inf")
        if self._running and self._running[0][0] <= worked_off:
            end, number = heapq.heappop(self._running)
            self._work = max(0.0, self._work - speed * (end - self._now)) if self._work > _NOTHING else 0.0
            self._now = end
            self._open[number] -= 1
            if not self._open[number]:
                if self._admitted < self._settings.batch_groups:
                    self._admit(number)
                else:
                    self._ready.append(number)
            self._grant()
        else:
            self._now, self._work = worked_off, 0.0
