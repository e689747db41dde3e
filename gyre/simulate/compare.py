"""Policies side by side on one trace, in virtual time. Pure.

Every repeat is a shuffle of the trace's groups, the same one for every policy. All policies dispatch the same quotas. A
fixed split is tried with every number of rollout cells, and stands for itself with the best one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from gyre.scheduler.policy import Async, Colocate, Elastic, Policy
from gyre.scheduler.settings import Settings
from gyre.scheduler.state import SchedulerState
from gyre.simulate.costs import Chance, Costs, GroupWork
from gyre.simulate.ideal import bound, ideal
from gyre.simulate.workload import Group, Trace, shuffled
from gyre.simulate.world import World

#: Live executions of a harness host, as in the configuration's default.
HOST_EXECUTIONS = 256
#: No version is too old in a simulation: staleness is what it reports.
ANY_VERSION = 1_000_000


@dataclass(frozen=True)
class Variant:
    """A policy, and what belongs to it."""

    name: str
    policy: Policy
    longest_first: bool = False
    adapt_lookahead: bool = False
    split: bool = False  # it has a number of rollout cells


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("elastic", Elastic(), longest_first=True),
        Variant("plain", Elastic.plain()),
        Variant("colocate", Colocate()),
        Variant("async", Async(), split=True),
        Variant("async-stream", Async(streaming=True), split=True),
    )
}
DEFAULT_POLICIES = ("elastic", "colocate", "async", "async-stream")


@dataclass(frozen=True)
class Scenario:
    """The machine, the batches and the costs of a comparison; times in seconds, lookahead in batches."""

    cells: int
    slots: int
    batch_groups: int
    updates: int
    lookahead: float = 0.25
    train_ratio: float | None = None  # None: as the trace says
    costs: Costs = Costs()
    supply_fraction: float = 0.25
    supply_hold: float = 10.0
    in_order: bool = False  # the trace's groups as they come, round after round, in place of shuffles

    def settings(self, group_size: int, variant: Variant, rollout_cells: int | None = None) -> Settings:
        """What the scheduler is given."""
        return Settings(
            cells=self.cells,
            slots=self.slots,
            batch_groups=self.batch_groups,
            group_size=group_size,
            updates=self.updates,
            hosts=-(-self.cells * self.slots // HOST_EXECUTIONS),
            host_executions=HOST_EXECUTIONS,
            lookahead=self.lookahead,
            supply_fraction=self.supply_fraction,
            supply_hold=self.supply_hold,
            max_staleness=ANY_VERSION,
            max_lag=ANY_VERSION,
            trainers=0 if rollout_cells is None else self.cells - rollout_cells,
            longest_first=variant.longest_first,
            adapt_lookahead=variant.adapt_lookahead,
        )


@dataclass(frozen=True)
class Result:
    """One run in virtual time."""

    makespan_s: float
    bound_s: float
    ideal_s: float
    updates: int
    moves: int
    staleness: tuple[int, ...]  # per trained group
    busy_fraction: float


def work_of(scenario: Scenario, trace: Trace, groups: Sequence[Group]) -> list[GroupWork]:
    """What groups cost: their own durations, and training by the ratio or as the trace says."""
    if scenario.train_ratio is None:
        return [GroupWork(_rollout(group), sum(entry.train_s or 0.0 for entry in group)) for group in groups]
    train_s = scenario.train_ratio * trace.mean_rollout_s * trace.size / scenario.slots
    return [GroupWork(_rollout(group), train_s) for group in groups]


def _rollout(group: Group) -> tuple[float, ...]:
    return tuple(entry.rollout_s for entry in group)


def simulate(
    scenario: Scenario,
    trace: Trace,
    variant: Variant,
    random: Chance,
    rollout_cells: int | None = None,
    record: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """One run of a policy over one order of the groups.

    Args:
        scenario: the machine and the costs.
        trace: what executions take.
        variant: the policy.
        random: shuffles the groups first, and then decides what the costs leave to chance.
        rollout_cells: of a fixed split.
        record: is given what a run would write to events.jsonl.
    """
    settings = scenario.settings(trace.size, variant, rollout_cells)
    count = settings.batches * settings.batch_groups
    groups = list(islice(cycle(trace.groups), count)) if scenario.in_order else shuffled(trace, count, random)
    work = work_of(scenario, trace, groups)
    # Groups that are topped up after failures are further ones, from the beginning again.
    state = SchedulerState(settings, variant.policy, lambda number: id(groups[number % len(groups)]))
    free = ideal(settings, work)
    costs = scenario.costs if scenario.costs.horizon_s else replace(scenario.costs, horizon_s=free)
    world = World(settings, lambda number: work[number % len(work)], costs, state, random, record).run()
    tally = world.tally
    makespan = tally.committed_at[-1] if tally.committed_at else world.now
    return Result(
        makespan_s=makespan,
        bound_s=bound(settings, work),
        ideal_s=free,
        updates=tally.updates,
        moves=tally.moves,
        staleness=tuple(tally.staleness),
        busy_fraction=(tally.served_slot_s / settings.slots + tally.training_s) / (settings.cells * makespan),
    )


def splits(scenario: Scenario, variant: Variant) -> Iterable[int | None]:
    """The numbers of rollout cells to try."""
    return range(1, scenario.cells) if variant.split else (None,)


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Repeats of one policy, as the JSON has them: means of times, quotients of sums."""
    makespan = sum(result.makespan_s for result in results)
    stale = [versions for result in results for versions in result.staleness]
    count = len(results)
    return {
        "makespan_s": makespan / count,
        "bound_s": sum(result.bound_s for result in results) / count,
        "of_bound": sum(result.bound_s for result in results) / makespan if makespan else 1.0,
        "ideal_s": sum(result.ideal_s for result in results) / count,
        "of_ideal": sum(result.ideal_s for result in results) / makespan if makespan else 1.0,
        "updates": min(result.updates for result in results),
        "moves": sum(result.moves for result in results) / count,
        "staleness_max": max(stale, default=0),
        "staleness_mean": sum(stale) / len(stale) if stale else 0.0,
        "busy_fraction": sum(result.busy_fraction for result in results) / count,
    }


def best(by_split: dict[int | None, list[Result]]) -> tuple[int | None, dict[str, Any]]:
    """The split with the shortest mean makespan, and its summary, which also lists the makespans of all splits."""
    summaries = {split: summary(results) for split, results in by_split.items()}
    chosen = min(summaries, key=lambda split: (summaries[split]["makespan_s"], split or 0))
    figures = summaries[chosen]
    if chosen is not None:
        figures = {
            **figures,
            "rollout_cells": chosen,
            "splits": {str(split): summaries[split]["makespan_s"] for split in summaries},
        }
    return chosen, figures


def without(variant: Variant, switch: str) -> Variant:
    """The elastic policy with one of its switches off, to measure what that one gains."""
    if switch in ("longest_first", "adapt_lookahead"):
        return replace(variant, **{switch: False})
    changes = {"moves_at_once": 1} if switch == "at_once" else {switch: False}
    return replace(variant, policy=replace(variant.policy, **changes))
