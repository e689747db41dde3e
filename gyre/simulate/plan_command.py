"""The command `plan`: what the options ask for, the simulations over processes, and the plan as a person reads it."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from gyre import words
from gyre.errors import UserError
from gyre.outputs import distinct, write
from gyre.simulate import plan, pool
from gyre.simulate.candidate import Candidate, Figures, Workload, batches_of, mean, measure
from gyre.simulate.options import (
    MOST,
    MOST_EXECUTIONS,
    MOST_TOGETHER,
    dashed,
    finite,
    switch,
    train_ratio,
    whole,
)
from gyre.simulate.plan import FINALISTS, Choices, Limits, Plan
from gyre.simulate.trace import load
from gyre.simulate.workload import Trace


@dataclass(frozen=True)
class Job:
    """One simulation."""

    candidate: Candidate
    groups: int
    repeat: int
    variant: str = "elastic"
    rollout_cells: int | None = None


@dataclass(frozen=True)
class Bench:
    """What all simulations of a plan share."""

    workload: Workload
    gpus: int
    switch: tuple[float, float]
    seed: int
    max_staleness: int | None = None


def run(options: argparse.Namespace) -> int:
    """Plan, and print and write what was found; returns the exit code."""
    trace = load(options.trace)
    limits = limits_of(options)
    choices = choices_of(options, trace)
    bench = bench_of(options, trace)
    bearable(choices, trace, options.updates, options.repeats)
    distinct({"--trace": options.trace}, {"--json": options.json})
    tester = _Tester(bench, choices, options, sys.stderr.isatty())
    found = plan.search(choices, lambda slots: bench.workload.bound(bench.gpus, slots), tester.evaluate, limits)
    split = tester.fixed_split(found.chosen)
    sections = plan.configuration(found, bench.gpus, trace.size, limits)
    why = [*plan.reasons(found, choices, limits), _split_line(split, found)]
    _print(options, trace, bench, found, why, sections)
    if options.json:
        report = _report(options, bench, found, why, sections, split)
        write(options.json, json.dumps(report, indent=2, allow_nan=False) + "\n")
    return 0


# -- what was asked for ----------------------------------------------------------------------------------------------
def limits_of(options: argparse.Namespace) -> Limits:
    """What the user accepts.

    Raises:
        UserError: a number makes no sense; it says which.
    """
    if options.max_staleness is not None and options.max_staleness < 0:
        raise UserError(f"--max-staleness is {options.max_staleness}; it must be at least 0 policy versions")
    if options.mean_staleness is not None:
        finite("mean_staleness", options.mean_staleness)
    if not 0 <= options.tolerance <= 0.5:
        raise UserError(f"--tolerance is {options.tolerance:g}; it must be at least 0 and at most 0.5")
    return Limits(options.mean_staleness, options.max_staleness, options.tolerance)


def choices_of(options: argparse.Namespace, trace: Trace) -> Choices:
    """What is to be tried.

    Raises:
        UserError: a list or a number makes no sense, or no cell size fits.
    """
    for name in ("gpus", "min_gpus_per_cell", "trace_slots", "trace_gpus", "updates", "repeats", "workers"):
        whole(name, getattr(options, name))
    wanted = _wholes("gpus_per_cell", options.gpus_per_cell)
    sizes = plan.cell_sizes(options.gpus, options.min_gpus_per_cell, wanted)
    slots = _wholes("slots", options.slots)
    batches = _wholes("batch_groups", options.batch_groups) or plan.batch_sizes(options.gpus, slots, trace.size)
    lookaheads = _numbers("lookahead", options.lookahead, float)
    for value in lookaheads:
        if not 0 <= value <= 16:
            raise UserError(f"--lookahead has {value:g}; each is in batches, at least 0 and at most 16")
    if options.max_staleness is not None:  # a run whose bound is below its lookahead is refused
        lookaheads = tuple(value for value in lookaheads if value <= options.max_staleness)
        if not lookaheads:
            raise UserError(
                f"--max-staleness is {options.max_staleness}, below every --lookahead; give a smaller lookahead too"
            )
    return Choices(sizes, slots, batches, lookaheads)


def bench_of(options: argparse.Namespace, trace: Trace) -> Bench:
    """What all simulations share.

    Raises:
        UserError: a number makes no sense, or the trace does not say how long training takes and no option does.
    """
    finite("slowdown", options.slowdown)
    ratio = train_ratio(options.train_ratio, trace)
    if not trace.mean_rollout_s:
        raise UserError(f"no execution of the trace {trace.name} takes any time; there is nothing to plan for")
    workload = Workload.of(trace, options.slowdown, options.trace_slots, options.trace_gpus, ratio)
    return Bench(workload, options.gpus, switch(options.switch), options.seed, options.max_staleness)


def bearable(choices: Choices, trace: Trace, updates: int, repeats: int) -> None:
    """Refuse what would take days.

    Raises:
        UserError: there are too many executions to simulate.
    """
    largest = choices.batch_groups[-1]
    each = [
        [batches_of(batch, lookahead, groups) * batch * trace.size for groups in (largest, largest * updates)]
        for batch in choices.batch_groups
        for lookahead in choices.lookahead
    ]
    rough, fine = (max(executions) for executions in zip(*each, strict=True))
    if fine > MOST_EXECUTIONS:
        raise UserError(
            f"a run of {updates} batches of {largest} groups of {trace.size}, and those before it, has {fine:,} "
            f"executions; at most {MOST_EXECUTIONS:,} are simulated, so give fewer --updates, or smaller --batch-groups"
        )
    tried = len(each) * len(choices.gpus_per_cell) * len(choices.slots_per_gpu)
    together = tried * rough + FINALISTS * repeats * fine
    if together > MOST_TOGETHER:
        raise UserError(
            f"{tried:,} divisions, with {FINALISTS} of them simulated {words.count(repeats, 'time')} more, have up to "
            f"{together:,} executions, which takes too long; give fewer things to try, or fewer --repeats"
        )


def _wholes(name: str, text: str | None) -> tuple[int, ...]:
    """A list of numbers of at least 1, as an option has it; empty where it is not given."""
    if text is None:
        return ()
    values = _numbers(dashed(name).removeprefix("--"), text, int)
    for value in values:
        if not 1 <= value <= MOST[name]:
            raise UserError(f"{dashed(name)} has {value}; each must be at least 1 and at most {MOST[name]}")
    return values


def _numbers(name: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        return tuple(sorted({kind(word) for word in text.split(",")}))
    except ValueError as error:
        what = "whole numbers" if kind is int else "numbers"
        raise UserError(f"--{name} is {text!r}; write {what} with commas between them") from error


# -- the work --------------------------------------------------------------------------------------------------------
class _Tester:
    """Simulates candidates, every one over the same groups in the same orders."""

    def __init__(self, bench: Bench, choices: Choices, options: argparse.Namespace, show: bool) -> None:
        self._bench = bench
        self._choices = choices
        self._workers = options.workers
        self._repeats = options.repeats
        self._rough = choices.batch_groups[-1]
        self._fine = choices.batch_groups[-1] * options.updates
        self._show = show

    def evaluate(self, candidates: Sequence[Candidate], thoroughly: bool) -> list[Figures]:
        """The figures of candidates, after one short run or several long ones."""
        groups, repeats = (self._fine, self._repeats) if thoroughly else (self._rough, 1)
        return self._means([Job(candidate, groups, repeat) for candidate in candidates for repeat in range(repeats)])

    def fixed_split(self, chosen: Candidate) -> dict[str, Any] | None:
        """The best fixed split with streaming of the same GPUs, batches and lookahead; None where there is one cell."""
        bench, sizes = self._bench, self._choices.gpus_per_cell
        size = max((s for s in sizes if s <= chosen.gpus_per_cell and bench.gpus // s > 1), default=None)
        if size is None:
            return None
        candidate = Candidate(size, chosen.slots_per_gpu, chosen.batch_groups, chosen.lookahead)
        cells = bench.gpus // size
        everything = bench.workload.mean_gpu_seconds(chosen.slots_per_gpu)
        training = sum(e.train_s or 0.0 for group in bench.workload.trace.groups for e in group)
        share = 1 - training / len(bench.workload.trace.groups) / everything
        tries = plan.near_balance(cells, share)
        jobs = [Job(candidate, self._fine, r, "async-stream", split) for split in tries for r in range(self._repeats)]
        figures = dict(zip(tries, self._means(jobs), strict=True))
        best = max(tries, key=lambda split: (figures[split].groups_per_hour, split))
        return {"cells": cells, "gpus_per_cell": size, "rollout_cells": best, **asdict(figures[best])}

    def _means(self, jobs: list[Job]) -> list[Figures]:
        """Of jobs that differ in the repeat, one after the other."""
        by_candidate: dict[tuple[Candidate, int | None], list[Figures]] = {}
        # Long runs first, so that no process works alone at the end.
        order = sorted(jobs, key=lambda job: -job.candidate.batch_groups * (1 + job.candidate.lookahead))
        ran = pool.watched(_one, self._bench, order, self._workers, self._show)
        results = dict(zip(order, ran, strict=True))
        for job in jobs:
            by_candidate.setdefault((job.candidate, job.rollout_cells), []).append(results[job])
        return [mean(figures) for figures in by_candidate.values()]


def _one(bench: Bench, job: Job) -> Figures:
    chance = random.Random(f"{bench.seed}/{job.repeat}")
    return measure(
        bench.workload,
        bench.gpus,
        bench.switch,
        job.candidate,
        job.groups,
        chance,
        job.variant,
        job.rollout_cells,
        bench.max_staleness,
    )


# -- what is shown ---------------------------------------------------------------------------------------------------
def _split_line(split: dict[str, Any] | None, found: Plan) -> str:
    if split is None:
        return "a fixed split: there is one cell, which cannot be split"
    times = found.best.groups_per_hour / split["groups_per_hour"]
    return (
        f"a fixed split of the same GPUs, {split['rollout_cells']} of {split['cells']} cells rolling out and the rest "
        f"training from the first ready group on: {split['groups_per_hour']:.1f} groups an hour at a staleness of "
        f"{split['staleness_mean']:.2f}; moving cells trains {times:.2f} x as much"
    )


def _print(
    options: argparse.Namespace, trace: Trace, bench: Bench, found: Plan, why: list[str], sections: dict[str, Any]
) -> None:
    console = Console(highlight=False)
    say = lambda text="": console.print(text, markup=False, soft_wrap=True)  # noqa: E731
    chosen, cells = found.chosen, bench.gpus // found.chosen.gpus_per_cell
    say(f"{trace.name}: {len(trace.groups)} groups of {trace.size}, on {words.count(bench.gpus, 'GPU')}")
    say(_assumptions(options))
    say()
    console.print(_table(bench, found))
    say(f"\n{found.tried} divisions were tried, {len(found.figures)} of them thoroughly. Use the one marked *:")
    size, slots = words.count(chosen.gpus_per_cell, "GPU"), words.count(chosen.slots, "slot")
    say(f"{words.count(cells, 'cell')} of {size} and {slots}")
    for line in why:
        say(f"  {line}")
    say("\nIn the configuration:\n")
    say(yaml.safe_dump(sections, sort_keys=False).rstrip())


def _assumptions(options: argparse.Namespace) -> str:
    train = "as the trace says" if options.train_ratio is None else f"{options.train_ratio:g} of rollout's"
    return (
        f"assumed: durations are those at {options.trace_slots} executions to a GPU; every further one slows a GPU's "
        f"executions by {100 * options.slowdown:g} % of their speed alone; training work {train}; moves of "
        f"{options.switch} s; an engine of g GPUs has g times the slots at the same speed, and trains g times as fast"
    )


def _table(bench: Bench, found: Plan) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("")
    for name in ("cells", "GPUs", "slots", "batch", "lookahead", "groups/h", "x *", "of bound", "staleness", "max"):
        table.add_column(name, justify="right")
    for candidate in plan.shortlist(found):
        figures = found.figures[candidate]
        bound = bench.workload.bound(bench.gpus, candidate.slots_per_gpu)
        table.add_row(
            "*" if candidate == found.chosen else "",
            str(bench.gpus // candidate.gpus_per_cell),
            str(candidate.gpus_per_cell),
            str(candidate.slots),
            str(candidate.batch_groups),
            f"{candidate.lookahead:g}",
            f"{figures.groups_per_hour:.1f}",
            f"{figures.groups_per_hour / found.best.groups_per_hour:.3f}",
            f"{min(1.0, figures.groups_per_hour / bound):.2f}",
            f"{figures.staleness_mean:.2f}",
            str(figures.staleness_max),
            style="bold" if candidate == found.chosen else None,
        )
    return table


def _report(
    options: argparse.Namespace,
    bench: Bench,
    found: Plan,
    why: list[str],
    sections: dict[str, Any],
    split: dict[str, Any] | None,
) -> dict[str, Any]:
    def described(candidate: Candidate) -> dict[str, Any]:
        return {
            "cells": bench.gpus // candidate.gpus_per_cell,
            "slots": candidate.slots,
            **asdict(candidate),
            **asdict(found.figures[candidate]),
            "bound_groups_per_hour": bench.workload.bound(bench.gpus, candidate.slots_per_gpu),
        }

    assumed = (
        "slowdown",
        "trace_slots",
        "trace_gpus",
        "train_ratio",
        "switch",
        "tolerance",
        "updates",
        "repeats",
        "seed",
    )
    return {
        "trace": options.trace,
        "gpus": bench.gpus,
        "assumed": {name: getattr(options, name) for name in assumed},
        "limits": {"max_staleness": options.max_staleness, "mean_staleness": options.mean_staleness},
        "chosen": described(found.chosen),
        "reasons": why,
        "tried": found.tried,
        "thoroughly": [described(candidate) for candidate in plan.shortlist(found, len(found.figures))],
        "ruled_out": {str(slots): bound for slots, bound in found.ruled_out.items()},
        "fixed_split": split,
        "configuration": sections,
    }
