"""The batch that is being trained, and its present update. Pure.

The law: a batch's groups are split over its updates, each group is taken by exactly one of them, and no update takes
more than its share: taken(update) <= groups(update), and the shares add up to the batch (invariants 8 and 12).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gyre.errors import InvariantBroken


class Phase(StrEnum):
    """Where the present update is."""

    WAITING = "waiting"  # its core does not train yet
    OPENING = "opening"  # the core was ordered into it
    OPEN = "open"  # its stream is open; it ends with the step of the core
    SUSPENDING = "suspending"  # starved; members bring their partial sums to the core
    SUSPENDED = "suspended"  # only the core's partial sum is left of it
    COMMITTING = "committing"  # it was the last of its batch, and the core commits


#: Phases in which members hold partial sums outside the core's keeping.
RUNNING = (Phase.OPENING, Phase.OPEN, Phase.SUSPENDING)


def split(groups: int, updates: int) -> list[int]:
    """Shares of `updates` updates, as even as can be, larger ones first."""
    share, extra = divmod(groups, updates)
    return [share + (i < extra) for i in range(updates)]


@dataclass
class Update:
    """One optimizer step in the making."""

    number: int
    groups: int
    taken: int = 0
    phase: Phase = Phase.WAITING
    begun: bool = False  # the feeder knows it
    stepped: bool = False  # the core says that it has taken the step
    closed: bool = False  # its joining window is known to be closed
    joined: list[int] = field(default_factory=list)  # members whose part has not ended, in prefix order
    joining: int | None = None  # the satellite that was ordered into it last and has not answered
    given_back: bool = False  # it is suspended for others to have its cells, the core's included
    dry_since: float | None = None  # open, not full, and nothing to claim since then, as far as is known

    @property
    def running(self) -> bool:
        """Whether micro-steps may be out with members."""
        return self.phase in RUNNING

    @property
    def full(self) -> bool:
        """Whether it has all its groups."""
        return self.taken == self.groups

    @property
    def joinable(self) -> bool:
        """Whether a satellite may still be ordered into it."""
        return self.phase is Phase.OPEN and not self.closed and not self.full and not self.stepped

    def take(self) -> None:
        """One of its groups was taken."""
        self.taken += 1
        if self.taken > self.groups:
            raise InvariantBroken(8, f"update {self.number} took {self.taken} groups, its share is {self.groups}")


@dataclass
class Batch:
    """The groups trained between two policy versions."""

    number: int  # from 1; the policy it makes
    shares: list[int]  # groups of each of its updates
    top_ups: int  # that it may still get
    first_update: int
    taken: int = 0

    @property
    def groups(self) -> int:
        """Groups of the whole batch."""
        return sum(self.shares)

    @property
    def remaining(self) -> int:
        """Groups it still has to take."""
        return self.groups - self.taken

    def update(self, index: int) -> Update:
        """Its update number `index`, from 0."""
        return Update(self.first_update + index, self.shares[index])

    def last(self, update: Update) -> bool:
        """Whether an update is the last of the batch."""
        return update.number == self.first_update + len(self.shares) - 1

    def shorten(self, update: Update, untaken: int) -> bool:
        """Make do with the `untaken` groups that are ready; False if that leaves an update without any group.

        The groups of the present update and of those after it are split evenly again, as far as the present one has not
        taken more than its share already.
        """
        index = update.number - self.first_update
        later = len(self.shares) - index - 1
        share = max(update.taken, split(update.taken + untaken, later + 1)[0])
        rest = split(update.taken + untaken - share, later) if later else []
        self.shares[index:] = [share, *rest]
        update.groups = share
        return all(self.shares[index:])
