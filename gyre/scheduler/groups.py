"""The book of groups. Pure.

The law: every dispatched group is in exactly one of pending (an execution of it is open), ready (untaken), taken (in an
update that is not committed), trained (in a committed one) or dropped. A group goes through these in this order, is
taken at most once, and is never taken again once trained (invariants 12 and 14).

Group g consists of the executions g * size to g * size + size - 1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from gyre.errors import InvariantBroken
from gyre.events import ExecutionClosed

#: Executions with a score that a group needs to be scored against each other.
MIN_USABLE = 2


class Ranges:
    """A set of integers as sorted, disjoint, half-open ranges: small where they are mostly consecutive."""

    def __init__(self, ranges: Iterable[Iterable[int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self._starts.append(start)
            self._ends.append(end)
        self._count = sum(self._ends) - sum(self._starts)

    def __contains__(self, number: int) -> bool:
        i = bisect_right(self._starts, number) - 1
        return i >= 0 and number < self._ends[i]

    def __len__(self) -> int:
        return self._count

    def add(self, number: int) -> None:
        """Put a number in; it may be there."""
        if number in self:
            return
        self._count += 1
        i = bisect_right(self._starts, number)
        joins_left = i > 0 and self._ends[i - 1] == number
        joins_right = i < len(self._starts) and self._starts[i] == number + 1
        if joins_left and joins_right:
            self._ends[i - 1] = self._ends[i]
            del self._starts[i], self._ends[i]
        elif joins_left:
            self._ends[i - 1] = number + 1
        elif joins_right:
            self._starts[i] = number
        else:
            self._starts.insert(i, number)
            self._ends.insert(i, number + 1)

    def encode(self) -> list[list[int]]:
        """The ranges as JSON: [[start, end), ...]."""
        return [[start, end] for start, end in zip(self._starts, self._ends, strict=True)]


@dataclass
class Group:
    """A group whose executions are being run, or that is ready. Outcomes are in member order once closed."""

    number: int
    open: int  # executions not closed yet
    outcomes: dict[int, ExecutionClosed] = field(default_factory=dict)

    @property
    def usable(self) -> list[ExecutionClosed]:
        """Outcomes that can be trained on, in member order."""
        return [outcome for _, outcome in sorted(self.outcomes.items()) if outcome.usable]

    @property
    def oldest_version(self) -> int:
        """Oldest policy version that sampled a usable token; -1 without any."""
        return min((outcome.oldest_version for outcome in self.usable), default=-1)

    @property
    def rewards(self) -> list[float | None]:
        """Scores in member order; None where an execution has none that counts."""
        return [outcome.score if outcome.usable else None for _, outcome in sorted(self.outcomes.items())]


class Groups:
    """Where every group is."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.dispatched = 0
        self.pending: dict[int, Group] = {}
        self.ready: dict[int, int] = {}  # untaken groups in the order they became ready: oldest version
        self.taken: dict[int, int] = {}  # update that took it
        self.trained = Ranges()
        self.dropped = Ranges()

    @property
    def outstanding(self) -> int:
        """Groups that may still be taken: pending and ready ones."""
        return len(self.pending) + len(self.ready)

    def of(self, n: int) -> int:
        """The group of execution n."""
        return n // self.size

    def dispatch(self, count: int) -> range:
        """`count` further groups exist; returns their numbers."""
        first, self.dispatched = self.dispatched, self.dispatched + count
        for number in range(first, self.dispatched):
            self.pending[number] = Group(number, self.size)
        return range(first, self.dispatched)

    def close(self, outcome: ExecutionClosed) -> Group | None:
        """An execution closed; returns its group if it was the last one open. The group then is in no book: the
        caller makes it ready or drops it."""
        group = self.pending[self.of(outcome.n)]
        if outcome.n in group.outcomes:
            raise InvariantBroken(2, f"execution {outcome.n} closed twice")
        group.outcomes[outcome.n] = outcome
        group.open -= 1
        return self.pending.pop(group.number) if group.open == 0 else None

    def fault(self, group: Group, committed: int, max_staleness: int) -> str | None:
        """Why a closed group must not be trained on, or None."""
        if len(group.usable) < MIN_USABLE:
            return f"{len(group.usable)} of {self.size} executions are usable, {MIN_USABLE} are needed"
        return self._stale(group.oldest_version, committed, max_staleness)

    def stale(self, committed: int, max_staleness: int) -> list[tuple[int, str]]:
        """Untaken ready groups that policy `committed` makes too stale, and why."""
        faults = ((number, self._stale(oldest, committed, max_staleness)) for number, oldest in self.ready.items())
        return [(number, fault) for number, fault in faults if fault]

    @staticmethod
    def _stale(oldest: int, committed: int, max_staleness: int) -> str | None:
        if oldest >= committed - max_staleness:
            return None
        return f"sampled by policy {oldest}, more than {max_staleness} behind {committed}"

    def admit(self, group: Group) -> None:
        """A closed group is ready."""
        self._expect_new(group.number)
        self.ready[group.number] = group.oldest_version

    def drop(self, number: int) -> None:
        """A closed group, ready or not, will not be trained on."""
        self.ready.pop(number, None)
        self._expect_new(number)
        self.dropped.add(number)

    def take(self, number: int, update: int) -> bool:
        """A group's first micro-step was claimed; False if that is no news.

        Raises:
            InvariantBroken: it may not be taken (12).
        """
        if number in self.ready:
            del self.ready[number]
            self.taken[number] = update
            return True
        if self.taken.get(number, update) == update and (number in self.taken or number in self.trained):
            return False
        raise InvariantBroken(12, f"group {number} is not ready and was taken by update {update}")

    def commit(self) -> None:
        """What is taken is trained for good."""
        for number in self.taken:
            self.trained.add(number)
        self.taken.clear()

    def _expect_new(self, number: int) -> None:
        if number in self.taken or number in self.trained or number in self.dropped or number in self.ready:
            raise InvariantBroken(12, f"group {number} is settled already")

    def check(self) -> None:
        """Raise `InvariantBroken` (14) where a group is lost or in two places; O(1)."""
        known = self.outstanding + len(self.taken) + len(self.trained) + len(self.dropped)
        if known != self.dispatched:
            raise InvariantBroken(14, f"{self.dispatched} groups dispatched, {known} accounted for")
