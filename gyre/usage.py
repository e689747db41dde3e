"""What the cells of an attempt did, added up from the status of its ranks. Pure: `now` is an argument.

Counters in a rank's status are cumulative per incarnation, so a restart sets them back to zero. The meter remembers the
last word of every incarnation; totals never fall.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from gyre.events import Usage
from gyre.status import RankStatus

#: Rates are taken over this many seconds.
RATE_WINDOW = 15.0


@dataclass
class _Counters:
    incarnation: int = 0
    serving: float = 0.0
    training: float = 0.0
    sampled: int = 0
    trained: int = 0


class UsageMeter:
    """Totals and rates of one attempt; rank 0 feeds it every second."""

    def __init__(self, cells: int, started: float) -> None:
        """`cells` counts standalone engines too; `started` is when the attempt began, in unix seconds."""
        self._cells = cells
        self._started = started
        self._past = _Counters()  # of incarnations that are over
        self._now: dict[int, _Counters] = {}
        self._tokens: dict[int, int] = {}  # per rank, over its incarnations
        self._history: dict[int, deque[tuple[float, int]]] = {}
        self.pss_mb = 0.0
        self.peak_pss_mb = 0.0

    def observe(self, now: float, ranks: Iterable[RankStatus]) -> None:
        """Take in the present status of the ranks, and fill their `tokens_per_second`."""
        pss = 0.0
        for status in ranks:
            pss += status.pss_mb
            if status.kind != "host":
                self._count(status)
                status.tokens_per_second = self._rate(now, status.rank)
        self.pss_mb = pss
        self.peak_pss_mb = max(self.peak_pss_mb, pss)

    def _count(self, status: RankStatus) -> None:
        last = self._now.get(status.rank, _Counters())
        if status.incarnation < last.incarnation:
            return  # a late word of an earlier incarnation
        if status.incarnation > last.incarnation:
            self._past.serving += last.serving
            self._past.training += last.training
            self._past.sampled += last.sampled
            self._past.trained += last.trained
            last = _Counters(status.incarnation)
        self._tokens[status.rank] = self._tokens.get(status.rank, 0) + max(0, status.tokens - last.sampled)
        self._now[status.rank] = _Counters(
            status.incarnation,
            max(last.serving, status.serving_seconds),
            max(last.training, status.training_seconds),
            max(last.sampled, status.tokens),
            max(last.trained, status.trained_tokens),
        )

    def _rate(self, now: float, rank: int) -> float:
        history = self._history.setdefault(rank, deque())
        history.append((now, self._tokens.get(rank, 0)))
        while now - history[0][0] > RATE_WINDOW:
            history.popleft()
        (start, before), (end, after) = history[0], history[-1]
        return (after - before) / (end - start) if end > start else 0.0

    def event(self, now: float) -> Usage:
        """The totals so far."""
        cells = [self._past, *self._now.values()]
        return Usage(
            cell_seconds=round(self._cells * max(0.0, now - self._started), 3),
            serving_seconds=round(sum(c.serving for c in cells), 3),
            training_seconds=round(sum(c.training for c in cells), 3),
            sampled_tokens=sum(c.sampled for c in cells),
            trained_tokens=sum(c.trained for c in cells),
            pss_mb=round(self.pss_mb, 1),
            peak_pss_mb=round(self.peak_pss_mb, 1),
        )
