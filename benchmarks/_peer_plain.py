"""The plain loop: transformers and torch's AdamW. `python benchmarks/_peer_plain.py MODEL SAMPLES BUDGET [score]`.

Samples are sorted by length and padded on the right, so that attention needs no mask and takes its fast path; logits
are made for all positions, as a model of transformers does. With `score` it writes the log-probabilities that the
model gives into the file, with a little noise, as those of another engine would have, and ends.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from _peer_batch import CLIP, Samples, padded, pieces, serve
from transformers import AutoModelForCausalLM


def logprobs_of(model: torch.nn.Module, piece: dict[str, torch.Tensor]) -> torch.Tensor:
    """Log-probability of every token but the first of each row, float32 [rows, width - 1]."""
    logits = model(input_ids=piece["tokens"], use_cache=False).logits[:, :-1].float()
    lost = torch.nn.functional.cross_entropy(logits.flatten(0, 1), piece["tokens"][:, 1:].flatten(), reduction="none")
    return -lost.view(piece["tokens"].shape[0], -1)


def main() -> None:
    """See above."""
    directory, file, budget = sys.argv[1], sys.argv[2], int(sys.argv[3])
    samples = Samples.load(file)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    chosen = pieces(list(samples.lengths), budget)
    parts = [{n: torch.from_numpy(a) for n, a in padded(samples, rows).items()} for rows in chosen]
    if sys.argv[4:] == ["score"]:
        found = samples.logprobs.copy()
        with torch.no_grad():
            for rows, part in zip(chosen, parts, strict=True):
                for row, own in zip(rows, logprobs_of(model, part).numpy(), strict=True):
                    begin, end = samples.starts[row : row + 2]
                    found[begin + 1 : end] = own[: end - begin - 1]
        noise = np.random.default_rng(0).normal(0, 0.05, len(found)).astype(np.float32)
        replace(samples, logprobs=np.where(samples.trained, np.minimum(found + noise, 0), 0)).save(file)
        return
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    total = float(samples.trained.sum())

    def update() -> dict[str, Any]:
        loss_sum = 0.0
        for part in parts:
            mask, advantages = part["trained"][:, 1:], part["advantages"][:, None]
            ratio = torch.exp(logprobs_of(model, part) - part["logprobs"][:, 1:])
            value = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            loss = -(value * mask).sum() / total
            loss.backward()
            loss_sum += float(loss)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss_sum, "norm": norm}

    serve(update)


if __name__ == "__main__":
    main()
