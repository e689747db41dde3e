"""What is known of an update beside its gradient: sums and extremes over trained tokens. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


def _largest() -> float:
    """A field of which the larger one counts; all of them are at least 0."""
    return field(default=0.0, metadata={"largest": True})


@dataclass
class Statistics:
    """Sums over trained tokens, in float64, and extremes; both add up over micro-steps and members.

    The *ratio* is the importance ratio that the objective works with: of a token, or of a whole sample. The *mismatch*
    of a token is |log p - log q|, p its probability now and q the one that its sampler recorded.
    """

    loss: float = 0.0
    tokens: float = 0.0
    weight: float = 0.0
    clipped: float = 0.0  # tokens that the objective's clipping leaves without a gradient, or whose weight it lowers
    ratio: float = 0.0
    kl: float = 0.0  # of the sampler from the trainer, the estimator r - 1 - log r with r = p / q
    entropy: float = 0.0
    truncated: float = 0.0  # tokens whose importance weight is lowered to train.truncation
    mismatch: float = 0.0
    kl_reference: float = 0.0  # of the trainer from the reference, as it is in the loss
    advantage_squares: float = 0.0  # weight x advantage^2
    ratio_max: float = _largest()
    inverse_max: float = _largest()  # of 1 / ratio
    mismatch_max: float = _largest()

    def add(self, other: Statistics) -> None:
        """Add another's sums; of extremes the larger one stays."""
        for item in fields(self):
            own, new = getattr(self, item.name), getattr(other, item.name)
            setattr(self, item.name, max(own, new) if item.metadata.get("largest") else own + new)

    def metrics(self) -> dict[str, float]:
        """Means by name: the loss per weight, the others per trained token; in nats where they are of probabilities.

        Of no token there is no mean, and none is given.
        """
        counts = {"tokens": self.tokens, "weight": self.weight}
        if not self.tokens:
            return counts
        tokens = self.tokens
        return counts | {
            "loss": self.loss / self.weight if self.weight else 0.0,
            "clip_fraction": self.clipped / tokens,
            "truncated_fraction": self.truncated / tokens,
            "ratio_mean": self.ratio / tokens,
            "ratio_min": 1.0 / self.inverse_max if self.inverse_max else 0.0,
            "ratio_max": self.ratio_max,
            "kl": self.kl / tokens,
            "mismatch_mean": self.mismatch / tokens,
            "mismatch_max": self.mismatch_max,
            "kl_reference": self.kl_reference / tokens,
            "entropy": self.entropy / tokens,
        }
