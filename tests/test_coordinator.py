"""What rank 0 makes of updates without a step: they are logged, and too many in a row end the run."""

from types import SimpleNamespace

import pytest

from gyre.coordinator import Coordinator
from gyre.errors import UserError
from gyre.events import RunStarted, UpdateDone
from gyre.run_dir import EventLog, RunDir, read_events
from tests.fake_run import METRICS, make_config


@pytest.fixture
def coordinator(tmp_path):
    """One whose run has begun, without services."""
    run = RunDir(tmp_path / "run").create()
    made = Coordinator(
        SimpleNamespace(
            config=make_config(train__updates=20),
            run_dir=run,
            layout=SimpleNamespace(engines=3),
            attempt=1,
            store=SimpleNamespace(inbox=lambda name: None),
        )
    )
    made._figures = EventLog(run.metrics)
    made._record(RunStarted(0, 3, 0, 1))
    return made


def done(update, norm):
    """An update as its trainer tells it; `norm` is that of its gradient."""
    return UpdateDone(update, 1, {"0": 2}, 1.0, {**METRICS, "grad_norm": norm, "skipped": float(norm != norm)})


def test_three_updates_in_a_row_without_a_step_end_the_run(coordinator):
    nan = float("nan")
    for update, norm in enumerate((nan, nan, 1.0, nan, nan), 1):
        coordinator._record(done(update, norm))
    with pytest.raises(UserError, match=r"updates 4-6 took no step.* train\.lr"):
        coordinator._record(done(6, nan))
    logged = [event for event in read_events(coordinator._context.run_dir.events) if event["kind"] == "step_skipped"]
    assert [event["update"] for event in logged] == [1, 2, 4, 5, 6]
