"""Engines, a proxy, and a scheduler that changes roles at random: what `test_chaos` runs its conversations through.

The driver keeps to the order of a role change (docs/architecture.md): routes are published, the gate closes and reports
zero, memory is released; on the way back memory, weights and KV come, the gate opens under the next epoch, and only
then is the engine routed. After every zero it looks whether the engine really has nothing, and whether that stays so.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from gyre import models
from gyre.cell import engine_process
from gyre.cell.engine_client import EngineProcess, EngineSettings
from gyre.child import Child
from gyre.proxy.recorder import CallRecord, read_records
from tests.whole import chaos_model

SECRET = "chaos"
MAX_CONTEXT = 1024
#: What an engine needs to parse calls of tools.
ENGINE_ARGS = {"enable-auto-tool-choice": True, "tool-call-parser": "hermes", "kv-cache-memory-bytes": "32M"}
ENGINE_SECONDS = 300.0  # that one may take to start on a busy machine
#: Seconds between two acts on an engine, and in which a cell is away: short, so that every answer meets some.
PAUSE, AWAY = (0.3, 1.8), (0.0, 0.7)


@dataclass
class World:
    """Engines by rank, and the truth about them as the scheduler would hold it."""

    directory: Path
    rng: random.Random
    ranks: tuple[int, ...] = (0, 1, 2)
    engines: dict[int, EngineProcess] = field(default_factory=dict)
    epochs: Counter = field(default_factory=Counter)
    policies: Counter = field(default_factory=Counter)
    routed: set[int] = field(default_factory=set)
    assigned: dict[int, int] = field(default_factory=dict)  # engines of living executions
    done: Counter = field(default_factory=Counter)  # acts of the driver, by name
    segments: set[Path] = field(default_factory=set)  # shared memory that an engine had mapped
    starts: list[float] = field(default_factory=list)  # seconds that engines took to start, the first ones together
    checksum: str | None = None  # of the weights that the first engine loaded
    version: int = 0
    executions: int = 0
    over: bool = False
    handoff: bool = False  # engines hand KV over when they leave
    handed: list[int] = field(default_factory=list)  # blocks, each time

    # -- life --------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Start engines and proxy; every engine serves."""
        for name in ("model", "scratch"):
            (self.directory / name).mkdir()
        self.model = await asyncio.to_thread(chaos_model.make, models.resolve("gyre:tiny"), self.directory / "model")
        self.proxy = await Child.spawn(
            "proxy", [sys.executable, "-m", "gyre.proxy.server"], self.directory / "proxy.log"
        )
        started = await self.proxy.call("start", 60, secret=SECRET, max_context=MAX_CONTEXT, model="tiny")
        self.url = f"http://127.0.0.1:{started['port']}"
        await asyncio.gather(*(self.start_engine(rank) for rank in self.ranks))
        for rank in self.ranks:
            await self.come(rank)

    async def start_engine(self, rank: int) -> None:
        """A fresh engine, its gate closed."""
        settings = EngineSettings(
            model=str(self.model),
            secret=SECRET,
            rank=rank,
            dtype="float32",
            max_context=MAX_CONTEXT,
            slots=24,
            scratch=str(self.directory / "scratch"),
            args=ENGINE_ARGS,
            kv={"transport": "auto", "limit": 1 << 30, "timeout": 20.0} if self.handoff else None,
        )
        begun = time.monotonic()
        engine = await EngineProcess.start(settings, self.directory / f"engine-{rank}.log")
        self.engines[rank] = engine
        await engine.ready(ENGINE_SECONDS)
        self.starts.append(round(time.monotonic() - begun, 1))
        self.segments |= engine_process.shared_segments(engine.pid)
        assert (await engine.status())["state"] == "closed"

    async def stop(self) -> None:
        """End everything."""
        await asyncio.gather(
            *(engine.stop() for engine in self.engines.values()), self.proxy.stop(), return_exceptions=True
        )

    # -- executions --------------------------------------------------------------------------------------------------
    async def register(self) -> int:
        """A new execution, granted to an engine that serves, or to any where none does."""
        self.executions += 1
        n = self.executions
        engine = self.rng.choice(sorted(self.routed) or self.ranks)
        self.assigned[n] = engine
        await self.proxy.call(
            "register", 60, execution=n, try_number=1, token=f"token-{n}", engine=engine, record_path=str(self._path(n))
        )
        return n

    async def close(self, n: int) -> tuple[dict, list[CallRecord]]:
        """The counts and records of an execution that is over."""
        counts = await self.proxy.call("close", 60, execution=n, try_number=1)
        del self.assigned[n]
        return counts, read_records(self._path(n))

    def _path(self, n: int) -> Path:
        return self.directory / f"{n}.records"

    # -- role changes ------------------------------------------------------------------------------------------------
    async def publish(self, engines: dict[int, dict | None], moves: dict[int, int]) -> None:
        """A difference to the route table; what is decided before this is written before anything else can be."""
        self.version += 1
        await self.proxy.call(
            "routes",
            60,
            version=self.version,
            engines={str(rank): engine for rank, engine in engines.items()},
            moves={str(n): rank for n, rank in moves.items()},
        )

    def route(self, rank: int) -> dict:
        """What is published of an engine that serves."""
        there = self.engines[rank]
        route = {"url": there.url, "epoch": self.epochs[rank], "policy": self.policies[rank]}
        return route | {"kv": there.kv} if self.handoff else route

    async def withdraw(self, rank: int) -> None:
        """Take an engine's route away, and move its executions to those that serve; without any they are held."""
        self.routed.discard(rank)
        if not self.routed:
            self.done["nobody"] += 1
        others = sorted(self.routed)
        moves = {n: self.rng.choice(others) for n, at in self.assigned.items() if at == rank and others}
        self.assigned |= moves
        await self.publish({rank: None}, moves)

    async def come(self, rank: int) -> None:
        """Load the weights and serve under the next epoch; take over whoever has no engine."""
        engine = self.engines[rank]
        self.checksum = (await engine.load(self.model, self.checksum))["checksum"]
        await engine.wake(["kv_cache"])
        await self.demand_zero(rank, "closed")
        self.epochs[rank] += 1
        await engine.open(self.epochs[rank], self.policies[rank])
        self.routed.add(rank)
        moves = {n: rank for n, at in self.assigned.items() if at not in self.routed}
        self.assigned |= moves
        await self.publish({rank: self.route(rank)}, moves)

    async def demand_zero(self, rank: int, state: str) -> int:
        """The gate's word and the engine's own count must agree that nothing is there; returns the tokens sampled."""
        status = await self.engines[rank].status()
        found = (status["state"], status["live"], status["unfinished"])
        assert found == (state, 0, 0), f"engine {rank} after its gate reported zero: {status}"
        return status["tokens"]

    async def leave_and_come(self, rank: int) -> None:
        """rollout -> training -> rollout."""
        engine, rng = self.engines[rank], self.rng
        await self.withdraw(rank)
        assert await engine.close() == 0
        tokens = await self.demand_zero(rank, "closed")
        if self.handoff:
            self.handed.append((await engine.export())["blocks"])
        asleep = rng.random() < 0.8
        if asleep:
            held = (await engine.sleep())["bytes"]
            assert held == {"weights": 0, "kv": 0}, f"engine {rank} sleeps and holds {held}"
        await asyncio.sleep(rng.uniform(*AWAY) * (1.0 if self.routed else 0.4))
        assert await self.demand_zero(rank, "closed") == tokens, f"engine {rank} sampled after its gate reported zero"
        if asleep:
            await engine.wake(["weights"])
        await self.come(rank)

    async def sync(self, rank: int) -> None:
        """A new policy version, which here has the same weights."""
        engine = self.engines[rank]
        assert await engine.hold() == 0
        tokens = await self.demand_zero(rank, "held")
        await engine.load(self.model, self.checksum)
        assert await self.demand_zero(rank, "held") == tokens, f"engine {rank} sampled while its gate was held"
        self.policies[rank] += 1
        await engine.admit(self.policies[rank])
        await self.publish({rank: self.route(rank)}, {})

    async def crash(self, rank: int) -> None:
        """The engine is killed with all it does; another one takes its place, once it holds the weights."""
        old = self.engines[rank]
        os.killpg(old.pid, signal.SIGKILL)
        await old.wait()
        await asyncio.sleep(self.rng.uniform(0, 0.3))  # until the scheduler hears of it
        await self.withdraw(rank)
        await old.stop()
        await self.start_engine(rank)
        await self.come(rank)

    async def drive(self, rank: int, crashes: list[float]) -> None:
        """Change one engine's role until it is over; kill it at the given times of the loop's clock."""
        clock = asyncio.get_running_loop().time
        while not self.over:
            await asyncio.sleep(self.rng.uniform(*PAUSE))
            act = self.sync if self.rng.random() < 0.2 else self.leave_and_come
            if crashes and clock() > crashes[0]:
                crashes.pop(0)
                act = self.crash
            elif act is not self.sync and self.routed == {rank} and self.rng.random() < 0.7:
                continue  # sometimes nobody is left, but not most of the time
            await act(rank)
            self.done[act.__name__] += 1
