"""The stream of the present update in a simulated world: groups in, micro-steps claimed, an update out. Pure.

The law: every micro-step of a group that was taken is done by one member whose part counts, and an update steps when
all its groups are taken and all their micro-steps are done.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Protocol

from gyre import events as e
from gyre.scheduler import commands as c
from gyre.simulate.costs import Costs, GroupWork, Tally


class Member(Protocol):
    """A cell, as far as the stream knows it."""

    rank: int
    incarnation: int
    member: bool  # of the present update
    busy: bool  # with a micro-step


class Stream:
    """Everything about the update that is being trained."""

    def __init__(
        self,
        costs: Costs,
        work: Callable[[int], GroupWork],
        tally: Tally,
        cells: dict[int, Member],
        say: Callable[[e.Event], None],
        after: Callable[..., None],
    ) -> None:
        """`say` tells the scheduler an event, `after(seconds, call, *arguments)` lets time pass."""
        self._costs = costs
        self._work = work
        self._tally = tally
        self._cells = cells
        self._say = say
        self._after = after
        self._fed: deque[tuple[int, int]] = deque()  # ready groups, and the version of their oldest token
        self._update = 0
        self._version = 0  # that the update starts from
        self._share = 0
        self._taken = 0
        self._steps_left = 0  # unclaimed micro-steps of the group that was taken last
        self._step_s = 0.0
        self._update_s = 0.0  # cell-seconds of the present update
        self._busy = 0
        self._suspended = False
        self._closing = False  # nobody joins or claims any more
        self.members: list[int] = []
        self._claimed: defaultdict[int, list[float]] = defaultdict(list)  # by member: seconds of its micro-steps
        self._again: list[float] = []  # micro-steps whose member was lost
        self._idle: deque[int] = deque()

    # -- the scheduler's commands ------------------------------------------------------------------------------------
    def feed(self, group: int, oldest_version: int) -> None:
        """A group is ready."""
        self._fed.append((group, oldest_version))
        self._wake()

    def drop(self, command: c.DropGroup) -> None:
        """A group that nobody took is not trained on."""
        self._fed = deque(fed for fed in self._fed if fed[0] != command.group)

    def begin(self, update: int, groups: int, version: int) -> None:
        """The next update, of so many groups, made from a version."""
        self._update, self._share, self._version = update, groups, version
        self._taken = self._steps_left = self._busy = 0
        self._suspended, self._closing, self._update_s = False, False, 0.0
        self._claimed, self._again = defaultdict(list), []

    def close_short(self, command: c.CloseShort) -> None:
        """The update makes do with fewer groups."""
        self._share = command.groups
        self._wake()

    def enter(self, cell: Member) -> None:
        """A cell is in the update from now on."""
        cell.member = True
        self.members.append(cell.rank)
        self._idle.append(cell.rank)
        self._wake()

    def suspend(self, command: c.SuspendUpdate) -> None:
        """Members end with the micro-step that they are at."""
        self._suspended = True
        self._wake()

    def resume(self, command: c.ResumeUpdate) -> None:
        """Go on where it was suspended."""
        self._suspended = False

    def bar(self, command: c.BarMember) -> None:
        """All that a member did in the update is done again by the others."""
        cell = self._cells[command.rank]
        if command.rank in self.members:
            self.members.remove(command.rank)
        self._again += self._claimed.pop(command.rank, [])
        if cell.member:
            cell.member = False
            self._busy -= cell.busy
            cell.busy = False
        self._wake()

    # -- micro-steps -------------------------------------------------------------------------------------------------
    def _wake(self) -> None:
        """Let idle members claim what there is; close or suspend the update when nobody computes any more."""
        while self._idle and not self._suspended and (self._again or self._steps_left or self._take()):
            rank = self._idle.popleft()
            cell = self._cells[rank]
            if not cell.member or cell.busy:
                continue
            self._claim(cell)
        if self.members and not self._busy and not self._closing:
            if self._suspended:
                self._part("suspended")
            elif self._taken == self._share and not self._steps_left and not self._again:
                self._closing = True
                self._after(self._costs.step_s, self._stepped, self._update)

    def _claim(self, cell: Member) -> None:
        if self._again:
            seconds = self._again.pop()
        else:
            self._steps_left -= 1
            seconds = self._step_s
        self._claimed[cell.rank].append(seconds)
        self._busy += 1
        cell.busy = True
        self._after(seconds, self._step_done, cell.rank, cell.incarnation, seconds)

    def _take(self) -> bool:
        if self._taken >= self._share or not self._fed:
            return False
        group, oldest = self._fed.popleft()
        self._taken += 1
        self._steps_left = self._costs.micro_steps
        self._step_s = self._work(group).train_s / self._costs.micro_steps
        self._tally.staleness.append(self._version - oldest)
        self._say(e.GroupTaken(group, self._update))
        return True

    def _step_done(self, rank: int, incarnation: int, seconds: float) -> None:
        cell = self._cells[rank]
        if not cell.member or cell.incarnation != incarnation or not cell.busy:
            return
        cell.busy = False
        self._busy -= 1
        self._tally.training_s += seconds
        self._update_s += seconds
        self._idle.append(rank)
        self._wake()

    def _stepped(self, update: int) -> None:
        if self._again or self._busy:  # a member was lost meanwhile, and its micro-steps are done again
            self._closing = False
            self._wake()
            return
        members = {str(rank): 1 for rank in self.members}
        self._tally.updates += 1
        metrics = {"cell_seconds": self._update_s}
        self._say(e.UpdateDone(update, len(members), members, 0.0, metrics))
        self._part("done")

    def _part(self, how: str) -> None:
        """The part of every member in the update is over."""
        members, self.members = self.members, []
        self._idle.clear()
        self._claimed.clear()
        for rank in members:
            cell = self._cells[rank]
            if cell.member:
                cell.member = False
                self._say(e.TrainingEnded(rank, cell.incarnation, self._update, how))
