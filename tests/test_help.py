"""`--help` answers at once: it loads nothing that a command would need."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from gyre import cli

ROOT = Path(__file__).resolve().parents[1]
#: What no help needs; pydantic, yaml and rich alone take longer than the rest of it.
HEAVY = {"torch", "vllm", "deepspeed", "transformers", "numpy", "aiohttp", "submitit", "pydantic", "yaml", "rich"}
COMMANDS = [[], *([name] for name in cli._COMMANDS)]


def run(*given: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *given], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command) or "launch.py")
def test_every_command_has_help_and_loads_nothing_for_it(command):
    done = run("-X", "importtime", "launch.py", *command, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: ")
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "argparse" in loaded and not loaded & HEAVY


def test_the_help_names_every_command():
    words = run("launch.py", "--help").stdout
    assert all(name in words for name in cli._COMMANDS)


def test_it_takes_little_longer_than_python_itself():
    """As a quotient of the best of some, because machines differ and are busy."""
    seconds = {}
    for name, given in (
        ("python", ["-c", "import argparse"]),
        ("help", ["launch.py", "simulate", "--help"]),
    ):
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            assert run(*given).returncode == 0
            times.append(time.perf_counter() - begun)
        seconds[name] = min(times)
    assert seconds["help"] < 10 * seconds["python"], seconds
