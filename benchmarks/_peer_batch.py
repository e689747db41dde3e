"""A batch of samples for several trainers, in a file, and the padded pieces that peers make of it. NumPy only.

The samples are conversations: a prompt, and turns of which the model wrote a part. Lengths are skewed, as those of
executions are.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PROMPT = 0.25  # of a sample's tokens, before the first turn
CLIP = 0.2


@dataclass(frozen=True)
class Samples:
    """k samples in one row of T tokens."""

    tokens: np.ndarray  # int64 [T]
    starts: np.ndarray  # int64 [k + 1]
    trained: np.ndarray  # bool [T]
    logprobs: np.ndarray  # float32 [T], as recorded; 0 where not trained
    advantages: np.ndarray  # float32 [k]

    def save(self, path: Path) -> None:
        """Write a file."""
        np.savez(path, **vars(self))

    @classmethod
    def load(cls, path: Path | str) -> Samples:
        """Read a file."""
        with np.load(path) as data:
            return cls(**{name: data[name] for name in data.files})

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample."""
        return np.diff(self.starts)


def make(count: int, median: int, longest: int, vocabulary: int, seed: int = 0) -> Samples:
    """Random samples: lengths log-normal around a median, half of the turns' tokens trained."""
    random = np.random.default_rng(seed)
    lengths = np.exp(random.normal(np.log(median), 0.8, count)).astype(int).clip(16, longest)
    starts = np.cumsum([0, *lengths])
    trained = np.zeros(starts[-1], bool)
    for begin, end in zip(starts, starts[1:], strict=False):
        at, own = begin + int(PROMPT * (end - begin)), True
        while at < end:  # turns of some tokens: the model's and the environment's
            stop = min(end, at + int(random.integers(8, 48)))
            trained[at:stop], at, own = own, stop, not own
    tokens = random.integers(0, vocabulary, starts[-1])
    logprobs = np.zeros(len(tokens), np.float32)
    return Samples(tokens, starts, trained, logprobs, random.choice([-1.0, 1.0], count).astype(np.float32))


def pieces(widths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows that are padded together: sorted by width, as many as have room in `budget` with their padding."""
    order, found = sorted(range(len(widths)), key=lambda i: -widths[i]), []
    while order:
        room = max(1, budget // widths[order[0]])
        found.append(order[:room])
        order = order[room:]
    return found


def padded(samples: Samples, rows: Sequence[int]) -> dict[str, np.ndarray]:
    """Some samples as matrices [rows, longest], padded on the right with zeros; `real` tells tokens from padding."""
    width = int(samples.lengths[list(rows)].max())
    names = ("tokens", "trained", "logprobs")
    found = {name: np.zeros((len(rows), width), getattr(samples, name).dtype) for name in names}
    found["real"] = np.zeros((len(rows), width), bool)
    for index, row in enumerate(rows):
        begin, end = samples.starts[row : row + 2]
        for name in names:
            found[name][index, : end - begin] = getattr(samples, name)[begin:end]
        found["real"][index, : end - begin] = True
    found["advantages"] = samples.advantages[list(rows)]
    return found


def serve(update: Callable[[], dict[str, Any]]) -> None:
    """Say that everything is there, then do an update for every line that comes, and say what it took."""
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        begun, used = time.perf_counter(), time.process_time()
        found = update()
        taken = {"seconds": time.process_time() - used, "wall": time.perf_counter() - begun}
        print(json.dumps(taken | found), flush=True)
