"""One way to divide GPUs into cells, and how much a run of it trains in an hour, in virtual time. Pure.

What is assumed of a machine, since a trace was left by one division and others are to be judged by it:

* A GPU has so many slots, whatever the cell: an engine of g GPUs serves g times the executions of one GPU at the same
  speed. With k live executions to a GPU each of them has `1 / (1 + slowdown * (k - 1))` of its speed alone.
* Training a group takes the same GPU-seconds everywhere, so a cell of g GPUs needs a g-th of what one GPU needs.
* A move costs the same whatever the size of the cell.

A rate is that of a long run. The first batches, in which nothing is trained while they roll out, are simulated and not
counted, and the run is left before its last ones, so that large batches are not charged for the ends of a short run.
What is left to the luck of which groups are trained in that window is taken out: the rate is the work done in it over
the trace's mean work of a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from gyre.events import Event, GroupTaken, PolicyCommitted
from gyre.scheduler.commands import Command, DropGroup
from gyre.scheduler.state import SchedulerState
from gyre.simulate.compare import VARIANTS, Scenario
from gyre.simulate.costs import Chance, Costs, GroupWork
from gyre.simulate.workload import Entry, Group, Trace, shuffled
from gyre.simulate.world import World

HOUR = 3600.0


@dataclass(frozen=True, order=True)
class Candidate:
    """A division of the GPUs, and how batches are run on it."""

    gpus_per_cell: int
    slots_per_gpu: int
    batch_groups: int
    lookahead: float  # in batches

    @property
    def slots(self) -> int:
        """Of a cell's engine."""
        return self.gpus_per_cell * self.slots_per_gpu


@dataclass(frozen=True)
class Figures:
    """What candidates are compared by: means over all repeats, the staleness of trained groups in versions."""

    groups_per_hour: float
    staleness_mean: float
    staleness_max: int
    moves_per_update: float
    dropped: float = 0.0  # groups dropped as too stale, by groups trained


@dataclass(frozen=True)
class Workload:
    """A trace, freed from the division that left it: seconds of executions that are alone, GPU-seconds of training."""

    trace: Trace
    slowdown: float  # of a GPU by each further live execution

    @classmethod
    def of(
        cls, trace: Trace, slowdown: float, trace_slots: int, trace_gpus: int = 1, train_ratio: float | None = None
    ) -> Workload:
        """What a trace says under some assumptions.

        Args:
            trace: executions as they were.
            slowdown: of a GPU by each further live execution.
            trace_slots: live executions of a GPU when the trace was left.
            trace_gpus: GPUs of a cell then; the trace's `train_s` are seconds of such cells.
            train_ratio: training work by rollout work of a GPU with `trace_slots` slots; None: as the trace says.
        """
        alone = 1.0 + slowdown * (trace_slots - 1)
        ratio_s = None if train_ratio is None else train_ratio * trace.mean_rollout_s / trace_slots

        def freed(entry: Entry) -> Entry:
            train_s = (entry.train_s or 0.0) * trace_gpus if ratio_s is None else ratio_s
            return Entry(entry.rollout_s / alone, train_s, entry.tokens, entry.outcome)

        return cls(Trace(trace.name, tuple(tuple(map(freed, group)) for group in trace.groups)), slowdown)

    def gpu_seconds(self, group: Group, slots_per_gpu: int) -> float:
        """What a group takes of GPUs whose slots are all in use, in GPU-seconds."""
        loaded = (1.0 + self.slowdown * (slots_per_gpu - 1)) / slots_per_gpu
        return math.fsum(entry.rollout_s * loaded + (entry.train_s or 0.0) for entry in group)

    def mean_gpu_seconds(self, slots_per_gpu: int) -> float:
        """Of a group of the trace."""
        return fmean(self.gpu_seconds(group, slots_per_gpu) for group in self.trace.groups)

    def bound(self, gpus: int, slots_per_gpu: int) -> float:
        """Groups per hour that no policy exceeds: no GPU ever idles, and no move costs anything."""
        return HOUR * gpus / self.mean_gpu_seconds(slots_per_gpu)


def warm_up(lookahead: float) -> int:
    """Batches before those that are measured."""
    return 1 + math.ceil(lookahead)


def batches_of(batch_groups: int, lookahead: float, groups: int) -> int:
    """Batches of a simulation in which at least `groups` groups are measured.

    At its end there is one batch more than can ever be outstanding when the run is left: no quota is cut short before.
    """
    return warm_up(lookahead) + max(1, -(-groups // batch_groups)) + math.ceil(lookahead) + 1


def measure(
    workload: Workload,
    gpus: int,
    switch: tuple[float, float],
    candidate: Candidate,
    groups: int,
    random: Chance,
    variant: str = "elastic",
    rollout_cells: int | None = None,
    max_staleness: int | None = None,
) -> Figures:
    """Run a candidate until it has trained at least `groups` groups, and a few batches before them.

    Args:
        workload: what executions take.
        gpus: all of them; the size of the candidate's cells divides it.
        switch: seconds of a move to training, and of one back.
        candidate: the division.
        groups: to be trained in the measured window.
        random: shuffles the trace's groups.
        variant: name of the policy.
        rollout_cells: of a fixed split.
        max_staleness: versions; a group that is older is dropped and another one rolled out in its place.
    """
    size, spg, batch = candidate.gpus_per_cell, candidate.slots_per_gpu, candidate.batch_groups
    warm = warm_up(candidate.lookahead)
    batches = batches_of(batch, candidate.lookahead, groups)
    last = batches - warm
    costs = Costs(*switch, slowdown=_engine_slowdown(workload.slowdown, candidate))
    scenario = Scenario(gpus // size, candidate.slots, batch, batches, candidate.lookahead, costs=costs)
    policy = VARIANTS[variant]
    settings = scenario.settings(workload.trace.size, policy, rollout_cells)
    if max_staleness is not None:
        settings = replace(settings, max_staleness=max_staleness)
    order = shuffled(workload.trace, settings.batches * batch, random)
    work = [_work(group, size) for group in order]
    # Groups in place of dropped ones are further ones, from the beginning again.
    state = _Watched(settings, policy.policy, lambda number: id(order[number % len(order)]))
    world = World(settings, lambda number: work[number % len(work)], costs, state, random)
    step = max(sum(sum(group.rollout_s) for group in work) / len(work) / size, 1.0)
    until = 0.0
    while len(state.commits) < last and world.ended is None:
        until += step
        world.run(until)
    seconds = state.commits[last - 1] - state.commits[warm - 1]
    # Of the groups trained by then, those of the window; the world notes their staleness in the same order.
    window = [i for i, (_, update) in enumerate(state.taken) if warm < update <= last]
    done = math.fsum(workload.gpu_seconds(order[state.taken[i][0] % len(order)], spg) for i in window)
    stale = [world.tally.staleness[i] for i in window]
    trained = done / workload.mean_gpu_seconds(spg) if done else len(window)  # none took any time: luck
    rate = HOUR * trained / seconds if seconds else workload.bound(gpus, spg)
    return Figures(
        groups_per_hour=rate,
        staleness_mean=fmean(stale),
        staleness_max=max(stale),
        moves_per_update=world.tally.moves / world.tally.updates,
        dropped=state.dropped / len(state.taken),
    )


def mean(figures: Sequence[Figures]) -> Figures:
    """Repeats as one: mean rates, and the staleness of all groups."""
    return Figures(
        # Repeats train as much each, so that what counts is the mean time of a group.
        groups_per_hour=len(figures) / math.fsum(1 / one.groups_per_hour for one in figures),
        staleness_mean=fmean(one.staleness_mean for one in figures),
        staleness_max=max(one.staleness_max for one in figures),
        moves_per_update=fmean(one.moves_per_update for one in figures),
        dropped=fmean(one.dropped for one in figures),
    )


def _engine_slowdown(slowdown: float, candidate: Candidate) -> float:
    """Of an engine by each further live execution, such that it is as slow with all slots as one GPU with all its."""
    return slowdown * (candidate.slots_per_gpu - 1) / (candidate.slots - 1) if candidate.slots > 1 else 0.0


def _work(group: Group, gpus: int) -> GroupWork:
    train_s = math.fsum(entry.train_s or 0.0 for entry in group) / gpus
    return GroupWork(tuple(entry.rollout_s for entry in group), train_s)


class _Watched(SchedulerState):
    """The scheduler, and a note of which groups were trained when."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.taken: list[tuple[int, int]] = []  # group, update
        self.commits: list[float] = []  # time of each
        self.dropped = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        if type(event) is GroupTaken:
            self.taken.append((event.group, event.update))
        elif type(event) is PolicyCommitted:
            self.commits.append(now)
        commands = super().handle(event, now)
        self.dropped += sum(type(command) is DropGroup for command in commands)
        return commands
