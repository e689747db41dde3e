"""When a cell changes role: the policies. Pure.

A policy sees a `View`, numbers only, and answers each question with a `Decision`: yes or no, and why. It knows neither
ranks nor clocks, keeps no state, and can be driven by a simulator or a test as well as by a run. What no policy may
decide otherwise is not asked here: the order of cells, one move at a time, and who may join which update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class View:
    """What a decision is made from. Slots and executions are counts, times are seconds on the caller's clock."""

    now: float
    w: int  # executions queued or running
    capacity: int  # slots of all engines now in rollout
    slots: int  # of the cell in question
    training: int  # cells in the training prefix
    supply: int  # smaller of untaken ready groups and groups this batch still has to take
    threshold: float  # what the supply has to reach
    supply_since: float | None  # since when it has; None: it has not
    supply_hold: float  # how long it must have
    remaining: int  # groups this batch still has to take
    closing: bool = False  # the update has all its groups and only needs its core to step
    next_quota: int = 0  # executions about to be dispatched (for `keep_core`)
    others: int = 0  # slots of all living engines but the core's (for `keep_core`)


@dataclass(frozen=True)
class Decision:
    """Yes or no, and why. `code` names the reason without its numbers: a reason is logged when its code changes."""

    yes: bool
    code: str
    reason: str


class Policy(Protocol):
    """Answers the scheduler's questions."""

    def move(self, view: View) -> Decision:
        """May the next cell, which serves, leave rollout for training?"""

    def resume(self, view: View) -> Decision:
        """May the core, which is in training already, go on with a suspended update?"""

    def keep_core(self, view: View) -> Decision:
        """May the core stay in training for the next batch, about to begin with `view.next_quota` executions?"""


class Elastic:
    """A cell trains as soon as there is enough to train on and the others can serve everything that is outstanding."""

    def move(self, view: View) -> Decision:
        """Capacity left covers w, and the supply has sufficed for the hold (invariant 4)."""
        supplied = self._supplied(view)
        if not supplied.yes:
            return supplied
        left = view.capacity - view.slots
        if left < view.w:
            return Decision(False, "waterlevel", f"the {left} slots left would not cover the waterlevel of {view.w}")
        return Decision(True, "go", f"{supplied.reason}, and the {left} slots left cover the waterlevel of {view.w}")

    def resume(self, view: View) -> Decision:
        """The supply has sufficed for the hold."""
        return self._supplied(view)

    def keep_core(self, view: View) -> Decision:
        """The supply suffices for the next batch now, and the others cover w and the next quota."""
        if view.supply_since is None:
            return Decision(False, "supply", f"{view.supply} ready groups, {view.threshold:g} are needed to begin with")
        level = view.w + view.next_quota
        if view.others < level:
            return Decision(False, "waterlevel", f"the {view.others} slots of the others would not cover {level}")
        return Decision(True, "stay", f"{view.supply} groups are ready, and {view.others} slots cover {level}")

    @staticmethod
    def _supplied(view: View) -> Decision:
        if view.closing:
            return Decision(True, "closing", "the update has all its groups")
        if view.remaining <= 0:
            return Decision(False, "taken", "the batch has taken all its groups")
        if view.supply_since is None:
            return Decision(False, "supply", f"{view.supply} ready groups, {view.threshold:g} are needed")
        if view.now - view.supply_since < view.supply_hold:
            return Decision(False, "hold", f"{view.supply} groups are ready, for less than {view.supply_hold:g} s yet")
        return Decision(True, "supplied", f"{view.supply} groups are ready")
