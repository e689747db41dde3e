"""What the options of `simulate` and `plan` may be, and what they refuse in one line."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gyre.errors import UserError
from gyre.simulate.workload import LONGEST, Trace

#: Beyond these a number is a slip of the pen, or would take days to simulate.
MOST = {
    "cells": 100_000,
    "gpus": 100_000,
    "min_gpus_per_cell": 100_000,
    "gpus_per_cell": 100_000,
    "slots": 10_000,
    "trace_slots": 10_000,
    "trace_gpus": 100_000,
    "batch_groups": 1_000_000,
    "updates": 1_000_000,
    "repeats": 100_000,
    "workers": 1_000,
}
MOST_EXECUTIONS = 5_000_000  # of one run
MOST_TOGETHER = 200 * MOST_EXECUTIONS  # of all runs


def dashed(name: str) -> str:
    """An option as it is written: --batch-groups of batch_groups."""
    return f"--{name.replace('_', '-')}"


def whole(name: str, value: int) -> None:
    """Refuse a number that is below 1, or beyond `MOST`."""
    if not 1 <= value <= MOST[name]:
        raise UserError(f"{dashed(name)} is {value}; it must be at least 1 and at most {MOST[name]}")


def finite(name: str, value: float) -> None:
    """Refuse an option that is no number of at least 0, or is out of all proportion."""
    if not 0 <= value <= LONGEST:
        raise UserError(f"{dashed(name)} is {value:g}; it must be a number of at least 0 and at most {LONGEST:g}")


def switch(text: str) -> tuple[float, float]:
    """What --switch says: seconds to training and back."""
    try:
        to_training, to_rollout = map(float, text.split(","))
    except ValueError:
        to_training = to_rollout = math.nan
    if not all(0 <= value <= LONGEST for value in (to_training, to_rollout)):
        raise UserError(f"--switch is {text!r}; write two times in seconds, to training and back: 8.5,3.5")
    return to_training, to_rollout


def train_ratio(value: float | None, trace: Trace) -> float | None:
    """What --train-ratio says; None, which leaves it to the trace, only where that says how long training takes."""
    if value is not None:
        finite("train_ratio", value)
    elif any(entry.train_s is None for group in trace.groups for entry in group):
        raise UserError(f"the trace {trace.name} does not say how long training takes; give --train-ratio, e.g. 0.5")
    return value


def distinct(read: Mapping[str, str | Path], written: Mapping[str, str | None]) -> None:
    """Refuse to write over what is read, or twice to one file, before anything is done.

    Args:
        read: files that are read, by what they are called.
        written: files that are to be written, by their option; None where it is not given.

    Raises:
        UserError: two of them are one file, or one of them cannot be written.
    """
    seen = dict(read)
    for option, out in written.items():
        if out is None:
            continue
        for other, path in seen.items():
            if _same(Path(out), Path(path)):
                raise UserError(f"{option} and {other} both name {out}; name another file for {option}")
        writable(out)
        seen[option] = out


def _same(one: Path, other: Path) -> bool:
    """Whether writing the one changes the other; of a terminal or a pipe it does not."""
    if one.exists() and other.exists():
        return one.is_file() and one.samefile(other)
    return one.resolve() == other.resolve()


def writable(out: str) -> None:
    """Find out before the work whether what it results in can be written.

    Raises:
        UserError: it cannot.
    """
    try:
        if Path(out).is_dir():
            raise UserError(f"cannot write {out}: it is a directory; name a file")
        if Path(out).is_file():
            open(out, "ab").close()
        elif not Path(out).exists():
            tempfile.TemporaryFile(dir=Path(out).parent).close()
    except OSError as error:
        raise UserError(
            f"cannot write {out}: {error.strerror}; name a file in a directory that can be written to"
        ) from error
