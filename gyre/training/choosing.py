"""Which rows make the next micro-step of an update, and which groups are taken for it. Pure.

A micro-step is made when one is claimed, of the rows that wait (those of groups that were taken before) and of as many
further ready groups as it needs to be full, in their order. So groups are taken late. The longest row goes first, with
what fills the budget best beside it; one that was passed over many times goes before it, so none starves. The last
third, once no group is to come any more, is planned as a whole, in micro-steps of even size. A row of more than the
budget goes alone, as soon as it is seen.

Where all that is ready does not fill a micro-step, and groups are still to come, it is kept until they do: never more
than some budgets of it, and never more than half of what is expected to come, since at the end of an update cells would
work on it that had idled before; nor anything where no two rows go together. What is kept is taken, since a claim waits
for it: an update can only be found to starve when no ready group is left untaken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from gyre.training.filling import SLACK, fill_up, pack_evenly
from gyre.training.packing import Row

Ready = Mapping[int, "list[Row] | None"]

_WINDOW = 12  # budgets of rows that are looked at, at the most, for one micro-step
_PLANNED = 1 / 3  # of an update's tokens that are planned as a whole, once no group is to come, at the most
_KEEP = 4  # budgets of rows that are kept waiting, at the most
_PATIENCE = 16  # micro-steps that a row may be passed over


@dataclass(eq=False)
class Waiting:
    """A row that is in no micro-step yet."""

    row: Row
    group: int
    tokens: int
    taken: bool = False
    passed: int = 0  # micro-steps that were made without it since its group was taken


class Shelf:
    """The rows of one update that wait, and how they go. `groups` is how many the update takes, `budget` is in tokens.

    Every row of a taken group is in `waiting` until `next` has given it, once.
    """

    def __init__(self, groups: int, budget: int) -> None:
        self.groups = groups
        self.taken: list[int] = []
        self.waiting: list[Waiting] = []  # in the order in which their groups were taken
        self._budget = budget
        self._tokens = 0  # of the taken groups
        self._shortest = budget  # row that was seen
        self._looked: dict[int, tuple[list[Row], list[Waiting]]] = {}  # ready groups, not taken
        self._plan: list[list[Waiting]] = []  # the rest of the micro-steps, last one first

    @property
    def empty(self) -> bool:
        """All groups are taken, and all their rows given."""
        return len(self.taken) >= self.groups and not self.waiting

    def close(self, groups: int) -> None:
        """Take this many groups altogether, at least those taken already."""
        self.groups = max(len(self.taken), groups)
        self._plan = []

    def next(self, ready: Ready) -> tuple[list[Row], list[int]]:
        """Rows of one more micro-step, if one is to be had now, and the groups that are taken for it.

        `ready` has the untaken groups in their order; one that is None is still loading, and holds up those behind it.
        Whoever calls removes from it what is taken.
        """
        if self._plan and all(w.taken or self._known(w.group, ready) for w in self._plan[-1]):
            return self._give(self._plan.pop())
        self._plan = []
        if rest := self._rest(ready):
            return self._planned(*rest)
        pool, looked, untaken = list(self.waiting), [], iter(ready.items())
        best: list[Waiting] = []
        while True:
            if alone := [w for w in pool if w.tokens > self._budget][:1]:
                return self._give(alone, looked)
            if len(self.taken) + len(looked) >= self.groups:
                return self._planned(pool, looked)
            best = max(best, self._fit(pool), key=_tokens)
            if _tokens(best) >= self._budget - SLACK or _tokens(pool) >= self._budget * _WINDOW:
                return self._give(best, looked)
            group, rows = next(untaken, (0, None))
            if rows is None:
                break
            looked.append(group)
            pool += self._look(group, rows)
        if self._keeps(pool, len(looked)):
            return [], self._take(looked)
        return self._give(best, looked)

    def _rest(self, ready: Ready) -> tuple[list[Waiting], list[int]] | None:
        """All rows that are left and the groups they are of, where no group is to come and they are few."""
        missing = self.groups - len(self.taken)
        if len(ready) < missing or not self.taken:
            return None
        pool, looked, total, tokens = list(self.waiting), [], self._tokens, _tokens(self.waiting)
        for group, rows in islice(ready.items(), missing):
            if rows is None or tokens > min(_WINDOW * self._budget, total * _PLANNED):
                return None
            looked.append(group)
            found = self._look(group, rows)
            pool += found
            tokens += _tokens(found)
            total += _tokens(found)
        return pool, looked

    def _look(self, group: int, rows: list[Row]) -> list[Waiting]:
        if group not in self._looked or self._looked[group][0] is not rows:
            self._looked[group] = rows, [Waiting(row, group, len(row.sample)) for row in rows]
            self._shortest = min(self._shortest, *(len(row.sample) for row in rows), self._budget)
        return self._looked[group][1]

    def _known(self, group: int, ready: Ready) -> bool:
        """Whether an untaken group is as it was when it was looked at."""
        return group in self._looked and ready.get(group) is self._looked[group][0]

    def _fit(self, pool: Sequence[Waiting]) -> list[Waiting]:
        """The best micro-step around the row that goes first."""
        if not pool:
            return []
        first = max(pool, key=lambda w: (w.passed if w.passed >= _PATIENCE else 0, w.tokens))
        others = [w for w in pool if w is not first]
        beside = fill_up([w.tokens for w in others], self._budget - first.tokens, SLACK)
        return [first, *(others[i] for i in beside)]

    def _keeps(self, pool: Sequence[Waiting], looked: int) -> bool:
        """Whether all that is ready waits for what is to come."""
        groups = len(self.taken) + looked
        if not pool:
            return True
        if 2 * self._shortest > self._budget:
            return False  # no two of them go together
        seen = self._tokens + _tokens([w for w in pool if not w.taken])
        coming = (self.groups - groups) * seen / groups
        return _tokens(pool) < min(_KEEP * self._budget, coming / 2)

    def _planned(self, pool: Sequence[Waiting], looked: Sequence[int]) -> tuple[list[Row], list[int]]:
        """The first micro-step of a plan for all that is left."""
        plan = pack_evenly([w.tokens for w in pool], self._budget)
        self._plan = [[pool[i] for i in indices] for indices in reversed(plan)]
        return self._give(self._plan.pop() if self._plan else [], looked)

    def _give(self, chosen: Sequence[Waiting], looked: Iterable[int] = ()) -> tuple[list[Row], list[int]]:
        """These rows go; their groups are taken, and so are groups without rows that were looked at."""
        wanted = {w.group for w in chosen if not w.taken} | {g for g in looked if not self._looked[g][1]}
        taken = self._take([g for g in self._looked if g in wanted])
        going = set(map(id, chosen))
        self.waiting = [w for w in self.waiting if id(w) not in going]
        for waiting in self.waiting:
            waiting.passed += 1
        return [w.row for w in chosen], taken

    def _take(self, groups: Sequence[int]) -> list[int]:
        for group in groups:
            rows = self._looked.pop(group)[1]
            for waiting in rows:
                waiting.taken = True
            self._tokens += _tokens(rows)
            self.waiting += rows
            self.taken.append(group)
        return list(groups)


def _tokens(rows: Sequence[Waiting]) -> int:
    return sum([w.tokens for w in rows])
