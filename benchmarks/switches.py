"""What each switch of the elastic policy gains: with all of them against all but one, and plain against only one.

Per shape, over all traces: the time without the switch over the time with it (more than 1: it gains), and the
staleness. The last lines are of the lookahead that adapts, which gives up a little time for less staleness; they start
from one batch of lookahead, whatever the table's is, since little of it is not worth taking back.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from _common import SHAPES, TRACES, Shape, keep, parser, scenario, shown
from rich.console import Console
from rich.table import Table

from gyre.simulate.compare import VARIANTS, Variant, simulate, summary, switched
from gyre.simulate.trace import load

#: Batches of lookahead from which the one that adapts starts.
ADAPTED_FROM = 1.0
SWITCHES = ("gain", "at_once", "stay", "give_back", "longest_first")


def measure(
    variant: Variant, shapes: list[Shape], traces: list[Path], lookahead: float, repeats: int
) -> list[tuple[float, float]]:
    """Per shape: the total time over traces and repeats, and the mean staleness."""
    figures = []
    for shape in shapes:
        given = scenario(shape, lookahead)
        rows = [
            summary([simulate(given, load(path), variant, random.Random(f"0/{i}")) for i in range(repeats)])
            for path in traces
        ]
        # Relative to the ideal, so that every trace counts alike.
        figures.append(
            (sum(1 / row["of_ideal"] for row in rows), sum(row["staleness_mean"] for row in rows) / len(rows))
        )
    return figures


def main() -> None:
    """Measure and print."""
    asked = parser(__doc__)
    asked.add_argument("--lookahead", type=float, default=0.25)
    asked.add_argument("--repeats", type=int, default=6)
    options = asked.parse_args()
    shapes, repeats = (list(SHAPES[:2]), 1) if options.quick else (list(SHAPES), options.repeats)

    def of(variant: Variant, lookahead: float = options.lookahead) -> list[tuple[float, float]]:
        return measure(variant, shapes, TRACES, lookahead, repeats)

    table = Table(title=f"lookahead {options.lookahead:g}", title_justify="left", box=None)
    for name in ("switch", *(f"{what} {shape}" for shape in map(str, shapes) for what in ("x without", "x plain"))):
        table.add_column(name)
    elastic, plain = of(VARIANTS["elastic"]), of(VARIANTS["plain"])
    kept: dict[str, dict[str, list[float]]] = {"all": {"x plain": quotients(plain, elastic)}}
    for switch in SWITCHES:
        kept[switch] = {
            "x without": quotients(of(switched(VARIANTS["elastic"], switch, False)), elastic),
            "x plain": quotients(plain, of(switched(VARIANTS["plain"], switch, True))),
        }
    for name, columns in kept.items():
        pairs = zip(columns.get("x without", [None] * len(shapes)), columns["x plain"], strict=True)
        table.add_row(name, *("" if figure is None else f"{figure:.3f}" for pair in pairs for figure in pair))
    console = Console(highlight=False, width=140)
    console.print(table)
    adapted = of(replace(VARIANTS["elastic"], adapt_lookahead=True), ADAPTED_FROM)
    full = of(VARIANTS["elastic"], ADAPTED_FROM)
    for shape, speed, now, then in zip(shapes, quotients(full, adapted), adapted, full, strict=True):
        console.print(
            f"{shown(shape)}, lookahead up to {ADAPTED_FROM:g}: adapted, {speed:.3f} x the speed at a staleness of "
            f"{now[1]:.2f}, against {then[1]:.2f}"
        )
    about = {"shapes": shapes, "lookahead": options.lookahead, "repeats": repeats}
    about |= {"adapted": {"lookahead": ADAPTED_FROM, "time and staleness": adapted, "without": full}}
    keep(options.json, {**about, "switches": kept})


def quotients(longer: list[tuple[float, float]], shorter: list[tuple[float, float]]) -> list[float]:
    """Of times, per shape."""
    return [a[0] / b[0] for a, b in zip(longer, shorter, strict=True)]


if __name__ == "__main__":
    main()
