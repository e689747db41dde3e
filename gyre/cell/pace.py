"""How many tokens each live request of a timed engine has by now. Pure: times are arguments, in seconds.

All live requests advance alike, so there is one clock for them, which counts in tokens: of k live requests each gets
`rate / (1 + slowdown * (k - 1))` tokens a second. A request has the tokens between the clock's value at its start and
now; nothing is added up request by request or tick by tick, so no error grows with the length of an answer.
"""

from __future__ import annotations

#: Tokens by which the clock may be short of a whole one that is due: rounding, in answers of any length.
_ROUNDING = 1e-6


class Stint:
    """One live request's part: it began at `begun` on the clock and ends with `length` tokens."""

    def __init__(self, begun: float, length: int) -> None:
        self.begun = begun
        self.length = length


class Pace:
    """The clock. `rate` is the tokens a second of a request alone."""

    def __init__(self, rate: float, slowdown: float) -> None:
        self._rate = rate
        self._slowdown = slowdown
        self._tokens = 0.0
        self._at = 0.0
        self.live = 0

    @property
    def speed(self) -> float:
        """Tokens a second that each live request gets."""
        return self._rate / (1 + self._slowdown * max(0, self.live - 1))

    def _advance(self, now: float) -> float:
        if now > self._at:
            self._tokens += (now - self._at) * self.speed if self.live else 0.0
            self._at = now
        return self._tokens

    def begin(self, length: int, now: float) -> Stint:
        """A request for `length` tokens is live from now on."""
        begun = self._advance(now)
        self.live += 1
        return Stint(begun, length)

    def end(self, now: float) -> None:
        """A request is live no more."""
        self._advance(now)
        self.live -= 1

    def tokens(self, stint: Stint, now: float) -> int:
        """The tokens that a request has."""
        return min(stint.length, int(self._advance(now) - stint.begun + _ROUNDING))

    def due(self, stint: Stint, count: int) -> float:
        """When a request has its token number `count`, if the number of live ones stays what it is."""
        return self._at + max(0.0, stint.begun + count - self._tokens) / self.speed
