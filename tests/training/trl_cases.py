"""What is compared with TRL: a tiny model, a batch of samples, and pairs of options that say the same. NumPy only.

Nothing here is of Gyre or of TRL, so that the processes of both can read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

VOCABULARY, WIDTH, HEADS, INNER = 24, 16, 2, 24
TEMPERATURE = 0.8
CONSTANT = 32  # tokens: Dr. GRPO's divisor
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@dataclass(frozen=True)
class Case:
    """Our options (`train`), those of TRL's GRPOConfig, and which of the results agree; the others must not."""

    train: dict[str, Any]
    trl: dict[str, Any]
    agree: tuple[str, ...] = ("loss", "gradient")
    recomputed: bool = (
        False  # TRL's old policy is the trainer itself, and the sampler is corrected for by its own ratio
    )


_PLAIN = {"truncation": None}  # TRL corrects for the sampler beside the objective, not within it
_NONE = {"beta": 0.0}
_KL = {"beta": 0.2, "use_bias_correction_kl": False}
CASES = {
    "grpo": Case({"objective": "grpo", **_PLAIN}, {"loss_type": "grpo", "epsilon": 0.2, **_NONE}),
    "grpo with kl": Case({"objective": "grpo", "kl": 0.2, **_PLAIN}, {"loss_type": "grpo", "epsilon": 0.2, **_KL}),
    "grpo over tokens": Case(
        {"objective": "grpo", "averaging": "token", **_PLAIN}, {"loss_type": "bnpo", "epsilon": 0.2, **_NONE}
    ),
    "dapo": Case({"objective": "dapo", **_PLAIN}, {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, **_NONE}),
    "dapo with kl": Case(
        {"objective": "dapo", "kl": 0.2, **_PLAIN},
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, **_KL},
    ),
    "dr_grpo": Case(
        {"objective": "dr_grpo", **_PLAIN},
        {"loss_type": "dr_grpo", "epsilon": 0.2, "max_completion_length": CONSTANT, **_NONE},
    ),
    "gspo": Case(
        {"objective": "gspo", **_PLAIN},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
            **_NONE,
        },
    ),
    "gspo with wide bounds and kl": Case(
        {"objective": "gspo", "clip_ratio": 0.1, "clip_ratio_high": 0.2, "kl": 0.2, **_PLAIN},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.1,
            "epsilon_high": 0.2,
            **_KL,
        },
    ),
    # TRL's epsilon_high is the bound itself here, ours its distance from 1
    "cispo": Case(
        {"objective": "cispo", "clip_ratio_high": 0.5, **_PLAIN},
        {"loss_type": "cispo", "epsilon_high": 1.5, **_NONE},
    ),
    # the same direction for every token; TRL's loss has 1 where ours has log p
    "truncated importance sampling": Case(
        {"objective": "rloo", "truncation": 2.0},
        {"loss_type": "dapo", "vllm_importance_sampling_mode": "token_truncate", **_NONE},
        agree=("gradient",),
        recomputed=True,
    ),
    # TRL's default weighs the divergence by the importance ratio, which DeepSeekMath does not
    "kl weighted by the ratio": Case(
        {"objective": "grpo", "kl": 0.2, **_PLAIN}, {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.2}, agree=()
    ),
    # TRL's two-sided clipping has the same value and no gradient where ours goes on with what is left
    "truncation within the clipped loss": Case(
        {"objective": "grpo", "truncation": 2.0},
        {"loss_type": "grpo", "epsilon": 0.2, "delta": 2.0, **_NONE},
        agree=("loss",),
    ),
}


@dataclass(frozen=True)
class Sample:
    """A prompt and what follows it, some of which the policy sampled."""

    prompt: int  # tokens
    tokens: np.ndarray  # int64 [n]
    trained: np.ndarray  # bool [n]
    logprobs: np.ndarray  # float32 [n]: recorded; 0 where not trained
    reference: np.ndarray  # float32 [n]: of the reference; 0 where not trained
    advantage: float


def samples() -> list[Sample]:
    """Eight samples of several lengths and turns, with ratios far on both sides of 1."""
    random = np.random.default_rng(5)
    made = []
    for index in range(8):
        prompt, length = int(random.integers(2, 7)), int(random.integers(4, 20))
        trained = np.zeros(prompt + length, bool)
        trained[prompt:] = random.random(length) < 0.7
        trained[prompt] = trained[-1] = True
        logprobs, reference = np.zeros((2, len(trained)), np.float32)
        logprobs[trained] = np.log(1 / VOCABULARY) + random.normal(0, 0.9, trained.sum())
        reference[trained] = np.log(1 / VOCABULARY) + random.normal(0, 0.5, trained.sum())
        tokens = random.integers(3, VOCABULARY, len(trained))
        made.append(Sample(prompt, tokens, trained, logprobs, reference, float(random.normal() + (index % 2 - 0.5))))
    return made


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Weights of a model whose parameters have these shapes: 1 for norms, else random, by order of names."""
    random = np.random.default_rng(6)
    return {
        name: (random.normal(0, 0.25, shape) if len(shape) > 1 else np.ones(shape)).astype(np.float32)
        for name, shape in sorted(shapes.items())
    }
