"""Who holds which micro-step of one update: claims, leases, and the check that ledgers partition the stream. Pure.

Conservation law (invariant 8): every published micro-step is exactly one of *free*, or *leased* to one member that
is not barred; a leased one may be finished. A member's gradients are one sum, so leases are per member: when it is
barred everything it held goes back, finished or not, and it can never again claim or be counted under that
incarnation. When members hand a partial sum over (a suspension), their leases move with it.

What a claim costs depends on what the claimer has in hand, not on how long the stream is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from gyre.errors import InvariantBroken

#: A member of an update: its rank and the incarnation of that rank.
Member = tuple[int, int]


class Leases:
    """The leases of one update's stream."""

    def __init__(self) -> None:
        self.free: deque[int] = deque()  # published and held by nobody, in the order they became so
        self.published: set[int] = set()
        self.finished: set[int] = set()
        self.barred: set[Member] = set()
        self._holder: dict[int, Member] = {}
        self._held: dict[Member, set[int]] = {}  # the same, by member
        self._open: dict[Member, dict[int, None]] = {}  # of these what is not finished, in the order of the leases

    @property
    def leased(self) -> int:
        """How many micro-steps are leased, finished or not."""
        return len(self._holder)

    @property
    def unfinished(self) -> int:
        """How many micro-steps are leased and not finished."""
        return len(self._holder) - len(self.finished)

    def publish(self, micro_step: int) -> None:
        """A new micro-step exists and is free."""
        if micro_step in self.published:
            raise InvariantBroken(8, f"micro-step {micro_step} was published twice")
        self.published.add(micro_step)
        self.free.append(micro_step)

    def lease(self, member: Member) -> int | None:
        """Lease the oldest free micro-step to a member; None where none is free or the member is barred."""
        if not self.free or member in self.barred:
            return None
        micro_step = self.free.popleft()
        self._holder[micro_step] = member
        self._held.setdefault(member, set()).add(micro_step)
        self._open.setdefault(member, {})[micro_step] = None
        return micro_step

    def finish(self, member: Member, micro_steps: Iterable[int]) -> None:
        """A member has added these to its sum; saying so again is harmless, and a barred member is not heard."""
        if member in self.barred:
            return
        for micro_step in micro_steps:
            if self._holder.get(micro_step) != member:
                raise InvariantBroken(8, f"member {member} finished micro-step {micro_step} that it does not hold")
            self.finished.add(micro_step)
            self._open[member].pop(micro_step, None)

    def held(self, member: Member) -> frozenset[int]:
        """What a member holds, finished or not."""
        return frozenset(self._held.get(member, ()))

    def missed(self, member: Member, holding: Collection[int]) -> list[int]:
        """What a member has to finish and does not say that it has in hand, in the order of the leases."""
        return [micro_step for micro_step in self._open.get(member, ()) if micro_step not in holding]

    def bar(self, member: Member) -> list[int]:
        """Shut a member out; returns the micro-steps that went back."""
        self.barred.add(member)
        back = sorted(self._held.pop(member, ()))
        self._open.pop(member, None)
        for micro_step in back:
            del self._holder[micro_step]
            self.finished.discard(micro_step)
        self.free.extend(back)
        return back

    def fault(self, ledgers: Mapping[Member, Iterable[int]], final: bool) -> str | None:
        """Why these ledgers may not be summed; None when they may.

        Each ledger must be exactly what its member holds, all of it finished. With `final` together they must be the
        whole stream; disjointness follows, since a micro-step has one holder.
        """
        named: set[int] = set()
        for member, ledger in ledgers.items():
            listed = list(ledger)
            if member in self.barred:
                return f"member {member} is barred"
            if len(set(listed)) != len(listed):
                return f"member {member} lists a micro-step twice"
            held = self.held(member)
            if difference := held.symmetric_difference(listed):
                return f"member {member} lists {len(listed)} and holds {len(held)}: they differ in {_few(difference)}"
            if open_steps := held - self.finished:
                return f"member {member} has not finished {_few(open_steps)}"
            named.update(listed)
        if final and named != self.published:
            return f"micro-steps {_few(self.published - named)} are in no ledger"
        return None

    def merge(self, members: Iterable[Member], into: Member) -> None:
        """The sums of `members` are now part of `into`'s, and so are their leases."""
        for member in set(members) - {into}:
            given = self._held.pop(member, set())
            self._holder.update(dict.fromkeys(given, into))
            self._held.setdefault(into, set()).update(given)
            self._open.setdefault(into, {}).update(self._open.pop(member, {}))

    def check(self) -> None:
        """Raise InvariantBroken unless the conservation law holds; costs as much as the stream is long."""
        pairs = sorted((step, member) for member, steps in self._held.items() for step in steps)
        places = sorted([*self.free, *self._holder])
        if places != sorted(self.published) or pairs != sorted(self._holder.items()) or self.barred & self._held.keys():
            raise InvariantBroken(8, "a published micro-step is not exactly one of free, or leased to one member")
        if {step for steps in self._open.values() for step in steps} != self._holder.keys() - self.finished:
            raise InvariantBroken(8, "what members have to finish is not what is leased and unfinished")


def _few(micro_steps: Collection[int], most: int = 8) -> str:
    """The first few of them."""
    listed = sorted(micro_steps)
    return str(listed) if len(listed) <= most else f"{listed[:most]} and {len(listed) - most} more"
