"""All ranks as processes of one machine, under a trivial rank program."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gyre.harness.process import MARK
from gyre.harness.process import environment as harness_environment
from gyre.launch.identity import LOCAL_KEY
from gyre.launch.jobs import marked
from tests.launch.support import ROOT, environment, launch, only_run, seen, settings, start, wait_for, write


@pytest.fixture
def config(tmp_path, workplace):
    return write(tmp_path, settings(tmp_path))


def test_every_rank_starts_once_and_the_run_succeeds(config, workplace):
    done = launch("run", config, "--name", "one", cwd=workplace)
    assert done.returncode == 0, done.stderr
    ranks = seen(workplace / "logs/one", 4)
    assert [who["rank"] for who in ranks] == [0, 1, 2, 3]
    assert {who["world_size"] for who in ranks} == {4}
    assert len({who["job_key"] for who in ranks}) == 1
    assert not (workplace / "logs/one/seen-0-4.json").exists()


def test_resume_is_another_start_of_the_same_run(config, workplace):
    assert launch("run", config, "--name", "one", cwd=workplace).returncode == 0
    first = seen(workplace / "logs/one", 1)[0]["job_key"]
    assert launch("resume", "logs/one", cwd=workplace).returncode == 0
    assert seen(workplace / "logs/one", 1)[0]["job_key"] != first


@pytest.mark.parametrize(
    ("code", "exit_code", "words"), [(1, 1, ["the run failed", "logs are in", "resume"]), (2, 2, ["change this"])]
)
def test_the_exit_code_is_rank_0s(config, workplace, code, exit_code, words):
    done = launch("run", config, cwd=workplace, TRIVIAL_CODE_0=code, TRIVIAL_SAYS="gyre: change this")
    assert done.returncode == exit_code, done.stderr
    for word in words:
        assert word in done.stderr.splitlines()[-1]


def test_a_rank_that_fails_is_not_the_run(config, workplace):
    done = launch("run", config, cwd=workplace, TRIVIAL_CODE_2=1)
    assert done.returncode == 0, done.stderr


def test_scratch_that_a_rank_leaves_goes_at_the_end(config, workplace):
    done = launch("run", config, cwd=workplace, TRIVIAL_LEAVES=1)
    assert done.returncode == 0, done.stderr
    left = [Path(file.read_text()) for file in only_run(workplace).glob("late-*")]
    assert len(left) == 4 and not any(path.parent.exists() for path in left)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_ends_every_rank_and_says_how_to_go_on(config, workplace, number):
    process = start("run", config, cwd=workplace, TRIVIAL_SECONDS=60)
    ranks = seen(only_run(workplace), 4)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert f"launch.py resume logs/{only_run(workplace).name}" in output
    assert not any(psutil.pid_exists(who["pid"]) for who in ranks)
    assert marked(ranks[0]["job_key"]) == []
    assert (only_run(workplace) / "left-0-0").exists(), "the rank could not end in order"


def read_all(terminal):
    """What a terminal shows until its program ends."""
    shown = b""
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:  # how Linux says that the other end is closed
            return shown.decode(errors="replace")
        if not data:
            return shown.decode(errors="replace")
        shown += data


def test_ctrl_c_typed_into_the_live_view(config, workplace):
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(workplace)
        launcher = str(ROOT / "launch.py")
        os.execve(sys.executable, [sys.executable, launcher, "run", str(config)], environment(TRIVIAL_SECONDS=60))
    ranks = seen(only_run(workplace), 4)
    time.sleep(1.0)
    os.write(terminal, b"\x03")
    shown = read_all(terminal)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130, shown
    assert "go on with: launch.py resume" in shown
    assert "Traceback" not in shown
    assert marked(ranks[0]["job_key"]) == []
    assert (only_run(workplace) / "left-0-0").exists(), "Ctrl-C reached the ranks, not only who watches"


def test_a_second_ctrl_c_kills_ranks_that_hang(config, workplace):
    process = start("run", config, cwd=workplace, TRIVIAL_SECONDS=60, TRIVIAL_STUBBORN=1)
    ranks = seen(only_run(workplace), 4)
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert marked(ranks[0]["job_key"]) == []


def test_harnesses_of_a_start_are_found_by_their_mark():
    own = {MARK: "local-1/1/3/0/1/ab"}
    env = harness_environment({**os.environ, LOCAL_KEY: "local-1"}, {}, own)
    assert LOCAL_KEY not in env
    process = subprocess.Popen(["sleep", "60"], env=env)
    try:
        wait_for(lambda: marked("local-1") == [process.pid], 10)
        assert marked("local-11") == marked("local-") == []
    finally:
        process.kill()
        process.wait()


def test_ranks_end_when_their_launcher_is_killed(config, workplace):
    process = start("run", config, cwd=workplace, TRIVIAL_SECONDS=60)
    ranks = seen(only_run(workplace), 4)
    process.kill()
    process.communicate(timeout=20)
    wait_for(lambda: marked(ranks[0]["job_key"]) == [], 20)


def test_two_runs_at_once_do_not_meet(config, workplace):
    processes = [start("run", config, "--name", name, cwd=workplace, TRIVIAL_SECONDS=1) for name in ("a", "b")]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    keys = [{who["job_key"] for who in seen(workplace / "logs" / name, 4)} for name in ("a", "b")]
    assert [len(each) for each in keys] == [1, 1]
    assert keys[0] != keys[1]
    for process in processes:
        process.stdout.close()


def test_harness_commands_find_the_same_python(config, workplace):
    assert launch("run", config, "--name", "one", cwd=workplace, PATH="/usr/bin:/bin").returncode == 0
    first = seen(workplace / "logs/one", 1)[0]["path"].split(os.pathsep)[0]
    assert os.path.exists(f"{first}/pytest"), first
