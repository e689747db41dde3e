"""The feeder, a child of rank 0: buffers ready groups and serves their micro-steps to the cells that claim them.

    python -m gyre.training.feeder RUN_DIR

What it knows is `gyre.training.supply`; this is the shell around it: operations of the supervisor, files of the run
directory, and an HTTP interface for trainers. Operations:

start(secret, address, port=0, trained=[groups trained by earlier attempts' commits]) -> {"url"}
feed(group, executions)              a ready group, in the order of training; -> {"rows", "tokens", "reward"}
drop(group)                          -> {"dropped"}: false where it is taken already
begin(update, groups) ; suspend(update) ; resume(update) ; close_short(update, groups?) -> {"groups"}
bar(rank, incarnation)               -> {"returned": {update: micro-steps}}
committed(update)                    forget the micro-steps up to this update
stop()                               stop serving

Events: {"type": "taken", "group", "update"}
        {"type": "stream", "update", "published", "claimed", "finished", "taken", "untaken", "dry"}
        {"type": "barred", "rank", "incarnation", "update", "reason"}: by the core, since it went silent

HTTP, all POST with JSON bodies and `Authorization: Bearer <secret>`: /claim, /settle, /bar, /barred
(`gyre.training.stream.Claims` is the client). A claim that must wait is held for up to a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from gyre import config as configuration
from gyre.child import AsyncEndpoint
from gyre.config import Config
from gyre.errors import GyreError
from gyre.run_dir import RunDir, read_json
from gyre.training.packing import Row, encode_all
from gyre.training.supply import Supply

log = logging.getLogger(__name__)

_HOLD_SECONDS = 1.0
_LIMIT = 64 << 20


def rows_of(run_dir: RunDir, config: Config, group: int, executions: list[int]) -> tuple[list[Row], list[float]]:
    """Samples of a group with their advantages, and the scores they come from; blocking.

    Executions without a score are left out. With `train.advantages: shuffled` the advantages change places within the
    group, by seed and group alone: what is rewarded then has nothing to do with what was done. With `ones` every token
    is trained on, as a self-test needs it. A group in which every advantage is 0 has no rows.
    """
    from gyre.trajectories.advantages import group_relative
    from gyre.trajectories.sampling import samples

    outcomes = {n: read_json(run_dir.outcome(n)) or {} for n in executions}
    scored = [n for n in executions if outcomes[n].get("score") is not None]
    scores = [float(outcomes[n]["score"]) for n in scored]
    advantages = list(group_relative(scores)) if scores else []
    if config.train.advantages == "ones":
        advantages = [1.0] * len(scores)
    if config.train.advantages == "shuffled":
        order = np.random.default_rng([config.seed, group]).permutation(len(advantages))
        advantages = [advantages[i] for i in order]
    if not any(advantages):
        return [], scores
    rows = []
    for n, advantage in zip(scored, advantages, strict=True):
        for sample in samples(run_dir, n):
            if sample.trained.any():
                sample.check()  # invariant 12
                rows.append(Row(replace(sample, group=group), advantage))
    return rows, scores


class Feeder:
    """The shell around `Supply`; everything runs in one event loop, files are read in threads."""

    def __init__(self, run_dir: RunDir, config: Config, endpoint: AsyncEndpoint) -> None:
        self._run_dir = run_dir
        self._config = config
        self._endpoint = endpoint
        self._supply = Supply(config.train.micro_tokens)
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
        for path, handler in (
            ("/claim", self._claim),
            ("/settle", self._settle),
            ("/bar", self._bar_request),
            ("/barred", self._barred),
        ):
            app.router.add_post(path, functools.partial(self._guarded, handler))
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
        self._supply.fill(group, rows)
        self._wake()
        tokens = sum(len(row.sample) for row in rows)
        return {"rows": len(rows), "tokens": tokens, "reward": sum(scores) / len(scores) if scores else 0.0}

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
    async def _guarded(self, handler: Any, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != self._authorization:
            return web.Response(status=401)
        try:
            return await handler(await request.json(), request)
        except GyreError as error:
            log.error("%s: %s", request.path, error)
            return web.Response(status=409, text=f"{type(error).__name__}: {error}")

    async def _claim(self, body: dict[str, Any], request: web.Request) -> web.Response:
        update, member, finished = body["update"], (body["rank"], body["incarnation"]), body["finished"]
        holding, want = set(body["holding"]), body["want"]
        deadline = asyncio.get_running_loop().time() + (_HOLD_SECONDS if body["wait"] else 0.0)
        while True:
            changed = self._changed
            claim = self._supply.claim(update, member, finished, holding, want)
            for group in claim.taken:
                self._endpoint.emit({"type": "taken", "group": group, "update": update})
            if claim.steps or finished:
                self._tell(update)
            finished = []
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

    async def _settle(self, body: dict[str, Any], request: web.Request) -> web.Response:
        update = body["update"]
        ledgers = {(rank, incarnation): ids for rank, incarnation, ids in body["ledgers"]}
        fault = self._supply.settle(update, ledgers, tuple(body["core"]), body["final"])
        if fault is not None:
            return web.json_response({"ok": False, "fault": fault})
        stream = self._supply.stream(update)
        rewards = [score for group in stream.taken for score in self._rewards.get(group, [])]
        numbers = stream.numbers() | ({"reward": sum(rewards) / len(rewards)} if rewards else {})
        return web.json_response({"ok": True, "numbers": numbers})

    async def _bar_request(self, body: dict[str, Any], request: web.Request) -> web.Response:
        await self.bar(body["rank"], body["incarnation"])
        self._endpoint.emit({"type": "barred", **body})
        return web.json_response({"ok": True})

    async def _barred(self, body: dict[str, Any], request: web.Request) -> web.Response:
        barred = self._supply.stream(body["update"]).leases.barred
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
