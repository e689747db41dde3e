"""Whoever started a run stays with it to its end, over requeues, and gets the exit code it has earned."""

import json
import threading
import time

import pytest

from gyre.config import build, dump
from gyre.launch import follow
from gyre.run_dir import RunDir
from gyre.status import RunStatus, encode
from tests.launch.support import settings


class FakeJob:
    """A job that does what a script of (seconds, step) says."""

    id = "7"

    def __init__(self, run, folder, steps):
        self.run, self.folder = run, folder
        self.ended, self.stopped, self._waits = False, False, None
        self._thread = threading.Thread(target=self._play, args=(steps,), daemon=True)
        self._thread.start()

    def _play(self, steps):
        for step in steps:
            time.sleep(0.3)
            step(self)

    def waits(self):
        return self._waits

    def stop(self):
        self.ended = self.stopped = True

    def finish(self):
        self._thread.join(10)


def waiting(reason):
    return lambda job: setattr(job, "_waits", reason)


def ended(job):
    job.ended = True


def attempt(number, state, detail=""):
    """A step: attempt `number` is in a state, which it also logs where it is final."""

    def step(job):
        job.run.attempt(number).mkdir(parents=True, exist_ok=True)
        status = RunStatus(name=job.run.name, time=time.time(), attempt=number, state=state, detail=detail)
        kind = {"kind": "run_ended", "how": state, "detail": detail}
        if not status.final:
            kind = {"kind": "run_started", "version": 0, "cells": 3, "standalone": 0, "hosts": 1}
        with open(job.run.events, "a") as log:
            log.write(json.dumps({**kind, "t": time.time(), "attempt": number}) + "\n")
        job.run.status.write_text(encode(status))

    return step


def code(value):
    """A step: rank 0 has ended with a code."""
    return lambda job: (job.folder / "rank-0.json").write_text(json.dumps({"code": value}))


@pytest.fixture
def run(tmp_path):
    made = RunDir(tmp_path / "run").create()
    made.config.write_text(dump(build({**settings(tmp_path), "root": str(tmp_path)})))
    return made


def outcome(run, tmp_path, capfd, *steps, after=0):
    """Follow a job; returns (exit code, what was said)."""
    job = FakeJob(run, tmp_path, steps)
    result = follow.follow(run, job, after)
    return result, capfd.readouterr().err


def test_completed(run, tmp_path, capfd):
    steps = [attempt(1, "running"), attempt(1, "completed"), code(0), ended]
    assert outcome(run, tmp_path, capfd, *steps) == (0, "")


def test_a_requeued_job_is_watched_to_the_end_of_its_last_attempt(run, tmp_path, capfd):
    steps = [
        waiting("pending (Resources)"),
        waiting(None),
        attempt(1, "running"),
        attempt(1, "interrupted"),
        code(130),
        waiting("pending (BeginTime)"),
        waiting("pending (BeginTime)"),
        waiting(None),
        waiting(None),
        attempt(2, "running"),
        attempt(2, "completed"),
        code(0),
        ended,
    ]
    result, said = outcome(run, tmp_path, capfd, *steps)
    assert result == 0
    assert "job 7 is pending (BeginTime)" in said


def test_a_requeue_too_quick_to_be_seen(run, tmp_path, capfd):
    steps = [attempt(1, "interrupted"), attempt(2, "running"), attempt(2, "completed"), code(0), ended]
    assert outcome(run, tmp_path, capfd, *steps)[0] == 0


def test_failed_names_the_fault_and_the_logs(run, tmp_path, capfd):
    steps = [attempt(1, "running"), attempt(1, "failed", "the engine of rank 2 did not start"), code(1), ended]
    result, said = outcome(run, tmp_path, capfd, *steps)
    assert result == 1
    assert "the engine of rank 2 did not start" in said
    assert f"logs are in {run.attempt(1)}" in said
    assert said.count("\n") == 1


def test_refused_by_rank_0(run, tmp_path, capfd):
    (tmp_path / "7_0_log.out").write_text("noise\ngyre: change this\n")
    result, said = outcome(run, tmp_path, capfd, code(2), ended)
    assert (result, said) == (2, "gyre: change this\n")


def test_killed_without_a_word(run, tmp_path, capfd):
    result, said = outcome(run, tmp_path, capfd, attempt(1, "running"), ended)
    assert result == 1
    assert "without a word" in said


def test_the_end_of_an_earlier_attempt_is_not_the_end_of_this_one(run, tmp_path, capfd):
    attempt(1, "completed")(FakeJob(run, tmp_path, []))
    result, said = outcome(run, tmp_path, capfd, ended, after=1)
    assert result == 1
    assert f"logs are in {tmp_path}" in said


def test_the_exit_code_of_a_batch_job(run, tmp_path):
    job = FakeJob(run, tmp_path, [])
    assert follow.job_code(run, 3) == 3
    attempt(1, "running")(job)
    attempt(1, "completed")(job)
    assert follow.job_code(run, 137) == 0
    attempt(2, "running")(job)
    assert follow.job_code(run, 137) == 137
