"""Every way to start a run on a real Slurm, under a trivial rank program."""

import os
import signal
import time

import pytest

from tests.launch.support import environment, launch, only_run, seen, settings, start, wait_for, write

pytestmark = pytest.mark.slurm


@pytest.fixture
def slurm(slurm_cluster, workplace, tmp_path, monkeypatch):
    """The cluster, spoken to from the workplace."""
    cluster = slurm_cluster
    yield Site(cluster, workplace, tmp_path)
    cluster.call("scancel", "--user", str(os.getuid()))
    wait_for(lambda: not cluster.call("squeue", "-h").stdout, 30)


class Site:
    """A directory on a cluster, and what a user types there."""

    def __init__(self, cluster, place, tmp_path):
        self.cluster = cluster
        self.place = place
        self.data = settings(tmp_path)
        self.config = write(tmp_path, self.data)

    def sbatch(self, *arguments, **extra):
        """Submit by hand; returns the job id."""
        import subprocess

        env = environment(**self.cluster.environment, **extra)
        command = ["sbatch", "--parsable", *map(str, arguments)]
        done = subprocess.run(command, cwd=self.place, env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def launch(self, *arguments, **extra):
        return launch(*arguments, cwd=self.place, **self.cluster.environment, **extra)

    def start(self, *arguments, **extra):
        return start(*arguments, cwd=self.place, **self.cluster.environment, **extra)

    def job(self, job):
        """Slurm's fields of a job (a het job's leader); empty once it is forgotten."""
        text = self.cluster.call("scontrol", "show", "job", "--oneliner", job).stdout
        return dict(word.split("=", 1) for word in text.split("\n")[0].split() if "=" in word)

    def ended(self, job, timeout=90.0):
        """Wait for the end of a job; returns (state, exit code)."""
        final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_for(lambda: self.job(job).get("JobState") in final, timeout)
        fields = self.job(job)
        return fields["JobState"], int(fields["ExitCode"].split(":")[0])

    def output(self, job):
        return (self.place / f"logs/slurm-{job}.out").read_text()


def assert_het(ranks, cells=3, hosts=1):
    """All ranks of one start, cells first, each on a node of its own kind."""
    nodes = [f"gpu{i}" for i in range(cells)] + [f"cpu{i}" for i in range(hosts)]
    assert [who["rank"] for who in ranks] == list(range(cells + hosts))
    assert [who["node"] for who in ranks] == nodes
    assert {who["world_size"] for who in ranks} == {cells + hosts}
    assert {tuple(who["nodes"]) for who in ranks} == {tuple(nodes)}
    assert len({who["job_key"] for who in ranks}) == 1


def test_by_hand_a_requeued_het_job_goes_on_in_the_same_run(slurm):
    job = slurm.sbatch(
        "--partition=gpu", ":", "--partition=cpu", "slurm/gyre.sbatch", slurm.config, TRIVIAL_SECONDS=300
    )
    run = only_run(slurm.place)
    first = seen(run, 4)
    assert_het(first)
    slurm.cluster.call("scontrol", "requeue", job)
    second = seen(run, 4, restarts=1)
    assert_het(second)
    assert first[0]["job_key"] != second[0]["job_key"]
    assert only_run(slurm.place) == run
    assert all((run / f"left-0-{rank}").exists() for rank in range(4)), "the ranks could not end in order"
    (run / "go").touch()
    assert slurm.ended(job) == ("COMPLETED", 0)
    assert f"gyre: run {run}" in slurm.output(job)


def test_flags_of_sbatch_change_both_components(slurm):
    flags = ["--partition=gpu", "--nodes=2", "--cpus-per-task=2", ":", "--partition=cpu", "--nodes=2"]
    job = slurm.sbatch(*flags, "slurm/gyre.sbatch", slurm.config, "cells.count=2", "hosts.count=2")
    assert slurm.ended(job) == ("COMPLETED", 0)
    assert_het(seen(only_run(slurm.place), 4), cells=2, hosts=2)


def test_by_hand_an_allocation_that_does_not_fit_is_refused(slurm):
    job = slurm.sbatch("slurm/gyre.sbatch", slurm.config, "cells.count=2")
    assert slurm.ended(job) == ("FAILED", 2)
    (line,) = slurm.output(job).splitlines()
    assert "the configuration needs 2 cells + 1 host" in line
    assert "Slurm gave the cells 3 nodes" in line
    assert not list(slurm.place.glob("logs/*/config.yaml"))


def test_by_hand_in_a_homogeneous_allocation_and_resumed(slurm):
    job = slurm.sbatch("slurm/gyre_flat.sbatch", slurm.config)
    assert slurm.ended(job) == ("COMPLETED", 0)
    run = only_run(slurm.place)
    ranks = seen(run, 4)
    assert [who["node"] for who in ranks] == ["gpu0", "gpu1", "gpu2", "gpu0"]
    assert [who["local_rank"] for who in ranks] == [0, 0, 0, 1]
    again = slurm.sbatch("slurm/gyre_flat.sbatch", "--resume", run)
    assert slurm.ended(again) == ("COMPLETED", 0)
    assert seen(run, 1)[0]["job_id"] == again
    assert only_run(slurm.place) == run


def test_submitted_through_submitit_and_requeued_by_the_signal(slurm):
    process = slurm.start("run", slurm.config, "--name", "one", "--cluster", "slurm", TRIVIAL_SECONDS=300)
    run = slurm.place / "logs/one"
    first = seen(run, 4)
    assert_het(first)
    slurm.cluster.call("scancel", "--batch", "--signal=USR1", first[0]["job_id"])
    second = seen(run, 4, restarts=1)
    assert_het(second)
    assert second[0]["job_id"] == first[0]["job_id"]
    (run / "go").touch()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "requeueing job" in next(run.glob("launch/*/*_0_log.out")).read_text()


def test_submitted_in_a_homogeneous_allocation(slurm):
    done = slurm.launch("run", slurm.config, "--cluster", "slurm", "slurm.het=false")
    assert done.returncode == 0, done.stderr
    ranks = seen(only_run(slurm.place), 4)
    assert [who["node"] for who in ranks] == ["gpu0", "gpu1", "gpu2", "gpu0"]


def test_ctrl_c_cancels_the_job(slurm):
    process = slurm.start("run", slurm.config, "--cluster", "slurm", TRIVIAL_SECONDS=300)
    ranks = seen(only_run(slurm.place), 4)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "launch.py resume" in output
    assert slurm.ended(ranks[0]["job_id"], 5)[0] == "CANCELLED"


def test_detached_and_the_loss_of_a_rank_is_not_the_end(slurm):
    extra = {"TRIVIAL_SECONDS": 300, "TRIVIAL_COMPLETED": 1}
    done = slurm.launch("run", slurm.config, "--cluster", "slurm", "--detach", **extra)
    assert done.returncode == 0, done.stderr
    assert "launch.py watch" in done.stderr
    run = only_run(slurm.place)
    ranks = seen(run, 4)
    os.kill(ranks[1]["pid"], signal.SIGKILL)
    time.sleep(2.0)
    job = ranks[0]["job_id"]
    assert slurm.job(job)["JobState"] == "RUNNING"
    (run / "go").touch()
    assert slurm.ended(job) == ("COMPLETED", 0)


def test_a_job_that_slurm_refuses_is_the_users_to_correct(slurm):
    done = slurm.launch("run", slurm.config, "--cluster", "slurm", "slurm.cells.partition=none")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "Slurm refused the job" in line
    assert "partition" in line
    assert not list(slurm.place.glob("logs/*"))


@pytest.mark.parametrize("code", [1, 2])
def test_the_jobs_exit_code_is_the_runs(slurm, code):
    extra = {f"TRIVIAL_CODE_{rank}": code for rank in range(4)}
    done = slurm.launch("run", slurm.config, "--cluster", "slurm", TRIVIAL_SAYS="gyre: change this", **extra)
    assert done.returncode == code
    assert "change this" in done.stderr.splitlines()[-1]
