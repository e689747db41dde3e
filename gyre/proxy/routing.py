"""Where the requests of an execution go. Pure.

A proxy holds no policy of its own: the scheduler assigns each execution an engine when it grants it, and publishes
differences to one table of engines and assignments, each under a higher version. What this module keeps true: a route
is handed out only for an engine that the newest table calls routed, with the epoch under which it is routed, so that a
request can never be sent knowingly to a cell that has left rollout (invariant 6; the engine's gate enforces it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Route:
    """An engine that serves: its rank, its URL without a path, its role epoch and its policy version.

    `kv` is where the keys and values that it computed can be had, empty where nowhere; `slots` is how many requests it
    may be sent that it has not begun to answer, 0 for the proxy's own number.
    """

    engine: int
    url: str
    epoch: int
    policy: int
    kv: str = ""
    slots: int = 0

    def same_place(self, other: Route | None) -> bool:
        """Whether both are the same engine in the same epoch; its policy may have changed."""
        return other is not None and (self.engine, self.epoch, self.url) == (other.engine, other.epoch, other.url)


class RouteTable:
    """The newest table of engines, and the engine of each execution this host runs."""

    def __init__(self) -> None:
        self.version = 0
        self._engines: dict[int, Route] = {}
        self._assigned: dict[int, int | None] = {}

    def apply(self, version: int, engines: Mapping[str, Any], moves: Mapping[str, int | None]) -> bool:
        """Take a difference over; False if its version is not newer than what is known.

        `engines` maps a rank to the fields of its route, or to None when it is unrouted; `moves` maps executions to
        ranks, or to None where their requests are to be held.
        Moves of executions that are not assigned here are another host's and are dropped.
        """
        if version <= self.version:
            return False
        self.version = version
        for rank, engine in engines.items():
            if engine is None:
                self._engines.pop(int(rank), None)
            else:
                more = {key: engine[key] for key in ("kv", "slots") if engine.get(key)}
                self._engines[int(rank)] = Route(int(rank), engine["url"], engine["epoch"], engine["policy"], **more)
        for execution, rank in moves.items():
            if int(execution) in self._assigned:
                self._assigned[int(execution)] = rank
        return True

    def assign(self, execution: int, engine: int) -> None:
        """Give an execution its first engine."""
        self._assigned[execution] = engine

    def assigned(self, execution: int) -> int | None:
        """The engine of an execution, routed or not."""
        return self._assigned.get(execution)

    def forget(self, execution: int) -> None:
        """The execution is over here."""
        self._assigned.pop(execution, None)

    def route(self, execution: int) -> Route | None:
        """Where a request of an execution may go now; None while it has to be held."""
        engine = self._assigned.get(execution)
        return None if engine is None else self._engines.get(engine)

    def snapshot(self) -> dict[str, Any]:
        """The whole table of engines as one difference, for a proxy that starts late."""
        engines = {}
        for rank, route in self._engines.items():
            engines[str(rank)] = {key: value for key, value in asdict(route).items() if key != "engine"}
        return {"version": self.version, "engines": engines, "moves": {}}
