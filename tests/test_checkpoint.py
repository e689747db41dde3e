"""Commits appear whole or not at all, and a resume from one is exact to the bit."""

import asyncio
import json
import os
import signal
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from gyre import checkpoint
from gyre.checkpoint import Commit
from gyre.config import dump
from gyre.errors import ChildFailed, InvariantBroken, UserError, WeightsMismatch
from gyre.run_dir import RunDir
from gyre.training.trainer import Trainer
from tests.training.cells import Cells, make_config, make_model


def write(run_dir: RunDir, version: int, keep: int = 2) -> Commit:
    commit = Commit(version, version, 1, f"v{version}-a1", f"sum{version}")

    def save_state(directory, tag):
        (directory / tag).mkdir(parents=True)
        (directory / tag / "state").write_text(str(version))

    def save_model(directory):
        (directory / "model.safetensors").write_text(str(version))

    checkpoint.write(run_dir, commit, {"next": version}, save_state, save_model, keep)
    return commit


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path).create()


def test_the_latest_commits_are_kept(run_dir):
    assert checkpoint.latest(run_dir) is None
    for version in (1, 2, 10):
        commit = write(run_dir, version)
    assert run_dir.commits() == [2, 10]
    assert checkpoint.latest(run_dir) == commit
    assert commit.cursor(run_dir) == {"next": 10}
    assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == ["10", "2"]


def test_a_version_is_committed_once(run_dir):
    write(run_dir, 1)
    with pytest.raises(InvariantBroken, match="invariant 15"):
        write(run_dir, 1)


@pytest.mark.parametrize(
    "key, value", [("train.stages", 2), ("train.shards", 4), ("train.zero_stage", 3), ("model.dtype", "bfloat16")]
)
def test_a_commit_of_another_division_is_refused_with_what_to_set(run_dir, key, value):
    config = make_config()
    checkpoint.check_division(run_dir, config)  # there is none
    commit = write(run_dir, 1)
    checkpoint.check_division(run_dir, config)  # one of an earlier version says nothing
    for made in (checkpoint.division(config), checkpoint.division(config) | {key: value}):
        record = json.dumps(asdict(replace(commit, division=made)))
        (run_dir.checkpoint(1) / "COMMIT").write_text(record)
        if made == checkpoint.division(config):
            checkpoint.check_division(run_dir, config)
    with pytest.raises(UserError, match=f"set {key} to {value} in .*config.yaml"):
        checkpoint.check_division(run_dir, config)
    run_dir.config.write_text(dump(config))
    start = {"rank": 0, "incarnation": 1, "store": ["127.0.0.1", 1], "prefix": "gyre", "secret": "", "model": "none"}
    with pytest.raises(UserError, match=f"set {key} to {value}"):  # also where nobody has asked before the start
        Trainer(SimpleNamespace()).start(str(run_dir.path), 2, address="127.0.0.1", **start)


def test_half_a_commit_is_no_commit(run_dir):
    write(run_dir, 1)
    half = run_dir.checkpoint(2)
    (half / "deepspeed").mkdir(parents=True)
    (half / ".COMMIT.1.tmp").write_text("{")
    assert checkpoint.latest(run_dir).version == 1
    assert checkpoint.clean(run_dir) == [2]
    assert not half.exists()
    assert write(run_dir, 2) == checkpoint.latest(run_dir)


def test_a_directory_that_cannot_be_removed_is_no_reason_to_fail(run_dir, monkeypatch, caplog):
    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(f"{path} is not empty")

    monkeypatch.setattr(checkpoint.shutil, "rmtree", busy)
    for version in (1, 2, 3):
        write(run_dir, version)
    assert run_dir.commits() == [2, 3] and run_dir.checkpoint(1).exists()
    assert checkpoint.clean(run_dir) == [1]
    assert caplog.text.count("could not be removed") == 2
    assert write(run_dir, 4) == checkpoint.latest(run_dir)


@pytest.mark.parametrize("moment", ["saving", "before_rename"])
def test_a_commit_that_is_killed_leaves_the_one_before(run_dir, moment, monkeypatch):
    write(run_dir, 1)
    pid = os.fork()
    if pid == 0:
        os.environ["GYRE_FAULT"] = f"commit:2:{moment}"
        write(run_dir, 2)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert run_dir.checkpoint(2).exists() and checkpoint.latest(run_dir).version == 1
    assert checkpoint.clean(run_dir) == [2]


def test_weights_that_are_not_the_committed_ones_are_refused(run_dir):
    commit = write(run_dir, 1)
    with pytest.raises(WeightsMismatch, match="sum1"):
        checkpoint.restore(run_dir, commit, lambda directory, tag: None, lambda: "other")


async def _update(cells: Cells, update: int) -> dict:
    groups = [10 * update + i for i in range(3)]
    await cells.feeder.call("begin", update=update, groups=3)
    await cells.feed(*groups)
    return await cells.train(update, 0, 0, [0])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_a_resume_is_exact(tmp_path, dtype):
    """Two updates, a commit, two more; then again from the commit, in a new process and attempt."""
    model = make_model(tmp_path / "model")
    config = make_config()
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})

    async def first() -> list[str]:
        async with Cells(tmp_path / "run", model, config) as cells:
            await cells.spawn(0)
            await _update(cells, 1)
            done = await _update(cells, 2)
            commit = await cells.trainers[0].call("commit", 60, version=2, update=2, cursor={"groups": [1]})
            assert commit["checksum"] == done["checksum"] and commit["bytes"] > 0
            assert checkpoint.latest(cells.run_dir).division == checkpoint.division(config)
            with pytest.raises(ChildFailed, match="commit 3 is of update 3"):
                await cells.trainers[0].call("commit", 60, version=3, update=3, cursor={})
            return [done["checksum"]] + [(await _update(cells, update))["checksum"] for update in (3, 4)]

    async def second() -> list[str]:
        async with Cells(tmp_path / "run", model, config, attempt=2) as cells:
            started = await cells.spawn(0)
            assert started["version"] == started["snapshot"] == 2
            found = [started["checksum"]] + [(await _update(cells, update))["checksum"] for update in (3, 4)]
            return found

    assert asyncio.run(first()) == asyncio.run(second())
    commit = checkpoint.latest(RunDir(tmp_path / "run"))
    assert commit.version == 2 and commit.cursor(RunDir(tmp_path / "run")) == {"groups": [1]}
    assert json.loads((commit.model(RunDir(tmp_path / "run")) / "config.json").read_text())["vocab_size"] == 96

    from transformers import AutoModelForCausalLM

    from gyre.checksum import checksum

    exported = AutoModelForCausalLM.from_pretrained(commit.model(RunDir(tmp_path / "run")), dtype=dtype)
    assert checksum(exported.named_parameters()) == commit.checksum
