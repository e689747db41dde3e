"""One process of the pipelines that are compared: the same stages and micro-steps, driven in two ways."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from gyre.training.batch import Batch
from gyre.training.links import connect
from gyre.training.packing import MicroStep
from gyre.training.pipeline import Pipeline, Shape
from gyre.training.stages import Stage, load_stage

CPU = torch.device("cpu")


def micro_step(tokens: int, vocabulary: int) -> MicroStep:
    """One sample, of which every eighth token is trained."""
    import numpy as np

    place = np.arange(8, tokens, 8, dtype=np.int32)
    ones = np.ones(len(place), np.float32)
    row = np.random.default_rng(0).integers(0, vocabulary, tokens).astype(np.int32)
    return MicroStep(1, row, np.array([0, tokens], np.int32), place, ones, ones, ones, ones)


class Plain(torch.nn.Module):
    """A stage as torch's schedule wants it: rows in, rows out, its last output being what the loss is made of."""

    def __init__(self, stage: Stage, batch: Batch) -> None:
        super().__init__()
        self.stage, self.batch = stage, batch

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        """[1, T] tokens or [1, T, H] hidden states to [1, T, H], or at the last stage to log-probabilities [1, m]."""
        out = self.stage(self.batch) if self.stage.first else self.stage(self.batch, row[0])
        return (out[0] if self.stage.last else out)[None]


class Busy:
    """Seconds of computing, as opposed to waiting for others."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begun

        return call


class Ours:
    """A runner that leaves gradients where torch's schedule leaves them."""

    def __init__(self, stage: Stage, busy: Busy) -> None:
        self._stage = stage
        self.forward = busy.counted(self._forward)
        self.backward = busy.counted(torch.autograd.backward)

    def _forward(self, batch: Batch, received: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        if received is None:
            return self._stage(batch)[None], None
        out = self._stage(batch, received[0])
        return (-out[0].sum() if self._stage.last else out[None]), None


def run(number: int, stages: int, model: Path, store: str, tokens: int, counts: list[int], rounds: int) -> list[dict]:
    """Everything that this process measures, in turn: {way, m, seconds, busy, paused}, and how far gradients are."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    shared = dist.FileStore(store, stages)
    dist.init_process_group("gloo", store=dist.PrefixStore("world", shared), rank=number, world_size=stages)
    stage = load_stage(model, torch.float32, CPU, True, number, stages)
    batch = Batch.of(micro_step(tokens, stage.model.config.vocab_size), CPU)
    links = connect(dist.PrefixStore("links", shared), number, stages, CPU, "127.0.0.1")
    busy = Busy()
    pipeline = Pipeline(Ours(stage, busy), number, stages, links, Shape(stage.hidden_size, torch.float32), CPU)

    def ours(m: int, pauses: int, drains: bool, seed: int) -> float:
        """Feed m micro-steps; the first stage withholds some of them for a while. Returns the time of its pauses."""
        draw = random.Random(seed)
        places, paused = set(draw.sample(range(1, m), pauses)), 0.0
        for i in range(m):
            if i in places:
                if drains:
                    pipeline.drain()
                if number == 0:
                    paused += (length := draw.uniform(0.5, 1.5) * one)
                    time.sleep(length)
            pipeline.feed(i, batch)
        pipeline.drain()
        return paused

    def theirs(m: int) -> float:
        schedule = schedules[m]
        rows = batch.tokens.expand(m, -1)
        if number == 0:
            schedule.step(rows)
        else:
            schedule.step(target=torch.zeros(m, 1), losses=[], return_outputs=False)
        return 0.0

    schedules = {}
    for m in counts:
        part = PipelineStage(Plain(stage, batch), number, stages, CPU)
        part.forward_one_chunk = busy.counted(part.forward_one_chunk)
        part.backward_one_chunk = busy.counted(part.backward_one_chunk)
        schedules[m] = Schedule1F1B(part, m, loss_fn=lambda out, _: -out.sum(), scale_grads=False)

    def measure(way: str, m: int, do: Callable[[], float]) -> dict[str, Any]:
        stage.zero_grad()
        dist.barrier()
        busy.seconds, begun = 0.0, time.perf_counter()
        paused = do()
        dist.barrier()
        seconds = time.perf_counter() - begun
        gradient = torch.cat([p.grad.flatten() for p in stage.parameters()]) / m
        return {"way": way, "m": m, "seconds": seconds, "busy": busy.seconds, "paused": paused, "gradient": gradient}

    one = 0.0
    found: list[dict[str, Any]] = []
    for turn in range(rounds + 1):  # the first one warms up
        for m in counts:
            few = max(1, m // 4)
            taken = [
                measure("1F1B", m, partial(theirs, m)),
                measure("ours", m, partial(ours, m, 0, False, turn)),
                measure("ours, pauses", m, partial(ours, m, few, False, turn)),
                measure("ours, drained", m, partial(ours, m, few, True, turn)),
            ]
            one = taken[0]["seconds"] / m
            wanted = taken[0]["gradient"]
            for each in taken:
                far = float((each.pop("gradient") - wanted).norm() / wanted.norm())
                found += (
                    [] if turn == 0 else [{**each, "drains": few + 1 if "drained" in each["way"] else 1, "far": far}]
                )
    dist.destroy_process_group()
    return found
