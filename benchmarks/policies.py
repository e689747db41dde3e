"""Elastic beside the best fixed splits and colocation, in virtual time, on traces of real agents.

For every trace, shape and lookahead: how many times faster elastic is than each of the others at equal lookahead, what
it reaches of the ideal, and the mean staleness of each. Several seeds, each the mean over shuffles of the trace's
groups; all policies see the same ones. `--quick` is one seed with few shuffles. With --json, figures that are in the
file already are not measured again: the whole takes an hour.
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


class Kept:
    """Figures by what they are of, in a file or only in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._figures: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}

    def measure(
        self, trace: Path, shape: tuple[int, int, int], lookahead: float, seed: int, repeats: int, policies: list[str]
    ) -> dict[str, Any]:
        """The figures of these policies."""
        key = f"{trace.stem} {shape} {lookahead:g} {seed} {repeats}"
        known = self._figures.setdefault(key, {})
        if missing := [policy for policy in policies if policy not in known]:
            cells, slots, groups = shape
            scenario = Scenario(cells, slots, groups, 24, lookahead, 0.5, Costs(to_training_s=8.5, to_rollout_s=3.5))
            known |= compared(scenario, load(trace), missing, repeats, seed, os.cpu_count() or 1)
            if self._path:
                self._path.write_text(json.dumps(self._figures, indent=1) + "\n")
        return known


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
    parser.add_argument("--others", default=",".join(OTHERS), help="what elastic is compared with")
    parser.add_argument("--json", type=Path, help="keep the figures here, and take from here what is there already")
    options = parser.parse_args()
    seeds, repeats = (1, 2) if options.quick else (options.seeds, options.repeats)
    others, kept = options.others.split(","), Kept(options.json)
    console = Console(highlight=False, width=150)
    for lookahead in map(float, options.lookahead.split(",")):
        table = Table(title=f"lookahead {lookahead:g}", title_justify="left", box=None)
        for name in ("trace", "cells, slots, groups", "of ideal", "staleness", *(f"x {other}" for other in others)):
            table.add_column(name)
        table.add_column("staleness of these")
        for shape in SHAPES:
            for trace in TRACES:
                rows = [
                    kept.measure(trace, shape, lookahead, seed, repeats, ["elastic", *others]) for seed in range(seeds)
                ]
                ratios = [
                    spread([row[other]["makespan_s"] / row["elastic"]["makespan_s"] for row in rows])
                    for other in others
                ]
                table.add_row(
                    trace.stem.removeprefix("terminal-bench-"),
                    ", ".join(map(str, shape)),
                    spread([row["elastic"]["of_ideal"] for row in rows], 3),
                    spread([row["elastic"]["staleness_mean"] for row in rows]),
                    *ratios,
                    ", ".join(spread([row[other]["staleness_mean"] for row in rows]) for other in others),
                )
        console.print(table)


if __name__ == "__main__":
    main()
