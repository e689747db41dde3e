"""The plan: what is tried, what is chosen and why, what it assumes, and what is refused."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gyre import cli
from gyre.config import build, load
from gyre.errors import UserError
from gyre.simulate import plan
from gyre.simulate.candidate import Candidate, Figures, Workload, mean, measure
from gyre.simulate.plan import Choices, Limits, Plan, search
from gyre.simulate.workload import Entry, Trace

ROOT = Path(__file__).resolve().parents[2]
SWITCH = (8.5, 3.5)


def trace_of(groups: int = 24, size: int = 4, train_s: float | None = 20.0, seed: int = 1) -> Trace:
    chance = random.Random(seed)
    return Trace(
        "t", tuple(tuple(Entry(chance.expovariate(1 / 300), train_s) for _ in range(size)) for _ in range(groups))
    )


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    lines = [
        json.dumps({"group": number, "rollout_s": entry.rollout_s})
        for number, group in enumerate(trace_of().groups)
        for entry in group
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


# -- what is tried ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "gpus, smallest, wanted, sizes",
    [
        (8, 1, None, (1, 2, 4, 8)),
        (8, 2, None, (2, 4, 8)),
        (12, 1, None, (1, 2, 4)),
        (7, 1, None, (1,)),
        (64, 4, None, (4, 8)),
        (12, 1, [6, 3, 5, 3], (3, 6)),
        (32, 1, [16], (16,)),
    ],
)
def test_cell_sizes(gpus: int, smallest: int, wanted: list[int] | None, sizes: tuple[int, ...]) -> None:
    assert plan.cell_sizes(gpus, smallest, wanted) == sizes


def test_default_batches_are_around_what_fills_all_slots() -> None:
    assert plan.batch_sizes(8, (4, 8, 16), 4) == (4, 8, 16, 32, 64)
    assert plan.batch_sizes(1, (1,), 8) == (1,)


def test_neighbours_differ_in_one_thing_by_one_step() -> None:
    choices = Choices((1, 2, 4), (4,), (8, 16), (0.0, 0.5, 1.0))
    assert set(choices.neighbours(Candidate(2, 4, 8, 0.0))) == {
        Candidate(1, 4, 8, 0.0),
        Candidate(4, 4, 8, 0.0),
        Candidate(2, 4, 16, 0.0),
        Candidate(2, 4, 8, 0.5),
    }


def test_splits_near_balance() -> None:
    assert plan.near_balance(1, 0.5) == []
    assert plan.near_balance(4, 0.5) == [1, 2, 3]
    splits = plan.near_balance(64, 0.75)
    assert 48 in splits and len(splits) <= 9 and all(0 < split < 64 for split in splits)
    assert all(0 < split < 16 for share in (0.0, 1.0) for split in plan.near_balance(16, share))


# -- the search ------------------------------------------------------------------------------------------------------
CHOICES = Choices((1, 2), (4, 8), (8, 16, 32), (0.0, 0.25, 1.0))
figures = st.builds(
    Figures,
    groups_per_hour=st.floats(1, 100),
    staleness_mean=st.floats(0, 2),
    staleness_max=st.integers(0, 4),
    moves_per_update=st.just(1.0),
)
limits = st.builds(
    Limits, st.none() | st.floats(0, 2), st.none() | st.integers(0, 4), st.sampled_from([0.0, 0.02, 0.1])
)


class Told:
    """Candidates whose figures are given; the rough ones are others than the thorough ones."""

    def __init__(self, seed: int, draw: Sequence[Figures]) -> None:
        self._chance = random.Random(seed)
        self._draw = draw
        self._known: dict[tuple[Candidate, bool], Figures] = {}
        self.asked: list[tuple[Candidate, bool]] = []

    def __call__(self, candidates: Sequence[Candidate], thoroughly: bool) -> list[Figures]:
        self.asked += [(candidate, thoroughly) for candidate in candidates]
        return [
            self._known.setdefault((c, thoroughly), self._draw[self._chance.randrange(len(self._draw))])
            for c in candidates
        ]


@given(st.integers(0, 99), st.lists(figures, min_size=1, max_size=9), limits, st.floats(1, 200), st.floats(1, 200))
def test_what_is_chosen_is_within_the_limits_and_the_tolerance(
    seed: int, draw: list[Figures], accepted: Limits, four: float, eight: float
) -> None:
    told = Told(seed, draw)
    try:
        found = search(CHOICES, lambda slots: {4: four, 8: eight}[slots], told, accepted)
    except UserError:
        # Nothing that could be chosen was looked at thoroughly and kept the limits.
        assert not any(accepted.keeps(told([c], True)[0]) for c, thoroughly in list(told.asked) if thoroughly)
        return
    kept = {c: f for c, f in found.figures.items() if accepted.keeps(f)}
    assert found.chosen in kept
    fastest = max(f.groups_per_hour for f in kept.values())
    assert found.best.groups_per_hour >= fastest * (1 - accepted.tolerance)
    assert len(told.asked) == len(set(told.asked)), "nothing is simulated twice"
    near = [c for c in CHOICES.neighbours(found.chosen) if c.slots_per_gpu not in found.ruled_out]
    assert set(near) <= found.figures.keys(), "all that the reasons compare with was looked at"
    assert found.chosen in plan.shortlist(found)
    lines = plan.reasons(found, CHOICES, accepted)
    assert len(lines) == 5 and all("\n" not in line for line in lines)


def test_slots_that_cannot_reach_what_was_seen_are_not_tried() -> None:
    told = Told(0, [Figures(50.0, 0.0, 0, 1.0)])
    found = search(CHOICES, lambda slots: {4: 40.0, 8: 60.0}[slots], told, Limits())
    assert found.ruled_out == {4: 40.0} and not any(c.slots_per_gpu == 4 for c, _ in told.asked)
    assert "4 cannot exceed 40.0 groups an hour even if no GPU ever idled" in plan.reasons(found, CHOICES, Limits())[4]


def chosen_of(rates: dict[float, tuple[float, float]], **accepted: float) -> Plan:
    """The plan where only the lookahead is open, with its rate and mean staleness."""
    choices = Choices((1,), (4,), (8,), tuple(rates))

    def evaluate(candidates: Sequence[Candidate], thoroughly: bool) -> list[Figures]:
        return [Figures(*rates[c.lookahead], round(rates[c.lookahead][1]), 1.0) for c in candidates]

    return search(choices, lambda slots: 1000.0, evaluate, Limits(**accepted))


def test_of_those_that_are_fast_enough_the_least_stale_one() -> None:
    rates = {0.0: (80.0, 0.0), 0.25: (99.0, 0.25), 0.5: (100.0, 0.5)}
    found = chosen_of(rates)
    assert found.chosen.lookahead == 0.25
    first, line, *_ = plan.reasons(found, Choices((1,), (4,), (8,), tuple(rates)), Limits())
    assert first == (
        "99.0 groups an hour at a staleness of 0.25 versions in the mean, 0 at the most: "
        "the fastest trains 100.0; of those within 2 % of it, the least stale"
    )
    assert line == (
        "lookahead 0.25: 0 would be 19 % slower with a staleness of 0.00 in place of 0.25; "
        "0.5 would be 1 % faster at 2.0 x the staleness"
    )
    assert chosen_of(rates, tolerance=0.0).chosen.lookahead == 0.5


def test_bounds_on_staleness_keep_faster_ones_out() -> None:
    rates = {0.0: (80.0, 0.0), 0.5: (90.0, 0.5), 2.0: (100.0, 2.0)}
    assert chosen_of(rates).chosen.lookahead == 2.0
    assert chosen_of(rates, staleness_mean=1.0).chosen.lookahead == 0.5
    assert chosen_of(rates, staleness_max=0).chosen.lookahead == 0.5
    with pytest.raises(UserError, match=r"the least stale has 1.00 versions in the mean and 1 at the most"):
        chosen_of({1.0: (80.0, 1.0)}, staleness_max=0)


def test_when_long_runs_are_too_stale_others_are_looked_at() -> None:
    choices = Choices((1,), (4,), tuple(2**n for n in range(12)), (0.0,))

    def evaluate(candidates: Sequence[Candidate], thoroughly: bool) -> list[Figures]:
        return [Figures(100.0 + c.batch_groups, 0.0, 3 * (thoroughly and c.batch_groups > 4), 1.0) for c in candidates]

    assert search(choices, lambda slots: 1e9, evaluate, Limits(staleness_max=1)).chosen.batch_groups <= 4


# -- a candidate in virtual time -------------------------------------------------------------------------------------
def figures_of(candidate: Candidate, workload: Workload, gpus: int = 8, **more: object) -> Figures:
    return mean([measure(workload, gpus, SWITCH, candidate, 48, random.Random(i), **more) for i in range(2)])


def test_no_candidate_is_faster_than_the_bound_and_lookahead_brings_it_near() -> None:
    workload = Workload.of(trace_of(), 0.02, 4)
    bound = workload.bound(8, 4)
    rates = [figures_of(Candidate(1, 4, 8, lookahead), workload) for lookahead in (0.0, 0.25, 1.0)]
    assert rates[0].groups_per_hour < rates[1].groups_per_hour < rates[2].groups_per_hour < bound * 1.03
    assert rates[2].groups_per_hour > 0.85 * bound
    assert rates[0].staleness_mean == 0 < rates[1].staleness_mean < rates[2].staleness_mean


def test_a_rate_does_not_depend_on_how_long_it_is_measured() -> None:
    """Which it would, if the ends of a run were in it: here they would be worth a fifth."""
    workload = Workload.of(trace_of(), 0.0, 4)
    candidate = Candidate(1, 4, 16, 0.25)
    short, long = (
        mean([measure(workload, 8, SWITCH, candidate, groups, random.Random(i)) for i in range(3)])
        for groups in (48, 192)
    )
    assert short.groups_per_hour == pytest.approx(long.groups_per_hour, rel=0.06)


def test_the_whole_machine_as_one_cell_and_a_single_gpu() -> None:
    workload = Workload.of(trace_of(), 0.02, 4)
    for gpus, size in ((8, 8), (1, 1)):
        one = figures_of(Candidate(size, 4, 8, 0.5), workload, gpus)
        assert 0 < one.groups_per_hour < workload.bound(gpus, 4) * 1.03


def test_what_is_too_stale_is_dropped_and_costs_its_rollout() -> None:
    workload = Workload.of(trace_of(), 0.02, 4)
    candidate = Candidate(1, 4, 4, 1.0)
    free, bound = (figures_of(candidate, workload, max_staleness=most) for most in (None, 1))
    assert free.staleness_max > 1 and not free.dropped
    assert bound.staleness_max <= 1 and 0 < bound.dropped < 1
    assert bound.groups_per_hour < free.groups_per_hour
    found = Plan(candidate, {candidate: bound}, {}, 1)
    assert (
        "groups dropped as too stale for every 100 trained"
        in plan.reasons(found, Choices((1,), (4,), (4,), (1.0,)), Limits(staleness_max=1))[0]
    )


def test_long_waits_between_events_are_waited_for() -> None:
    workload = Workload.of(Trace("t", ((Entry(1.0, 0.0), Entry(1e6, 1e6)),)), 0.0, 1)
    assert measure(workload, 1, SWITCH, Candidate(1, 2, 1, 0.0), 1, random.Random(0)).groups_per_hour > 0


def test_groups_that_take_no_time_do_no_harm() -> None:
    workload = Workload.of(Trace("t", ((Entry(0.0, 0.0),) * 2,) * 7 + ((Entry(9.0, 0.0),) * 2,)), 0.02, 4)
    for seed in range(5):
        assert measure(workload, 2, (0, 0), Candidate(1, 4, 1, 0.25), 1, random.Random(seed)).groups_per_hour > 0


def test_a_fixed_split_is_measured_by_the_same_means() -> None:
    workload = Workload.of(trace_of(), 0.02, 4)
    candidate = Candidate(1, 4, 8, 0.25)
    split = max(
        figures_of(candidate, workload, variant="async-stream", rollout_cells=r).groups_per_hour for r in range(1, 8)
    )
    assert 0 < split < figures_of(candidate, workload).groups_per_hour


@given(st.floats(0, 1), st.integers(1, 16), st.integers(1, 8), st.floats(0.01, 4))
def test_what_a_workload_assumes(slowdown: float, slots: int, gpus: int, ratio: float) -> None:
    """At the load of the trace, its durations and its ratio are what they were."""
    trace = trace_of(3)
    rollout = sum(e.rollout_s for group in trace.groups for e in group) / 3
    by_ratio = Workload.of(trace, slowdown, slots, gpus, ratio)
    assert by_ratio.mean_gpu_seconds(slots) == pytest.approx(rollout / slots * (1 + ratio))
    as_said = Workload.of(trace, slowdown, slots, gpus)
    assert as_said.mean_gpu_seconds(slots) == pytest.approx(rollout / slots + 4 * 20.0 * gpus)


@given(st.floats(0, 1), st.integers(1, 32))
def test_more_slots_never_lower_the_bound(slowdown: float, slots: int) -> None:
    workload = Workload.of(trace_of(3), slowdown, 4)
    assert workload.bound(4, slots) <= workload.bound(4, slots + 1) * (1 + 1e-9)


# -- what is to be configured ----------------------------------------------------------------------------------------
BASE = {
    "model": {"path": "m"},
    "tasks": {"path": "t.jsonl"},
    "harness": {"command": ["agent"], "score": {"command": ["true"]}},
    "train": {"updates": 8},
}


@pytest.mark.parametrize("lookahead, stale, bound, most", [(0.0, 0, None, 1), (1.5, 0, None, 2), (0.25, 2, 2, 2)])
def test_the_configuration_is_accepted(lookahead: float, stale: int, bound: int | None, most: int) -> None:
    chosen = Candidate(2, 8, 16, lookahead)
    found = Plan(chosen, {chosen: Figures(9.0, 0.2, stale, 1.0)}, {}, 1)
    snippet = yaml.safe_load(yaml.safe_dump(plan.configuration(found, 64, 4, Limits(staleness_max=bound))))
    data = {**BASE, **snippet, "train": {**BASE["train"], **snippet["train"]}}
    config = build(data)
    assert (config.cells.count, config.cells.slots, config.cells.gpus) == (32, 16, 2)
    assert (config.scheduler.batch_groups, config.scheduler.group_size) == (16, 4)
    assert config.scheduler.lookahead == lookahead and config.train.max_staleness == most
    assert config.hosts.count * config.hosts.executions >= 32 * 16


# -- the command -----------------------------------------------------------------------------------------------------
QUICK = "--slots 4 --batch-groups 4,8 --lookahead 0,0.5 --updates 2 --repeats 1 --workers 1".split()


def planned(trace: Path, *more: str) -> int:
    return cli.main(["plan", "--trace", str(trace), *more])


def test_the_command(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = []
    for out, workers in (("a.json", "1"), ("b.json", "2")):
        options = [*QUICK, "--train-ratio", "0.5", "--json", str(tmp_path / out)]
        assert planned(trace_file, "--gpus", "4", *options, "--workers", workers) == 0
        reports.append(json.loads((tmp_path / out).read_text()))
    assert reports[0] == reports[1], "neither processes nor their number change anything"
    text = capsys.readouterr().out
    report = reports[0]
    chosen, best = report["chosen"], max(one["groups_per_hour"] for one in report["thoroughly"])
    assert chosen["groups_per_hour"] >= best * 0.98
    assert report["tried"] == 3 * 2 * 2 and all(line in text for line in report["reasons"])
    assert f"lookahead {chosen['lookahead']:g}: " in text and "a fixed split of the same GPUs, " in text
    snippet = yaml.safe_load(text.split("In the configuration:\n")[1].split(str(trace_file))[0])
    assert snippet == report["configuration"]
    (tmp_path / "c.yaml").write_text(
        yaml.safe_dump({**BASE, **snippet, "train": {**BASE["train"], **snippet["train"]}})
    )
    assert load(tmp_path / "c.yaml").cells.count == chosen["cells"] == 4 // chosen["gpus_per_cell"]


def test_another_seed_is_another_shuffle(trace_file: Path, tmp_path: Path) -> None:
    for seed in "01":
        options = [*QUICK, "--gpus-per-cell", "1", "--train-ratio", "1", "--json", str(tmp_path / seed)]
        assert planned(trace_file, "--gpus", "2", *options, "--seed", seed) == 0
    first, second = (json.loads((tmp_path / seed).read_text())["chosen"]["groups_per_hour"] for seed in "01")
    assert first != second


def test_one_gpu_has_nothing_to_split(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(trace_file, "--gpus", "1", "--train-ratio", "0.5", *QUICK) == 0
    text = capsys.readouterr().out
    assert "there is one cell, which cannot be split" in text and "1 cell of 1 GPU and 4 slots" in text


@pytest.mark.parametrize(
    "options, what",
    [
        ("--gpus 0", "--gpus is 0; it must be at least 1"),
        ("--gpus -4", "--gpus is -4; it must be at least 1"),
        ("--gpus 7 --min-gpus-per-cell 2", "no cell size fits: of 1, 2, 4, 8 GPUs to a cell none divides 7"),
        ("--gpus 8 --min-gpus-per-cell 16", "no cell size fits"),
        ("--gpus 8 --gpus-per-cell 3,5", "of 3, 5 GPUs to a cell none divides 8"),
        ("--gpus 8 --gpus-per-cell 0,1", "--gpus-per-cell has 0; each must be at least 1"),
        ("--gpus 8 --gpus-per-cell one", "--gpus-per-cell is 'one'; write whole numbers with commas"),
        ("--gpus 8 --slots 4,-8", "--slots has -8"),
        ("--gpus 8 --slots 1.5", "--slots is '1.5'"),
        ("--gpus 8 --slots ", "--slots is ''"),
        ("--gpus 8 --batch-groups 0", "--batch-groups has 0"),
        ("--gpus 8 --lookahead 0,-1", "--lookahead has -1"),
        ("--gpus 8 --lookahead nan", "--lookahead has nan"),
        ("--gpus 8 --lookahead 17", "--lookahead has 17"),
        ("--gpus 8 --lookahead 0;1", "--lookahead is '0;1'; write numbers with commas"),
        ("--gpus 8 --slowdown -0.1", "--slowdown is -0.1"),
        ("--gpus 8 --train-ratio -1", "--train-ratio is -1"),
        ("--gpus 8 --train-ratio inf", "--train-ratio is inf"),
        ("--gpus 8 --switch 8.5", "--switch is '8.5'; write two times"),
        ("--gpus 8 --max-staleness -1", "--max-staleness is -1"),
        ("--gpus 8 --mean-staleness -1", "--mean-staleness is -1"),
        ("--gpus 8 --max-staleness 0 --lookahead 0.5,1", "--max-staleness is 0, below every --lookahead"),
        ("--gpus 8 --tolerance 2", "--tolerance is 2"),
        ("--gpus 8 --updates 0", "--updates is 0"),
        ("--gpus 8 --repeats 0", "--repeats is 0"),
        ("--gpus 8 --trace-slots 0", "--trace-slots is 0"),
        ("--gpus 8 --trace-gpus 0", "--trace-gpus is 0"),
        ("--gpus 1000000", "--gpus is 1000000; it must be at least 1 and at most 100000"),
        ("--gpus 8 --slots 4,100000000", "--slots has 100000000; each must be at least 1 and at most 10000"),
        ("--gpus 8 --batch-groups 1000000000", "--batch-groups has 1000000000; each must be"),
        ("--gpus 8 --updates 100000000", "--updates is 100000000; it must be at least 1 and at most"),
        ("--gpus 8 --updates 1000000", "fewer --updates"),
        ("--gpus 100000", "smaller --batch-groups"),
        ("--gpus 8 --repeats 100000", "fewer --repeats"),
        ("--gpus 8 --workers 100000", "--workers is 100000"),
        ("--gpus 8 --trace-gpus 1000000000", "--trace-gpus is 1000000000"),
        ("--gpus 8 --json .", "cannot write .: it is a directory"),
        ("--gpus 8 --json /nowhere/at/all.json", "cannot write /nowhere/at/all.json"),
    ],
)
def test_refused(trace_file: Path, capsys: pytest.CaptureFixture[str], options: str, what: str) -> None:
    ratio = [] if "train-ratio" in options else ["--train-ratio", "0.5"]
    assert planned(trace_file, *options.split(" "), *ratio) == 2
    error = capsys.readouterr().err
    assert what in error and error.count("\n") == 1 and "internal fault" not in error


def test_the_trace_is_not_written_over(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = trace_file.read_text()
    assert planned(trace_file, "--gpus", "8", "--train-ratio", "0.5", "--json", str(trace_file)) == 2
    assert "--json and --trace both name" in capsys.readouterr().err
    assert trace_file.read_text() == before


@pytest.mark.parametrize(
    "text, what",
    [
        ("", "is empty"),
        ("rollout_s: 3", "is not JSON"),
        ('{"group": 0, "rollout_s": -1}', "is negative"),
        ('{"group": 0, "rollout_s": NaN}', "finite"),
        ('{"group": 0, "rollout_s": 1}\n{"group": 1, "rollout_s": 1}', "groups of one"),
        ('{"group": 0, "rollout_s": 0}\n{"group": 0, "rollout_s": 0}', "takes any time"),
    ],
)
def test_refused_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, what: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    assert planned(path, "--gpus", "8", "--train-ratio", "0.5") == 2
    error = capsys.readouterr().err
    assert what in error and error.count("\n") == 1


def test_training_work_must_come_from_somewhere(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(trace_file, "--gpus", "8") == 2
    assert "does not say how long training takes; give --train-ratio" in capsys.readouterr().err


def test_a_trace_may_say_how_long_training_takes(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"group": n // 2, "rollout_s": 9 + n, "train_s": 1.5}) for n in range(16)))
    assert planned(path, "--gpus", "2", *QUICK, "--gpus-per-cell", "1", "--trace-gpus", "2") == 0


@pytest.mark.parametrize("arguments", [["--gpus", "8"], ["--trace", "t", "--gpus", "many"], ["--unknown"]])
def test_the_command_line_is_refused_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *arguments])
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_help_loads_nothing_heavy() -> None:
    code = "import sys; from gyre.cli import main\ntry: main(['plan', '--help'])\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "--gpus-per-cell" in done.stdout
    assert not set(done.stdout.split()) & {"torch", "vllm", "aiohttp", "rich", "yaml", "gyre.simulate.plan"}
