"""The supervisor of a harness host: runs what it is granted, and keeps the proxy that harnesses talk to.

It decides nothing. Grants, cancels and route changes come in one ordered list; outcomes leave as files and news of
them. When the proxy dies the tries that depended on it fail (the scheduler grants them again), and a new one starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from gyre.child import Child
from gyre.config import Config
from gyre.errors import ChildFailed, InvariantBroken, StoreLost, Superseded
from gyre.events import Event, RankReady, TryFailed
from gyre.harness.execution import Host, Try, TryBroken
from gyre.harness.process import adopt_orphans, bury, kill_strays
from gyre.launch.identity import Identity
from gyre.proxy.routing import RouteTable
from gyre.run_dir import RunDir
from gyre.status import STATE_HOSTING, STATE_STARTING, RankStatus
from gyre.store import Inbox, Store

log = logging.getLogger(__name__)

POLL_SECONDS = 0.03
TOTALS_SECONDS = 1.0
_PROXY_SECONDS = 60.0
_PROXY_STARTS = 5  # in a row, each within `_PROXY_SECONDS` of the one before


class Context(Protocol):
    """What a host needs to know of the run and its place in it (`gyre.attempt.RankContext`)."""

    config: Config
    run_dir: RunDir
    attempt: int
    incarnation: int
    identity: Identity
    store: Store
    secret: str
    scratch: Path
    rank: int

    def log(self, name: str) -> Path:
        """Path of the log of one of this rank's processes."""


def model_name(config: Config) -> str:
    """The name under which the model is served to harnesses."""
    return config.model.path.rstrip("/").rsplit("/", 1)[-1].removeprefix("gyre:")


class HostSupervisor:
    """Start it, run it until it is cancelled or told to leave, and stop it."""

    def __init__(self, context: Context, report: Callable[[Event], None]) -> None:
        self._context = context
        self._report = report
        self._inbox: Inbox = context.store.inbox(f"host/{context.rank}/{context.incarnation}")
        self._table = RouteTable()
        self._tries: dict[int, Try] = {}
        self._tasks: dict[asyncio.Task[None], Try] = {}
        self._host: Host | None = None  # with the present proxy; None while there is none
        self._host_changed = asyncio.Event()
        self._totals: dict[str, Any] = {}
        self._closed: Counter[str] = Counter()
        self._fault: asyncio.Future[None] | None = None
        self._since = time.time()
        self._ready = False

    # -- life --------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Start the proxy and report that this host is ready."""
        adopt_orphans()
        self._fault = asyncio.get_running_loop().create_future()
        await self._start_proxy()
        self._ready, self._since = True, time.time()
        context = self._context
        self._report(RankReady(context.rank, context.incarnation, context.identity.node))

    async def run(self) -> None:
        """Take messages until cancelled.

        Raises:
            StoreLost, Superseded, ChildFailed: this host cannot go on.
        """
        assert self._fault is not None
        watch = asyncio.create_task(self._watch_proxy(), name="watch proxy")
        totals = asyncio.create_task(self._poll_totals(), name="totals")
        try:
            while not self._fault.done():
                for message in self._inbox.read():
                    await self._take(message)
                await asyncio.wait({self._fault}, timeout=POLL_SECONDS)
            self._fault.result()
        finally:
            for task in (watch, totals):
                task.cancel()
            await asyncio.gather(watch, totals, return_exceptions=True)

    async def stop(self) -> None:
        """Kill every harness and the proxy; tries under way have no outcome."""
        await self._kill_all()
        host, self._host = self._host, None
        if host is not None:
            await host.proxy.stop()
            await kill_strays(host.mark)
        if self._fault is not None and self._fault.done() and not self._fault.cancelled():
            self._fault.exception()  # seen, whether or not anyone was still waiting for it

    async def _kill_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=10.0)

    def status(self) -> RankStatus:
        """What this host is doing, for people."""
        phases = Counter(one.phase for one in self._tries.values())
        words = [f"{count} {phase}" for phase, count in sorted(phases.items())]
        if held := self._totals.get("held"):
            words.append(f"{held} held")
        return RankStatus(
            rank=self._context.rank,
            kind="host",
            incarnation=self._context.incarnation,
            node=self._context.identity.node,
            state=STATE_HOSTING if self._ready else STATE_STARTING,
            since=self._since,
            doing=", ".join(words) or ("waiting for grants" if self._ready else "starting the proxy"),
            live=len(self._tries),
            slots=self._context.config.hosts.executions,
        )

    # -- messages ----------------------------------------------------------------------------------------------------
    async def _take(self, message: dict[str, Any]) -> None:
        match message["message"]:
            case "grant":
                self._grant(message["n"], message["try_number"], message["engine"])
            case "routes":
                difference = {key: message.get(key) or {} for key in ("engines", "moves")}
                self._table.apply(message["version"], **difference)
                await self._tell_proxy("routes", version=message["version"], **difference)
            case "leave":
                raise ChildFailed(f"the scheduler counts this incarnation of rank {self._context.rank} as lost")
            case "cancel":
                if one := self._tries.get(message["n"]):
                    one.cancel("cancelled by the scheduler")
            case other:
                log.warning("message of an unknown kind: %s", other)

    async def _tell_proxy(self, operation: str, **arguments: Any) -> None:
        """Tell the proxy something that a new one would be told when it starts, so a dead one does not matter."""
        if self._host is not None:
            with contextlib.suppress(ChildFailed):
                await self._host.proxy.call(operation, timeout=_PROXY_SECONDS, **arguments)

    def _grant(self, n: int, number: int, engine: int) -> None:
        old = self._tries.get(n)
        if old is not None and old.number >= number:
            return
        if old is not None:
            old.fail("granted again")
        self._table.assign(n, engine)
        one = self._tries[n] = Try(n, number)
        task = asyncio.create_task(self._run_try(one), name=f"execution {n}.{number}")
        self._tasks[task] = one
        task.add_done_callback(self._ended)

    async def _run_try(self, one: Try) -> None:
        while (host := self._host) is None:
            await self._host_changed.wait()
        try:
            closed = await one.run(host, lambda: self._table.assigned(one.n))
        except TryBroken as error:
            log.warning("execution %d, try %d: %s", one.n, one.number, error)
            self._report(TryFailed(one.n, one.number, str(error)))
        except (StoreLost, Superseded, InvariantBroken):
            raise  # of the host or the run, not of this try
        except Exception as error:  # one try must not take the host's others with it
            log.exception("execution %d, try %d", one.n, one.number)
            self._report(TryFailed(one.n, one.number, f"{type(error).__name__}: {error}"))
        else:
            self._closed[closed.outcome] += 1
            self._report(closed)

    def _ended(self, task: asyncio.Task[None]) -> None:
        one = self._tasks.pop(task)
        if self._tries.get(one.n) is one:
            del self._tries[one.n]
            self._table.forget(one.n)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._fault is not None and not self._fault.done():
            self._fault.set_exception(error)

    # -- the proxy ---------------------------------------------------------------------------------------------------
    async def _start_proxy(self) -> None:
        context = self._context
        proxy = await Child.spawn("proxy", [sys.executable, "-m", "gyre.proxy.server"], context.log("proxy"))
        try:
            answer = await proxy.call("start", timeout=_PROXY_SECONDS, **self._settings())
        except BaseException:
            await proxy.stop(grace=0.0)
            raise
        self._host = Host(
            run_dir=context.run_dir,
            config=context.config,
            attempt=context.attempt,
            rank=context.rank,
            job_key=context.identity.job_key,
            scratch=context.scratch,
            proxy=proxy,
            port=answer["port"],
            model=model_name(context.config),
        )
        self._host_changed.set()
        self._host_changed = asyncio.Event()
        if self._table.version:  # sent before any difference can be: nothing has been awaited since the host was set
            await self._tell_proxy("routes", **self._table.snapshot())

    def _settings(self) -> dict[str, Any]:
        config = self._context.config
        return {
            "secret": self._context.secret,
            "max_context": config.model.max_context,
            "request_timeout": config.serving.request_timeout,
            "slots": config.cells.slots,
            "model": model_name(config),
            "models": config.harness.models,
        }

    async def _watch_proxy(self) -> None:
        """Start the proxy again whenever it dies, and let go of the tries that depended on it."""
        starts = 0
        while True:
            assert self._host is not None
            proxy, begun = self._host.proxy, time.monotonic()
            code = await proxy.wait()
            log.error("the proxy ended with %d", code)
            self._host = None
            for one in list(self._tries.values()):
                one.fail(f"the proxy ended with {code}")
            await proxy.stop(grace=0.0)
            starts = starts + 1 if time.monotonic() - begun < _PROXY_SECONDS else 1
            try:
                if starts > _PROXY_STARTS:
                    raise ChildFailed(f"the proxy ended {starts} times in a row, last with {code}")
                await self._start_proxy()
            except ChildFailed as error:
                self._fail(error)
                return

    async def _poll_totals(self) -> None:
        """Ask the proxy for its numbers, and bury orphans that have ended."""
        seen: set[int] = set()
        while True:
            await asyncio.sleep(TOTALS_SECONDS)
            seen = bury(seen)
            if self._host is not None:
                with contextlib.suppress(ChildFailed):
                    self._totals = await self._host.proxy.call("totals", timeout=_PROXY_SECONDS)
