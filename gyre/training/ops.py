"""Try DeepSpeed once, at setup, so that a first run never sits silent while something is compiled.

    python -m gyre.training.ops

The trainer is configured so that DeepSpeed compiles nothing (`gyre.training.core`). This takes one optimizer step
on a small model the way the trainer does; should a DeepSpeed version compile something after all, it happens here, with
a line that shows the time, and is cached for the runs to come ($TORCH_EXTENSIONS_DIR). Done once per installation.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path


def _stamp() -> Path:
    versions = " ".join(importlib.metadata.version(name) for name in ("deepspeed", "torch", "transformers"))
    return Path(sys.prefix) / f".deepspeed-tried-{hashlib.sha256(versions.encode()).hexdigest()[:12]}"


@contextlib.contextmanager
def _ticking(text: str) -> Iterator[None]:
    """A line with the seconds that pass: rewritten on a terminal, and once every ten seconds elsewhere."""
    stop, begun, terminal = threading.Event(), time.monotonic(), sys.stderr.isatty()

    def run() -> None:
        while not stop.wait(1.0 if terminal else 10.0):
            line = f"{text} {time.monotonic() - begun:.0f} s"
            print(line, end="\r" if terminal else "\n", file=sys.stderr, flush=True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        print(f"{text} done in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


def try_once() -> None:
    """One optimizer step of DeepSpeed on a small model, as the trainer takes it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    from gyre import config as configuration
    from gyre.training.core import CoreModel, begin_world

    shape = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = configuration.build(
        {
            "model": {"path": "small"},
            "tasks": {"path": "none"},
            "harness": {"command": ["true"], "score": {"command": ["true"]}},
            "cells": {"count": 1, "slots": 1},
            "scheduler": {"batch_groups": 1, "group_size": 2},
            "train": {"updates": 1},
        }
    )
    transformers_logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin_world(device, None)
    with tempfile.TemporaryDirectory() as directory:
        LlamaForCausalLM(shape).save_pretrained(directory)
        model = CoreModel(Path(directory), config, device)
        model.accumulators.begin()
        model.step(1.0, 1e-6)


def main() -> None:
    """Entry point; does nothing where it was done before."""
    stamp = _stamp()
    if stamp.exists():
        return
    with _ticking("        DeepSpeed takes its first step:"):
        with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
            try_once()
    stamp.touch()


if __name__ == "__main__":
    main()
