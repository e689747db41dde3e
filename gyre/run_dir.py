"""Every path under logs/<run>/, atomic writes, and the append-only event log.

<run>/config.yaml                 the resolved configuration
<run>/events.jsonl                one event a line, written by rank 0 alone (`gyre.events`)
<run>/status.json                 what the live view shows, replaced every second
<run>/summary.json                written when an attempt ends
<run>/metrics.jsonl               the figures of each update that counts, one update a line
<run>/trace.jsonl                 how long the executions took, for simulations; written when an attempt ends
<run>/rendezvous.json             where the present attempt's store is; readable by its owner only
<run>/lock                        held by rank 0 while an attempt runs
<run>/launch.json, launch/<time>/ how the run was started last, and what the launcher keeps of each start
<run>/attempts/<a>/<name>.log     one log per process
<run>/executions/<n>/spec.json    task, group and member of execution n
<run>/executions/<n>/<try>/       workspace, task.json, harness.log, score.log, records.bin of one try
<run>/executions/<n>/outcome.json linked into place once: execution n is closed
<run>/checkpoints/<v>/            what resuming at policy version v needs; valid once <v>/COMMIT is there
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gyre.errors import UserError


def write_atomic(path: Path, text: str, mode: int = 0o644, durable: bool = False) -> None:
    """Replace a file in one step, so that no reader ever sees half of it; `durable` also survives a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and links inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_once(path: Path, text: str) -> bool:
    """Put a file in place if nothing is there yet; False if something was (it is left alone).

    The file appears whole or not at all, and exactly one of many writers succeeds, also on NFS.
    """
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    write_atomic(temporary, text, durable=True)
    try:
        os.link(temporary, path)
        return True
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> Any | None:
    """A JSON file, or None where there is none."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


class RunDir:
    """The paths of one run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).resolve()
        self.config = self.path / "config.yaml"
        self.events = self.path / "events.jsonl"
        self.status = self.path / "status.json"
        self.summary = self.path / "summary.json"
        self.metrics = self.path / "metrics.jsonl"
        self.trace = self.path / "trace.jsonl"
        self.rendezvous = self.path / "rendezvous.json"
        self.checkpoints = self.path / "checkpoints"

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    def create(self) -> RunDir:
        """Make the directories; they may exist."""
        for path in (self.path / "attempts", self.path / "executions", self.checkpoints):
            path.mkdir(parents=True, exist_ok=True)
        return self

    def attempt(self, number: int) -> Path:
        """Directory of one attempt's logs."""
        return self.path / "attempts" / str(number)

    def next_attempt(self) -> int:
        """Number the next attempt and make its directory; the caller holds the lock."""
        known = [int(p.name) for p in (self.path / "attempts").iterdir() if p.name.isdigit()]
        number = max(known, default=0) + 1
        self.attempt(number).mkdir()
        return number

    def execution(self, n: int) -> Path:
        """Directory of execution n."""
        return self.path / "executions" / str(n)

    def spec(self, n: int) -> Path:
        """What execution n is: {n, group, member, task}."""
        return self.execution(n) / "spec.json"

    def outcome(self, n: int) -> Path:
        """How execution n ended; there once it is closed."""
        return self.execution(n) / "outcome.json"

    def try_dir(self, n: int, number: int) -> Path:
        """Directory of one try (from 1) of execution n."""
        return self.execution(n) / str(number)

    def checkpoint(self, version: int) -> Path:
        """Directory of the commit of a policy version."""
        return self.checkpoints / str(version)

    def commits(self) -> list[int]:
        """Policy versions that are committed, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        return sorted(int(p.parent.name) for p in self.checkpoints.glob("*/COMMIT") if p.parent.name.isdigit())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for one attempt.

        Raises:
            UserError: another attempt of this run is alive.
        """
        with open(self.path / "lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(f"{self.path} is in use by a running attempt; stop that one first") from error
            yield


class EventLog:
    """The append-only log of a run; one writer."""

    def __init__(self, path: Path) -> None:
        self._mend(path)
        self._file = open(path, "a", buffering=1)

    @staticmethod
    def _mend(path: Path) -> None:
        """Cut off a last line that a crash left unfinished."""
        if not path.exists():
            return
        with open(path, "rb+") as file:
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)

    def append(self, event: dict[str, Any]) -> None:
        """Write one event as a line."""
        self._file.write(json.dumps(event, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of an event log, oldest first; none where there is no file."""
    if not path.exists():
        return
    with open(path) as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
