"""From a micro-step's tokens to log-probabilities and entropies of the trained ones. Torch only.

`Scorer` runs a causal language model over packed samples. Its pieces can be run apart: `run` takes tokens or hidden
states through the layers, `score` gives log-probabilities of what comes out.
Logits exist at the places of trained tokens alone, and not all at once: all of a micro-step would outweigh everything
else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gyre.training import attention
from gyre.training.batch import Batch

_BLOCK_BYTES = 64 << 20  # of float32 logits, worked on at a time
_LOGITS_BYTES = 1 << 30  # of a micro-step's logits, in the model's precision; more are computed piece by piece, twice


class _Chosen(torch.autograd.Function):
    """Log-probability and entropy of chosen entries; the logits are kept in their own precision, and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = _rows(logits)
        norm, chosen, entropy = (torch.empty_like(temperatures) for _ in range(3))
        for begin in range(0, len(logits), rows):
            part = slice(begin, begin + rows)
            own = logits[part].float() / temperatures[part, None]
            norm[part] = torch.logsumexp(own, -1)
            own.sub_(norm[part, None])
            chosen[part] = own.gather(-1, targets[part, None])[:, 0]
            entropy[part] = -own.exp().mul_(own).sum(-1)
        ctx.save_for_backward(logits, targets, temperatures, norm)
        ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, targets, temperatures, norm = ctx.saved_tensors
        rows = _rows(logits)
        gradient = torch.empty_like(logits)
        for begin in range(0, len(logits), rows):  # of log softmax: (1 at the chosen one) - softmax
            part = slice(begin, begin + rows)
            factor = (outer[part] / temperatures[part])[:, None]
            own = (logits[part].float() / temperatures[part, None]).sub_(norm[part, None]).exp_().mul_(-factor)
            gradient[part] = own.scatter_add_(-1, targets[part, None], factor)
        return gradient, None, None


def _rows(logits: torch.Tensor) -> int:
    return max(1, _BLOCK_BYTES // (4 * logits.shape[-1]))


def score(
    project: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    batch: Batch,
    agree: Callable[[int], int] = int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and (without gradient) entropy of the trained tokens, float32 [m] each.

    `hidden` [T, H] is what the last layer and its norm give; `project` makes logits [n, V] of hidden states [n, H].
    Both results are of the processed distribution: logits are divided by the temperature, as the sampler did.
    `agree` makes of the least number of calls of `project` that will do the number that there will be, which is no
    smaller; some of them may then be of no hidden states at all.
    """
    sources, targets, temperatures = hidden[batch.place - 1], batch.tokens[batch.place], batch.temperatures
    width = getattr(project, "out_features", 0)
    rows = max(1, _LOGITS_BYTES // (max(1, width) * hidden.element_size()))
    pieces = agree(max(1, -(-len(targets) // rows))) if width else 1
    if pieces == 1:
        return _Chosen.apply(project(sources), targets, temperatures)

    def part(sources: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _Chosen.apply(project(sources), targets, temperatures)

    parts = zip(*(tensor.tensor_split(pieces) for tensor in (sources, targets, temperatures)), strict=True)
    chosen, entropies = zip(*(checkpoint(part, *one, use_reentrant=False) for one in parts), strict=True)
    return torch.cat(chosen), torch.cat(entropies)


class Scorer(nn.Module):
    """A causal language model that gives log-probabilities and entropies of the trained tokens alone.

    `check` finds out what the model allows. `whole`: its logits are more than a projection of the last hidden state,
    and it has to make them itself. `apart`: packed samples would see each other, and each is run alone.
    """

    def __init__(self, model: nn.Module, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self.model = model
        self.whole = False
        self.apart = not attention.use(model)
        #: Where each call of a module is one of all shards: has them agree on how often they call one (`score`).
        self.agree: Callable[[int], int] = int
        for module in model.modules():  # a policy with dropout is another one in training than in rollout
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = 0.0
        if checkpoint_activations:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and (without gradient) entropy of the trained tokens, float32 [m] each; as `score`."""
        if self.whole:
            return _Chosen.apply(self.logits(batch), batch.tokens[batch.place], batch.temperatures)
        return self.score(self.run(batch.tokens, batch), batch)

    def check(self) -> None:
        """Find out what the model allows; before it is first used, and with weights that were trained.

        Raises:
            UserError: it cannot be trained.
        """
        from gyre.training.probe import settle

        settle(self)

    def run(self, source: torch.Tensor, batch: Batch) -> torch.Tensor:
        """What the layers and the last norm make of tokens [T], or of hidden states [T, H]; hidden states [T, H]."""
        name = "inputs_embeds" if source.is_floating_point() else "input_ids"
        if not self.apart:
            told = attention.boundaries(batch.positions, batch.starts, batch.longest)
            return self.model.get_decoder()(**{name: source[None]}, **told).last_hidden_state[0]
        parts = source.split(batch.starts.diff().tolist())
        return torch.cat(
            [self.model.get_decoder()(**{name: part[None]}, use_cache=False).last_hidden_state[0] for part in parts]
        )

    def score(self, hidden: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and (without gradient) entropy of the trained tokens, from hidden states [T, H]."""
        return score(self.model.get_output_embeddings(), hidden, batch, self.agree)

    def logits(self, batch: Batch) -> torch.Tensor:
        """Logits [m, V] of the trained tokens, as the model itself makes them."""
        if not self.apart:
            told = attention.boundaries(batch.positions, batch.starts, batch.longest)
            return self._at(batch.tokens, batch.place - 1, **told)
        starts = batch.starts.tolist()
        parts = []
        for index, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
            own = batch.place[batch.segment == index] - begin - 1
            parts.append(self._at(batch.tokens[begin:end], own, use_cache=False))
        return torch.cat(parts)

    def _at(self, tokens: torch.Tensor, places: torch.Tensor, **told: Any) -> torch.Tensor:
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            return self.model(input_ids=tokens[None], logits_to_keep=places, **told).logits[0]
        return self.model(input_ids=tokens[None], **told).logits[0, places]
