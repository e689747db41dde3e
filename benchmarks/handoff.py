"""KV handoff: what a move of requests computes again, and the pause that their clients see, with it and without.

    python benchmarks/handoff.py            20 moves each of the quickstart's model (SmolLM2-135M), some ten minutes
    python benchmarks/handoff.py --quick    6 moves each of the tiny model, a minute: to see that it works

Two engines and a proxy, all real, on this machine. In every move four clients stream from one engine, with contexts of
a few hundred to some thousand tokens; when each of them gets pieces, routes to the other engine are published and the
first one leaves rollout as a cell does: its gate closes, blocks are copied out (with a handoff), memory is released.
The other engine goes on. Then they change places. The reference is the same without a handoff, in the same engines.

Computed again: prompt tokens that the destination computed, as vLLM counts them, of all that it was sent. The pause is
the time between the last piece of an answer from the one engine and the first from the other, as the client sees it.
It exits with 1 where a request was lost, or more than 5% of a context was computed again with a handoff.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp
from _common import keep, parser
from rich.console import Console
from rich.table import Table

from gyre import models
from gyre.cell.engine_client import EngineProcess, EngineSettings
from gyre.child import Child

SECRET = "handoff"
STREAMS = 4
BEFORE, AFTER = 10, 3  # pieces that every client gets before and after a move
ANSWER = 3000  # tokens that a client would get if it stayed
WAIT = 600.0
STAGES = ("publish routes", "drain", "copy KV out", "release memory")


@dataclass(frozen=True)
class Size:
    """What is measured; `contexts` are the tokens of the streams' prompts."""

    model: str
    moves: int
    contexts: tuple[int, ...]


FULL = Size("gyre:smollm2-135m-instruct", 20, (400, 800, 1200, 1600))
QUICK = Size("gyre:tiny", 6, (400, 900, 1800, 3600))


class Lost(Exception):
    """What must not happen did."""


@dataclass
class Figures:
    """Of all moves of one kind: tokens, and seconds."""

    moved: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STAGES})
    bytes: list[int] = field(default_factory=list)


class World:
    """Two engines and a proxy."""

    def __init__(self, path: Path, size: Size) -> None:
        self._path = path
        self._size = size
        self._random = random.Random(0)
        self._epochs = [0, 0]
        self._version = self._number = 0
        self._engines: list[EngineProcess] = []

    async def start(self) -> None:
        """Start everything, and serve."""
        model = str(await asyncio.to_thread(models.resolve, self._size.model))
        context = max(self._size.contexts) + ANSWER + 64
        common: dict[str, Any] = {"model": model, "secret": SECRET, "max_context": context, "slots": STREAMS + 1}
        common |= {"dtype": "float32", "kv": {"transport": "auto", "limit": 4 << 30, "timeout": 30.0}}
        common["fork_server"] = f"handoff-{self._path.name}"
        for rank in (0, 1):
            settings = EngineSettings(rank=rank, **common)
            self._engines.append(await EngineProcess.start(settings, self._path / f"engine-{rank}.log"))
        for engine in self._engines:
            await engine.ready(WAIT)
        self._checksum = (await self._engines[0].load(model))["checksum"]
        self._model = model
        command = [sys.executable, "-m", "gyre.proxy.server"]
        self._proxy = await Child.spawn("proxy", command, self._path / "proxy.log")
        started = await self._proxy.call("start", WAIT, secret=SECRET, max_context=context)
        self._url = f"http://127.0.0.1:{started['port']}/v1/completions"
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))

    async def stop(self) -> None:
        """End everything."""
        if hasattr(self, "_session"):
            await self._session.close()
        if hasattr(self, "_proxy"):
            await self._proxy.stop()
        await asyncio.gather(*(engine.stop() for engine in self._engines))

    async def _routes(self, engines: dict[int, Any], moves: dict[int, int]) -> None:
        self._version += 1
        tables = {"engines": {str(rank): route for rank, route in engines.items()}}
        tables["moves"] = {str(n): rank for n, rank in moves.items()}
        await self._proxy.call("routes", WAIT, version=self._version, **tables)

    async def _open(self, rank: int, handoff: bool) -> None:
        self._epochs[rank] += 1
        engine = self._engines[rank]
        await engine.open(self._epochs[rank], 0)
        route = {"url": engine.url, "epoch": self._epochs[rank], "policy": 0}
        await self._routes({rank: route | ({"kv": engine.kv} if handoff else {})}, {})

    async def _counts(self, rank: int) -> dict[str, float]:
        """Prompt tokens of an engine by where their KV came from."""
        headers = {"Authorization": f"Bearer {SECRET}"}
        async with self._session.get(f"{self._engines[rank].url}/metrics", headers=headers) as response:
            text = await response.text()
        found = re.findall(r'^vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)$', text, re.MULTILINE)
        return {source: float(value) for source, value in found}

    async def measure(self, handoff: bool) -> Figures:
        """Move the clients back and forth."""
        figures = Figures()
        for rank in (0, 1):
            await self._engines[rank].close()
            await self._open(rank, handoff)
        await self._move(0, Figures(), handoff)  # everything was used once then
        await self._move(1, Figures(), handoff)
        for number in range(self._size.moves):
            await self._move(number % 2, figures, handoff)
            kind = "with" if handoff else "without"
            if sys.stderr.isatty():
                print(f"\rmove {number + 1} of {self._size.moves} {kind} a handoff ", end="\r", file=sys.stderr)
        return figures

    async def _move(self, source: int, figures: Figures, handoff: bool) -> None:
        target, engine = 1 - source, self._engines[source]
        clients = [await self._client(source, context) for context in sorted(self._size.contexts, reverse=True)]
        asked = []
        try:
            for client in clients:
                asked.append(asyncio.create_task(client.ask(self._session, self._url)))
                await client.reached(1)
            await asyncio.gather(*(client.reached(BEFORE) for client in clients))
            before = await self._counts(target)
            await self._leave(source, target, clients, figures, handoff)
            new = await self._arrived(target, before)
            await asyncio.gather(*(client.reached(client.at_move + AFTER) for client in clients))
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        for client in clients:
            await self._proxy.call("close", WAIT, execution=client.number, try_number=1)
        figures.moved.append(sum(new.values()))
        figures.computed.append(new["local_compute"])
        figures.pauses += [client.pause for client in clients]
        await engine.wake(["weights"])
        await engine.load(self._model, self._checksum, 0)
        await engine.wake(["kv_cache"])
        await self._open(source, handoff)

    async def _arrived(self, target: int, before: dict[str, float]) -> dict[str, int]:
        """Prompt tokens that a destination was sent, by where their KV came from, when all of them are there."""
        while True:
            after = await self._counts(target)
            new = {name: int(after[name] - before.get(name, 0)) for name in after}
            if sum(new.values()) >= sum(self._size.contexts):
                return new
            await asyncio.sleep(0.02)

    async def _leave(self, source: int, target: int, clients: list[Client], figures: Figures, handoff: bool) -> None:
        engine, times = self._engines[source], [time.monotonic()]
        for client in clients:
            client.move()
        await self._routes({source: None}, {client.number: target for client in clients})
        times.append(time.monotonic())
        if await engine.close():
            raise Lost("an engine holds requests after its gate closed")
        times.append(time.monotonic())
        if handoff:
            figures.bytes.append((await engine.export())["bytes"])
        times.append(time.monotonic())
        await engine.sleep()
        times.append(time.monotonic())
        for name, begun, ended in zip(STAGES, times, times[1:], strict=False):
            figures.stages[name].append(ended - begun)

    async def _client(self, engine: int, context: int) -> Client:
        self._number += 1
        client = Client(self._number, [self._random.randrange(250) for _ in range(context)])
        path = str(self._path / f"{self._number}.records")
        words = {"execution": client.number, "try_number": 1, "token": client.token, "engine": engine}
        await self._proxy.call("register", WAIT, record_path=path, **words)
        return client


class Client:
    """One stream, and when its pieces came."""

    def __init__(self, number: int, prompt: list[int]) -> None:
        self.number = number
        self.token = f"client-{number}"
        self.at_move = 0
        self._prompt = prompt
        self._times: list[float] = []
        self._more = asyncio.Event()
        self._fault: str | None = None

    def move(self) -> None:
        """It is going to be moved."""
        self.at_move = len(self._times)

    @property
    def pause(self) -> float:
        """The longest time between two pieces since then: an engine that goes on sends them every few milliseconds."""
        times = self._times[max(0, self.at_move - 1) :]
        return max(later - earlier for earlier, later in zip(times, times[1:], strict=False))

    async def reached(self, count: int) -> None:
        """Wait until it has got so many pieces."""
        while len(self._times) < count:
            if self._fault is not None:
                raise Lost(f"a request was lost: {self._fault}")
            self._more.clear()
            await self._more.wait()

    async def ask(self, session: aiohttp.ClientSession, url: str) -> None:
        """Stream until nobody wants more."""
        body = {"model": "policy", "prompt": self._prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}  # a piece for every token, also where it makes no text
        headers = {"Authorization": f"Bearer {self.token}"}
        fault = "the answer ended too soon"
        try:
            async with session.post(url, json=body, headers=headers) as response:
                if response.status != 200:
                    fault = f"{response.status}: {await response.text()}"
                    return
                async for line in response.content:
                    if line.startswith(b"data: {") and any(c.get("token_ids") for c in json.loads(line[6:])["choices"]):
                        self._times.append(time.monotonic())
                        self._more.set()
        finally:
            self._fault = fault
            self._more.set()


def percentile(values: list[float], percent: int) -> float:
    """A percentile, between the nearest of few values."""
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def summary(figures: Figures) -> dict[str, Any]:
    """Figures as they are written down."""
    shares = [computed / moved for computed, moved in zip(figures.computed, figures.moved, strict=True)]
    return {
        "moves": len(shares),
        "moved_tokens_per_move": sum(figures.moved) / len(shares),
        "computed_again_per_move": sum(figures.computed) / len(shares),
        "computed_again_share": sum(figures.computed) / sum(figures.moved),
        "computed_again_share_worst": max(shares),
        "pauses_s": [round(pause, 4) for pause in figures.pauses],
        "pause_s_p50": percentile(figures.pauses, 50),
        "pause_s_p99": percentile(figures.pauses, 99),
        "stages_s": {name: median(values) for name, values in figures.stages.items()},
        "stages_s_worst": {name: max(values) for name, values in figures.stages.items()},
        "bytes_per_move": sum(figures.bytes) / len(shares),
    }


def show(size: Size, found: dict[str, dict[str, Any]]) -> None:
    """Print the two side by side."""
    table = Table(title=f"KV handoff: {found['on']['moves']} moves each of {STREAMS} streams, {size.model}")
    table.add_column("")
    for name in ("on", "off"):
        table.add_column(f"handoff {name}", justify="right")
    both = (found["on"], found["off"])
    table.add_row("context moved, tokens a move", *(f"{each['moved_tokens_per_move']:.0f}" for each in both))
    table.add_row("computed again, tokens a move", *(f"{each['computed_again_per_move']:.1f}" for each in both))
    table.add_row("computed again, of the context", *(f"{each['computed_again_share']:.2%}" for each in both))
    table.add_row("worst move", *(f"{each['computed_again_share_worst']:.2%}" for each in both))
    table.add_row("KV copied, MB a move", *(f"{each['bytes_per_move'] / 1e6:.1f}" for each in both))
    for percent in (50, 99):
        table.add_row(f"client's pause, p{percent}, s", *(f"{each[f'pause_s_p{percent}']:.3f}" for each in both))
    for stage in STAGES:
        pairs = ((each["stages_s"][stage], each["stages_s_worst"][stage]) for each in both)
        table.add_row(f"{stage}, median and worst, s", *(f"{usual:.3f} {worst:.3f}" for usual, worst in pairs))
    Console().print(table)


async def run(path: Path, size: Size) -> dict[str, dict[str, Any]]:
    """Measure both."""
    world = World(path, size)
    try:
        await world.start()
        return {name: summary(await world.measure(name == "on")) for name in ("off", "on")}
    finally:
        await world.stop()


def main() -> None:
    """Entry point."""
    arguments = parser(__doc__).parse_args()
    size = QUICK if arguments.quick else FULL
    with tempfile.TemporaryDirectory(prefix="gyre-handoff-") as directory:
        try:
            found = asyncio.run(run(Path(directory), size))
        except Lost as error:
            sys.exit(str(error))
    show(size, found)
    keep(arguments.json, {"model": size.model, "contexts": size.contexts, **found})
    if found["on"]["computed_again_share_worst"] >= 0.05:
        sys.exit("more than 5% of a context was computed again")


if __name__ == "__main__":
    main()
