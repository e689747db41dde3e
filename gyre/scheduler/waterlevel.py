"""The waterlevel d, p, f, and the supply of ready groups. Pure.

The law: 0 <= f <= p <= d over the life of the run, and w = d - f executions are queued or running. An execution raises
each counter once; tries of an execution, retries of a request and moves of a cell raise none of them (invariant 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.errors import InvariantBroken


@dataclass
class Waterlevel:
    """Executions dispatched, launched and finished over the life of the run."""

    d: int = 0
    p: int = 0
    f: int = 0

    @property
    def w(self) -> int:
        """Executions queued (d - p) or running (p - f)."""
        return self.d - self.f

    def dispatch(self, count: int) -> None:
        """`count` further executions exist."""
        self.d += count
        self.check()

    def launch(self) -> int:
        """An execution got its first grant; returns p."""
        self.p += 1
        self.check()
        return self.p

    def finish(self) -> int:
        """An execution closed; returns f."""
        self.f += 1
        self.check()
        return self.f

    def check(self) -> None:
        """Raise `InvariantBroken` (1) where the law does not hold."""
        if not 0 <= self.f <= self.p <= self.d:
            raise InvariantBroken(1, f"f={self.f} <= p={self.p} <= d={self.d} does not hold")


@dataclass
class Supply:
    """Whether there is enough to train on, and since when without a break.

    Supply is the smaller of the untaken ready groups and the groups the batch still has to take; it suffices when it
    reaches the policy's threshold, and there is something to take.
    """

    amount: int = 0
    threshold: float = 0.0
    since: float | None = None  # when it began to suffice; None while it does not

    @property
    def suffices(self) -> bool:
        """Whether it suffices now, however briefly."""
        return self.since is not None

    def observe(self, untaken: int, remaining: int, threshold: float, now: float) -> None:
        """Take note of the untaken ready groups and of the groups the batch still has to take."""
        self.amount = min(untaken, remaining)
        self.threshold = threshold
        if remaining > 0 and self.amount >= threshold:
            self.since = now if self.since is None else self.since
        else:
            self.since = None
