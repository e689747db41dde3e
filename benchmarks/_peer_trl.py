"""TRL's GRPO loss in the same loop: `.venv-trl/bin/python benchmarks/_peer_trl.py MODEL SAMPLES BUDGET`.

It runs where TRL is installed, and imports nothing of Gyre. The trainer is TRL's own, with its own model and loss; what
it trains on is given in place of what it would generate: prompts padded on the left, completions on the right, in
pieces of samples of like length, with TRL's mask over the tokens of a completion that the model did not write.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import numpy as np
import torch
from _peer_batch import CLIP, Samples, pieces, serve
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def inputs_of(samples: Samples, rows: list[int], prompts: np.ndarray, total: float) -> dict[str, torch.Tensor]:
    """What the trainer's loss takes."""
    lengths = samples.lengths
    before, after = int(prompts[rows].max()), int((lengths - prompts)[rows].max())
    found = {name: np.zeros((len(rows), before), np.int64) for name in ("prompt_ids", "prompt_mask")}
    found |= {n: np.zeros((len(rows), after), np.int64) for n in ("completion_ids", "completion_mask", "tool_mask")}
    found["old_per_token_logps"] = np.zeros((len(rows), after), np.float32)
    for index, row in enumerate(rows):
        begin, end = samples.starts[row : row + 2]
        middle, size = begin + prompts[row], end - begin - prompts[row]
        found["prompt_ids"][index, before - prompts[row] :] = samples.tokens[begin:middle]
        found["prompt_mask"][index, before - prompts[row] :] = 1
        found["completion_ids"][index, :size] = samples.tokens[middle:end]
        found["completion_mask"][index, :size] = 1
        found["tool_mask"][index, :size] = samples.trained[middle:end]
        found["old_per_token_logps"][index, :size] = samples.logprobs[middle:end]
    found["advantages"] = samples.advantages[rows]
    return {name: torch.from_numpy(array) for name, array in found.items()} | {
        "num_items_in_batch": torch.tensor(total)
    }


def main() -> None:
    """See above."""
    directory, file, budget = sys.argv[1], sys.argv[2], int(sys.argv[3])
    samples = Samples.load(file)
    prompts = np.array(
        [int(np.flatnonzero(samples.trained[b:e])[0]) for b, e in zip(samples.starts, samples.starts[1:], strict=False)]
    )
    chosen = pieces(list(samples.lengths), budget)
    total = float(samples.trained.sum())
    parts = [inputs_of(samples, rows, prompts, total) for rows in chosen]
    options = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=2,
        num_generations=2,
        gradient_accumulation_steps=len(parts),
        steps_per_generation=len(parts),
        loss_type="dapo",
        epsilon=CLIP,
        beta=0.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=options,
        train_dataset=Dataset.from_list([{"prompt": "none"}] * 4),
        processing_class=AutoTokenizer.from_pretrained(directory),
    )
    trainer.current_gradient_accumulation_steps = len(parts)
    model = trainer.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def update() -> dict[str, Any]:
        loss_sum = 0.0
        for part in parts:
            loss = trainer.compute_loss(model, part)
            loss.backward()
            loss_sum += float(loss)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss_sum, "norm": norm}

    serve(update)


if __name__ == "__main__":
    main()
