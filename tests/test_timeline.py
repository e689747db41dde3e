"""Timelines: the fold agrees with the scheduler's own numbers, and the page is one file that anybody may open."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gyre import events as e
from gyre.cli import main
from gyre.scheduler.state import SchedulerState
from gyre.simulate.trace import load
from gyre.timeline import Fold, Steps, Timeline, fold
from gyre.timeline_cells import CellState, Segment
from gyre.timeline_page import MAX_POINTS, page, thinned
from tests.fake_run import Script, make_config, write_run
from tests.scheduler import test_worlds
from tests.scheduler.world import World


class Follower:
    """Folds the log of a world's attempts as rank 0 would write it, and compares after every event."""

    def __init__(self, driven: World) -> None:
        settings = driven.settings
        self.fold = Fold(settings.slots, settings.max_lag, settings.trainers)
        self.records: list[dict[str, Any]] = []
        self.logged: set[int] = set()  # executions whose closing is in the log
        self.t = 0.0
        self.attempt = self.compared = 0
        self.follow(driven)

    def follow(self, driven: World) -> None:
        """A world begins: the first one, or one that resumes."""
        settings, self.driven, self.facts, self.began = driven.settings, driven, 0, self.t
        self.attempt += 1
        self.unlogged = {n for n in driven.outcomes if n not in self.logged}
        self.say(e.RunStarted(driven.version, settings.cells, settings.standalone, settings.hosts))
        driven.on_event = self.on_event
        driven.start()
        self.say_facts()
        self.compare()

    def on_event(self, event: e.Event) -> None:
        if not isinstance(event, e.Tick):
            self.say(event)
        if isinstance(event, e.ExecutionClosed):
            self.logged.add(event.n)
        self.say_facts()
        self.compare()

    def say(self, event: e.Event) -> None:
        self.t = self.began + self.driven.now
        record = {"t": self.t, "attempt": self.attempt, **e.encode(event)}
        self.records.append(record)
        self.fold.apply(record)

    def say_facts(self) -> None:
        for _, fact in self.driven.facts[self.facts :]:
            self.say(fact)
            if isinstance(fact, e.GroupReady) or (isinstance(fact, e.GroupDropped) and self.fold._group_size):
                size = self.driven.settings.group_size
                self.logged |= set(range(fact.group * size, (fact.group + 1) * size))
        self.facts = len(self.driven.facts)

    def compare(self) -> None:
        state, fold = self.driven.state, self.fold
        if state.ended:  # nothing is taken in any more, whatever is heard of
            return
        assert fold.ready == set(state.groups.ready)
        assert fold.running == state.level.p - state.level.f
        assert fold.w == state.level.w + len(self.unlogged - self.logged)
        if not state.finishing:  # then engines that are behind keep their routes
            assert fold.capacity == state.fleet.capacity
            self.compare_cells(state)
        self.compared += 1

    def compare_cells(self, state: SchedulerState) -> None:
        for rank, cell in state.fleet.cells.items():
            looks = self.fold._cells._cells[rank].looks()
            assert (looks is CellState.ROLLOUT) == cell.routed
            assert (looks in (CellState.STARTING, CellState.DOWN)) == (not cell.up)
            if cell.up and cell.goal == "training":
                assert (looks is CellState.TO_TRAINING) == (cell.state != "TRAINING")
                joined = rank in state.update.joined and not state.update.stepped
                if not self.driven.chances.repeated:  # a repeated word of a suspended update may be taken for news
                    assert (looks is CellState.IN_UPDATE) == joined


@pytest.mark.parametrize("block", range(2))
@pytest.mark.parametrize("policy", test_worlds.POLICIES)
def test_the_fold_agrees_with_the_scheduler_after_every_event(policy: str, block: int) -> None:
    for seed in range(block * 9, (block + 1) * 9):
        driven = test_worlds.world(seed, policy)
        follower = Follower(driven)
        driven.run(limit=30_000)
        assert follower.compared > 30


@pytest.mark.parametrize("policy", ["elastic", "async-stream"])
@pytest.mark.parametrize("seed", range(8))
def test_the_fold_agrees_over_attempts_that_are_killed(seed: int, policy: str) -> None:
    random = Random(seed)
    driven = test_worlds.world(3 * seed + random.randrange(3), policy)
    follower = Follower(driven)
    for _ in range(3):
        driven.run(until=random.uniform(10, 200), limit=30_000)
        if driven.ended:
            break
        follower.t += 50
        driven = driven.crashed(seed, lost_specs=random.choice([0, 0, 3]))
        follower.follow(driven)
    driven.run(limit=30_000)
    line = follower.fold.timeline()
    assert [a.how for a in line.attempts[:-1]] == ["was killed"] * (len(line.attempts) - 1)
    for row in line.rows:
        assert row[0].start == line.start and row[-1].end == line.end
        assert all(a.end == b.start and a.start < a.end for a, b in zip(row, row[1:], strict=False))
        for attempt, following in zip(line.attempts, line.attempts[1:], strict=False):
            between = (attempt.end + following.start) / 2
            assert next(s for s in row if s.start <= between < s.end).state is CellState.DOWN


def test_words_that_are_late_repeated_or_of_the_dead_change_nothing() -> None:
    script = Script()
    script.start()
    script.say(e.MoveStarted(1, 1, "restarting", "rollout", "started", []))
    script.say(e.RoleReached(1, 1, 1, "ROLLOUT", version=0), 1)
    for word in (
        e.RoleReached(1, 1, 1, "SYNCING"),  # late
        e.RoleReached(1, 0, 1, "FAILED"),  # of an incarnation before
        e.RankReady(1, 1, "node"),  # repeated
        e.RoleReached(3, 1, 1, "ROLLOUT"),  # of a harness host
    ):
        script.say(word, 1)
    script.say(e.RankLost(1, 1, "silent"), 1)
    script.say(e.RoleReached(1, 1, 1, "ROLLOUT", version=0), 1)  # of the dead
    line = fold(script.events, 4)
    states = [s.state for s in line.rows[1]]
    assert states == [CellState.STARTING, CellState.TO_ROLLOUT, CellState.TO_ROLLOUT, CellState.ROLLOUT, CellState.DOWN]
    assert line.rows[1][-1].reason == "lost: silent"
    assert line.capacity.values == [0, 4, 0]


def test_the_clock_may_go_back() -> None:
    script = Script()
    script.start()
    script.quota(0, 3)
    script.say(e.ExecutionGranted(0, 1, 3, 0), -100)
    line = fold(script.events, 4)
    assert line.running.times == sorted(line.running.times)
    assert line.end >= line.start and line.running.values[-1] == 1


def test_nothing_has_happened_yet() -> None:
    line = fold([], 4)
    assert (line.rows, line.attempts, line.start, line.end) == ([], [], 0.0, 0.0)
    assert "Nothing has happened yet" in page("new", [("new", line, {})])


# -- the page --------------------------------------------------------------------------------------------------------
def data_of(text: str) -> dict[str, Any]:
    """The numbers in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def a_run() -> Script:
    script = Script()
    script.start()
    script.batch(1)
    script.batch(2, joined=(1, 2))
    script.end()
    return script


def test_text_is_escaped() -> None:
    evil = "</script><img onerror=alert(1)>&\u2028\"'"
    line = fold(a_run().events, 4)
    line.rows[0].append(Segment(line.end, line.end + 5, CellState.DOWN, evil))
    for runs in ([(evil, line, {evil: evil})], [(evil, line, {evil: evil}), ("other", line, {})]):
        text = page(evil, runs)
        assert "<img" not in text and text.count("</script>") == 2
        assert data_of(text)["runs"][0]["name"] == evil and evil in data_of(text)["runs"][0]["reasons"]


def test_the_page_loads_nothing() -> None:
    line = fold(a_run().events, 4)
    text = page("a run", [("a", line, {"updates": "2"}), ("b", line, {})])
    for word in ("http://", "https://", "src=", "href=", "@import", "url(", "fetch(", "import(", "innerHTML"):
        assert word not in text, word
    assert "default-src 'none'" in text


def test_rows_and_curves_come_back_from_the_page() -> None:
    line = fold(a_run().events, 4)
    run = data_of(page("a", [("a", line, {})]))["runs"][0]
    for row, packed in zip(line.rows, run["rows"], strict=True):
        assert sum(packed[::2]) == run["length"] == round((line.end - line.start) * 10)
        assert {CellState(word % 8) for word in packed[1::2]} == {s.state for s in row if s.end - s.start > 0.1}
        assert {run["reasons"][word // 8] for word in packed[1::2]} == {s.reason for s in row if s.end - s.start > 0.1}
    assert run["curves"]["waterlevel"][1::2] == line.waterlevel.values
    assert [v for _, v in run["published"]] == [1, 2]


def test_thinning_loses_no_extreme() -> None:
    random = Random(1)
    steps = Steps()
    for i in range(100_000):
        steps.add(i + random.random(), random.randrange(1000))
    steps.add(100_001.0, -7)
    steps.add(100_002.0, 5000)
    steps.add(100_003.0, 3)
    thin = thinned(steps, MAX_POINTS)
    assert len(thin.times) <= MAX_POINTS and thin.times == sorted(thin.times)
    assert {-7, 5000} <= set(thin.values)
    assert (thin.times[0], thin.times[-1], thin.values[-1]) == (steps.times[0], steps.times[-1], 3)
    assert thinned(thin, MAX_POINTS) is thin


def big(cells: int, segments: int) -> Timeline:
    """As large a run as anybody simulates, with reasons that all differ."""
    random, line = Random(2), Timeline(16, cells=cells)
    for rank in range(cells):
        t, row = 0.0, []
        for i in range(segments):
            end = t + random.uniform(0.5, 900)
            reason = (
                f"{random.randrange(900)} groups are ready, and the {rank * i} slots left cover the waterlevel of {i}"
            )
            row.append(Segment(t, end, CellState(random.randrange(7)), reason))
            t = end
        line.rows.append(row)
        line.end = max(line.end, t)
    for curve in (line.capacity, line.waterlevel, line.running, line.ready):
        for i in range(200_000):
            curve.add(line.end * i / 200_000, random.randrange(16_000))
    return line


def test_a_page_of_a_thousand_cells_is_small() -> None:
    text = page("big", [("big", big(1000, 100), {})])
    assert len(text) < 2_000_000


@pytest.mark.skipif(not shutil.which("node"), reason="there is no JavaScript interpreter here")
def test_the_script_parses(tmp_path: Path) -> None:
    script = re.search(r"<script>(.*?)</script>", page("a", [("a", fold([], 4), {})]), re.DOTALL)
    assert script
    path = tmp_path / "page.js"
    path.write_text(script[1])
    subprocess.run(["node", "--check", path], check=True)


# -- the command -----------------------------------------------------------------------------------------------------
def test_report_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "my-run", make_config(), a_run().events, None)
    out = tmp_path / "page.html"
    assert main(["report", str(run.path), "--html", str(out)]) == 0
    assert "my-run completed" in capsys.readouterr().out
    data = data_of(out.read_text())
    assert data["runs"][0]["name"] == "my-run" and len(data["runs"][0]["rows"]) == 3
    assert "completed" in out.read_text()


@pytest.mark.parametrize("out", ["", "missing/page.html", "my-run"])
def test_report_refuses_what_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str) -> None:
    run = write_run(tmp_path / "my-run", make_config(), a_run().events, None)
    assert main(["report", str(run.path), "--html", str(tmp_path / out)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("gyre: cannot write ") and said.err.count("\n") == 1


def test_report_writes_the_trace_of_a_run_that_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script()
    script.start()
    script.batch(1)
    script.quota(8, 9, batch=2)
    script.close(8)  # the other execution of its group never ended
    run = write_run(tmp_path / "my-run", make_config(), script.events, None)
    out = tmp_path / "t.jsonl"
    assert main(["report", str(run.path), "--trace", str(out)]) == 0
    assert "my-run unfinished" in capsys.readouterr().out
    loaded = load(out)
    assert (len(loaded.groups), loaded.size) == (4, 2)
    assert not run.trace.exists()
    assert main(["report", str(run.path), "--trace", str(run.trace), "--html", str(tmp_path / "p.html")]) == 0
    assert run.trace.read_text() == out.read_text() and (tmp_path / "p.html").exists()


def test_report_has_no_trace_where_no_group_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script()
    script.start()
    run = write_run(tmp_path / "my-run", make_config(), script.events, None)
    assert main(["report", str(run.path), "--trace", str(tmp_path / "t.jsonl")]) == 2
    assert "there is no trace" in capsys.readouterr().err and not (tmp_path / "t.jsonl").exists()


def test_report_writes_over_nothing_that_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "my-run", make_config(), a_run().events, None)
    before = run.events.read_text()
    for option in ("--html", "--trace"):
        assert main(["report", str(run.path), option, str(run.events)]) == 2
        assert "both name" in capsys.readouterr().err
    both = ["--html", str(tmp_path / "one"), "--trace", str(tmp_path / "one")]
    assert main(["report", str(run.path), *both]) == 2
    assert run.events.read_text() == before and not (tmp_path / "one").exists()
