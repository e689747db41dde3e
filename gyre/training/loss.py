"""The loss of one micro-step: a sum over its trained tokens, never a mean. Torch only.

Per token: the importance ratio of the current policy against the recorded log-probability, clipped, times the
advantage and the weight that came with the data. The division by the total weight happens once per update, at the
core (`gyre.training.update`), since only there the total is known.
"""

from __future__ import annotations

import torch
from torch import nn

from gyre.training.batch import Batch
from gyre.training.statistics import Statistics

_LOG_RATIO_LIMIT = 20.0  # beyond it the ratio is clipped anyway, and exp would overflow


def clipped_ratio_loss(
    current: torch.Tensor, recorded: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor, clip: float
) -> tuple[torch.Tensor, Statistics]:
    """Sum over tokens of `-min(r a, clip(r, 1 - clip, 1 + clip) a) w`, with r = exp(current - recorded).

    All arguments are float32 [m]; the entropy of the statistics is left at 0.
    """
    log_ratio = (current - recorded).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip, 1 + clip) * advantages
    loss = -(torch.minimum(plain, bounded) * weights).sum()
    with torch.no_grad():
        statistics = Statistics(
            loss=float(loss.double()),
            tokens=float(len(current)),
            weight=float(weights.double().sum()),
            clipped=float((bounded < plain).sum()),
            ratio=float(ratio.double().sum()),
            kl=float((ratio - 1 - log_ratio).double().sum()),
        )
    return loss, statistics


def micro_step_loss(scorer: nn.Module, batch: Batch, clip: float) -> tuple[torch.Tensor, Statistics]:
    """Loss sum of a micro-step, with a graph, and its statistics; `scorer` is a `Scorer` or an engine around one."""
    current, entropy = scorer(batch)
    loss, statistics = clipped_ratio_loss(current, batch.logprobs, batch.advantages, batch.weights, clip)
    statistics.entropy = float(entropy.double().sum())
    return loss, statistics
