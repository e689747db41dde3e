"""How full micro-steps are, and what packing costs.

Lengths are the durations of real agents' executions as stand-ins for token counts: seconds times one factor, so that
the mean is what the table says, and at most the budget of 8,192 tokens (which makes the mean a little smaller). Groups
come in the order and of the size of the trace; 16 of them are an update. They become ready one by one, at random times;
cells begin to claim when four are ready, as elastic cells do, and take a time for a micro-step that goes by its tokens.
`pace` is the work of all claimers against the time in which groups come: at 0.5 cells idle for want of groups and what
there is must do, at 2 they lag behind. Everything goes through the feeder's own `Supply`, claim by claim.

Fill is tokens per token of budget, over all micro-steps of an update. Its last one can only be as full as what is left,
so `possible` is the fill of the fewest micro-steps that could hold an update's tokens. The reference is
first-fit-decreasing on the full update, all of it known in advance. Asked: 0.97.

The time is that of the processor for 100,000 such samples: all at once, and as updates, claim by claim, with and
without laying them out for a trainer; beside them the same reference, which searches for room with numpy. Asked: 2 s.
"""

from __future__ import annotations

import heapq
import json
import random
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _common import TRACES, keep, parser
from rich.console import Console
from rich.table import Table

from gyre.training.choosing import Shelf
from gyre.training.filling import pack_all
from gyre.training.packing import Row
from gyre.training.supply import Supply
from gyre.trajectories.sample import Sample

BUDGET = 8192
UPDATE = 16  # groups
READY = 4  # groups that are ready before the first claim
MEANS = (1000, 2000, 2500, 3000, 4000)
PACES = (0.5, 1.0, 2.0)
CELLS = (1, 4)
FIXED = 0.03  # of a full micro-step's time, that every micro-step takes
MANY = 100_000
Lengths = list[list[int]]  # of the samples of groups


def lengths_of(trace: Path, mean: float) -> Lengths:
    """Token counts of a trace's executions, by group."""
    groups: dict[int, list[float]] = {}
    for line in trace.read_text().splitlines():
        entry = json.loads(line)
        groups.setdefault(entry["group"], []).append(entry["rollout_s"])
    every = [seconds for group in groups.values() for seconds in group]
    factor = mean / (sum(every) / len(every))
    return [[max(2, min(BUDGET, round(seconds * factor))) for seconds in group] for group in groups.values()]


def updates_of(groups: Lengths) -> Iterator[Lengths]:
    """Whole updates, in order."""
    return (groups[first : first + UPDATE] for first in range(0, len(groups) - UPDATE + 1, UPDATE))


def first_fit_decreasing(lengths: Sequence[int]) -> int:
    """How many micro-steps the reference needs."""
    room = np.full(len(lengths) + 1, BUDGET)
    used = 0
    for length in sorted(lengths, reverse=True):
        first = int((room[: used + 1] >= length).argmax())
        room[first] -= length
        used = max(used, first + 1)
    return used


_ZEROS = np.zeros(BUDGET, np.int32)
_TRAINED = np.arange(BUDGET) > 0


def row_of(length: int, group: int) -> Row:
    """A row of this length; its numbers do not matter."""
    floats = _ZEROS[:length].view(np.float32)
    return Row(Sample(0, group, _ZEROS[:length], _TRAINED[:length], floats, _ZEROS[:length], floats + 1), 1.0)


def streamed(groups: Lengths, cells: int, pace: float, chance: random.Random) -> list[int]:
    """Tokens of the micro-steps of one update, claimed by `cells` while its groups become ready."""
    supply = Supply(BUDGET)
    supply.begin(1, len(groups))
    arrivals = sorted(chance.random() for _ in groups)
    a_token = pace * cells / sum(map(sum, groups))
    fed, sizes = 0, []
    finished: dict[int, list[int]] = {cell: [] for cell in range(cells)}
    free, busy = list(range(cells)), []
    while fed < len(groups) or busy:
        ends = busy[0][0] if busy else 2.0 * len(groups)
        if fed < len(groups) and arrivals[fed] <= ends:
            now = arrivals[fed]
            supply.reserve(fed)
            supply.fill(fed, [row_of(length, fed) for length in groups[fed]])
            fed += 1
        else:
            now, cell = heapq.heappop(busy)
            free.append(cell)
        for cell in list(free) if fed >= READY else ():
            claim = supply.claim(1, (cell, 1), finished[cell])
            finished[cell] = []
            for step in claim.steps:
                sizes.append(len(step.tokens))
                finished[cell] = [step.id]
                free.remove(cell)
                heapq.heappush(busy, (now + a_token * (len(step.tokens) + FIXED * BUDGET), cell))
    assert supply.stream(1).dry and sum(sizes) == sum(map(sum, groups))
    assert abs(supply.stream(1).numbers()["fill"] - sum(sizes) / BUDGET / len(sizes)) < 1e-9
    return sizes


def fills(mean: float, traces: Sequence[Path], repeats: int) -> dict[str, Any]:
    """Fill of all updates of the traces together, of each way."""
    updates = [update for trace in traces for update in updates_of(lengths_of(trace, mean))]
    flat = [[length for group in update for length in group] for update in updates]
    tokens = sum(map(sum, flat))
    steps = {
        "possible": sum(-(-sum(lengths) // BUDGET) for lengths in flat),
        "first_fit_decreasing": sum(map(first_fit_decreasing, flat)),
        "all_known": sum(len(pack_all(lengths, BUDGET)) for lengths in flat),
    }
    found: dict[str, Any] = {name: tokens / BUDGET / count for name, count in steps.items()}
    for pace in PACES:
        for cells in CELLS:
            count = 0
            for repeat in range(repeats):
                chance = random.Random(repeat)
                count += sum(len(streamed(update, cells, pace, chance)) for update in updates)
            found[f"pace {pace:g}, {cells} cell{'s' * (cells > 1)}"] = tokens * repeats / BUDGET / count
    return {"mean": mean, "updates": len(updates), "samples": sum(map(len, flat)), "fill": found}


def costs(many: int, traces: Sequence[Path]) -> dict[str, Any]:
    """What packing many samples takes, as a whole and as a stream of updates."""
    groups = [group for trace in traces for group in lengths_of(trace, 2000)]
    chance = random.Random(0)
    drawn: Lengths = []
    while sum(map(len, drawn)) < many:
        drawn.append(chance.choice(groups))
    lengths = [length for group in drawn for length in group]
    rows = [[row_of(length, number) for length in group] for number, group in enumerate(drawn)]

    batches = [rows[at : at + UPDATE] for at in range(0, len(rows), UPDATE)]

    def chosen() -> int:
        made = 0
        for batch in batches:
            shelf, ready = Shelf(len(batch), BUDGET), OrderedDict(enumerate(batch))
            while not shelf.empty:
                for group in shelf.next(ready)[1]:
                    del ready[group]
                made += 1
        return made

    def laid_out() -> int:
        supply, made = Supply(BUDGET), 0
        for update, batch in enumerate(batches, 1):
            supply.begin(update, len(batch))
            for number, group in enumerate(batch):
                supply.reserve(update * UPDATE + number)
                supply.fill(update * UPDATE + number, group)
            finished: list[int] = []
            while steps := supply.claim(update, (0, 1), finished).steps:
                finished = [step.id for step in steps]
                made += len(steps)
            supply.committed(update)
        return made

    ways = {
        "all at once": lambda: len(pack_all(lengths, BUDGET)),
        "first-fit-decreasing": lambda: first_fit_decreasing(lengths),
        "claim by claim": chosen,
        "claim by claim, laid out": laid_out,
    }
    found: dict[str, Any] = {}
    for name, way in ways.items():
        begun = time.process_time()
        made = way()
        found[name] = {"seconds": time.process_time() - begun, "fill": sum(lengths) / BUDGET / made}
    return {"samples": len(lengths), "tokens": sum(lengths), "ways": found}


def main() -> None:
    """Measure, print and keep."""
    options = parser(__doc__).parse_args()
    means, traces, repeats, many = MEANS, TRACES, 5, MANY
    if options.quick:
        means, traces, repeats, many = (2000,), TRACES[:1], 1, MANY // 10
    table = Table(title=f"fill at a budget of {BUDGET:,} tokens", title_justify="left", box=None)
    table.add_column("mean tokens", justify="right")
    rows = [fills(mean, traces, repeats) for mean in means]
    for name in rows[0]["fill"]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(f"{row['mean']:,}", *(f"{fill:.4f}" for fill in row["fill"].values()))
    console = Console(highlight=False, width=140)
    console.print(table)
    cost = costs(many, traces)
    table = Table(title=f"\n{cost['samples']:,} samples, {cost['tokens']:,} tokens", title_justify="left", box=None)
    for name in ("", "seconds", "fill"):
        table.add_column(name, justify="right" if name else "left")
    for name, figures in cost["ways"].items():
        table.add_row(name, f"{figures['seconds']:.2f}", f"{figures['fill']:.4f}")
    console.print(table)
    keep(options.json, {"budget": BUDGET, "fill": rows, "cost": cost})


if __name__ == "__main__":
    main()
