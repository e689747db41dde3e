"""KV handed over between two real engines: nothing is computed twice, and nothing but what was meant is used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from dataclasses import replace

import pytest

from gyre import models
from gyre.cell.kv_segment import path_of, read_page
from gyre.cell.kv_transport import Address
from tests.cell.kv_stand import SECRET, Engine

#: Seconds after which the source drops what nobody took.
TIMEOUT = 3.0


class Pair:
    """A source and a destination, and the loop they live in."""

    def __init__(self, log) -> None:
        self.loop = asyncio.new_event_loop()
        tiny = models.resolve("gyre:tiny")
        self.source = self.run(Engine.start(tiny, log / "source.log", 1, kv={"timeout": TIMEOUT}))
        self.target = self.run(Engine.start(tiny, log / "target.log", 2))
        self.run(self._together(self.source.ready(), self.target.ready()))

    @staticmethod
    async def _together(*work):
        await asyncio.gather(*work)

    def run(self, work):
        return self.loop.run_until_complete(work)

    async def opened(self):
        for engine in (self.source, self.target):
            await engine.process.close()
            await engine.wake()
            await engine.open()
        return self.source, self.target

    def address(self) -> Address:
        return Address.decode(self.source.process.kv, SECRET)

    def stop(self) -> None:
        self.run(self._together(self.source.stop(), self.target.stop()))
        self.loop.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory, fork_server):
    pair = Pair(tmp_path_factory.mktemp("pair"))
    try:
        yield pair
    finally:
        pair.stop()


def prompt(seed: int, length: int = 300) -> list[int]:
    return [257, *random.Random(seed).choices(range(250), k=length - 1)]


async def finished_elsewhere(engine: Engine, moved, **more):
    """The rest of a request that was cut off, and the share of its context that was computed again."""
    context = moved.prompt + moved.sampled
    answer = await engine.complete(context, max_tokens=16, **more)
    return answer, 1 - answer.cached / len(context)


async def check_exact(engine: Engine, moved, rest) -> None:
    """What both engines sampled is what one alone samples."""
    await engine.process.close()
    await engine.open()
    alone = await engine.complete(moved.prompt, max_tokens=len(moved.sampled) + len(rest.tokens))
    assert moved.sampled + rest.tokens == alone.tokens
    far = zip(rest.logprobs, alone.logprobs[len(moved.sampled) :], strict=True)
    assert max(abs(a - b) for a, b in far) < 1e-4


@pytest.mark.parametrize("way", ["shared", "socket"])
def test_what_is_handed_over_is_not_computed_again(pair, way):
    async def scenario():
        source, target = await pair.opened()
        seeds = (1, 2) if way == "shared" else (3, 4)
        between = prompt(seeds[0] + 10, 200)  # an execution between two calls
        first = await source.complete(between, max_tokens=10)
        moved = await source.cut_off(*(prompt(seed, 280 + 40 * seed) for seed in seeds))
        assert source.exported["blocks"] > 2 * 10
        asleep = await source.sleep()
        assert asleep["bytes"] == {"weights": 0, "kv": 0}
        assert (await source.process.memory())["bytes"]["handoff"] == source.exported["bytes"]
        kv = moved[0].kv
        if way == "socket":
            kv = kv | {"address": replace(pair.address(), host="0-0").encode(SECRET)}
        rests = [await finished_elsewhere(target, each, kv=kv) for each in moved]
        assert all(share < 0.05 for _, share in rests), [share for _, share in rests]
        later = await target.complete(between + first.tokens + [7, 8, 9], kv=kv)
        assert later.cached >= 6 * 32  # its last block, which is not full, was given to others first
        while (await source.process.memory())["bytes"]["handoff"]:  # all was taken
            await asyncio.sleep(0.05)
        await source.wake()
        for each, (rest, _) in zip(moved, rests, strict=True):
            await check_exact(source, each, rest)

    pair.run(scenario())


def test_without_it_all_is_computed_again(pair):
    async def scenario():
        source, target = await pair.opened()
        (moved,) = await source.cut_off(prompt(20), export=False)
        rest, share = await finished_elsewhere(target, moved)
        assert share == 1
        await check_exact(source, moved, rest)

    pair.run(scenario())


def test_blocks_of_another_policy_or_epoch_are_not_used(pair):
    async def scenario():
        source, target = await pair.opened()
        *moved, last = await source.cut_off(*(prompt(seed) for seed in (30, 31, 32, 33)))
        wrong = ({"epoch": last.kv["epoch"] - 1}, {"policy": 1}, {"address": last.kv["address"] + "x"})
        for each, words in zip(moved, wrong, strict=True):
            assert (await finished_elsewhere(target, each, kv=each.kv | words))[1] == 1
        await target.process.close()
        await target.open(policy=1)  # newer weights
        rest, share = await finished_elsewhere(target, last, kv=last.kv)
        assert share == 1
        await check_exact(source, last, rest)

    pair.run(scenario())


def test_a_request_waits_for_an_export_that_is_on_its_way(pair):
    async def scenario():
        source, target = await pair.opened()
        context = prompt(40)
        await source.complete(context, max_tokens=1)
        begun, enough = await source.begin(prompt(41), 4)
        await enough.wait()
        asked = asyncio.ensure_future(target.complete(context + [1], kv=source.kv()))
        await asyncio.sleep(0.1)
        assert not asked.done()
        await source.process.close()
        await source.process.export()
        assert (await asked).cached >= 9 * 32
        await begun

    pair.run(scenario())


def test_a_source_that_does_not_leave_is_not_waited_for(pair):
    async def scenario():
        source, target = await pair.opened()
        answer = await target.complete(prompt(50), kv=source.kv())
        assert answer.cached == 0
        await source.process.close()
        await source.sleep()  # without an export: what was pinned is free
        await source.wake()

    pair.run(scenario())


def test_blocks_that_cannot_be_loaded_are_computed(pair):
    async def scenario():
        source, target = await pair.opened()
        (moved,) = await source.cut_off(prompt(60))
        page = read_page(pair.address().page, pair.address().tag)
        with open(path_of(pair.address().pid, page.fds[0]), "r+b") as shard:
            shard.seek(8 + 8 + 8 + 16)  # the layout, which only workers know
            shard.write(b"x" * 16)
        rest, _ = await finished_elsewhere(target, moved, kv=moved.kv)
        await check_exact(source, moved, rest)
        await check_exact(target, moved, rest)

    pair.run(scenario())


def test_loads_that_fail_among_many_requests_end_none_and_change_none(pair):
    """Some load, some fail to, some are left by their clients in the middle of it; prefixes are shared."""

    async def scenario():
        chance = random.Random(5)
        for turn in range(2):
            source, target = await pair.opened()
            together = prompt(300 + turn, 120)
            moved = await source.cut_off(*(together + prompt(310 + n, 60 + 40 * n)[1:] for n in range(4)), tokens=10)
            page = read_page(pair.address().page, pair.address().tag)

            async def alter(shard: str = path_of(pair.address().pid, page.fds[0])):
                await asyncio.sleep(chance.uniform(0, 0.1))
                with contextlib.suppress(FileNotFoundError), open(shard, "r+b") as file:
                    file.seek(8 + 8 + 8 + 16)
                    file.write(b"x" * 16)

            async def ask(each, there=target):
                await asyncio.sleep(chance.uniform(0, 0.2))
                asked = there.complete(each.prompt + each.sampled, max_tokens=8, kv=each.kv)
                with contextlib.suppress(TimeoutError):
                    return await asyncio.wait_for(asked, 0.05 if chance.random() < 0.3 else None)

            altering = asyncio.create_task(alter())
            rests = await asyncio.gather(*(ask(each) for each in moved * 3))
            await altering
            for each, rest in zip(moved * 3, rests, strict=True):
                later = await target.complete(each.prompt + each.sampled, max_tokens=8)  # with what they left cached
                await check_exact(source, each, later)
                if rest is not None:
                    await check_exact(source, each, rest)

    pair.run(scenario())


def test_what_nobody_takes_is_dropped(pair):
    async def scenario():
        source, target = await pair.opened()
        (moved,) = await source.cut_off(prompt(70))
        while (await source.process.memory())["bytes"]["handoff"]:
            await asyncio.sleep(0.1)
        rest, share = await finished_elsewhere(target, moved, kv=moved.kv)
        assert share == 1
        await check_exact(source, moved, rest)

    pair.run(scenario())


def test_a_source_that_was_killed_leaves_nothing_and_is_not_waited_for(pair):
    async def scenario():
        source, target = await pair.opened()
        (moved,) = await source.cut_off(prompt(80))
        os.killpg(source.process.pid, signal.SIGKILL)
        await source.process.wait()
        assert not [name for name in os.listdir("/dev/shm") if "gyre-kv" in name]
        rest, share = await finished_elsewhere(target, moved, kv=moved.kv)
        assert share == 1
        await check_exact(target, moved, rest)

    pair.run(scenario())


@contextlib.asynccontextmanager
async def two(tmp_path, **changes):
    """Two engines of their own kind, that serve."""
    engines = [await Engine.start(models.resolve("gyre:tiny"), tmp_path / f"{n}.log", n, **changes) for n in (1, 2)]
    try:
        for engine in engines:
            await engine.ready()
            await engine.open()
        yield engines
    finally:
        for engine in engines:
            await engine.stop()


@pytest.mark.full
def test_every_worker_of_an_engine_hands_over_its_part(tmp_path):
    async def scenario():
        args = {"distributed-executor-backend": "mp", "tensor-parallel-size": 2, "kv-cache-memory-bytes": "32M"}
        async with two(tmp_path, args=args) as (source, target):
            for seed, way in ((90, "shared"), (92, "socket")):
                moved = await source.cut_off(prompt(seed), prompt(seed + 1))
                kv = moved[0].kv
                if way == "socket":
                    address = replace(Address.decode(kv["address"], SECRET), host="0-0").encode(SECRET)
                    kv = kv | {"address": address}
                rests = [await finished_elsewhere(target, each, kv=kv) for each in moved]
                assert all(share < 0.05 for _, share in rests), [share for _, share in rests]
                while (await source.process.memory())["bytes"]["handoff"]:  # both workers took all
                    await asyncio.sleep(0.05)
                for each, (rest, _) in zip(moved, rests, strict=True):
                    await check_exact(source, each, rest)

    asyncio.run(scenario())


@pytest.mark.full
def test_a_cache_that_is_full_is_handed_over_whole(tmp_path, fork_server):
    """Requests that end first must not lose their blocks to those that go on for another moment."""

    async def scenario():
        async with two(tmp_path, args={"kv-cache-memory-bytes": "2M"}) as (source, target):  # 64 blocks
            moved = await source.cut_off(*(prompt(seed, 440) for seed in range(4)), tokens=20)
            rests = [await finished_elsewhere(target, each, kv=each.kv) for each in moved]
            assert all(share < 0.05 for _, share in rests), [share for _, share in rests]

    asyncio.run(scenario())
