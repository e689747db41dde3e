"""A made-up run directory for tests of what people look at: three cells, one host, a few updates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gyre import config as configuration
from gyre import events as e
from gyre.config import Config
from gyre.run_dir import RunDir
from gyre.status import Phase, RankStatus, RunStatus, SchedulerStatus, StreamStatus, encode

START = 1_760_000_000.0
#: What a trainer says of an update.
METRICS = {
    "loss": -0.11651, "reward": 0.25, "grad_norm": 2.4413, "lr": 2.5e-5, "tokens": 12_345.0, "weight": 32.0,
    "clip_fraction": 0.0215, "truncated_fraction": 0.0004, "ratio_mean": 0.9989, "ratio_min": 0.71, "ratio_max": 1.39,
    "kl": 0.01039, "kl_reference": 0.0312, "entropy": 0.3536, "mismatch_mean": 0.00712, "mismatch_max": 0.2218,
    "groups": 4, "sequence_tokens": 51_350, "fill": 0.9643, "staleness_mean": 0.1435, "staleness_max": 1,
    "cell_seconds": 17.0, "seconds_compute": 7.2, "seconds_wait": 1.3, "seconds_reduce": 0.6, "seconds_step": 0.5,
    "seconds_snapshot": 0.4,
}  # fmt: skip


def make_config(**changes: Any) -> Config:
    """Three cells of four slots, one host, 6 updates of 4 groups of 2."""
    data: dict[str, Any] = {
        "name": "sample",
        "model": {"path": "gyre:tiny"},
        "tasks": {"path": "tasks.jsonl"},
        "harness": {"command": ["true"], "score": {"command": ["true"]}},
        "cells": {"count": 3, "slots": 4, "gpus": 0},
        "scheduler": {"batch_groups": 4, "group_size": 2, "lookahead": 0},
        "train": {"updates": 6},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            data[section][name] = value
        else:
            data[section] = value
    return configuration.build(data)


class Script:
    """Writes events of a run in the order they would come; a clock that its methods move."""

    def __init__(self, t: float = START) -> None:
        self.t = t
        self.attempt = 0
        self.events: list[dict[str, Any]] = []
        self.epoch = 0

    def say(self, event: e.Event, after: float = 0.0) -> None:
        self.t += after
        self.events.append({"t": self.t, "attempt": self.attempt, **e.encode(event)})

    def start(self, version: int = 0) -> None:
        self.attempt += 1
        self.say(e.RunStarted(version=version, cells=3, standalone=0, hosts=1))
        for rank in range(4):
            self.say(e.RankReady(rank, 1, "node"), 5)

    def quota(self, first: int, last: int, reason: str = "burst", batch: int = 1) -> None:
        self.say(e.QuotaPublished(batch=batch, first=first, last=last, reason=reason))

    def close(self, n: int, score: float | None = 0.5, outcome: str = "completed", **more: Any) -> None:
        self.say(e.ExecutionGranted(n, 1, 3, n % 3), 0.5)
        self.say(e.ExecutionClosed(n, 1, outcome, score, score is not None, 0, 3.0, tokens=40, requests=2, **more), 1)

    def move(self, rank: int, target: str, seconds: float = 2.0) -> None:
        source = {"TRAINING": "ROLLOUT", "ROLLOUT": "TRAINING"}[target]
        self.epoch += 1
        self.say(e.MoveStarted(rank, self.epoch, source, target, "w 2 fits capacity 4", []))
        between = "RELEASING" if target == "TRAINING" else "SYNCING"
        self.say(e.RoleReached(rank, 1, self.epoch, between), seconds / 2)
        self.say(e.RoleReached(rank, 1, self.epoch, target), seconds / 2)

    def update(
        self,
        update: int,
        groups: list[int],
        joined: tuple[int, ...] = (1,),
        seconds: float = 10.0,
        metrics: dict[str, float] | None = None,
    ) -> None:
        self.say(e.UpdateOpened(update))
        for position, rank in enumerate(joined, 1):
            self.say(e.CellJoined(rank, update, position), 1)
        for group in groups:
            self.say(e.GroupTaken(group, update), 0.5)
        steps = {str(rank): 2 for rank in (0, *joined)}
        self.say(e.UpdateDone(update, 1 + len(joined), steps, seconds, metrics or METRICS), seconds)

    def publish(self, version: int) -> None:
        self.say(e.PolicyCommitted(version, f"checksum-{self.attempt}-{version}", 0.5), 0.5)
        self.say(e.PolicyPublished(version), 0.5)

    def batch(self, update: int, scores: tuple[float, float] = (0.0, 1.0), joined: tuple[int, ...] = (1,)) -> None:
        """A whole batch of 4 groups of 2, numbered from the update (from 1)."""
        first = (update - 1) * 8
        self.quota(first, first + 7, batch=update)
        for group in range(4):
            for member in range(2):
                self.close(first + 2 * group + member, scores[member])
            self.say(e.GroupReady((update - 1) * 4 + group, list(scores)))
        for rank in (0, *joined):
            self.move(rank, "TRAINING")
        self.update(update, [(update - 1) * 4 + group for group in range(4)], joined)
        for rank in (*joined, 0):
            self.move(rank, "ROLLOUT", 4.0)
        self.publish(update)

    def end(self, how: str = "completed") -> None:
        seconds = self.t - next(x["t"] for x in self.events if x["attempt"] == self.attempt)
        self.say(e.Usage(3 * seconds, 1.2 * seconds, 0.6 * seconds, 640, 900, 4000.0, 4200.0))
        self.say(e.RunEnded(how))


def make_status(t: float, state: str = "running", **changes: Any) -> RunStatus:
    """What rank 0 would write in the middle of update 3."""
    status = RunStatus(
        name="sample",
        time=t,
        started=START,
        state=state,  # type: ignore[arg-type]
        scheduler=SchedulerStatus(
            d=24, p=22, f=19, capacity=4, ready=1, batch_groups=4, taken=2, batch=3, batches=6, update=3, updates=6,
            version=2, prefix=2, gate="capacity 4 after the move would not cover w 5",
        ),  # fmt: skip
        stream=StreamStatus(update=3, published=5, claimed=4, finished=2),
        ranks=[
            RankStatus(0, "core", 1, "node", "TRAINING", t - 12, "update 3: micro-step 3", None, 0, 0, pss_mb=4000),
            RankStatus(1, "satellite", 1, "node", "RELEASING", t - 1, "giving up engine memory", 0.5, pss_mb=1500),
            RankStatus(2, "satellite", 2, "node", "ROLLOUT", t - 40, "serving policy 2", None, 3, 4, 2,
                       tokens_per_second=76.4, pss_mb=1500),
            RankStatus(3, "host", 1, "node", "HOSTING", t - 100, "running executions 21, 22, 23", None, 3, 256),
        ],
        reward=0.75,
        tokens_per_second=76.4,
        pss_mb=7100,
    )  # fmt: skip
    for key, value in changes.items():
        setattr(status, key, value)
    return status


def starting_status(t: float) -> RunStatus:
    """What rank 0 would write while engines load."""
    ranks = [
        RankStatus(0, "core", doing="trainer: loading the model", since=t - 9),
        RankStatus(1, "satellite", doing="engine: loading weights", fraction=0.4, since=t - 9),
        RankStatus(2, "satellite", doing="engine: loading weights", fraction=0.4, since=t - 9),
    ]
    phases = [Phase("model", "converting SmolLM2 to safetensors", 0.25, t - 20)]
    return RunStatus("sample", t, t - 20, state="starting", ranks=ranks, phases=phases)


def write_run(path: Path, config: Config, events: list[dict[str, Any]], status: RunStatus | None) -> RunDir:
    """Put a run's files in place."""
    run = RunDir(path).create()
    run.config.write_text(configuration.dump(config))
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    if status is not None:
        run.status.write_text(encode(status))
    return run
