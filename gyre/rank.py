"""What one rank runs: a tiny restarter around its supervisor, the same for every way of launching.

Nobody restarts a dead task inside a Slurm step, so the task that is started there stays small and does it itself. It
adopts whatever its supervisor leaves behind (it is a child subreaper), so that no engine, trainer or harness outlives
the supervisor that started it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from gyre.attempt import announce_end
from gyre.errors import EXIT_FAULT, EXIT_INTERRUPTED, EXIT_RESTART, EXIT_USER, UserError
from gyre.launch.identity import Identity, identify
from gyre.run_dir import RunDir

#: Starts of a supervisor in a row after which the rank gives up: of rank 0 those that committed nothing, of others
#: those that did not live for `STEADY_SECONDS`.
MAX_STARTS = 4
STEADY_SECONDS = 300.0
STOP_SECONDS = 40.0
_PR_SET_CHILD_SUBREAPER = 36


def _descendants(rank: int) -> list[int]:
    """Process ids of the children of this process, and of theirs; but engines of other ranks are spared.

    Engines on CPUs may be forks of a server that another rank started, and become orphans of that rank.
    """
    found, queue = [], [os.getpid()]
    while queue:
        pid = queue.pop()
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
            children = [int(c) for t in tasks for c in Path(f"/proc/{pid}/task/{t}/children").read_text().split()]
        except OSError:
            continue
        own = [child for child in children if _engine_rank(child) in (None, rank)]
        found += own
        queue += own
    return found


def _engine_rank(pid: int) -> int | None:
    """The rank of the engine that a process is, by the log it writes to; None if it is none."""
    try:
        match = re.fullmatch(r"engine-(\d+)\.log", os.path.basename(os.readlink(f"/proc/{pid}/fd/1")))
    except OSError:
        return None
    return int(match[1]) if match else None


def _reap() -> None:
    """Collect children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def kill_descendants(rank: int, seconds: float = 10.0) -> None:
    """Kill everything below this process; new ones may appear while it happens, so until nothing is left."""
    deadline = time.monotonic() + seconds
    while (pids := _descendants(rank)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
        _reap()


class Restarter:
    """Starts a supervisor, again where that makes sense, and passes signals on to it."""

    def __init__(self, run_dir: RunDir, identity: Identity) -> None:
        self._run_dir = run_dir
        self._identity = identity
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping_since: float | None = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping_since = self._stopping_since or time.monotonic()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def run(self) -> int:
        """Supervise until the run is over; returns the rank's exit code."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        code = EXIT_INTERRUPTED
        starts = 0
        while self._stopping_since is None and starts < MAX_STARTS:
            begun, commits = time.monotonic(), self._run_dir.commits()
            code = self._run_once()
            if self._identity.rank == 0:  # what fails again and again may well take its time to fail
                steady = self._run_dir.commits()[-1:] != commits[-1:]
            else:
                steady = time.monotonic() - begun > STEADY_SECONDS
            starts = 1 if steady else starts + 1
            if code >= 0 and code != EXIT_RESTART:
                break
            print(f"gyre: rank {self._identity.rank}: supervisor ended with {code}", file=sys.stderr, flush=True)
        code = code if code >= 0 and code != EXIT_RESTART else EXIT_FAULT
        if self._identity.rank == 0:
            try:
                announce_end(self._run_dir, self._identity.job_key, code)
            except OSError as error:  # a full disk; the others give up after their time
                print(f"gyre: cannot announce the end: {error}", file=sys.stderr, flush=True)
        return code

    def _run_once(self) -> int:
        """One life of the supervisor; negative where a signal ended it."""
        command = [sys.executable, "-m", "gyre.supervisor", str(self._run_dir.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        if self._stopping_since is not None:  # the signal came before there was anyone to pass it to
            self._process.send_signal(signal.SIGTERM)
        while True:
            try:
                code = self._process.wait(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if self._stopping_since and time.monotonic() - self._stopping_since > STOP_SECONDS:
                    self._process.kill()
        kill_descendants(self._identity.rank)
        return code


def main(run_dir: str | Path) -> int:
    """Run this process's rank of the run in `run_dir`; returns the exit code.

    The rank and the job are found in the environment (`gyre.launch.identity`).
    """
    try:
        return Restarter(RunDir(run_dir), identify(os.environ)).run()
    except UserError as error:
        print(f"gyre: {error}", file=sys.stderr, flush=True)
        return EXIT_USER


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="gyre.rank", description="Run one rank of a run; started by a launcher.")
    parser.add_argument("run_dir", help="the run's directory")
    sys.exit(main(parser.parse_args().run_dir))
