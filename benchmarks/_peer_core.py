"""The core's model alone: packed micro-steps into its accumulators, then its step.

`python benchmarks/_peer_core.py MODEL SAMPLES BUDGET`.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import ROOT  # noqa: F401  also where gyre is not installed
from _peer_batch import CLIP, Samples, serve

from gyre import config as configuration
from gyre.training.core import CoreModel, begin_world
from gyre.training.filling import pack_all
from gyre.training.packing import Row, lay_out
from gyre.training.statistics import Statistics
from gyre.trajectories.sample import Sample


def rows_of(samples: Samples) -> list[Row]:
    """The samples as the feeder has them."""
    found = []
    for index, (begin, end) in enumerate(zip(samples.starts, samples.starts[1:], strict=False)):
        part, size = slice(begin, end), end - begin
        trained = samples.trained[part]
        sample = Sample(
            execution=index,
            group=index,
            tokens=samples.tokens[part].astype(np.int32),
            trained=trained,
            logprobs=samples.logprobs[part],
            versions=np.where(trained, 0, -1).astype(np.int32),
            temperatures=np.ones(size, np.float32),
        )
        found.append(Row(sample, float(samples.advantages[index])))
    return found


def main() -> None:
    """See above."""
    directory, file, budget = sys.argv[1], sys.argv[2], int(sys.argv[3])
    samples = Samples.load(file)
    train = {"updates": 1000, "lr": 1e-6, "micro_tokens": budget, "clip_ratio": CLIP, "averaging": "token"}
    config = configuration.build(
        {
            "name": "training",
            "model": {"path": directory, "dtype": "float32"},
            "tasks": {"path": "none"},
            "harness": {"command": ["none"], "score": {"command": ["none"]}},
            "cells": {"count": 1, "slots": 1, "gpus": 0},
            "scheduler": {"batch_groups": 1, "group_size": 2},
            "train": train | {"truncation": None},
        }
    )
    device = torch.device("cpu")
    begin_world(device, None)
    core = CoreModel(Path(directory), config, device)

    def update() -> dict[str, Any]:
        core.accumulators.begin()
        total, rows = Statistics(), rows_of(samples)
        steps = pack_all([len(row.sample) for row in rows], budget)  # packing is part of the update
        for number, indices in enumerate(steps, 1):
            total.add(core.compute(lay_out(number, [rows[i] for i in indices])))
        norm = math.sqrt(core.square_sum()) / total.weight
        core.step(min(1.0, 1.0 / norm) / total.weight, config.train.lr)
        return {"loss": total.loss / total.weight, "norm": norm, "micro_steps": len(steps)}

    serve(update)


if __name__ == "__main__":
    main()
