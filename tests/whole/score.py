"""The scorer of the whole-run tests: the share of letters in the answer, and no score at all for a broken task."""

from pathlib import Path


def score(workspace: Path, task: dict) -> float:
    """Between 0 and 1.

    Raises:
        ValueError: the task says that it cannot be scored.
    """
    if task.get("broken"):
        raise ValueError("this task cannot be scored")
    answer = (workspace / "answer.txt").read_text()
    return sum("a" <= letter <= "z" for letter in answer) / 8
