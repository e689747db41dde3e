"""The whole on one machine: real engines, a real DeepSpeed core, real harnesses; elasticity, starvation, the end."""

import json
import os
import signal
import time

import pytest

from tests.whole.support import assert_whole, tiny

pytestmark = pytest.mark.whole


def test_the_core_stays_in_training_across_a_batch(place, tmp_path):
    config = tiny(
        tmp_path,
        cells={"count": 2, "slots": 24},
        scheduler={"batch_groups": 2, "lookahead": 1.0},
        train={"updates": 5, "max_staleness": 3},
    )
    assert place.launch("run", config, "--name", "stays") == 0, place.output()
    run = place.run("stays")
    summary = run.summary
    assert_whole(summary)
    assert summary["updates"] == summary["policy_version"] == 5
    core_moves = [move for move in summary["moves"] if move["cell"] == 0 and move["to"] == "training"]
    assert 1 <= len(core_moves) < 5, "the core never stayed in training across a batch"


def assert_memory_is_handed_over(run):
    """In training an engine holds nothing; in rollout a trainer holds nothing that it can do without."""
    training = [e for e in run.events("role_reached") if e["state"] == "TRAINING"]
    serving = [e for e in run.events("role_reached") if e["state"] == "ROLLOUT" and e["held"]]
    assert {event["rank"] for event in training} == {0, 1}
    for event in training:
        assert event["held"]["engine_weights"] == event["held"]["engine_kv"] == 0, event
    for event in serving:
        held = event["held"]
        assert held["engine_weights"] > 400_000 and held["engine_kv"] > 1_000_000, event
        assert held["trainer_gradients"] == held["trainer_accumulators"] == 0, event
        assert (held["trainer_weights"] > 0) == (event["rank"] == 0), event
        assert (held["trainer_optimizer"] > 0) == (event["rank"] == 0), event


def test_a_starved_batch_is_suspended_topped_up_and_finished(place, tmp_path):
    config = tiny(
        tmp_path,
        scheduler={"batch_groups": 8, "lookahead": 0.0},
        train={"updates": 3, "micro_tokens": 64},  # a row a micro-step: the core is slow enough to be joined
    )
    tasks = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    for index in (1, 2):  # two groups of the first batch can never be trained on
        tasks[index]["broken"] = True
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    assert place.launch("run", config, "--name", "starved") == 0, place.output()
    run = place.run("starved")
    summary = run.summary
    assert_whole(summary)
    assert summary["updates"] == 3
    assert [e["update"] for e in run.events("update_suspended_for")][:1] == [1]
    assert [e for e in run.events("quota_published") if e["reason"] == "top_up"]
    groups = run.trained_groups()
    assert len(groups) == len(set(groups)) == 3 * 8
    assert not {1, 2} & set(groups)
    assert sum(summary["joins"]) >= 1, "no satellite ever joined"
    assert_memory_is_handed_over(run)


def test_a_satellite_that_dies_in_an_update_costs_no_more_than_its_work(place, tmp_path):
    config = tiny(
        tmp_path,
        scheduler={"batch_groups": 8, "lookahead": 0.0},
        train={"updates": 4, "micro_tokens": 64},
        network={"alive_timeout": 10},
    )
    dying = ",".join(f"update:{update}:claimed@1" for update in range(1, 4))
    assert place.launch("run", config, "--name", "dying", GYRE_FAULT=dying) == 0, place.output()
    run = place.run("dying")
    summary = run.summary
    assert_whole(summary)
    assert summary["updates"] == 4
    assert run.events("rank_lost"), "the satellite never died: it joined no update"
    assert {e["attempt"] for e in run.events("run_started")} == {1}, "only the satellite was to start again"
    groups = run.trained_groups()
    assert len(groups) == len(set(groups)) == 4 * 8


def test_an_engine_that_dies_is_replaced_and_no_request_is_lost(place, tmp_path):
    config = tiny(tmp_path, train={"updates": 4})
    process = place.start("run", config, "--name", "engine")
    run = place.run("engine")
    run.wait_for(lambda run: run.dir.commits())
    for pid in place.engines(1):
        os.kill(pid, signal.SIGKILL)
    assert process.wait(200) == 0, place.output()
    summary = run.summary
    assert_whole(summary)
    assert summary["updates"] == 4
    assert [e for e in run.events("role_reached") if e["rank"] == 1 and e["state"] == "FAILED"]
    assert {e["attempt"] for e in run.events("run_started")} == {1}


def test_ctrl_c_stops_everything_and_says_how_to_go_on(place, tmp_path):
    config = tiny(tmp_path, train={"updates": 50})
    process = place.start("run", config, "--name", "stopped")
    run = place.run("stopped")
    run.wait_for(lambda run: run.dir.commits())
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "launch.py resume" in place.output()
    assert run.events("run_ended")[-1]["how"] == "interrupted"
    assert run.summary["executions"]["finished"] > 0


def test_a_second_ctrl_c_leaves_nothing_either(place, tmp_path):
    process = place.start("run", tiny(tmp_path, train={"updates": 50}), "--name", "killed")
    place.run("killed").wait_for(lambda run: run.dir.commits())
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130


def test_a_run_that_cannot_start_says_why_and_leaves_nothing(place, tmp_path):
    config = tiny(tmp_path, engine={"args": {"no-such-flag": 1}})
    assert place.launch("run", config, "--name", "failed") in (1, 2)
    assert "no-such-flag" in place.output()


@pytest.mark.full
def test_with_shuffled_advantages_tiny_does_not_learn(place):
    """The control: whatever else the run does right, the reward comes from the advantages."""
    assert place.launch("run", "configs/tiny.yaml", "--name", "control", "train.advantages=shuffled", timeout=400) == 0
    rewards = place.run("control").summary["reward"]
    assert len(rewards) == 16
    assert max(rewards) < 0.4, rewards


@pytest.mark.full
def test_two_runs_on_one_host_do_not_collide(place, tmp_path):
    config = tiny(tmp_path, train={"updates": 3})
    processes = [place.start("run", config, "--name", name) for name in ("one", "other")]
    assert [process.wait(300) for process in processes] == [0, 0], place.output()
    for name in ("one", "other"):
        assert_whole(place.run(name).summary)
