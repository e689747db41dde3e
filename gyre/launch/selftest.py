"""The run of a self-test: a run like any other, that is looked at when it has ended, and leaves no checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence

from gyre import outputs, selftest
from gyre.config import Config, load
from gyre.errors import EXIT_FAULT, EXIT_OK
from gyre.launch import check, directory
from gyre.run_dir import RunDir, read_events

#: Starts a run and stays with it to its end; returns the exit code.
Start = Callable[[RunDir, Config], int]


def run(target: str, given: Sequence[str], cluster: str, json_out: str | None, start: Start) -> int:
    """Make the run of a configuration's self-test and say what it found.

    Returns:
        0 where engine and trainer agree, 1 where not, else the exit code of a run that did not come to its end.

    Raises:
        UserError: bad input; nothing was started.
    """
    words = selftest.overrides(load(target, given), given)
    config = load(target, words)
    outputs.distinct({"CONFIG": target}, {"--json": json_out})
    check.before_start(config, cluster)
    made = directory.create(config)
    try:
        code = start(made, config)
    finally:
        shutil.rmtree(made.checkpoints, ignore_errors=True)  # the weights that it began with
    return code if code != EXIT_OK else _conclude(made, config, json_out)


def _conclude(made: RunDir, config: Config, json_out: str | None) -> int:
    measured, dtype = selftest.measure(read_events(made.events)), config.model.dtype
    if json_out is not None:
        figures = {**selftest.figures(measured, dtype), "run": str(made.path)}
        outputs.write(json_out, json.dumps(figures, indent=2) + "\n")
    print(selftest.text(measured, dtype), flush=True)
    return EXIT_OK if selftest.judge(measured, dtype).passed else EXIT_FAULT
