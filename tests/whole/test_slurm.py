"""The whole on a real Slurm: het jobs by hand and through launch.py, a requeue, and a homogeneous allocation."""

import os
import subprocess

import pytest
import yaml

from tests.whole.support import Place, Run, assert_whole, tiny

pytestmark = [pytest.mark.whole, pytest.mark.slurm]


class Site:
    """A place on a cluster, and what a user types there."""

    def __init__(self, place: Place, cluster) -> None:
        self.place = place
        self.cluster = cluster
        place.environment |= cluster.environment

    def sbatch(self, *arguments: object) -> str:
        """Submit and wait for the end; returns the job's id."""
        done = subprocess.run(
            ["sbatch", "--parsable", *map(str, arguments)],
            cwd=self.place.path,
            env=self.place.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Slurm's state of a job's first component."""
        text = self.cluster.call("scontrol", "show", "job", "--oneliner", job).stdout.split("\n")[0]
        return dict(word.split("=", 1) for word in text.split() if "=" in word).get("JobState", "")

    def run_of(self, job: str) -> Run:
        """The run that a job made."""
        paths = list((self.place.path / "logs").glob(f"*-job{job}"))
        return Run(paths[0]) if paths else Run(self.place.path / "logs" / "none")

    def wait(self, job: str, timeout: float) -> Run:
        """Wait for a completed job."""
        self.run_of(job).wait_for(lambda _: self.state(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), timeout)
        output = (self.place.path / f"logs/slurm-{job}.out").read_text()
        assert self.state(job) == "COMPLETED", output[-4000:]
        return self.run_of(job)


@pytest.fixture
def site(place, slurm_cluster):
    """The cluster, spoken to from a place of its own."""
    yield Site(place, slurm_cluster)
    slurm_cluster.call("scancel", "--user", str(os.getuid()))


def test_tiny_learns_in_a_het_job_submitted_by_hand(site):
    """The whole of configs/tiny.yaml: the reward rises from under 0.3 to 0.8 and more within four minutes."""
    run = site.wait(site.sbatch("slurm/gyre.sbatch", "configs/tiny.yaml"), 420)
    summary = run.summary
    assert_whole(summary)
    rewards = summary["reward"]
    assert rewards[0] < 0.3, rewards
    assert sum(rewards[-3:]) / 3 >= 0.8, rewards
    assert sum(summary["joins"]) > 0
    # Executions went on elsewhere while they ran. Their requests take milliseconds, so whether one is cut off is luck.
    assert any(event["rerouted"] for event in run.events("move_started"))


def test_launch_submits_a_het_job_and_follows_it(site, tmp_path):
    """Its batches are split over two updates each."""
    config = tiny(tmp_path, train={"updates": 4, "updates_per_batch": 2})
    assert site.place.launch("run", config, "--cluster", "slurm", "--name", "het") == 0, site.place.output()
    run = site.place.run("het")
    assert_whole(run.summary)
    assert (run.summary["updates"], run.summary["policy_version"]) == (4, 2)
    assert len(run.trained_groups()) == len(set(run.trained_groups())) == 2 * 4


def test_a_requeued_job_goes_on_by_itself(site, tmp_path):
    config = tiny(tmp_path, train={"updates": 6})
    job = site.sbatch("--nodes=2", ":", "--nodes=1", "slurm/gyre.sbatch", config)
    site.run_of(job).wait_for(lambda _: len(site.run_of(job).dir.commits()) > 0)
    site.cluster.call("scontrol", "requeue", job)
    site.run_of(job).wait_for(lambda run: len({e["attempt"] for e in run.events("run_started")}) > 1)
    run = site.wait(job, 180)
    assert run.summary["updates"] == 6
    assert run.summary["requests"]["lost"] == 0
    groups = run.trained_groups()
    assert len(groups) == len(set(groups)) == 4 * 6


def test_without_het_jobs_everything_shares_one_allocation(site, tmp_path):
    """One cell, and a standalone engine that serves while the cell trains."""
    config = tiny(tmp_path, slurm={"het": False}, cells={"count": 1, "standalone": 1})
    data = yaml.safe_load(config.read_text())
    assert data["slurm"]["het"] is False
    assert site.place.launch("run", config, "--cluster", "slurm", "--name", "flat") == 0, site.place.output()
    run = site.place.run("flat")
    assert_whole(run.summary)
    assert {(event["rank"], event["state"]) for event in run.events("role_reached")} >= {
        (0, "TRAINING"),
        (1, "ROLLOUT"),
    }
    assert not [e for e in run.events("move_started") if e["rank"] == 1 and e["target"] == "training"]
