"""The policies that the scheduler is tested under, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gyre.scheduler.policy import Async, Colocate, Elastic, Policy


@dataclass(frozen=True)
class Under:
    """A policy, the settings that it needs, and what it finds measured in a world without time (`memo.Measured`)."""

    policy: Policy
    settings: dict[str, Any] = field(default_factory=dict)
    measured: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    @property
    def split(self) -> bool:
        """Whether cells that train can never serve."""
        return bool(self.settings.get("trainers"))


POLICIES: dict[str, Under] = {
    "plain": Under(Elastic.plain()),
    "elastic": Under(Elastic()),
    "measured": Under(Elastic(), {"longest_first": True}, (10.0, 10.0, 1.0, 1.0)),
    "colocate": Under(Colocate()),
    "async": Under(Async(), {"trainers": 1}),
    "async-stream": Under(Async(streaming=True), {"trainers": 1}),
}
