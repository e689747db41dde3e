"""An agent from the package index as the harness of a run: mini-swe-agent repairs a repository, with given answers."""

import importlib.util
import json
import os
import shutil
import subprocess

import pytest

from gyre.proxy.recorder import read_records
from tests.whole import agents
from tests.whole.support import ROOT, assert_whole

pytestmark = pytest.mark.whole

EXAMPLE = ROOT / "examples/repair"


def scorer():
    spec = importlib.util.spec_from_file_location("repair_score", EXAMPLE / "score.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_mini_swe_agent_repairs_a_repository(light_place):
    path = f"{agents.environment() / 'bin'}{os.pathsep}{os.environ['PATH']}"
    options = ("cells.count=1", "scheduler.batch_groups=1", "train.updates=1", "tasks.shuffle=false")
    code = light_place.launch("run", ROOT / "configs/repair.yaml", *options, "--name", "repair", timeout=240, PATH=path)
    assert code == 0, light_place.output()
    run = light_place.run("repair")
    assert_whole(run.summary)
    assert run.summary["updates"] == 1 and run.summary["requests"]["total"] == 10
    outcomes = {n: json.loads(outcome) for n, outcome in run.outcomes().items()}
    assert [outcomes[n]["outcome"] for n in (0, 1)] == ["completed"] * 2
    assert [outcomes[n]["score"] for n in (0, 1)] == [pytest.approx(2 / 3), 1.0], "one half repaired, one wholly"
    for n in (0, 1):
        records = read_records(run.dir.path / f"executions/{n}/1/records.bin")
        assert [record.finish_reason for record in records] == ["tool_calls"] * 5
        for one, following in zip(records, records[1:], strict=False):
            known = [*one.prompt, *one.sampled]
            assert list(following.prompt[: len(known)]) == known
    task = json.loads((EXAMPLE / "tasks.jsonl").read_text().splitlines()[0])
    workspace = run.dir.path / "executions/1/1/workspace"
    patch = scorer().patch(workspace).decode()
    assert "+        raise ValueError" in patch and "test_stats.py" not in patch
    (workspace / "test_stats.py").unlink()  # the tests of the task count, whatever became of them here
    assert scorer().score(workspace, task) == 1.0


def test_the_repositories_need_repair(tmp_path):
    for task in map(json.loads, (EXAMPLE / "tasks.jsonl").read_text().splitlines()):
        workspace = tmp_path / task["id"]
        shutil.copytree(EXAMPLE / "repositories" / task["repository"], workspace)
        for command in (
            ["init", "-q"],
            ["add", "-A"],
            ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"],
        ):
            subprocess.run(["git", *command], cwd=workspace, check=True)
        subprocess.run(["git", "tag", "base"], cwd=workspace, check=True)
        assert scorer().score(workspace, task) == pytest.approx(1 / 3)
