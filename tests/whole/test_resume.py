"""Killed at its worst moments, a run goes on from its last commit: nothing closed is lost, nothing trained on twice."""

import json

import pytest

from tests.whole.support import Run, tiny

pytestmark = pytest.mark.whole

UPDATES = 5


def rolling_out(run: Run) -> bool:
    """Executions have closed since the last commit, and none of the cells trains."""
    events = run.events("role_reached", "policy_committed", "execution_closed", "run_started")
    since: list[str] = []
    for event in events:
        if event["kind"] in ("policy_committed", "run_started"):
            since = []
        elif event["kind"] == "execution_closed" or event["state"] == "TRAINING":
            since.append(event["kind"])
    return bool(since) and "role_reached" not in since


def test_killed_in_rollout_in_an_update_and_in_a_commit(place, tmp_path):
    config = tiny(tmp_path, train={"updates": UPDATES}, checkpoint={"keep": UPDATES})
    run = place.run("killed")
    mark = tmp_path / "mark"

    def kill(moment) -> tuple[dict[int, bytes], dict | None]:
        """Wait for the moment, kill the whole tree, and return what is closed and committed then."""
        run.wait_for(moment)
        place.kill_everything()
        process.wait()
        return run.outcomes(), run.commit() if run.dir.commits() else None

    def resumed_exactly(attempt: int, closed: dict[int, bytes], commit: dict | None) -> None:
        """An attempt began with the commit's weights, and counts everything that was closed."""
        run.wait_for(lambda run: [e for e in run.events("role_reached") if started(e, attempt)])
        begun = [e for e in run.events("run_started") if e["attempt"] == attempt][0]
        assert begun["version"] == (commit["version"] if commit else 0)
        core = [e for e in run.events("rank_ready") if e["attempt"] == attempt and e["rank"] == 0][0]
        assert not commit or core["checksum"] == commit["checksum"]
        for n, outcome in closed.items():
            assert run.dir.outcome(n).read_bytes() == outcome, f"the outcome of execution {n} changed"
        again = {e["n"] for e in run.events("execution_granted") if e["attempt"] == attempt}
        assert not again & set(closed), "closed executions ran again"

    process = place.start("run", config, "--name", "killed")
    left = kill(lambda run: run.dir.path.is_dir() and rolling_out(run))

    process = place.start("resume", run.dir.path, GYRE_FAULT="update:2:claimed@0", GYRE_FAULT_MARK=str(mark))
    resumed_exactly(2, *left)
    left = kill(lambda run: mark.exists())
    assert left[1]["version"] == 1
    mark.unlink()

    process = place.start("resume", run.dir.path, GYRE_FAULT="commit:3:before_rename", GYRE_FAULT_MARK=str(mark))
    resumed_exactly(3, *left)
    left = kill(lambda run: mark.exists())
    assert left[1]["version"] == 2, "a commit that was not renamed into place must not count"

    process = place.start("resume", run.dir.path)
    resumed_exactly(4, *left)
    assert process.wait(200) == 0, place.output()

    summary = run.summary
    assert summary["updates"] == summary["policy_version"] == UPDATES
    assert summary["requests"]["lost"] == 0
    lines = [json.loads(line) for line in run.dir.metrics.read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(1, UPDATES + 1)), "an update that was lost counts once"
    groups = run.trained_groups()
    assert len(groups) == len(set(groups)) == 4 * UPDATES
    assert run.dir.commits() == [1, 2, 3, 4, 5]


def started(event: dict, attempt: int) -> bool:
    """Whether this is an engine of the attempt that serves: its weights were loaded and verified."""
    return event["attempt"] == attempt and event["state"] == "ROLLOUT"
