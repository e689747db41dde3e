"""What the feeder knows: groups in the order they were fed, and the stream that each update makes of them. Pure.

Groups wait untaken until a claim needs them; a group is taken when the first of its rows is claimed, and then belongs
to that update for the whole run (invariants 8 and 12). Micro-steps are packed at the moment of the claim, so none is
ever ahead of one. The same calls in the same order give the same micro-steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gyre.errors import InvariantBroken, StreamConflict
from gyre.training.choosing import Shelf
from gyre.training.ledger import Leases, Member
from gyre.training.packing import MicroStep, Row, lay_out

Answer = Literal["step", "wait", "closed", "suspended", "barred"]


@dataclass(frozen=True)
class Claim:
    """What a claim is answered: micro-steps, or why there is none."""

    answer: Answer
    steps: tuple[MicroStep, ...] = ()
    unfinished: int = 0  # micro-steps that members still work on
    taken: tuple[int, ...] = ()  # groups that this claim took


@dataclass
class Stream:
    """The stream of one update."""

    update: int
    policy: int  # version that it improves on
    shelf: Shelf
    steps: dict[int, MicroStep] = field(default_factory=dict)
    leases: Leases = field(default_factory=Leases)
    suspended: bool = False
    settled: bool = False  # its sum is complete at the core
    agreed: tuple[dict[Member, list[int]], bool] | None = None  # what was settled last, until it goes on
    tokens: int = 0
    room: int = 0  # tokens there was room for: the budget of each micro-step without an over-long sample
    packed: int = 0  # tokens in those micro-steps
    stale: float = 0.0  # versions between sampling and training, summed over trained tokens
    oldest: int = 0  # the largest of them
    trained: int = 0  # tokens

    @property
    def dry(self) -> bool:
        """All its groups are taken and all their rows are in micro-steps that somebody holds."""
        return self.shelf.empty and not self.leases.free

    @property
    def taken(self) -> list[int]:
        """The groups that are in it."""
        return self.shelf.taken

    def numbers(self) -> dict[str, float]:
        """What is worth knowing about its data.

        `fill` is tokens per token of budget, over the micro-steps without an over-long sample; staleness in versions.
        """
        return {
            "groups": len(self.taken),
            "sequence_tokens": self.tokens,
            "fill": self.packed / self.room if self.room else 0.0,
            "staleness_mean": self.stale / self.trained if self.trained else 0.0,
            "staleness_max": self.oldest,
        }


class Supply:
    """Groups and streams. `budget` is the tokens of a micro-step, `trained` the groups of earlier attempts' commits."""

    def __init__(self, budget: int, trained: Iterable[int] = ()) -> None:
        self._budget = budget
        self._seen: set[int] = set(trained)  # fed once already, in the whole run
        # Untaken, in order; None while its samples are loading. (A plain dict whose first ones go is slow to begin.)
        self._ready: OrderedDict[int, list[Row] | None] = OrderedDict()
        self._barred: set[Member] = set()
        self.streams: dict[int, Stream] = {}

    @property
    def untaken(self) -> int:
        """Groups that are here and that no update has taken."""
        return len(self._ready)

    # -- groups ----------------------------------------------------------------------------------------------------
    def reserve(self, group: int) -> None:
        """A group takes its place in the order; its rows come with `fill`."""
        if group in self._seen:
            raise InvariantBroken(12, f"group {group} was fed before; a group is trained on in one update of a run")
        self._seen.add(group)
        self._ready[group] = None

    def fill(self, group: int, rows: list[Row]) -> None:
        """The rows of a reserved group; none where it has nothing to teach. A group dropped since is ignored."""
        if group in self._ready:
            self._ready[group] = rows

    def drop(self, group: int) -> bool:
        """Forget an untaken group, which may be fed again; False where it is taken or unknown."""
        if group not in self._ready:
            return False
        del self._ready[group]
        self._seen.discard(group)
        return True

    # -- updates ---------------------------------------------------------------------------------------------------
    def begin(self, update: int, groups: int, policy: int = 0) -> None:
        """Open the stream of an update that takes this many groups; `policy` is the version that it improves on."""
        if update in self.streams:
            raise StreamConflict(f"update {update} was begun before")
        if self.streams and update < max(self.streams):
            raise StreamConflict(f"update {update} comes after update {max(self.streams)}")
        self.streams[update] = Stream(update, policy, Shelf(groups, self._budget))
        self.streams[update].leases.barred |= self._barred

    def stream(self, update: int) -> Stream:
        """The stream of an update that was begun and is not committed."""
        if update not in self.streams:
            raise StreamConflict(f"update {update} is not open")
        return self.streams[update]

    def suspend(self, update: int) -> None:
        """Give no more micro-steps until `resume`."""
        self.stream(update).suspended = True

    def resume(self, update: int) -> None:
        """Go on after a suspension."""
        self.stream(update).suspended = False
        self.stream(update).agreed = None

    def close_short(self, update: int, groups: int | None = None) -> int:
        """Take `groups` groups altogether, or no further one where it is None; returns how many that makes."""
        shelf = self.stream(update).shelf
        shelf.close(groups or 0)
        return shelf.groups

    def committed(self, update: int) -> None:
        """Forget the micro-steps of this update and of earlier ones."""
        for known in [u for u in self.streams if u <= update]:
            del self.streams[known]

    def bar(self, member: Member) -> dict[int, list[int]]:
        """Shut a member out, for good, where a sum is not complete yet; returns what went back, per update."""
        self._barred.add(member)
        open_streams = [stream for stream in self.streams.values() if not stream.settled]
        return {stream.update: stream.leases.bar(member) for stream in open_streams}

    # -- claims ----------------------------------------------------------------------------------------------------
    def claim(
        self,
        update: int,
        member: Member,
        finished: Iterable[int] = (),
        holding: Collection[int] = (),
        want: int = 1,
    ) -> Claim:
        """Note what a member finished and give it up to `want` micro-steps, or say why there is none.

        `holding` is what it has in hand and has not finished. What it leased besides was in an answer that got lost,
        and is given again, before anything new.
        """
        stream = self.streams.get(update)
        if stream is None:
            newest = max(self.streams, default=0)
            return Claim("wait" if update > newest else "closed")
        leases = stream.leases
        if member in leases.barred:
            return Claim("barred")
        leases.finish(member, finished)
        given = leases.missed(member, holding)[:want]
        taken: list[int] = []
        while not stream.suspended and len(given) < want:
            if not leases.free:
                taken += self._pack(stream)
            step = leases.lease(member)
            if step is None:
                break
            given.append(step)
        word: Answer = "step" if given else "suspended" if stream.suspended else "closed" if stream.dry else "wait"
        return Claim(word, tuple(stream.steps[step] for step in given), leases.unfinished, tuple(taken))

    def _pack(self, stream: Stream) -> list[int]:
        """Publish one more micro-step, if one is to be had; returns the groups that were taken for it."""
        rows, taken = stream.shelf.next(self._ready)
        for group in taken:
            del self._ready[group]
        if rows:
            self._publish(stream, lay_out(len(stream.steps) + 1, rows), rows)
        return taken

    def _publish(self, stream: Stream, step: MicroStep, rows: Sequence[Row]) -> None:
        stream.steps[step.id] = step
        stream.leases.publish(step.id)
        if len(step.tokens) <= self._budget:
            stream.room += self._budget
            stream.packed += len(step.tokens)
        for row in rows:
            sample = row.sample
            lag = stream.policy - sample.versions[sample.trained]
            stream.tokens += len(sample)
            stream.trained += len(lag)
            stream.stale += float(lag.sum())
            stream.oldest = max(stream.oldest, int(lag.max(initial=0)))

    # -- sums ------------------------------------------------------------------------------------------------------
    def settle(self, update: int, ledgers: Mapping[Member, Iterable[int]], core: Member, final: bool) -> str | None:
        """Check that these sums may be added up (invariant 8); None if so, else why not.

        With `final` they are the whole update and its stream ends; without, they become the core's partial sum.
        Asking the same again gives the same answer, since the first one may have been lost on its way.
        """
        stream = self.stream(update)
        asked = {member: sorted(ids) for member, ids in ledgers.items()}, final
        if stream.agreed == asked:
            return None
        if final and not stream.dry:
            return "the stream is not dry"
        fault = stream.leases.fault(asked[0], final)
        if fault is None:
            stream.leases.merge(ledgers, core)
            stream.settled = final
            stream.agreed = asked
        return fault
