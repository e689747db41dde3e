"""Finding out, on a few tokens, what a model allows: packed samples, and logits of hidden states. Torch only.

Models differ in ways that their configurations do not tell: some keep state across tokens that knows of no
boundaries, some ask for an attention of their own, some scale or cap their logits. What is compared with is the model
with its own attention, run on each sample alone.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch

from gyre.errors import UserError
from gyre.training.attention import UnknownAttention
from gyre.training.batch import Batch
from gyre.training.packing import MicroStep
from gyre.training.scorer import Scorer

log = logging.getLogger(__name__)

_LENGTHS = (5, 3, 7)
_EXACT, _LOW = 1e-3, 0.05  # how far logits may be off, as a fraction of their spread, in fp32 and in less
_ROUNDING = 1e-6  # how far sums of the same numbers in another order may be off, in fp32
_LEAK = 0.01  # how much tokens of another sample may change them: with experts, rounding depends on all tokens


@torch.no_grad()
def settle(scorer: Scorer) -> None:
    """Set what a scorer needs to know of its model: `apart`, `whole`, and the attention that the model uses.

    Raises:
        UserError: the model does not compute logits in any way that is known.
    """
    model, batch = scorer.model, few_tokens(scorer.model)
    own = model.config._attn_implementation
    expected = _alone(scorer, batch, "eager")
    understood = True
    if not scorer.apart:
        try:
            scorer.apart = not (_close(scorer.logits(batch), expected) and _sealed(scorer, batch))
        except UnknownAttention as error:
            log.info("%s", error)
            scorer.apart, understood = True, False
    if scorer.apart:
        log.warning("samples are not packed for %s: each is run alone", type(model).__name__)
        if not understood or not _close(_alone(scorer, batch, own), expected):
            _switch(model, "eager")
        if not _close(scorer.logits(batch), expected):
            raise UserError(f"model.path: {type(model).__name__} gives other logits each time; it cannot be trained")
    scorer.whole = not _projects(scorer, batch)


def few_tokens(model: torch.nn.Module) -> Batch:
    """Three samples of a few tokens; all but the first token of each are trained."""
    starts = np.cumsum([0, *_LENGTHS]).astype(np.int32)
    tokens = (np.arange(starts[-1]) * 7 + 1) % model.config.get_text_config().vocab_size
    place = np.setdiff1d(np.arange(starts[-1]), starts).astype(np.int32)
    floats = [np.ones(len(place), np.float32)] * 4
    step = MicroStep(0, tokens.astype(np.int32), starts, place, *floats)
    return Batch.of(step, next(model.parameters()).device)


def _alone(scorer: Scorer, batch: Batch, implementation: str) -> torch.Tensor:
    """The logits of each sample alone, with one of the model's own attentions where it has several."""
    before, apart = scorer.model.config._attn_implementation, scorer.apart
    _switch(scorer.model, implementation)
    scorer.apart = True
    try:
        return scorer.logits(batch)
    finally:
        scorer.apart = apart
        _switch(scorer.model, before)


def _switch(model: torch.nn.Module, implementation: str) -> None:
    if implementation != model.config._attn_implementation and model._can_set_attn_implementation():
        model.set_attn_implementation(implementation)


def _sealed(scorer: Scorer, batch: Batch) -> bool:
    """Whether other tokens in the first sample leave the logits of the others as they are."""
    tokens = batch.tokens.clone()
    tokens[: _LENGTHS[0]] = tokens[: _LENGTHS[0]].flip(0)
    others = batch.segment > 0
    one = scorer.logits(batch)[others]
    other = scorer.logits(replace(batch, tokens=tokens))[others]
    return torch.equal(one, other) or _distance(one, other) < (_LEAK if _is_low(one) else _LEAK**2)


def _projects(scorer: Scorer, batch: Batch) -> bool:
    """Whether projecting hidden states gives the logits: they are much the same sums, and anything more shows."""
    try:
        hidden = scorer.run(batch.tokens, batch)[batch.place - 1]
    except AttributeError:  # it has no part that gives hidden states
        return False
    return _distance(scorer.model.get_output_embeddings()(hidden), scorer.logits(batch)) < _ROUNDING


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return _distance(found, expected) < (_LOW if _is_low(expected) else _EXACT)


def _is_low(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.double(), expected.double()
    return float((found - expected).square().mean().sqrt() / expected.std().clamp_min(1e-9))
