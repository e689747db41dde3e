"""What a cell's supervisor makes of an engine that dies, or fails, while its KV blocks are copied out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from gyre.cell import supervisor
from gyre.cell.machine import State
from gyre.cell.supervisor import CellSupervisor
from gyre.errors import ChildFailed


class ToyEngine:
    """An engine that fails to export, `seconds` later; unless it `survives`, it is dead by then."""

    kv = "address"
    url = "http://127.0.0.1:1"
    log_path = Path("engine.log")

    def __init__(self, seconds: float, survives: bool) -> None:
        self.seconds, self.survives = seconds, survives
        self.dead = asyncio.Event()
        self.asleep = False

    @property
    def alive(self) -> bool:
        return not self.dead.is_set()

    async def wait(self) -> int:
        await self.dead.wait()
        return 1

    async def close(self) -> int:
        return 0

    async def export(self) -> dict:
        if not self.survives:
            self.dead.set()
        await asyncio.sleep(self.seconds)
        raise ChildFailed("engine: export: the connection was closed")

    async def sleep(self) -> dict:
        self.asleep = True
        return {"bytes": {}}

    async def memory(self) -> dict:
        return {"bytes": {}}

    async def stop(self) -> None:
        pass


class ToyTrainer:
    async def call(self, operation: str, *_: object, **__: object) -> dict:
        return dict.fromkeys(("weights", "gradients", "accumulators", "optimizer"), 0)


@pytest.fixture
def cell(monkeypatch):
    """A supervisor whose cell serves, with an engine whose export fails; what it reports is in `reached`."""
    monkeypatch.setattr(supervisor, "DEATH_SECONDS", 0.05)

    def make(seconds: float, survives: bool = False) -> tuple[CellSupervisor, list[str]]:
        context = SimpleNamespace(rank=0, incarnation=1, identity=SimpleNamespace(node="here"), kind=lambda _: "cell")
        reached: list[str] = []
        cell = CellSupervisor(context, lambda event: reached.append(getattr(event, "state", type(event).__name__)))
        cell._machine.enter(State.SYNCING)
        cell._machine.enter(State.ROLLOUT)
        cell._engine, cell._trainer = ToyEngine(seconds, survives), ToyTrainer()
        cell._engine_up.set()

        async def start_engine() -> None:
            cell._engine = ToyEngine(0, True)
            cell._engine_up.set()

        cell._start_engine = start_engine
        cell._orders.put_nowait({"order": "role", "target": "training", "epoch": 2})
        return cell, reached

    return make


async def until(reached: list[str], what: str, tasks: list[asyncio.Task]) -> None:
    """Run a cell until it has reported this; whatever ends one of its tasks is raised."""
    try:
        while what not in reached:
            done, _ = await asyncio.wait(tasks, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        await asyncio.sleep(0.2)  # what the order still does
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("seconds", [0, 0.03])
def test_an_engine_that_dies_while_blocks_are_copied_out_is_started_again(cell, seconds):
    async def scenario():
        one, reached = cell(seconds)
        first = one._engine
        await until(reached, "RankReady", [asyncio.create_task(one._work()), asyncio.create_task(one._watch_engine())])
        assert reached == ["DRAINING", "HANDOFF", "FAILED", "RESTARTING", "RankReady"]
        assert not first.asleep and one._machine.state is State.RESTARTING

    asyncio.run(scenario())


def test_an_engine_that_only_fails_to_copy_goes_on_with_its_move(cell):
    async def scenario():
        one, reached = cell(0, survives=True)
        await until(reached, "TRAINING", [asyncio.create_task(one._work()), asyncio.create_task(one._watch_engine())])
        assert reached == ["DRAINING", "HANDOFF", "RELEASING", "TRAINING"]
        assert one._engine.asleep

    asyncio.run(scenario())


def test_an_engine_that_dies_between_two_steps_of_a_move_ends_the_move_alone(cell):
    """It is dead before the machine knows: the next state is no longer the move's to enter."""

    async def scenario():
        one, reached = cell(0, survives=True)
        one._engine.kv = None

        class Trainer(ToyTrainer):
            async def call(self, operation: str, *words: object, **more: object) -> dict:
                if operation == "wake":
                    one._engine.dead.set()
                    await asyncio.sleep(0.02)
                return await super().call(operation, *words, **more)

        one._trainer = Trainer()
        await until(reached, "RankReady", [asyncio.create_task(one._work()), asyncio.create_task(one._watch_engine())])
        assert reached == ["DRAINING", "RELEASING", "FAILED", "RESTARTING", "RankReady"]

    asyncio.run(scenario())
