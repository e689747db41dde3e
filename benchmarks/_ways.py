"""Ways from clients to engines: none between, Gyre's proxy, vllm-router; and the stand-in engines behind them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import tempfile
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from _common import ROOT

from gyre.child import Child

HERE = Path(__file__).resolve().parent
ENGINES = 2
EXECUTIONS = 1000
_SECRET = "benchmark"
_START_SECONDS = 60.0

Figures = dict[str, Any]


async def _nothing() -> Figures:
    return {}


@dataclass
class Way:
    """A way from clients to engines."""

    name: str
    ports: list[int]
    keys: list[str]
    process: psutil.Process | None = None  # what stands between
    log: Path | None = None
    stop: Callable[[], Awaitable[Figures]] = _nothing

    def processor_s(self) -> float:
        """Processor time used so far."""
        if self.process is None:
            return 0.0
        times = self.process.cpu_times()
        return times.user + times.system

    def memory_mb(self) -> dict[str, float]:
        """Resident and proportional memory now."""
        assert self.process is not None
        full = self.process.memory_full_info()
        return {"resident": full.rss / 1e6, "proportional": full.pss / 1e6}


class Engines:
    """The stand-ins; their prompts have `prompt` tokens."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.ports: list[int] = []
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        """Start them."""
        for _ in range(ENGINES):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(HERE / "_stand_in.py"),
                str(self.prompt),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            self._processes.append(process)
            self.ports.append(int(await process.stdout.readline()))

    def pace(self, rate: float) -> None:
        """Have every stream of theirs run at this rate."""
        for port in self.ports:
            body = json.dumps({"tokens_per_second": rate}).encode()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/pace", body, timeout=10) as answer:
                answer.read()

    async def stop(self) -> None:
        """End them."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


def direct(engines: Engines) -> Way:
    """No proxy."""
    return Way("direct", engines.ports, ["none"] * EXECUTIONS)


async def gyre(engines: Engines, place: Path, sampled: Path | None = None) -> Way:
    """Gyre's proxy as a harness host runs it, with an execution for every stream."""
    command = [sys.executable, "-P", "-m", "gyre.proxy.server"]  # the one beside this benchmark
    if sampled is not None:
        command = [sys.executable, str(HERE / "_samples.py"), str(sampled)]
    place = Path(tempfile.mkdtemp(dir=place))
    log = place / "proxy.log"
    child = await Child.spawn("proxy", command, log, env={"PYTHONPATH": str(ROOT)})
    started = await child.call("start", timeout=_START_SECONDS, secret=_SECRET, max_context=1 << 20, model="policy")
    table = {
        str(rank): {"url": f"http://127.0.0.1:{port}", "epoch": 1, "policy": 0}
        for rank, port in enumerate(engines.ports)
    }
    await child.call("routes", version=1, engines=table, moves={})
    keys = [f"key-{n}" for n in range(EXECUTIONS)]
    for n, key in enumerate(keys):
        where = {"engine": n % ENGINES, "record_path": str(place / f"{n}.records")}
        await child.call("register", execution=n, try_number=1, token=key, **where)

    async def stop() -> Figures:
        counts = [await child.call("close", execution=n, try_number=1) for n in range(EXECUTIONS)]
        await child.stop()
        total = {key: sum(one[key] for one in counts) for key in ("requests", "answered", "lost", "tokens")}
        return total | {"bytes": sum(path.stat().st_size for path in place.glob("*.records"))}

    return Way("gyre", [started["port"]], keys, psutil.Process(child.pid), log, stop)


async def router(engines: Engines, place: Path, program: str, policy: str) -> Way:
    """vllm-router with the same engines as its workers."""
    port, metrics = _free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in engines.ports]
    command = [program, "--worker-urls", *urls, "--port", str(port), "--policy", policy]
    command += ["--prometheus-port", str(metrics), "--log-level", "error", "--worker-startup-check-interval", "1"]
    log = place / "router.log"
    with open(log, "ab") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)

    async def stop() -> None:
        process.terminate()
        await process.wait()

    for _ in range(int(_START_SECONDS / 0.2)):
        await asyncio.sleep(0.2)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read())
            return Way("vllm-router", [port], ["none"] * EXECUTIONS, psutil.Process(process.pid), log, stop)
    await stop()
    raise SystemExit(f"vllm-router does not answer; it said:\n{log.read_text()[-2000:]}")


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
