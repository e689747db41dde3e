"""What rank 0 does besides being the core: the feeder and the weight server, the scheduler's loop, the event log, and
what people look at. It decides nothing itself and never computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from dataclasses import fields
from typing import Any

from gyre import checkpoint, status, words
from gyre.attempt import RankContext
from gyre.child import Child
from gyre.errors import (
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USER,
    ChildFailed,
    GyreError,
    StoreLost,
    UserError,
    WeightsMismatch,
)
from gyre.events import (
    Event,
    ExecutionClosed,
    GroupTaken,
    RankLost,
    RankReady,
    RunEnded,
    RunStarted,
    SampleRefused,
    StepSkipped,
    UpdateDone,
    closed_event,
    decode,
    encode,
)
from gyre.launch import node
from gyre.metrics import RunMetrics
from gyre.plain import PlainReporter
from gyre.report import report, write_summary
from gyre.run_dir import EventLog, RunDir, read_events, read_json, write_atomic
from gyre.scheduler.loop import SchedulerLoop
from gyre.scheduler.policy import policy_of
from gyre.scheduler.settings import Settings
from gyre.scheduler.state import SchedulerState
from gyre.shared_memory import remove_shared
from gyre.simulate import trace
from gyre.status import Phase, RankStatus, RunStatus, SchedulerStatus, StreamStatus
from gyre.tasks import Task, TaskOrder, load_tasks, task_file
from gyre.usage import UsageMeter

log = logging.getLogger(__name__)

STATUS_SECONDS = 1.0
USAGE_SECONDS = 60.0
GONE_SECONDS = 25.0
SKIPPED_STEPS = 3  # updates in a row without a step that end a run


class RankMissing(GyreError):
    """A rank did not report in time."""


class Coordinator:
    """Rank 0's services for the whole run."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._config = context.config
        self._events = EventLog(context.run_dir.events)
        self._metrics = RunMetrics(self._config)
        for event in read_events(context.run_dir.events):
            self._metrics.apply(event)
        self._figures: EventLog | None = None
        self._plain = PlainReporter(self._config, metrics=self._metrics)
        self._started = time.time()
        self._usage = UsageMeter(context.layout.engines, self._started)
        self._status = RunStatus(name=context.run_dir.name, started=self._started, attempt=context.attempt)
        self._stream = StreamStatus()
        self._ending = False
        self._inbox = context.store.inbox("reports")
        self._loop: SchedulerLoop | None = None
        self._feeder: Child | None = None
        self._weights: Child | None = None
        self._ready: dict[int, RankReady] = {}
        self._absent: list[RankLost] = []  # ranks that this attempt begins without
        self._shown: asyncio.Task[None] | None = None

    # -- life --------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Start the services that ranks need before they can be ready."""
        context = self._context
        layout = context.layout
        remove_shared(context.run_dir.path, keep_attempt=context.attempt)
        commits = context.run_dir.commits()
        version = commits[-1] if commits else 0
        self._record(RunStarted(version, layout.cells, layout.standalone, layout.hosts))
        made = [json.dumps(record.flat) + "\n" for record in self._metrics.done]  # without those that were lost
        write_atomic(context.run_dir.metrics, "".join(made))
        self._figures = EventLog(context.run_dir.metrics)
        self._shown = asyncio.create_task(self._show(), name="show")
        run_dir = str(context.run_dir.path)
        self._weights, self._feeder = await asyncio.gather(
            self._spawn("snapshots", "gyre.training.snapshots"), self._spawn("feeder", "gyre.training.feeder", run_dir)
        )
        served = await self._weights.call(
            "start",
            run_dir=run_dir,
            attempt=context.attempt,
            secret=context.secret,
            address=context.address,
            port=node.port(self._config, "snapshots"),
        )
        context.store.set("snapshots", served["url"])
        fed = await self._feeder.call(
            "start",
            trained=[group for begin, end in (self._cursor() or {}).get("trained", []) for group in range(begin, end)],
            secret=context.secret,
            address=context.address,
            port=node.port(self._config, "feeder"),
        )
        context.store.set("feeder", fed["url"])

    async def _spawn(self, name: str, *module: str) -> Child:
        return await Child.spawn(
            name,
            [sys.executable, "-m", *module],
            self._context.log(name),
            self._on_service_event,
            {"OMP_NUM_THREADS": "1"},
        )

    async def run(self) -> None:
        """Wait for every rank, then schedule until the run is over; says so in the store's word `stop`."""
        watching = [asyncio.create_task(self._watch_child(child)) for child in (self._feeder, self._weights)]
        driving = asyncio.create_task(self._schedule())
        try:
            done, _ = await asyncio.wait([driving, *watching], return_when=asyncio.FIRST_COMPLETED)
            next(iter(done)).result()
        finally:
            for task in (driving, *watching):
                task.cancel()
            await asyncio.gather(driving, *watching, return_exceptions=True)

    async def _watch_child(self, child: Child) -> None:
        code = await child.wait()
        raise ChildFailed(f"the {child.name} ended with {code}; see {self._context.log(child.name)}")

    async def _schedule(self) -> None:
        context = self._context
        tasks = load_tasks(task_file(self._config))
        await self._all_ready()
        loop = SchedulerLoop(
            self._state(tasks),
            self._config,
            context.run_dir,
            context.attempt,
            context.store,
            self._inbox,
            tasks,
            self._feeder.call,
            self._record,
        )
        for event in (*self._ready.values(), *self._absent):
            loop.submit(event)
        self._loop = loop
        self._status.state = "running"
        ended = await loop.run()
        how = "completed" if ended.how == "completed" else "failed"
        await self._end(how, ended.detail, EXIT_OK if how == "completed" else EXIT_FAULT)
        await asyncio.sleep(3600)  # the word `stop` ends this rank too

    def _state(self, tasks: list[Task]) -> SchedulerState:
        """A fresh state, or that of the last commit with everything that the run directory knows besides."""
        settings = Settings.of(self._config)
        policy = policy_of(self._config)
        order = TaskOrder(len(tasks), self._config.seed, self._config.tasks.shuffle)
        cursor = self._cursor()
        tries, outcomes = issued(self._context.run_dir)
        if cursor is None and not tries:
            return SchedulerState(settings, policy, order.task)
        return SchedulerState.resume(settings, cursor, tries, outcomes, policy, order.task)

    def _cursor(self) -> dict[str, Any] | None:
        """What the last commit says of the scheduler, or None before the first."""
        commit = checkpoint.latest(self._context.run_dir)
        return commit.cursor(self._context.run_dir) if commit else None

    async def _all_ready(self) -> None:
        """Collect the first `RankReady` of every rank; one that is missing after the time is named.

        Where this job has run an attempt before, a node may have died in that one: the core and a host are enough.
        """
        context = self._context
        deadline = time.monotonic() + self._config.network.start_timeout
        while missing := [r for r in range(context.layout.ranks) if r not in self._ready]:
            for event in map(decode, self._inbox.read()):
                if isinstance(event, RankReady):
                    self._ready[event.rank] = event
                elif isinstance(event, RankLost):
                    self._record(event)
                    self._ready.pop(event.rank, None)
            if time.monotonic() > deadline:
                names = ", ".join(f"rank {r} ({context.kind(r)})" for r in missing)
                text = f"{names} did not report within {self._config.network.start_timeout:g} s"
                if not (context.again and {"core", "host"} <= {context.kind(r) for r in self._ready}):
                    logs = context.run_dir.attempt(context.attempt)
                    raise RankMissing(f"{text} (network.start_timeout); see the logs in {logs}")
                self._absent = [RankLost(r, 0, text) for r in missing]
                return
            await asyncio.sleep(0.05)

    # -- the end -----------------------------------------------------------------------------------------------------
    async def interrupt(self) -> None:
        """End the attempt because a signal said so."""
        await self._end("interrupted", "by a signal", EXIT_INTERRUPTED)

    async def fail(self, error: BaseException) -> None:
        """End the attempt because of a fault here. Where a new attempt may cure it, the others only lose the store."""
        match error:
            case UserError():
                await self._end("failed", str(error), EXIT_USER)
            case ChildFailed() | StoreLost() | WeightsMismatch():
                await self._end("failed", str(error), None)
            case _:
                await self._end("failed", f"{type(error).__name__}: {error}", EXIT_FAULT)

    async def _end(self, how: str, detail: str, code: int | None) -> None:
        if self._ending:
            return
        self._ending = True
        log.info("the attempt ends: %s %s", how, detail)
        if code is not None:  # first: whatever else fails here, the other ranks must know
            self._context.store.set("stop", f"{code}:{how}")
        self._record(self._usage.event(time.time()))
        self._record(RunEnded(how, detail))
        self._plain.flush()
        write_summary(self._context.run_dir)
        print(report(self._context.run_dir.path), flush=True)
        self._status.state, self._status.detail = how, detail
        self._write_status()

    async def stop(self) -> None:
        """End the services, after the other ranks have gone (they need the store until then)."""
        if self._shown:
            self._shown.cancel()
            await asyncio.gather(self._shown, return_exceptions=True)
        with contextlib.suppress(StoreLost):
            await self._await_gone()
        for child in (self._feeder, self._weights):
            if child:
                await child.stop()
        self._events.close()
        if self._figures:
            self._figures.close()
        self._write_trace()
        remove_shared(self._context.run_dir.path)

    def _write_trace(self) -> None:
        """Leave the run's trace beside its events; a run that cannot is none the worse for it."""
        try:
            trace.write(self._context.run_dir)
        except Exception as error:
            log.warning("cannot write the trace of the run: %s: %s", type(error).__name__, error)

    async def _await_gone(self) -> None:
        store, deadline = self._context.store, time.monotonic() + GONE_SECONDS
        if store.get("stop") is None:
            return
        others = [e for e in self._ready.values() if e.rank != 0]
        while time.monotonic() < deadline and any(store.get(f"gone/{e.rank}") is None for e in others):
            await asyncio.sleep(0.05)

    # -- what people look at -----------------------------------------------------------------------------------------
    def _record(self, event: Event) -> None:
        """Log an event, and let everything that people look at know of it."""
        data: dict[str, Any] = {"t": round(time.time(), 3), "attempt": self._context.attempt, **encode(event)}
        self._events.append(data)
        self._metrics.apply(data)
        self._plain.on_event(data)
        if isinstance(event, UpdateDone):
            self._status.reward = next((r for r in reversed(self._metrics.rewards) if r is not None), None)
            self._figures.append(self._metrics.updates[event.update].flat)
            self._record(self._usage.event(time.time()))
            if event.metrics.get("skipped"):
                self._record(StepSkipped(event.update))
                self._check_steps()

    def _check_steps(self) -> None:
        """End the attempt where steps are skipped again and again: nothing is learnt any more.

        Raises:
            UserError: so many updates in a row took no step.
        """
        last = self._metrics.done[-SKIPPED_STEPS:]
        if len(last) == SKIPPED_STEPS and all(record.metrics.get("skipped") for record in last):
            updates = words.ranges(record.update for record in last)
            raise UserError(
                f"updates {updates} took no step, as their gradients are not finite: lower train.lr, or set "
                "model.dtype=float32 (docs/training.md)"
            )

    def _on_service_event(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "refused":
                fields = (message[name] for name in ("group", "execution", "tokens", "limit"))
                self._record(SampleRefused(*fields))
            case "taken":
                self._loop.submit(GroupTaken(message["group"], message["update"]))
            case "barred":
                self._loop.submit(RankLost(message["rank"], message["incarnation"], message["reason"]))
            case "stream":
                self._stream = StreamStatus(
                    message["update"], message["published"], message["claimed"], message["finished"]
                )

    async def _show(self) -> None:
        """Replace status.json every second, and print lines where they are due."""
        logged = time.time()
        while True:
            now = time.time()
            self._gather(now)
            try:
                self._write_status()
                self._plain.on_status(self._status)
                if now - logged > USAGE_SECONDS:
                    logged = now
                    self._record(self._usage.event(now))
            except OSError as error:  # of a file system that will be back
                log.warning("cannot show the run: %s", error)
            await asyncio.sleep(STATUS_SECONDS)

    def _gather(self, now: float) -> None:
        context, current = self._context, self._status
        ranks = [self._rank_status(rank) for rank in range(context.layout.ranks)]
        self._usage.observe(now, ranks)
        current.ranks, current.stream, current.pss_mb = ranks, self._stream, self._usage.pss_mb
        current.tokens_per_second = sum(rank.tokens_per_second for rank in ranks)
        current.seconds_left = self._metrics.seconds_left(now)
        if self._loop:
            known = self._loop.state.snapshot()
            current.scheduler = SchedulerStatus(**{f.name: known[f.name] for f in fields(SchedulerStatus)})
        missing = context.layout.ranks - len(self._ready)
        text = f"{missing} of {context.layout.ranks} are still starting"
        current.phases = [Phase("ranks", text, since=self._started)] if missing else []

    def _rank_status(self, rank: int) -> RankStatus:
        with contextlib.suppress(ValueError):
            if word := self._context.store.get(f"status/{rank}"):
                return status.decode_rank(word)
        return RankStatus(rank=rank, kind=self._context.kind(rank), doing="not reported yet")

    def _write_status(self) -> None:
        self._status.time = time.time()
        write_atomic(self._context.run_dir.status, status.encode(self._status))


def issued(run_dir: RunDir) -> tuple[dict[int, int], list[ExecutionClosed]]:
    """Executions that earlier attempts issued, with the number of their latest try, and the outcomes that there are."""
    directories = {int(path.name): path for path in (run_dir.path / "executions").iterdir() if path.name.isdigit()}
    tries = {
        n: max((int(one.name) for one in path.iterdir() if one.name.isdigit()), default=0)
        for n, path in sorted(directories.items())
        if run_dir.spec(n).exists()
    }
    outcomes = [closed_event(outcome) for n in tries if (outcome := read_json(run_dir.outcome(n)))]
    return tries, outcomes
