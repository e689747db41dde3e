"""Elastic beside the best fixed splits and colocation, in virtual time, on traces of real agents.

For every trace, shape and lookahead: how many times faster elastic is than each of the others at equal lookahead, what
it reaches of the ideal, and the mean staleness of each. Several seeds, each the mean over shuffles of the trace's
groups; all policies see the same ones. `--quick` is one seed with few shuffles.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gyre.simulate.command import compared
from gyre.simulate.compare import Scenario
from gyre.simulate.costs import Costs
from gyre.simulate.trace import load

TRACES = sorted((Path(__file__).parent / "traces").glob("*.jsonl"))
SHAPES = ((8, 4, 16), (4, 8, 16), (16, 8, 32))  # cells, slots, groups of a batch
OTHERS = ("async-stream", "async", "colocate", "plain")


def measure(trace: Path, shape: tuple[int, int, int], lookahead: float, seed: int, repeats: int, workers: int) -> Any:
    """The figures of all policies."""
    cells, slots, groups = shape
    scenario = Scenario(cells, slots, groups, 24, lookahead, 0.5, Costs(to_training_s=8.5, to_rollout_s=3.5))
    return compared(scenario, load(trace), ["elastic", *OTHERS], repeats, seed, workers)


def spread(values: list[float], digits: int = 2) -> str:
    """The least and the greatest."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low}-{high}"


def main() -> None:
    """Measure, print, and keep what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--lookahead", default="0.25,1")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    options = parser.parse_args()
    seeds, repeats = (1, 2) if options.quick else (options.seeds, options.repeats)
    console, kept = Console(highlight=False, width=150), []
    for lookahead in map(float, options.lookahead.split(",")):
        table = Table(title=f"lookahead {lookahead:g}", title_justify="left", box=None)
        for name in ("trace", "cells, slots, groups", "of ideal", "plain", *(f"x {other}" for other in OTHERS)):
            table.add_column(name)
        table.add_column("staleness: elastic")
        table.add_column("async-stream")
        for shape in SHAPES:
            for trace in TRACES:
                rows = [measure(trace, shape, lookahead, seed, repeats, options.workers) for seed in range(seeds)]
                kept += [
                    {"trace": trace.stem, "shape": shape, "lookahead": lookahead, "seed": seed, "policies": row}
                    for seed, row in enumerate(rows)
                ]
                ratios = {o: [r[o]["makespan_s"] / r["elastic"]["makespan_s"] for r in rows] for o in OTHERS}
                table.add_row(
                    trace.stem.removeprefix("terminal-bench-"),
                    ", ".join(map(str, shape)),
                    spread([r["elastic"]["of_ideal"] for r in rows], 3),
                    spread([r["plain"]["of_ideal"] for r in rows], 3),
                    *(spread(ratios[other]) for other in OTHERS),
                    spread([r["elastic"]["staleness_mean"] for r in rows]),
                    spread([r["async-stream"]["staleness_mean"] for r in rows]),
                )
                if options.json:
                    options.json.write_text(json.dumps(kept, indent=1))
        console.print(table)


if __name__ == "__main__":
    main()
