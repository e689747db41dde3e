"""The shell around the scheduler's state: what it accepts from disk, and what it sends."""

import asyncio
import json

import pytest

from gyre import config
from gyre.events import RankReady
from gyre.run_dir import RunDir
from gyre.scheduler import commands as c
from gyre.scheduler.loop import AliveWatch, SchedulerLoop
from gyre.scheduler.settings import Settings
from gyre.scheduler.state import SchedulerState
from gyre.store import Store
from tests.launch.support import settings, write

HOST = 3


@pytest.fixture
def store():
    return Store.host("gyre/run/2", "127.0.0.1")


@pytest.fixture
def loop(tmp_path, store):
    """The loop of attempt 2 of a run, before it runs."""
    run_config = config.load(write(tmp_path, settings(tmp_path)), root=tmp_path)

    async def feeder(operation, **arguments):
        return {}

    return SchedulerLoop(
        SchedulerState(Settings.of(run_config)),
        run_config,
        RunDir(tmp_path / "run").create(),
        2,
        store,
        store.inbox("reports"),
        [{"id": 1}],
        feeder,
        lambda event: None,
    )


def close(loop, n, attempt, **rest):
    """An outcome on disk."""
    path = loop._run_dir.outcome(n)
    path.parent.mkdir(parents=True, exist_ok=True)
    outcome = {"n": n, "try": 1, "attempt": attempt, "outcome": "completed", "score": 1.0, "usable": True, **rest}
    path.write_text(json.dumps(outcome))


def run(loop, command):
    asyncio.run(loop._execute(command))


def test_a_grant_of_what_this_attempt_has_closed_is_news_instead(loop, store):
    close(loop, 4, attempt=2)
    run(loop, c.Grant(4, 2, HOST, 1, 0, None))
    assert [event.n for event in loop._waiting] == [4]
    assert store.inbox(f"host/{HOST}/1").read() == []


def test_an_outcome_that_an_earlier_attempt_wrote_too_late_is_not_accepted(loop, store):
    close(loop, 4, attempt=1)
    run(loop, c.Grant(4, 2, HOST, 1, 0, None))
    assert not loop._waiting
    assert [message["n"] for message in store.inbox(f"host/{HOST}/1").read()] == [4]
    run(loop, c.Close(4, 2, "failed", "out of tries"))
    (event,) = loop._waiting
    assert (event.outcome, event.reason) == ("failed", "out of tries")
    assert json.loads(loop._run_dir.outcome(4).with_name("outcome.1.json").read_text())["attempt"] == 1


def test_closing_what_a_host_has_just_closed_takes_the_hosts_word(loop):
    close(loop, 4, attempt=2)
    run(loop, c.Close(4, 1, "cancelled", "too late"))
    (event,) = loop._waiting
    assert (event.outcome, event.score) == ("completed", 1.0)


@pytest.mark.parametrize("what", ["harness host", "engine"])
def test_without_any_host_or_engine_the_attempt_ends_after_a_time(loop, what):
    host = loop._config.cells.count + loop._config.cells.standalone
    present = RankReady(host, 1, "here") if what == "engine" else RankReady(0, 1, "here", "http://x")
    asyncio.run(loop._handle(present))
    patience = loop._config.network.start_timeout
    loop._demand_ranks(1000.0)
    loop._there = dict.fromkeys(loop._there, 1000.0)
    loop._demand_ranks(1000.0 + patience - 1)
    assert loop.ended is None
    loop._demand_ranks(1000.0 + patience + 1)
    assert loop.ended.how == "failed" and what in loop.ended.detail


def test_a_silent_rank_and_one_that_started_again_are_lost(store):
    watch = AliveWatch(store, timeout=10.0)
    for rank in (1, 2):
        store.add(f"incarnation/{rank}", 1)
        watch.ready(rank, 1)
    assert watch.lost(0.0) == []
    store.add("alive/2/1", 1)
    assert [event.rank for event in watch.lost(11.0)] == [1]
    store.add("incarnation/2", 1)
    assert [event.rank for event in watch.lost(12.0)] == [2]
    assert watch.lost(100.0) == []
