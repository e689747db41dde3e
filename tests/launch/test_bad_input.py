"""Every bad input ends with exit code 2 and one line that says what to change, within seconds, before anything runs."""

import json
import os
import shutil
import sys
import time
from dataclasses import asdict

import pytest

from gyre.checkpoint import Commit, division
from gyre.config import dump, load
from gyre.run_dir import RunDir
from tests.launch.support import ROOT, launch, settings, write


def refused(done, seconds, *words):
    """Assert that a command refused its input as it must."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("gyre: ")
    for word in words:
        assert word in lines[0]
    assert seconds < 5.0


def run(tmp_path, data, *overrides, **extra):
    """`launch.py run` on a configuration; returns the process and the seconds it took."""
    path = write(tmp_path, data)
    seconds = 5.0
    for _ in range(3):  # the best of them: other tests may be at work on this machine
        begun = time.monotonic()
        done = launch("run", path, *overrides, cwd=tmp_path, **extra)
        seconds = min(seconds, time.monotonic() - begun)
        if seconds < 5.0:
            break
    assert not list(tmp_path.glob("logs/*")), "it made a run directory"
    return done, seconds


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trian": {"updates": 1}}, ["'trian'", "did you mean train?"]),
        ({"train": {"updates": 2, "learning_rate": 1}}, ["'learning_rate' in train", "known keys are"]),
        ({"scheduler": {"batch_groups": 2, "group_sise": 2}}, ["'group_sise'", "did you mean group_size?"]),
        ({"cells": {"count": 0, "slots": 2}}, ["cells.count", "greater than or equal to 1", "not 0"]),
        ({"cells": {"count": 1, "slots": -1}}, ["cells.slots", "not -1"]),
        ({"scheduler": {"batch_groups": 2, "group_size": 1}}, ["scheduler.group_size", "not 1"]),
        ({"train": {"updates": "many"}}, ["train.updates", "'many'"]),
        ({"train": {"updates": 3, "updates_per_batch": 2}}, ["train.updates (3)", "multiple"]),
        ({"model": {"path": "/no/such/model"}}, ["model.path", "/no/such/model"]),
        ({"model": {"path": "gyre:huge"}}, ["gyre:huge", "gyre:tiny"]),
        ({"model": {}}, ["model.path is missing"]),
        ({"tasks": {"path": "/no/such/tasks.jsonl"}}, ["/no/such/tasks.jsonl", "tasks.path"]),
        ({"harness": {"command": ["no-such-agent"]}}, ["harness.command", "no-such-agent", "PATH"]),
        ({"harness": {"command": ["/no/such/agent"]}}, ["harness.command", "/no/such/agent", "no such file"]),
        ({"harness": {"command": ["./agent"]}}, ["harness.command", "{root}/agent"]),
        ({"harness": {"command": ["python3", "{root}/agent.py"]}}, ["harness.command", "agent.py"]),
        ({"harness": {"command": ["true"], "models": ["a name"]}}, ["harness.models.0", "a name"]),
        ({"harness": {"command": []}}, ["harness.command"]),
        ({"cells": {"count": 1, "slots": 1, "gpus": 99}}, ["99 GPUs", "cells.gpus=0"]),
        ({"network": {"interface": "ib7"}}, ["network.interface", "ib7"]),
        ({"network": {"port_base": 60000}, "cells": {"count": 400, "slots": 1}}, ["network.port_base"]),
    ],
)
def test_configuration(tmp_path, change, words):
    data = settings(tmp_path)
    for name, values in change.items():
        keep = {} if name in ("model", "trian") else {"score": data["harness"]["score"]} if name == "harness" else {}
        data[name] = {**keep, **({"gpus": 0} if name == "cells" else {}), **values}
    refused(*run(tmp_path, data), *words)


def test_more_stages_than_layers(tmp_path):
    data = settings(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"num_hidden_layers": 4}')
    (model / "model.safetensors").touch()
    data["model"]["path"] = "model"  # from where the command was typed
    refused(*run(tmp_path, data, "train.stages=5"), "train.stages (5) must be at most the model's layers (4)")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", ["no tasks"]),
        ('{"id": 1}\n{"id": 2\n', ["line 2", "not JSON"]),
        ('{"id": 1}\n\n{"name": 2}\n', ["line 3", "`id`"]),
        ('[{"id": 1}]\n', ["line 1", "`id`"]),
        ('{"id": 1}\n{"id": 2}\n{"id": 1}\n', ["two tasks with the id 1"]),
    ],
)
def test_task_file(tmp_path, lines, words):
    data = settings(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(lines)
    refused(*run(tmp_path, data), *words)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (None, ["engine.scripted.answers", "No such file"]),
        ('{"content": "a"}\n{"contents": "b"}\n', ["line 2", "did you mean content?"]),
    ],
)
def test_script_of_answers(tmp_path, lines, words):
    data = settings(tmp_path)
    data["engine"] = {"kind": "scripted", "scripted": {"answers": "answers.jsonl"}}
    data["train"]["kind"] = "timed"
    if lines is not None:
        (tmp_path / "answers.jsonl").write_text(lines)
    refused(*run(tmp_path, data), *words)


@pytest.mark.parametrize(
    ("score", "words"),
    [
        ({"command": ["no-such-scorer"]}, ["harness.score.command", "no-such-scorer"]),
        ({"function": "score"}, ["harness.score.function", "module:name"]),
        ({"function": "no_such_module:score"}, ["no_such_module"]),
        ({"function": "/no/such/file.py:score"}, ["/no/such/file.py"]),
        ({"function": "{root}/score.py:skore"}, ["has no skore"]),
        ({"function": "{root}/broken.py:score"}, ["not Python"]),
        ({}, ["harness.score", "exactly one of command and function"]),
    ],
)
def test_scorer(tmp_path, score, words):
    data = settings(tmp_path)
    (tmp_path / "broken.py").write_text("def score(:\n")
    data["harness"]["score"] = score
    refused(*run(tmp_path, data), *words)


def test_an_empty_name(tmp_path):
    refused(*run(tmp_path, settings(tmp_path), "--name", ""), "name")


def test_watching_what_is_no_run(tmp_path):
    done = launch("watch", tmp_path, cwd=tmp_path)
    assert done.returncode == 2 and "is not a run directory" in done.stderr


def test_harness_that_may_not_be_executed(tmp_path):
    data = settings(tmp_path)
    (tmp_path / "agent.sh").write_text("#!/bin/sh\n")
    data["harness"]["command"] = ["{root}/agent.sh"]
    refused(*run(tmp_path, data), "agent.sh is not executable", "chmod +x")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.updates", ["train.updates"]),
        ("train.updates=0", ["train.updates", "not 0"]),
        ("train.update=1", ["'update'", "did you mean updates?"]),
        ("name.x=1", ["name.x=1", "not a section"]),
        ("train.updates=[", ["not YAML"]),
        ("--detach=no", ["--detach"]),
        ("--nmae", ["--nmae"]),
    ],
)
def test_override(tmp_path, override, words):
    refused(*run(tmp_path, settings(tmp_path), override), *words)


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n", "\x00"])
def test_file_that_is_no_configuration(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    done = launch("run", tmp_path / "config.yaml", cwd=tmp_path)
    refused(done, 0, "config.yaml")


def test_missing_configuration(tmp_path):
    refused(launch("run", "nothing.yaml", cwd=tmp_path), 0, "nothing.yaml", "No such file")


def without_slurm(tmp_path):
    """A PATH without Slurm's commands."""
    place = tmp_path / "bin"
    place.mkdir()
    for name in ("true", "env", "bash"):
        (place / name).symlink_to(shutil.which(name))
    return f"{os.path.dirname(sys.executable)}:{place}"


def test_slurm_that_is_not_there(tmp_path):
    done, seconds = run(tmp_path, settings(tmp_path), "--cluster", "slurm", PATH=without_slurm(tmp_path))
    refused(done, seconds, "--cluster slurm", "sbatch", "--cluster local")


@pytest.mark.parametrize("command", ["resume", "report", "watch"])
def test_directory_that_is_no_run(tmp_path, command):
    (tmp_path / "empty").mkdir()
    refused(launch(command, "nowhere", cwd=tmp_path), 0, "nowhere", "logs/")
    if command != "watch":  # of a run that is just being made there is not more than a directory
        refused(launch(command, "empty", cwd=tmp_path), 0, "config.yaml")


def test_a_resume_under_another_division(tmp_path):
    """Somebody has edited config.yaml: DeepSpeed would find no files, attempt after attempt."""
    run, saved = tmp_path / "logs/mine", load(write(tmp_path, settings(tmp_path)))
    (run / "checkpoints/1").mkdir(parents=True)
    commit = Commit(1, 1, 1, "v1-a1", "sum", division(saved) | {"train.stages": 2})
    (run / "checkpoints/1/COMMIT").write_text(json.dumps(asdict(commit)))
    (run / "config.yaml").write_text(dump(saved))
    refused(
        launch("resume", "logs/mine", cwd=tmp_path), 0, "train.stages is 1", "set train.stages to 2 in", "config.yaml"
    )


def test_a_resume_takes_no_settings(tmp_path):
    done = launch("resume", "logs/mine", "train.stages=1", cwd=tmp_path)
    refused(done, 0, "config.yaml", "'train.stages=1'", "run a new one")


def test_a_self_test_without_a_policy(tmp_path):
    data = settings(tmp_path)
    data["engine"] = {"kind": "timed"}
    data["train"]["kind"] = "timed"
    done = launch("selftest", write(tmp_path, data), cwd=tmp_path)
    refused(done, 0, "selftest compares", "engine.kind timed")
    assert not list(tmp_path.glob("logs/*"))


def test_taken_name(tmp_path):
    (tmp_path / "logs/mine").mkdir(parents=True)
    path = write(tmp_path, settings(tmp_path))
    refused(launch("run", path, "--name", "mine", cwd=tmp_path), 0, "logs/mine exists", "resume")
    refused(launch("run", path, "--name", "a/b", cwd=tmp_path), 0, "name")


def test_a_run_that_runs(tmp_path):
    run = RunDir(tmp_path / "logs/busy").create()
    write(run.path, settings(tmp_path))
    with run.locked():
        refused(launch("resume", "logs/busy", cwd=tmp_path), 0, "logs/busy", "in use", "stop that one first")


def test_prepare_outside_an_allocation(tmp_path):
    refused(launch("prepare", write(tmp_path, settings(tmp_path)), cwd=tmp_path), 0, "no Slurm job")


def test_unknown_command(tmp_path):
    refused(launch("lunch", cwd=tmp_path), 0, "lunch")
    refused(launch(cwd=tmp_path), 0, "--help")


HET = {
    "SLURM_JOB_ID": "5",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "5",
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "3",
    "SLURM_NTASKS_HET_GROUP_0": "3",
    "SLURM_JOB_NUM_NODES_HET_GROUP_1": "1",
    "SLURM_NTASKS_HET_GROUP_1": "1",
}


@pytest.mark.parametrize(
    ("given", "needed", "words"),
    [
        (HET, ["cells.count=4"], ["needs 4 cells + 1 host", "gave the cells 3 nodes", "--nodes=4 : --nodes=1"]),
        (HET, ["hosts.count=2"], ["needs 3 cells + 2 hosts", "gave the hosts 1 node with 1 task"]),
        (HET, ["cells.standalone=1"], ["3 cells + 1 standalone engine + 1 host", "gave the cells 3 nodes"]),
        (
            {**HET, "SLURM_GPUS_ON_NODE": "1"},
            ["cells.gpus=2", "slurm.cells.gres=gpu:2"],
            ["2 GPUs each", "gave 1 GPU on a cell's node", "--gres=gpu:2"],
        ),
        (
            {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS": "3"},
            [],
            ["3 nodes with 4 tasks", "gave the job 3 nodes with 3 tasks", "--nodes=3 --ntasks=4"],
        ),
    ],
)
def test_allocation_that_does_not_fit(tmp_path, given, needed, words):
    path = write(tmp_path, settings(tmp_path))
    begun = time.monotonic()
    done = launch("prepare", path, *needed, cwd=tmp_path, **given)
    refused(done, time.monotonic() - begun, *words)


def test_help_answers_at_once(tmp_path):
    seconds = []
    for _ in range(3):  # the best of them: other tests may be at work on this machine
        begun = time.monotonic()
        done = launch("--help", cwd=tmp_path)
        seconds.append(time.monotonic() - begun)
        assert done.returncode == 0
        assert "resume" in done.stdout
    assert min(seconds) < 1.0


def test_internal_fault_is_one_line_and_a_log(tmp_path):
    (tmp_path / "logs/broken").mkdir(parents=True)
    (tmp_path / "logs/broken/config.yaml").write_bytes(b"")
    (tmp_path / "logs/broken/launch.json").write_text("{")
    write(tmp_path / "logs/broken", settings(tmp_path))
    done = launch("resume", "logs/broken", cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    log = done.stderr.strip().rpartition(" ")[2]
    assert "Traceback" in open(log).read()


def test_the_launcher_imports_no_torch(tmp_path):
    path = write(tmp_path, settings(tmp_path))
    program = (
        "import sys; from gyre.cli import main; code = main(['sbatch', sys.argv[1]]);"
        "assert not {'torch', 'deepspeed', 'vllm', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH hetjob" in done.stdout
