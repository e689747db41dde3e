"""The executions a proxy serves, and the switchboard that says where their requests go now."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre.errors import InvariantBroken
from gyre.proxy.admission import Doors, Entry
from gyre.proxy.history import History, Node, Place
from gyre.proxy.recorder import CallRecord, Recorder
from gyre.proxy.routing import Route, RouteTable

log = logging.getLogger(__name__)

#: Seconds that an engine which lost its route has to end a request itself before the proxy turns away from it.
LEAVE_SECONDS = 5.0
#: Requests that an engine is sent before it has begun to answer them, unless its route names another number.
UNANSWERED = 16


@dataclass
class Counts:
    """What happened to one execution's requests. A rerouted, continued or lost request counts once each.

    Every request ends in exactly one way: requests = answered + refused + abandoned + lost once none is live.
    """

    requests: int = 0
    answered: int = 0  # completely
    refused: int = 0  # the engine found fault with the request itself
    rerouted: int = 0  # issued again, on another engine or after a move
    continued: int = 0  # with at least one token kept
    restarted: int = 0  # with at least one token thrown away
    lost: int = 0  # no complete answer although the client was still there
    abandoned: int = 0  # the client left, or the execution closed
    calls: int = 0  # recorded
    tokens: int = 0  # sampled and recorded
    masked: dict[str, int] = field(default_factory=dict)  # of these, not to be trained on, by reason
    spliced: int = 0  # requests whose prompt went on from the recorded tokens of an earlier one
    drifted: int = 0  # of these, where encoding the messages anew would have given other tokens
    drift_tokens: int = 0  # how many
    forked: int = 0  # requests that follow on a known one and do not go on from its tokens
    oldest_version: int = -1
    held_seconds: float = 0.0
    fault: str = ""  # why the last request that was lost has no answer


class Execution:
    """One try of an execution: its token, records, counts, and the clock of its holds."""

    def __init__(self, number: int, try_number: int, token: str, record_path: Path) -> None:
        self.number = number
        self.try_number = try_number
        self.token = token
        self.counts = Counts()
        self.closed = False
        self.tasks: set[asyncio.Task[Any]] = set()
        self.history = History()
        self.place: Place | None = None  # where its last request was answered
        self._recorder = Recorder(record_path)
        self._holds = 0
        self._held_since = 0.0

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """A request waits for an engine; the execution's clock stands still while any does."""
        if not self._holds:
            self._held_since = time.monotonic()
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self.counts.held_seconds += time.monotonic() - self._held_since

    @property
    def held(self) -> bool:
        """Whether a request is held now."""
        return self._holds > 0

    @property
    def held_seconds(self) -> float:
        """Seconds in which requests were held, up to now."""
        return self.counts.held_seconds + (time.monotonic() - self._held_since if self._holds else 0.0)

    def record(
        self,
        record: CallRecord,
        known: Node | None = None,
        place: Place | None = None,
        asked: bytes = b"",
        message: dict[str, Any] | None = None,
    ) -> None:
        """Write a call down, remember it and count its tokens.

        `known` is the node that its prompt follows on, `place` where it was answered. `asked` is the chain of the
        messages that `message` answers; without them no later request can follow on this one.

        Raises:
            OSError: it could not be written.
        """
        node, shared = near = self.history.nearest(record.prompt, known)
        call = self._recorder.append(record, node.call if node else -1, shared)
        ids = record.prompt + record.sampled
        try:
            self.history.add(call, ids, len(record.sampled), near, place, asked, message, record.rendered)
        except Exception as error:  # the call is written, and its client is to have the answer
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("execution %d: its history is begun anew: %s\n%s", self.number, type(error).__name__, where)
            self.history = History()
        counts, sampled = self.counts, len(record.sampled)
        counts.calls += 1
        counts.tokens += sampled
        if not record.trainable and sampled:
            counts.masked[record.masked] = counts.masked.get(record.masked, 0) + sampled
        for span in record.spans:
            oldest = counts.oldest_version
            counts.oldest_version = span.policy if oldest < 0 else min(oldest, span.policy)

    async def close(self) -> None:
        """Refuse further requests, cancel those that run, and put the records on the disk."""
        self.closed = True
        for task in list(self.tasks):
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
        await asyncio.to_thread(self._recorder.close)
        counts = self.counts
        if counts.requests != counts.answered + counts.refused + counts.abandoned + counts.lost:
            raise InvariantBroken(7, f"execution {self.number}: requests do not add up: {counts}")


@dataclass(eq=False)
class Leg:
    """A request to an engine that is under way."""

    execution: int
    route: Route
    guard: asyncio.Timeout
    leaving: bool = field(default=False)


class Switchboard:
    """The route table, with those who wait for it to change."""

    def __init__(self) -> None:
        self.table = RouteTable()
        self._changed = asyncio.Event()
        self._legs: set[Leg] = set()
        self.doors = Doors(UNANSWERED)

    def apply(self, version: int, engines: dict[str, Any], moves: dict[str, int | None]) -> None:
        """Take a difference over, wake who waits, and give legs that lost their route notice."""
        if not self.table.apply(version, engines, moves):
            return
        self._changed.set()
        self._changed = asyncio.Event()
        self.doors.recheck(self.table.route)
        now = asyncio.get_running_loop().time()
        for leg in self._legs:
            route = self.table.route(leg.execution)
            if not leg.leaving and not leg.route.same_place(route):
                leg.leaving = True
                leg.guard.reschedule(now + LEAVE_SECONDS)

    async def route(self, execution: int, failed: Route | None = None, pause: float = 0.0) -> Route:
        """Wait for a route; after a failure at `failed`, for one elsewhere, or for `pause` seconds to try it again."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + pause
        while True:
            route = self.table.route(execution)
            if route is not None and not (route.same_place(failed) and loop.time() < deadline):
                return route
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(None if route is None else deadline):
                    await changed.wait()

    async def enter(self, execution: int, failed: Route | None = None, pause: float = 0.0) -> tuple[Route, Entry]:
        """Wait for a route as `route` does, and for a turn at its engine."""
        while True:
            route = await self.route(execution, failed, pause)
            if (entry := await self.doors.enter(execution, route)) is not None:
                return route, entry

    def totals(self) -> dict[str, dict[str, int]]:
        """By engine: requests under way, of them not yet answered, and those that wait to be sent."""
        found: dict[str, Counter[str]] = {}
        for leg in self._legs:
            found.setdefault(str(leg.route.engine), Counter())["live"] += 1
        for engine, counts in self.doors.counts().items():
            found.setdefault(str(engine), Counter()).update(counts)
        return {engine: dict(counts) for engine, counts in found.items()}

    @contextlib.asynccontextmanager
    async def leg(self, execution: int, route: Route) -> Any:
        """A request under way; TimeoutError when it had to be given up because its engine lost its route."""
        async with asyncio.timeout(None) as guard:
            leg = Leg(execution, route, guard)
            self._legs.add(leg)
            try:
                yield leg
            finally:
                self._legs.discard(leg)
