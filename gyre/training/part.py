"""What the parts of the core and of a satellite in an update have in common: claim, compute, count.

It knows no model and no torch: what computes is a `Crew`, the workers of this cell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from gyre.faults import fault
from gyre.store import Store
from gyre.training.ledger import Member
from gyre.training.packing import MicroStep
from gyre.training.statistics import Statistics
from gyre.training.stream import Claims, Pulse, StateWord, Watch


class Finished(NamedTuple):
    """A micro-step that is in the sums of all the cell's workers, and what is known of it."""

    id: int
    statistics: Statistics


class Crew(Protocol):
    """A cell's workers, which compute gradients into their sums."""

    #: Micro-steps that they take at once.
    width: int
    #: Ids of micro-steps that were fed and are not finished: they are in no sum, or not in all.
    in_flight: set[int]

    def begin(self) -> None:
        """Start new sums from zero."""

    def feed(self, steps: Sequence[MicroStep]) -> list[Finished]:
        """Compute up to `width` micro-steps; returns what is finished by now, perhaps others."""

    def drain(self) -> list[Finished]:
        """Finish what is in flight."""

    def abandon(self) -> list[Finished]:
        """The same where something has failed: what cannot be finished is forgotten."""

    def reduce(
        self, group: str, ranks: Sequence[int], called_off: Callable[[], bool], progress: Callable[[], None]
    ) -> None:
        """Add the sums of these ranks up, on their group of this name; the total lies aside at the first rank.

        Everyone's sums stay as they are. `called_off` is asked now and then, `progress` is called with every bucket.

        Raises:
            ReduceFailed: the group failed, or the reduce was called off.
        """

    def accept(self) -> None:
        """At the core: the total of the last reduce is the sum now."""

    def discard(self) -> None:
        """At the core: the total of the last reduce is of no use, or there is none."""

    def forget(self, group: str, ranks: Sequence[int]) -> None:
        """Drop a group that failed."""


@dataclass(frozen=True)
class Desk:
    """What a trainer needs to take part in updates."""

    store: Store
    claims: Claims
    member: Member
    emit: Callable[[dict[str, Any]], None]
    pulse: Pulse = field(default_factory=Pulse)
    patience: float = 30.0  # seconds without a life sign before a member is barred
    grace: float = 10.0  # seconds a member has to answer in a round


class Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, stage: str, begun: float) -> float:
        """Count the time since `begun` (monotonic) towards a stage; returns it."""
        seconds = time.monotonic() - begun
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        return seconds

    @property
    def computed(self) -> float:
        """Seconds in which micro-steps were computed."""
        return self.seconds.get("compute", 0.0)


@dataclass
class Sum:
    """What a cell's accumulators hold: which micro-steps, their statistics and what they took.

    The core's outlives a suspension, so all of it is of the whole update.
    """

    update: int
    micro_steps: list[int] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    by_rank: dict[int, int] = field(default_factory=dict)  # micro-steps that each rank computed
    most: int = 1  # members there were at the most
    numbers: dict[str, float] = field(default_factory=dict)  # what the feeder says of the data
    clock: Clock = field(default_factory=Clock)  # the cell's own time
    collected: float = 0.0  # seconds in which satellites computed the micro-steps that came from them
    seconds: float = 0.0  # time in parts that ended suspended


class Part:
    """What the parts of the core and of a satellite have in common."""

    def __init__(self, desk: Desk, crew: Crew, total: Sum) -> None:
        self.desk = desk
        self.crew = crew
        self.sum = total
        self.update = total.update
        self.word = StateWord(desk.store, total.update)
        self.clock = total.clock
        self._unsaid: list[int] = []  # finished, and the feeder does not know
        self._progress = {"micro_steps": 0, "tokens": 0.0, "seconds": 0.0}  # of this part alone
        self._stage = ""
        self._watch = Watch(desk.store, total.update, desk.patience)

    def stage(self, stage: str) -> None:
        """Tell people what this cell does."""
        if stage != self._stage:
            self._stage = stage
            self.desk.emit({"type": "stage", "stage": stage, "update": self.update})

    def round_key(self, number: int, rest: str = "") -> str:
        """Store word of a round."""
        return f"stream/{self.update}/round/{number}{rest}"

    def work(self) -> tuple[str, int]:
        """Claim and compute until there is nothing to claim; returns the feeder's last word and what is unfinished.

        Nothing is in flight then: while something is, a claim that gets nothing is no reason to wait, but to drain.
        Nor is anything where it raises, so that no gradient of this update meets the next one's.
        """
        try:
            return self._work()
        except BaseException:
            if self.crew.in_flight:
                self._count(self.crew.abandon(), time.monotonic())
            raise

    def _work(self) -> tuple[str, int]:
        crew = self.crew
        while True:
            self.desk.pulse.beat()
            begun = time.monotonic()
            holding = sorted(crew.in_flight)
            answer = self.desk.claims.claim(self.update, self._unsaid, holding, crew.width, not holding)
            self._unsaid = []
            self.clock.add("wait", begun)
            if not answer.steps and not holding:
                return answer.word, answer.unfinished
            begun = time.monotonic()
            if answer.steps:
                self.stage("training")
                fault(f"update:{self.update}:claimed", self.desk.member[0])
                finished = crew.feed(answer.steps)
            else:
                finished = crew.drain()
            self._count(finished, begun)

    def _count(self, finished: Sequence[Finished], begun: float) -> None:
        """Micro-steps are in the sum; the time since `begun` went into them and into those in flight."""
        self._progress["seconds"] += self.clock.add("compute", begun)
        for id, statistics in finished:
            self.sum.statistics.add(statistics)
            self.sum.micro_steps.append(id)
            self._unsaid.append(id)
            self._progress["micro_steps"] += 1
            self._progress["tokens"] += statistics.tokens
            self.desk.emit({"type": "progress", "update": self.update, **self._progress})

    def lose_group(self, name: str, ranks: Sequence[int]) -> None:
        """A group failed here: no member uses one of that name again."""
        self.crew.forget(name, ranks)
        self.desk.store.set(f"groups/{name}/dead", "1")
