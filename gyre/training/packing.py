"""From samples to micro-steps: rows under a token budget, laid out for a trainer, and their wire format. Pure.

A micro-step is a right-padded matrix of whole samples of like length. Attention is causal, so padding on the right
needs no mask, and on a CPU this beats one long row with a block mask. Only tokens that are trained on carry further
numbers, so a trainer computes logits for those positions alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import load, save

from gyre.trajectories.sample import Sample


@dataclass(frozen=True)
class Row:
    """A sample with what the objective needs to know about it."""

    sample: Sample
    advantage: float
    weight: float = 1.0  # of each trained token


@dataclass(frozen=True)
class MicroStep:
    """The smallest piece of training work: R rows of width W with m trained tokens in them.

    The k-th trained token is `tokens[row[k], column[k]]`, predicted from the position before it.
    """

    id: int
    tokens: np.ndarray  # int32 [R, W], zeros after a row's end
    row: np.ndarray  # int32 [m]
    column: np.ndarray  # int32 [m], at least 1
    logprobs: np.ndarray  # float32 [m], recorded by the sampler
    advantages: np.ndarray  # float32 [m]
    weights: np.ndarray  # float32 [m]
    temperatures: np.ndarray  # float32 [m]


def choose(lengths: Sequence[int], budget: int) -> list[int]:
    """Indices of the rows that make the next micro-step: the longest, and as many of the next shorter as fit.

    Rows times the longest row stay within `budget` tokens, except that a row longer than the budget comes alone.
    Ties go to the earlier row, so the choice depends on the order of `lengths` alone.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if not order:
        return []
    return order[: max(1, budget // lengths[order[0]])]


def lay_out(micro_step: int, rows: Sequence[Row]) -> MicroStep:
    """Lay rows out as one micro-step.

    Raises:
        ValueError: a sample is malformed (`Sample.check`), or there are no rows.
    """
    if not rows:
        raise ValueError("a micro-step needs at least one row")
    tokens = np.zeros((len(rows), max(len(row.sample) for row in rows)), dtype=np.int32)
    parts: list[tuple[np.ndarray, ...]] = []
    for index, row in enumerate(rows):
        sample = row.sample
        sample.check()
        tokens[index, : len(sample)] = sample.tokens
        column = np.flatnonzero(sample.trained)
        parts.append(
            (
                np.full(len(column), index),
                column,
                sample.logprobs[column],
                np.full(len(column), row.advantage),
                np.full(len(column), row.weight),
                sample.temperatures[column],
            )
        )
    row_of, column, *numbers = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return MicroStep(
        micro_step, tokens, row_of.astype(np.int32), column.astype(np.int32), *(n.astype(np.float32) for n in numbers)
    )


_ARRAYS = ("tokens", "row", "column", "logprobs", "advantages", "weights", "temperatures")


def encode(step: MicroStep) -> bytes:
    """A micro-step as bytes (the safetensors format)."""
    arrays = {name: np.ascontiguousarray(getattr(step, name)) for name in _ARRAYS}
    return save({"id": np.array([step.id], dtype=np.int64), **arrays})


def decode(data: bytes) -> MicroStep:
    """The micro-step of some bytes."""
    arrays = load(data)
    return MicroStep(int(arrays["id"][0]), *(arrays[name] for name in _ARRAYS))
