"""How fast weights reach a satellite, beside a memcpy and a bare socket.

    python benchmarks/weights.py            a snapshot of 1 GiB, 15 pairs of each, about a minute
    python benchmarks/weights.py --quick    of 256 MiB, 7 pairs

A pull is what a satellite does before it joins an update: find the slot, copy every tensor into the model's memory,
and verify number, generation and digests. Both sides of a row are measured alternately in one run; the ratio is the
median of the pairs.

Without `--quick` it exits with 1 where a ratio falls short of what it has to be.
"""

from __future__ import annotations

import sys

from _common import keep, parser
from _weights import rows
from rich.console import Console
from rich.table import Table


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__).parse_args()
    gib, repeats = (0.25, 7) if arguments.quick else (1.0, 15)
    found = rows(gib, repeats)
    keep(arguments.json, found)
    table = Table(title=f"weights: {gib:g} GiB in bfloat16, medians of {repeats} pairs")
    for column in ("", "GB/s", "reference", "GB/s", "ratio", "wanted"):
        table.add_column(column, justify="left" if column in ("", "reference") else "right")
    for row in found:
        wanted = "" if row["wanted"] is None else f">= {row['wanted']:g}"
        rates = f"{row['rate']:.2f}", row["reference"], f"{row['reference_rate']:.2f}"
        table.add_row(row["what"], *rates, f"{row['ratio']:.2f}", wanted)
    Console().print(table)
    short = any(row["wanted"] is not None and row["ratio"] < row["wanted"] for row in found)
    return int(short and not arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
