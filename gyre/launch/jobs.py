"""A started run, as whoever waits for it sees it: has it ended, how, and how to stop it and leave nothing behind."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Protocol

from submitit.core.utils import FailedJobError, FailedSubmissionError

from gyre.config import Config
from gyre.errors import UserError
from gyre.harness.process import MARK
from gyre.launch import executors, node
from gyre.launch.identity import LOCAL_KEY
from gyre.launch.plan import Layout, plan
from gyre.run_dir import RunDir
from gyre.shared_memory import remove_shared

#: A rank that is told to stop gives its own children time; this is longer.
STOP_SECONDS = 60.0
#: Ranks that go on after rank 0 has ended are stopped after this time.
GRACE_SECONDS = 20.0
_POLL = 0.1


class Job(Protocol):
    """A run that was started."""

    id: str
    folder: Path

    @property
    def ended(self) -> bool:
        """Whether no rank runs, or will run again by itself."""

    def waits(self) -> str | None:
        """Why no rank runs yet, or None once they do."""

    def stop(self) -> None:
        """End it now, in order where possible, and return when nothing of it runs."""

    def finish(self) -> None:
        """Wait for the end of a run that has said it ends; what hangs is ended."""


def _folder(run: RunDir) -> Path:
    """A new directory for what submitit keeps of one start."""
    folder = run.path / "launch" / time.strftime("%Y%m%d-%H%M%S")
    while folder.exists():
        folder = folder.with_name(folder.name + "x")
    folder.mkdir(parents=True)
    return folder


# -- local -----------------------------------------------------------------------------------------------------------
def marked(key: str) -> list[int]:
    """Process ids of everything that the local start with this key has started, however deep."""
    ours, harness = f"{LOCAL_KEY}={key}".encode(), f"{MARK}={key}/".encode()  # harnesses do not see the key itself
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
                zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue  # it has ended, or is another user's
            if not zombie and any(one == ours or one.startswith(harness) for one in variables):
                found.append(int(entry.name))
    return found


class LocalRun:
    """A run on this machine."""

    def __init__(self, run: RunDir, config: Config) -> None:
        self._run, self._config = run, config
        self.folder = _folder(run)
        executor = executors.GyreLocalExecutor(self.folder, Layout.of(config).ranks)
        self.key = executor.key
        self._job = executor.submit(executors.RankCall(run.path, self.folder, local=True))
        self.id = self._job.job_id
        self._zero_ended: float | None = None

    @property
    def ended(self) -> bool:
        """Whether all ranks have ended, or rank 0 has and the others had time to follow."""
        if self._job.done():
            return True
        if executors.exit_code(self.folder) is None:
            return False
        self._zero_ended = self._zero_ended or time.monotonic()
        return time.monotonic() - self._zero_ended > GRACE_SECONDS

    def waits(self) -> str | None:
        """Never waits."""
        return None

    def _signal(self, number: int) -> None:
        process = self._job._process
        if process is not None and process.poll() is None:
            process.send_signal(number)

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Tell every rank to stop, wait for them, kill what is left after `seconds`, or at a second Ctrl-C."""
        try:
            self._signal(signal.SIGTERM)  # the controller passes it on to every rank
            self._await(seconds)
        finally:
            self._sweep()

    def finish(self) -> None:
        """Wait for the other ranks to follow rank 0."""
        self._await(GRACE_SECONDS)
        self.stop()

    def _await(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._job.done() and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _sweep(self) -> None:
        """Kill what is left, and remove what ranks did not: one that was ended while it started makes files late."""
        deadline = time.monotonic() + 10.0
        while (left := marked(self.key)) and time.monotonic() < deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(_POLL)
        self._job.done()  # collects the controller
        remove_shared(self._run.path)
        node.remove_scratch(self._config, self._run.name)


# -- Slurm -----------------------------------------------------------------------------------------------------------
class SlurmRun:
    """A run that was submitted to Slurm."""

    def __init__(self, run: RunDir, config: Config) -> None:
        self.folder = _folder(run)
        executor = executors.GyreSlurmExecutor(self.folder, config, plan(config), run.path)
        try:
            # submitit prints what sbatch complains about; that becomes one line.
            with contextlib.redirect_stderr(io.StringIO()):
                self._job: Any = executor.submit(executors.RankCall(run.path, self.folder, local=False))
        except (FailedJobError, FailedSubmissionError) as error:
            why = (str(error).strip().splitlines() or ["it gave no reason"])[-1].removeprefix("sbatch: error: ")
            raise UserError(f"Slurm refused the job: {why}; correct the slurm section") from error
        self.id = self._job.job_id

    @property
    def ended(self) -> bool:
        """Whether Slurm will not run the job again by itself."""
        return self._job.ended

    def waits(self) -> str | None:
        """Slurm's word for why the job waits."""
        state, reason = self._job.describe()
        if state not in ("PENDING", "UNKNOWN", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING"):
            return None
        return state.lower() + (f" ({reason})" if reason not in ("", "None") else "")

    def stop(self) -> None:
        """Cancel the job and wait until Slurm has ended it."""
        subprocess.run(["scancel", self.id], check=False)
        self._await(STOP_SECONDS)

    def finish(self) -> None:
        """Wait for the batch script to end."""
        self._await(STOP_SECONDS)

    def _await(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._job.watcher.is_done(self.id, mode="force") and time.monotonic() < deadline:
            time.sleep(0.5)


def start(run: RunDir, config: Config, cluster: str) -> Job:
    """Start all ranks of a run; `cluster` is "local" or "slurm"."""
    return SlurmRun(run, config) if cluster == "slurm" else LocalRun(run, config)
