"""Executions run, end in every way they can, and close exactly once (invariant 2)."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from gyre.errors import ChildFailed, Superseded
from gyre.harness.execution import Try
from gyre.harness.scoring import parse_score
from gyre.proxy.recorder import read_records
from tests.harness.bench import bench
from tests.proxy.fake_engine import FakeEngine


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def gone(pid: int) -> bool:
    for _ in range(100):
        if not alive(pid):
            return True
        await asyncio.sleep(0.02)
    return False


def test_an_execution_runs_is_scored_and_closes(tmp_path):
    program = """
print("hello", os.getcwd())
open("answer.txt", "w").write(ask("question"))
assert os.environ["ANTHROPIC_API_KEY"] == os.environ["OPENAI_API_KEY"] and "GYRE_CHILD_FD" not in os.environ
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]
assert os.environ["GYRE_EXECUTION"] == "3" and os.getsid(0) == os.getpid()
"""

    async def scenario():
        async with bench(tmp_path, keep_workspaces="all") as it:
            it.grant(3, program, score=0.75)
            closed = await it.event("execution_closed", 3)
            assert (closed.outcome, closed.score, closed.usable, closed.reason) == ("completed", 0.75, True, "")
            assert closed.requests == 1 and closed.tokens > 0 and closed.lost == 0 and closed.oldest_version == 0
            outcome = it.outcome(3)
            directory = it.context.run_dir.execution(3)
            assert outcome["attempt"] == 1 and outcome["try"] == 1 and outcome["group"] == 3
            (record,) = read_records(directory / outcome["records"], outcome["calls"])
            assert len(record.sampled) == closed.tokens
            assert closed.masked == outcome["masked"] == ({record.masked: closed.tokens} if record.masked else {})
            assert (directory / "1" / "workspace" / "answer.txt").read_text()
            assert str(directory / "1" / "workspace") in it.log(3)
            await asyncio.sleep(0)  # the news of an end comes one turn of the loop before it stops counting
            status = it.host.status()
            assert status.live == 0 and status.kind == "host" and status.state == "HOSTING"

    run(scenario())


@pytest.mark.parametrize(
    "program, outcome, score, reason",
    [
        ("sys.exit(3)", "failed", 0.5, "exit code 3"),
        ("os.kill(os.getpid(), 9)", "failed", 0.5, "exit code -9"),
        ("time.sleep(60)", "timed_out", 0.5, "ran for more than 1 s"),
    ],
)
def test_other_ends_are_scored_too(tmp_path, program, outcome, score, reason):
    async def scenario():
        async with bench(tmp_path, timeout=1.0) as it:
            it.grant(1, "ask('x')\n" + program)
            closed = await it.event("execution_closed", 1)
            assert (closed.outcome, closed.score, closed.reason, closed.usable) == (outcome, score, reason, True)
            assert (it.context.run_dir.try_dir(1, 1) / "workspace").exists(), "kept, since it did not end well"

    run(scenario())


@pytest.mark.parametrize(
    "score, reason",
    [
        ({"function": "score.py:nothing"}, "AttributeError"),
        ({"function": "bad.py:score"}, "ValueError: no score today"),
        ({"command": ["sh", "-c", "echo much; exit 4"]}, "exit code is 4"),
        ({"command": ["sh", "-c", "echo none"]}, "is not a score"),
        ({"command": ["sh", "-c", "echo nan"]}, "not a score"),
        ({"command": ["no-such-command"]}, "cannot start"),
        ({"command": ["sleep", "9"], "timeout": 0.3}, "more than 0.3 s"),
    ],
)
def test_a_scorer_that_fails_gives_no_score(tmp_path, score, reason):
    async def scenario():
        (tmp_path / "bad.py").write_text("def score(workspace, task):\n    raise ValueError('no score today')\n")
        async with bench(tmp_path, score=score) as it:
            it.grant(1, "ask('x')")
            closed = await it.event("execution_closed", 1)
            assert closed.outcome == "completed" and closed.score is None and not closed.usable
            assert reason in closed.reason

    run(scenario())


@pytest.mark.parametrize("line", ["0.25", '{"score": 0.25}'])
def test_a_scoring_command(tmp_path, line):
    async def scenario():
        command = ["sh", "-c", f"test -f made || exit 1; echo noise; echo {line!r}; echo error >&2"]
        async with bench(tmp_path, score={"command": command}) as it:
            it.grant(1, "open('made', 'w')")
            closed = await it.event("execution_closed", 1)
            assert closed.score == 0.25 and not closed.usable, "it has no recorded token"
            assert "error" in it.log(1)
            assert not (it.context.run_dir.try_dir(1, 1) / "workspace").exists()

    run(scenario())


def test_a_command_that_is_not_there_fails_the_execution(tmp_path):
    async def scenario():
        async with bench(tmp_path, command=["/no/such/thing"]) as it:
            it.grant(1)
            closed = await it.event("execution_closed", 1)
            assert closed.outcome == "failed" and "cannot start /no/such/thing" in closed.reason

    run(scenario())


def test_nothing_of_a_harness_is_left(tmp_path):
    program = """
import subprocess
one = subprocess.Popen(["sleep", "60"])
two = subprocess.Popen(["sh", "-c", "setsid sh -c 'sleep 61 & echo $! > deep; sleep 62' & echo $! > left"])
time.sleep(0.3)
print(one.pid, open("deep").read().strip(), flush=True)
"""

    async def scenario():
        async with bench(tmp_path, keep_workspaces="all") as it:
            it.grant(1, program)
            closed = await it.event("execution_closed", 1)
            assert closed.outcome == "completed"
            for pid in it.log(1).split():
                assert await gone(int(pid))

    run(scenario())


def test_the_clock_stands_still_while_requests_are_held(tmp_path):
    async def scenario():
        async with bench(tmp_path, timeout=1.5) as it:
            it.routes(up=False)
            it.grant(1, "ask('x')")
            await asyncio.sleep(2.5)
            assert len(it.events) == 1, "it has not timed out"
            it.routes()
            closed = await it.event("execution_closed", 1)
            assert closed.outcome == "completed" and closed.seconds > 2
            assert it.outcome(1)["held_seconds"] > 1.5

    run(scenario())


def test_output_is_cut_and_memory_is_limited(tmp_path):
    program = """
sys.stdout.write("x" * (3 << 20))
sys.stdout.flush()
try:
    block = bytearray(1 << 30)
except MemoryError:
    open("limited", "w")
"""

    async def scenario():
        limits = {"memory_mb": 512, "output_mb": 1, "files": 64}
        async with bench(tmp_path, limits=limits, keep_workspaces="all") as it:
            it.grant(1, program)
            await it.event("execution_closed", 1)
            assert (1 << 20) <= len(it.log(1)) < (1 << 20) + 100
            assert (it.context.run_dir.try_dir(1, 1) / "workspace" / "limited").exists()

    run(scenario())


def test_a_cancelled_execution_closes_without_a_score(tmp_path):
    async def scenario():
        async with bench(tmp_path) as it:
            it.grant(1, "print(os.getpid(), flush=True)\ntime.sleep(60)")
            while not it.context.run_dir.try_dir(1, 1).joinpath("harness.log").exists() or not it.log(1):
                await asyncio.sleep(0.02)
            it.send(message="cancel", n=1)
            closed = await it.event("execution_closed", 1)
            assert closed.outcome == "cancelled" and closed.score is None and not closed.usable
            assert await gone(int(it.log(1)))

    run(scenario())


def test_a_dead_proxy_fails_tries_and_comes_back(tmp_path):
    async def scenario():
        async with bench(tmp_path, FakeEngine(0, delay=0.1)) as it:
            it.grant(1, "ask('x')")
            while not it.engine.live:
                await asyncio.sleep(0.01)
            os.kill(it.host._host.proxy.pid, signal.SIGKILL)
            failed = await it.event("try_failed", 1)
            assert failed.try_number == 1 and "proxy" in failed.reason
            assert not it.context.run_dir.outcome(1).exists()
            it.engine.delay = 0.0
            it.grant(1, "ask('x')", number=2)
            closed = await it.event("execution_closed", 1)
            assert closed.try_number == 2 and closed.outcome == "completed" and closed.tokens > 0
            assert it.outcome(1)["records"].startswith("2/")

    run(scenario())


@pytest.mark.parametrize("line", ["1" * 400, "[" * 100_000, '{"score": [1]}', '{"score": null}', ""])
def test_a_last_line_that_is_no_score(line):
    score = parse_score(f"0.5\n{line}" if line else line)
    assert score.value is None and "not a score" in score.reason


def test_an_unforeseen_fault_of_one_try_fails_only_that_try(tmp_path, monkeypatch):
    known = Try._known_outcome

    def breaks(one):
        if one.n == 1 and one.number == 1:
            raise RuntimeError("unforeseen")
        return known(one)

    monkeypatch.setattr(Try, "_known_outcome", breaks)

    async def scenario():
        async with bench(tmp_path) as it:
            it.grant(1, "ask('x')")
            it.grant(2, "ask('x')")
            failed = await it.event("try_failed", 1)
            assert failed.reason == "RuntimeError: unforeseen" and failed.try_number == 1
            it.grant(1, "ask('x')", number=2)
            for n in (1, 2):
                assert (await it.event("execution_closed", n)).outcome == "completed"
            assert not it.running.done()

    run(scenario())


def test_an_outcome_file_that_cannot_be_read_does_not_end_the_host(tmp_path):
    async def scenario():
        async with bench(tmp_path) as it:
            it.context.run_dir.execution(1).mkdir(parents=True)
            it.context.run_dir.outcome(1).write_text("{")
            it.grant(1, "ask('x')")
            assert "JSONDecodeError" in (await it.event("try_failed", 1)).reason
            assert not it.running.done()

    run(scenario())


def test_what_is_closed_stays_closed(tmp_path):
    async def scenario():
        async with bench(tmp_path) as it:
            it.grant(1, "ask('x')", score=0.9)
            await it.event("execution_closed", 1)
            before = it.outcome(1)
            del it.events[1:]
            it.grant(1, "sys.exit(1)", number=2, score=0.1)
            closed = await it.event("execution_closed", 1)
            assert closed.try_number == 1 and closed.score == 0.9
            assert it.outcome(1) == before

    run(scenario())


def test_an_outcome_of_an_earlier_attempt_that_was_not_accepted_goes_aside(tmp_path):
    async def scenario():
        async with bench(tmp_path) as it:
            directory = it.context.run_dir.execution(1)
            directory.mkdir(parents=True)
            old = {"n": 1, "try": 1, "attempt": 0, "score": 0.1}
            it.context.run_dir.outcome(1).write_text(json.dumps(old))
            it.grant(1, "ask('x')", score=0.9)
            closed = await it.event("execution_closed", 1)
            assert closed.score == 0.9 and it.outcome(1)["attempt"] == 1
            assert json.loads((directory / "outcome.0.json").read_text()) == old

    run(scenario())


def test_a_host_of_an_older_attempt_cannot_close_anything(tmp_path):
    async def scenario():
        async with bench(tmp_path) as it:
            it.grant(1, "time.sleep(0.5)")
            await asyncio.sleep(0.2)
            it.context.run_dir.attempt(2).mkdir()
            with pytest.raises(Superseded):
                await it.running
            assert not it.context.run_dir.outcome(1).exists()

    run(scenario())


def test_stopping_kills_everything(tmp_path):
    async def scenario():
        async with bench(tmp_path) as it:
            for n in range(3):
                it.grant(n, "print(os.getpid(), flush=True)\ntime.sleep(60)")
            logs = [it.context.run_dir.try_dir(n, 1) / "harness.log" for n in range(3)]
            while not all(log.exists() and log.read_text() for log in logs):
                await asyncio.sleep(0.02)
            assert it.host.status().live == 3 and "3 running" in it.host.status().doing
            it.send(message="leave")
            with pytest.raises(ChildFailed, match="counts this incarnation of rank 5 as lost"):
                await it.running
            await it.host.stop()
            for log in logs:
                assert await gone(int(log.read_text()))
            assert it.host.status().live == 0

    run(scenario())


def test_many_executions_at_once(tmp_path):
    async def scenario():
        async with bench(tmp_path, FakeEngine(0, delay=0.001)) as it:
            for n in range(24):
                it.grant(n, f"ask('{n}')")
            for n in range(24):
                closed = await it.event("execution_closed", n)
                assert closed.outcome == "completed" and closed.usable
            assert len([e for e in it.events if e.kind == "execution_closed"]) == 24

    run(scenario())
