"""summary.json: numbers of a run over its attempts, from events alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre import events as e
from gyre.metrics import RunMetrics
from gyre.report import _conversations, report, summarise, write_summary
from gyre.status import RankStatus
from gyre.usage import UsageMeter
from tests.fake_run import METRICS, START, Script, make_config, write_run


def metrics_of(script: Script) -> RunMetrics:
    return RunMetrics(make_config()).apply_all(script.events)


def two_updates() -> Script:
    script = Script()
    script.start()
    script.batch(1, (0.0, 0.5))
    script.batch(2, (0.5, 1.0), joined=(1, 2))
    return script


def test_summary_of_a_whole_run() -> None:
    script = two_updates()
    script.end()
    summary = metrics_of(script).summary()
    assert summary["ended"] == "completed"
    assert (summary["updates"], summary["policy_version"]) == (2, 2)
    assert summary["executions"]["dispatched"] == summary["executions"]["launched"] == 16
    assert summary["executions"]["by_outcome"] == {"completed": 16}
    assert summary["requests"] == {"total": 32, "rerouted": 0, "continued": 0, "restarted": 0, "lost": 0}
    assert summary["reward"] == [0.25, 0.75]
    assert summary["joins"] == [1, 2]
    assert summary["weights_checksum"] == "checksum-1-2"
    assert summary["tokens"] == 640
    assert summary["gpu_busy_fraction"] == pytest.approx(0.6, abs=0.01)
    assert summary["gpu_busy_fraction_after_start"] > summary["gpu_busy_fraction"]
    assert summary["peak_pss_mb"] == 4200
    assert [m["to"] for m in summary["moves"]].count("training") == 5
    first = summary["moves"][0]
    assert (first["cell"], first["from"], first["to"], first["seconds"]) == (0, "rollout", "training", 2.0)
    json.dumps(summary)


@pytest.mark.parametrize("greedy, warns", [(10, False), (0, False), (60, True)])
def test_masked_tokens_are_told_with_their_reasons(tmp_path: Path, greedy: int, warns: bool) -> None:
    script = Script()
    script.start()
    outcome = {"n": 0, "try": 1, "outcome": "completed", "score": 1.0, "usable": True, "oldest_version": 0}
    for n, masked in ((0, {"greedy": greedy, "abandoned": 7} if greedy else {}), (1, {"greedy": 3} if greedy else {})):
        script.say(e.closed_event({**outcome, "n": n, "tokens": 50, "masked": masked}))
    run = write_run(tmp_path, make_config(), script.events, None)
    summary = summarise(run)
    assert summary["masked"] == ({"abandoned": 7, "greedy": greedy + 3} if greedy else {})
    text = report(run.path, width=200)
    assert ("Most tokens teach nothing" in text) is warns
    assert (
        f"{greedy + 10} tokens ({greedy + 10}%) not to be trained on: {greedy + 3} greedy, 7 abandoned" in text
    ) is (greedy > 0)


def test_refused_samples_count_once_over_all_attempts(tmp_path: Path) -> None:
    script = Script()
    for _ in range(2):  # a group that is not trained on when an attempt ends is read again by the next one
        script.start()
        script.say(e.SampleRefused(3, 6, 9412, 8192))
        script.say(e.SampleRefused(3, 6, 10_000, 8192))
    run = write_run(tmp_path, make_config(), script.events, None)
    assert summarise(run)["refused_samples"] == {"samples": 2, "tokens": 19_412, "longest": 10_000}
    assert "2 samples over the limit, the longest of 10,000 tokens" in report(run.path)
    empty = write_run(tmp_path, make_config(), [], None)
    assert "over the limit" not in report(empty.path)


def test_updates_without_a_step_are_told(tmp_path: Path) -> None:
    script = Script()
    script.start()
    for update in range(1, 6):
        script.update(update, [update], metrics={**METRICS, "skipped": float(update in (2, 4, 5))})
    run = write_run(tmp_path, make_config(), script.events, None)
    assert summarise(run)["skipped_steps"] == [2, 4, 5]
    assert "3 updates without a step, as the gradient was not finite (2, 4, 5)" in report(run.path)


def test_figures_of_updates_fit_a_page_and_missing_ones_are_left_out(tmp_path: Path) -> None:
    script = two_updates()
    run = write_run(tmp_path / "r", make_config(), script.events, None)
    text = report(run.path)
    assert all(len(line) <= 100 for line in text.splitlines() if str(tmp_path) not in line)
    for shown in ("-0.117", "0.0071 (0.22)", "2.5e-05", "0.14 (1)", "4 (2+2)", "12.3k", "6 (2+2+2)"):
        assert shown in text
    assert "cell 0 40%, cell 1 40%, cell 2 20%" in text and "72% computing" in text
    narrow = report(run.path, width=60)
    assert "mismatch" in text and "mismatch" not in narrow and "entropy" in narrow and "…" not in narrow
    for event in script.events:
        if event["kind"] == "update_done":
            event["metrics"] = {"loss": 0.5} if event["update"] == 1 else {}
    run = write_run(tmp_path / "old", make_config(), script.events, None)
    text = report(run.path)
    assert "loss" in text and "0.500" in text and "entropy" not in text and "computing" not in text
    assert summarise(run)["core_seconds"] == {}


def test_a_long_run_shows_its_first_and_last_updates(tmp_path: Path) -> None:
    script = Script()
    script.start()
    for update in range(1, 31):
        script.batch(update)
    text = report(write_run(tmp_path, make_config(train__updates=30), script.events, None).path)
    assert [line.split()[0] for line in text.splitlines() if line.startswith("    ") and line.split()][:18] == [
        "1", "2", "3", "4", "5", "6", "7", "8", "23", "24", "25", "26", "27", "28", "29", "30", "1", "2",
    ]  # fmt: skip
    assert text.count("...") == 2


def test_the_line_of_an_update_for_programs() -> None:
    script = two_updates()
    script.update(3, [8], (), metrics={"loss": float("nan"), "kl": 0.5})
    lines = [record.flat for record in metrics_of(script).done]
    assert [line["update"] for line in lines] == [1, 2, 3]
    assert lines[1]["share"] == {"0": 0.3333, "1": 0.3333, "2": 0.3333} and lines[1]["members"] == 3
    assert lines[0]["reward"] == 0.25 and lines[0]["mismatch_max"] == METRICS["mismatch_max"]
    assert (lines[2]["loss"], lines[2]["kl"]) == (None, 0.5)
    json.dumps(lines, allow_nan=False)


def test_executions_counted_from_zero_or_one() -> None:
    for base in (0, 1):
        script = Script()
        script.start()
        script.quota(base, base + 7)
        script.quota(base + 8, base + 9, "top_up")
        summary = metrics_of(script).summary()
        assert summary["executions"]["dispatched"] == 10
        assert summary["top_ups"] == 1


def test_updates_after_the_last_commit_are_not_counted_twice() -> None:
    script = two_updates()
    lost = Script(script.t)
    lost.attempt, lost.epoch = script.attempt, script.epoch
    lost.batch(3, (0.0, 0.0), joined=(2,))
    # The crash comes after update 3's step, before its commit is durable.
    cut = next(i for i, x in enumerate(lost.events) if x["kind"] == "policy_committed")
    script.events += lost.events[:cut]
    before = metrics_of(script)
    assert before.update_count == 3
    script.t = lost.t + 1000
    script.start(version=2)
    after = metrics_of(script)
    assert (after.update_count, after.policy_version) == (2, 2)
    assert after.rewards == [0.25, 0.75]
    # Executions 16..23 stay closed; their groups are trained on once more, in the update that counts.
    script.update(3, [8, 9, 10, 11], joined=(1, 2))
    script.publish(3)
    script.end()
    summary = metrics_of(script).summary()
    assert summary["updates"] == 3
    assert summary["reward"] == [0.25, 0.75, 0.0]
    assert summary["joins"] == [1, 2, 2]
    assert summary["executions"]["finished"] == 24
    assert summary["weights_checksum"] == "checksum-2-3"
    assert [a["ended"] for a in summary["attempts"]] == ["unfinished", "completed"]
    assert summary["seconds"] == pytest.approx(sum(a["seconds"] for a in summary["attempts"]))
    assert summary["seconds"] < script.t - START - 900  # the time between attempts is nobody's


def test_a_commit_counts_although_its_events_were_lost() -> None:
    script = two_updates()
    cut = next(i for i, x in enumerate(script.events) if x["kind"] == "update_done" and x["update"] == 2)
    script.events = script.events[:cut]
    script.start(version=2)
    assert metrics_of(script).summary()["updates"] == 2


def test_an_execution_counts_at_its_first_closing() -> None:
    script = Script()
    script.start()
    script.quota(0, 1)
    script.close(0, lost=1)
    script.close(0, outcome="failed")
    script.close(1, None, "timed_out", rerouted=1, continued=1, spliced=9, drifted=3, drift_tokens=1200, forked=1)
    summary = metrics_of(script).summary()
    assert summary["executions"]["by_outcome"] == {"completed": 1, "timed_out": 1}
    assert summary["requests"] == {"total": 4, "rerouted": 1, "continued": 1, "restarted": 0, "lost": 1}
    assert summary["conversations"] == {"spliced": 9, "drifted": 3, "drift_tokens": 1200, "forked": 1}
    line = _conversations(summary["conversations"])
    assert "9 requests of 10" in line and "33%" in line and "1,200 tokens" in line and "1 forked (10%)" in line
    assert _conversations(dict.fromkeys(summary["conversations"], 0)) == ""


def test_closed_on_disk_but_not_logged(tmp_path: Path) -> None:
    script = Script()
    script.start()
    script.quota(0, 1)
    script.close(0)
    script.say(e.ExecutionGranted(1, 1, 3, 0))
    run = write_run(tmp_path / "r", make_config(), script.events, None)
    run.execution(1).mkdir()
    run.outcome(1).write_text(json.dumps({"n": 1, "outcome": "failed", "tokens": 7, "requests": 1}))
    summary = summarise(run)
    assert summary["executions"]["by_outcome"] == {"completed": 1, "failed": 1}
    assert summary["tokens"] == 47


def test_moves_that_were_abandoned() -> None:
    script = Script()
    script.start()
    script.say(e.MoveStarted(1, 5, "ROLLOUT", "TRAINING", "", [3]))
    script.say(e.RoleReached(1, 1, 5, "DRAINING"))
    script.say(e.RoleReached(1, 1, 5, "ROLLOUT"))
    script.say(e.MoveStarted(2, 1, "ROLLOUT", "TRAINING", "", []))
    script.say(e.RankLost(2, 1, "silent"))
    summary = metrics_of(script).summary()
    assert (summary["moves"], summary["abandoned_moves"], summary["lost_ranks"]) == ([], 1, 1)


def test_batches_closed_short_and_groups_dropped() -> None:
    script = Script()
    script.start()
    script.say(e.GroupDropped(3, "1 of 4 executions are usable, 2 are needed"))
    script.say(e.GroupDropped(5, "0 of 4 executions are usable, 2 are needed"))
    script.say(e.BatchClosedShort(1, 3, 1))
    summary = metrics_of(script).summary()
    assert summary["groups_dropped"] == {"N of N executions are usable, N are needed": 2}
    assert summary["closed_short"] == 1


def test_staleness_counts_versions_since_the_oldest_token() -> None:
    script = two_updates()
    assert metrics_of(script).summary()["staleness"] == [0.0, 1.0]


def test_time_left_comes_from_the_updates_of_this_attempt() -> None:
    script = Script()
    script.start()
    assert metrics_of(script).seconds_left(script.t) is None
    script.batch(1)
    script.batch(2)
    metrics = metrics_of(script)
    left = metrics.seconds_left(metrics.updates[2].done or 0)
    each = ((metrics.updates[2].done or 0) - (metrics.attempts[0].ready or 0)) / 2
    assert left == pytest.approx(4 * each)


def test_usage_survives_restarts_of_a_rank() -> None:
    meter = UsageMeter(cells=2, started=0.0)
    a = RankStatus(0, "core", serving_seconds=5, training_seconds=2, tokens=100, pss_mb=10)
    b = RankStatus(1, "satellite", serving_seconds=8, tokens=50, pss_mb=20)
    meter.observe(10, [a, b])
    again = RankStatus(1, "satellite", incarnation=2, serving_seconds=1, tokens=10, pss_mb=5)
    meter.observe(20, [a, again])
    meter.observe(21, [a, b])  # a late word of the earlier incarnation
    usage = meter.event(22)
    assert (usage.cell_seconds, usage.serving_seconds, usage.training_seconds) == (44, 14, 2)
    assert (usage.sampled_tokens, usage.peak_pss_mb) == (160, 30)
    assert again.tokens_per_second == 1.0


def test_report_is_readable_for_every_kind_of_end(tmp_path: Path) -> None:
    script = two_updates()
    run = write_run(tmp_path / "r", make_config(), script.events, None)
    assert "r unfinished" in report(run.path)
    script.end()
    run = write_run(tmp_path / "r", make_config(), script.events, None)
    text = report(run.path)
    assert "r completed" in text and "2 updates" in text and "0 lost" in text
    assert all(len(line) <= 100 for line in text.splitlines() if str(tmp_path) not in line)
    assert write_summary(run) == json.loads(run.summary.read_text())
    empty = write_run(tmp_path / "empty", make_config(), [], None)
    assert "empty not started" in report(empty.path)
