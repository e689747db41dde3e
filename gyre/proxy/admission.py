"""How many requests a proxy has sent an engine that it has not begun to answer, and who waits for his turn.

When many executions move to one engine at once, all of them sent at once would only wait in its queue, where they
cannot be sent elsewhere without being cancelled. So an engine gets a few at a time, and the others are held here, in
the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gyre.proxy.routing import Route

_Key = tuple[int, int, str]


def _key(route: Route) -> _Key:
    return route.engine, route.epoch, route.url


@dataclass(eq=False)
class _Door:
    limit: int
    opened: int = 0
    waiting: dict[asyncio.Future[bool], int] = field(default_factory=dict)  # their executions, in order


class Entry:
    """A place among the requests that an engine has not begun to answer; `release` it, twice is harmless."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """The engine has begun to answer, or never will."""
        release, self._release = self._release, None
        if release is not None:
            release()


class Doors:
    """One door per engine and epoch; `limit` holds where a route names no number."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._doors: dict[_Key, _Door] = {}

    async def enter(self, execution: int, route: Route) -> Entry | None:
        """Wait for a turn at an engine; None where the execution's route has changed meanwhile."""
        key, limit = _key(route), route.slots or self.limit
        door = self._doors.setdefault(key, _Door(limit))
        door.limit = limit
        if door.opened < limit and not door.waiting:
            door.opened += 1
            return Entry(lambda: self._leave(key, door))
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        door.waiting[turn] = execution
        try:
            if not await turn:
                return None
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self._leave(key, door)
            raise
        finally:
            door.waiting.pop(turn, None)
            self._tidy(key, door)
        return Entry(lambda: self._leave(key, door))

    def _leave(self, key: _Key, door: _Door) -> None:
        door.opened -= 1
        while door.waiting and door.opened < door.limit:
            turn = next(iter(door.waiting))
            del door.waiting[turn]
            if not turn.done():
                turn.set_result(True)
                door.opened += 1
        self._tidy(key, door)

    def _tidy(self, key: _Key, door: _Door) -> None:
        if not door.opened and not door.waiting and self._doors.get(key) is door:
            del self._doors[key]

    def recheck(self, route: Callable[[int], Route | None]) -> None:
        """Routes have changed: send away who waits at another door than his execution's."""
        for key, door in list(self._doors.items()):
            for turn, execution in list(door.waiting.items()):
                now = route(execution)
                if (now is None or _key(now) != key) and not turn.done():
                    turn.set_result(False)

    def counts(self) -> dict[int, dict[str, Any]]:
        """By engine, requests that it has not begun to answer, and those that wait to be sent."""
        found: dict[int, dict[str, Any]] = {}
        for (engine, _, _), door in self._doors.items():
            counts = found.setdefault(engine, {"unanswered": 0, "waiting": 0})
            counts["unanswered"] += door.opened
            counts["waiting"] += len(door.waiting)
        return found
