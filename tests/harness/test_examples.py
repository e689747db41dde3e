"""The agents in examples/ do what their scorers reward, and their task files are what their scripts write."""

import asyncio
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from gyre import config
from gyre.tasks import load_tasks
from gyre.trajectories.sampling import samples
from tests.harness.bench import bench
from tests.proxy.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[2]


def load(name):
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["quickstart", "tiny", "qwen3-8b"])
def test_configurations_load(name):
    found = config.load(ROOT / "configs" / f"{name}.yaml", root=ROOT)
    assert found.name == name and len(load_tasks(ROOT / found.tasks.path)) > 30
    for word in (*found.harness.command, found.harness.score.function):
        path = word.replace("{root}", str(ROOT)).rpartition(":")[0] or word.replace("{root}", str(ROOT))
        assert not word.startswith("{root}") or Path(path).exists()


@pytest.mark.parametrize("name", ["arithmetic", "tiny"])
def test_task_files_can_be_made_again(tmp_path, name, monkeypatch):
    module = load(f"{name}/make_tasks")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "make_tasks.py"))
    module.main()
    committed = (ROOT / "examples" / name / "tasks.jsonl").read_text()
    assert (tmp_path / "tasks.jsonl").read_text() == committed
    assert len({line for line in committed.splitlines()}) == module.COUNT


@pytest.mark.parametrize(
    "turns, score",
    [
        (["CALC: 62 + 49", "ANSWER: 111"], 1.0),
        (["CALC: 49 + 62", "ANSWER: 110"], 0.6),
        (["CALC: 62 - 49", "ANSWER: 13"], 0.3),
        (["CALC: 62 + 49", "It is 111"], 0.5),
        (["62 + 49 = 111"], 0.0),
        (["CALC: 62 + 49 = 111"], 0.0),
        ([], 0.0),
    ],
)
def test_arithmetic_scores(tmp_path, turns, score):
    (tmp_path / "result.json").write_text(json.dumps({"turns": turns}))
    task = {"a": 62, "operator": "+", "b": 49}
    assert load("arithmetic/score").score(tmp_path, task) == pytest.approx(score)
    assert load("arithmetic/score").score(tmp_path / "nothing", task) == 0.0


@pytest.mark.parametrize(
    "cue, answer, score", [("a", "abcdefgh", 1.0), ("a", "ab", 0.25), ("1", "12 :a\ufffdb!", 0.625)]
)
def test_tiny_scores(tmp_path, cue, answer, score):
    (tmp_path / "answer.txt").write_text(answer, encoding="utf-8")
    assert load("tiny/score").score(tmp_path, {"cue": cue}) == score


def arithmetic(prompt):
    """A model that has learnt it."""
    last = prompt.rsplit("<|im_start|>user\n", 1)[1]
    if found := re.match(r"What is (.*)\?", last):
        return f"CALC: {found[1]}"
    return f"ANSWER: {re.match(r'RESULT: (-?[0-9]+)', last)[1]}"


@pytest.mark.parametrize("name, says, score", [("arithmetic", arithmetic, 1.0), ("tiny", lambda p: "ab1defg2", 0.75)])
def test_agents_run(tmp_path, name, says, score):
    if name == "arithmetic":
        pytest.importorskip("openai")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    found = config.load(ROOT / "configs" / f"{ {'arithmetic': 'quickstart'}.get(name, name) }.yaml", root=ROOT)
    harness = {"command": found.harness.command, "score": {"function": found.harness.score.function}}

    async def scenario():
        async with bench(tmp_path, FakeEngine(0, says=says), timeout=60.0, **harness) as it:
            task = load_tasks(ROOT / found.tasks.path)[0]
            it.grant(1, **{key: value for key, value in task.items() if key != "id"})
            closed = await it.event("execution_closed", 1, seconds=50)
            assert closed.outcome == "completed" and closed.score == score, it.log(1)
            made = samples(it.context.run_dir, 1)
            assert len(made) == 1, "its turns are one conversation"
            assert int(made[0].trained.sum()) == closed.tokens

    asyncio.run(asyncio.wait_for(scenario(), 60))
