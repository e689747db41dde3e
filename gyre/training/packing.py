"""From samples to micro-steps: how rows are laid out for a trainer, and the wire format. Pure.

A micro-step is one row of whole samples, one after the other, without padding. Positions restart at each sample and
attention stays within it, so packed samples know nothing of each other. Only tokens that are trained on carry further
numbers, so a trainer computes logits for those places alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from safetensors import SafetensorError
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
    """The smallest piece of training work: T tokens of k samples, with m trained tokens among them.

    Sample j is `tokens[starts[j]:starts[j + 1]]`. The i-th trained token is `tokens[place[i]]`, predicted from the
    place before it, which is of the same sample.
    """

    id: int
    tokens: np.ndarray  # int32 [T]
    starts: np.ndarray  # int32 [k + 1], rising from 0 to T
    place: np.ndarray  # int32 [m], rising
    logprobs: np.ndarray  # float32 [m], recorded by the sampler
    advantages: np.ndarray  # float32 [m]
    weights: np.ndarray  # float32 [m]
    temperatures: np.ndarray  # float32 [m]


def lay_out(micro_step: int, rows: Sequence[Row]) -> MicroStep:
    """Lay rows out as one micro-step, in the order given.

    Raises:
        ValueError: a sample is malformed (`Sample.check`) or empty, or there are no rows.
    """
    if not rows:
        raise ValueError("a micro-step needs at least one row")
    starts = np.zeros(len(rows) + 1, np.int32)
    parts: list[tuple[np.ndarray, ...]] = []
    for index, row in enumerate(rows):
        sample = row.sample
        sample.check()
        if not len(sample):
            raise ValueError(f"execution {sample.execution}: a sample without tokens")
        starts[index + 1] = starts[index] + len(sample)
        own = np.flatnonzero(sample.trained)
        parts.append(
            (
                own + starts[index],
                sample.logprobs[own],
                np.full(len(own), row.advantage),
                np.full(len(own), row.weight),
                sample.temperatures[own],
            )
        )
    tokens = np.concatenate([row.sample.tokens for row in rows]).astype(np.int32)
    place, *numbers = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return MicroStep(micro_step, tokens, starts, place.astype(np.int32), *(n.astype(np.float32) for n in numbers))


def blank(micro_step: int = 0) -> MicroStep:
    """A micro-step that adds nothing to a sum, for a shard without one while others compute.

    Two tokens, the second trained with weight and advantage 0.
    """
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    tokens, starts, place = np.zeros(2, np.int32), np.array([0, 2], np.int32), np.ones(1, np.int32)
    return MicroStep(micro_step, tokens, starts, place, zero, zero, zero, one)


_ARRAYS = ("tokens", "starts", "place", "logprobs", "advantages", "weights", "temperatures")


def encode(step: MicroStep) -> bytes:
    """A micro-step as bytes (the safetensors format)."""
    arrays = {name: np.ascontiguousarray(getattr(step, name)) for name in _ARRAYS}
    return save({"id": np.array([step.id], dtype=np.int64), **arrays})


def decode(data: bytes) -> MicroStep:
    """The micro-step of some bytes.

    Raises:
        ValueError: they are none of a micro-step.
    """
    try:
        arrays = load(data)
        return MicroStep(int(arrays["id"][0]), *(arrays[name] for name in _ARRAYS))
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"no micro-step in {len(data)} bytes: {error}") from error


_LENGTH = struct.Struct("<Q")


def encode_all(steps: Iterable[MicroStep]) -> bytes:
    """Several micro-steps as bytes: each with its length (uint64, little-endian) before it."""
    parts = []
    for step in steps:
        data = encode(step)
        parts += [_LENGTH.pack(len(data)), data]
    return b"".join(parts)


def decode_all(data: bytes) -> list[MicroStep]:
    """The micro-steps of some bytes.

    Raises:
        ValueError: they end in the middle of one, or hold something else.
    """
    steps, at = [], 0
    while at < len(data):
        begin = at + _LENGTH.size
        if begin > len(data) or (at := begin + _LENGTH.unpack_from(data, begin - _LENGTH.size)[0]) > len(data):
            raise ValueError(f"{len(data)} bytes end in the middle of a micro-step")
        steps.append(decode(data[begin:at]))
    return steps
