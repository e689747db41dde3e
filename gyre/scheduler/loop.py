"""The shell around the scheduler's state: events in, commands out, nothing decided.

It reads the ``reports`` list, notices silent ranks, lets time pass, and carries out each command in its order. The
counters d, p and f in the store are raised here and nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from gyre.config import Config
from gyre.errors import GyreError
from gyre.events import Event, RankLost, RankReady, Tick, closed_event, decode
from gyre.run_dir import RunDir, link_once, read_json, write_atomic
from gyre.scheduler import commands as c
from gyre.scheduler.state import SchedulerState
from gyre.store import Inbox, Store
from gyre.tasks import Task, TaskOrder

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02
TICK_SECONDS = 0.2
WATCH_SECONDS = 1.0

FeederCall = Callable[..., Awaitable[dict[str, Any]]]


class AliveWatch:
    """Notices ranks that went silent or were started again."""

    def __init__(self, store: Store, timeout: float) -> None:
        self._store = store
        self._timeout = timeout
        self._incarnations: dict[int, int] = {}
        self._seen: dict[int, tuple[int, float]] = {}

    def ready(self, rank: int, incarnation: int) -> None:
        """Watch this incarnation of a rank from now on."""
        self._incarnations[rank] = incarnation
        self._seen.pop(rank, None)

    def lost(self, now: float) -> list[RankLost]:
        """The ranks that were lost since the last call."""
        events = []
        for rank, incarnation in list(self._incarnations.items()):
            newest = self._store.add(f"incarnation/{rank}", 0)
            count = self._store.add(f"alive/{rank}/{incarnation}", 0)
            last, since = self._seen.get(rank, (-1, now))
            if count != last:
                self._seen[rank] = (count, now)
                since = now
            if newest > incarnation:
                events.append(RankLost(rank, incarnation, f"it was started again (incarnation {newest})"))
            elif now - since > self._timeout:
                events.append(RankLost(rank, incarnation, f"silent for {now - since:.0f} s"))
            else:
                continue
            del self._incarnations[rank]
        return events


class SchedulerLoop:
    """Drives a `SchedulerState` on rank 0."""

    def __init__(
        self,
        state: SchedulerState,
        config: Config,
        run_dir: RunDir,
        attempt: int,
        store: Store,
        inbox: Inbox,
        tasks: list[Task],
        feeder: FeederCall,
        record: Callable[[Event], None],
    ) -> None:
        """Take the reader of the list `reports`, a call to the feeder, and what writes an event to the log."""
        self.state = state
        self.ended: c.EndRun | None = None
        self._config = config
        self._run_dir = run_dir
        self._attempt = attempt
        self._store = store
        self._inbox = inbox
        self._tasks = tasks
        self._order = TaskOrder(len(tasks), config.seed, config.tasks.shuffle)
        self._feeder = feeder
        self._record = record
        self._watch = AliveWatch(store, config.network.alive_timeout)
        self._incarnations: dict[int, int] = {}
        self._hosts = set(range(config.cells.count + config.cells.standalone, self._ranks(config)))
        self._waiting: deque[Event] = deque()
        self._counters = dict.fromkeys("dpf", 0)
        self._there = dict.fromkeys(("harness host", "engine"), time.time())  # when one was there last
        self._feeding: set[asyncio.Task[dict[str, Any]]] = set()

    @staticmethod
    def _ranks(config: Config) -> int:
        return config.cells.count + config.cells.standalone + config.hosts.count

    def submit(self, event: Event) -> None:
        """Hand in an event from this process, to be handled in its turn."""
        self._waiting.append(event)

    async def run(self) -> c.EndRun:
        """Handle events until the run is over."""
        for counter in self._counters:
            self._raise(counter, getattr(self.state.level, counter))
        for command in self.state.start(time.time()):
            await self._execute(command)
        ticked = watched = 0.0
        while self.ended is None:
            now = time.time()
            if now - watched >= WATCH_SECONDS:
                watched = now
                self._waiting.extend(self._watch.lost(now))
                self._demand_ranks(now)
            self._waiting.extend(decode(message) for message in self._inbox.read())
            while self._waiting and self.ended is None:
                await self._handle(self._waiting.popleft())
            if now - ticked >= TICK_SECONDS and self.ended is None:
                ticked = now
                await self._handle(Tick())
            for task in [task for task in self._feeding if task.done()]:
                self._feeding.remove(task)
                task.result()
            await asyncio.sleep(POLL_SECONDS)
        return self.ended

    def _demand_ranks(self, now: float) -> None:
        """End the attempt when nobody could run an execution, or serve one, for as long as a rank may take."""
        state, patience = self.state, self._config.network.start_timeout
        for what, there in (("harness host", bool(state.executions.hosts)), ("engine", bool(state.fleet.bound))):
            if there or not state.level.w:
                self._there[what] = now
            elif now - self._there[what] > patience:
                self.ended = c.EndRun("failed", f"no {what} has been there for {patience:g} s")

    async def _handle(self, event: Event) -> None:
        if isinstance(event, RankReady):
            self._incarnations[event.rank] = event.incarnation
            self._watch.ready(event.rank, event.incarnation)
        if not isinstance(event, Tick):
            self._record(event)
        for command in self.state.handle(event, time.time()):
            await self._execute(command)

    # -- commands ----------------------------------------------------------------------------------------------------
    async def _execute(self, command: c.Command) -> None:
        match command:
            case c.Log():
                self._record(command.event)
            case c.Dispatch():
                self._dispatch(command)
            case c.Grant():
                self._grant(command)
            case c.CancelExecution():
                self._tell_host(command.host, command.incarnation, {"message": "cancel", "n": command.n})
            case c.Close():
                self._close(command)
            case c.Finished():
                self._raise("p", command.p)
                self._raise("f", command.f)
                if command.engine in self._incarnations:
                    self._order_rank(
                        command.engine, self._incarnations[command.engine], {"order": "closed", "n": [command.n]}
                    )
            case c.Route():
                self._route(command)
            case c.OrderRole() | c.OrderSync() | c.BuildGroups() | c.Train() | c.Commit() | c.Supersede():
                self._order_cells(command)
            case c.PublishPolicy():
                self._store.set("policy", str(command.version))
                await self._feeder("committed", update=command.update)
            case c.EndRun():
                self.ended = command
            case _:
                await self._feed(command)

    async def _feed(self, command: c.Command) -> None:
        match command:
            case c.BeginUpdate():
                await self._feeder("begin", update=command.update, groups=command.groups)
            case c.Feed():
                # Not awaited: its files are read meanwhile. Calls reach the feeder in the order in which they are made.
                feeding = asyncio.create_task(
                    self._feeder("feed", group=command.group, executions=list(command.executions))
                )
                self._feeding.add(feeding)
            case c.DropGroup():
                await self._feeder("drop", group=command.group)
            case c.SuspendUpdate():
                await self._feeder("suspend", update=command.update)
            case c.ResumeUpdate():
                await self._feeder("resume", update=command.update)
            case c.CloseShort():
                await self._feeder("close_short", update=command.update, groups=command.groups)
            case c.BarMember():
                await self._feeder("bar", rank=command.rank, incarnation=command.incarnation)
            case _:
                raise GyreError(f"the loop cannot carry out {command}")

    def _raise(self, counter: str, value: int) -> None:
        self._store.add(counter, value - self._counters[counter])
        self._counters[counter] = value

    def _dispatch(self, command: c.Dispatch) -> None:
        for planned in command.executions:
            path = self._run_dir.spec(planned.n)
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                spec = {
                    "n": planned.n,
                    "group": planned.group,
                    "member": planned.member,
                    "task_index": planned.task_index,
                    "attempt": self._attempt,
                    "task": self._tasks[self._order.task(planned.task_index)],
                }
                write_atomic(path, json.dumps(spec))
        self._raise("d", command.d)

    def _grant(self, command: c.Grant) -> None:
        if (outcome := read_json(self._run_dir.outcome(command.n))) and outcome["attempt"] == self._attempt:
            self.submit(closed_event(outcome))
            return
        if command.p is not None:
            self._raise("p", command.p)
        message = {"message": "grant", "n": command.n, "try_number": command.try_number, "engine": command.engine}
        self._tell_host(command.host, command.incarnation, message)

    def _close(self, command: c.Close) -> None:
        path = self._run_dir.outcome(command.n)
        outcome = {
            "n": command.n,
            "try": command.try_number,
            "attempt": self._attempt,
            "outcome": command.outcome,
            "score": None,
            "usable": False,
            "reason": command.reason,
        }
        if not link_once(path, json.dumps(outcome)) and (late := read_json(path))["attempt"] != self._attempt:
            # Of an earlier attempt, written after this one had read what was closed: it was not accepted.
            path.rename(path.with_name(f"outcome.{late['attempt']}.json"))
            link_once(path, json.dumps(outcome))
        self.submit(closed_event(read_json(path)))

    def _route(self, command: c.Route) -> None:
        engines: dict[str, dict[str, Any] | None] = {}
        for rank, route in command.engines.items():
            fields = None if route is None else {"url": route.url, "epoch": route.epoch, "policy": route.policy}
            if route is not None and route.kv is not None:
                fields["kv"] = route.kv
            engines[str(rank)] = fields
        for host in self._hosts if command.host is None else {command.host}:
            if host not in self._incarnations:
                continue
            moves = {str(move.n): move.engine for move in command.moves if move.host == host}
            message = {"message": "routes", "version": command.version, "engines": engines, "moves": moves}
            self._tell_host(host, self._incarnations[host], message)

    def _order_cells(self, command: c.Command) -> None:
        match command:
            case c.OrderRole():
                order = {"order": "role", "epoch": command.epoch, "target": command.target}
                order |= {"version": command.version, "snapshot": command.snapshot}
            case c.OrderSync():
                order = {"order": "sync", "epoch": command.epoch}
                order |= {"version": command.version, "snapshot": command.snapshot}
            case c.Train():
                order = {"order": "train", "epoch": command.epoch, "update": command.update}
                order |= {"position": command.position, "generation": command.generation}
                order |= {"members": list(command.members)}
            case c.Commit():
                order = {"order": "commit", "epoch": command.epoch, "version": command.version}
                order |= {"update": command.update, "cursor": command.cursor}
                self._order_rank(0, command.incarnation, order)
                return
            case c.Supersede():
                if command.rank in self._hosts:
                    self._tell_host(command.rank, command.incarnation, {"message": "leave"})
                else:
                    self._order_rank(command.rank, command.incarnation, {"order": "leave", "epoch": 1 << 62})
                return
            case c.BuildGroups():
                for member in command.members:
                    order = {"order": "groups", "epoch": member.epoch, "generation": command.generation}
                    self._order_rank(member.rank, member.incarnation, order | {"ranks": command.ranks})
                return
            case _:
                raise GyreError(f"the loop cannot carry out {command}")
        self._order_rank(command.rank, command.incarnation, order)

    def _order_rank(self, rank: int, incarnation: int, order: dict[str, Any]) -> None:
        self._store.send(f"orders/{rank}/{incarnation}", order)

    def _tell_host(self, host: int, incarnation: int, message: dict[str, Any]) -> None:
        self._store.send(f"host/{host}/{incarnation}", message)
