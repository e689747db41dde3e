"""The live view and the plain lines, from a run directory alone."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from gyre import events as e
from gyre import figures, words
from gyre.errors import UserError
from gyre.live_view import ASCII, UNICODE, Picture, bar, render, sparkline
from gyre.plain import PlainReporter, gap, phases_line
from gyre.progress import DEAD_SECONDS, RunReader, Tail, watch
from gyre.status import RankStatus, RunStatus, decode, decode_rank, encode
from tests.fake_run import METRICS, START, Script, make_config, make_status, starting_status, write_run


def text_of(picture: Picture, width: int = 100, height: int = 30, glyphs=UNICODE) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, no_color=True)
    console.print(render(picture, width, height, glyphs))
    plain = Console(file=io.StringIO(), width=width)
    plain.print(render(picture, width, height, glyphs))
    return plain.file.getvalue().splitlines()  # type: ignore[attr-defined]


def running(**changes) -> Picture:
    status = make_status(START + 130)
    return Picture(make_config(), START + 130, status, rewards=[0.2, 0.5], seconds_left=75, updates_done=2, **changes)


# -- status ----------------------------------------------------------------------------------------------------------
def test_status_round_trip_and_unknown_keys() -> None:
    status = make_status(START)
    assert decode(encode(status)) == status
    assert decode(encode(status).replace('"name"', '"new_key":1,"name"')) == status
    assert decode("{}") == RunStatus()
    assert decode_rank(encode(status.ranks[0])) == status.ranks[0]
    for text in ("[]", "nonsense", '{"ranks":[{"rank":1}]}'):
        with pytest.raises(ValueError):
            decode(text)


# -- live view -------------------------------------------------------------------------------------------------------
def test_the_view_says_all_that_matters() -> None:
    text = "\n".join(text_of(running(events=["10:00:00  policy 2 published"])))
    for word in (
        "update 3 of 6", "policy 2", "about 1m 15s left", "5 of 4 slots", "3 running, 2 queued", "1 ready, 2 taken",
        "2 finished, 4 claimed, 5 published", "0.750", "76 tokens/s", "would not cover w 5", "0 core", "TRAINING",
        "update 3: micro-step 3", "RELEASING", "50%", "3/4", "(start 2)", "3 host", "policy 2 published",
    ):  # fmt: skip
        assert word in text, word


@pytest.mark.parametrize("width", [40, 60, 72, 100, 200])
@pytest.mark.parametrize("height", [1, 3, 8, 12, 24, 60])
@pytest.mark.parametrize("cells", [3, 1000])
def test_every_frame_fits_its_terminal(width: int, height: int, cells: int) -> None:
    pictures = [running(events=["e" * 150] * 20, figures=METRICS), Picture(make_config(), START, None, "waiting " * 10)]
    pictures.append(Picture(make_config(), START, starting_status(START)))
    if cells > 3:
        pictures[0].status.ranks = [  # type: ignore[union-attr]
            RankStatus(i, "satellite", state="TRAINING" if i % 9 else "ROLLOUT", slots=4, live=2) for i in range(cells)
        ]
    for picture in pictures:
        for glyphs in (UNICODE, ASCII):
            lines = text_of(picture, width, height, glyphs)
            assert len(lines) <= max(height, 2 if picture.notice else 1) + 4 * bool(picture.notice)
            assert all(len(line.rstrip()) <= width for line in lines)
            if glyphs is ASCII:
                assert "\n".join(lines).replace("…", "").isascii()


def test_the_last_update_has_a_line_where_anything_is_known_of_it() -> None:
    text = "\n".join(text_of(running(figures=METRICS)))
    for figure in ("loss -0.117", "entropy 0.35", "kl 0.010", "clipped 2.1%", "norm 2.44", "stale 0.14 (1)", "96%"):
        assert figure in text
    assert "last update" not in "\n".join(text_of(running()))


def test_ranks_without_room_are_counted_and_trouble_is_shown() -> None:
    picture = running()
    ranks = [RankStatus(i, "satellite", state="ROLLOUT", slots=4, live=1) for i in range(200)]
    ranks[150].state = "FAILED"
    picture.status.ranks = ranks  # type: ignore[union-attr]
    text = "\n".join(text_of(picture, 100, 20))
    assert "150" in text and "FAILED" in text
    assert "ROLLOUT" in text and "+ 19" in text


def test_bars_and_curves() -> None:
    assert bar([(1, "#", "")], 1000, 10).plain == "#░░░░░░░░░"
    assert bar([(5, "#", ""), (5, "+", "")], 10, 10).plain == "#####+++++"
    assert bar([(50, "#", "")], 10, 4).plain == "####"
    assert bar([], 0, 4, ASCII).plain == "...."
    assert sparkline([0.0, None, 1.0], 10) == "▁█"
    assert sparkline([-5.0, 5.0, 0.0], 2) == "█▁"
    assert sparkline([], 5) == ""


# -- reading a directory ---------------------------------------------------------------------------------------------
def test_tail_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text("one\ntw")
    assert tail.read() == ["one"]
    with open(path, "a") as file:
        file.write("o\nthree\n")
    assert tail.read() == ["two", "three"]
    path.write_text("one\n")
    assert tail.read() == []


def test_a_reader_follows_a_run_from_before_its_start(tmp_path: Path) -> None:
    reader = RunReader(tmp_path / "r")
    assert reader.poll(START, 0) == [] and reader.picture(START, 0) is None
    run = write_run(tmp_path / "r", make_config(), [], None)
    reader.poll(START, 1)
    assert "not started" in reader.picture(START, 1).notice  # type: ignore[union-attr]
    script = Script()
    script.start()
    script.batch(1, (0.0, 0.5))
    write_run(run.path, make_config(), script.events, make_status(script.t))
    events = reader.poll(script.t, 2)
    assert len(events) == len(script.events)
    picture = reader.picture(script.t, 2)
    assert picture is not None and picture.notice == "" and picture.rewards == [0.25] and picture.updates_done == 1
    assert any(
        "update 1 of 6: reward 0.250, entropy 0.35, kl 0.010, norm 2.4; cells 0, 1" in line for line in picture.events
    )
    run.status.write_text("half a sta")
    reader.poll(script.t, 3)
    assert reader.status is not None


def test_a_dead_run_is_said_to_be_dead(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", make_config(), [], make_status(START))
    reader = RunReader(run.path)
    late = START + 3600
    reader.poll(late, 0)
    assert reader.silent_seconds(late, 0) is None  # clocks differ between machines: look again first
    reader.poll(late + 4, 4)
    assert reader.silent_seconds(late + 4, 4) == pytest.approx(3604)
    assert "No sign of life for 1h 00m" in reader.picture(late + 4, 4).notice  # type: ignore[union-attr]
    run.status.write_text(encode(make_status(START + 1)))  # alive after all, with a clock an hour behind
    reader.poll(late + 5, 5)
    assert reader.silent_seconds(late + 9, 9) is None
    assert reader.silent_seconds(late + 9, 6 + DEAD_SECONDS) is not None
    run.status.write_text(encode(make_status(START + 2, "completed")))
    reader.poll(late + 99, 99)
    assert reader.silent_seconds(late + 999, 999) is None


def finished_run(path: Path):
    script = Script(time.time() - 200)
    script.start()
    for update in range(1, 7):
        script.batch(update, (0.0, update / 6))
    script.end()
    return write_run(path, make_config(), script.events, make_status(script.t, "completed"))


@pytest.mark.parametrize("terminal", [True, False])
def test_watching_a_finished_run_prints_its_summary(tmp_path: Path, terminal: bool) -> None:
    run = finished_run(tmp_path / "r")
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal)
    assert watch(run.path, console=console) == "completed"
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "r completed" in text and "6 updates" in text


def test_watch_ends_when_told_and_refuses_what_is_no_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", make_config(), [], None)
    stop = threading.Event()
    threading.Timer(0.4, stop.set).start()
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    assert watch(run.path, stop, console) == "stopped"
    with pytest.raises(UserError):
        watch(tmp_path / "nothing", stop, console)


def test_a_resume_is_not_taken_for_the_attempt_before(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "r")
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    result: list[str] = []
    thread = threading.Thread(target=lambda: result.append(watch(run.path, None, console, after=1)))
    thread.start()
    time.sleep(0.6)
    assert not result
    temporary = run.path / "new"
    temporary.write_text(encode(make_status(time.time(), "failed", attempt=2)))
    os.replace(temporary, run.status)
    thread.join(5)
    assert result == ["failed"]


def test_lines_of_a_new_attempt_do_not_tell_the_one_before_again(tmp_path: Path) -> None:
    script = Script()
    script.start()
    script.end("failed")
    script.start()
    script.end()
    run = write_run(tmp_path / "r", make_config(), script.events, make_status(script.t, "completed", attempt=2))
    console = Console(file=io.StringIO(), width=100)
    assert watch(run.path, console=console, plain=True, after=1) == "completed"
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "attempt 2 starts" in text and "attempt 1 starts" not in text and "attempt failed" not in text


# -- plain lines -----------------------------------------------------------------------------------------------------
class Played:
    """Plays events to a reporter on their own clock, with a status each second, and keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now = START
        self.reporter = PlainReporter(make_config(), self.lines.append, lambda: self.now)

    def play(self, events: list[dict], status: Callable[[float], RunStatus] = make_status) -> str:
        for event in events:
            while self.now + 1 <= event["t"]:
                self.now += 1
                self.reporter.on_status(status(self.now))
            self.reporter.on_event(event)
        self.reporter.flush()
        return "\n".join(self.lines)


def test_plain_lines_tell_a_run() -> None:
    script = Script()
    script.start()
    script.batch(1, (0.0, 0.5))
    script.batch(2, (0.5, 1.0))
    script.say(e.RankLost(2, 1, "silent for 30 s"))
    script.end()
    text = Played().play(script.events)
    for word in (
        "attempt 1 starts", "ready: cell 0", "ready: host 3", "batch 1 dispatches 8 executions", "now training: cell 0",
        "update 1 of 6: reward 0.250, entropy 0.35, kl 0.010, norm 2.4; cells 0, 1, 10s", "now in rollout: cell",
        "policy 2 published", "cell 2 lost: silent for 30 s", "attempt completed", "5 executions outstanding, 4 slots",
    ):  # fmt: skip
        assert word in text, word
    assert all(line[:4].isdigit() and line[19:21] == "  " for line in text.splitlines())


def test_a_line_of_an_update_fits_beside_its_time() -> None:
    metrics = {**METRICS, "entropy": 10.5, "kl": 1.2e-5, "grad_norm": 0.00123}
    event = {"update": 1234, "seconds": 5400.0}
    for joined in ([], [1], [1, 2, 3], [1, 3, 5, 7], list(range(1, 128))):
        line = words.update_line(make_config(train__updates=2000), event, 0.5, joined, figures.short(metrics))
        assert "reward 0.500, entropy 10.50, kl 1.2e-05, norm 0.0012; " in line and line.endswith(", 1h 30m")
        assert len(line) + len("2026-03-02 14:07:41  ") <= 114
    nothing = words.update_line(make_config(), event, 0.5, [], figures.short({"tokens": 0.0, "grad_norm": 0.0}))
    assert nothing == "update 1234 of 6: reward 0.500, no token to train on; cell 0, 1h 30m"
    bare = words.update_line(make_config(), {"update": 1, "seconds": 3.0}, None, [])
    assert bare == "update 1 of 6: cell 0, 3.0s"
    usual = words.update_line(make_config(), {"update": 3, "seconds": 14.0}, 0.9, [1, 2], figures.short(METRICS))
    assert len(usual) + len("2026-03-02 14:07:41  ") <= 100


def test_a_refused_sample_is_told_with_the_setting_that_refuses_it() -> None:
    script = Script()
    script.start()
    script.say(e.SampleRefused(12, 96, 9412, 8192))
    script.say(e.SampleRefused(12, 97, 8200, 8192))
    line = "group 12: a sample of 9,412 tokens is over the limit of 8,192 (train.sample_limit) and is not trained on"
    assert f"{line} (and 1 more like it)" in Played().play(script.events)


def test_an_update_without_a_step_is_said_at_once() -> None:
    script = Script()
    script.start()
    script.update(1, [0], metrics={**METRICS, "grad_norm": float("nan"), "skipped": 1.0})
    script.say(e.StepSkipped(1))
    lines = [line[21:] for line in Played().play(script.events).splitlines()]
    said = lines.index("update 1 took no step: its gradient is not finite")
    assert lines[said - 1].startswith("update 1 of 6: ") and "norm nan" in lines[said - 1]


def test_a_day_stays_readable() -> None:
    script = Script()
    script.start()
    update = 0
    while script.t < START + 24 * 3600:
        update += 1
        script.batch(update)
        script.say(e.TryFailed(update, 1, "engine gone"))
    played = Played()
    played.play(script.events)
    assert update > 1500
    assert len(played.lines) < 5000
    last_hour = [line for line in played.lines[-600:] if "update" in line]
    assert any("updates" in line or "update" in line for line in last_hour)
    assert gap(0) < gap(3000) < gap(10_000)


def test_many_of_a_kind_become_one_line() -> None:
    script = Script()
    script.start()
    for n in range(50):
        script.say(e.ExecutionClosed(n, 1, "failed", None, False, 0, 1.0, reason="exit code 1"))
    for rank in range(1, 3):
        for _ in range(5):
            script.say(e.RankLost(rank, 1, "silent"))
    text = Played().play(script.events)
    assert "execution 0 failed: exit code 1 (and 49 more like it)" in text
    assert text.count("silent") <= 5


def test_starting_names_phases_and_ranks() -> None:
    line = phases_line(make_config(), starting_status(START))
    assert line == (
        "starting: model: converting SmolLM2 to safetensors 25%; cell 0: trainer: loading the model; "
        "cells 1, 2: engine: loading weights 40%"
    )
    script = Script()
    script.start()
    text = Played().play(script.events, starting_status)
    assert text.count("starting: model") == 1
