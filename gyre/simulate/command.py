"""The command `simulate`: policies compared on a trace, as a table, as JSON and as a page."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import defaultdict
from typing import Any

from rich.console import Console
from rich.table import Table

from gyre import timeline, timeline_page, words
from gyre.errors import UserError
from gyre.outputs import distinct, write
from gyre.simulate import compare, pool
from gyre.simulate.compare import VARIANTS, Result, Scenario
from gyre.simulate.costs import Costs
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
from gyre.simulate.trace import load
from gyre.simulate.workload import Trace

Job = tuple[str, int | None, int]  # policy, rollout cells, repeat


def run(options: argparse.Namespace) -> int:
    """Compare, and print and write what was asked for; returns the exit code."""
    trace = load(options.trace)
    scenario = scenario_of(options, trace)
    policies = policies_of(options, scenario)
    bearable(scenario, trace, policies, options.repeats)
    distinct({"--trace": options.trace}, {"--json": options.json, "--html": options.html})
    results = compared(scenario, trace, policies, options.repeats, options.seed, options.workers, sys.stderr.isatty())
    print(_title(scenario, trace, options.repeats))
    print(f"x: times as long as {policies[0]}; ideal, bound: what was reached of them; stale: mean policy versions")
    console, table = Console(highlight=False), _table(results, scenario)
    needed = console.measure(table, options=console.options.update(max_width=400)).maximum
    console.width = max(console.width, needed)  # no figure is cut, however narrow the window
    console.print(table)
    for line in fallen_short(results, scenario, options.repeats):
        print(line, file=sys.stderr)
    if options.json:
        report = {"trace": trace.name, "scenario": _described(scenario, options), "policies": results}
        write(options.json, json.dumps(report, indent=2, allow_nan=False) + "\n")
    if options.html:
        write(options.html, _page(scenario, trace, results, options.seed))
    return 0


# -- what was asked for ----------------------------------------------------------------------------------------------
def scenario_of(options: argparse.Namespace, trace: Trace) -> Scenario:
    """The scenario of the command line.

    Raises:
        UserError: a number makes no sense; it says which.
    """
    for name in ("cells", "slots", "batch_groups", "updates", "repeats", "workers"):
        whole(name, getattr(options, name))
    for name in ("lookahead", "slowdown", "supply_hold"):
        finite(name, getattr(options, name))
    if options.lookahead > 16:
        raise UserError(f"--lookahead is {options.lookahead:g}; it is in batches, and at most 16")
    if not 0 < options.supply_fraction <= 1:
        raise UserError(f"--supply-fraction is {options.supply_fraction:g}; it must be more than 0 and at most 1")
    to_training, to_rollout = switch(options.switch)
    return Scenario(
        cells=options.cells,
        slots=options.slots,
        batch_groups=options.batch_groups,
        updates=options.updates,
        lookahead=options.lookahead,
        train_ratio=train_ratio(options.train_ratio, trace),
        costs=_costs(options, to_training, to_rollout),
        supply_fraction=options.supply_fraction,
        supply_hold=options.supply_hold,
        in_order=options.in_order,
    )


def _costs(options: argparse.Namespace, to_training: float, to_rollout: float) -> Costs:
    for name in ("failed", "try_failed"):
        if not 0 <= getattr(options, name) < 1:
            raise UserError(f"{dashed(name)} is a probability; it must be at least 0 and less than 1")
    if options.timeout is not None and not (options.timeout > 0 and math.isfinite(options.timeout)):
        raise UserError(f"--timeout is {options.timeout:g}; it must be more than 0 seconds")
    if not 0 <= options.cell_failures <= MOST["cells"]:
        most = MOST["cells"]
        raise UserError(f"--cell-failures is {options.cell_failures}; it must be at least 0 and at most {most}")
    return Costs(
        to_training_s=to_training,
        to_rollout_s=to_rollout,
        slowdown=options.slowdown,
        failed=options.failed,
        try_failed=options.try_failed,
        timeout_s=options.timeout,
        cell_failures=options.cell_failures,
    )


def policies_of(options: argparse.Namespace, scenario: Scenario) -> list[str]:
    """The policies to compare.

    Raises:
        UserError: there is none of that name, or no cell is left to train.
    """
    policies = list(dict.fromkeys(name.strip() for name in options.policy.split(",")))
    for name in policies:
        if name not in VARIANTS:
            raise UserError(f"there is no policy {name!r}; there are {', '.join(VARIANTS)}")
        if VARIANTS[name].split and scenario.cells < 2:
            raise UserError(
                f"--cells is {scenario.cells}, which leaves no cell to train under a fixed split; take more cells, or "
                "--policy elastic,colocate"
            )
    return policies


def bearable(scenario: Scenario, trace: Trace, policies: list[str], repeats: int) -> None:
    """Refuse what would take days.

    Raises:
        UserError: there are too many executions to simulate.
    """
    executions = scenario.updates * scenario.batch_groups * trace.size
    if executions > MOST_EXECUTIONS:
        raise UserError(
            f"a run of {scenario.updates} batches of {scenario.batch_groups} groups of {trace.size} has "
            f"{executions:,} executions; at most {MOST_EXECUTIONS:,} are simulated, so give fewer --updates"
        )
    runs = repeats * sum(scenario.cells - 1 if VARIANTS[name].split else 1 for name in policies)
    if runs * executions > MOST_TOGETHER:
        raise UserError(
            f"{runs:,} runs of {executions:,} executions take too long; give fewer --repeats, or a --policy without "
            "async, which tries every split"
        )


# -- the work --------------------------------------------------------------------------------------------------------
def compared(
    scenario: Scenario,
    trace: Trace,
    policies: list[str],
    repeats: int,
    seed: int,
    workers: int = 1,
    show: bool = False,
) -> dict[str, dict[str, Any]]:
    """The figures of every policy. Repeat i of every policy and split sees the groups in the same order."""
    jobs: list[Job] = [
        (name, split, repeat)
        for name in policies
        for split in compare.splits(scenario, VARIANTS[name])
        for repeat in range(repeats)
    ]
    by_policy: dict[str, dict[int | None, list[Result]]] = {name: defaultdict(list) for name in policies}
    results = pool.watched(_job, (scenario, trace, seed), jobs, workers, show)
    for (name, split, _), result in zip(jobs, results, strict=True):
        by_policy[name][split].append(result)
    return {name: compare.best(by_split)[1] for name, by_split in by_policy.items()}


def _job(given: tuple[Scenario, Trace, int], job: Job) -> Result:
    scenario, trace, seed = given
    return _one(scenario, trace, job, seed)


def _one(scenario: Scenario, trace: Trace, job: Job, seed: int, record: Any = None) -> Result:
    name, split, repeat = job
    return compare.simulate(scenario, trace, VARIANTS[name], random.Random(f"{seed}/{repeat}"), split, record)


# -- what is shown ---------------------------------------------------------------------------------------------------
def _described(scenario: Scenario, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "cells": scenario.cells,
        "slots": scenario.slots,
        "batch_groups": scenario.batch_groups,
        "updates": scenario.updates,
        "lookahead": scenario.lookahead,
        "train_ratio": scenario.train_ratio,
        "switch": [scenario.costs.to_training_s, scenario.costs.to_rollout_s],
        "repeats": options.repeats,
        "seed": options.seed,
    }


def _name(policy: str, figures: dict[str, Any]) -> str:
    return f"{policy} (R={figures['rollout_cells']})" if "rollout_cells" in figures else policy


def _title(scenario: Scenario, trace: Trace, repeats: int) -> str:
    return (
        f"{trace.name}: {words.count(scenario.cells, 'cell')} of {words.count(scenario.slots, 'slot')}, "
        f"{scenario.updates} batches of {words.count(scenario.batch_groups, 'group')}, "
        f"lookahead {scenario.lookahead:g}, {words.count(repeats, 'repeat')}"
    )


def fallen_short(results: dict[str, dict[str, Any]], scenario: Scenario, repeats: int) -> list[str]:
    """A line for every policy that did not train in every repeat all that was asked."""
    groups = scenario.updates * scenario.batch_groups
    return [
        f"gyre: {_name(policy, figures)}: {figures['incomplete']} of {words.count(repeats, 'repeat')} trained less "
        f"than asked, as little as {figures['updates']:,} of {scenario.updates:,} batches and {figures['groups']:,} of "
        f"{groups:,} groups ({figures['why']}); these times compare with nothing"
        for policy, figures in results.items()
        if not figures["completed"]
    ]


def _table(results: dict[str, dict[str, Any]], scenario: Scenario) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("policy", no_wrap=True)
    short = not all(figures["completed"] for figures in results.values())
    trained = ("updates", "groups") if short else ()
    for name in ("R", "makespan", *trained, "x", "ideal", "bound", "stale", "max", "busy", "moves"):
        table.add_column(name, justify="right", no_wrap=True)
    first = next(iter(results.values()))
    for policy, figures in results.items():
        comparable = first["completed"] and figures["completed"] and first["makespan_s"]
        asked = {"updates": scenario.updates, "groups": scenario.updates * scenario.batch_groups}
        table.add_row(
            policy,
            str(figures.get("rollout_cells", "")),
            f"{figures['makespan_s']:,.0f} s",
            *(f"{figures[name]:,}/{asked[name]:,}" for name in trained),
            f"{figures['makespan_s'] / first['makespan_s']:.3f}" if comparable else "-",
            *("-" if figures[name] is None else f"{figures[name]:.3f}" for name in ("of_ideal", "of_bound")),
            f"{figures['staleness_mean']:.2f}",
            str(figures["staleness_max"]),
            f"{figures['busy_fraction']:.3f}",
            f"{figures['moves']:.0f}",
        )
    return table


def _page(scenario: Scenario, trace: Trace, results: dict[str, dict[str, Any]], seed: int) -> str:
    """The first repeat of every policy as a page."""
    runs = []
    for policy, figures in results.items():
        split = figures.get("rollout_cells")
        trainers = 0 if split is None else scenario.cells - split
        fold = timeline.Fold(scenario.slots, compare.ANY_VERSION, trainers)
        _one(scenario, trace, (policy, split, 0), seed, fold.apply)
        shown = {name: _shown(figures[name]) for name in ("makespan_s", "of_ideal", "of_bound", "busy_fraction")}
        shown |= {name: _shown(figures[name]) for name in ("staleness_mean", "staleness_max", "moves")}
        runs.append((_name(policy, figures), fold.timeline(), shown))
    return timeline_page.page(f"{trace.name}: {scenario.cells} cells of {scenario.slots} slots", runs)


def _shown(value: float | None) -> str:
    if value is None:
        return "not complete"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3f}"
