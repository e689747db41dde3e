"""The text of a batch script. Pure: nothing is run, nothing is read.

A script is a head (what Slurm is asked for) and a body (set up, one step over all ranks, requeue on the signal, exit
code). `launch.py run --cluster slurm` submits both together; slurm/gyre.sbatch has a head of its own and takes the body
from `launch.py prepare`, so that both ways of starting run the same lines.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from gyre.config import SlurmConfig
from gyre.launch.plan import Component, Plan

#: A rank that ends, or a node that fails, must not take the others with it: the run goes on with what is left.
STEP_FLAGS = ("--kill-on-bad-exit=0", "--no-kill", "--wait=0")


@dataclass(frozen=True)
class Task:
    """What every rank runs, and around it what the batch script needs to know."""

    command: str  # one shell command
    ended: str  # shell command that turns the step's exit code $code into the job's
    root: str  # directory to run in
    bin: str | None = None  # directory to put first in PATH: the interpreter's
    search_path: str | None = None  # directory for PYTHONPATH, where Gyre is not installed with the interpreter
    exports: tuple[tuple[str, str], ...] = ()
    mounts: tuple[str, ...] = ()  # what a container must see, apart from `root`


def render(plan: Plan, slurm: SlurmConfig, name: str, output: str, task: Task) -> str:
    """The whole batch script of a run.

    Args:
        plan: what to ask for.
        slurm: time, account, setup lines, container.
        name: the job's name.
        output: path pattern of the job's output.
        task: what every rank runs.
    """
    return "\n".join([*_head(plan, slurm, name, output), "", *_body(plan, slurm, task), ""])


def body(plan: Plan, slurm: SlurmConfig, task: Task) -> str:
    """The lines after the head."""
    return "\n".join([*_body(plan, slurm, task), ""])


# -- head ------------------------------------------------------------------------------------------------------------
def _head(plan: Plan, slurm: SlurmConfig, name: str, output: str) -> Iterator[str]:
    yield "#!/bin/bash"
    yield from _directives(("job-name", name), ("output", output), ("open-mode", "append"))
    yield from _directives(("signal", f"B:USR1@{slurm.signal_seconds}"))
    yield "#SBATCH --requeue"
    for index, component in enumerate(plan.components):
        if index:
            yield "#SBATCH hetjob"
        # Options of the first component do not all hold for the second, so each one is complete.
        yield "#SBATCH --no-kill"
        yield from _directives(("time", slurm.time), ("account", slurm.account), ("qos", slurm.qos))
        yield from _resources(component)


def _resources(component: Component) -> Iterator[str]:
    yield from _directives(
        ("partition", component.partition),
        ("nodes", component.nodes),
        ("ntasks", component.tasks),
        ("ntasks-per-node", component.tasks_per_node),
        ("cpus-per-task", component.cpus_per_task),
        ("gres", component.gres),
        ("mem", component.mem),
        ("constraint", component.constraint),
    )


def _directives(*options: tuple[str, object | None]) -> Iterator[str]:
    for key, value in options:
        if value is not None:
            yield f"#SBATCH --{key}={shlex.quote(str(value))}"


# -- body ------------------------------------------------------------------------------------------------------------
def _body(plan: Plan, slurm: SlurmConfig, task: Task) -> Iterator[str]:
    yield f"cd {shlex.quote(task.root)} || exit 1"
    if task.bin:
        yield f'export PATH={shlex.quote(task.bin)}":$PATH"'
    if task.search_path:
        yield f'export PYTHONPATH={shlex.quote(task.search_path)}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    for key, value in task.exports:
        yield f"export {key}={shlex.quote(value)}"
    yield from slurm.setup
    yield ""
    yield "# Before the time limit, or when somebody sends USR1: begin again, from the last commit."
    yield "requeue() {"
    yield '    echo "gyre: requeueing job $SLURM_JOB_ID; it goes on from the last commit"'
    yield '    scontrol requeue "$SLURM_JOB_ID" || echo "gyre: it may not be requeued; resume the run by hand"'
    yield "}"
    yield "trap requeue USR1"
    yield ""
    yield f"rank=({task.command})"
    yield _srun(plan, slurm, task) + " &"
    yield "step=$!"
    yield "while true; do"
    yield '    wait "$step"; code=$?'
    yield "    # A signal ends the wait, not the step."
    yield '    if [ "$code" -le 128 ] || ! kill -0 "$step" 2>/dev/null; then break; fi'
    yield "done"
    yield task.ended
    yield "exit $?"


def _srun(plan: Plan, slurm: SlurmConfig, task: Task) -> str:
    flags = [*STEP_FLAGS]
    if slurm.container:
        mounts = ",".join(f"{path}:{path}" for path in (task.root, *task.mounts))
        flags += [f"--container-image={slurm.container}", f"--container-mounts={mounts}"]
        flags += [f"--container-workdir={task.root}"]
    if not plan.het:
        (only,) = plan.components
        flags = [f"--nodes={only.nodes}", f"--ntasks={only.tasks}", "--distribution=cyclic", *flags]
        return _step(flags, only.cpus_per_task)
    groups = range(len(plan.components))
    if len({component.cpus_per_task for component in plan.components}) == 1:
        everyone = f"--het-group={','.join(map(str, groups))}"
        return _step([everyone, *flags], plan.components[0].cpus_per_task)
    # Still one step: srun takes options per component, separated by colons.
    parts = [_step([f"--het-group={g}", *flags], plan.components[g].cpus_per_task)[len("srun ") :] for g in groups]
    return "srun " + " \\\n    : ".join(parts)


def _step(flags: list[str], cpus: int | None) -> str:
    # srun does not inherit --cpus-per-task from sbatch (Slurm 22.05 and later).
    flags = [*flags, f"--cpus-per-task={cpus}"] if cpus else flags
    return shlex.join(["srun", *flags]) + ' "${rank[@]}"'
