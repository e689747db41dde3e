"""Staying with a run that was started: the live view, Ctrl-C, and the exit code that the run has earned."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from gyre.errors import EXIT_FAULT, EXIT_INTERRUPTED, EXIT_OK, EXIT_USER
from gyre.launch.executors import exit_code
from gyre.launch.jobs import Job
from gyre.run_dir import RunDir, read_events

_POLL = 0.5
#: Time in which a job mostly ends once its attempt has; after it, or when it does something else, it is watched again.
_END_SECONDS = 60.0


def say(text: str) -> None:
    """A line for the person who started the run."""
    print(f"gyre: {text}", file=sys.stderr, flush=True)


def resume_command(run: RunDir) -> str:
    """What to type to go on with a run."""
    path = run.path
    with contextlib.suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return f"launch.py resume {path}"


def last_end(run: RunDir) -> tuple[str, str] | None:
    """How the latest attempt ended (completed, interrupted, failed) and the detail; None while one runs or none did."""
    end = None
    for event in read_events(run.events):
        if event["kind"] == "run_started":
            end = None
        elif event["kind"] == "run_ended":
            end = (event["how"], event.get("detail", ""))
    return end


def last_attempt(run: RunDir) -> int:
    """Number of the latest attempt; 0 before the first."""
    attempts = run.path / "attempts"
    return max((int(p.name) for p in attempts.iterdir() if p.name.isdigit()), default=0) if attempts.is_dir() else 0


def job_code(run: RunDir, code: int) -> int:
    """The exit code of a job whose step ended with `code`: a run that is complete is no failure, whoever died."""
    end = last_end(run)
    return EXIT_OK if end and end[0] == "completed" else code


# -- waiting ---------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _stops_as_interrupts() -> Iterator[None]:
    """SIGTERM and a closed terminal end the run like Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _set_at_end(job: Job) -> Iterator[threading.Event]:
    """An event that is set when the job has ended."""
    ended, leave = threading.Event(), threading.Event()

    def look() -> None:
        while not leave.wait(_POLL):
            if job.ended:
                ended.set()
                return

    thread = threading.Thread(target=look, name="job", daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        leave.set()
        thread.join()


def _await_start(job: Job) -> None:
    """Say why nothing runs yet, once per reason."""
    said = None
    while not job.ended and (reason := job.waits()) is not None:
        if reason != said:
            say(f"job {job.id} is {reason}")
            said = reason
        time.sleep(1.0)


def _watch(run: RunDir, job: Job, after: int) -> None:
    """Show the run until it has ended, over requeues; `after` is the last attempt that is history."""
    from gyre.progress import watch

    while not job.ended:
        _await_start(job)
        with _set_at_end(job) as ended:
            how = watch(run.path, stop=ended, after=after)
        if how == "completed" or ended.is_set():
            return
        # Mostly the job ends now. A requeued one begins another attempt, and is watched again.
        after = last_attempt(run)
        deadline = time.monotonic() + _END_SECONDS
        while not job.ended and job.waits() is None and last_attempt(run) == after and time.monotonic() < deadline:
            time.sleep(_POLL)


def follow(run: RunDir, job: Job, after: int = 0) -> int:
    """Show a started run until it ends, stop it at Ctrl-C; returns the exit code."""
    with _stops_as_interrupts():
        try:
            _watch(run, job, after)
            job.finish()
        except KeyboardInterrupt:
            say("stopping (Ctrl-C again to kill)")
            with contextlib.suppress(KeyboardInterrupt):
                job.stop()
            say(f"stopped; go on with: {resume_command(run)}")
            return EXIT_INTERRUPTED
    return conclude(run, job, after)


def conclude(run: RunDir, job: Job, after: int) -> int:
    """Turn the end of a job into an exit code, with a line where it is not 0."""
    end = last_end(run) if last_attempt(run) > after else None
    code = exit_code(job.folder)
    if code == EXIT_OK or (end and end[0] == "completed"):
        return EXIT_OK
    if code == EXIT_USER:
        say(_complaint(job) or (end[1] if end and end[1] else "the run refused its input"))
        return EXIT_USER
    if code == EXIT_INTERRUPTED or (end and end[0] == "interrupted"):
        say(f"the run was interrupted; go on with: {resume_command(run)}")
        return EXIT_INTERRUPTED
    attempt = last_attempt(run)
    logs = run.attempt(attempt) if attempt > after else job.folder
    detail = end[1] if end and end[1] else _complaint(job) or "it ended without a word"
    say(f"the run failed: {detail.splitlines()[0]}; logs are in {logs}; go on with: {resume_command(run)}")
    return EXIT_FAULT


def _complaint(job: Job) -> str | None:
    """The last line that rank 0 had for people."""
    try:
        lines = (job.folder / f"{job.id}_0_log.out").read_text(errors="replace").splitlines()
    except OSError:
        return None
    ours = [line.removeprefix("gyre: ") for line in lines if line.startswith("gyre: ")]
    return ours[-1] if ours else None
