"""Engines and workers that hand KV to each other, as far as tests without an engine need them."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import torch

from gyre.cell.kv_index import ROOT, Chosen, Entry
from gyre.cell.kv_segment import (
    Plan,
    Stage,
    path_of,
    read_page,
)
from gyre.cell.kv_shared import Shared
from gyre.cell.kv_source import Source
from gyre.cell.kv_transport import Address, Kind, Wanted
from gyre.cell.kv_worker import Load, WorkerSide

SIZE = 4  # tokens of a block here
SECRET = "run's key"
MODEL = b"m" * 16
KIND = Kind(MODEL, SIZE)


def handoff_memory() -> list[str]:
    """Descriptors of handoff memory that this process has open."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(name for name in names if "memfd:gyre-kv" in name)


def entries(tokens: list[int]) -> list[Entry]:
    """The entries of a prefix's blocks, the last one perhaps not full."""
    found: list[Entry] = []
    for at in range(0, len(tokens), SIZE):
        found.append(Entry.of(found[-1].key if found else ROOT, tokens[at : at + SIZE]))
    return found


class Caches:
    """A worker with caches of two layers, whose blocks stand in the first or in the second dimension."""

    def __init__(self, blocks: int = 8, halves: bool = False, rank: int = 0, heads: int = 2) -> None:
        shape = (2, blocks, heads, SIZE, 8) if halves else (blocks, heads, SIZE, 16)
        self.caches = {name: torch.randn(shape) for name in ("layer.0", "layer.1")}
        self.dim = 1 if halves else 0
        config = SimpleNamespace(parallel_config=SimpleNamespace(rank=rank))
        self.worker = WorkerSide(config, SimpleNamespace(num_blocks=blocks))
        self.worker.register(self.caches)

    def block(self, number: int) -> list[torch.Tensor]:
        return [cache.select(self.dim, number).clone() for cache in self.caches.values()]


class ToyCore:
    """An engine whose scheduler planned `chosen`, with a worker for each shard."""

    def __init__(self, source: Source, workers: list[Caches], chosen: list[Chosen]) -> None:
        self.shards = len(workers)
        self.plans = 0
        self.fault: Exception | None = None
        self._source, self._workers, self._chosen = source, workers, chosen

    async def plan(self) -> None:
        self.plans += 1
        page = read_page(self._source.path, self._source.tag)
        if page.stage is Stage.EXPORTING:
            with open(path_of(os.getpid(), page.plan), "wb") as file:
                file.write(Plan(MODEL, SIZE, self._chosen).pack())

    async def export(self, plan: str, shards: list[str], generation: int, policy: int) -> None:
        if self.fault:
            raise self.fault
        for each in self._workers:
            each.worker.export(plan, shards, generation, policy)


PREFIX = list(range(10))  # two blocks and a half
CHOSEN = [Chosen(entry, block, block == 1) for entry, block in zip(entries(PREFIX), (5, 3, 1), strict=True)]


@contextlib.asynccontextmanager
async def exported(workers: list[Caches] | None = None, timeout: float = 30.0, url: str = "http://127.0.0.1:1"):
    """A source of epoch 4 and policy 2 that has left rollout, with what a request says of it."""
    source = Source(SECRET, timeout)
    try:
        core = ToyCore(source, workers or [Caches()], CHOSEN)
        source.attach(core)
        source.serve(4, 2)
        source.pin()
        answer = await source.export()
        assert answer["blocks"] == 3 and answer["bytes"] == source.bytes > 0
        yield SimpleNamespace(
            source=source,
            core=core,
            parameters={"address": source.address(url), "epoch": 4, "policy": 2},
            wanted=Wanted(Address.decode(source.address(url), SECRET), 4, 2),
            page=lambda: read_page(source.path, source.tag),
        )
    finally:
        source.close()


def look(wanted, tokens, kind=KIND, transport=None):
    return (transport or Shared()).search(wanted, tokens, kind).poll(0.0)


def load_of(found, pairs) -> Load:
    return Load(found.generation, found.policy, found.tag, found.shards, pairs)
