"""The giving side of a KV handoff, in the process of the engine's server: its page, its exports and their end.

The gate tells it what happens: blocks are pinned before the gate closes, exported after it reported zero, and given up
when they were taken, were not taken in time, or the engine serves again. The blocks are copied out, so the engine's
memory is released without waiting for any reader. Imports no engine: `Core` is all it asks of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import mmap
import os
import secrets
import struct
import time
from dataclasses import replace
from typing import Any, Protocol

from gyre.cell.gate_answer import Message, Receive, Send, read_body, send_json
from gyre.cell.kv_segment import (
    MOST_SHARDS,
    PAGE_BYTES,
    Header,
    Page,
    Plan,
    Stage,
    Unavailable,
    give_up,
    mapped,
    nameless,
    path_of,
)
from gyre.cell.kv_transport import Address, this_host
from gyre.errors import UserError

log = logging.getLogger("gyre.engine.kv")

#: Bytes of a request for blocks.
BODY_LIMIT = 4 << 20
#: Bytes that are sent at once.
PIECE_BYTES = 4 << 20
#: Seconds between two looks at what was taken.
WATCH_SECONDS = 0.1


class Core(Protocol):
    """What a handoff asks of the engine."""

    shards: int  # its workers

    async def plan(self) -> None:
        """Have the scheduler's side write its plan, if an export is on, and let go of what it pinned."""

    async def export(self, plan: str, shards: list[str], generation: int, policy: int) -> None:
        """Have every worker copy its part of the planned blocks to the shard at its path."""


class Source:
    """An engine's page and what it exported; `timeout` is in seconds from the export."""

    def __init__(self, secret: str, timeout: float) -> None:
        self._secret = secret
        self._timeout = timeout
        self._descriptor = nameless("kv-page", PAGE_BYTES)
        self._memory = mmap.mmap(self._descriptor, PAGE_BYTES)
        self._page = Page(secrets.token_bytes(16), Stage.STARTED)
        self._write(self._page)
        self._core: Core | None = None
        self._leaves: list[int] = []
        self._bytes = 0
        self._watching: asyncio.Task[None] | None = None

    @property
    def path(self) -> str:
        """Where this engine's own processes find the page."""
        return path_of(os.getpid(), self._descriptor)

    @property
    def tag(self) -> bytes:
        """What tells this page from any other."""
        return self._page.tag

    @property
    def bytes(self) -> int:
        """Bytes of exported blocks that are still there."""
        return self._bytes

    def attach(self, core: Core) -> None:
        """Take the engine over, when it is there.

        Raises:
            UserError: it has more workers than a page has room for.
        """
        if core.shards > MOST_SHARDS:
            raise UserError(f"serving.kv_handoff: {core.shards} workers in one engine; {MOST_SHARDS} can hand KV off")
        self._core = core

    def address(self, url: str) -> str:
        """What other engines of the run find this one's blocks by; `url` is the gate's."""
        return Address(this_host(), os.getpid(), self._descriptor, self.tag, url).encode(self._secret)

    def _write(self, page: Page) -> None:
        self._page = page
        self._memory[: len(data)] = (data := page.pack())

    # -- what the gate says ------------------------------------------------------------------------------------------
    def serve(self, epoch: int, policy: int) -> None:
        """The gate opens: nothing from before is of use."""
        self.release("the engine serves again")
        turn = self._page.turn + 1
        self._write(replace(self._page, stage=Stage.SERVING, turn=turn, epoch=epoch, policy=policy, generation=-1))

    def hold(self) -> None:
        """The weights are going to change."""
        self.release("the weights change")
        self._write(replace(self._page, stage=Stage.HELD, policy=-1))

    def pin(self) -> None:
        """The gate is about to close: keep the blocks of what is cut off."""
        if self._page.stage is Stage.SERVING:
            self._write(replace(self._page, stage=Stage.PINNING))

    async def settle(self) -> None:
        """Let go of what is pinned and was not exported."""
        if self._page.stage is Stage.PINNING and self._core is not None:
            self._write(replace(self._page, stage=Stage.GONE))
            await self._core.plan()

    async def export(self) -> Message:
        """Copy the blocks out; returns {blocks, bytes, tokens, seconds}. Only behind a closed gate with nothing live.

        A fault leaves nothing behind, and nobody is worse off than without a handoff.
        """
        began = time.monotonic()
        if self._page.stage is not Stage.PINNING or self._core is None:
            return {"blocks": 0, "bytes": 0, "seconds": 0.0}
        plan = nameless("kv-plan")
        shards: list[int] = []
        try:
            self._write(replace(self._page, stage=Stage.EXPORTING, plan=plan))
            await self._core.plan()
            planned = Plan.unpack(_whole(plan))
            if planned.chosen:
                shards += [nameless("kv-shard") for _ in range(self._core.shards)]
                paths = [path_of(os.getpid(), descriptor) for descriptor in shards]
                await self._core.export(path_of(os.getpid(), plan), paths, self._page.epoch, self._page.policy)
        except BaseException:
            for descriptor in shards:
                os.close(descriptor)
            self._write(replace(self._page, stage=Stage.GONE, plan=-1))
            with contextlib.suppress(Exception):  # what is pinned must not outlast this, however far it came
                await self._core.plan()
            raise
        finally:
            os.close(plan)
        self._leaves = [slot for slot, each in enumerate(planned.chosen) if each.leaf]
        self._bytes = sum(os.fstat(descriptor).st_size for descriptor in shards)
        stage = Stage.READY if shards else Stage.GONE
        page = replace(self._page, stage=stage, plan=-1, fds=tuple(shards), generation=self._page.epoch)
        self._write(page)
        if shards:
            self._watching = asyncio.create_task(self._watch(time.monotonic() + self._timeout), name="watch kv")
        return {
            "blocks": len(planned.chosen),
            "bytes": self._bytes,
            "seconds": round(time.monotonic() - began, 6),
        }

    # -- the end of an export ----------------------------------------------------------------------------------------
    async def _watch(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                taken = self._taken()
            except Exception:  # whatever a look meets, the time runs on
                log.exception("nobody can tell whether the KV blocks of epoch %d were taken", self._page.epoch)
                break
            if taken:
                self.release("they were taken")
                return
        await asyncio.sleep(max(0.0, deadline - time.monotonic()))
        self.release(f"they were not taken within {self._timeout:g} s")

    def _taken(self) -> bool:
        """Whether every prefix was read from every shard."""
        for descriptor in self._page.fds:
            with mapped(path_of(os.getpid(), descriptor)) as memory:
                header = Header.unpack(memory)
                taken = memory[header.taken_at : header.taken_at + header.slots]
            if not all(taken[slot] for slot in self._leaves):
                return False
        return True

    def release(self, why: str) -> None:
        """Give exported blocks up, the word first and then the memory."""
        if self._page.fds:
            log.info("KV blocks of epoch %d (%d bytes) are given up: %s", self._page.epoch, self._bytes, why)
        shards = self._page.fds
        if self._page.stage is Stage.READY:
            self._write(replace(self._page, stage=Stage.GONE, generation=-1, fds=()))
        for descriptor in shards:
            give_up(descriptor)
            os.close(descriptor)
        self._bytes, self._leaves = 0, []
        watching, self._watching = self._watching, None
        if watching is not None and watching is not _current_task():
            watching.cancel()

    def close(self) -> None:
        """Give everything up, for good."""
        self.release("the engine ends")
        self._memory.close()
        os.close(self._descriptor)

    # -- the socket --------------------------------------------------------------------------------------------------
    async def http(self, method: str, path: str, receive: Receive, send: Send) -> None:
        """Answer one request below ``/gyre/kv/``; the gate has seen the run's key."""
        try:
            match method, path.removeprefix("/gyre/kv/").split("/"):
                case "GET", ["page"]:
                    await _answer(send, 200, self._page.pack())
                case "GET", ["index", shard]:
                    await self._send_index(int(shard), send)
                case "POST", ["blocks" | "taken" as what]:
                    body = await read_body({}, receive, send, BODY_LIMIT)
                    if body is None:  # nobody is there any more, or has been told why not
                        return
                    arguments = json.loads(body)
                    if what == "blocks":
                        await self._send_blocks(arguments, send)
                    else:
                        self._note_taken(arguments)
                        await send_json(send, 200, {})
                case _:
                    await _answer(send, 404, b"there is no such thing here")
        except Unavailable as error:
            await _answer(send, 410, str(error).encode())
        except (KeyError, TypeError, ValueError, IndexError) as error:
            await _answer(send, 400, f"bad request: {type(error).__name__}".encode())

    def _shard(self, number: int) -> str:
        if not 0 <= number < len(self._page.fds):
            raise Unavailable("there are no blocks")
        return path_of(os.getpid(), self._page.fds[number])

    async def _send_index(self, number: int, send: Send) -> None:
        with mapped(self._shard(number)) as memory:
            data = memory[: Header.unpack(memory).taken_at]
        await _answer(send, 200, data)

    async def _send_blocks(self, body: Message, send: Send) -> None:
        """Send blocks, and then the generation as it is after they were read."""
        slots = body["slots"]
        with mapped(self._shard(body["shard"])) as memory:
            header = Header.unpack(memory)
            if header.generation != body["generation"]:
                raise Unavailable("the blocks were given up")
            if not all(type(slot) is int and 0 <= slot < header.slots for slot in slots):
                raise ValueError("no such slot")
            length = str(len(slots) * header.block_bytes + 8).encode()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
            step = max(1, PIECE_BYTES // header.block_bytes)
            for first in range(0, len(slots), step):
                at = [header.data + slot * header.block_bytes for slot in slots[first : first + step]]
                piece = b"".join(memory[begin : begin + header.block_bytes] for begin in at)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            last = struct.pack("<q", Header.unpack(memory).generation)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _note_taken(self, body: Message) -> None:
        if body["generation"] != self._page.generation:
            return
        for number in range(len(self._page.fds)):
            with mapped(self._shard(number)) as memory:
                header = Header.unpack(memory)
                for slot in body["slots"]:
                    if type(slot) is int and 0 <= slot < header.slots:
                        memory[header.taken_at + slot] = 1


def _current_task() -> asyncio.Task[Any] | None:
    with contextlib.suppress(RuntimeError):
        return asyncio.current_task()
    return None


def _whole(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


async def _answer(send: Send, status: int, data: bytes) -> None:
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": False})
