"""What is known of an update beside its gradient: sums over trained tokens. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Statistics:
    """Sums over trained tokens, in float64; they add up over micro-steps and members."""

    loss: float = 0.0
    tokens: float = 0.0
    weight: float = 0.0
    clipped: float = 0.0
    ratio: float = 0.0
    kl: float = 0.0  # of the sampler from the trainer, the estimator r - 1 - log r with r = current / recorded
    entropy: float = 0.0

    def add(self, other: Statistics) -> None:
        """Add another's sums."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
