"""Scoring a workspace with the user's command or function, in a process of its own with its own time limit.

A scorer that fails, takes too long or gives no finite number gives no score; the execution is then closed all the
same, but its group is scored without it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gyre.config import LimitsConfig, ScoreConfig
from gyre.harness import score_function
from gyre.harness.process import Program

_LIMITS = LimitsConfig()
_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True)
class Score:
    """A finite score, or None and why."""

    value: float | None
    reason: str = ""


def parse_score(text: str) -> Score:
    """The score in the last line of a command's output: a number, or an object with `score`."""
    line = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    try:
        value = json.loads(line)
        value = float(value["score"] if isinstance(value, dict) else value)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return Score(None, f"the scorer's last line is not a score: {line[:80]!r}")
    return _finite(value)


def _finite(value: float) -> Score:
    return Score(value) if math.isfinite(value) else Score(None, f"the score is {value}")


def _parse_function(text: str) -> Score:
    try:
        answer = json.loads(text)
    except ValueError:
        return Score(None, "the scoring function ended without a score")
    return _finite(answer["score"]) if "score" in answer else Score(None, f"the scoring function: {answer['error']}")


async def score(
    config: ScoreConfig, root: str, workspace: Path, task: Path, env: Mapping[str, str], output: Path, mark: str
) -> Score:
    """Run the scorer over a workspace; its output goes to `output`, apart from a command's standard output.

    Raises:
        OSError: the system cannot start a process.
    """
    ours, theirs = os.pipe()
    captured = output.with_name("score.log")
    if config.command is not None:
        command = [part.replace("{root}", root) for part in config.command]
    else:
        script, function = str(Path(score_function.__file__)), (config.function or "").replace("{root}", root)
        command = [sys.executable, "-P", script, function, str(workspace), str(task), str(theirs), root]
    try:
        program = await Program.start(command, workspace, env, captured, mark, _LIMITS, output, pass_fds=(theirs,))
    except (FileNotFoundError, PermissionError) as error:
        os.close(ours)
        return Score(None, f"cannot start {command[0]}: {error.strerror}")
    finally:
        os.close(theirs)
    try:
        code = await asyncio.wait_for(program.wait(), config.timeout)
    except TimeoutError:
        return Score(None, f"scoring took more than {config.timeout:g} s")
    finally:
        await program.end()
        os.set_blocking(ours, False)
        try:
            answer = os.read(ours, _ANSWER_BYTES).decode("utf-8", "replace")
        except BlockingIOError:
            answer = ""
        os.close(ours)
    if config.command is None:
        return _parse_function(answer)
    if code != 0:
        return Score(None, f"the scorer's exit code is {code}")
    return parse_score(captured.read_bytes()[-_ANSWER_BYTES:].decode("utf-8", "replace"))
