"""The judgement on a self-test, and what starts none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre import selftest
from gyre.config import load
from gyre.errors import UserError
from gyre.launch import selftest as shell
from gyre.plain import PlainReporter
from gyre.report import report
from gyre.run_dir import RunDir
from gyre.selftest import LIMITS, Measured, judge
from tests.fake_run import Script, make_config, write_run

GOOD = {"tokens": 1234.0, "mismatch_mean": 3e-6, "mismatch_max": 4e-5, "ratio_min": 0.99997, "ratio_max": 1.00004}


def measured(**changes: object) -> Measured:
    known = {"tokens": 900, "mean": 3e-6, "most": 4e-5, "ratio_min": 0.99, "ratio_max": 1.01, "kl": 1e-9}
    return Measured(**{**known, "before": "c1", "after": "c1", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes, dtype, faults, hint",
    [
        ({}, "float32", [], ""),
        ({"mean": 0.010, "most": 0.36}, "bfloat16", [], ""),
        ({"mean": 0.006, "most": 0.16}, "float32", ["mean difference 0.006", "largest difference 0.16"], "dtype"),
        ({"mean": 0.05, "most": 0.9}, "bfloat16", ["mean difference"], "temperature"),
        ({"mean": 2.3, "most": 9.0}, "bfloat16", ["mean difference", "largest"], "weights: both"),
        ({"mean": 9e-5, "most": 0.4}, "float32", ["largest difference 0.40"], "packs nothing"),
        ({"mean": float("nan"), "most": float("nan")}, "float32", ["mean difference nan", "largest"], "weights"),
        ({"tokens": 0, "mean": 0.0, "most": 0.0}, "float32", ["no token was compared"], "no top-p"),
        ({"tokens": 0, "mean": None, "most": None}, "float32", ["no token was compared"], "no top-p"),
        ({"tokens": 9, "mean": None, "most": None}, "float32", ["the trainer has measured no difference"], ""),
        ({"after": "c2"}, "float32", ["changed at learning rate 0: checksum c1 before, c2 after"], "fp32 weights"),
        ({"before": None, "after": None}, "float32", ["checksum unknown before"], "fp32 weights"),
        ({"after": "c2", "mean": 1.0}, "float32", ["checksum", "mean difference"], "fp32 weights"),
    ],
)
def test_verdicts(changes: dict, dtype: str, faults: list[str], hint: str) -> None:
    verdict = judge(measured(**changes), dtype)
    assert len(verdict.faults) == len(faults) and verdict.passed is not bool(faults)
    for fault, words in zip(verdict.faults, faults, strict=True):
        assert words in fault
    assert hint in (verdict.hints[0] if verdict.hints else "")
    text = selftest.text(measured(**changes), dtype)
    assert text.startswith(f"self-test {'failed' if faults else 'passed'}\n")
    assert all(f"fault: {fault}" in text for fault in verdict.faults)
    assert all(f"look at: {one}" in text for one in verdict.hints)


def test_limits_are_above_what_was_measured_of_sound_pairs_and_below_what_another_type_makes() -> None:
    assert 5e-5 < LIMITS["float32"].most and 0.36 < LIMITS["bfloat16"].most
    assert 0.012 < LIMITS["bfloat16"].mean < 0.05
    assert 10 * LIMITS["float32"].mean < 0.006 and 10 * LIMITS["float32"].most < 0.16


def test_the_figures_are_those_of_the_log() -> None:
    script = Script()
    script.start()
    script.events[1]["checksum"] = "checksum-1-1"  # of rank 0
    script.batch(1)
    script.events[-3:] = [event for event in script.events[-3:] if event["kind"] != "update_done"]
    next(event for event in script.events if event["kind"] == "update_done")["metrics"] = GOOD
    found = selftest.measure(script.events)
    assert found == Measured(1234, 3e-6, 4e-5, 0.99997, 1.00004, None, "checksum-1-1", "checksum-1-1")
    assert judge(found, "float32").passed
    assert selftest.measure([]) == Measured(0, None, None, None, None, None, None, None)
    json.dumps(selftest.figures(found, "float32"), allow_nan=False)


def configuration(tmp_path: Path, **changes: object) -> Path:
    return write_run(tmp_path / "given", make_config(root=str(tmp_path), **changes), [], None).config


def test_a_self_test_is_one_update_that_changes_nothing(tmp_path: Path) -> None:
    path = configuration(
        tmp_path, train__updates=6, train__lr=1e-3, scheduler__lookahead=0.5, scheduler__batch_groups=32
    )
    config = load(path, selftest.overrides(load(path), []))
    train, scheduler = config.train, config.scheduler
    assert (train.updates, train.updates_per_batch, train.lr, train.advantages) == (1, 1, 0.0, "ones")
    assert (scheduler.batch_groups, scheduler.lookahead, config.name) == (selftest.GROUPS, 0, "sample-selftest")
    given = ["scheduler.batch_groups=9", "name=mine", "model.dtype=float32"]
    config = load(path, selftest.overrides(load(path, given), given))
    assert (config.scheduler.batch_groups, config.name, config.model.dtype) == (9, "mine", "float32")


@pytest.mark.parametrize("word", ["train.lr=1", "train.updates=3", "train.schedule.warmup=4", "train.advantages=group"])
def test_what_a_self_test_is_cannot_be_overridden(tmp_path: Path, word: str) -> None:
    path = configuration(tmp_path)
    with pytest.raises(UserError, match="is what selftest sets itself; remove it"):
        selftest.overrides(load(path), [word])


def test_without_a_policy_there_is_nothing_to_compare(tmp_path: Path) -> None:
    path = configuration(tmp_path, engine={"kind": "timed"}, train__kind="timed")
    with pytest.raises(UserError, match="engine.kind timed with train.kind timed computes none"):
        shell.run(str(path), [], "local", None, lambda run, config: 0)
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    "update, metrics, said",
    [
        (1, {"mismatch_mean": 0.11, "staleness_max": 0}, True),
        (3, {"mismatch_mean": float("nan"), "staleness_max": 0}, True),
        (1, {"mismatch_mean": 0.012, "staleness_max": 0}, False),
        (1, {"mismatch_mean": 0.11, "staleness_max": 1}, False),  # the policy has moved on since
        (2, {"mismatch_mean": 0.11, "staleness_max": 0}, False),  # and so has it within a batch
        (1, {"mismatch_mean": 0.11}, False),
        (1, {"staleness_max": 0}, False),
        (1, {}, False),
    ],
)
def test_an_ordinary_run_says_where_engine_and_trainer_cannot_agree(tmp_path, update, metrics, said) -> None:
    config = make_config(train__updates_per_batch=2)
    assert (selftest.doubt(config, update, metrics) is not None) is said
    script, lines = Script(), []
    script.start()
    script.update(update, [0], (), metrics={"loss": 0.0, **metrics})
    reporter = PlainReporter(config, lines.append, lambda: script.t)
    for event in script.events:
        reporter.on_event(event)
    reporter.flush()
    words = "differ by"
    assert any(words in line for line in lines) is said
    assert (words in report(write_run(tmp_path, config, script.events, None).path)) is said


@pytest.mark.parametrize("mean, passed", [(3e-6, True), (3e-2, False)])
def test_the_shell_reads_what_the_run_left(tmp_path: Path, capsys, monkeypatch, mean: float, passed: bool) -> None:
    path = configuration(tmp_path, model__dtype="float32")
    monkeypatch.setattr(shell.check, "before_start", lambda config, cluster: None)
    runs: list[RunDir] = []

    def start(run: RunDir, config: object) -> int:
        runs.append(run)
        script = Script()
        script.start()
        script.events[1]["checksum"] = "checksum-1-1"
        script.batch(1)
        for event in script.events:
            if event["kind"] == "update_done":
                event["metrics"] = {**GOOD, "mismatch_mean": mean}
        run.events.write_text("".join(json.dumps(event) + "\n" for event in script.events))
        (run.checkpoints / "1").mkdir()
        return 0

    out = tmp_path / "figures.json"
    assert shell.run(str(path), [], "local", str(out), start) == (0 if passed else 1)
    assert json.loads(out.read_text())["passed"] is passed
    printed = capsys.readouterr().out
    assert "1,234, weights in float32" in printed and ("look at: dtype" in printed) is not passed
    assert not runs[0].checkpoints.exists(), "the weights of a self-test are those it began with"
    assert shell.run(str(path), [], "local", None, lambda run, config: 130) == 130
