"""When a cell changes role: the policies. Pure.

A policy sees a `View`, numbers only, and answers each question with a `Decision`: yes or no, and why. It knows neither
ranks nor clocks, keeps no state, and can be driven by a simulator or a test as well as by a run. What no policy may
decide otherwise is not asked here: the order of cells, that the others cover the waterlevel when one leaves
(`rules.move_next`), who may join which update.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Protocol

from gyre.config import Config


@dataclass(slots=True)  # not frozen: one is made at every event, at a tenth of what a frozen one costs
class View:
    """What a decision is made from. Slots and executions are counts; times are seconds, work is in cell-seconds."""

    now: float
    w: int  # executions queued or running
    queued: int  # of them, those that wait for a slot, as all are taken
    capacity: int  # slots of all engines now in rollout
    slots: int  # of one cell
    all_slots: int  # of all living engines, in rollout or not
    cells: int  # that can train, alive
    training: int  # cells in the training prefix, those on their way into it included
    batch_groups: int
    group_size: int
    remaining: int  # groups this batch still has to take
    supply: int  # smaller of untaken ready groups and groups this batch still has to take
    threshold: float  # what the supply has to reach
    supply_since: float | None  # since when it has; None: it has not
    supply_hold: float  # how long it must have
    dry_since: float | None = None  # since when the open update has had nothing to claim; None: it has something
    closing: bool = False  # the update has all its groups and only needs its core to step
    group_work: float | None = None  # of training a group, as measured; None: not measured yet
    execution_s: float | None = None  # slot seconds of an execution, as measured
    to_training_s: float = 0.0  # that a move took, as measured
    to_rollout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Yes or no, and why. `code` names the reason without its numbers: a reason is logged when its code changes."""

    yes: bool
    code: str
    reason: str


class Policy(Protocol):
    """Answers the scheduler's questions."""

    name: str
    #: Whether several cells may be on their way into training at the same time.
    at_once: bool

    def threshold(self, batch_groups: int, remaining: int, fraction: float) -> float:
        """Untaken ready groups that training needs to begin, of a batch of so many groups."""

    def move(self, view: View) -> Decision:
        """May the next cell, which serves, leave rollout for training?"""

    def open(self, view: View) -> Decision:
        """May the core, which is in training, open the next update?"""

    def resume(self, view: View) -> Decision:
        """May the core, which is in training already, go on with a suspended update?"""

    def keep(self, view: View) -> tuple[int, Decision]:
        """How many cells of the prefix stay in training for the next batch, whose quota is in `view.w`, and why."""

    def gives_back(self, view: View) -> Decision:
        """May the update be suspended, since cells in it idle that executions in the queue could use?"""


def _go(code: str, reason: str) -> Decision:
    return Decision(True, code, reason)


def _no(code: str, reason: str) -> Decision:
    return Decision(False, code, reason)


def _supplied(view: View) -> Decision:
    """Whether the supply has sufficed for the hold."""
    if view.closing:
        return _go("closing", "the update has all its groups")
    if view.remaining <= 0:
        return _no("taken", "the batch has taken all its groups")
    if view.supply_since is None:
        return _no("supply", f"{view.supply} ready groups, {view.threshold:g} are needed")
    if view.now < view.supply_since + view.supply_hold:
        return _no("hold", f"{view.supply} groups are ready, for less than {view.supply_hold:g} s yet")
    return _go("supplied", f"{view.supply} groups are ready")


#: How long cells that stay are to be busy, and how long the queue has to last, in executions' time; see `Elastic.keep`.
BUSY, WAVES = 0.75, 1.5


def feed(view: View, count: int) -> int:
    """Groups that `count` cells train on in the time of an execution, at the most a batch."""
    if not (view.execution_s and view.group_work):
        return 0
    return ceil(min(view.batch_groups, count * view.execution_s / view.group_work))


@dataclass(frozen=True)
class Elastic:
    """A cell trains as soon as there is enough to train on and the others can serve everything that is outstanding.

    Without any of its switches this is the plain policy; each switch is described where it acts.
    """

    gain: bool = True  # `_worth`: a move is judged by what it gains, not by a fraction of the batch
    stay: bool = True  # `keep`: cells stay in training for the next batch
    give_back: bool = True  # `gives_back`: cells that idle in training go back to executions that wait
    at_once: bool = True  # several cells move at the same time

    name = "elastic"

    @classmethod
    def plain(cls) -> Elastic:
        """The policy of thresholds alone, one cell at a time."""
        return cls(gain=False, stay=False, give_back=False, at_once=False)

    def threshold(self, batch_groups: int, remaining: int, fraction: float) -> float:
        """A fraction of the batch, or whatever is left of it."""
        return min(fraction * batch_groups, remaining)

    def move(self, view: View) -> Decision:
        """Whether moving the next cell is worth the seconds in which it does nothing.

        n cells train on A cell-seconds of ready work. One more that joins after s seconds finds A - n * s of it left
        and does its share of 1 / (n + 1); the move is worth it when that exceeds what the way back will cost.

        At the end of a batch, when nobody waits for a slot, all cells wait for the last group: one cell more trains it
        W / (n (n + 1)) seconds sooner, of W cell-seconds, for every cell there is, whether anything is ready or not.
        """
        # What is ready has to be trained on, however little it is, where nothing is to be had by waiting.
        all_there = not view.w or (not view.training and view.supply >= view.remaining)
        if not self.gain or view.closing or view.remaining <= 0 or view.group_work is None or all_there:
            return _supplied(view)
        work, n = view.supply * view.group_work, view.training
        share = (work - n * view.to_training_s) / (n + 1)
        if view.supply and share > view.to_rollout_s:
            return _go("worth", f"{view.supply} groups are ready, {share:.0f} s of work for one more cell")
        if n and not view.queued and view.cells * view.group_work / (n * (n + 1)) > view.to_rollout_s:
            return _go("end", f"the batch waits for its last {view.remaining} groups, and no execution for a slot")
        return _no("worth", f"{view.supply} ready groups are not worth a move")

    def open(self, view: View) -> Decision:
        """A core that has moved, or has stayed, opens its update at once."""
        return _go("open", "the core is in training")

    def resume(self, view: View) -> Decision:
        """The supply has sufficed for the hold."""
        return _supplied(view)

    def keep(self, view: View) -> tuple[int, Decision]:
        """As many cells as training needs all the time, as far as they have work until executions leave room again.

        A cell that stays saves two switches and, more, the slots that stand idle while w falls by a cell's worth before
        it could leave again. It costs what it idles while executions wait. So count cells stay if nobody waits, or if
        the groups that are ready keep them busy for `BUSY` executions' time; or if there is something for the start and
        the queue lasts for `WAVES` executions' time at least, so that short groups can be granted first to feed them,
        and those are a small part of the batch.
        """
        if not self.stay or view.group_work is None or not view.execution_s:
            return self._keep_core(view)
        rollout = view.execution_s * view.group_size / view.slots
        most = min(view.training, int(view.group_work / (view.group_work + rollout) * view.cells))
        for count in range(most, 0, -1):
            if self._busy(view, count):
                return count, _go("stay", f"{view.supply} groups are ready for {count} of them")
        return self._keep_core(view)

    @staticmethod
    def _busy(view: View, count: int) -> bool:
        others = view.all_slots - count * view.slots
        queue_s = max(0, view.w - others) / others * view.execution_s if others else float("inf")
        busy_s = view.supply * view.group_work / count
        needed_s = BUSY * view.execution_s if queue_s else 0.0
        if busy_s >= max(view.to_training_s + view.to_rollout_s, needed_s):
            return True
        # With nothing ready at all they would be given back before the first short group is over.
        fed = view.supply > 0 and feed(view, count) <= view.batch_groups / 3
        return fed and queue_s >= WAVES * view.execution_s

    @staticmethod
    def _keep_core(view: View) -> tuple[int, Decision]:
        """The core stays where the supply suffices for the next batch, and the others cover w and the next quota."""
        others = view.all_slots - view.slots
        if view.supply_since is None:
            return 0, _no("supply", f"{view.supply} ready groups, {view.threshold:g} are needed to begin with")
        if others < view.w:
            return 0, _no("waterlevel", f"the {others} slots of the others would not cover {view.w}")
        return 1, _go("stay", f"{view.supply} groups are ready, and {others} slots cover {view.w}")

    def gives_back(self, view: View) -> Decision:
        """Nothing to claim for as long as the way there and back takes, while executions wait for slots."""
        if not self.give_back or view.dry_since is None or not view.queued:
            return _no("busy", "the update has work, or nobody waits for slots")
        # In the very terms of `SchedulerState.wake_at`: what rounds differently there would not come true at that time.
        if view.now < view.dry_since + view.to_training_s + view.to_rollout_s:
            return _no("dry", "nothing to claim, for less than two switches yet")
        return _go("dry", f"nothing to claim for {view.now - view.dry_since:.1f} s, and {view.queued} executions wait")


@dataclass(frozen=True)
class Colocate:
    """All cells roll out until nothing is open, then all train, then all roll out again."""

    name = "colocate"
    at_once = True

    def threshold(self, batch_groups: int, remaining: int, fraction: float) -> float:
        """The whole batch."""
        return remaining

    def move(self, view: View) -> Decision:
        """Everything that was dispatched is closed, and the batch is ready (or being trained already)."""
        if view.w:
            return _no("open", f"{view.w} executions are open")
        if view.training or view.closing:
            return _go("together", "all cells train together")
        if view.supply_since is None:
            return _no("supply", f"{view.supply} ready groups of {view.threshold:g}")
        return _go("go", "everything is rolled out")

    def open(self, view: View) -> Decision:
        """As soon as the core is in training."""
        return _go("open", "the core is in training")

    def resume(self, view: View) -> Decision:
        """All that is missing has come."""
        if view.closing or (view.supply_since is not None and not view.w):
            return _go("supplied", f"{view.supply} groups are ready")
        return _no("supply", f"{view.supply} ready groups, {view.w} executions open")

    def keep(self, view: View) -> tuple[int, Decision]:
        """None."""
        return 0, _no("back", "the burst is over")

    def gives_back(self, view: View) -> Decision:
        """Never: nothing waits while cells train."""
        return _no("never", "all cells train together")


@dataclass(frozen=True)
class Async:
    """A fixed split: some cells only train, the others only roll out.

    With streaming an update begins with its first ready group; without, when all its groups are ready.
    """

    streaming: bool = False
    at_once = True

    @property
    def name(self) -> str:
        """The policy's name in a configuration."""
        return "async-stream" if self.streaming else "async"

    def threshold(self, batch_groups: int, remaining: int, fraction: float) -> float:
        """One group, or the whole batch."""
        return min(1, remaining) if self.streaming else remaining

    def move(self, view: View) -> Decision:
        """A dedicated cell goes as soon as it can; nobody else is asked for (`Fleet.dedicated`)."""
        return _go("dedicated", "it is one of the cells that train")

    def open(self, view: View) -> Decision:
        """There is a first group, or all of them."""
        if view.supply_since is None and not view.closing:
            return _no("supply", f"{view.supply} ready groups, {view.threshold:g} are needed")
        return _go("open", f"{view.supply} groups are ready")

    def resume(self, view: View) -> Decision:
        """As for a new update."""
        return self.open(view)

    def keep(self, view: View) -> tuple[int, Decision]:
        """All."""
        return view.training, _go("dedicated", "the cells that train only train")

    def gives_back(self, view: View) -> Decision:
        """Never."""
        return _no("never", "the split is fixed")


def policy_of(config: Config) -> Policy:
    """The policy of a configured run."""
    match config.scheduler.policy:
        case "colocate":
            return Colocate()
        case "async" | "async-stream":
            return Async(streaming=config.scheduler.policy == "async-stream")
    elastic = config.scheduler.elastic
    return Elastic(elastic.gain, elastic.stay, elastic.give_back, elastic.at_once)
