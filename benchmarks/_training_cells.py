"""One cell and two in the real stream: a store, a feeder, a weight server and trainers around a model and a batch.

`python benchmarks/_training_cells.py feeder SAMPLES RUN_DIR` is the feeder, with the samples of a file in place of what
it would make of an execution's records.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

from _common import ROOT  # noqa: F401  also where gyre is not installed
from _peer_batch import Samples

from gyre import config as configuration
from gyre.child import Child
from gyre.run_dir import RunDir
from gyre.shared_memory import remove_shared
from gyre.store import Store

SECRET = "training"
ADDRESS = "127.0.0.1"
WAIT = 1800.0
PATIENCE = 120.0


class World:
    """A core and a satellite; `async with`. Every update trains on the whole batch, in groups of two executions."""

    def __init__(self, path: Path, model: Path, samples: Path, config: configuration.Config) -> None:
        self.run_dir = RunDir(path).create()
        self.run_dir.config.write_text(configuration.dump(config))
        self._model = model
        self._samples = samples
        self._groups = len(Samples.load(samples).advantages) // 2
        self._prefix = f"gyre/{path.name}/1"
        self._trainers: list[Child] = []
        self._update = 0
        self._joined = asyncio.Event()

    async def __aenter__(self) -> World:
        self._store = Store.host(self._prefix, ADDRESS)
        command = [sys.executable, str(Path(__file__)), "feeder", str(self._samples), str(self.run_dir.path)]
        self._feeder = await Child.spawn("feeder", command, self._log("feeder"))
        answer = await self._feeder.call("start", WAIT, secret=SECRET, address=ADDRESS)
        self._store.set("feeder", answer["url"])
        command = [sys.executable, "-m", "gyre.training.snapshots"]
        self._weights = await Child.spawn("snapshots", command, self._log("snapshots"))
        own = {"run_dir": str(self.run_dir.path), "attempt": 1, "secret": SECRET, "address": ADDRESS}
        self._store.set("snapshots", (await self._weights.call("start", WAIT, **own))["url"])
        for rank in (0, 1):
            self._trainers.append(await self._spawn(rank, own))
        groups = (child.call("groups", WAIT, generation=1, ranks=[0, 1]) for child in self._trainers)
        await asyncio.gather(*groups)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(child.stop() for child in [*self._trainers, self._feeder, self._weights]))
        remove_shared(self.run_dir.path)

    def _log(self, name: str) -> Path:
        return self.run_dir.path / f"{name}.log"

    def _heard(self, event: dict[str, Any]) -> None:
        if event.get("type") == "joined" and event.get("position") == 1:
            self._joined.set()

    async def _spawn(self, rank: int, own: dict[str, Any]) -> Child:
        command = [sys.executable, "-m", "gyre.training.trainer"]
        child = await Child.spawn("trainer", command, self._log(f"trainer-{rank}"), self._heard)
        store = ["127.0.0.1", self._store.port]
        incarnation = self._store.add(f"incarnation/{rank}", 1)
        more = {"rank": rank, "incarnation": incarnation, "store": store, "prefix": self._prefix}
        more |= {"model": str(self._model), "scratch": str(self.run_dir.path), "patience": PATIENCE}
        await child.call("start", WAIT, **own, **more)
        return child

    async def update(self, cells: int) -> dict[str, Any]:
        """An update on the whole batch: seconds from the order to the optimizer's step, and micro-steps by cell.

        With a satellite the time begins when it has joined, since a burst has one joining for many micro-steps; weights
        were pulled then, and nothing was computed.
        """
        self._update += 1
        await self._feeder.call("begin", WAIT, update=self._update, groups=self._groups)
        self._joined.clear()
        members = list(range(cells))
        parts = [self._train(rank, members) for rank in members]
        if cells > 1:
            await self._joined.wait()
        begun = time.perf_counter()
        await self._feed()
        answer, *_ = await asyncio.gather(*parts)
        return {"wall": time.perf_counter() - begun, "micro_steps": answer["micro_steps"]}

    async def _feed(self) -> None:
        for group in range(self._groups):
            executions = [2 * group, 2 * group + 1]
            for execution, score in zip(executions, (0.0, 1.0), strict=True):
                self.run_dir.execution(execution).mkdir(parents=True, exist_ok=True)
                self.run_dir.outcome(execution).write_text(json.dumps({"n": execution, "score": score}))
            number = self._update * self._groups + group
            await self._feeder.call("feed", WAIT, group=number, executions=executions)

    def _train(self, rank: int, members: list[int]) -> asyncio.Task[dict[str, Any]]:
        order = {"update": self._update, "position": rank, "generation": 1, "members": members}
        return asyncio.create_task(self._trainers[rank].call("train", WAIT, **order))


async def measure(path: Path, model: Path, samples: Path, config: configuration.Config, times: int) -> dict[str, Any]:
    """Updates of one cell and of two in turn; the first of each is not counted. Seconds, and micro-steps by cell."""
    found: dict[str, Any] = {"one": [], "two": [], "micro_steps": []}
    async with World(path, model, samples, config) as world:
        for turn in range(times + 1):
            for name, cells in (("one", 1), ("two", 2)):
                answer = await world.update(cells)
                if turn:
                    found[name].append(answer["wall"])
                    if cells == 2:
                        found["micro_steps"].append(answer["micro_steps"])
    return found


def feeder() -> None:
    """The feeder of these samples."""
    from _peer_core import rows_of

    rows = rows_of(Samples.load(sys.argv[2]))
    sampling = types.ModuleType("gyre.trajectories.sampling")
    sampling.samples = lambda run_dir, n: [rows[n].sample]  # type: ignore[attr-defined]
    sys.modules["gyre.trajectories.sampling"] = sampling
    del sys.argv[1:3]
    from gyre.training import feeder as real

    real.main()


if __name__ == "__main__":
    feeder()
