"""A model for the chaos: the talking tiny one, trained for some seconds to call a tool where it is given one."""

import random
from pathlib import Path
from typing import Any

from tests.cell import talking_model

CUES = ["a", "1", "z", "0", "é", "漢", "hello ", "?"]
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
STEPS, BATCH = 160, 16


def words(rng: random.Random) -> str:
    """What a user says."""
    return f"say {rng.choice(CUES) * rng.randint(3, 12)} {rng.randrange(1000)}"


def _turn(rng: random.Random) -> tuple[list[dict], list[dict] | None, str]:
    """Messages, the tools there are, and the answer: a call, what was found by one, or anything."""
    messages = [{"role": "user", "content": words(rng)}]
    kind, at, found = rng.random(), str(rng.randrange(10**16)), str(rng.randrange(10**16))
    if kind < 0.3:
        return messages, None, "".join(rng.choice("abcdefgh 0123\né漢") for _ in range(40))
    if kind < 0.75:
        calls = [
            f'<tool_call>\n{{"name": "look", "arguments": {{"at": "{one}"}}}}\n</tool_call>' for one in (at, found)
        ]
        return messages, [LOOK], "\n".join(calls[: 1 if kind < 0.5 else 2])
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": at}}}
    messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": found}]
    return messages, [LOOK], f"there is {found}"


def _row(tokenizer: Any, messages: list[dict], tools: list[dict] | None, answer: str) -> tuple[list[int], list[int]]:
    """Prompt and answer in tokens, as they would be sampled."""
    prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    return prompt, [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]


def make(tiny: Path, directory: Path) -> Path:
    """Write the model into a directory; the same wherever it is made, but for rounding."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    tokenizer, rng = talking_model.make(tiny, directory), random.Random(1)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS, pct_start=0.1)
    for _ in range(STEPS):
        rows = [_row(tokenizer, *_turn(rng)) for _ in range(BATCH)]
        length = max(len(prompt) + len(answer) for prompt, answer in rows)
        padded = [(prompt + answer, [-100] * len(prompt) + answer) for prompt, answer in rows]
        tokens, labels = (
            torch.tensor([row + [fill] * (length - len(row)) for row in column])
            for column, fill in zip(zip(*padded, strict=True), (0, -100), strict=True)
        )
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    (directory / "model.safetensors").unlink()
    state = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
