"""From the environment of a task to which rank of which job it is. Pure: the environment is an argument.

The job key tells one start of a job from every other: a requeued Slurm job keeps its id but counts its restarts, and a
second step in the same allocation has another step id. Every rank of a start computes the same key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gyre.errors import UserError

#: Set by the local launcher for all ranks of one start; process ids come round again, so it is random.
LOCAL_KEY = "GYRE_LOCAL_KEY"
LOCAL_RANK = "SUBMITIT_LOCAL_GLOBALID"
LOCAL_SIZE = "SUBMITIT_LOCAL_NTASKS"


@dataclass(frozen=True)
class Identity:
    """Who a rank is."""

    rank: int
    world_size: int
    local_rank: int  # among the ranks that this job has on the same node
    job_key: str  # the same in all ranks of one start of the job, and in no other start
    launcher: Literal["slurm", "local"]
    job_id: str
    restarts: int = 0  # times that Slurm has requeued the job
    node: str = "localhost"  # as Slurm calls it
    nodes: tuple[str, ...] = ("localhost",)  # all nodes of the job, the cells' first
    launch_address: str | None = None  # of the node where the batch script runs, which is rank 0's


def expand_nodes(text: str) -> tuple[str, ...]:
    """The names in a Slurm node list such as "gpu[0-2,07],login1"; numbers keep their leading zeros."""
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        expanded = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", item):
            choices = [literal] if literal else [n for one in ranges.split(",") for n in _numbers(one)]
            expanded = [head + tail for head in expanded for tail in choices]
        names += expanded
    return tuple(names)


def _numbers(text: str) -> list[str]:
    low, _, high = text.partition("-")
    return [f"{n:0{len(low)}d}" for n in range(int(low), int(high or low) + 1)]


def het_groups(environ: Mapping[str, str]) -> int:
    """Components of the het job whose environment this is; 0 in a homogeneous one."""
    return int(environ.get("SLURM_HET_SIZE", "0"))


def slurm_job_id(environ: Mapping[str, str]) -> str | None:
    """Id of the Slurm job, a het job's leader's, or None outside one."""
    # A task of the second component may see that component's id in SLURM_JOB_ID, depending on Slurm's version.
    if het_groups(environ) and (leader := environ.get("SLURM_JOB_ID_HET_GROUP_0")):
        return leader
    return environ.get("SLURM_HET_JOB_ID") or environ.get("SLURM_JOB_ID")


def _nodes(environ: Mapping[str, str]) -> tuple[str, ...]:
    groups = het_groups(environ)
    lists = [environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{g}", "") for g in range(groups)]
    return expand_nodes(",".join(lists) if any(lists) else environ.get("SLURM_JOB_NODELIST", ""))


def identify(environ: Mapping[str, str]) -> Identity:
    """The identity of the task that has this environment.

    Raises:
        UserError: no launcher that Gyre knows started it.
    """
    if key := environ.get(LOCAL_KEY):  # first: the local launcher may itself run in a Slurm job's shell
        rank = int(environ[LOCAL_RANK])
        return Identity(rank, int(environ[LOCAL_SIZE]), rank, key, "local", key.rpartition("-")[2])
    job = slurm_job_id(environ)
    if job is None or "SLURM_PROCID" not in environ:
        raise UserError("this process is no rank of a run; start one with launch.py run CONFIG or slurm/gyre.sbatch")
    restarts = int(environ.get("SLURM_RESTART_COUNT") or 0)
    node = environ.get("SLURMD_NODENAME", "localhost")
    return Identity(
        rank=int(environ["SLURM_PROCID"]),
        world_size=int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"]),
        local_rank=int(environ.get("SLURM_LOCALID", "0")),
        job_key=f"slurm-{job}-{restarts}-{environ.get('SLURM_STEP_ID', '0')}",
        launcher="slurm",
        job_id=job,
        restarts=restarts,
        node=node,
        nodes=_nodes(environ) or (node,),
        launch_address=environ.get("SLURM_LAUNCH_NODE_IPADDR") or environ.get("SLURM_SRUN_COMM_HOST"),
    )
