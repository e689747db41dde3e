"""What things cost in a simulated world, and what is counted there. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from gyre.simulate.workload import Shuffler


class Chance(Shuffler, Protocol):
    """The part of `random.Random` that a world needs."""

    def random(self) -> float:
        """From 0 to 1."""

    def uniform(self, low: float, high: float, /) -> float:
        """From low to high."""

    def randrange(self, start: int, stop: int, /) -> int:
        """From start to stop - 1."""


@dataclass(frozen=True)
class GroupWork:
    """What one group costs: slot seconds of each execution, and cell-seconds of training it."""

    rollout_s: tuple[float, ...]
    train_s: float


@dataclass(frozen=True)
class Costs:
    """What things cost in virtual seconds, and how often they go wrong."""

    to_training_s: float = 0.0
    to_rollout_s: float = 0.0
    slowdown: float = 0.0  # of an engine per further live execution; 0: durations are slot time whatever the load
    micro_steps: int = 32  # of a group
    step_s: float = 0.0  # from the last micro-step to the optimizer's step and its commit
    sync_s: float = 0.0  # an engine loads a policy while it stays in rollout; its executions stand still
    failed: float = 0.0  # probability that an execution ends without anything to train on
    try_failed: float = 0.0  # probability that the infrastructure fails a try
    timeout_s: float | None = None  # slot seconds after which an execution is ended, unusable
    cell_failures: int = 0  # engines of satellites that fail over the run, at random times before `horizon_s`
    host_failures: int = 0
    restart_s: float = 120.0  # of a failed engine or host
    horizon_s: float = 0.0  # `compare` takes the time of the ideal where it is 0

    @property
    def random(self) -> bool:
        """Whether anything is left to chance."""
        return bool(self.failed or self.try_failed or self.cell_failures or self.host_failures)


@dataclass
class Tally:
    """What happened in a world so far."""

    rollout_slot_s: float = 0.0  # slot seconds of finished executions
    training_s: float = 0.0  # cell-seconds of finished micro-steps
    moves: int = 0  # orders into training
    updates: int = 0
    staleness: list[int] = field(default_factory=list)  # per trained group: versions since its oldest token
    served_slot_s: float = 0.0  # engines' slots with a live execution, over time
    committed_at: list[float] = field(default_factory=list)  # time of each policy
