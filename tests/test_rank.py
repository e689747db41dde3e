"""The restarter's hold on what a supervisor leaves behind, and how ranks find an attempt."""

import json
import subprocess
import sys

import pytest

from gyre import attempt, config
from gyre.errors import StoreLost
from gyre.launch.identity import Identity
from gyre.run_dir import RunDir
from gyre.store import Store
from tests.launch.support import settings, write

FAMILY = """
import subprocess, sys
from gyre.rank import kill_descendants
def start(log):
    return subprocess.Popen(["sleep", "60"], stdout=open(log, "w"))
others, own, plain = start("engine-7.log"), start("engine-0.log"), start("harness.log")
kill_descendants(0)
print([process.poll() for process in (others, own, plain)])
others.kill()
"""


def test_engines_of_other_ranks_are_spared(tmp_path):
    done = subprocess.run([sys.executable, "-c", FAMILY], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    others, own, plain = json.loads(done.stdout.replace("None", "null"))
    assert others is None and own is not None and plain is not None


@pytest.fixture
def run_dir(tmp_path):
    """A run whose ranks wait for each other for a second."""
    data = settings(tmp_path)
    data["network"] = {"start_timeout": 1.0}
    run = RunDir(tmp_path / "run").create()
    run.config.write_text(config.dump(config.load(write(tmp_path, data), root=tmp_path)))
    return run


def identity(rank: int) -> Identity:
    return Identity(rank, 4, rank, "local-key", "local", "1")


def meet(run_dir: RunDir, **changes) -> None:
    meeting = {"key": "local-key", "attempt": 1, "host": "127.0.0.1", "port": 1, "secret": "s", **changes}
    run_dir.rendezvous.write_text(json.dumps(meeting))


def test_a_rank_joins_the_attempt_of_its_job(run_dir):
    store = Store.host(attempt.store_prefix(run_dir, 1), "127.0.0.1")
    store.set(attempt.OPEN, "1")
    meet(run_dir, port=store.port)
    context = attempt.join(run_dir, identity(2))
    assert (context.rank, context.attempt, context.incarnation) == (2, 1, 1)
    assert attempt.join(run_dir, identity(2)).incarnation == 2


def test_a_later_attempts_store_at_an_old_address_is_not_joined(run_dir):
    store = Store.host(attempt.store_prefix(run_dir, 2), "127.0.0.1")
    store.set(attempt.OPEN, "1")
    meet(run_dir, attempt=1, port=store.port)
    with pytest.raises(StoreLost, match="another attempt"):
        attempt.join(run_dir, identity(1))


def test_another_jobs_attempt_is_not_joined(run_dir):
    meet(run_dir, key="local-other")
    with pytest.raises(StoreLost, match="has not begun"):
        attempt.join(run_dir, identity(1))


def test_a_job_that_ended_says_so_to_latecomers(run_dir):
    attempt.announce_end(run_dir, "local-key", 2)
    with pytest.raises(attempt.Ended) as ended:
        attempt.join(run_dir, identity(1))
    assert ended.value.code == 2
