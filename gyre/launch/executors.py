"""submitit's executors as Gyre needs them: one local task per rank, and a Slurm job with all ranks in one step.

What submitit starts in every rank is a `RankCall`, which calls `gyre.rank.main`. submitit would also checkpoint,
requeue and swallow signals in every task; a rank looks after itself and the batch script requeues, so the job
environment here leaves the signals alone.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core.job_environment import JobEnvironment
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob

from gyre import models
from gyre.config import Config
from gyre.errors import EXIT_OK
from gyre.launch import script
from gyre.launch.identity import LOCAL_KEY, LOCAL_RANK, LOCAL_SIZE, identify, slurm_job_id
from gyre.launch.plan import Plan
from gyre.run_dir import read_json, write_atomic

#: submitit ends a local job after a time limit, of minutes unless set; a run has none.
_NO_LIMIT_MINUTES = 60 * 24 * 365 * 10
_PR_SET_PDEATHSIG = 1
#: Module whose `main(run_dir)` a rank runs; tests put a trivial one here.
RANK_PROGRAM = "GYRE_RANK_PROGRAM"

#: Slurm says these of a job that will not run again by itself.
_ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
GONE = "GONE"  # Slurm has forgotten the job


def rank_program() -> str:
    """Name of the module that a rank runs."""
    return os.environ.get(RANK_PROGRAM, "gyre.rank")


def _record(folder: Path | str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.json"


def _terminate_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class RankCall:
    """What submitit pickles and every rank calls. The exit code is kept in a file: submitit keeps none."""

    def __init__(self, run_dir: Path | str, folder: Path | str, local: bool) -> None:
        self.run_dir = str(run_dir)
        self.folder = str(folder)
        self.local = local

    def __call__(self) -> None:
        """Run this task's rank; ends the process with the rank's exit code unless that is 0."""
        if self.local:
            _terminate_with_parent()
        code = importlib.import_module(rank_program()).main(self.run_dir)
        write_atomic(_record(self.folder, identify(os.environ).rank), json.dumps({"code": code}))
        if code != EXIT_OK:
            sys.exit(code)


def exit_code(folder: Path | str) -> int | None:
    """Exit code of rank 0, whose word counts for the run; None while it runs, or if it was killed."""
    record = read_json(_record(folder, 0))
    return record["code"] if record else None


class GyreJobEnvironment(JobEnvironment):
    """What a task of ours must tell submitit about its job, locally and on Slurm."""

    _env = {"num_tasks": LOCAL_SIZE, "num_nodes": "", "node": "", "local_rank": LOCAL_RANK}

    def __init__(self) -> None:
        super().__init__()
        if self.activated():  # a rank's output is for its own words
            logging.getLogger("submitit").setLevel(logging.WARNING)

    @property
    def job_id(self) -> str:
        """Id of the job; of a het job's leader in all its components."""
        if LOCAL_KEY in os.environ:
            return os.environ["SUBMITIT_LOCAL_JOB_ID"]
        return slurm_job_id(os.environ) or ""

    @property
    def global_rank(self) -> int:
        """Rank over all components."""
        return identify(os.environ).rank

    def _handle_signals(self, paths: Any, submission: Any) -> None:
        """Leave every signal to the rank."""


# -- local -----------------------------------------------------------------------------------------------------------
class GyreLocalExecutor(LocalExecutor):
    """All ranks as processes of this machine.

    The job is a session of its own, so that Ctrl-C reaches only who watches, and it ends when the watcher dies.
    """

    def __init__(self, folder: Path | str, ranks: int) -> None:
        super().__init__(folder)
        self.update_parameters(tasks_per_node=ranks, timeout_min=_NO_LIMIT_MINUTES, stderr_to_stdout=True)
        self.key = f"local-{uuid.uuid4().hex[:12]}"

    def _submit_command(self, command: str) -> LocalJob[Any]:
        ranks = self.parameters["tasks_per_node"]
        env = {
            **os.environ,
            LOCAL_KEY: self.key,
            "SUBMITIT_EXECUTOR": GyreJobEnvironment.name(),
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_NTASKS": str(ranks),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
            "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * self.parameters["timeout_min"]),
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
        }
        with open(self.folder / "controller.log", "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "submitit.local._local", str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
                preexec_fn=_terminate_with_parent,
            )
        return LocalJob(folder=self.folder, job_id=str(process.pid), tasks=list(range(ranks)), process=process)


# -- Slurm -----------------------------------------------------------------------------------------------------------
class _Watcher(SlurmInfoWatcher):
    """Asks the controller, for many clusters keep no accounts (sacct)."""

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        self.update_if_long_enough(mode)
        return self._info_dict.get(job_id, {}).get("JobState", "UNKNOWN")

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        return self.get_state(job_id, mode) in (*_ENDED, GONE)

    def update(self) -> None:
        for job_id in self._registered - self._finished:
            command = ["scontrol", "show", "job", "--oneliner", job_id]
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
            if answer.returncode == 0:
                self._info_dict[job_id] = _fields(answer.stdout)
            elif "Invalid job id" in answer.stderr:
                self._info_dict[job_id] = {"JobState": GONE}
            # Anything else: the controller is away; what was known stays.
            if self.is_done(job_id, mode="cache"):
                self._finished.add(job_id)
        self._last_status_check = time.time()  # submitit compares with this clock


def _fields(text: str) -> dict[str, str]:
    """The fields of the first job of `scontrol show job --oneliner`; of a het job that is its leader."""
    words = text.splitlines()[0].split() if text.strip() else []
    return dict(word.split("=", 1) for word in words if "=" in word)


class GyreSlurmJob(SlurmJob[Any]):
    """A submitted run."""

    watcher = _Watcher(delay_s=15)

    def describe(self) -> tuple[str, str]:
        """Slurm's state of the job, and its reason where it waits."""
        state = self.watcher.get_state(self.job_id)
        return state, self.watcher._info_dict.get(self.job_id, {}).get("Reason", "")

    @property
    def ended(self) -> bool:
        """Whether the job will not run again; a requeued one will."""
        return self.watcher.is_done(self.job_id)


class GyreSlurmExecutor(SlurmExecutor):
    """One job for all ranks: a het job, or a homogeneous one where the plan says so."""

    job_class = GyreSlurmJob

    def __init__(self, folder: Path | str, config: Config, plan: Plan, run_dir: Path | str) -> None:
        super().__init__(folder, python=rank_python(config))
        self._config = config
        self._plan = plan
        self._run_dir = Path(run_dir)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return submission_text(self._config, self._plan, self._run_dir, self.folder, command)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # What an interactive job left in this shell would be taken for the new job's own.
        inherited = [name for name in os.environ if name.startswith("SLURM_") and name not in _SLURM_KEPT]
        unset = [part for name in inherited for part in ("-u", name)]
        return ["env", *unset, "sbatch", str(submission_file_path)]

    def _num_tasks(self) -> int:
        return self._plan.layout.ranks


_THEIR_PYTHON = "python"
_SLURM_KEPT = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT"}


def rank_python(config: Config) -> str:
    """The interpreter of the ranks, as shell text: this one, unless setup lines or a container bring their own."""
    return _THEIR_PYTHON if config.slurm.setup or config.slurm.container else shlex.quote(sys.executable)


def task(config: Config, run_dir: Path, command: str, exports: Sequence[tuple[str, str]] = ()) -> script.Task:
    """What the batch script of a run starts, and where."""
    package = Path(__file__).resolve().parents[2]
    python = rank_python(config)
    # With a container, the machine outside may have no interpreter that knows Gyre.
    ended = f'{python} -m gyre.cli ended {shlex.quote(str(run_dir))} "$code"'
    ended = "(exit $code)" if config.slurm.container else ended
    if program := os.environ.get(RANK_PROGRAM):
        exports = [*exports, (RANK_PROGRAM, program)]
    search = None if str(package) == config.root else str(package)
    own = None if python == _THEIR_PYTHON else str(Path(sys.executable).parent)
    if config.slurm.container and config.model.path.startswith("gyre:"):  # a container may have another home directory
        exports = [*exports, ("GYRE_CACHE", str(models.cache_directory().parent.absolute()))]
    mounts = _mounts(config, run_dir) if config.slurm.container else ()
    return script.Task(command, ended, config.root, own, search, tuple(exports), mounts)


def _mounts(config: Config, run_dir: Path) -> tuple[str, ...]:
    """What a container must see, apart from the start directory: the run, model, tasks, made models and scratch."""
    wanted = [run_dir, config.tasks.path, config.network.scratch]
    if config.model.path.startswith("gyre:"):
        cache = models.cache_directory()
        cache.mkdir(parents=True, exist_ok=True)  # what is not there cannot be mounted
        wanted.append(cache.parent)
    else:
        wanted.append(config.model.path)
    seen = [Path(config.root)]
    for path in filter(None, wanted):
        path = Path(os.path.abspath(Path(config.root, Path(path).expanduser())))
        for place in (path, path.resolve()):  # a link is of no use without what it points to
            if not any(place.is_relative_to(known) for known in seen):
                seen.append(place)
    return tuple(map(str, seen[1:]))


def submission_text(config: Config, plan: Plan, run_dir: Path, folder: Path, command: str) -> str:
    """The batch script that `GyreSlurmExecutor` submits."""
    exports = [("SUBMITIT_EXECUTOR", GyreJobEnvironment.name())]
    output = str(folder / "%j_0_log.out")
    return script.render(plan, config.slurm, config.name, output, task(config, run_dir, command, exports))


def submitit_command(config: Config, folder: Path) -> str:
    """The command with which submitit starts a rank."""
    return f"{rank_python(config)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
