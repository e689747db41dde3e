"""Elastic beside the best fixed streaming split on workloads that change: no split is right all the time.

Durations are those of a trace of real agents, scaled. `growing`: the mean rollout grows eightfold over 24 batches;
`phases`: four batches with a mean of 500 s, four with one of 2,400 s, and so on. A group's training work stays the
same, half of the mean rollout work. All policies see the same groups in the same order.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from _common import BATCHES, TRACES, WORKERS, Shape, keep, label, parser, scenario, shape_of, shown
from rich.console import Console
from rich.table import Table

from gyre.simulate.command import compared
from gyre.simulate.trace import load
from gyre.simulate.workload import Entry, Trace, shuffled

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
    asked = parser(__doc__)
    asked.add_argument("--seeds", type=int, default=5)
    asked.add_argument("--lookahead", default="0.25,1")
    asked.add_argument("--shape", type=shape_of, default="8,4,16", help="cells, slots, groups of a batch")
    options = asked.parse_args()
    seeds, lookaheads, traces = options.seeds, [float(word) for word in options.lookahead.split(",")], TRACES
    if options.quick:
        seeds, lookaheads, traces = 1, lookaheads[:1], TRACES[:1]
    table = Table(title=shown(options.shape), title_justify="left", box=None)
    for name in ("trace", "workload", "lookahead", "best split R", *(f"x {other}" for other in POLICIES[1:])):
        table.add_column(name)
    table.add_column("staleness: elastic")
    table.add_column("async-stream")
    kept = []
    for path in traces:
        for kind in ("growing", "phases"):
            for lookahead in lookaheads:
                figures = measured(path, kind, lookahead, options.shape, seeds)
                kept.append({"trace": path.stem, "workload": kind, "lookahead": lookahead, **figures})
                table.add_row(
                    label(path),
                    kind,
                    f"{lookahead:g}",
                    ", ".join(map(str, figures["splits"])),
                    *(f"{figures['times'][name]:.2f}" for name in POLICIES[1:]),
                    *(f"{figures['staleness'][name]:.2f}" for name in ("elastic", "async-stream")),
                )
    Console(highlight=False, width=150).print(table)
    keep(options.json, {"shape": options.shape, "seeds": seeds, "rows": kept})


def measured(path: Path, kind: str, lookahead: float, shape: Shape, seeds: int) -> dict[str, Any]:
    """Times as long as elastic, mean staleness, and the best splits of all seeds."""
    given = scenario(shape, lookahead, in_order=True)
    rows = []
    for seed in range(seeds):
        trace = drifting(load(path), kind, shape[2], seed)
        rows.append(compared(given, trace, POLICIES, 1, seed, WORKERS))
    total = {name: sum(row[name]["makespan_s"] for row in rows) for name in POLICIES}
    return {
        "splits": sorted({row["async-stream"]["rollout_cells"] for row in rows}),
        "times": {name: total[name] / total["elastic"] for name in POLICIES},
        "staleness": {name: sum(row[name]["staleness_mean"] for row in rows) / seeds for name in POLICIES},
    }


if __name__ == "__main__":
    main()
