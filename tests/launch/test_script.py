"""The text of batch scripts."""

import shutil
import subprocess

import pytest

from gyre.config import build
from gyre.launch import executors
from gyre.launch.plan import plan
from gyre.launch.script import Task, body, render
from tests.launch.support import settings

TASK = Task(command="python -m rank 'a run'", ended='python ended "$code"', root="/a place")


def text(tmp_path, data=None, **slurm):
    data = data or settings(tmp_path)
    data["slurm"] = {**data["slurm"], **slurm}
    config = build(data)
    return render(plan(config), config.slurm, "name", "/out/%j.out", TASK)


def directives(script):
    """#SBATCH lines without the marker, per component."""
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    at = lines.index("hetjob") if "hetjob" in lines else len(lines)
    return lines[:at], lines[at + 1 :]


def test_het_job(tmp_path):
    cells, hosts = directives(text(tmp_path, account="me"))
    assert cells == [
        "--job-name=name",
        "--output=/out/%j.out",
        "--open-mode=append",
        "--signal=B:USR1@120",
        "--requeue",
        "--no-kill",
        "--time=10:00",
        "--account=me",
        "--partition=gpu",
        "--nodes=3",
        "--ntasks=3",
        "--ntasks-per-node=1",
        "--cpus-per-task=2",
        "--gres=gpu:1",
    ]
    assert hosts == [
        "--no-kill",
        "--time=10:00",
        "--account=me",
        "--partition=cpu",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
    ]


def test_one_step_over_both_components_with_the_cpus_of_each(tmp_path):
    script = text(tmp_path)
    assert script.count("srun ") == 1
    first, second = script[script.index("srun ") :].split("\n    : ")
    keep = "--kill-on-bad-exit=0 --no-kill --wait=0"
    assert first == f'srun --het-group=0 {keep} --cpus-per-task=2 "${{rank[@]}}" \\'
    assert second.startswith(f'--het-group=1 {keep} "${{rank[@]}}" &')


def test_one_step_in_short_where_components_are_alike(tmp_path):
    data = settings(tmp_path)
    data["slurm"]["hosts"]["cpus_per_task"] = 2
    assert "srun --het-group=0,1 --kill-on-bad-exit=0 --no-kill --wait=0 --cpus-per-task=2 " in text(tmp_path, data)


def test_homogeneous_job(tmp_path):
    script = text(tmp_path, het=False)
    assert "hetjob" not in script
    assert "#SBATCH --ntasks=4" in script
    assert "srun --nodes=3 --ntasks=4 --distribution=cyclic --kill-on-bad-exit=0" in script


def test_setup_lines_come_before_the_step_and_the_container_is_mounted(tmp_path):
    script = text(tmp_path, setup=["module load cuda"], container="img.sqsh")
    assert script.index("module load cuda") < script.index("srun ")
    assert script.count("--container-image=img.sqsh") == 2
    assert "--container-mounts='/a place:/a place'" in script or "'--container-mounts=/a place:/a place'" in script


def in_container(tmp_path, **sections):
    """The mounts and exports of a run whose files are in `tmp_path` and which was started in `tmp_path`/start."""
    root = tmp_path / "start"
    root.mkdir(exist_ok=True)
    data = {**settings(tmp_path), "root": str(root)}
    data["slurm"]["container"] = "img.sqsh"
    config = build({**data, **sections})
    task = executors.task(config, root / "logs/run", "rank")
    script = render(plan(config), config.slurm, "name", "/out/%j.out", task)
    mounts = ",".join(f"{path}:{path}" for path in (root, *task.mounts))
    assert script.count(f"--container-mounts={mounts} ") == 2
    return list(task.mounts), dict(task.exports)


def test_a_container_sees_made_models_tasks_and_scratch(tmp_path, monkeypatch):
    monkeypatch.setenv("GYRE_CACHE", str(tmp_path / "cache"))
    mounts, exports = in_container(tmp_path, network={"scratch": "/local/disk"})
    assert mounts == [f"{tmp_path}/tasks.jsonl", "/local/disk", f"{tmp_path}/cache"]
    assert exports["GYRE_CACHE"] == f"{tmp_path}/cache"
    assert (tmp_path / "cache").is_dir()


def test_a_container_sees_a_model_also_through_a_link_and_the_start_directory_once(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "start").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "big")
    (tmp_path / "start/model").symlink_to(tmp_path / "big")
    model = {"dtype": "float32", "max_context": 256}
    tasks = {"path": "tasks.jsonl"}
    mounts, exports = in_container(tmp_path, model={**model, "path": f"{tmp_path}/link"}, tasks=tasks)
    assert mounts == [f"{tmp_path}/link", f"{tmp_path}/big"] and "GYRE_CACHE" not in exports
    assert in_container(tmp_path, model={**model, "path": "model"}, tasks=tasks)[0] == [f"{tmp_path}/big"]


def test_directory_is_quoted_and_python_path_only_where_needed(tmp_path):
    script = text(tmp_path)
    assert "cd '/a place' || exit 1" in script
    assert "PYTHONPATH" not in script


def run_body(tmp_path, srun, **environ):
    """Execute a body with fake programs in place of Slurm's; returns the process."""
    bin_directory = tmp_path / "bin"
    bin_directory.mkdir()
    programs = {"srun": srun, "scontrol": 'echo "scontrol $*"'}
    for name, lines in programs.items():
        (bin_directory / name).write_text(f"#!/bin/bash\n{lines}\n")
        (bin_directory / name).chmod(0o755)
    config = build(settings(tmp_path))
    task = Task(
        "rank 'with blank'", '(echo "step ended with $code"; exit $code)', str(tmp_path), exports=(("A", "b c"),)
    )
    script = body(plan(config), config.slurm, task)
    path = f"{bin_directory}:/usr/bin:/bin"
    return subprocess.run(
        ["bash", "-c", script], env={"PATH": path, **environ}, capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
class TestBody:
    """The body as bash runs it."""

    def test_passes_the_command_and_the_exit_code_on(self, tmp_path):
        done = run_body(tmp_path, 'echo "A=$A"; echo "last: ${!#}"; exit 3')
        assert done.returncode == 3
        assert done.stdout.splitlines() == ["A=b c", "last: with blank", "step ended with 3"]

    def test_requeues_on_the_signal_and_goes_on_waiting(self, tmp_path):
        done = run_body(tmp_path, "kill -USR1 $PPID; sleep 0.5; exit 4", SLURM_JOB_ID="12")
        assert "scontrol requeue 12" in done.stdout
        assert done.stdout.splitlines()[-1] == "step ended with 4"
        assert done.returncode == 4
