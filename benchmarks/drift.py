"""Elastic beside the best fixed streaming split on workloads that change: no split is right all the time.

Durations are those of a trace of real agents, scaled. `growing`: the mean rollout grows eightfold over 24 batches;
`phases`: four batches with a mean of 500 s, four with one of 2,400 s, and so on. A group's training work stays the
same, half of the mean rollout work. All policies see the same groups in the same order.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gyre.simulate.command import compared
from gyre.simulate.compare import Scenario
from gyre.simulate.costs import Costs
from gyre.simulate.trace import load
from gyre.simulate.workload import Entry, Trace, shuffled

TRACES = sorted((Path(__file__).parent / "traces").glob("*.jsonl"))
BATCHES = 24
POLICIES = ["elastic", "async-stream", "async", "colocate", "plain"]


def mean_of(kind: str, batch: int) -> float:
    """Mean seconds of an execution in a batch."""
    if kind == "growing":
        return 200.0 * 8.0 ** (batch / (BATCHES - 1))
    return 500.0 if batch // 4 % 2 == 0 else 2400.0


def drifting(trace: Trace, kind: str, groups: int, seed: int) -> Trace:
    """A trace whose groups come in this order, `groups` a batch."""
    scaled = []
    for number, group in enumerate(shuffled(trace, BATCHES * groups, random.Random(seed))):
        factor = mean_of(kind, number // groups) / trace.mean_rollout_s
        scaled.append(tuple(Entry(entry.rollout_s * factor) for entry in group))
    return Trace(f"{trace.name}, {kind}", tuple(scaled))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lookahead", default="0.25,1")
    parser.add_argument("--shape", default="8,4,16", help="cells, slots, groups of a batch")
    options = parser.parse_args()
    cells, slots, groups = map(int, options.shape.split(","))
    table = Table(title=f"{cells} cells, {slots} slots, {groups} groups", title_justify="left", box=None)
    for name in ("trace", "workload", "lookahead", "best split R", *(f"x {other}" for other in POLICIES[1:])):
        table.add_column(name)
    table.add_column("staleness: elastic")
    table.add_column("async-stream")
    for path in TRACES:
        for kind in ("growing", "phases"):
            for lookahead in map(float, options.lookahead.split(",")):
                table.add_row(*_row(path, kind, lookahead, cells, slots, groups, options.seeds))
    Console(highlight=False, width=150).print(table)


def _row(path: Path, kind: str, lookahead: float, cells: int, slots: int, groups: int, seeds: int) -> list[str]:
    scenario = Scenario(
        cells, slots, groups, BATCHES, lookahead, 0.5, Costs(to_training_s=8.5, to_rollout_s=3.5), in_order=True
    )
    rows = []
    for seed in range(seeds):
        trace = drifting(load(path), kind, groups, seed)
        rows.append(compared(scenario, trace, POLICIES, 1, seed, os.cpu_count() or 1))
    total = {name: sum(row[name]["makespan_s"] for row in rows) for name in POLICIES}
    splits = sorted({row["async-stream"]["rollout_cells"] for row in rows})
    stale = {name: sum(row[name]["staleness_mean"] for row in rows) / seeds for name in POLICIES}
    return [
        path.stem.removeprefix("terminal-bench-"),
        kind,
        f"{lookahead:g}",
        ", ".join(map(str, splits)),
        *(f"{total[name] / total['elastic']:.2f}" for name in POLICIES[1:]),
        f"{stale['elastic']:.2f}",
        f"{stale['async-stream']:.2f}",
    ]


if __name__ == "__main__":
    main()
