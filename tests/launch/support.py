"""A configuration and calls for launching the trivial rank program."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def settings(directory: Path) -> dict:
    """A valid configuration of 3 cells and 1 host whose files are in `directory`."""
    tasks = directory / "tasks.jsonl"
    tasks.write_text('{"id": 1}\n')
    (directory / "score.py").write_text("def score(workspace, task):\n    return 1.0\n")
    return {
        "name": "trivial",
        "model": {"path": "gyre:tiny", "dtype": "float32", "max_context": 256},
        "tasks": {"path": str(tasks)},
        "harness": {"command": ["true"], "score": {"function": f"{directory}/score.py:score"}},
        "cells": {"count": 3, "slots": 2, "gpus": 0},
        "hosts": {"count": 1},
        "scheduler": {"batch_groups": 2, "group_size": 2},
        "train": {"updates": 2},
        "slurm": {
            "time": "10:00",
            "cells": {"partition": "gpu", "gres": "gpu:1", "cpus_per_task": 2},
            "hosts": {"partition": "cpu"},
        },
    }


def write(directory: Path, data: dict) -> Path:
    """Save a configuration."""
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def environment(**extra: object) -> dict[str, str]:
    """The environment in which ranks are trivial."""
    names = {name: str(value) for name, value in extra.items()}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SUBMITIT_", "GYRE_"))}
    return {**kept, "GYRE_RANK_PROGRAM": "tests.launch.trivial_rank", **names}


def launch(*arguments: object, cwd: Path, timeout: float = 120.0, **extra: object) -> subprocess.CompletedProcess[str]:
    """Run launch.py to its end."""
    command = [sys.executable, str(ROOT / "launch.py"), *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment(**extra), capture_output=True, text=True, timeout=timeout, check=False
    )


def start(*arguments: object, cwd: Path, **extra: object) -> subprocess.Popen[str]:
    """Start launch.py and leave it running, in a session of its own."""
    command = [sys.executable, str(ROOT / "launch.py"), *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(what, timeout: float = 60.0):
    """Poll until `what()` is true, and return it."""
    deadline = time.monotonic() + timeout
    while not (answer := what()):
        assert time.monotonic() < deadline, f"waited {timeout:g} s in vain"
        time.sleep(0.1)
    return answer


def seen(run: Path, ranks: int, restarts: int = 0, timeout: float = 60.0) -> list[dict]:
    """What each of `ranks` trivial ranks said of itself, in rank order."""
    paths = [run / f"seen-{restarts}-{rank}.json" for rank in range(ranks)]
    wait_for(lambda: all(path.exists() for path in paths), timeout)
    return [json.loads(path.read_text()) for path in paths]


def only_run(place: Path) -> Path:
    """The one run in a workplace, once it is there."""
    found = lambda: [p.parent for p in (place / "logs").glob("*/config.yaml")]  # noqa: E731
    runs = wait_for(found)
    assert len(runs) == 1, runs
    return runs[0]
