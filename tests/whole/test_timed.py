"""A whole run with a timed engine and a timed trainer in three cells: real moves, real continuations, real reduces."""

import json
import math
import random

import pytest

from tests.whole.support import assert_whole, tiny

pytestmark = pytest.mark.whole


def test_timed_cells_change_roles_for_a_trace(light_place, tmp_path):
    config = tiny(
        tmp_path,
        model={"path": "gyre:timed", "max_context": 1024},
        harness={
            "command": ["python", "-S", "-E", "{root}/examples/timed/agent.py"],
            "score": {"command": ["sh", "{root}/examples/timed/score.sh"]},
            "keep_workspaces": "none",
        },
        cells={"count": 3, "slots": 3},
        engine={"kind": "timed", "timed": {"tokens_per_second": 40, "sleep_seconds": 0.1, "wake_seconds": 0.05}},
        scheduler={"batch_groups": 4, "group_size": 3, "lookahead": 0.5},
        train={
            "kind": "timed",
            "timed": {"seconds_per_row": 0.2},
            "updates": 3,
            "micro_tokens": 32,
            "sample_limit": 120,
        },
    )
    draw = random.Random(1)
    tasks = [{"id": f"t{i}", "tokens": [draw.choice((10, 20, 60)) for _ in range(3)], "requests": 2} for i in range(12)]
    tasks[5]["tokens"][1] = 100  # with its prompts a sample of 150 tokens, over the limit
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    assert light_place.launch("run", config, "--name", "timed", timeout=120) == 0, light_place.output()
    run = light_place.run("timed")
    summary = run.summary
    assert_whole(summary)
    assert summary["updates"] == summary["policy_version"] == 3
    groups = run.trained_groups()
    assert len(groups) == len(set(groups)) == 12
    assert sum(summary["joins"]) >= 1, "no satellite ever joined"
    assert summary["requests"]["continued"] >= 1, "no request was moved while it was answered"
    refused = run.events("sample_refused")
    assert [(e["group"], e["execution"], e["tokens"], e["limit"]) for e in refused] == [(5, 16, 150, 120)]
    assert summary["refused_samples"] == {"samples": 1, "tokens": 150, "longest": 150}
    assert "a sample of 150 tokens is over the limit of 120" in light_place.output()
    of_group = {event["group"]: event["update"] for event in run.events("group_taken")}
    for update in run.events("update_done"):
        # the gradient came over the prefix group and the loss with the ledgers: both are sums of the micro-steps' ids
        count = sum(update["micro_steps"].values())
        assert count == 12 - (of_group[5] == update["update"])
        loss = update["metrics"]["loss"]
        assert loss == pytest.approx(count * (count + 1) / 2 / update["metrics"]["weight"])
        assert update["metrics"]["grad_norm"] == pytest.approx(math.sqrt(1024) * loss, rel=1e-5)
    wanted = {n: task["tokens"][m] for g, task in enumerate(tasks) for n, m in ((3 * g + m, m) for m in range(3))}
    closed = {event["n"]: event["tokens"] for event in run.events("execution_closed")}
    lines = [json.loads(line) for line in run.dir.metrics.read_text().splitlines()]
    for line, event in zip(lines, run.events("update_done"), strict=True):
        assert line.items() >= event["metrics"].items() and line["update"] == event["update"]
        assert sum(line["share"].values()) == pytest.approx(1, abs=1e-3)
    assert closed == wanted, "an execution did not get the tokens that it asked for"
