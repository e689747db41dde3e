"""A task finds its rank and its job in the environment, whichever launcher made it."""

import pytest

from gyre.errors import UserError
from gyre.launch.identity import expand_nodes, identify, slurm_job_id

HET_STEP = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_ID_HET_GROUP_0": "7",
    "SLURM_JOB_ID_HET_GROUP_1": "8",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu[0-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu[0-1]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURMD_NODENAME": "cpu0",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu0", ["gpu0"]),
        ("gpu[0-2],cpu1", ["gpu0", "gpu1", "gpu2", "cpu1"]),
        ("n[08-10,3]", ["n08", "n09", "n10", "n3"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("", []),
    ],
)
def test_expands_node_lists(text, names):
    assert list(expand_nodes(text)) == names


def test_het_step():
    who = identify(HET_STEP)
    assert (who.rank, who.world_size, who.local_rank, who.launcher) == (3, 5, 0, "slurm")
    assert who.nodes == ("gpu0", "gpu1", "gpu2", "cpu0", "cpu1")
    assert (who.node, who.launch_address, who.job_id, who.restarts) == ("cpu0", "10.0.0.1", "7", 0)


def test_all_components_of_a_het_job_agree_on_the_key():
    host = {**HET_STEP, "SLURM_JOB_ID": "8"}
    assert identify(host).job_key == identify(HET_STEP).job_key
    without_groups = {k: v for k, v in host.items() if "HET_GROUP" not in k}
    assert slurm_job_id({**without_groups, "SLURM_HET_JOB_ID": "7"}) == "7"


def test_every_start_has_another_key():
    requeued = {**HET_STEP, "SLURM_RESTART_COUNT": "1"}
    second_step = {**HET_STEP, "SLURM_STEP_ID": "1"}
    keys = {identify(environ).job_key for environ in (HET_STEP, requeued, second_step)}
    assert len(keys) == 3
    assert identify(requeued).restarts == 1


def test_homogeneous_step():
    environ = {
        "SLURM_JOB_ID": "9",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_PROCID": "2",
        "SLURM_NTASKS": "3",
        "SLURM_LOCALID": "1",
        "SLURMD_NODENAME": "n1",
    }
    who = identify(environ)
    assert (who.rank, who.world_size, who.local_rank, who.nodes) == (2, 3, 1, ("n1", "n2"))


def test_local_start_in_the_shell_of_a_slurm_job():
    local = {"GYRE_LOCAL_KEY": "local-ab", "SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "4"}
    who = identify({**HET_STEP, **local})
    assert (who.rank, who.world_size, who.launcher, who.job_key) == (1, 4, "local", "local-ab")


def test_no_launcher_is_the_users_mistake():
    with pytest.raises(UserError, match="launch.py run"):
        identify({"PATH": "/bin"})
    with pytest.raises(UserError):
        identify({"SLURM_JOB_ID": "1"})  # a batch script is no rank
