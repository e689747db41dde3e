"""Writes tasks.jsonl beside this file: as many tasks that ask for letters as for digits and signs."""

import json
from pathlib import Path

COUNT = 64


def main() -> None:
    """Alternate the two cues."""
    lines = [json.dumps({"id": f"tiny-{i:02}", "cue": "a1"[i % 2]}) for i in range(COUNT)]
    Path(__file__).with_name("tasks.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
