"""Every policy in real runs of timed cells: who moves when, who serves, what an update waits for, and two kills.

A run is shared by all tests of its policy. What a run says of itself is in its events; which engine sampled what is in
the records of its executions.
"""

import contextlib
import json
import math
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from gyre.proxy.recorder import read_records
from tests.whole.support import Place, Run, assert_whole, tiny

pytestmark = pytest.mark.whole

CELLS, GROUPS, SIZE = 3, 4, 3  # groups of a batch and executions of a group
WEIGHTS = 1024  # of gyre:timed
SHORT, MIDDLE, LONG, ENDLESS = 10, 20, 60, 200  # tokens, of which there are 40 a second


@contextlib.contextmanager
def a_place(directory: Path):
    """A place to start runs from; nothing may be left in it."""
    place = Place(directory / "p")
    try:
        yield place
        left = place.leftovers()
    finally:
        place.kill_everything()
    assert not left


def configured(directory: Path, scheduler: dict, tokens: list[list[int]], row_seconds: float) -> Path:
    """A run of three timed cells that asks for these tokens, group by group."""
    config = tiny(
        directory,
        model={"path": "gyre:timed", "max_context": 1024},
        harness={
            "command": ["python", "-S", "-E", "{root}/examples/timed/agent.py"],
            "timeout": 120,
            "score": {"command": ["sh", "{root}/examples/timed/score.sh"]},
            "keep_workspaces": "none",
        },
        cells={"count": CELLS, "slots": 3},
        engine={"kind": "timed", "timed": {"tokens_per_second": 40, "sleep_seconds": 0.1, "wake_seconds": 0.05}},
        scheduler={"batch_groups": GROUPS, "group_size": SIZE, **scheduler},
        train={
            "kind": "timed",
            "timed": {"seconds_per_row": row_seconds},
            "updates": len(tokens) // GROUPS,
            "micro_tokens": 32,  # a row a micro-step
        },
    )
    tasks = [{"id": f"t{i}", "tokens": group, "requests": 2} for i, group in enumerate(tokens)]
    (directory / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return config


def mixed(updates: int) -> list[list[int]]:
    """Groups of executions that differ, also from group to group."""
    kinds = (SHORT, MIDDLE, LONG)
    return [
        [kinds[(group + member) % 3 if group % 2 else group % 3] for member in range(SIZE)]
        for group in range(GROUPS * updates)
    ]


def completed(directory: Path, scheduler: dict, tokens: list[list[int]], row_seconds: float = 0.2) -> Run:
    """A run from its start to its end."""
    with a_place(directory) as place:
        assert place.launch("run", configured(directory, scheduler, tokens, row_seconds), "--name", "run") == 0, (
            place.output()
        )
        return place.run("run")


# -- what every completed run keeps to ---------------------------------------------------------------------------------
def assert_completed(run: Run, updates: int) -> None:
    """Everything was trained on once, and every execution got what it asked for."""
    summary = run.summary
    assert_whole(summary)
    assert summary["updates"] == summary["policy_version"] == updates
    groups = run.trained_groups()
    assert len(groups) == len(set(groups)) == GROUPS * updates
    published = [event["version"] for event in run.events("policy_published")]
    # A run that is killed between a commit and its event says nothing of that version.
    committed = {event["version"] for event in run.events("run_started")}
    assert published == sorted(set(published)) and {*published, *committed} - {0} == set(range(1, updates + 1))


def attempts(run: Run) -> list[list[dict]]:
    """The events of each attempt."""
    events = run.events()
    return [[e for e in events if e["attempt"] == n] for n in sorted({e["attempt"] for e in events})]


def assert_split(run: Run, rollout_cells: int, lost: Counter | None = None) -> None:
    """Cells 0.. only train and the others only roll out; `lost` counts the times that a rank started again."""
    dedicated = range(CELLS - rollout_cells)
    for events in attempts(run):
        moves = Counter((e["rank"], e["target"]) for e in events if e["kind"] == "move_started")
        starts = {rank: 1 + (lost or Counter())[rank] for rank in range(CELLS)}
        assert moves == Counter(
            {(rank, "rollout"): starts[rank] for rank in range(CELLS)}
            | {(rank, "training"): starts[rank] for rank in dedicated}
        ), "a cell moved after its start"
        training = {e["rank"] for e in events if e["kind"] == "role_reached" and e["state"] == "TRAINING"}
        assert training == set(dedicated)
        assert not {e["engine"] for e in events if e["kind"] == "execution_granted"} & set(dedicated)
    assert engines_that_served(run) == set(range(CELLS)) - set(dedicated)


def engines_that_served(run: Run) -> set[int]:
    """Engines that sampled a token."""
    files = (run.dir.path / "executions").glob("*/*/records.bin")
    return {span.engine for file in files for record in read_records(file) for span in record.spans}


def assert_synced(run: Run, ranks: range) -> None:
    """Engines that stay in rollout load every policy that is published, while there is anything left to sample."""
    for events in attempts(run):
        published = [e["version"] for e in events if e["kind"] == "policy_published"][:-1]
        for rank in ranks:
            reached = [
                e for e in events if e["kind"] == "role_reached" and (e["rank"], e["state"]) == (rank, "ROLLOUT")
            ]
            versions = [e["version"] for e in reached]
            assert versions == sorted(versions)
            assert set(published) <= set(versions), f"cell {rank} served policies {versions} of {published}"


# -- elastic -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    """Batches of which one leaves a ready group behind, and the next one leaves its cells dry while others wait.

    The long executions are so long that a machine's being busy does not change who waits for whom.
    """
    lengths = (SHORT, SHORT, MIDDLE, MIDDLE, MIDDLE, SHORT, ENDLESS, SHORT, SHORT, ENDLESS, MIDDLE, SHORT)
    tokens = [[length] * SIZE for length in lengths]
    return completed(tmp_path_factory.mktemp("elastic"), {"lookahead": 0.5}, tokens, row_seconds=0.5)


def test_elastic_moves_several_cells_at_once(elastic):
    assert_completed(elastic, 3)
    on_their_way, most = set(), 0
    for event in elastic.events("move_started", "cell_joined", "update_opened"):
        if event["kind"] == "move_started" and event["target"] == "training":
            on_their_way.add(event["rank"])
        else:
            on_their_way.discard(event.get("rank", 0))
        most = max(most, len(on_their_way))
    assert most >= 2


def test_elastic_cells_stay_in_training_where_they_have_work(elastic):
    said = [event["decision"] for event in elastic.events("gate_reason")]
    assert "cell 0 stays in training" in said
    opened = [event["update"] for event in elastic.events("update_opened")]
    arrived = [e for e in elastic.events("role_reached") if (e["rank"], e["state"]) == (0, "TRAINING")]
    assert len(arrived) < len(opened), "the core went back and forth for every update"


def test_elastic_gives_idle_cells_back_to_executions_that_wait(elastic):
    given = [
        e
        for e in elastic.events("gate_reason")
        if e["decision"] == "cell 0 goes back" and "nothing to claim" in e["reason"]
    ]
    assert given
    for event in given:
        later = [e for e in elastic.events("move_started") if e["t"] >= event["t"] and e["target"] == "rollout"]
        assert later and "suspended" in later[0]["reason"]
        assert [e for e in elastic.events("execution_granted") if e["t"] >= later[0]["t"]]


def test_elastic_counts_every_micro_step_of_a_suspended_update_once(elastic):
    """A part of the sum waited with the core while its cell rolled out; what it took is counted too."""
    opened = Counter(event["update"] for event in elastic.events("update_opened"))
    suspended = [event for event in elastic.events("update_done") if opened[event["update"]] > 1]
    assert suspended
    for event in suspended:
        count, metrics = sum(event["micro_steps"].values()), event["metrics"]
        assert count == GROUPS * SIZE
        assert metrics["loss"] == pytest.approx(count * (count + 1) / 2 / metrics["weight"])
        assert metrics["grad_norm"] == pytest.approx(math.sqrt(WEIGHTS) * metrics["loss"], rel=1e-5)
        assert 0.5 * count <= metrics["cell_seconds"] < 0.65 * count


def test_requests_go_on_elsewhere_when_their_cell_leaves(tmp_path):
    """By thresholds a cell leaves while executions run on it; each goes on from the tokens that it has."""
    tokens = [[20, 80, 120] for _ in range(GROUPS * 3)]
    run = completed(tmp_path, {"lookahead": 0.25, "elastic": {"gain": False}}, tokens)
    assert_completed(run, 3)
    requests = run.summary["requests"]
    assert requests["rerouted"] > 0 and requests["continued"] > 0 == requests["lost"], requests


# -- colocate ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def colocate(tmp_path_factory):
    """Three updates of all cells together."""
    return completed(tmp_path_factory.mktemp("colocate"), {"policy": "colocate", "lookahead": 0.25}, mixed(3))


def test_colocate_rolls_out_or_trains(colocate):
    assert_completed(colocate, 3)
    training: set[int] = set()
    running: set[int] = set()
    for event in colocate.events("role_reached", "move_started", "execution_granted", "execution_closed"):
        kind = event["kind"]
        if kind == "role_reached" and event["state"] == "TRAINING":
            training.add(event["rank"])
        elif kind == "move_started" and event["target"] == "rollout":
            training.discard(event["rank"])
        elif kind == "execution_granted":
            running.add(event["n"])
        elif kind == "execution_closed":
            running.discard(event["n"])
        assert not (training and running), f"cells {training} train while {running} run, at {event}"


def test_colocate_trains_with_all_cells_in_every_update(colocate):
    for update in colocate.events("update_done"):
        assert update["members"] == CELLS
        assert len(update["micro_steps"]) == CELLS and all(update["micro_steps"].values())
    assert engines_that_served(colocate) == set(range(CELLS))


# -- fixed splits ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def batched(tmp_path_factory):
    """One cell trains whole batches."""
    scheduler = {"policy": "async", "rollout_cells": 2, "lookahead": 1.0}
    return completed(tmp_path_factory.mktemp("async"), scheduler, mixed(3))


def ready_when_opened(run: Run) -> dict[int, int]:
    """Groups ready so far when an update was opened, over the whole run."""
    ready, found = 0, {}
    for event in run.events("group_ready", "update_opened"):
        if event["kind"] == "group_ready":
            ready += 1
        else:
            found.setdefault(event["update"], ready)
    return found


def test_async_keeps_to_its_split(batched):
    assert_completed(batched, 3)
    assert_split(batched, rollout_cells=2)
    assert_synced(batched, range(1, CELLS))


def test_async_begins_an_update_with_all_its_groups(batched):
    assert all(ready >= GROUPS * update for update, ready in ready_when_opened(batched).items())


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    """One cell trains on what comes; the whole run is killed after its first commit, and resumed."""
    directory = tmp_path_factory.mktemp("stream")
    scheduler = {"policy": "async-stream", "rollout_cells": 2, "lookahead": 1.0}
    config = configured(directory, scheduler, mixed(4), 0.2)
    with a_place(directory) as place:
        process, run = place.start("run", config, "--name", "run"), place.run("run")
        run.wait_for(lambda run: run.dir.commits() and len(run.outcomes()) > GROUPS * SIZE + 2)
        place.kill_everything()
        process.wait()
        run.closed = run.outcomes()
        assert place.launch("resume", run.dir.path) == 0, place.output()
    return run


def test_async_stream_goes_on_after_a_kill_of_everything(streamed):
    assert_completed(streamed, 4)
    first, second = attempts(streamed)
    assert [e["version"] for e in second if e["kind"] == "run_started"][0] >= 1
    again = {e["n"] for e in second if e["kind"] == "execution_granted"}
    assert not again & streamed.closed.keys(), "closed executions ran again"


def test_async_stream_keeps_to_its_split_in_both_attempts(streamed):
    assert_split(streamed, rollout_cells=2)
    assert_synced(streamed, range(1, CELLS))


def test_async_stream_begins_an_update_with_its_first_group(streamed):
    assert ready_when_opened(streamed)[1] < GROUPS


def test_async_stream_outlives_a_satellite(tmp_path):
    scheduler = {"policy": "async-stream", "rollout_cells": 1, "lookahead": 1.0}
    config = configured(tmp_path, scheduler, mixed(4), 0.3)
    with a_place(tmp_path) as place:
        process, run = place.start("run", config, "--name", "run"), place.run("run")
        run.wait_for(lambda run: [e for e in run.events("cell_joined") if e["rank"] == 1 and e["update"] >= 2])
        pids = [pid for pid in place.processes() if is_rank(pid, 1)]
        assert pids
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert process.wait(200) == 0, place.output()
    assert_completed(run, 4)
    lost = run.events("rank_lost")
    assert {event["rank"] for event in lost} == {1}
    started = Counter(e["rank"] for e in run.events("rank_ready"))
    assert_split(run, rollout_cells=1, lost=Counter({1: started[1] - 1}))
    assert len(attempts(run)) == 1, "only the satellite was to start again"


def is_rank(pid: int, rank: int) -> bool:
    """Whether a process is a rank's supervisor or one of its children; not what starts it again."""
    try:
        local = f"SUBMITIT_LOCAL_LOCALID={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return local and b"gyre." in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
