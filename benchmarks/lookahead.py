"""Throughput against staleness: elastic and the best fixed streaming split, from no lookahead to two batches.

Throughput is the fraction of the capacity bound, the mean over the traces. With --svg the curves are drawn as well.
"""

from __future__ import annotations

from pathlib import Path

from _common import TRACES, WORKERS, keep, parser, scenario, shape_of, shown
from rich.console import Console
from rich.table import Table

from gyre.simulate.command import compared
from gyre.simulate.trace import load

LOOKAHEADS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
POLICIES = ("elastic", "async-stream")
COLOURS = {"elastic": "#2563eb", "async-stream": "#d97706"}
Point = tuple[float, float, float]  # lookahead, mean staleness, fraction of the bound


def main() -> None:
    """Measure, print and draw."""
    asked = parser(__doc__)
    asked.add_argument("--shape", type=shape_of, default="8,4,16", help="cells, slots, groups of a batch")
    asked.add_argument("--repeats", type=int, default=6)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--svg", type=Path)
    options = asked.parse_args()
    repeats, lookaheads = (1, LOOKAHEADS[::2]) if options.quick else (options.repeats, LOOKAHEADS)
    curves: dict[str, list[Point]] = {policy: [] for policy in POLICIES}
    table = Table(title=shown(options.shape), title_justify="left", box=None)
    for name in ("lookahead", *(f"{policy}: {what}" for policy in POLICIES for what in ("of bound", "staleness"))):
        table.add_column(name, justify="right")
    for lookahead in lookaheads:
        given = scenario(options.shape, lookahead)
        rows = [compared(given, load(path), list(POLICIES), repeats, options.seed, WORKERS) for path in TRACES]
        cells = [f"{lookahead:g}"]
        for policy in POLICIES:
            stale, reached = (
                sum(row[policy][key] for row in rows) / len(rows) for key in ("staleness_mean", "of_bound")
            )
            curves[policy].append((lookahead, stale, reached))
            cells += [f"{reached:.3f}", f"{stale:.2f}"]
        table.add_row(*cells)
    Console(highlight=False, width=120).print(table)
    keep(options.json, {"shape": options.shape, "repeats": repeats, "curves": curves})
    if options.svg:
        options.svg.write_text(drawn(curves))


def drawn(curves: dict[str, list[Point]]) -> str:
    """The curves as an SVG; a point's label is its lookahead."""
    width, height, left, bottom = 640, 360, 56, 44
    low = min(point[2] for curve in curves.values() for point in curve)
    low = int(low * 20) / 20
    most = max(point[1] for curve in curves.values() for point in curve) * 1.05

    def at(point: Point) -> tuple[float, float]:
        x = left + point[1] / most * (width - left - 20)
        return round(x, 1), round(20 + (1 - point[2]) / (1 - low) * (height - 20 - bottom), 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tenth in range(round(low * 20), 21):
        y = at((0, 0, tenth / 20))[1]
        lines.append(f'<path d="M{left} {y}H{width - 20}" stroke="#e5e7eb"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{tenth / 20:.2f}</text>')
    for quarter in range(int(most * 4) + 1):
        x = at((0, quarter / 4, low))[0]
        lines.append(f'<text x="{x}" y="{height - bottom + 18}" text-anchor="middle">{quarter / 4:g}</text>')
    lines.append(f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">mean staleness, versions</text>')
    lines.append(f'<text x="{left}" y="12">throughput, of the capacity bound</text>')
    for number, (policy, curve) in enumerate(curves.items()):
        colour = COLOURS[policy]
        path = " ".join(f"{x},{y}" for x, y in map(at, curve))
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in curve:
            x, y = at(point)
            lines.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
            lines.append(
                f'<text x="{x}" y="{y + (16 if number else -8)}" fill="{colour}" font-size="10">{point[0]:g}</text>'
            )
        name = {"elastic": "elastic", "async-stream": "best fixed split, streaming"}[policy]
        lines.append(f'<text x="{width - 200}" y="{height - 110 + 20 * number}" fill="{colour}">{name}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    main()
