"""Training: tokens per second of the core against peers, and of two cells against one.

    python benchmarks/training.py            SmolLM2-135M on one thread, some twenty minutes
    python benchmarks/training.py --quick    a small random model, two minutes: to see that it works

One batch of samples with skewed lengths, a model in float32, and for each side a process of one thread that takes
whole updates: forward, backward, the norm, clipping and AdamW's step. They take turns, the first turn is not counted,
and the best of the others is what is shown. Time is the processor's, of the process, which others on the machine
disturb least. Tokens are those of the samples, without padding.

core     the core's model: DeepSpeed, micro-steps packed without padding, accumulators in float32
plain    transformers and torch's fused AdamW: samples sorted by length, padded on the right, no mask
TRL      the loss of TRL's GRPOTrainer on the same pieces, and the same optimizer (after `make trl`)

All of them compute the same loss, which is checked. Then come a store, a feeder and two trainers, with updates of one
cell and of two in turn (its time is the wall's, so that it needs two idle cores), pulls of weights, joins, and what a
GPU does, where there is one. It exits with 1 where losses differ, or, without `--quick`, where a ratio falls short.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import _peer_batch
from _common import ROOT, keep, parser
from rich.console import Console
from rich.table import Table

from gyre import config as configuration
from gyre import models

TRL_PYTHON = ROOT / ".venv-trl/bin/python"
SAME_LOSS = 1e-5
SAME_NORM = 1e-3  # torch's own norm of a large tensor is off by some 1e-5 in float32
#: Parts that have a module of their own, and the words above their rows.
SECTIONS = {"weights": "Weights", "joins": "A satellite joins", "gpu": "One GPU"}


@dataclass(frozen=True)
class Size:
    """What is measured: samples, their median and largest length, tokens of a micro-step, and how often."""

    model: str | None
    samples: int
    median: int
    longest: int
    budget: int
    times: int


FULL = Size("gyre:smollm2-135m-instruct", 32, 128, 1024, 2048, 2)
QUICK = Size(None, 24, 64, 256, 512, 1)


class Broken(Exception):
    """A side ended, or computes something else."""


class Side:
    """A process that takes updates when it is told to."""

    def __init__(self, name: str, python: str | Path, model: Path, samples: Path, size: Size, log: Path) -> None:
        self.name = name
        self.updates: list[dict[str, Any]] = []
        self._log = log
        self._errors: TextIO = log.open("w")
        self._process = subprocess.Popen(
            [str(python), str(ROOT / f"benchmarks/_peer_{name}.py"), str(model), str(samples), str(size.budget)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(),
        )

    def ready(self) -> None:
        """Wait until it is."""
        self._answer()

    def update(self) -> None:
        """Have it take one."""
        assert self._process.stdin is not None
        self._process.stdin.write("update\n")
        self._process.stdin.flush()
        self.updates.append(self._answer())

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise Broken(f"{self.name} ended:\n{self._log.read_text()[-2000:]}")

    @property
    def seconds(self) -> float:
        """The processor's, of the best update but the first."""
        return min(update["seconds"] for update in self.updates[1:])


def environment() -> dict[str, str]:
    """One thread, no GPU."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def small_model(directory: Path) -> Path:
    """A random Llama of 8 million parameters, and a tokenizer, which TRL wants to have."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    for file in models.resolve("gyre:tiny").glob("*token*"):
        shutil.copy(file, directory)
    return directory


def peers(path: Path, model: Path, samples: Path, size: Size) -> dict[str, Side]:
    """All sides, and their updates."""
    pythons = {"core": Path(sys.executable), "plain": Path(sys.executable), "trl": TRL_PYTHON}
    if not TRL_PYTHON.is_file():
        print("TRL is not installed: `make trl` does it, in an environment of its own", file=sys.stderr)
        del pythons["trl"]
    script = str(ROOT / "benchmarks/_peer_plain.py")
    scoring = [sys.executable, script, str(model), str(samples), str(size.budget), "score"]
    subprocess.run(scoring, env=environment(), check=True, stderr=subprocess.DEVNULL)
    sides: dict[str, Side] = {}
    try:
        for name, python in pythons.items():
            sides[name] = Side(name, python, model, samples, size, path / f"{name}.log")
            sides[name].ready()
        for turn in range(size.times + 1):
            for side in sides.values():
                tell(f"{side.name}, update {turn + 1} of {size.times + 1}")
                side.update()
    finally:
        for side in sides.values():
            side.stop()
    return sides


def check(sides: dict[str, Side]) -> None:
    """All sides compute the same."""
    for side in sides.values():
        for own, update in zip(side.updates, sides["core"].updates, strict=True):
            if abs(own["loss"] - update["loss"]) > SAME_LOSS or abs(own["norm"] / update["norm"] - 1) > SAME_NORM:
                raise Broken(f"{side.name} computes {own}, the core {update}")


def peer_rows(sides: dict[str, Side], samples: _peer_batch.Samples) -> list[dict[str, Any]]:
    """A row for each side."""
    words = {"core": "the core alone", "plain": "transformers + AdamW", "trl": "TRL"}
    core, tokens = sides["core"].seconds, len(samples.tokens)
    return [
        {
            "what": f"{words[name]}, tokens/s",
            "value": tokens / side.seconds,
            "ratio": None if name == "core" else side.seconds / core,
            "wanted": None if name == "core" else 1.0,
        }
        for name, side in sides.items()
    ]


def cell_rows(path: Path, model: Path, samples: Path, size: Size) -> list[dict[str, Any]]:
    """Rows for one cell and two."""
    import _training_cells

    os.environ.update(environment())
    config = configuration.build(
        {
            "name": "training",
            "model": {"path": str(model), "dtype": "float32", "max_context": 4096},
            "tasks": {"path": "none"},
            "harness": {"command": ["none"], "score": {"command": ["none"]}},
            "cells": {"count": 2, "slots": 1, "gpus": 0},
            "scheduler": {"batch_groups": size.samples // 2, "group_size": 2},
            "train": {"updates": 1000, "lr": 1e-6, "micro_tokens": size.budget // 2},
        }
    )
    tell("two cells")
    found = asyncio.run(_training_cells.measure(path, model, samples, config, size.times))
    tokens = len(_peer_batch.Samples.load(samples).tokens)
    one, two = min(found["one"]), min(found["two"])
    shares = [", ".join(str(count) for _, count in sorted(steps.items())) for steps in found["micro_steps"]]
    return [
        {"what": "one cell in the stream, tokens/s", "value": tokens / one, "ratio": None, "wanted": None},
        {
            "what": f"two cells (micro-steps {'; '.join(shares)}), tokens/s",
            "value": tokens / two,
            "ratio": one / two,
            "wanted": None,
        },
    ]


def section_rows(section: str, quick: bool) -> list[dict[str, Any]]:
    """Rows of a part that has a module of its own; none where it is not there, or cannot be measured here."""
    if importlib.util.find_spec(f"_{section}") is None:
        return []
    module = importlib.import_module(f"_{section}")
    if section != "weights":
        return module.rows(quick)
    found = module.rows(*((0.25, 7) if quick else (1.0, 15)))
    return [row | {"what": f"{row['what']}, against {row['reference']}, GB/s", "value": row["rate"]} for row in found]


def tell(text: str) -> None:
    """Say what is being done, where somebody looks."""
    if sys.stderr.isatty():
        print(f"\r{text:<60}", end="\r", file=sys.stderr)


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows."""
    table = Table("", "figure", "ratio", "wanted", title=title, title_justify="left")
    for row in rows:
        ratio, wanted = row.get("ratio"), row.get("wanted")
        shown = ("" if ratio is None else f"{ratio:.2f} x", "" if wanted is None else f"{wanted:.1f} x")
        table.add_row(row["what"], f"{row['value']:,.4g}", *shown)
    Console().print(table)


def main() -> int:
    """Measure, print, and say whether the core is slow."""
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=("peers", "cells", *SECTIONS), help="one part alone")
    options = arguments.parse_args()
    size = QUICK if options.quick else FULL
    figures: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="gyre-training-") as name:
        path = Path(name)
        model = models.resolve(size.model) if size.model else small_model(path / "model")
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        samples, file = _peer_batch.make(size.samples, size.median, size.longest, vocabulary), path / "samples.npz"
        samples.save(file)
        if options.only in (None, "peers"):
            sides = peers(path, model, file, size)
            figures["peers"] = peer_rows(sides, _peer_batch.Samples.load(file))
            show(f"{len(samples.tokens)} tokens, {samples.trained.sum()} of them trained", figures["peers"])
            check(sides)
        if options.only in (None, "cells"):
            figures["cells"] = cell_rows(path / "cells", model, file, size)
            show("Cells, one thread each", figures["cells"])
    for section, title in SECTIONS.items():
        if options.only in (None, section) and (rows := section_rows(section, options.quick)):
            figures[section] = rows
            show(title, rows)
    keep(options.json, figures)
    slow = [row for rows in figures.values() for row in rows if row.get("wanted") and row["ratio"] < row["wanted"]]
    return 1 if slow and not options.quick else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Broken as error:
        sys.exit(f"benchmarks/training.py: {error}")
