"""A role change on this machine: how long each of its stages takes, and whose memory it is before and after.

    python benchmarks/moves.py              20 moves of the quickstart's model (SmolLM2-135M, bf16), about five minutes
    python benchmarks/moves.py --quick      5 moves of the tiny model, half a minute: to see that it works

One cell, the core of a run, real in all its parts: a supervisor with vLLM and DeepSpeed, a feeder, a weight server and
a proxy with clients that stream all the time. In every move the cell leaves rollout in the middle of their answers,
trains an update on answers that it gave before, comes back and serves the weights of that update. With no other engine
the proxy holds the requests meanwhile, and goes on with them afterwards.

Times are the supervisor's own, from the decision (the moment at which the scheduler would publish routes) to the
report that the cell trains, or that its engine is routed again. Memory: bytes of the tensors' storages as engine and
trainer count them, and the resident and proportional sizes of the engine's processes and of the trainer's.

It exits with 1 where an engine in training holds weights or KV cache, or a request was lost.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
from _common import keep, parser
from rich.console import Console
from rich.table import Table

from gyre import config as configuration
from gyre import models
from gyre.attempt import RankContext, store_prefix
from gyre.cell import supervisor
from gyre.cell.supervisor import CellSupervisor
from gyre.child import Child
from gyre.events import Event, RoleReached, UpdateDone
from gyre.launch.identity import Identity
from gyre.launch.plan import Layout
from gyre.run_dir import RunDir, write_atomic
from gyre.shared_memory import remove_shared
from gyre.store import Store

SECRET = "moves"
STREAMS, GROUP, GROUPS = 8, 4, 2  # live streams; answers to train on, in groups
WAIT = 600.0
LEAVING = ("routes", "order", "drain", "hand off", "release engine", "wake trainer", "count memory")
COMING = ("order", "park trainer", "wake weights", "load and verify", "wake KV", "open gate", "count memory", "routes")


@dataclass(frozen=True)
class Size:
    """What is measured."""

    model: str
    dtype: str
    moves: int
    tokens: int  # of an answer to train on


FULL = Size("gyre:smollm2-135m-instruct", "bfloat16", 20, 96)
QUICK = Size("gyre:tiny", "float32", 5, 48)


@dataclass
class Figures:
    """What came out; seconds and bytes."""

    leaving: list[dict[str, float]] = field(default_factory=list)
    coming: list[dict[str, float]] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)  # that a client saw, less the time in training
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class Watched(CellSupervisor):
    """The supervisor, with the time that each call to its engine and its trainer takes."""

    def __init__(self, context: RankContext, report: Callable[[Event], None]) -> None:
        super().__init__(context, report)
        self.took: dict[str, float] = {}

    async def start(self) -> None:
        """Start, and watch from then on."""
        await super().start()
        for name in ("close", "sleep", "wake", "open", "export", "memory"):
            if (call := getattr(self._engine, name, None)) is not None:
                setattr(self._engine, name, self._timed(call, lambda *args, name=name: f"{name} {args}"))
        self._trainer.call = self._timed(self._trainer.call, lambda operation, *_: f"trainer {operation}")
        supervisor.load_snapshot = self._timed(supervisor.load_snapshot, lambda *_: "load")

    def _timed(self, call: Callable[..., Awaitable[Any]], name: Callable[..., str]) -> Callable[..., Awaitable[Any]]:
        async def timed(*args: Any, **more: Any) -> Any:
            begun = time.monotonic()
            try:
                return await call(*args, **more)
            finally:
                self.took[name(*args)] = time.monotonic() - begun

        return timed

    async def memory(self) -> dict[str, int]:
        """What engine and trainer hold: bytes of tensors, and sizes of their processes."""
        engine, trainer = await self._engine.memory(), await self._trainer.call("memory", WAIT)
        held = {f"engine {kind}": size for kind, size in engine["bytes"].items()} | sizes("engine", self._engine.pid)
        held |= {f"trainer {kind}": trainer[kind] for kind in ("weights", "gradients", "accumulators", "optimizer")}
        return held | sizes("trainer", self._trainer.pid)


def sizes(name: str, pid: int) -> dict[str, int]:
    """Resident and proportional sizes of a process and its descendants."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    full = [process.memory_full_info() for process in family]
    return {f"{name} rss": sum(one.rss for one in full), f"{name} pss": sum(one.pss for one in full)}


class World:
    """A run's parts around one cell."""

    def __init__(self, path: Path, size: Size) -> None:
        self.size = size
        self.run_dir = RunDir(path).create()
        self.figures = Figures()
        self.children: dict[str, Child] = {}
        self.reports: dict[str, float] = {}
        self._heard = asyncio.Event()
        self.epoch = self.version = self.snapshot = 0
        self.asking: list[asyncio.Task[None]] = []
        self.arrivals: list[list[float]] = [[] for _ in range(STREAMS)]

    # -- life --------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Start everything, serve, and have answers to train on."""
        size = self.size
        config = configuration.build(
            {
                "name": "moves",
                "model": {"path": size.model, "dtype": size.dtype, "max_context": 512},
                "tasks": {"path": "none"},
                "harness": {"command": ["none"], "score": {"command": ["none"]}},
                "cells": {"count": 1, "slots": 16, "gpus": 0},
                "scheduler": {"batch_groups": GROUPS, "group_size": GROUP},
                "train": {"updates": 1000, "lr": 1e-6, "micro_tokens": 512, "threads": 1},
            }
        )
        self.run_dir.config.write_text(configuration.dump(config))
        self.run_dir.attempt(1).mkdir(parents=True, exist_ok=True)
        model = await asyncio.to_thread(models.resolve, size.model, lambda what, done: say(what))
        prefix = store_prefix(self.run_dir, 1)
        self.store = Store.host(prefix, "127.0.0.1")
        (self.run_dir.path / "scratch").mkdir()
        context = RankContext(
            config=config,
            run_dir=self.run_dir,
            identity=Identity(0, 1, 0, "moves", "local", "moves"),
            layout=Layout.of(config),
            attempt=1,
            incarnation=self.store.add("incarnation/0", 1),
            store=self.store,
            store_address=("127.0.0.1", self.store.port),
            secret=SECRET,
            address="127.0.0.1",
            scratch=self.run_dir.path / "scratch",
        )
        await self._services()
        say(f"starting the engine and the trainer of {model.name}")
        self.cell = Watched(context, self._report)
        await self.cell.start()
        self.running = asyncio.create_task(self.cell.run())
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        await self._order("role", "ROLLOUT", target="rollout", version=0, snapshot=0)
        await self._routed(True)
        await self._answers()

    async def _services(self) -> None:
        run_dir = str(self.run_dir.path)
        for name, module, more in (
            ("snapshots", "gyre.training.snapshots", ()),
            ("feeder", "gyre.training.feeder", (run_dir,)),
            ("proxy", "gyre.proxy.server", ()),
        ):
            log = self.run_dir.attempt(1) / f"{name}.log"
            self.children[name] = await Child.spawn(name, [sys.executable, "-m", module, *more], log)
        place = {"secret": SECRET, "address": "127.0.0.1"}
        served = await self.children["snapshots"].call("start", WAIT, run_dir=run_dir, attempt=1, **place)
        self.store.set("snapshots", served["url"])
        self.store.set("feeder", (await self.children["feeder"].call("start", WAIT, **place))["url"])
        started = await self.children["proxy"].call("start", WAIT, secret=SECRET, max_context=512, model="model")
        self.url = f"http://127.0.0.1:{started['port']}/v1/chat/completions"

    async def stop(self) -> None:
        """End everything that was started."""
        for task in (*self.asking, *([self.running] if hasattr(self, "running") else [])):
            task.cancel()
        await asyncio.gather(*self.asking, return_exceptions=True)
        if hasattr(self, "session"):
            await self.session.close()
        if hasattr(self, "cell"):
            await self.cell.stop()
        await asyncio.gather(*(child.stop() for child in self.children.values()))
        remove_shared(self.run_dir.path)

    def _report(self, event: Event) -> None:
        if isinstance(event, RoleReached):
            self.reports[event.state] = time.monotonic()
        elif isinstance(event, UpdateDone):
            self.reports["update"] = time.monotonic()
            self.figures.updates.append(event.seconds)
        self._heard.set()

    async def _order(self, order: str, until: str, **words: Any) -> None:
        """Send the cell an order as the scheduler does, and wait for its report."""
        self.reports.clear()
        self.epoch += order == "role"
        self.store.send("orders/0/1", {"order": order, "epoch": self.epoch, **words})
        async with asyncio.timeout(WAIT):
            while until not in self.reports:
                self._heard.clear()
                heard = asyncio.ensure_future(self._heard.wait())
                await asyncio.wait({heard, self.running}, return_when=asyncio.FIRST_COMPLETED)
                if self.running.done():
                    heard.cancel()
                    self.running.result()

    async def _routed(self, there: bool) -> None:
        self.version += 1
        engine = {"url": self.cell._engine.url, "epoch": self.epoch, "policy": self.snapshot}
        await self.children["proxy"].call(
            "routes", WAIT, version=self.version, engines={"0": engine if there else None}, moves={}
        )

    # -- requests ----------------------------------------------------------------------------------------------------
    async def _register(self, n: int) -> None:
        path = self.run_dir.try_dir(n, 1)
        path.mkdir(parents=True)
        record = str(path / "records.bin")
        await self.children["proxy"].call(
            "register", WAIT, execution=n, try_number=1, token=f"token-{n}", engine=0, record_path=record
        )

    async def _close(self, n: int) -> dict[str, Any]:
        return await self.children["proxy"].call("close", WAIT, execution=n, try_number=1)

    async def _ask(self, n: int, tokens: int, arrivals: list[float]) -> None:
        """One streamed answer; the times at which its pieces came are added to `arrivals`."""
        words = [{"role": "user", "content": f"Tell me a story about the number {n}."}]
        body = {"messages": words, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        headers = {"Authorization": f"Bearer token-{n}"}
        async with self.session.post(self.url, json=body, headers=headers) as response:
            response.raise_for_status()
            async for data in response.content.iter_any():
                if b"data: " in data:
                    arrivals.append(time.monotonic())

    async def _answers(self) -> None:
        """Executions of two groups, closed and scored: what every update trains on."""
        numbers = range(1, GROUP * GROUPS + 1)
        for n in numbers:
            await self._register(n)
        await asyncio.gather(*(self._ask(n, self.size.tokens, []) for n in numbers))
        for n in numbers:
            await self._close(n)
            outcome = {"n": n, "score": float(n % 2), "records": "1/records.bin", "group": 0}
            write_atomic(self.run_dir.outcome(n), json.dumps(outcome))

    async def _stream_on(self, n: int, arrivals: list[float]) -> None:
        while True:
            await self._ask(n, 256, arrivals)

    async def talk(self) -> None:
        """Have clients stream from now on."""
        for i in range(STREAMS):
            await self._register(1000 + i)
            self.asking.append(asyncio.create_task(self._stream_on(1000 + i, self.arrivals[i])))

    async def listen(self) -> None:
        """Wait until every client has heard something new."""
        before = [len(arrivals) for arrivals in self.arrivals]
        while any(len(arrivals) < old + 3 for arrivals, old in zip(self.arrivals, before, strict=True)):
            for task in self.asking:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)

    # -- a move ------------------------------------------------------------------------------------------------------
    async def move(self) -> None:
        """rollout -> training -> rollout, with an update between."""
        figures = self.figures
        figures.memory["rollout"] = await self.cell.memory()
        left, leaving = await self._leave()
        figures.memory["training"] = await self.cell.memory()
        await self._train()
        figures.memory["after an update"] = await self.cell.memory()
        returned, coming = await self._come()
        await self.listen()
        figures.memory["rollout again"] = await self.cell.memory()
        figures.leaving.append(leaving)
        figures.coming.append(coming)
        away = returned - left - leaving["total"] - coming["total"]
        gaps = [longest(arrivals, left - 1.0) for arrivals in self.arrivals]
        figures.pauses += [gap - away for gap in gaps]

    async def _leave(self) -> tuple[float, dict[str, float]]:
        took = self.cell.took
        took.clear()
        decided = time.monotonic()
        await self._routed(False)
        routed = time.monotonic()
        await self._order("role", "TRAINING", target="training", version=-1, snapshot=-1)
        at = self.reports
        stages = dict.fromkeys(LEAVING, 0.0)
        stages |= {"routes": routed - decided, "order": at["DRAINING"] - routed, "drain": took["close ()"]}
        stages |= {"hand off": took.get("export ()", 0.0), "release engine": took["sleep ()"]}
        stages |= {"wake trainer": took["trainer wake"]}
        stages["count memory"] = took["memory ()"] + took["trainer memory"]
        return decided, stages | {"total": at["TRAINING"] - decided}

    async def _train(self) -> None:
        update = self.snapshot + 1
        feeder = self.children["feeder"]
        for i in range(GROUPS):
            executions = list(range(1 + GROUP * i, 1 + GROUP * (i + 1)))
            await feeder.call("feed", WAIT, group=update * GROUPS + i, executions=executions)
        await feeder.call("begin", WAIT, update=update, groups=GROUPS)
        if update == 1:
            self.store.send("orders/0/1", {"order": "groups", "epoch": self.epoch, "generation": 1, "ranks": [0]})
        members = [0]
        await self._order("train", "update", update=update, position=0, generation=1, members=members)
        await feeder.call("committed", WAIT, update=update)
        self.snapshot = update

    async def _come(self) -> tuple[float, dict[str, float]]:
        took = self.cell.took
        took.clear()
        decided = time.monotonic()
        await self._order("role", "ROLLOUT", target="rollout", version=self.snapshot, snapshot=self.snapshot)
        at = dict(self.reports)
        await self._routed(True)
        routed = time.monotonic()
        stages = {"order": at["RESTORING"] - decided, "park trainer": took["trainer park"]}
        stages |= {"wake weights": took["wake (['weights'],)"], "load and verify": took["load"]}
        stages |= {"wake KV": took["wake (['kv_cache'],)"]}
        stages["open gate"] = took[f"open ({self.epoch}, {self.snapshot})"]
        stages |= {"count memory": took["memory ()"] + took["trainer memory"], "routes": routed - at["ROLLOUT"]}
        return routed, stages | {"total": routed - decided}

    async def finish(self) -> None:
        """End the clients and add up what the proxy counted of them."""
        for task in self.asking:
            task.cancel()
        await asyncio.gather(*self.asking, return_exceptions=True)
        totals: dict[str, int] = {}
        for i in range(STREAMS):
            counts = await self._close(1000 + i)
            for name in ("requests", "answered", "rerouted", "continued", "restarted", "lost"):
                totals[name] = totals.get(name, 0) + counts[name]
        self.figures.counts = totals


def longest(arrivals: list[float], since: float) -> float:
    """The longest time between two pieces that came after `since`."""
    late = [at for at in arrivals if at >= since]
    return max((b - a for a, b in zip(late, late[1:], strict=False)), default=0.0)


def say(what: str) -> None:
    """Tell how far this is."""
    print(f"[moves] {what}", file=sys.stderr, flush=True)


# -- figures -----------------------------------------------------------------------------------------------------------
def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 100) * len(ordered) // 100) - 1))]


def rows(moves: list[dict[str, float]]) -> Iterator[tuple[str, float, float, float]]:
    """Stage, p50, p99, and its share of all the time."""
    whole = sum(move["total"] for move in moves)
    for stage in moves[0]:
        values = [move[stage] for move in moves]
        yield stage, median(values), percentile(values, 0.99), sum(values) / whole


def show(figures: Figures, size: Size) -> None:
    """Print tables and ratios."""
    console = Console(width=110)
    for title, moves in (("rollout -> training", figures.leaving), ("training -> rollout", figures.coming)):
        table = Table(title=f"{title}, {size.model}, {size.dtype}, {len(moves)} moves")
        for name in ("stage", "p50 ms", "p99 ms", "share"):
            table.add_column(name, justify="left" if name == "stage" else "right")
        for stage, middle, late, share in rows(moves):
            table.add_row(stage, f"{1e3 * middle:.1f}", f"{1e3 * late:.1f}", f"{share:.0%}")
        console.print(table)
    memory = figures.memory
    table = Table(title="memory, MiB (the last move)")
    for name in ("what", *memory):
        table.add_column(name, justify="left" if name == "what" else "right")
    for what in next(iter(memory.values())):
        table.add_row(what, *(f"{held[what] / 2**20:.0f}" for held in memory.values()))
    console.print(table)
    for line in ratios(figures):
        print(line)


def ratios(figures: Figures) -> list[str]:
    """What the figures come to."""
    before, during = figures.memory["rollout"], figures.memory["training"]
    again = figures.memory["rollout again"]
    held = before["engine weights"] + before["engine kv"]
    left = during["engine weights"] + during["engine kv"]
    there = median([move["total"] for move in figures.leaving])
    back = median([move["total"] for move in figures.coming])
    update = median(figures.updates)
    pauses = figures.pauses
    return [
        f"an engine in training holds {left} of {held / 2**20:.0f} MiB of weights and KV cache: {1 - left / held:.0%} "
        f"released; its processes' proportional size falls from {before['engine pss'] / 2**20:.0f} to "
        f"{during['engine pss'] / 2**20:.0f} MiB and is {again['engine pss'] / 2**20:.0f} MiB afterwards",
        f"to training {there:.2f} s and back {back:.2f} s (p50): {(there + back) / update:.2f} of an update of "
        f"{update:.2f} s (p50) on {GROUPS * GROUP} answers",
        f"a client's stream stands still for {median(pauses):.2f} s (p50), {percentile(pauses, 0.99):.2f} s (p99) more "
        f"than the cell trains",
        f"requests: {json.dumps(figures.counts)}",
    ]


async def measure(size: Size) -> Figures:
    """All moves."""
    with tempfile.TemporaryDirectory(prefix="gyre-moves-") as place:
        world = World(Path(place) / "moves", size)
        try:
            await world.start()
            await world.talk()
            await world.listen()
            for number in range(size.moves):
                await world.move()
                say(f"move {number + 1} of {size.moves}")
                await asyncio.sleep(0.2)
            await world.finish()
            return world.figures
        except BaseException:
            for log in sorted(world.run_dir.attempt(1).glob("*.log")):
                print(f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}", file=sys.stderr)
            raise
        finally:
            await world.stop()


def main() -> int:
    """Entry point."""
    asked = parser(__doc__).parse_args()
    size = QUICK if asked.quick else FULL
    figures = asyncio.run(measure(size))
    show(figures, size)
    keep(asked.json, {**vars(size), **vars(figures)})
    asleep = figures.memory["training"]
    return int(bool(figures.counts["lost"] or asleep["engine weights"] or asleep["engine kv"]))


if __name__ == "__main__":
    sys.exit(main())
