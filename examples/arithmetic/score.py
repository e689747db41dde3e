"""Scores what the arithmetic agent's model said, with partial credit so that a small model has something to climb.

.2 for a well-formed calculation, .3 if it is the right one, .1 for a well-formed answer, .4 if it is right. Everything
is worked out again from the model's own words; nothing that the agent concluded is believed.
"""

import json
import re
from pathlib import Path

CALCULATION = re.compile(r"CALC:\s*(-?\d{1,6})\s*([-+*])\s*(\d{1,6})")
ANSWER = re.compile(r"ANSWER:\s*(-?\d{1,12})")


def value(a: int, operator: str, b: int) -> int:
    """a operator b."""
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def score(workspace: Path, task: dict) -> float:
    """Between 0 and 1; 0 where the agent left nothing."""
    try:
        turns = json.loads((workspace / "result.json").read_text())["turns"]
    except (OSError, ValueError, KeyError):
        return 0.0
    right = value(task["a"], task["operator"], task["b"])
    total = 0.0
    calculation = CALCULATION.fullmatch(turns[0].strip()) if turns else None
    if calculation:
        total += 0.2
        total += 0.3 * (value(int(calculation[1]), calculation[2], int(calculation[3])) == right)
    answer = ANSWER.fullmatch(turns[1].strip()) if len(turns) > 1 else None
    if answer:
        total += 0.1 + 0.4 * (int(answer[1]) == right)
    return round(total, 3)
