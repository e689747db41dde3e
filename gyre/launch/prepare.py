"""Inside an allocation that somebody submitted by hand: check it, find or make the run, and print the script's body."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping

from gyre.checkpoint import check_division
from gyre.config import Config, load
from gyre.errors import UserError
from gyre.launch import check, directory, executors, script
from gyre.launch.identity import het_groups, slurm_job_id
from gyre.launch.plan import Plan
from gyre.run_dir import RunDir


def prepare(target: str, overrides: list[str], resume: bool, environ: Mapping[str, str]) -> str:
    """The lines that slurm/gyre.sbatch runs.

    Args:
        target: a configuration, or with `resume` a run directory.
        overrides: key=value.
        resume: whether to go on with an existing run.
        environ: the batch script's environment.

    Raises:
        UserError: there is no allocation, it does not fit the configuration, or something the run needs is missing.
    """
    job = slurm_job_id(environ)
    if job is None:
        raise UserError("this is no Slurm job; submit it with sbatch slurm/gyre.sbatch, or use launch.py run")
    run, config = directory.open_run(target) if resume else (None, load(target, overrides))
    restarted = int(environ.get("SLURM_RESTART_COUNT") or 0) > 0
    if run is None and restarted and (run := directory.of_job(config, job)):
        config = load(run.config)
    if run is not None:
        check_division(run, config)
    plan = _with_cpus(check.allocation(config, environ), environ)
    if run is None:
        check.before_start(config, "slurm")
        run = directory.create(config, job=job)
    directory.record_start(run, "slurm", job)
    return f"echo {shlex.quote(f'gyre: run {run.path}')}\n" + script.body(plan, config.slurm, _task(config, run))


def _task(config: Config, run: RunDir) -> script.Task:
    command = f"{executors.rank_python(config)} -u -m {executors.rank_program()} {shlex.quote(str(run.path))}"
    return executors.task(config, run.path, command)


def _with_cpus(plan: Plan, environ: Mapping[str, str]) -> Plan:
    """The plan with the CPUs that sbatch's flags gave each task, which srun does not take over by itself."""
    components = []
    for index, component in enumerate(plan.components):
        given = environ.get("SLURM_CPUS_PER_TASK" + (f"_HET_GROUP_{index}" if het_groups(environ) else ""))
        components.append(dataclasses.replace(component, cpus_per_task=int(given) if given else None))
    return dataclasses.replace(plan, components=tuple(components))
