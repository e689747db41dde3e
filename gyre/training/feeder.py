"""The feeder, a child of rank 0: buffers ready groups and serves their micro-steps to the cells that claim them.

    python -m gyre.training.feeder RUN_DIR

What it knows is `gyre.training.supply`; this is the shell around it: operations of the supervisor, files of the run
directory, and an HTTP interface for trainers. Operations:

start(secret, address, port=0, trained=[groups trained by earlier attempts' commits]) -> {"url"}
feed(group, executions)              a ready group, in the order of training; -> {"rows", "tokens", "reward"} and
                                     "refused": samples over the limit, which are left out
drop(group)                          -> {"dropped"}: false where it is taken already
begin(update, groups) ; suspend(update) ; resume(update) ; close_short(update, groups?) -> {"groups"}
bar(rank, incarnation)               -> {"returned": {update: micro-steps}}
committed(update)                    forget the micro-steps up to this update
stop()                               stop serving

Events: {"type": "taken", "group", "update"}
        {"type": "stream", "update", "published", "claimed", "finished", "taken", "untaken", "dry"}
        {"type": "refused", "group", "execution", "tokens", "limit"}: a sample over the limit, which is left out
        {"type": "barred", "rank", "incarnation", "update", "reason"}: by the core, since it went silent

HTTP, all POST with JSON bodies and `Authorization: Bearer <secret>`: /claim, /settle, /bar, /barred
(`gyre.training.stream.Claims` is the client). A claim that must wait is held for up to a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import hmac
import logging
from pathlib import Path
from typing import Any

from aiohttp import web

from gyre import config as configuration
from gyre.child import AsyncEndpoint
from gyre.config import Config
from gyre.errors import GyreError
from gyre.run_dir import RunDir
from gyre.training.packing import Row, encode_all
from gyre.training.requests import BarredRequest, BarRequest, ClaimRequest, SettleRequest
from gyre.training.rows import rows_of
from gyre.training.supply import Supply

log = logging.getLogger(__name__)

_HOLD_SECONDS = 1.0
_LIMIT = 64 << 20


class Feeder:
    """The shell around `Supply`; everything runs in one event loop, files are read in threads."""

    def __init__(self, run_dir: RunDir, config: Config, endpoint: AsyncEndpoint) -> None:
        self._run_dir = run_dir
        self._config = config
        self._endpoint = endpoint
        self._supply = Supply(config.train.micro_tokens)
        self._limit = config.train.sample_limit or config.model.max_context  # tokens of a sample
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._authorization = ""
        self._rewards: dict[int, list[float]] = {}

    # -- operations --------------------------------------------------------------------------------------------------
    async def start(self, secret: str, address: str, port: int = 0, trained: list[int] | None = None) -> dict[str, Any]:
        """Begin to serve."""
        self._authorization = f"Bearer {secret}"
        self._supply = Supply(self._config.train.micro_tokens, trained or [])
        app = web.Application(client_max_size=_LIMIT)
        for path, kind, handler in (
            ("/claim", ClaimRequest, self._claim),
            ("/settle", SettleRequest, self._settle),
            ("/bar", BarRequest, self._bar_request),
            ("/barred", BarredRequest, self._barred),
        ):
            app.router.add_post(path, functools.partial(self._guarded, kind, handler))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, address, port)
        await site.start()
        return {"url": f"http://{address}:{site._server.sockets[0].getsockname()[1]}"}  # type: ignore[union-attr]

    async def stop(self) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def feed(self, group: int, executions: list[int]) -> dict[str, Any]:
        """Take a ready group; its place in the order is that of the call, though its files are read meanwhile."""
        self._supply.reserve(group)
        try:
            rows, scores = await asyncio.to_thread(rows_of, self._run_dir, self._config, group, executions)
        except BaseException:
            self._supply.drop(group)
            raise
        finally:
            self._wake()
        self._rewards[group] = scores
        kept = [row for row in rows if len(row.sample) <= self._limit]
        for row in rows:
            if len(row.sample) > self._limit:
                self._refuse(group, row)
        self._supply.fill(group, kept)
        self._wake()
        tokens = sum(len(row.sample) for row in kept)
        reward = sum(scores) / len(scores) if scores else 0.0
        return {"rows": len(kept), "refused": len(rows) - len(kept), "tokens": tokens, "reward": reward}

    def _refuse(self, group: int, row: Row) -> None:
        """Leave a sample out that is over the limit.

        The others keep their advantages and weights: they were scored against it all the same, and each of their
        tokens counts as it would beside it. A group of which nothing is left is one that has nothing to teach.
        """
        execution, tokens = row.sample.execution, len(row.sample)
        log.warning(
            "group %d: a sample of execution %d has %d tokens, more than train.sample_limit (%d): it is left out",
            group, execution, tokens, self._limit,
        )  # fmt: skip
        refused = {"group": group, "execution": execution, "tokens": tokens, "limit": self._limit}
        self._endpoint.emit({"type": "refused", **refused})

    async def drop(self, group: int) -> dict[str, Any]:
        """Forget an untaken group."""
        return {"dropped": self._supply.drop(group)}

    async def begin(self, update: int, groups: int) -> None:
        """Open the stream of an update."""
        self._supply.begin(update, groups, (update - 1) // self._config.train.updates_per_batch)
        self._wake()

    async def suspend(self, update: int) -> None:
        """Answer claims with suspended."""
        self._supply.suspend(update)
        self._wake()

    async def resume(self, update: int) -> None:
        """Give micro-steps again."""
        self._supply.resume(update)
        self._wake()

    async def close_short(self, update: int, groups: int | None = None) -> dict[str, Any]:
        """Let an update end with the groups it has."""
        groups = self._supply.close_short(update, groups)
        self._wake()
        self._tell(update)
        return {"groups": groups}

    async def bar(self, rank: int, incarnation: int) -> dict[str, Any]:
        """Shut a member out."""
        returned = self._supply.bar((rank, incarnation))
        self._wake()
        return {"returned": {str(update): steps for update, steps in returned.items()}}

    async def committed(self, update: int) -> None:
        """Forget the micro-steps up to this update."""
        self._supply.committed(update)

    def _wake(self) -> None:
        """Have held claims look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _tell(self, update: int) -> None:
        stream = self._supply.streams.get(update)
        if stream is None:
            return
        leases = stream.leases
        self._endpoint.emit(
            {
                "type": "stream",
                "update": update,
                "published": len(leases.published),
                "claimed": leases.leased,
                "finished": len(leases.finished),
                "taken": len(stream.taken),
                "untaken": self._supply.untaken,
                "dry": stream.dry,
            }
        )

    # -- HTTP --------------------------------------------------------------------------------------------------------
    async def _guarded(self, kind: Any, handler: Any, request: web.Request) -> web.Response:
        """Let `handler` answer what `kind` reads from the body, and map its errors to what clients know."""
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, self._authorization.encode()):
            return web.Response(status=401)
        try:
            asked = kind.of(await request.json())
        except ValueError as error:  # it is no JSON, or Malformed
            log.error("%s: a malformed request: %s", request.path, error)
            return web.Response(status=400, text=str(error))
        try:
            return await handler(asked, request)
        except GyreError as error:
            log.error("%s: %s", request.path, error)
            return web.Response(status=409, text=f"{type(error).__name__}: {error}")

    async def _claim(self, asked: ClaimRequest, request: web.Request) -> web.Response:
        deadline = asyncio.get_running_loop().time() + (_HOLD_SECONDS if asked.wait else 0.0)
        finished = asked.finished
        while True:
            changed = self._changed
            claim = self._supply.claim(asked.update, asked.member, finished, asked.holding, asked.want)
            for group in claim.taken:
                self._endpoint.emit({"type": "taken", "group": group, "update": asked.update})
            if claim.steps or finished:
                self._tell(asked.update)
            finished = ()
            left = deadline - asyncio.get_running_loop().time()
            if claim.answer != "wait" or left <= 0:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left)
            if request.transport is None or request.transport.is_closing():
                break  # nobody would get what is leased now
        headers = {"X-Gyre-Stream": claim.answer, "X-Gyre-Unfinished": str(claim.unfinished)}
        if not claim.steps:
            return web.Response(status=204, headers=headers)
        return web.Response(body=encode_all(claim.steps), content_type="application/octet-stream", headers=headers)

    async def _settle(self, asked: SettleRequest, request: web.Request) -> web.Response:
        fault = self._supply.settle(asked.update, asked.ledgers, asked.core, asked.final)
        if fault is not None:
            return web.json_response({"ok": False, "fault": fault})
        stream = self._supply.stream(asked.update)
        rewards = [score for group in stream.taken for score in self._rewards.get(group, [])]
        numbers = stream.numbers() | ({"reward": sum(rewards) / len(rewards)} if rewards else {})
        return web.json_response({"ok": True, "numbers": numbers})

    async def _bar_request(self, asked: BarRequest, request: web.Request) -> web.Response:
        rank, incarnation = asked.member
        await self.bar(rank, incarnation)
        barred = {"update": asked.update, "rank": rank, "incarnation": incarnation, "reason": asked.reason}
        self._endpoint.emit({"type": "barred", **barred})
        return web.json_response({"ok": True})

    async def _barred(self, asked: BarredRequest, request: web.Request) -> web.Response:
        barred = self._supply.stream(asked.update).leases.barred
        return web.json_response({"barred": sorted(barred)})


async def serve(run_dir: RunDir) -> None:
    """Answer the supervisor until it leaves."""
    endpoint = AsyncEndpoint()
    feeder = Feeder(run_dir, configuration.load(run_dir.config), endpoint)
    operations = (
        feeder.start,
        feeder.stop,
        feeder.feed,
        feeder.drop,
        feeder.begin,
        feeder.suspend,
        feeder.resume,
        feeder.close_short,
        feeder.bar,
        feeder.committed,
    )
    await endpoint.serve({operation.__name__: operation for operation in operations})
    await feeder.stop()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="The feeder, a child of rank 0.")
    parser.add_argument("run_dir", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(serve(RunDir(arguments.run_dir)))


if __name__ == "__main__":
    main()
