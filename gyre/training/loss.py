"""The loss of one micro-step: a sum over its trained tokens, never a mean. Torch only."""

from __future__ import annotations

import torch
from torch import nn

from gyre.training.batch import Batch
from gyre.training.objectives import Objective, objective_loss
from gyre.training.statistics import Statistics


def micro_step_loss(
    scorer: nn.Module, batch: Batch, objective: Objective, reference: torch.Tensor | None = None
) -> tuple[torch.Tensor, Statistics]:
    """Loss sum of a micro-step, with a graph, and its statistics; `scorer` is a `Scorer` or an engine around one.

    `reference` are the log-probabilities float32 [m] under the reference, where the objective asks for them.
    """
    current, entropy = scorer(batch)
    return objective_loss(objective, current, entropy, batch, reference)
