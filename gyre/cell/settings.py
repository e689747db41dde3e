"""What a cell's children are started with: the engine's settings, and the GPUs that they may see."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gyre.attempt import RankContext
from gyre.cell.engine_client import EngineSettings
from gyre.config import ServingConfig
from gyre.launch import node


def device_environment(context: RankContext) -> dict[str, str]:
    """Environment that gives a child its cell's GPUs and no others."""
    visible = node.devices(context.config, context.identity, engine=True)
    return {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}


def _fork_server(context: RankContext) -> str | None:
    """The name under which this run's engines on this node share their imports, where there are several on CPUs."""
    cells = context.config.cells
    if cells.gpus or cells.count + cells.standalone == 1 or context.config.engine.kind != "vllm":
        return None
    attempt = context.scratch.name.rpartition("-")[0]  # of its rank
    return f"{attempt}-{os.environ.get('SLURMD_NODENAME', 'local')}"


def _handoff(serving: ServingConfig) -> dict[str, Any] | None:
    if not serving.kv_handoff:
        return None
    limit = serving.kv_limit_mib << 20
    return {"transport": serving.kv_transport, "limit": limit, "timeout": serving.kv_timeout}


def engine_settings(context: RankContext, model: Path) -> EngineSettings:
    """What a cell's engine is started with."""
    config = context.config
    return EngineSettings(
        model=str(model),
        secret=context.secret,
        rank=context.rank,
        dtype=config.model.dtype,
        max_context=config.model.max_context,
        slots=config.cells.slots,
        gpus=config.cells.gpus,
        host=context.address,
        port=node.port(config, "engine", context.rank),
        seed=config.seed,
        scratch=str(context.scratch),
        fork_server=_fork_server(context),
        args=config.engine.args,
        env=device_environment(context) | config.engine.env,
        timed=None if config.engine.pace is None else config.engine.pace.model_dump(),
        kv=_handoff(config.serving),
        scripted=None if (answers := config.answers) is None else str(answers),
    )
