"""The share of the 8 answer bytes in the class the cue asks for: letters for `a`, digits and signs for `1`.

An answer that ends early counts as if the rest were wrong, or ending at once would be the safest answer.
"""

from pathlib import Path

LENGTH = 8
CLASSES = {"a": range(0x61, 0x7B), "1": range(0x20, 0x40)}


def score(workspace: Path, task: dict) -> float:
    """Between 0 and 1; 0 where there is no answer."""
    path = workspace / "answer.txt"
    if not path.exists():
        return 0.0
    # newline="" keeps every character as it was answered
    with open(path, encoding="utf-8", newline="") as file:
        answer = file.read()
    return sum(ord(character) in CLASSES[task["cue"]] for character in answer[:LENGTH]) / LENGTH
