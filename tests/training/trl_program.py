"""Losses and gradients of TRL's own GRPO trainer, for `test_trl.py`; it runs where TRL is installed.

    .venv-trl/bin/python tests/training/trl_program.py OUT.npz [CASE...]

The trainer is made with its public constructor, and asked for the loss of a batch that it did not generate.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from trl_cases import CASES, SHAPE, TEMPERATURE, VOCABULARY, Case, Sample, samples, weights  # noqa: E402


def tokenizer() -> PreTrainedTokenizerFast:
    """The least that the trainer takes."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w3"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="w0", eos_token="w1", pad_token="w2")


def model_in(directory: str) -> LlamaForCausalLM:
    """The model of the comparison, by way of a directory, as the trainer wants to know where one is from."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    own = weights({name: tuple(p.shape) for name, p in model.named_parameters()})
    model.load_state_dict({name: torch.from_numpy(array) for name, array in own.items()})
    model.save_pretrained(directory)
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)


def inputs_of(batch: list[Sample]) -> dict[str, torch.Tensor]:
    """The samples as the trainer's loss takes them: prompts padded on the left, what follows on the right."""
    before = max(sample.prompt for sample in batch)
    after = max(len(sample.tokens) - sample.prompt for sample in batch)
    rows = {name: np.full((len(batch), width), 2) for name, width in (("prompt", before), ("completion", after))}
    masks = {name: np.zeros_like(array) for name, array in rows.items()} | {"tool": np.zeros_like(rows["completion"])}
    old, reference = np.zeros((2, len(batch), after), np.float32)
    for row, sample in enumerate(batch):
        size = len(sample.tokens) - sample.prompt
        rows["prompt"][row, before - sample.prompt :] = sample.tokens[: sample.prompt]
        masks["prompt"][row, before - sample.prompt :] = 1
        rows["completion"][row, :size], masks["completion"][row, :size] = sample.tokens[sample.prompt :], 1
        masks["tool"][row, :size] = sample.trained[sample.prompt :]
        old[row, :size] = sample.logprobs[sample.prompt :]
        reference[row, :size] = sample.reference[sample.prompt :]
    found = {f"{name}_ids": array for name, array in rows.items()} | {f"{n}_mask": array for n, array in masks.items()}
    found |= {"old_per_token_logps": old, "ref_per_token_logps": reference}
    found["advantages"] = np.array([sample.advantage for sample in batch], np.float32)
    found["num_items_in_batch"] = np.array(masks["tool"].sum())
    return {name: torch.from_numpy(np.asarray(array)) for name, array in found.items()}


def loss_of(case: Case, directory: str) -> tuple[float, dict[str, np.ndarray]]:
    """A case's loss, and its gradient by parameter."""
    options = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=directory),
        per_device_train_batch_size=2,
        num_generations=2,
        temperature=TEMPERATURE,
        bf16=False,
        use_cpu=True,
        report_to=[],
        gradient_checkpointing=False,
        **case.trl,
    )
    trainer = GRPOTrainer(
        model=model_in(directory),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=options,
        train_dataset=Dataset.from_list([{"prompt": "w4"}] * 4),
        processing_class=tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    model, inputs = trainer.model.train(), inputs_of(samples())
    if case.recomputed:
        recorded = inputs.pop("old_per_token_logps")
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            now = trainer._get_per_token_logps_and_entropies(model, ids, mask, recorded.shape[1])[0]
        trainer.use_vllm = True  # of which only the correction is used
        inputs["importance_sampling_ratio"] = (now - recorded).exp().clamp(max=case.train["truncation"])
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}


def main() -> None:
    """See above."""
    torch.set_num_threads(1)
    found: dict[str, np.ndarray] = {"version": np.array(trl.__version__)}
    with tempfile.TemporaryDirectory() as directory:
        for name in sys.argv[2:] or CASES:
            loss, gradient = loss_of(CASES[name], directory)
            found[f"{name}/loss"] = np.array(loss)
            found |= {f"{name}/gradient/{parameter}": array for parameter, array in gradient.items()}
    np.savez(sys.argv[1], **found)


if __name__ == "__main__":
    main()
