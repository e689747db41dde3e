"""Makes tasks of a trace: each asks for the tokens that a timed engine emits in the time that an execution took.

python examples/timed/make_tasks.py benchmarks/traces/TRACE.jsonl --scale 0.0175 --groups 32 > tasks.jsonl
"""

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gyre.simulate.trace import load, shuffled


def main() -> None:
    """Write a line for each group, in a shuffled order; every round over the trace has another one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", help="JSON lines, an execution each: group, rollout_s")
    parser.add_argument("--scale", type=float, default=0.0175, help="seconds of a run for a second of the trace")
    parser.add_argument("--groups", type=int, default=32, help="tasks")
    parser.add_argument("--tokens-per-second", type=float, default=20.0, help="engine.timed.tokens_per_second")
    parser.add_argument("--requests", type=int, default=3, help="requests of an execution")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    groups = shuffled(load(asked.trace), asked.groups, random.Random(asked.seed))
    rate = asked.scale * asked.tokens_per_second
    for number, group in enumerate(groups):
        tokens = [max(1, round(entry.rollout_s * rate)) for entry in group]
        print(json.dumps({"id": f"timed-{number:04}", "tokens": tokens, "requests": asked.requests}))


if __name__ == "__main__":
    main()
