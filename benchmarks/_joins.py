"""A satellite joins in the middle of an update: what the core's micro-steps take meanwhile, and without it.

    rows(quick)       figures for benchmarks/training.py
    python benchmarks/_joins.py [--quick] [--json OUT]

In one run, updates with and without a join take turns, on the same samples of equal length, so that all micro-steps are
alike. The satellite is ordered in when the core has done a third of them: it pulls the snapshot, verifies it, joins,
and computes its first micro-step. A *step* is the time between two micro-steps that the core finished, with whatever
was between them; those from the order until the satellite has joined are compared with the same ones of the update
without. Steps after its first micro-step are shown beside them: two cells that compute share the machine's memory. Core
and satellite have a processor each, and one thread.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import _peer_batch
from _common import keep, parser
from _training_cells import WAIT, World
from rich.console import Console
from rich.table import Table

from gyre import config as configuration
from gyre.child import Child

LENGTH, STEPS = 48, 18  # tokens of a sample; micro-steps of an update, of two samples each
_AT = STEPS // 3  # where the satellite is ordered in


@dataclass(frozen=True)
class Size:
    """The model, and how many updates there are of each kind."""

    hidden: int
    layers: int
    updates: int


FULL = Size(768, 12, 9)  # some 85 million parameters
QUICK = Size(256, 4, 5)


@dataclass
class Seen:
    """What was seen of one update; times are those of one clock, in seconds."""

    core: list[float]  # micro-steps that the core finished
    wall: float = 0.0
    ordered: float = 0.0
    pulling: float = 0.0
    joined: float = 0.0
    first: float = 0.0  # the satellite's first micro-step

    def steps(self, begin: float, end: float) -> tuple[int, list[float]]:
        """The core's steps that ended between two moments and the one after, and which is the first of them."""
        inside = [i for i in range(1, len(self.core)) if self.core[i] > begin and self.core[i - 1] < end]
        return inside[0], self.between(inside[0], len(inside))

    def between(self, first: int, count: int) -> list[float]:
        """So many of the core's steps from one on."""
        return [self.core[i] - self.core[i - 1] for i in range(first, min(first + count, len(self.core)))]


class Watched(World):
    """The world, with the moments at which things happen."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._seen = Seen([])
        self._progress = asyncio.Event()

    async def _spawn(self, rank: int, own: dict[str, Any]) -> Child:
        self._heard = functools.partial(self._note, rank)  # type: ignore[method-assign]
        child = await super()._spawn(rank, own)
        for thread in Path(f"/proc/{child.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {_processors()[rank]})
        return child

    def _note(self, rank: int, event: dict[str, Any]) -> None:
        now, seen = time.perf_counter(), self._seen
        if event["type"] == "progress" and rank == 0:
            seen.core.append(now)
            self._progress.set()
        elif event["type"] == "progress":
            seen.first = seen.first or now
        elif event["type"] == "joined":
            seen.joined = now
        elif event["type"] == "stage" and event["stage"] == "pulling":
            seen.pulling = now

    async def watch(self, join: bool) -> Seen:
        """One update; a satellite comes to it if it is to."""
        self._update += 1
        seen = self._seen = Seen([])
        await self._feeder.call("begin", WAIT, update=self._update, groups=self._groups)
        await self._feed()
        begun = time.perf_counter()
        parts = [self._train(0, [0, 1])]
        if join:
            while len(seen.core) < _AT:
                self._progress.clear()
                await self._progress.wait()
            seen.ordered = time.perf_counter()
            parts.append(self._train(1, [0, 1]))
        answers = await asyncio.gather(*parts)
        seen.wall = time.perf_counter() - begun
        if join:
            assert answers[1]["how"] == "done", answers[1]
            await self._trainers[1].call("park", WAIT)  # so that the next pull takes fresh memory
        return seen


def _processors() -> list[int]:
    """One for the core, one for the satellite."""
    found = sorted(os.sched_getaffinity(0))
    return [found[0], found[-1]]


def _model(directory: Path, size: Size) -> Path:
    """A random Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=size.hidden // 64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


async def _measure(path: Path, size: Size) -> list[tuple[Seen, Seen]]:
    model = _model(path / "model", size)
    samples = _peer_batch.make(2 * STEPS, 1 << 20, LENGTH, 8192)  # all of the largest length
    samples.save(path / "samples.npz")
    config = configuration.build(
        {
            "name": "joins",
            "model": {"path": str(model), "dtype": "float32", "max_context": 1024},
            "tasks": {"path": "none"},
            "harness": {"command": ["none"], "score": {"command": ["none"]}},
            "cells": {"count": 2, "slots": 1, "gpus": 0},
            "scheduler": {"batch_groups": STEPS, "group_size": 2},
            "train": {"updates": 1000, "lr": 1e-6, "micro_tokens": 2 * LENGTH},
        }
    )
    async with Watched(path / "cells", model, path / "samples.npz", config) as world:
        await world.watch(False), await world.watch(True)  # memory is touched, connections are made
        return [(await world.watch(False), await world.watch(True)) for _ in range(size.updates)]


def rows(quick: bool) -> list[dict[str, Any]]:
    """Measure; seconds, and how many times as long steps without a join take."""
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    with tempfile.TemporaryDirectory(prefix="gyre-joins-") as name:
        pairs = asyncio.run(_measure(Path(name), QUICK if quick else FULL))
    during, same, both = [], [], []
    for without, joined in pairs:
        first, steps = joined.steps(joined.ordered, joined.joined)
        during += steps
        same += without.between(first, len(steps))
        both += joined.steps(joined.first, joined.core[-1])[1]
    pulls = [joined.joined - joined.pulling for _, joined in pairs]
    walls = [median(pair[i].wall for pair in pairs) for i in (0, 1)]

    def row(what: str, value: float, other: float | None = None, wanted: float | None = None) -> dict[str, Any]:
        return {"what": what, "value": value, "ratio": other and other / value, "wanted": wanted}

    return [
        row(f"the core's step without a join, median of {len(same)}, s", median(same)),
        row("the same, longest, s", max(same)),
        row(f"while a satellite pulls and joins, median of {len(during)}, s", median(during), median(same), 0.9),
        row("the same, longest, s", max(during), max(same)),
        row(f"while both compute, median of {len(both)}, s", median(both), median(same)),
        row("pull, verification and joining, median, s", median(pulls)),
        row("the core's update without a join, median, s", walls[0]),
        row("the core's update with a join in it, median, s", walls[1], walls[0]),
    ]


def main() -> int:
    """Measure and print."""
    options = parser(__doc__).parse_args()
    found = rows(options.quick)
    keep(options.json, found)
    table = Table("", "seconds", "without / with", title="A satellite joins in the middle of an update")
    for row in found:
        table.add_row(row["what"], f"{row['value']:.4f}", "" if row["ratio"] is None else f"{row['ratio']:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
