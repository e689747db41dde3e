"""Which division of the GPUs, batch size and lookahead to use: the search, the choice, and its reasons in words. Pure.

The search knows candidates only by what `evaluate` says of them. It looks at all of them roughly, at the most promising
ones thoroughly, and then at the neighbours of what it would choose, those that differ from it in one thing by one
step, until there is none left that it has not looked at thoroughly.

The choice: of the candidates that keep the bounds on staleness, those within a tolerance of the fastest; of these the
least stale one, then the one with the smallest batch, the fewest slots, the smallest cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gyre import words
from gyre.errors import UserError
from gyre.simulate.candidate import Candidate, Figures
from gyre.simulate.compare import HOST_EXECUTIONS

#: Candidates that are looked at thoroughly before the neighbours of the best.
FINALISTS = 8
#: Mean staleness that is one and the same: a difference below it decides nothing.
STALENESS_STEP = 0.05
#: A node has so many GPUs at the most, and a cell is on one node.
LARGEST_CELL = 8

Evaluate = Callable[[Sequence[Candidate], bool], Sequence[Figures]]  # candidates, thoroughly -> figures of each


@dataclass(frozen=True)
class Choices:
    """What is tried, each list in ascending order."""

    gpus_per_cell: tuple[int, ...]
    slots_per_gpu: tuple[int, ...]
    batch_groups: tuple[int, ...]
    lookahead: tuple[float, ...]

    def candidates(self, slots_per_gpu: int) -> list[Candidate]:
        """All of them with so many slots."""
        return [
            Candidate(gpus, slots_per_gpu, batch, lookahead)
            for gpus in self.gpus_per_cell
            for batch in self.batch_groups
            for lookahead in self.lookahead
        ]

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """Those that differ in one thing, by one step."""
        near = []
        for thing in ("gpus_per_cell", "slots_per_gpu", "batch_groups", "lookahead"):
            values = getattr(self, thing)
            at = values.index(getattr(candidate, thing))
            near += [
                replace(candidate, **{thing: value})
                for value in (*values[max(0, at - 1) : at], *values[at + 1 : at + 2])
            ]
        return near


@dataclass(frozen=True)
class Limits:
    """What the user accepts."""

    staleness_mean: float | None = None  # versions
    staleness_max: int | None = None
    tolerance: float = 0.02  # throughput given up for less staleness, as a fraction of the best

    def keeps(self, figures: Figures) -> bool:
        """Whether a candidate is not too stale."""
        return (self.staleness_mean is None or figures.staleness_mean <= self.staleness_mean) and (
            self.staleness_max is None or figures.staleness_max <= self.staleness_max
        )


@dataclass(frozen=True)
class Plan:
    """What was found."""

    chosen: Candidate
    figures: Mapping[Candidate, Figures]  # of all that were looked at thoroughly
    ruled_out: Mapping[int, float]  # slots of a GPU that were not tried: groups per hour which they cannot exceed
    tried: int  # candidates in all

    @property
    def best(self) -> Figures:
        """Of the chosen one."""
        return self.figures[self.chosen]


# -- what to try -----------------------------------------------------------------------------------------------------
def cell_sizes(gpus: int, smallest: int, wanted: Sequence[int] | None = None) -> tuple[int, ...]:
    """GPUs of a cell: those wanted, or the powers of two up to 8, that divide the GPUs and are not too small.

    Raises:
        UserError: there is none.
    """
    sizes = sorted(set(wanted)) if wanted else [2**power for power in range(4) if 2**power <= LARGEST_CELL]
    fitting = tuple(size for size in sizes if smallest <= size <= gpus and gpus % size == 0)
    if not fitting:
        raise UserError(
            f"no cell size fits: of {', '.join(map(str, sizes))} GPUs to a cell none divides {gpus} and is at least "
            f"{smallest} (--min-gpus-per-cell); give --gpus-per-cell, or another number of --gpus"
        )
    return fitting


def batch_sizes(gpus: int, slots_per_gpu: Sequence[int], group_size: int) -> tuple[int, ...]:
    """Groups of a batch: powers of two, from half of what keeps the fewest slots busy to twice what keeps the most."""
    lowest = max(1.0, gpus * min(slots_per_gpu) / group_size / 2)
    highest = max(1.0, gpus * max(slots_per_gpu) / group_size * 2)
    sizes = [_power_of_two(lowest)]
    while sizes[-1] < _power_of_two(highest):
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


def _power_of_two(value: float) -> int:
    """The nearest one, by its logarithm."""
    power = 1
    while power * 2**0.5 < value:
        power *= 2
    return power


# -- the search ------------------------------------------------------------------------------------------------------
def search(choices: Choices, bound: Callable[[int], float], evaluate: Evaluate, limits: Limits) -> Plan:
    """Find the candidate to use.

    Args:
        choices: what there is.
        bound: groups per hour that no candidate with so many slots to a GPU exceeds; those are not tried for which it
            is below what another number of slots was seen to reach.
        evaluate: looks at candidates.
        limits: what is accepted.

    Raises:
        UserError: no candidate is within the limits.
    """
    rough: dict[Candidate, Figures] = {}
    ruled_out: dict[int, float] = {}
    for slots in sorted(choices.slots_per_gpu, key=bound, reverse=True):
        reached = max((f.groups_per_hour for f in rough.values() if limits.keeps(f)), default=0.0)
        if bound(slots) < reached * (1 - limits.tolerance):
            ruled_out[slots] = bound(slots)
            continue
        candidates = choices.candidates(slots)
        rough |= zip(candidates, evaluate(candidates, False), strict=True)
    fine: dict[Candidate, Figures] = {}
    waiting = sorted((c for c in rough if limits.keeps(rough[c])), key=lambda c: (-rough[c].groups_per_hour, c))
    while waiting:
        # The fastest ones, and among those that may be fast enough the one that would be preferred.
        first = choose({c: rough[c] for c in waiting}, replace(limits, tolerance=min(0.9, 2 * limits.tolerance + 0.02)))
        batch = [first, *(c for c in waiting if c != first)][:FINALISTS]
        waiting = [c for c in waiting if c not in batch]
        while batch:
            fine |= zip(batch, evaluate(batch, True), strict=True)
            chosen = choose(fine, limits)
            near = [] if chosen is None else choices.neighbours(chosen)
            batch = [c for c in near if c not in fine and c.slots_per_gpu not in ruled_out]
        if chosen is not None:
            return Plan(chosen, fine, ruled_out, len(rough))
    least = min((fine or rough).items(), key=lambda item: (item[1].staleness_mean, item[1].staleness_max, item[0]))[1]
    raise UserError(
        f"nothing that was tried is within the bound on staleness; the least stale has {least.staleness_mean:.2f} "
        f"versions in the mean and {least.staleness_max} at the most: raise --max-staleness or --mean-staleness, or "
        "try a smaller --lookahead"
    )


def choose(figures: Mapping[Candidate, Figures], limits: Limits) -> Candidate | None:
    """The candidate to use; None where none keeps the limits."""
    kept = {candidate: one for candidate, one in figures.items() if limits.keeps(one)}
    if not kept:
        return None
    fastest = max(one.groups_per_hour for one in kept.values())
    enough = [c for c, one in kept.items() if one.groups_per_hour >= fastest * (1 - limits.tolerance)]
    return min(enough, key=lambda c: _preference(c, kept[c]))


def _preference(candidate: Candidate, figures: Figures) -> tuple[Any, ...]:
    return (
        round(figures.staleness_mean / STALENESS_STEP),
        candidate.batch_groups,
        candidate.slots_per_gpu,
        candidate.gpus_per_cell,
        candidate.lookahead,
        -figures.groups_per_hour,
    )


def near_balance(cells: int, rollout_share: float) -> list[int]:
    """Rollout cells of fixed splits worth trying: all where there are few, otherwise those around the share of work."""
    if cells <= 8:
        return list(range(1, cells))
    middle, around = round(cells * rollout_share), max(2, cells // 8)
    step = max(1, around // 4)
    return [split for split in range(middle - around, middle + around + 1, step) if 0 < split < cells]


# -- in words --------------------------------------------------------------------------------------------------------
def reasons(plan: Plan, choices: Choices, limits: Limits) -> list[str]:
    """Why the chosen one: against the fastest, and then thing by thing against what is one step away."""
    chosen = plan.chosen
    fastest = max(one.groups_per_hour for one in plan.figures.values() if limits.keeps(one))
    things = (
        ("lookahead", f"lookahead {chosen.lookahead:g}", "{:g}"),
        ("batch_groups", f"batches of {words.count(chosen.batch_groups, 'group')}", "{}"),
        ("gpus_per_cell", f"cells of {words.count(chosen.gpus_per_cell, 'GPU')}", "{}"),
        ("slots_per_gpu", f"{words.count(chosen.slots_per_gpu, 'slot')} to a GPU", "{}"),
    )
    lines = [_headline(plan.best, fastest, limits)]
    for thing, what, shape in things:
        parts = [
            f"{shape.format(getattr(other, thing))} {_against(plan.figures[other], plan.best, fastest, limits)}"
            for other in sorted(choices.neighbours(chosen))
            if getattr(other, thing) != getattr(chosen, thing) and other in plan.figures
        ]
        if thing == "slots_per_gpu":
            parts += [
                f"{slots} cannot exceed {bound:.1f} groups an hour even if no GPU ever idled"
                for slots, bound in sorted(plan.ruled_out.items())
            ]
        tried = getattr(choices, thing)
        if thing in ("batch_groups", "slots_per_gpu") and getattr(chosen, thing) == tried[-1]:
            parts.append("more was not tried")
        lines.append(f"{what}: " + ("; ".join(parts) if parts else "nothing else was tried"))
    return lines


def _headline(best: Figures, fastest: float, limits: Limits) -> str:
    rate = f"{best.groups_per_hour:.1f} groups an hour at a staleness of {_stale(best)}"
    if best.dropped:
        rate += f", {100 * best.dropped:.1f} groups dropped as too stale for every 100 trained"
    behind = 100 * (1 - best.groups_per_hour / fastest)
    if behind < 0.05:
        return f"{rate}: nothing that was tried is faster"
    return (
        f"{rate}: the fastest trains {fastest:.1f}; of those within {100 * limits.tolerance:g} % of it, the least stale"
    )


def _against(other: Figures, chosen: Figures, fastest: float, limits: Limits) -> str:
    """What taking another one would change."""
    percent = 100 * (other.groups_per_hour / chosen.groups_per_hour - 1)
    speed = "would be as fast" if abs(percent) < 0.5 else f"would be {abs(percent):.0f} % {_faster(percent)}"
    if not limits.keeps(other):
        return f"{speed} and too stale ({_stale(other)})"
    now, then = chosen.staleness_mean, other.staleness_mean
    if abs(then - now) < STALENESS_STEP:
        return speed
    behind = 1 - other.groups_per_hour / fastest
    if then < now and limits.tolerance < behind and percent > -100 * limits.tolerance:
        speed += f", {100 * behind:.1f} % behind the fastest,"
    if then < now or now < STALENESS_STEP:
        return f"{speed} with a staleness of {then:.2f} in place of {now:.2f}"
    return f"{speed} at {then / now:.1f} x the staleness"


def _faster(percent: float) -> str:
    return "faster" if percent > 0 else "slower"


def _stale(figures: Figures) -> str:
    return f"{figures.staleness_mean:.2f} versions in the mean, {figures.staleness_max} at the most"


# -- what to configure -----------------------------------------------------------------------------------------------
def configuration(plan: Plan, gpus: int, group_size: int, limits: Limits) -> dict[str, dict[str, Any]]:
    """The sections of a configuration that the plan decides.

    `train.max_staleness` is the bound that was asked for, or one version more than any group had: what is older is
    dropped, and has been rolled out for nothing.
    """
    chosen = plan.chosen
    cells = gpus // chosen.gpus_per_cell
    hosts = -(-cells * chosen.slots // HOST_EXECUTIONS)
    seen = plan.best.staleness_max + 1 if limits.staleness_max is None else limits.staleness_max
    sections: dict[str, dict[str, Any]] = {
        "cells": {"count": cells, "slots": chosen.slots, "gpus": chosen.gpus_per_cell},
        "scheduler": {
            "batch_groups": chosen.batch_groups,
            "group_size": group_size,
            "lookahead": chosen.lookahead,
        },
        "train": {"max_staleness": max(seen, math.ceil(chosen.lookahead))},
    }
    if hosts > 1:
        sections["hosts"] = {"count": hosts}
    return sections


def shortlist(plan: Plan, rows: int = 8) -> list[Candidate]:
    """The fastest of those that were looked at thoroughly, and the chosen one, fastest first."""
    top = sorted(plan.figures, key=lambda c: (-plan.figures[c].groups_per_hour, c))[:rows]
    if plan.chosen not in top:
        top[-1] = plan.chosen
    return top
