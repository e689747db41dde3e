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
    staleness: tuple[int, ...]  # per group that was taken to be trained
    busy_fraction: float
    short: str = ""  # why not all groups that were asked for were trained; empty where they were


def work_of(scenario: Scenario, trace: Trace, groups: Sequence[Group]) -> list[GroupWork]:
    """What groups cost: their own durations, cut at the timeout, and training by the ratio or as the trace says."""
    longest = scenario.costs.timeout_s
    rollout = [
        tuple(entry.rollout_s if longest is None else min(entry.rollout_s, longest) for entry in group)
        for group in groups
    ]
    if scenario.train_ratio is None:
        trained = [sum(entry.train_s or 0.0 for entry in group) for group in groups]
    else:
        trained = [scenario.train_ratio * trace.mean_rollout_s * trace.size / scenario.slots] * len(groups)
    return [GroupWork(*costs) for costs in zip(rollout, trained, strict=True)]


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
    tally, short = world.tally, _short(world, count)
    makespan = world.now if short or not tally.committed_at else tally.committed_at[-1]
    slot_s = tally.served_slot_s / settings.slots + tally.training_s
    return Result(
        makespan_s=makespan,
        bound_s=bound(settings, work),
        ideal_s=free,
        updates=tally.updates,
        moves=tally.moves,
        staleness=tuple(tally.staleness),
        busy_fraction=slot_s / (settings.cells * makespan) if makespan else 1.0,
        short=short,
    )


def _short(world: World, groups: int) -> str:
    """Why a run that is over trained fewer groups than it was to; empty where it trained them all."""
    ended, trained = world.ended, len(world.tally.staleness)
    if ended is None or ended.how != "completed":
        return "it did not end" if ended is None else ended.detail or ended.how
    return "batches were closed short" if trained < groups else ""


def splits(scenario: Scenario, variant: Variant) -> Iterable[int | None]:
    """The numbers of rollout cells to try."""
    return range(1, scenario.cells) if variant.split else (None,)


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Repeats of one policy, as the JSON has them: means of times, quotients of sums.

    What is reached of ideal and bound is None where not all repeats trained what was asked: they are of all of it.
    """
    makespan = sum(result.makespan_s for result in results)
    short = [result.short for result in results if result.short]

    def reached(least: float) -> float | None:
        return None if short else least / makespan if makespan else 1.0

    stale = [versions for result in results for versions in result.staleness]
    count = len(results)
    figures: dict[str, Any] = {
        "completed": not short,
        "makespan_s": makespan / count,
        "bound_s": sum(result.bound_s for result in results) / count,
        "of_bound": reached(sum(result.bound_s for result in results)),
        "ideal_s": sum(result.ideal_s for result in results) / count,
        "of_ideal": reached(sum(result.ideal_s for result in results)),
        "updates": min(result.updates for result in results),
        "groups": min(len(result.staleness) for result in results),
        "moves": sum(result.moves for result in results) / count,
        "staleness_max": max(stale, default=0),
        "staleness_mean": sum(stale) / len(stale) if stale else 0.0,
        "busy_fraction": sum(result.busy_fraction for result in results) / count,
    }
    if short:
        figures |= {"incomplete": len(short), "why": short[0]}
    return figures


def best(by_split: dict[int | None, list[Result]]) -> tuple[int | None, dict[str, Any]]:
    """The split with the shortest mean makespan of those that trained everything, and its summary.

    That also lists the makespans of all splits; None where a split did not train everything.
    """
    summaries = {split: summary(results) for split, results in by_split.items()}

    def preference(split: int | None) -> tuple[int, float, int]:
        one = summaries[split]
        return 0 if one["completed"] else 1 + one.get("incomplete", 0), one["makespan_s"], split or 0

    chosen = min(summaries, key=preference)
    figures = summaries[chosen]
    if chosen is not None:
        figures = {
            **figures,
            "rollout_cells": chosen,
            "splits": {str(split): one["makespan_s"] if one["completed"] else None for split, one in summaries.items()},
        }
    return chosen, figures


def switched(variant: Variant, switch: str, on: bool) -> Variant:
    """An elastic policy with one of its switches (keys of `scheduler.elastic`) on or off, to measure what it gains."""
    if switch in ("longest_first", "adapt_lookahead"):
        return replace(variant, **{switch: on})
    return replace(variant, policy=replace(variant.policy, **{switch: on}))
