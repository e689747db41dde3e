"""The loss of one micro-step: a sum over its trained tokens, never a mean. Torch only.

Per token: the importance ratio of the current policy against the recorded log-probability, clipped, times the
advantage and the weight that came with the data. The division by the total weight happens once per update, at the
core (`gyre.training.update`), since only there the total is known.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import nn

from gyre.training.packing import MicroStep

_LOG_RATIO_LIMIT = 20.0  # beyond it the ratio is clipped anyway, and exp would overflow


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


class Scorer(nn.Module):
    """A causal language model that gives log-probabilities and entropies of chosen tokens alone.

    It computes logits at those positions only: full logits of a micro-step would outweigh everything else. Models
    whose logits are more than a projection of the last hidden state (`check` finds out) are run whole.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.whole = False

    @torch.no_grad()
    def check(self) -> None:
        """Find out on a few tokens whether projecting hidden states gives the model's logits."""
        device = next(self.model.parameters()).device
        tokens = torch.arange(1, 9, device=device)[None] % self.model.config.vocab_size
        expected = self.model(input_ids=tokens, use_cache=False).logits[0].float()
        hidden = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        found = self.model.get_output_embeddings()(hidden)[0].float()
        self.whole = not torch.allclose(found, expected, rtol=1e-3, atol=1e-3)

    def forward(
        self, tokens: torch.Tensor, row: torch.Tensor, column: torch.Tensor, temperature: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and (without gradient) entropy of `tokens[row, column]`, float32 [m] each.

        Both are of the processed distribution: logits are divided by the temperature, as the sampler did.
        """
        if self.whole:
            logits = self.model(input_ids=tokens, use_cache=False).logits[row, column - 1]
        else:
            hidden = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
            logits = self.model.get_output_embeddings()(hidden[row, column - 1])
        logits = logits.float() / temperature[:, None]
        norm = torch.logsumexp(logits, -1)
        chosen = logits.gather(-1, tokens[row, column][:, None])[:, 0] - norm
        with torch.no_grad():
            entropy = norm - (torch.softmax(logits, -1) * logits).sum(-1)
        return chosen, entropy


@dataclass(frozen=True)
class Batch:
    """A micro-step as tensors on the trainer's device."""

    tokens: torch.Tensor  # int64 [R, W]
    row: torch.Tensor  # int64 [m]
    column: torch.Tensor  # int64 [m]
    logprobs: torch.Tensor  # float32 [m], as are the following
    advantages: torch.Tensor
    weights: torch.Tensor
    temperatures: torch.Tensor

    @classmethod
    def of(cls, step: MicroStep, device: torch.device | str) -> Batch:
        """Put a micro-step on a device."""
        tensors = {f.name: torch.from_numpy(getattr(step, f.name).copy()).to(device) for f in fields(cls)}
        for name in ("tokens", "row", "column"):
            tensors[name] = tensors[name].long()
        return cls(**tensors)


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
    current, entropy = scorer(batch.tokens, batch.row, batch.column, batch.temperatures)
    loss, statistics = clipped_ratio_loss(current, batch.logprobs, batch.advantages, batch.weights, clip)
    statistics.entropy = float(entropy.double().sum())
    return loss, statistics
