"""What the proxy costs: latency it adds, requests it answers, memory of streams it holds, beside named references.

    python benchmarks/proxy.py                  all of it, some ten minutes
    python benchmarks/proxy.py --quick          one short round of each
    python benchmarks/proxy.py --profile        only where the proxy's time goes, by stages

In one run, against the same stand-in engines (processes that answer from prepared bytes, in steps as an engine does):
  direct        clients are connected to the engines themselves
  gyre          through Gyre's proxy, which asks for the ids and log-probabilities of every token and records them
  vllm-router   through the router of vLLM's project, a compiled program; it records nothing. It is no dependency of
                Gyre: python -m venv DIR && DIR/bin/pip install vllm-router==0.1.17, then --router DIR/bin/vllm-router.
                Without it that row is left out.
Clients ask the same of all three: prompts of 2,000 words, answers without ids or log-probabilities. The router passes
bytes on; the proxy is sent the ids of the prompt and more bytes for each token, reads them and writes them down.

Latency, at 1, 64 and 512 streams: time from the request to the first token, and, of every further token, time from its
writing by the engine to its arrival. What is added is the difference to direct in the same round. Requests per second:
64 clients that ask again as soon as they are answered, 16 tokens from engines whose steps take no time, streaming and
plain. Memory: one fresh proxy that holds 1,000 streams. Processor time is the proxy's own, all its threads, for each
token or request; it depends least on what else the machine does. Rounds are interleaved and medians over them printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from _common import keep, parser
from _ways import EXECUTIONS, HERE, Engines, Figures, Way, direct, gyre, router
from rich.console import Console
from rich.table import Table

ADDED_P50_MS, ADDED_P99_MS, HELD_MB, SHARE = 2.0, 10.0, 300.0, 0.5


@dataclass(frozen=True)
class Level:
    """Streams that are open at once."""

    streams: int
    rate: float  # tokens a second of each; 0 as fast as it goes
    tokens: int  # of an answer, on the average
    clients: int = 1  # processes
    stream: bool = True

    def name(self) -> str:
        """In words."""
        return (
            f"{self.streams} streams of {self.rate:g} tokens/s" if self.rate else "streaming" * self.stream or "plain"
        )


LEVELS = (Level(1, 100, 20), Level(64, 25, 50), Level(512, 10, 20, clients=2))
ANSWERS = (Level(64, 0, 16, clients=2), Level(64, 0, 16, clients=2, stream=False))


# -- one measurement ---------------------------------------------------------------------------------------------------
async def load(engines: Engines, way: Way, level: Level, seconds: float, **more: Any) -> list[Figures]:
    """Have clients ask; the figures of each of their processes."""
    shares = [way.keys[: level.streams][i :: level.clients] for i in range(level.clients)]
    asked = {"seconds": seconds, "tokens": level.tokens, "stream": level.stream, "prompt": engines.prompt, **more}
    if level.rate:
        asked |= {"spread": True, "start_seconds": 0.8}

    async def one(seed: int, keys: list[str]) -> Figures:
        arguments = json.dumps(asked | {"ports": way.ports, "keys": keys, "seed": seed})
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(HERE / "_streams.py"), arguments, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        if process.returncode:
            raise SystemExit("a client failed")
        return json.loads(output)

    figures = await asyncio.gather(*(one(*share) for share in enumerate(shares)))
    if faults := [fault for one in figures for fault in one["faults"]]:
        said = way.log.read_text()[-2000:] if way.log else ""
        raise SystemExit(f"{way.name}, {level.name()}: {faults[0]}\n{said}")
    return figures


def quantile(values: list[int], share: float) -> float:
    """In milliseconds, of nanoseconds."""
    return sorted(values)[int(share * (len(values) - 1))] / 1e6 if values else 0.0


async def measure(engines: Engines, way: Way, level: Level, seconds: float) -> Figures:
    """One way at one level, once."""
    engines.pace(level.rate)
    before = way.processor_s()
    figures = await load(engines, way, level, seconds)
    used = way.processor_s() - before
    first, further = ([value for one in figures for value in one[key]] for key in ("first", "further"))
    answers, tokens = (sum(one[key] for one in figures) for key in ("all_answers", "all_tokens"))
    return {
        "first_ms": {"p50": quantile(first, 0.5), "p99": quantile(first, 0.99)},
        "further_ms": {"p50": quantile(further, 0.5), "p99": quantile(further, 0.99)},
        "requests_per_s": sum(one["answers"] for one in figures) / seconds,
        "processor_us": {"token": 1e6 * used / tokens, "request": 1e6 * used / answers},
        "clients_busy": max(one["busy"] for one in figures),
        "samples": len(further),
        "tokens": tokens,
    }


async def held(engines: Engines, way: Way) -> Figures:
    """Memory of a proxy that holds many streams."""
    begun = way.memory_mb()
    engines.pace(0.25)
    level = Level(EXECUTIONS, 0.25, 8, clients=2)
    streams = asyncio.create_task(load(engines, way, level, seconds=6.0))
    await asyncio.sleep(6.0)
    seen = way.memory_mb()
    engines.pace(100)
    await streams
    return {"before": begun, "held": seen}


# -- all of it ---------------------------------------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def ways(engines: Engines, place: Path, options: Any) -> AsyncIterator[dict[str, Way]]:
    """All three, started."""
    made = [direct(engines), await gyre(engines, place)]
    try:
        if options.router:
            made.append(await router(engines, place, options.router, options.router_policy))
        yield {way.name: way for way in made}
    finally:
        for way in made[2:]:
            await way.stop()


def median(rounds: list[Figures], *keys: str) -> float:
    """Over the rounds, of one figure."""

    def at(figures: Any) -> float:
        for key in keys:
            figures = figures[key]
        return figures

    return statistics.median(at(figures) for figures in rounds)


def added(rounds: dict[str, list[Figures]], way: str, what: str, quantile_name: str) -> float:
    """Median over the rounds of the difference to a direct connection in the same round."""
    pairs = zip(rounds[way], rounds["direct"], strict=True)
    return statistics.median(a[what][quantile_name] - b[what][quantile_name] for a, b in pairs)


def show_latency(console: Console, level: Level, rounds: dict[str, list[Figures]]) -> None:
    """One level's table."""
    table = Table(title=f"{level.name()}; milliseconds", title_justify="left", box=None)
    columns = ("", "first p50", "p99", "added p50", "p99", "further p50", "p99", "added p50", "p99", "us of processor")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for name, figures in rounds.items():
        cells = []
        for what in ("first_ms", "further_ms"):
            cells += [f"{median(figures, what, q):.2f}" for q in ("p50", "p99")]
            cells += [f"{added(rounds, name, what, q):.2f}" if name != "direct" else "" for q in ("p50", "p99")]
        used = f"{median(figures, 'processor_us', 'token'):.0f} a token" if name != "direct" else ""
        table.add_row(name, *cells, used)
    console.print(table)


def show_answers(console: Console, level: Level, rounds: dict[str, list[Figures]]) -> None:
    """Requests per second of one kind."""
    table = Table(title=f"short answers, {level.name()}", title_justify="left", box=None)
    for column in ("", "requests/s", "x vllm-router", "us of processor a request", "busiest client"):
        table.add_column(column, justify="right" if column else "left")
    for name, figures in rounds.items():
        per_s, us = median(figures, "requests_per_s"), median(figures, "processor_us", "request")
        beside = f"{share(rounds, name):.2f}" if "vllm-router" in rounds else ""
        busy = f"{100 * median(figures, 'clients_busy'):.0f}%"
        table.add_row(name, f"{per_s:,.0f}", beside, f"{us:,.0f}" if name != "direct" else "", busy)
    console.print(table)


def share(rounds: dict[str, list[Figures]], way: str) -> float:
    """Requests per second beside vllm-router's in the same round."""
    pairs = zip(rounds[way], rounds["vllm-router"], strict=True)
    return statistics.median(a["requests_per_s"] / b["requests_per_s"] for a, b in pairs)


def judge(console: Console, latency: dict[int, Any], answers: dict[str, Any], memory: dict[str, Figures]) -> None:
    """What was measured beside what is wanted."""

    def line(what: str, measured: float, bound: float, least: bool = False, unit: str = "") -> None:
        met = measured >= bound if least else measured < bound
        console.print(
            f"{what}: {measured:,.2f}{unit}, wanted {'at least' if least else 'under'} {bound:g}{unit}: "
            f"{'met' if met else 'not met'}"
        )

    for what, name in (("first_ms", "first token"), ("further_ms", "further tokens")):
        if rounds := latency.get(64):
            line(f"added at 64 streams, {name}, p50", added(rounds, "gyre", what, "p50"), ADDED_P50_MS, unit=" ms")
            line(f"added at 64 streams, {name}, p99", added(rounds, "gyre", what, "p99"), ADDED_P99_MS, unit=" ms")
    line(f"{EXECUTIONS:,} streams held, resident", memory["gyre"]["held"]["resident"], HELD_MB, unit=" MB")
    for kind, rounds in answers.items():
        if "vllm-router" in rounds:
            line(f"requests/s beside vllm-router's, {kind}", share(rounds, "gyre"), SHARE, least=True)


async def profile(console: Console, engines: Engines, place: Path, seconds: float) -> Figures:
    """Where the proxy's time goes, at two loads."""
    kept: Figures = {}
    for level in (replace(LEVELS[1], rate=25), *ANSWERS):
        out = place / "samples.json"
        way = await gyre(engines, place, sampled=out)
        assert way.process is not None
        await measure(engines, way, replace(level, streams=8), 1.0)
        way.process.send_signal(signal.SIGUSR1)
        figures = await measure(engines, way, level, seconds)
        way.process.send_signal(signal.SIGUSR1)
        await way.stop()
        samples = json.loads(out.read_text())
        out.unlink()
        total = sum(count for _, count in samples["stages"])
        used = figures["processor_us"]["request"]
        table = Table(title=f"{level.name()}: {used:,.0f} us a request, sampled", title_justify="left", box=None)
        table.add_column("stage")
        table.add_column("share", justify="right")
        table.add_column("us a request", justify="right")
        for name, count in samples["stages"]:
            table.add_row(name, f"{100 * count / total:.1f}%", f"{used * count / total:,.0f}")
        console.print(table)
        for text, count in samples["lines"][:25]:
            console.print(f"  {100 * count / total:4.1f}%  {text[:130]}", markup=False)
        kept[level.name()] = samples | figures
    return kept


async def run(options: Any, console: Console, place: Path) -> None:
    """Measure, print, and keep."""
    engines = Engines(options.prompt)
    await engines.start()
    rounds, seconds = (1, 2.0) if options.quick else (options.rounds, 5.0)
    kept: Figures = {"load_before": os.getloadavg(), "cores": os.cpu_count(), "router": options.router}
    try:
        if options.profile:
            keep(options.json, kept | await profile(console, engines, place, seconds))
            return
        measured: dict[Level, dict[str, list[Figures]]] = {}
        async with ways(engines, place, options) as started:
            for _ in range(rounds):
                for level in (*LEVELS, *ANSWERS):
                    for way in started.values():
                        figures = await measure(engines, way, level, seconds)
                        measured.setdefault(level, {}).setdefault(way.name, []).append(figures)
            recorded = await started["gyre"].stop()
        memory: dict[str, Figures] = {}
        async with ways(engines, place, options) as started:
            for way in started.values():
                if way.process is not None:
                    memory[way.name] = await held(engines, way)
            await started["gyre"].stop()
    finally:
        await engines.stop()
    for level in LEVELS:
        show_latency(console, level, measured[level])
    for level in ANSWERS:
        show_answers(console, level, measured[level])
    for name, figures in memory.items():
        now, begun = figures["held"], figures["before"]
        console.print(
            f"{EXECUTIONS:,} streams held by {name}: {now['resident']:,.0f} MB resident, {now['proportional']:,.0f} MB "
            f"proportional ({begun['resident']:,.0f} MB before)"
        )
    seen = sum(figures["tokens"] for rounds_of in measured.values() for figures in rounds_of["gyre"])
    console.print(
        f"gyre recorded {recorded['tokens']:,} of the {seen:,} tokens that clients were answered with, in "
        f"{recorded['bytes'] / 1e6:,.1f} MB; of {recorded['requests']:,} requests {recorded['lost']:,} were lost"
    )
    if recorded["tokens"] != seen:
        raise SystemExit("not every token was recorded, or one twice")
    if not options.router:
        console.print("vllm-router is not here, so it was left out: --help says how to install it")
    latency = {level.streams: measured[level] for level in LEVELS}
    answers = {level.name(): measured[level] for level in ANSWERS}
    judge(console, latency, answers, memory)
    kept["load_after"] = os.getloadavg()
    console.print(
        "load of the machine: {:.1f} before, {:.1f} after".format(kept["load_before"][0], kept["load_after"][0])
    )
    kept |= {"memory": memory, "recorded": recorded}
    kept["levels"] = [asdict(level) | {"ways": figures} for level, figures in measured.items()]
    keep(options.json, kept)


def main() -> None:
    """Measure, print, and keep what was measured."""
    asked = parser(__doc__)
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--prompt", type=int, default=2000, help="words, and tokens, of every prompt")
    asked.add_argument("--router", metavar="PROGRAM", help="vllm-router; looked for beside python and in PATH")
    asked.add_argument("--router-policy", default="round_robin", help="the cheapest by default; its own is cache_aware")
    asked.add_argument("--profile", action="store_true", help="say where the proxy's time goes, and no more")
    options = asked.parse_args()
    beside = Path(sys.executable).parent / "vllm-router"
    options.router = options.router or (str(beside) if beside.exists() else shutil.which("vllm-router"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="gyre-proxy-") as place:
        asyncio.run(run(options, Console(highlight=False, width=140), Path(place)))


if __name__ == "__main__":
    main()
