"""The learning rate of an update. Pure."""

from __future__ import annotations

import math

from gyre.config_train import ScheduleConfig


def lr_at(schedule: ScheduleConfig, lr: float, update: int, updates: int) -> float:
    """The learning rate of an update, counted from 1, of a run of `updates`.

    During warm-up it is lr x update / warmup, so the last update of warm-up has all of it, and none has nothing. Then
    it stays, or falls from lr, in a line or along half a cosine, to lr x floor, which the update after the run's last
    one would have: with a floor of 0 the last update still does something.

    Raises:
        ValueError: there is no such update.
    """
    if update < 1:
        raise ValueError(f"updates are counted from 1, not {update}")
    if update <= schedule.warmup:
        return lr * update / schedule.warmup
    if schedule.kind == "constant":
        return lr
    begin = max(schedule.warmup, 1)  # the update that has all of lr
    gone = min(1.0, (update - begin) / (updates + 1 - begin))
    left = 1.0 - gone if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * gone))
    return lr * (schedule.floor + (1.0 - schedule.floor) * left)
