"""What the benchmarks share: traces, shapes, costs, and where figures go.

Each of them takes `--quick`, which is what `make bench` runs, and `--json OUT`. Without `--quick` a benchmark measures
what the documents state, for minutes or an hour.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where gyre is not installed

from gyre.simulate.compare import Scenario
from gyre.simulate.costs import Costs

ROOT = Path(__file__).resolve().parents[1]
TRACES = sorted((ROOT / "benchmarks/traces").glob("*.jsonl"))
Shape = tuple[int, int, int]  # cells, slots, groups of a batch
SHAPES: tuple[Shape, ...] = ((8, 4, 16), (4, 8, 16), (16, 8, 32))
BATCHES = 24
#: Seconds of a move to training and back, as measured on a machine.
COSTS = Costs(to_training_s=8.5, to_rollout_s=3.5)
WORKERS = os.cpu_count() or 1


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="a minute or two: to see that it works, not to be quoted")
    made.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    return made


def scenario(shape: Shape, lookahead: float, **more: Any) -> Scenario:
    """A run of 24 batches whose groups take half as much training as rollout."""
    cells, slots, groups = shape
    return Scenario(cells, slots, groups, BATCHES, lookahead, 0.5, COSTS, **more)


def shape_of(text: str) -> Shape:
    """8,4,16 as numbers."""
    try:
        cells, slots, groups = map(int, text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers: cells, slots, groups of a batch") from error
    return cells, slots, groups


def shown(shape: Shape) -> str:
    """A shape in words."""
    return "{} cells, {} slots, {} groups".format(*shape)


def label(trace: Path) -> str:
    """The short name of a trace."""
    return trace.stem.removeprefix("terminal-bench-")


def keep(out: Path | None, figures: Any) -> None:
    """Write figures as JSON where it was asked for."""
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")


def code() -> str:
    """A hash of what decides and what simulates: figures of another one may be others."""
    digest = hashlib.sha256()
    for room in ("scheduler", "simulate"):
        for path in sorted((ROOT / "gyre" / room).glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
