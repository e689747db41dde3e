"""Elastic beside the best fixed splits and colocation, in virtual time, on traces of real agents.

For every trace, shape and lookahead: how many times faster elastic is than each of the others at equal lookahead, what
it reaches of the ideal, and the mean staleness of each. Several seeds, each the mean over shuffles of the trace's
groups; all policies see the same ones. `--quick` is one shuffle on two shapes. With --json, figures that are in the
file already are not measured again, since the whole takes an hour; it is said how many of them are of other code of the
scheduler or the simulator than that which is here now.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _common import SHAPES, TRACES, WORKERS, Shape, code, keep, label, parser, scenario
from rich.console import Console
from rich.table import Table

from gyre.simulate.command import compared
from gyre.simulate.trace import load

OTHERS = ("async-stream", "async", "colocate", "plain")


class Kept:
    """Figures by what they are of, in a file or only in memory. Each says by which code it was found."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._code = code()
        self.used = self.others = 0  # figures of the file; those of them that other code found, or that do not say
        self._figures: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}

    def measure(
        self, trace: Path, shape: Shape, lookahead: float, seed: int, repeats: int, policies: list[str]
    ) -> dict[str, Any]:
        """The figures of these policies."""
        key = f"{trace.stem} {shape} {lookahead:g} {seed} {repeats}"
        known = self._figures.setdefault(key, {})
        missing = [policy for policy in policies if policy not in known]
        for policy in set(policies) - set(missing):
            self.used += 1
            self.others += known[policy].get("code") != self._code
        if missing:
            found = compared(scenario(shape, lookahead), load(trace), missing, repeats, seed, WORKERS)
            known |= {policy: {**figures, "code": self._code} for policy, figures in found.items()}
            keep(self._path, self._figures)
        return known


def spread(values: list[float], digits: int = 2) -> str:
    """The least and the greatest."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low}-{high}"


def main() -> None:
    """Measure, print, and keep what was measured."""
    asked = parser(__doc__)
    asked.add_argument("--seeds", type=int, default=5)
    asked.add_argument("--repeats", type=int, default=12)
    asked.add_argument("--lookahead", default="0.25,1")
    asked.add_argument("--others", default=",".join(OTHERS), help="what elastic is compared with")
    options = asked.parse_args()
    seeds, repeats, shapes = (1, 1, SHAPES[:2]) if options.quick else (options.seeds, options.repeats, SHAPES)
    others, kept = options.others.split(","), Kept(options.json)
    console = Console(highlight=False, width=150)
    for lookahead in map(float, options.lookahead.split(",")):
        table = Table(title=f"lookahead {lookahead:g}", title_justify="left", box=None)
        for name in ("trace", "cells, slots, groups", "of ideal", "staleness", *(f"x {other}" for other in others)):
            table.add_column(name)
        table.add_column("staleness of these")
        for shape in shapes:
            for trace in TRACES:
                rows = [
                    kept.measure(trace, shape, lookahead, seed, repeats, ["elastic", *others]) for seed in range(seeds)
                ]
                ratios = [
                    spread([row[other]["makespan_s"] / row["elastic"]["makespan_s"] for row in rows])
                    for other in others
                ]
                table.add_row(
                    label(trace),
                    ", ".join(map(str, shape)),
                    spread([row["elastic"]["of_ideal"] for row in rows], 3),
                    spread([row["elastic"]["staleness_mean"] for row in rows]),
                    *ratios,
                    ", ".join(spread([row[other]["staleness_mean"] for row in rows]) for other in others),
                )
        console.print(table)
    if kept.others:
        console.print(
            f"{kept.others} of the {kept.used} figures that were kept in {options.json} are of another scheduler"
        )


if __name__ == "__main__":
    main()
