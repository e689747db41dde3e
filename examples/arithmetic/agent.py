"""An agent that does sums with a calculator: it asks the model for a calculation, runs it, and asks for the answer.

It knows nothing of Gyre. Its endpoint and key are in OPENAI_BASE_URL and OPENAI_API_KEY, which the `openai` package
reads by itself, and its task is in the file that GYRE_TASK names. What the model said goes to result.json, which is
all that the scorer looks at.
"""

import json
import os
import re

from openai import OpenAI

SYSTEM = (
    "You are a calculator agent. Write CALC: followed by an expression and you will get the RESULT. "
    "Then write ANSWER: followed by the number."
)
EXAMPLE = ["What is 12 * 7?", "CALC: 12 * 7", "RESULT: 84", "ANSWER: 84"]
CALCULATION = re.compile(r"CALC:\s*(-?\d{1,6})\s*([-+*])\s*(\d{1,6})")
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def calculate(line: str) -> int | None:
    """What a line `CALC: 62 + 49` comes to; None if it is not exactly such a line."""
    match = CALCULATION.fullmatch(line.strip())
    return OPERATIONS[match[2]](int(match[1]), int(match[3])) if match else None


def ask(client: OpenAI, messages: list[dict]) -> str:
    """Have the model take its turn."""
    reply = client.chat.completions.create(
        model=os.environ.get("GYRE_MODEL", "policy"),
        messages=messages,
        max_tokens=24,
        temperature=1.0,  # training needs answers as the model would give them, not only the likeliest
    )
    text = reply.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    return text


def main() -> None:
    """Solve the one task."""
    with open(os.environ["GYRE_TASK"]) as file:
        task = json.load(file)
    messages = [{"role": "system", "content": SYSTEM}]
    for turn, text in enumerate(EXAMPLE):
        messages.append({"role": "assistant" if turn % 2 else "user", "content": text})
    messages.append({"role": "user", "content": task["question"]})
    client = OpenAI(timeout=None)  # an endpoint may hold a request for as long as it has no room
    turns = [ask(client, messages)]
    if (result := calculate(turns[0])) is not None:
        messages.append({"role": "user", "content": f"RESULT: {result}"})
        turns.append(ask(client, messages))
    with open("result.json", "w") as file:
        json.dump({"turns": turns}, file)


if __name__ == "__main__":
    main()
