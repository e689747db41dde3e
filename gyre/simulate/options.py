"""What the options of `simulate` and `plan` may be, and what they refuse in one line."""

from __future__ import annotations

import math

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
