"""A training step of about 1.2 billion parameters at 32k tokens on one GPU: utilisation, and parking.

`python benchmarks/_gpu.py DIRECTORY` measures with a new model in that directory, and prints JSON. Utilisation counts
what the model has to compute and not what checkpointing computes again: 6 operations per weight and token, those of
the head at trained tokens alone, and 6 per pair of tokens that see each other, layer and dimension.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import ROOT  # noqa: F401  also where gyre is not installed
from _peer_batch import make
from _peer_core import rows_of

TOKENS = 32768
#: Operations per second in bfloat16 without sparsity, by part of the device's name (the makers' data sheets).
PEAKS = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": TOKENS,
    "tie_word_embeddings": True,
}
SMALL = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def operations(core: Any, step: Any) -> float:
    """Floating-point operations that a micro-step's gradient takes."""
    config = core.scorer.model.config
    head = core.scorer.model.get_output_embeddings().weight.numel()
    body = sum(parameter.numel() for parameter in core.parameters) - head
    lengths = np.diff(step.starts).astype(float)
    width = config.num_attention_heads * config.head_dim
    pairs = float((lengths * (lengths + 1) / 2).sum())
    # two products, of two operations each, forward; twice that backward
    return 6.0 * (body * len(step.tokens) + head * len(step.place)) + 12.0 * config.num_hidden_layers * width * pairs


def measure(directory: Path, device: torch.device, shape: dict[str, int], tokens: int) -> dict[str, Any]:
    """Seconds of a step and its parts, of parking and of waking, and bytes on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from gyre import config as configuration
    from gyre.training.core import CoreModel, begin_world
    from gyre.training.packing import lay_out

    with torch.device(device):
        LlamaForCausalLM(LlamaConfig(**shape, dtype="bfloat16")).bfloat16().save_pretrained(directory)
    config = configuration.build(
        {
            "name": "gpu",
            "model": {"path": str(directory), "dtype": "bfloat16", "max_context": tokens},
            "tasks": {"path": "none"},
            "harness": {"command": ["none"], "score": {"command": ["none"]}},
            "cells": {"count": 1, "slots": 1, "gpus": 0},
            "scheduler": {"batch_groups": 1, "group_size": 2},
            "train": {"updates": 10, "micro_tokens": tokens, "checkpoint_activations": True},
        }
    )
    begin_world(device, None)
    core = CoreModel(directory, config, device)
    rows, left = [], tokens
    for row in rows_of(make(tokens // 16, tokens // 16, tokens // 2, shape["vocab_size"])):
        if len(row.sample) <= left:
            rows.append(row)
            left -= len(row.sample)
    step = lay_out(1, rows)

    def timed(work: Any, *arguments: Any) -> float:
        _settle(device)
        begun = time.perf_counter()
        work(*arguments)
        _settle(device)
        return time.perf_counter() - begun

    def update() -> None:
        core.accumulators.begin()
        weight = core.compute(step).weight
        norm = math.sqrt(core.square_sum()) / weight
        core.step(min(1.0, 1.0 / norm) / weight, config.train.lr)

    update()
    updates = [timed(update) for _ in range(3)]
    core.accumulators.begin()
    micro = min(timed(core.compute, step) for _ in range(3))
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    parked = timed(core.park, False)
    inside = torch.cuda.memory_allocated() if cuda else 0
    woken = timed(core.wake)
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "tokens": len(step.tokens),
        "samples": len(rows),
        "operations": operations(core, step),
        "micro_step_s": micro,
        "update_s": min(updates),
        "park_s": parked,
        "wake_s": woken,
        "bytes": before,
        "bytes_parked": inside,
        "bytes_peak": torch.cuda.max_memory_allocated() if cuda else 0,
    }


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def rows(quick: bool) -> list[dict[str, Any]]:
    """What is measured, as rows of a table; none without a GPU."""
    if not torch.cuda.is_available():
        return []
    with tempfile.TemporaryDirectory(prefix="gyre-gpu-") as name:
        command = [sys.executable, __file__, name, *(["--quick"] if quick else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    peak = next((speed for part, speed in PEAKS.items() if part in found["device"]), None)
    reached = found["operations"] / found["micro_step_s"]
    return [
        {"what": f"{found['device']}: tokens/s of a micro-step", "value": found["tokens"] / found["micro_step_s"]},
        {"what": "its operations/s, of the device's", "value": reached, "ratio": reached / peak if peak else None},
        {"what": "seconds of an update of one micro-step", "value": found["update_s"]},
        {"what": "GB on the device, at the peak", "value": found["bytes_peak"] / 1e9},
        {"what": "GB on the device, between updates", "value": found["bytes"] / 1e9},
        {"what": "GB on the device, parked", "value": found["bytes_parked"] / 1e9},
        {"what": "seconds to park", "value": found["park_s"]},
        {"what": "seconds to wake", "value": found["wake_s"]},
    ]


def main() -> None:
    """See above; on a CPU a small model, to see that it works."""
    cuda, quick = torch.cuda.is_available(), "--quick" in sys.argv
    device = torch.device("cuda" if cuda else "cpu")
    shape = SHAPE if cuda and not quick else SHAPE | SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2}
    print(json.dumps(measure(Path(sys.argv[1]), device, shape, TOKENS if cuda else TOKENS // 32)), flush=True)


if __name__ == "__main__":
    main()
