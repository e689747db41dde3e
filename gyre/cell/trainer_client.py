"""A cell's trainer process, as its supervisor starts it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gyre.attempt import RankContext
from gyre.cell.settings import device_environment
from gyre.child import Child


async def start_trainer(
    context: RankContext, model: Path, on_event: Callable[[dict[str, Any]], None], child: Callable[[Child], None]
) -> str:
    """Start a rank's trainer and load `model` into it; returns the checksum of the weights the core began with.

    `child` is given the process as soon as there is one, so that it can be ended whatever follows.

    Raises:
        ChildFailed: it did not start.
    """
    environment = {"OMP_NUM_THREADS": str(context.config.train.threads)} | device_environment(context)
    words = [sys.executable, "-m", "gyre.training.trainer"]
    trainer = await Child.spawn("trainer", words, context.log("trainer"), on_event, environment)
    child(trainer)
    started = await trainer.call(
        "start",
        timeout=context.config.engine.start_timeout,
        run_dir=str(context.run_dir.path),
        attempt=context.attempt,
        rank=context.rank,
        incarnation=context.incarnation,
        store=list(context.store_address),
        prefix=context.prefix,
        secret=context.secret,
        model=str(model),
        address=context.address,
        scratch=str(context.scratch),
    )
    return started.get("checksum", "")
