"""A snapshot, pulled to this cell and loaded into its engine, and the check that the engine holds just that."""

from __future__ import annotations

import asyncio

from gyre.attempt import RankContext
from gyre.cell.engine_client import EngineProcess
from gyre.errors import WeightsMismatch
from gyre.training import snapshots


async def load_snapshot(context: RankContext, engine: EngineProcess, snapshot: int) -> None:
    """Load a snapshot into the engine and compare its checksum with the trainer's.

    Raises:
        WeightsMismatch: the engine holds other weights than were announced.
    """
    pulled = await asyncio.to_thread(
        snapshots.pull,
        context.store.clone(),
        snapshot,
        context.scratch,
        context.secret,
        context.address,
        how=context.config.network.weights,
    )
    with pulled as local:
        answer = await engine.load(str(local.path), local.checksum, snapshot)
    if answer["checksum"] != local.checksum:
        raise WeightsMismatch(
            f"rank {context.rank}: snapshot {snapshot} has checksum {local.checksum}, the engine holds "
            f"{answer['checksum']}: the sync was dropped or altered"
        )
