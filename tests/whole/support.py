"""Whole runs of Gyre with real parts, as a user starts them, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import yaml

from gyre.run_dir import RunDir, read_events

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


def tiny(directory: Path, **sections: dict) -> Path:
    """A small, quick configuration in a file: two cells, a model that need not learn, harness and scorer of the tests.

    `sections` are merged over it: scheduler={"lookahead": 1.0}.
    """
    tasks = directory / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"id": i, "text": "say " + "a1"[i % 2] * 24}) + "\n" for i in range(64)))
    data = {
        "name": "whole",
        "model": {"path": "gyre:tiny", "dtype": "float32", "max_context": 128},
        "tasks": {"path": str(tasks), "shuffle": False},
        "harness": {
            "command": ["python", str(HERE / "agent.py")],
            "timeout": 60,
            "score": {"function": f"{HERE / 'score.py'}:score", "timeout": 30},
        },
        "cells": {"count": 2, "slots": 8, "gpus": 0},
        "scheduler": {
            "batch_groups": 4,
            "group_size": 4,
            "lookahead": 0.25,
            "supply_fraction": 0.25,
            "supply_hold": 0.1,
        },
        "train": {"updates": 2, "lr": 1.0e-2, "micro_tokens": 512},
        "slurm": {"time": "20:00", "cells": {"partition": "gpu", "gres": "gpu:1"}, "hosts": {"partition": "cpu"}},
    }
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


class Place:
    """A directory to start runs from, as a clone of the repository is, with an environment that can be recognised."""

    def __init__(self, path: Path, **environment: str) -> None:
        self.path = path
        self.scratch = path / "scratch"
        self.scratch.mkdir(parents=True)
        (path / "logs").mkdir()
        for name in ("launch.py", "gyre", "configs", "examples", "slurm"):
            (path / name).symlink_to(ROOT / name)
        (path / ".venv").symlink_to(Path(sys.prefix))
        self.mark = uuid.uuid4().hex
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SUBMITIT_", "GYRE_"))}
        kept |= {k: os.environ[k] for k in ("GYRE_CACHE", "GYRE_ZYGOTE") if k in os.environ}
        self.environment = {**kept, "GYRE_TEST_MARK": self.mark, "TMPDIR": str(self.scratch), **environment}
        self._shared = self._shared_memory()

    def start(self, *arguments: object, **environment: str) -> subprocess.Popen:
        """Start launch.py in a session of its own; its output is in output.log."""
        command = [sys.executable, str(self.path / "launch.py"), *map(str, arguments)]
        with open(self.path / "output.log", "a") as output:
            return subprocess.Popen(
                command,
                cwd=self.path,
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def launch(self, *arguments: object, timeout: float = 300.0, **environment: str) -> int:
        """Run launch.py to its end; returns its exit code."""
        process = self.start(*arguments, **environment)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait(60)
            raise AssertionError(f"launch.py took more than {timeout:g} s:\n{self.output()[-4000:]}") from None

    def output(self) -> str:
        """All that launch.py has printed so far."""
        return (self.path / "output.log").read_text()

    def run(self, name: str) -> "Run":
        """The run of a name."""
        return Run(self.path / "logs" / name)

    # -- what is left ------------------------------------------------------------------------------------------------
    @staticmethod
    def _shared_memory() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir()}

    def processes(self) -> list[int]:
        """Living processes that were started from here: by their environment, or, forked ones, by their log."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    ours = f"GYRE_TEST_MARK={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
                    ours = ours or os.readlink(entry / "fd/1").startswith(f"{self.path}/")
                    zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                except OSError:
                    continue
                if ours and not zombie:
                    found.append(int(entry.name))
        return found

    def engines(self, rank: int) -> list[int]:
        """The processes of a rank's engine."""
        return [pid for pid in self.processes() if os.readlink(f"/proc/{pid}/fd/1").endswith(f"/engine-{rank}.log")]

    def kill_everything(self) -> None:
        """SIGKILL to every process started from here, until none is left."""
        while pids := self.processes():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)

    def leftovers(self, seconds: float = 10.0) -> dict[str, list]:
        """Processes, shared memory and node-local files (sockets among them) that are still there after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            left = {
                "processes": [Path(f"/proc/{p}/cmdline").read_bytes().replace(b"\0", b" ") for p in self.processes()],
                "shared memory": sorted(
                    name for name in self._shared_memory() - self._shared if self._ours(Path("/dev/shm") / name)
                ),
                "scratch": sorted(str(path.relative_to(self.scratch)) for path in self.scratch.rglob("*")),
            }
            if not any(left.values()) or time.monotonic() > deadline:
                return {what: names for what, names in left.items() if names}
            time.sleep(0.2)

    def _ours(self, path: Path) -> bool:
        """Whether shared memory is of a run from here: other tests may run beside this one."""
        return path.name.startswith("gyre-") and any(run.name in path.name for run in (self.path / "logs").iterdir())


class Run:
    """A run's directory, read by a test."""

    def __init__(self, path: Path) -> None:
        self.dir = RunDir(path)

    @property
    def summary(self) -> dict:
        """summary.json."""
        return json.loads(self.dir.summary.read_text())

    def events(self, *kinds: str) -> list[dict]:
        """The events of some kinds (all without any), in their order."""
        return [event for event in read_events(self.dir.events) if not kinds or event["kind"] in kinds]

    def wait_for(self, condition, timeout: float = 150.0) -> None:
        """Poll until `condition(self)` is true."""
        deadline = time.monotonic() + timeout
        while not condition(self):
            assert time.monotonic() < deadline, f"waited {timeout:g} s in vain; last events {self.events()[-5:]}"
            time.sleep(0.1)

    def outcomes(self) -> dict[int, bytes]:
        """The outcome files, by execution."""
        paths = (self.dir.path / "executions").glob("*/outcome.json")
        return {int(path.parent.name): path.read_bytes() for path in paths}

    def commit(self) -> dict:
        """The record of the latest commit."""
        return json.loads((self.dir.checkpoint(self.dir.commits()[-1]) / "COMMIT").read_text())

    def trained_groups(self) -> list[int]:
        """Groups by the updates that were made and kept: what an attempt lost after its last commit does not count."""
        taken: dict[int, list[int]] = {}
        for event in self.events("run_started", "group_taken"):
            if event["kind"] == "group_taken":
                taken.setdefault(event["update"], []).append(event["group"])
            else:
                taken = {update: groups for update, groups in taken.items() if update <= event["version"]}
        return [group for groups in taken.values() for group in groups]


def assert_whole(summary: dict) -> None:
    """What holds at the end of every completed run."""
    executions = summary["executions"]
    assert executions["dispatched"] == executions["launched"] == executions["finished"], executions
    assert summary["requests"]["lost"] == 0, summary["requests"]
