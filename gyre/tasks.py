"""The tasks of a run: reading them, and the order in which groups visit them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from gyre.config import Config
from gyre.errors import UserError

Task = dict[str, Any]


def task_file(config: Config) -> Path:
    """Where a run's tasks are; a relative path starts where Gyre was started."""
    return Path(config.root, Path(config.tasks.path).expanduser())


def load_tasks(path: Path) -> list[Task]:
    """Read a task file: JSON Lines, one object with an `id` a line; blank lines are skipped.

    Raises:
        UserError: the file is missing, empty, or a line is no such object; the line is named.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"cannot read the task file {path}: {error.strerror}; correct tasks.path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the task file {path} is not UTF-8 text; write one JSON object a line") from error
    tasks = [_parse(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    seen: set[str] = set()
    for task in tasks:
        if (name := json.dumps(task["id"])) in seen:
            raise UserError(f"{path} has two tasks with the id {name}; give each one of its own")
        seen.add(name)
    if not tasks:
        raise UserError(f"the task file {path} has no tasks; write one JSON object a line")
    return tasks


def _parse(line: str, path: Path, number: int) -> Task:
    try:
        task = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}, line {number} is not JSON; write one JSON object a line") from error
    if not isinstance(task, dict) or "id" not in task:
        raise UserError(f"{path}, line {number} is not an object with an `id`; add one")
    return task


class TaskOrder:
    """Which task the i-th group of a run works on: every task once a round, each round in another seeded order."""

    def __init__(self, count: int, seed: int, shuffle: bool) -> None:
        self._count = count
        self._seed = seed
        self._shuffle = shuffle
        self._round = -1
        self._order: list[int] = []

    def task(self, index: int) -> int:
        """Index into the task list for the group with this index."""
        turn, place = divmod(index, self._count)
        if turn != self._round:
            self._round, self._order = turn, list(range(self._count))
            if self._shuffle:
                random.Random(f"{self._seed}/{turn}").shuffle(self._order)
        return self._order[place]
