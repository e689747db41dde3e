"""What each switch of the elastic policy gains: with all of them against all but one, and plain against only one.

Per shape, the mean over the traces: the time without the switch over the time with it (more than 1: it gains), and the
staleness. The last lines are of the lookahead that adapts, which gives up a little time for less staleness.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gyre.simulate.compare import VARIANTS, Scenario, Variant, simulate, summary, without
from gyre.simulate.costs import Costs
from gyre.simulate.trace import load

TRACES = sorted((Path(__file__).parent / "traces").glob("*.jsonl"))
SHAPES = ((8, 4, 16), (4, 8, 16), (16, 8, 32))
SWITCHES = ("gain", "at_once", "stay", "give_back", "longest_first")


def only(switch: str) -> Variant:
    """The plain policy with one switch on."""
    plain = VARIANTS["plain"]
    if switch == "longest_first":
        return replace(plain, longest_first=True)
    changes = {"moves_at_once": 1_000_000} if switch == "at_once" else {switch: True}
    return replace(plain, policy=replace(plain.policy, **changes))


def measure(variant: Variant, lookahead: float, repeats: int) -> list[tuple[float, float]]:
    """Per shape: the total time over traces and repeats, and the mean staleness."""
    figures = []
    for cells, slots, groups in SHAPES:
        scenario = Scenario(cells, slots, groups, 24, lookahead, 0.5, Costs(to_training_s=8.5, to_rollout_s=3.5))
        rows = [
            summary([simulate(scenario, load(path), variant, random.Random(f"0/{i}")) for i in range(repeats)])
            for path in TRACES
        ]
        # Relative to the ideal, so that every trace counts alike.
        figures.append(
            (sum(1 / row["of_ideal"] for row in rows), sum(row["staleness_mean"] for row in rows) / len(rows))
        )
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lookahead", type=float, default=0.25)
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args()
    table = Table(title=f"lookahead {options.lookahead:g}", title_justify="left", box=None)
    for name in ("switch", *(f"{what} {shape}" for shape in map(str, SHAPES) for what in ("x without", "x plain"))):
        table.add_column(name)
    whole, plain = (measure(VARIANTS[name], options.lookahead, options.repeats) for name in ("elastic", "plain"))
    table.add_row("all", *(f for a, b in zip(whole, plain, strict=True) for f in ("", f"{b[0] / a[0]:.3f}")))
    for switch in SWITCHES:
        less = measure(without(VARIANTS["elastic"], switch), options.lookahead, options.repeats)
        alone = measure(only(switch), options.lookahead, options.repeats)
        cells = [f"{x[0] / w[0]:.3f} {p[0] / o[0]:.3f}" for x, w, p, o in zip(less, whole, plain, alone, strict=True)]
        table.add_row(switch, *(figure for cell in cells for figure in cell.split()))
    console = Console(highlight=False, width=140)
    console.print(table)
    adapted = measure(replace(VARIANTS["elastic"], adapt_lookahead=True), 1.0, options.repeats)
    full = measure(VARIANTS["elastic"], 1.0, options.repeats)
    for shape, now, then in zip(SHAPES, adapted, full, strict=True):
        console.print(
            f"{shape}, lookahead up to 1: adapted, {then[0] / now[0]:.3f} x the speed at a staleness of {now[1]:.2f}, "
            f"against {then[1]:.2f}"
        )


if __name__ == "__main__":
    main()
