"""The proxy of a harness host: `python -m gyre.proxy.server`, a child of the host's supervisor.

It listens on loopback only, and accepts a token only while the execution it belongs to lives. Operations of the
supervisor: start, routes, register, held, close, totals. Requests: see `gyre.proxy.service`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop

from gyre.child import AsyncEndpoint
from gyre.errors import ChildFailed
from gyre.limits import raise_file_limit
from gyre.proxy.connections import Connections
from gyre.proxy.executions import Execution, Switchboard
from gyre.proxy.front import Front
from gyre.proxy.relay import Settings
from gyre.proxy.service import Service

log = logging.getLogger(__name__)


class Proxy:
    """The supervisor's operations, around the executions, the switchboard and the service."""

    def __init__(self) -> None:
        self._board = Switchboard()
        self._executions: dict[int, Execution] = {}
        self._connections = Connections()
        self._service: Service | None = None
        self._front: Front | None = None
        self._ticker: asyncio.Task[None] | None = None

    # -- operations --------------------------------------------------------------------------------------------------
    async def start(self, models: list[str] | None = None, **settings: Any) -> dict[str, Any]:
        """Listen; returns the port. `models` are patterns of further names that the model is answered under."""
        told = Settings(**settings)
        self._board.doors.limit = told.slots
        self._service = Service(self._board, self._connections, told, models or ())
        self._front = Front(self._service.handle)
        port = await self._front.listen()
        self._ticker = asyncio.create_task(self._tick(), name="keep alive")
        return {"port": port}

    async def routes(self, version: int, engines: dict[str, Any], moves: dict[str, int | None]) -> None:
        """A difference to the route table."""
        self._board.apply(version, engines, moves)

    async def register(self, execution: int, try_number: int, token: str, engine: int, record_path: str) -> None:
        """Accept a try's token from now on."""
        assert self._service is not None
        if old := self._executions.get(execution):
            await self._remove(old)
        entry = Execution(execution, try_number, token, Path(record_path))
        self._board.table.assign(execution, engine)
        self._executions[execution] = entry
        self._service.admit(entry)

    def _entry(self, execution: int, try_number: int) -> Execution:
        entry = self._executions.get(execution)
        if entry is None or entry.try_number != try_number:
            raise ChildFailed(f"try {try_number} of execution {execution} is not registered")
        return entry

    async def held(self, execution: int, try_number: int) -> dict[str, Any]:
        """Seconds in which a try's requests were held, and whether one is now."""
        entry = self._entry(execution, try_number)
        return {"seconds": entry.held_seconds, "now": entry.held}

    async def close(self, execution: int, try_number: int) -> dict[str, Any]:
        """End a try's requests, make its records durable and count them."""
        entry = self._entry(execution, try_number)
        await self._remove(entry)
        return asdict(entry.counts)

    async def totals(self) -> dict[str, Any]:
        """For the live view."""
        live = [len(entry.tasks) for entry in self._executions.values()]
        held = sum(entry.held for entry in self._executions.values())
        totals = {"executions": len(self._executions), "requests": sum(live), "held": held}
        return {**totals, "engines": self._board.totals()}

    async def _remove(self, entry: Execution) -> None:
        if self._service is not None:
            self._service.dismiss(entry)
        try:
            await entry.close()
        finally:
            if self._executions.get(entry.number) is entry:
                del self._executions[entry.number]
                self._board.table.forget(entry.number)

    async def stop(self) -> None:
        """Stop listening and let go of everything."""
        if self._ticker:
            self._ticker.cancel()
        for entry in list(self._executions.values()):
            await self._remove(entry)
        if self._front:
            await self._front.close()
        self._connections.close()

    async def _tick(self) -> None:
        assert self._front is not None and self._service is not None
        while True:
            await asyncio.sleep(1.0)
            self._front.look()
            self._connections.look()
            self._service.keep_alive()


async def main() -> None:
    """Serve until the supervisor closes."""
    raise_file_limit()  # a stream takes two connections
    proxy, endpoint = Proxy(), AsyncEndpoint()
    operations = ("start", "routes", "register", "held", "close", "totals")
    try:
        await endpoint.serve({name: getattr(proxy, name) for name in operations})
    finally:
        await proxy.stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # A look for cycles at every 700 new objects, through all that was imported, would be a tenth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    uvloop.run(main())
