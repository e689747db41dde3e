"""How much of the time a pipeline of two stages leaves its processes idle, beside torch's 1F1B schedule.

    python benchmarks/pipeline.py            4, 8 and 16 micro-steps, 9 turns of each, some minutes
    python benchmarks/pipeline.py --quick    4 and 8, 3 turns of smaller ones

Torch's `Schedule1F1B` is told how many micro-steps there are; ours is not, and may be paused at any of them, or drained
so that weights may change. All of them run the same stages and micro-steps in the same processes, alternately, and must
give the same gradients. The *bubble* is the share of the time in which a process computes nothing, pauses left out:
1 - (seconds of computing, mean over the stages) / (seconds - seconds of pauses); with pauses it may come out smaller
than without, since the others go on computing in one. With stages of the same speed, and where passing on costs
nothing, it is r (S - 1) / (m + r (S - 1)) for m micro-steps, S stages and r drains. The ratio is the time, pauses left
out, over that of torch's schedule with as many micro-steps, the median of the turns.

It exits with 1 where gradients differ, or where ours, without pauses and without --quick, takes over 1.1 times as long.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import keep, parser
from rich.console import Console
from rich.table import Table

STAGES = 2
LIMIT = 1.1


def make_model(directory: Path) -> Path:
    """A random Qwen3 whose two halves take the same time."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(shape).save_pretrained(directory)
    return directory


def work(number: int, results: Any, *arguments: Any) -> None:
    """A process of the pipeline."""
    from _stages import run

    results.put((number, run(number, STAGES, *arguments)))


def measure(tokens: int, counts: list[int], rounds: int) -> list[list[dict[str, Any]]]:
    """What each process measured."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as made:
        model = make_model(Path(made) / "model")
        results = context.SimpleQueue()
        rest = (results, model, f"{made}/store", tokens, counts, rounds)
        processes = [context.Process(target=work, args=(number, *rest), daemon=True) for number in range(STAGES)]
        for process in processes:
            process.start()
        found = dict(results.get() for _ in processes)
        for process in processes:
            process.join()
    return [found[number] for number in range(STAGES)]


def rows(measured: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Medians by way and number of micro-steps."""
    grouped: dict[tuple[int, str], list[dict[str, float]]] = {}
    plain: dict[int, list[float]] = {}
    for each in zip(*measured, strict=True):
        first = each[0]
        seconds = first["seconds"] - first["paused"]
        if first["way"] == "1F1B":
            plain.setdefault(first["m"], []).append(seconds)
        extra = first["drains"] * (STAGES - 1)
        grouped.setdefault((first["m"], first["way"]), []).append(
            {
                "seconds": seconds,
                "paused": first["paused"],
                "bubble": 1 - statistics.mean(stage["busy"] for stage in each) / seconds,
                "theory": extra / (first["m"] + extra),
                "ratio": seconds / plain[first["m"]][-1],
                "far": max(stage["far"] for stage in each),
            }
        )
    return [
        {"m": m, "way": way, **{key: statistics.median(turn[key] for turn in turns) for key in turns[0]}}
        for (m, way), turns in grouped.items()
    ]


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__).parse_args()
    tokens, counts, rounds = (64, [4, 8], 3) if arguments.quick else (512, [4, 8, 16], 9)
    found = rows(measure(tokens, counts, rounds))
    keep(arguments.json, found)
    table = Table(title=f"a pipeline of {STAGES} stages, {tokens} tokens a micro-step, medians of {rounds} turns")
    for column in ("micro-steps", "", "seconds", "pauses (s)", "bubble", "in theory", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for row in found:
        times = f"{row['seconds']:.2f}", f"{row['paused']:.2f}"
        table.add_row(
            f"{row['m']}", row["way"], *times, f"{row['bubble']:.3f}", f"{row['theory']:.3f}", f"{row['ratio']:.2f}"
        )
    Console().print(table)
    slow = [] if arguments.quick else [row for row in found if row["way"] == "ours" and row["ratio"] > LIMIT]
    return int(bool(slow) or any(row["far"] > 1e-5 for row in found))


if __name__ == "__main__":
    sys.exit(main())
