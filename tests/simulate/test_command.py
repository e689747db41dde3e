"""`launch.py simulate`: what it writes, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gyre import cli
from gyre.simulate import command

ROOT = Path(__file__).resolve().parents[2]
POLICIES = ["elastic", "plain", "colocate", "async", "async-stream"]
FIGURES = {
    "makespan_s",
    "bound_s",
    "of_bound",
    "ideal_s",
    "of_ideal",
    "updates",
    "moves",
    "staleness_max",
    "staleness_mean",
    "busy_fraction",
}


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [{"group": g, "rollout_s": 20 + 7 * ((5 * g + m) % 11)} for g in range(8) for m in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def arguments(trace: Path, *more: str) -> list[str]:
    given = (
        f"--trace {trace} --cells 4 --slots 2 --batch-groups 4 --train-ratio 0.5 --updates 3 --repeats 2 --workers 1"
    )
    return ["simulate", *given.split(), *more]


def simulate(trace: Path, out: Path, *more: str) -> dict:
    assert cli.main(arguments(trace, "--json", str(out), *more)) == 0
    return json.loads(out.read_text())


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


# -- what it writes --------------------------------------------------------------------------------------------------
def test_every_policy_has_all_figures(trace, tmp_path, capsys):
    report = simulate(trace, tmp_path / "out.json", "--policy", ",".join(POLICIES))
    assert list(report["policies"]) == POLICIES
    for name, figures in report["policies"].items():
        assert figures.keys() >= FIGURES
        assert all(math.isfinite(figures[key]) for key in FIGURES), name
        assert figures["updates"] == 3
        assert 0 < figures["of_bound"] <= 1 and figures["bound_s"] <= figures["ideal_s"]
        assert figures["of_ideal"] == pytest.approx(figures["ideal_s"] / figures["makespan_s"])
        assert 0 < figures["busy_fraction"] <= 1
        assert 0 <= figures["staleness_mean"] <= figures["staleness_max"] <= 3
    shared = [(figures["bound_s"], figures["ideal_s"]) for figures in report["policies"].values()]
    assert len(set(shared)) == 1, "not all policies were given the same groups"
    words = plain(capsys.readouterr().out)
    assert all(name in words for name in (*POLICIES, "makespan", "ideal", "stale"))


def test_the_work_is_what_the_ratio_says(trace, tmp_path):
    figures = simulate(trace, tmp_path / "out.json", "--policy", "elastic", "--in-order", "--updates", "2")["policies"]
    durations = [json.loads(line)["rollout_s"] for line in trace.read_text().splitlines()]
    mean = sum(durations) / len(durations)
    train_s = 8 * 0.5 * (mean * 4 / 2)  # 8 groups of 4 on slots 2: one round over the trace
    assert figures["elastic"]["bound_s"] == pytest.approx((sum(durations) / 2 + train_s) / 4)


def test_the_policies_that_are_asked_for_in_that_order(trace, tmp_path):
    assert list(simulate(trace, tmp_path / "a", "--policy", "colocate, elastic,colocate")["policies"]) == [
        "colocate",
        "elastic",
    ]
    assert list(simulate(trace, tmp_path / "b")["policies"]) == ["elastic", "colocate", "async", "async-stream"]


def test_a_split_says_which_one_it_is_and_what_the_others_take(trace, tmp_path):
    policies = simulate(trace, tmp_path / "out.json")["policies"]
    for name in ("async", "async-stream"):
        splits = policies[name]["splits"]
        assert splits.keys() == {"1", "2", "3"}
        assert policies[name]["makespan_s"] == min(splits.values()) == splits[str(policies[name]["rollout_cells"])]
        assert policies[name]["moves"] == 4 - policies[name]["rollout_cells"]
    assert "splits" not in policies["elastic"]


def test_a_seed_is_a_seed(trace, tmp_path):
    chance = ("--failed", "0.02", "--try-failed", "0.05", "--cell-failures", "1", "--policy", "elastic,async")
    for seed, out in ((1, "a"), (1, "b"), (2, "c")):
        simulate(trace, tmp_path / out, "--seed", str(seed), *chance)
    simulate(trace, tmp_path / "d", "--seed", "1", "--workers", "2", *chance)
    first, again, other, parallel = ((tmp_path / out).read_text() for out in "abcd")
    assert first == again == parallel != other


def test_the_page_is_one_file_with_a_run_for_each_policy(trace, tmp_path):
    out = tmp_path / "place" / "page.html"
    out.parent.mkdir()
    assert cli.main(arguments(trace, "--html", str(out), "--policy", "elastic,async")) == 0
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]
    page = out.read_text()
    assert "<html" in page and not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert [re.sub(r"\d", "?", run["name"]) for run in data["runs"]] == ["elastic", "async (R=?)"]


def test_training_work_comes_from_the_trace_where_no_ratio_is_given(tmp_path):
    path = tmp_path / "trace.jsonl"
    line = '{"group": %d, "rollout_s": 10, "train_s": 2}\n'
    path.write_text("".join(line % group for group in (0, 0, 1, 1)))
    given = f"simulate --trace {path} --cells 1 --slots 2 --batch-groups 2 --updates 1 --repeats 1 --switch 0,0"
    given += f" --lookahead 0 --policy colocate --json {tmp_path / 'out.json'}"
    assert cli.main(given.split()) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["policies"]["colocate"]["makespan_s"] == 20 + 8


def test_what_is_not_trained_is_said(trace, tmp_path, capsys):
    """Runs in which hardly anything is usable end early, and what they took is no figure to compare."""
    out = tmp_path / "page.html"
    report = simulate(trace, tmp_path / "out.json", "--failed", "0.97", "--policy", "elastic,async", "--html", str(out))
    said = capsys.readouterr()
    for name, figures in report["policies"].items():
        assert not figures["completed"] and figures["groups"] < 12
        assert figures["of_ideal"] is figures["of_bound"] is None
        assert re.search(rf"^gyre: {name}.* of 2 repeats trained less than asked", said.err, re.MULTILINE)
    assert "/12" in plain(said.out) and "…" not in said.out and "not complete" in out.read_text()
    report = simulate(trace, tmp_path / "out.json", "--policy", "elastic")
    assert report["policies"]["elastic"]["completed"] and report["policies"]["elastic"]["groups"] == 12
    assert capsys.readouterr().err == ""


# -- what it refuses -------------------------------------------------------------------------------------------------
def refused(given: list[str], capsys) -> str:
    """The line that says why; the work must not have begun."""
    try:
        code = cli.main(given)
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr()
    assert code == 2 and said.out == ""
    assert said.err.startswith("gyre: ") and said.err.endswith("\n") and said.err.count("\n") == 1
    assert "internal" not in said.err and "Traceback" not in said.err
    return said.err


@pytest.fixture
def no_work(monkeypatch):
    monkeypatch.setattr(command, "compared", lambda *_: pytest.fail("the work has begun"))


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ("hello\n", "line 1 is not JSON"),
        ('{"group": 0, "rollout_s": 1}\n{"group": 0\n', "line 2 is not JSON"),
        ("[1]\n", "not a JSON object"),
        ('{"group": 0}\n', "rollout_s"),
        ('{"rollout_s": 1}\n', "group"),
        ('{"group": 0, "rollout_s": -1}\n', "negative"),
        ('{"group": 0, "rollout_s": NaN}\n', "finite"),
        ('{"group": 0, "rollout_s": Infinity}\n', "finite"),
        ('{"group": 0, "rollout_s": 1e999}\n', "finite"),
        ('{"group": 0, "rollout_s": "1"}\n', "number"),
        ('{"group": 0, "rollout_s": 1}\n{"group": 1, "rollout_s": 1}\n', "groups of one"),
    ],
)
def test_traces_that_are_none(text, why, tmp_path, capsys, no_work):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    assert why in refused(arguments(path), capsys)


def test_a_trace_that_is_not_there_or_no_text(tmp_path, capsys, no_work):
    assert "cannot read" in refused(arguments(tmp_path / "nothing"), capsys)
    assert "cannot read" in refused(arguments(tmp_path), capsys)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refused(arguments(tmp_path / "binary"), capsys)


@pytest.mark.parametrize(
    "option, value, why",
    [
        ("--cells", "0", "--cells"),
        ("--cells", "-3", "--cells"),
        ("--cells", "1", "no cell to train"),
        ("--cells", "1000000000000000000", "--cells"),
        ("--cells", "two", "--cells"),
        ("--slots", "0", "--slots"),
        ("--slots", "1000000000000", "--slots"),
        ("--batch-groups", "0", "--batch-groups"),
        ("--batch-groups", "1000000", "fewer --updates"),
        ("--updates", "0", "--updates"),
        ("--updates", "1000000000000", "--updates"),
        ("--repeats", "0", "--repeats"),
        ("--repeats", "1000000000000", "--repeats"),
        ("--workers", "0", "--workers"),
        ("--workers", "1000000", "--workers"),
        ("--lookahead", "nan", "--lookahead"),
        ("--lookahead", "-0.1", "--lookahead"),
        ("--lookahead", "17", "--lookahead"),
        ("--train-ratio", "-0.5", "--train-ratio"),
        ("--train-ratio", "nan", "--train-ratio"),
        ("--train-ratio", "1e300", "--train-ratio"),
        ("--switch", "8.5", "8.5,3.5"),
        ("--switch", "1,2,3", "8.5,3.5"),
        ("--switch", "-1,2", "8.5,3.5"),
        ("--switch", "nan,2", "8.5,3.5"),
        ("--switch", "1e300,2", "8.5,3.5"),
        ("--switch", "a,b", "8.5,3.5"),
        ("--policy", "fastest", "fastest"),
        ("--policy", "", "there is no policy"),
        ("--policy", "elastic,", "there is no policy"),
        ("--seed", "x", "--seed"),
        ("--supply-fraction", "0", "--supply-fraction"),
        ("--supply-fraction", "nan", "--supply-fraction"),
        ("--supply-hold", "-1", "--supply-hold"),
        ("--supply-hold", "inf", "--supply-hold"),
        ("--slowdown", "nan", "--slowdown"),
        ("--slowdown", "1e300", "--slowdown"),
        ("--failed", "1", "--failed"),
        ("--try-failed", "nan", "--try-failed"),
        ("--timeout", "0", "--timeout"),
        ("--timeout", "nan", "--timeout"),
        ("--cell-failures", "-1", "--cell-failures"),
        ("--cell-failures", "1000000000", "--cell-failures"),
        ("--color", "red", "--color"),
    ],
)
def test_options_that_make_no_sense(option, value, why, trace, capsys, no_work):
    assert why in refused(arguments(trace, f"{option}={value}"), capsys)


def test_more_runs_than_anyone_waits_for(trace, capsys, no_work):
    assert "fewer --repeats" in refused(arguments(trace, "--cells", "10000", "--repeats", "10000"), capsys)


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_what_cannot_be_written_is_said_before_the_work(option, trace, tmp_path, capsys, no_work):
    assert "cannot write" in refused(arguments(trace, option, str(tmp_path / "missing" / "out")), capsys)
    assert "directory" in refused(arguments(trace, option, str(tmp_path)), capsys)
    assert "cannot write" in refused(arguments(trace, option, str(trace / "out")), capsys)


def test_no_file_is_written_that_is_read_or_written_otherwise(trace, tmp_path, capsys, no_work, monkeypatch):
    before = trace.read_text()
    (tmp_path / "link").symlink_to(trace)
    monkeypatch.chdir(tmp_path)
    for option in ("--json", "--html"):
        for name in (str(trace), "trace.jsonl", "link"):
            assert "--trace" in refused(arguments(trace, option, name), capsys)
    assert "--html and --json both name" in refused(arguments(trace, "--json", "a", "--html", "./a"), capsys)
    assert trace.read_text() == before and not (tmp_path / "a").exists()


def test_training_work_that_nobody_states(trace, capsys, no_work):
    given = arguments(trace)
    at = given.index("--train-ratio")
    assert "--train-ratio" in refused(given[:at] + given[at + 2 :], capsys)


def test_a_refusal_leaves_an_existing_file_alone(trace, tmp_path, capsys, no_work):
    out = tmp_path / "old.json"
    out.write_text("kept")
    refused(arguments(trace, "--json", str(out), "--html", str(tmp_path / "missing" / "out")), capsys)
    assert out.read_text() == "kept"


def test_a_refusal_from_outside(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"group": 0, "rollout_s": -1}\n')
    begun = time.monotonic()
    given = [sys.executable, str(ROOT / "launch.py"), *arguments(path)]
    done = subprocess.run(given, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert time.monotonic() - begun < 5
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
