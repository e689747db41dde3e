"""Writes tasks.jsonl beside this file: 400 different problems such as 62 + 49, always the same ones."""

import json
import random
from pathlib import Path

COUNT = 400


def main() -> None:
    """Draw the problems with a fixed seed."""
    draw = random.Random(0)
    problems: dict[str, dict] = {}
    while len(problems) < COUNT:
        a, b, operator = draw.randint(11, 99), draw.randint(11, 99), draw.choice("*+-")
        question = f"What is {a} {operator} {b}?"
        problems[question] = {"question": question, "a": a, "operator": operator, "b": b}
    lines = [json.dumps({"id": f"arithmetic-{i:03}", **problem}) for i, problem in enumerate(problems.values())]
    Path(__file__).with_name("tasks.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
