"""Who holds which micro-step of one update: claims, leases, and the check that ledgers partition the stream. Pure.

Conservation law (invariant 8): every published micro-step is exactly one of *free*, or *leased* to one member that
is not barred; a leased one may be finished. A member's gradients are one sum, so leases are per member: when it is
barred everything it held goes back, finished or not, and it can never again claim or be counted under that
incarnation. When members hand a partial sum over (a suspension), their leases move with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gyre.errors import InvariantBroken

#: A member of an update: its rank and the incarnation of that rank.
Member = tuple[int, int]


class Leases:
    """The leases of one update's stream."""

    def __init__(self) -> None:
        self.free: list[int] = []  # published and held by nobody, in the order they became so
        self.holder: dict[int, Member] = {}
        self.finished: set[int] = set()
        self.barred: set[Member] = set()
        self.published: set[int] = set()

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
        micro_step = self.free.pop(0)
        self.holder[micro_step] = member
        return micro_step

    def finish(self, member: Member, micro_steps: Iterable[int]) -> None:
        """A member has added these to its sum; saying so again is harmless, and a barred member is not heard."""
        if member in self.barred:
            return
        for micro_step in micro_steps:
            if self.holder.get(micro_step) != member:
                raise InvariantBroken(8, f"member {member} finished micro-step {micro_step} that it does not hold")
            self.finished.add(micro_step)

    def held(self, member: Member) -> set[int]:
        """What a member holds, finished or not."""
        return {micro_step for micro_step, holder in self.holder.items() if holder == member}

    def unfinished(self) -> set[int]:
        """What is leased and not finished."""
        return self.holder.keys() - self.finished

    def bar(self, member: Member) -> list[int]:
        """Shut a member out; returns the micro-steps that went back."""
        self.barred.add(member)
        back = sorted(self.held(member))
        for micro_step in back:
            del self.holder[micro_step]
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
            if set(listed) != self.held(member):
                return f"member {member} lists {sorted(listed)} and holds {sorted(self.held(member))}"
            if open_steps := set(listed) - self.finished:
                return f"member {member} has not finished {sorted(open_steps)}"
            named.update(listed)
        if final and named != self.published:
            return f"micro-steps {sorted(self.published - named)} are in no ledger"
        return None

    def merge(self, members: Iterable[Member], into: Member) -> None:
        """The sums of `members` are now part of `into`'s, and so are their leases."""
        givers = set(members) - {into}
        for micro_step, holder in self.holder.items():
            if holder in givers:
                self.holder[micro_step] = into
