"""Run directories from the launcher's side: their names, making them, finding them again."""

from __future__ import annotations

import json
import time
from pathlib import Path

from gyre.config import Config, dump, load
from gyre.errors import UserError
from gyre.run_dir import RunDir, read_json, write_atomic

LOGS = "logs"


def path_of(config: Config, named: bool = False, job: str | None = None) -> Path:
    """Where a new run of this configuration would land.

    Args:
        config: the run.
        named: the name alone, without the time.
        job: id of the Slurm job that the run lives in, by which a restart of that job finds it.
    """
    parts = [config.name] if named else [config.name, time.strftime("%Y%m%d-%H%M%S")]
    return Path(config.root) / LOGS / "-".join([*parts, *([f"job{job}"] if job else [])])


def create(config: Config, named: bool = False, job: str | None = None) -> RunDir:
    """Make the directory of a new run, with its resolved configuration in it.

    Raises:
        UserError: the name is taken, or the directory cannot be made.
    """
    path = path_of(config, named, job)
    try:
        while True:
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                if named:
                    raise UserError(
                        f"{path} exists; go on with it by launch.py resume {path}, or choose another --name"
                    ) from None
                path = path.with_name(path.name + "x")  # two runs in one second
        run = RunDir(path).create()
        write_atomic(run.config, dump(config), durable=True)
    except OSError as error:
        raise UserError(
            f"cannot make the run directory {path}: {error.strerror}; free it or make it writable"
        ) from error
    return run


def open_run(path: Path | str) -> tuple[RunDir, Config]:
    """An existing run and its configuration.

    Raises:
        UserError: it is no run.
    """
    run = RunDir(path)
    if not run.path.is_dir():
        raise UserError(f"there is no run directory {path}; runs are in {LOGS}/")
    if not run.config.is_file():
        raise UserError(f"{path} is not a run directory: it has no config.yaml; runs are in {LOGS}/")
    return run, load(run.config)


def refuse_running(run: RunDir) -> None:
    """Refuse a run that an attempt holds at this moment.

    Raises:
        UserError: it runs.
    """
    with run.locked():
        pass


def of_job(config: Config, job: str) -> RunDir | None:
    """The newest run of a Slurm job, as a restart of that job looks for it; job ids may come round again."""
    found = sorted((Path(config.root) / LOGS).glob(f"{config.name}-*-job{job}"), key=lambda path: path.stat().st_mtime)
    runs = [path for path in found if (path / "config.yaml").is_file()]
    return RunDir(runs[-1]) if runs else None


def record_start(run: RunDir, cluster: str, job: str) -> None:
    """Keep how a run was started last, for `cluster_of`."""
    write_atomic(run.path / "launch.json", json.dumps({"cluster": cluster, "job": job}))


def cluster_of(run: RunDir) -> str:
    """Where a run was started last: "local" or "slurm"."""
    return (read_json(run.path / "launch.json") or {}).get("cluster", "local")
