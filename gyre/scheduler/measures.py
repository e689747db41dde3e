"""What the scheduler has measured of a run, for decisions that weigh one thing against another. Pure.

Means are over everything seen, newer values weighing more, so that they follow a workload that drifts. Nothing here is
needed for a run to be safe or to end: what is not measured yet is None, or 0 seconds, and the policies say what they do
without it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

#: Values that a mean remembers, about: executions, updates, moves.
EXECUTIONS, UPDATES, MOVES = 256, 4, 16


class Mean:
    """A mean over about the last `memory` values; over all of them while there are fewer."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._count = 0
        self.value: float | None = None

    def add(self, value: float) -> None:
        """Take in a value."""
        self._count = min(self._count + 1, self._memory)
        self.value = value if self.value is None else self.value + (value - self.value) / self._count


class Measures:
    """Durations in seconds, work in cell-seconds."""

    def __init__(self, task_of: Callable[[int], Hashable] | None = None) -> None:
        """`task_of` names the task of a group number; groups of one task are expected to take alike."""
        self.now = 0.0  # set by the state before every event
        self._task_of = task_of
        self._tasks: dict[Hashable, Mean] = {}
        self._slot = Mean(EXECUTIONS)
        self._group_work = Mean(UPDATES)
        self._moves = {"training": Mean(MOVES), "rollout": Mean(MOVES)}

    # -- what happened -----------------------------------------------------------------------------------------------
    def execution(self, group: int, seconds: float) -> None:
        """An execution of a group held a slot for so long."""
        self._slot.add(seconds)
        if self._task_of is not None:
            self._tasks.setdefault(self._task_of(group), Mean(EXECUTIONS)).add(seconds)

    def update(self, groups: int, cell_seconds: float) -> None:
        """An update of so many groups took so much computing."""
        if groups and cell_seconds > 0:
            self._group_work.add(cell_seconds / groups)

    def moved(self, target: str, since: float) -> None:
        """A cell that was ordered to a role at `since` has reached it now."""
        self._moves[target].add(self.now - since)

    # -- what is expected --------------------------------------------------------------------------------------------
    @property
    def slot_s(self) -> float | None:
        """Seconds that an execution holds a slot."""
        return self._slot.value

    @property
    def group_work(self) -> float | None:
        """Cell-seconds of training a group."""
        return self._group_work.value

    @property
    def to_training_s(self) -> float:
        """Seconds from the order to training until a cell trains."""
        return self._moves["training"].value or 0.0

    @property
    def to_rollout_s(self) -> float:
        """Seconds from the order to rollout until a cell serves."""
        return self._moves["rollout"].value or 0.0

    def expected(self, group: int) -> float | None:
        """Slot seconds of an execution of a group: of its task where that was seen, of any otherwise."""
        task = self._tasks.get(self._task_of(group)) if self._task_of is not None else None
        return self._slot.value if task is None else task.value


class Lookahead:
    """How much lookahead is used: all that is configured, or as little as seldom lets cells idle.

    The idle time that more executions would have filled is added up over a burst: of slots, and of cells in training,
    while the queue is empty and no group is ready. A burst that lost more than `MUCH` of all cell time raises the
    lookahead by `UP` batches, any other lowers it by `DOWN`; so about one burst in UP / DOWN idles.
    """

    START, MUCH, UP, DOWN = 0.25, 0.02, 0.125, 1 / 128

    def __init__(self, most: float, adapt: bool) -> None:
        self.value = min(most, self.START) if adapt else most
        self._most = most
        self._adapt = adapt
        self._at: float | None = None
        self._slots = 0.0
        self._trainers = 0
        self._dry_since: float | None = None
        self._idle = 0.0
        self._total = 0.0

    def observe(self, now: float, cells: int, slots: float, trainers: int, dry_since: float | None) -> None:
        """Take note of what is idle from now on.

        Args:
            now: seconds.
            cells: that live.
            slots: free ones that more executions would fill, in cells' worth.
            trainers: cells in the update, which are idle from `dry_since` on; None: they are not.
            dry_since: may lie ahead.
        """
        if self._at is not None:
            self._idle += (now - self._at) * self._slots
            if self._dry_since is not None:
                self._idle += max(0.0, now - max(self._at, self._dry_since)) * self._trainers
            self._total += (now - self._at) * cells
        self._at, self._slots, self._trainers, self._dry_since = now, slots, trainers, dry_since

    def burst(self) -> float:
        """A burst begins: the lookahead for its quota."""
        if self._adapt and self._total:
            change = self.UP if self._idle > self.MUCH * self._total else -self.DOWN
            self.value = min(self._most, max(0.0, self.value + change))
        self._idle = self._total = 0.0
        return self.value
