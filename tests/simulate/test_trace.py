"""Traces: what is read, what is refused, and what a run leaves."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre import events as e
from gyre.coordinator import Coordinator
from gyre.errors import UserError
from gyre.run_dir import RunDir
from gyre.simulate import trace
from gyre.simulate.trace import Entry, Trace, parse, shuffled
from tests.fake_run import Script, make_config, write_run

ROOT = Path(__file__).resolve().parents[2]
SHARED = sorted((ROOT / "benchmarks/traces").glob("*.jsonl"))


def text(sizes: dict[int | str, int], rollout_s: float = 10.0) -> list[str]:
    return [json.dumps({"group": g, "rollout_s": rollout_s + i}) for g, size in sizes.items() for i in range(size)]


def sizes(loaded: Trace) -> tuple[int, int]:
    return len(loaded.groups), loaded.size


# -- reading ---------------------------------------------------------------------------------------------------------
seconds = st.floats(0, 1e9) | st.integers(0, 10**9)
entries = st.builds(
    Entry,
    rollout_s=seconds.map(float),
    train_s=st.none() | seconds.map(float),
    tokens=st.none() | st.integers(0, 10**12),
    outcome=st.sampled_from(["completed", "failed", "timed_out"]) | st.text(max_size=5),
)


def line(label: int | str, entry: Entry) -> str:
    data = {"group": label, "rollout_s": entry.rollout_s, "resolved": True, "tokens": entry.tokens}
    if entry.train_s is not None:
        data["train_s"] = entry.train_s
    if entry.outcome != "completed":
        data["outcome"] = entry.outcome
    return json.dumps(data, ensure_ascii=False)


@st.composite
def workloads(draw: st.DrawFn) -> dict[int | str, list[Entry]]:
    size = draw(st.integers(2, 6))
    labels = draw(st.lists(st.integers() | st.text(max_size=4), min_size=1, max_size=5, unique=True))
    return {label: draw(st.lists(entries, min_size=size, max_size=size)) for label in labels}


@given(workloads(), st.randoms(use_true_random=False))
def test_what_is_written_is_read(groups: dict[int | str, list[Entry]], chance: random.Random) -> None:
    lines = [line(label, entry) + "\n" for label, group in groups.items() for entry in group]
    loaded = parse(lines, "t")
    assert loaded.groups == tuple(map(tuple, groups.values()))
    everything = [entry for group in groups.values() for entry in group]
    assert loaded.executions == len(everything)
    assert loaded.mean_rollout_s == pytest.approx(sum(entry.rollout_s for entry in everything) / len(everything))
    chance.shuffle(lines)  # groups need not stand together
    mixed = parse([part for one in lines for part in (one, " \n")], "t")
    assert Counter(frozenset(Counter(group).items()) for group in mixed.groups) == Counter(
        frozenset(Counter(group).items()) for group in loaded.groups
    )


@given(st.lists(st.integers(1, 7), min_size=1, max_size=12))
def test_groups_come_out_in_one_size(counts: list[int]) -> None:
    lines = text(dict(enumerate(counts)))
    if max(counts) == 1:
        with pytest.raises(UserError, match="only groups of one"):
            parse(lines, "t")
        return
    kept = [count for count in counts if count >= min(4, max(counts))]
    loaded = parse(lines, "t")
    assert sizes(loaded) == (len(kept), min(kept))
    assert all([entry.rollout_s for entry in group] == [10.0 + i for i in range(min(kept))] for group in loaded.groups)


def test_labels_of_two_types_are_two_groups() -> None:
    assert sizes(parse(text({1: 2, "1": 2}), "t")) == (2, 2)


def test_a_duration_of_nothing_is_fine() -> None:
    assert parse(['{"group": 0, "rollout_s": 0, "train_s": null, "tokens": null}'] * 2, "t").mean_rollout_s == 0


def test_a_file_with_a_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(text({"a": 4})).encode())
    assert sizes(trace.load(path)) == (1, 4)


@pytest.mark.parametrize(
    "name, groups, size", [("droid_gpt-5", 80, 5), ("goose_claude-4-opus", 80, 5), ("mini_claude-4-sonnet", 77, 4)]
)
def test_the_traces_that_come_along(name: str, groups: int, size: int) -> None:
    (path,) = (path for path in SHARED if name in path.name)
    loaded = trace.load(path)
    assert sizes(loaded) == (groups, size)
    assert 200 < loaded.mean_rollout_s < 500


# -- refusals --------------------------------------------------------------------------------------------------------
GOOD = '{"group": 0, "rollout_s": 1}'
REFUSED = {
    "{": "line 2 is not JSON",
    "group 0 took 12 s": "line 2 is not JSON",
    '{"group": 0, "rollout_s": 1} {}': "line 2 is not JSON",
    "[" * 100_000: "line 2 is not JSON",
    '{"group": 0, "rollout_s": ' + "9" * 5000 + "}": "line 2 is not JSON",
    "[0, 1]": "line 2 is not a JSON object",
    "null": "line 2 is not a JSON object",
    '{"rollout_s": 1}': "line 2 has no `group`",
    '{"group": 0}': "line 2 has no `rollout_s`",
    '{"group": null, "rollout_s": 1}': "`group` is null",
    '{"group": true, "rollout_s": 1}': "`group` is true",
    '{"group": 1.0, "rollout_s": 1}': "`group` is 1.0",
    '{"group": [1], "rollout_s": 1}': r"`group` is \[1\]",
    '{"group": 0, "rollout_s": true}': "`rollout_s` is true; it must be a number",
    '{"group": 0, "rollout_s": null}': "`rollout_s` is null; it must be a number",
    '{"group": 0, "rollout_s": "12"}': '`rollout_s` is "12"; it must be a number',
    '{"group": 0, "rollout_s": -0.5}': r"`rollout_s` is negative \(-0.5\)",
    '{"group": 0, "rollout_s": -1' + "0" * 400 + "}": "`rollout_s` is negative",
    '{"group": 0, "rollout_s": NaN}': "`rollout_s` is NaN; it must be a finite",
    '{"group": 0, "rollout_s": Infinity}': "`rollout_s` is Infinity; it must be a finite",
    '{"group": 0, "rollout_s": -Infinity}': "`rollout_s` is -Infinity; it must be a finite",
    '{"group": 0, "rollout_s": 1e999}': "`rollout_s` is Infinity; it must be a finite",
    '{"group": 0, "rollout_s": 1' + "0" * 400 + "}": "`rollout_s` is more than 1e[+]09 seconds",
    '{"group": 0, "rollout_s": 1772460000000}': "`rollout_s` is more than 1e[+]09 seconds",
    '{"group": 0, "rollout_s": 1, "train_s": -1}': r"`train_s` is negative \(-1\)",
    '{"group": 0, "rollout_s": 1, "train_s": NaN}': "`train_s` is NaN; it must be a finite",
    '{"group": 0, "rollout_s": 1, "train_s": false}': "`train_s` is false; it must be a number",
    '{"group": 0, "rollout_s": 1, "tokens": 1.5}': "`tokens` is 1.5",
    '{"group": 0, "rollout_s": 1, "tokens": -1}': "`tokens` is -1",
    '{"group": 0, "rollout_s": 1, "outcome": 1}': "`outcome` is 1",
}


@pytest.mark.parametrize("bad, message", REFUSED.items(), ids=lambda text: text[:50])
def test_a_line_that_is_no_execution_is_named(bad: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{GOOD}\n{bad}\n{GOOD}\n")
    with pytest.raises(UserError, match=message) as refused:
        trace.load(path)
    assert str(refused.value).startswith(f"{path}, line 2")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize("content", ["", "\n", "  \n\t\n\n"])
def test_an_empty_trace_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(UserError, match="t.jsonl is empty; write one execution a line"):
        trace.load(tmp_path / "t.jsonl")


def test_groups_of_one_are_refused() -> None:
    with pytest.raises(UserError, match="the trace t has only groups of one; give all executions of a task the same"):
        parse(text(dict.fromkeys(range(9), 1)), "t")


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the trace .*nothing: No such file"):
        trace.load(tmp_path / "nothing")
    with pytest.raises(UserError, match="cannot read the trace .*: Is a directory"):
        trace.load(tmp_path)
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)))
    with pytest.raises(UserError, match="binary is not UTF-8 text"):
        trace.load(tmp_path / "binary")
    (tmp_path / "zeros").write_bytes(bytes(1000))
    with pytest.raises(UserError, match="line 1 is not JSON"):
        trace.load(tmp_path / "zeros")


# -- orders ----------------------------------------------------------------------------------------------------------
@given(st.integers(1, 6), st.integers(0, 30), st.integers(0, 10))
def test_rounds_over_all_groups_in_fresh_orders(count: int, wanted: int, seed: int) -> None:
    known = parse([json.dumps({"group": g, "rollout_s": g}) for g in range(count) for _ in range(2)], "t")
    order = shuffled(known, wanted, random.Random(seed))
    assert order == shuffled(known, wanted, random.Random(seed))
    assert len(order) == wanted
    for begin in range(0, wanted - count + 1, count):
        assert set(order[begin : begin + count]) == set(known.groups)
    assert len(set(order[wanted // count * count :])) == wanted % count


def test_rounds_differ() -> None:
    known = parse(text({g: 4 for g in range(1)}) + [json.dumps({"group": 9, "rollout_s": 1})] * 4, "t")
    order = shuffled(known, 40, random.Random(0))
    assert len({tuple(g[0].rollout_s for g in order[i : i + 2]) for i in range(0, 40, 2)}) == 2


# -- a run's own -----------------------------------------------------------------------------------------------------
class Life(Script):
    """A run whose executions take known times."""

    def held(self, run: RunDir, n: int, seconds: float, try_number: int = 1, **more: object) -> None:
        run.execution(n).mkdir(parents=True, exist_ok=True)
        outcome = {"n": n, "try": try_number, "outcome": "completed", "held_seconds": seconds, "seconds": 7.0, **more}
        run.outcome(n).write_text(json.dumps(outcome))

    def grant(self, n: int, try_number: int = 1) -> None:
        self.say(e.ExecutionGranted(n, try_number, 3, 0))

    def closed(self, n: int, after: float, try_number: int = 1, tokens: int = 40, outcome: str = "completed") -> None:
        usable = outcome == "completed"
        self.say(e.ExecutionClosed(n, try_number, outcome, 1.0 if usable else None, usable, 0, 1.0, tokens), after)

    def pair(self, first: int, tokens: tuple[int, int] = (40, 40)) -> None:
        for n, count in zip((first, first + 1), tokens, strict=True):
            self.grant(n)
            self.closed(n, 5, tokens=count)

    def trained(self, update: int, groups: list[int], **measured: float) -> None:
        """An update, and what it measured."""
        self.say(e.UpdateOpened(update))
        for group in groups:
            self.say(e.GroupTaken(group, update))
        metrics = {"seconds_compute": 1.0, "seconds_wait": 50.0, **measured}
        self.say(e.UpdateDone(update, 2, {"0": 1, "1": 3}, 99.0, metrics))

    def run(self, path: Path) -> RunDir:
        return write_run(path, make_config(root=str(path)), self.events, None)


@pytest.fixture
def life() -> Life:
    script = Life()
    script.start()
    return script


def exported(life: Life, path: Path) -> list[dict[str, object]]:
    """The trace of a run; reading back what it leaves gives the same groups."""
    run = life.run(path)
    lines = trace.export(run)
    if lines:
        assert trace.write(run) == run.path / "trace.jsonl"
        loaded = trace.load(run.trace)
        by_group: dict[object, list[Entry]] = {}
        for one in lines:
            entry = Entry(one["rollout_s"], one.get("train_s"), one["tokens"], one["outcome"])
            by_group.setdefault(one["group"], []).append(entry)
        assert loaded.groups == tuple(map(tuple, by_group.values()))
    return lines


def test_slot_time_is_from_grant_to_close_without_holds(life: Life, tmp_path: Path) -> None:
    life.grant(0)
    life.grant(1)
    life.closed(1, 30, tokens=11, outcome="timed_out")
    life.closed(0, 12.5)
    life.held(RunDir(tmp_path / "r"), 0, 2.25)
    assert exported(life, tmp_path / "r") == [
        {"group": 0, "rollout_s": 40.25, "tokens": 40, "outcome": "completed"},
        {"group": 0, "rollout_s": 30.0, "tokens": 11, "outcome": "timed_out"},
    ]


def test_the_last_try_counts_and_the_first_close(life: Life, tmp_path: Path) -> None:
    life.grant(0)
    life.grant(1)
    life.say(e.TryFailed(0, 1, "its host died"), 100)
    life.grant(0, 2)
    life.closed(0, 20, try_number=2)
    life.closed(0, 20, try_number=2)
    life.say(e.TryFailed(1, 1, "its host died, and no try is left"), 1)
    life.closed(1, 50, outcome="failed")
    assert [one["rollout_s"] for one in exported(life, tmp_path / "r")] == [20.0, 141.0]


def test_only_whole_groups_are_in_it(life: Life, tmp_path: Path) -> None:
    life.grant(0)
    life.pair(2)
    life.closed(0, 1)  # group 0 has one that is open
    life.pair(4)
    life.grant(6)
    life.closed(6, 1, outcome="cancelled")
    life.grant(7)
    life.closed(7, 1)
    life.closed(8, 1, try_number=0, outcome="failed")  # never granted
    life.grant(9)
    life.closed(9, 1)
    assert [one["group"] for one in exported(life, tmp_path / "r")] == [1, 1, 2, 2]


def test_news_that_died_with_rank_0(life: Life, tmp_path: Path) -> None:
    life.grant(0)
    life.grant(1)
    life.closed(1, 5)
    life.held(RunDir(tmp_path / "r"), 0, 2.0, tokens=9)
    life.start()
    assert [(one["rollout_s"], one["tokens"]) for one in exported(life, tmp_path / "r")] == [(5.0, 9), (5.0, 40)]


def test_a_try_whose_number_comes_again_in_a_later_attempt(life: Life, tmp_path: Path) -> None:
    life.grant(0)
    life.say(e.TryFailed(0, 1, "its proxy died"), 3)
    life.start()
    life.grant(0)
    life.closed(0, 8)
    life.grant(1)
    life.closed(1, 8)
    assert [one["rollout_s"] for one in exported(life, tmp_path / "r")] == [8.0, 8.0]


def test_training_is_shared_by_tokens_of_what_could_be_trained_on(life: Life, tmp_path: Path) -> None:
    life.pair(0, (10, 30))
    life.pair(2, (60, 0))
    life.grant(4)
    life.closed(4, 1, tokens=100)
    life.grant(5)
    life.closed(5, 1, tokens=500, outcome="failed")
    life.trained(1, [0, 1], cell_seconds=50.0)
    life.trained(2, [2], cell_seconds=14.0)
    lines = exported(life, tmp_path / "r")
    assert [one["train_s"] for one in lines] == [5.0, 15.0, 30.0, 0.0, 14.0, 0.0]


def test_what_no_update_took_has_no_training(life: Life, tmp_path: Path) -> None:
    life.pair(0)
    life.pair(2)
    life.trained(1, [0], cell_seconds=8.0)
    life.say(e.UpdateOpened(2))
    life.say(e.GroupTaken(1, 2))  # it died in update 2
    assert [one.get("train_s") for one in exported(life, tmp_path / "r")] == [4.0, 4.0, None, None]


def test_an_update_that_is_made_again_counts_as_it_was_the_last_time(life: Life, tmp_path: Path) -> None:
    life.pair(0)
    life.trained(1, [0], cell_seconds=16.0)
    life.start()
    life.trained(1, [0], cell_seconds=6.0)
    assert [one["train_s"] for one in exported(life, tmp_path / "r")] == [3.0, 3.0]


def test_members_that_sampled_nothing_share_alike(life: Life, tmp_path: Path) -> None:
    life.pair(0, (0, 0))
    life.trained(1, [0], cell_seconds=8.0)
    assert [one["train_s"] for one in exported(life, tmp_path / "r")] == [4.0, 4.0]


def test_an_update_that_was_suspended_counts_like_any_other(life: Life, tmp_path: Path) -> None:
    life.pair(0)
    life.say(e.UpdateOpened(1))
    life.trained(1, [0], cell_seconds=24.0)
    assert [one["train_s"] for one in exported(life, tmp_path / "r")] == [12.0, 12.0]


def test_without_a_measure_there_is_no_training(life: Life, tmp_path: Path) -> None:
    life.pair(0)
    life.trained(1, [0])
    assert "train_s" not in exported(life, tmp_path / "r")[0]


def test_a_whole_made_up_run(tmp_path: Path) -> None:
    life = Life()
    life.start()
    for update in (1, 2):
        life.batch(update)
    life.end()
    lines = exported(life, tmp_path / "r")
    assert [one["group"] for one in lines] == [g for g in range(8) for _ in range(2)]
    assert {one["rollout_s"] for one in lines} == {1.0}


def test_a_run_without_a_whole_group_leaves_no_trace(life: Life, tmp_path: Path) -> None:
    run = life.run(tmp_path / "r")
    assert trace.export(run) == [] and trace.write(run) is None and not run.trace.exists()


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config.yaml"):
        trace.export(RunDir(tmp_path))


def test_the_end_of_an_attempt_writes_it_or_says_why_not(
    life: Life, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life.pair(0)
    run = life.run(tmp_path / "r")
    coordinator = Coordinator.__new__(Coordinator)
    coordinator._context = SimpleNamespace(run_dir=run)
    coordinator._write_trace()
    before = run.trace.read_text()
    assert before.count("\n") == 2
    run.events.write_text("no events\n")
    with caplog.at_level(logging.WARNING):
        coordinator._write_trace()
    assert "cannot write the trace of the run: JSONDecodeError" in caplog.text
    assert run.trace.read_text() == before
