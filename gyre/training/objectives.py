"""Objectives: the loss of a micro-step's trained tokens, as functions of what arrives with them.

Every loss is a sum over tokens of weight x token loss, never a mean: the division happens once per update, at the core,
by `gradient_scale`. Advantages and weights come with the data (`gyre.training.rows`), so an objective is no more than
what it makes of the importance ratio

    r = p / q,  p the token's probability under the weights that are trained, q the one that its sampler recorded.

The sampler's policy takes the place of the papers' old one: each group is in one optimizer step, so there is no third
policy between the one that sampled and the one that is trained, and what separates the two (staleness, rounding) is
what the ratio has to correct. docs/objectives.md has the formulas side by side.

Torch is imported where it is needed, since the feeder reads an objective's choices and computes no loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gyre.config_train import TrainConfig
from gyre.training.statistics import Statistics

if TYPE_CHECKING:
    import torch

    from gyre.training.batch import Batch

_LOG_LIMIT = 20.0  # of a ratio: beyond it any clipping or truncation has set in, and exp would overflow


@dataclass(frozen=True)
class Objective:
    """An objective with all of its choices made.

    `low` and `high` are bounds of the ratio. Form "clipped": a token whose ratio is out of bounds, on the side that its
    advantage pushes to, has no gradient (PPO). Form "weighted": every token has the gradient of its log-probability,
    weighted by its ratio within bounds (REINFORCE with importance weights).
    """

    name: str
    form: Literal["clipped", "weighted"]
    ratio: Literal["token", "sample"]  # sample: the geometric mean over a sample's trained tokens
    low: float | None
    high: float | None
    baseline: Literal["mean", "others"]  # of a group's scores: all of them, or all others'
    divisor: Literal["group", "update", "none"]  # the advantages' standard deviation, over what; none: not divided
    averaging: Literal["execution", "token", "constant"]
    truncation: float | None
    kl: float

    @classmethod
    def of(cls, train: TrainConfig) -> Objective:
        """The objective that is configured; what is not configured is the objective's own."""
        own = _OWN[train.objective]
        low, high = own.low, own.high
        if train.clip_ratio is not None:
            low = high = train.clip_ratio
        if train.clip_ratio_high is not None:
            high = train.clip_ratio_high
        return cls(
            name=train.objective,
            form=own.form,
            ratio=own.ratio,
            low=None if low is None else 1 - low,
            high=None if high is None else 1 + high,
            baseline=own.baseline,
            divisor=own.divisor,
            averaging=train.averaging or own.averaging,
            truncation=train.truncation,
            kl=train.kl,
        )


@dataclass(frozen=True)
class _Own:
    """An objective's own choices; `low` and `high` are distances of the bounds from 1."""

    form: Literal["clipped", "weighted"] = "clipped"
    ratio: Literal["token", "sample"] = "token"
    low: float | None = 0.2
    high: float | None = 0.2
    baseline: Literal["mean", "others"] = "mean"
    divisor: Literal["group", "update", "none"] = "group"
    averaging: Literal["execution", "token", "constant"] = "execution"


_OWN = {
    # "DeepSeekMath", arXiv 2402.03300, equations 3 (the loss) and 4 (the divergence from a reference)
    "grpo": _Own(),
    # "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476, equation 8
    "dapo": _Own(high=0.28, averaging="token"),
    # "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv 2503.20783, section 3.2
    "dr_grpo": _Own(divisor="none", averaging="constant"),
    # "Group Sequence Policy Optimization", arXiv 2507.18071, equations 5 and 7, bounds of section 5.1
    "gspo": _Own(ratio="sample", low=3e-4, high=4e-4),
    # "MiniMax-M1", arXiv 2506.13585, section 3.1: a weight clip(r) with stopped gradient, and no lower bound
    "cispo": _Own(form="weighted", low=None, high=None, averaging="token"),
    # "Back to Basics: Revisiting REINFORCE Style Optimization", arXiv 2402.14740: the gradient of log p, no clipping
    "rloo": _Own(form="weighted", low=None, high=None, baseline="others", divisor="none", averaging="token"),
    # "REINFORCE++: Stabilizing Critic-Free Policy Optimization", arXiv 2501.03262, the variant with a group baseline
    "reinforce++": _Own(divisor="update"),
}


def objective_loss(
    objective: Objective,
    current: torch.Tensor,
    entropy: torch.Tensor,
    batch: Batch,
    reference: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Statistics]:
    """The loss sum of a micro-step's m trained tokens, with a graph, and its statistics.

    Args:
        objective: what to compute.
        current: log-probabilities float32 [m] under the weights that are trained, with a graph.
        entropy: float32 [m], for the statistics.
        batch: the micro-step; of it `starts`, `segment`, `logprobs`, `advantages` and `weights` are read.
        reference: log-probabilities float32 [m] under the reference; needed where `objective.kl` is above 0.
    """
    import torch

    log_ratio = current - batch.logprobs
    chosen = log_ratio if objective.ratio == "token" else _sample_means(log_ratio, batch)
    value, factor, clipped, truncated = _surrogate(objective, chosen.detach(), current.detach(), batch.advantages)
    # `factor` is what multiplies the gradient of the log ratio, which is that of log p; the difference itself is 0
    token_loss = -(value + factor * (chosen - chosen.detach()))
    divergence = torch.zeros_like(entropy)
    if objective.kl:
        if reference is None:
            raise ValueError("train.kl is above 0 and there are no log-probabilities of a reference")
        divergence = _k3(reference - current)
        token_loss = token_loss + objective.kl * divergence
    loss = (token_loss * batch.weights).sum()
    with torch.no_grad():
        plain = log_ratio.double()
        ratio = chosen.double().clamp(-_LOG_LIMIT, _LOG_LIMIT)
        sums = (
            loss.double(),
            batch.weights.double().sum(),
            clipped.double().sum(),
            ratio.exp().sum(),
            _k3(plain).sum(),
            entropy.double().sum(),
            truncated.double().sum(),
            plain.abs().sum(),
            divergence.double().sum(),
            (batch.weights.double() * batch.advantages.double() ** 2).sum(),
            ratio.max().exp(),
            (-ratio.min()).exp(),
            plain.abs().max(),
        )
        known = torch.stack(sums).tolist()  # one transfer from a device
    return loss, Statistics(known[0], float(len(current)), *known[1:])


def _surrogate(
    objective: Objective, log_ratio: torch.Tensor, current: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """By token: the objective's value, what multiplies the log ratio's gradient, and whether clipped, truncated."""
    ratio = log_ratio.clamp(-_LOG_LIMIT, _LOG_LIMIT).exp()
    bounded = ratio.clamp(objective.low, objective.high) if (objective.low or objective.high) else ratio
    if objective.form == "clipped":
        clipped = bounded * advantages < ratio * advantages
        weight = ratio
    else:
        clipped = bounded != ratio
        weight = bounded
    truncated = weight > (math.inf if objective.truncation is None else objective.truncation)
    if objective.truncation is not None:
        weight = weight.clamp(max=objective.truncation)
    factor = weight * advantages
    if objective.form == "weighted":
        return factor * current, factor, clipped, truncated
    return (bounded * advantages).where(clipped, factor), factor.where(~clipped, 0.0), clipped, truncated & ~clipped


def _sample_means(log_ratio: torch.Tensor, batch: Batch) -> torch.Tensor:
    """For each token the mean over the trained tokens of its sample, with a graph."""
    count, segment = len(batch.starts) - 1, batch.segment
    sums = log_ratio.new_zeros(count).index_add(0, segment, log_ratio)
    counts = log_ratio.new_zeros(count).index_add(0, segment, log_ratio.new_ones(len(segment)))
    return (sums / counts.clamp(min=1))[segment]


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(x) - 1 - x, the estimator of a divergence that is never negative (Schulman's k3)."""
    return log_ratio.clamp(-_LOG_LIMIT, _LOG_LIMIT).exp() - 1 - log_ratio


def gradient_scale(objective: Objective, statistics: Statistics) -> float:
    """What the sum of an update's gradients is multiplied by; `statistics` are those of the whole update.

    It is 1 / total weight. Where advantages are divided by their standard deviation over the update, which nobody knows
    before the update is complete, it is 1 / (total weight x deviation): the loss is homogeneous in the advantage, so
    the result is that of advantages divided beforehand. 0 where nothing has a weight.
    """
    if statistics.weight <= 0:
        return 0.0
    deviation = 1.0
    if objective.divisor == "update":
        deviation = math.sqrt(statistics.advantage_squares / statistics.weight) or 1.0
    return 1.0 / (statistics.weight * deviation)
