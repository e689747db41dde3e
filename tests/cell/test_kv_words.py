"""What is said of KV blocks between engines: addresses, wishes, and the socket, without an engine.

Every test ends with the check that no memory of a handoff is left open in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from array import array
from dataclasses import replace

import pytest
import torch
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre import config as configuration
from gyre.cell.gate import Gate
from gyre.cell.kv_index import ROOT, Entry
from gyre.cell.kv_segment import (
    Page,
    Stage,
    Unavailable,
)
from gyre.cell.kv_socket import Socket
from gyre.cell.kv_transport import Address, Kind, Wanted, ready
from gyre.errors import UserError
from tests.cell.kv_toys import (
    KIND,
    PREFIX,
    SECRET,
    SIZE,
    Caches,
    exported,
    handoff_memory,
    load_of,
)
from tests.cell.test_gate import ToyControl

PAGE = Page(b"t" * 16, Stage.READY, 3, 5, 7, 5, -1, (11, 12))


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert handoff_memory() == []


# -- words -----------------------------------------------------------------------------------------------------------
ADDRESS = Address("0123abcd-4", 77, 5, b"t" * 16, "http://10.0.0.1:8000")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_an_address_that_was_altered_is_no_address(data):
    text = ADDRESS.encode(SECRET)
    assert Address.decode(text, SECRET) == ADDRESS
    at, letter = data.draw(st.integers(0, len(text) - 1)), data.draw(st.characters())
    if (altered := text[:at] + letter + text[at + 1 :]) != text:
        with pytest.raises(Unavailable):
            Address.decode(altered, SECRET)
    with pytest.raises(Unavailable):
        Address.decode(text, "another run's key")


JSON = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just({"address": "x"}) | st.just([])


@settings(max_examples=100, deadline=None)
@given(JSON, JSON, JSON)
def test_nonsense_in_a_request_is_no_reason_to_fail(anything, epoch, policy):
    for words in (anything, {"address": ADDRESS.encode(SECRET), "epoch": epoch, "policy": policy}):
        with contextlib.suppress(Unavailable):
            assert Wanted.of(words, SECRET).address == ADDRESS


@pytest.mark.parametrize(
    ("stage", "waited", "answer"),
    [
        (Stage.READY, 0, True),
        (Stage.SERVING, 0, False),  # its order is on the way
        (Stage.SERVING, 1, None),
        (Stage.PINNING, 1, False),
        (Stage.EXPORTING, 9, False),
        (Stage.EXPORTING, 11, None),
        (Stage.GONE, 0, None),
        (Stage.HELD, 0, None),
        (Stage.STARTED, 0, None),
    ],
)
def test_an_export_on_its_way_is_waited_for_within_bounds(stage, waited, answer):
    wanted = Wanted(ADDRESS, 5, 7)
    page = replace(PAGE, stage=stage)
    if answer is None:
        with pytest.raises(Unavailable):
            ready(page, wanted, waited)
    else:
        assert ready(page, wanted, waited) is answer


# -- sockets ---------------------------------------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def served(workers: list[Caches]):
    """A source behind a gate on a port."""
    async with exported(workers) as left:
        gate = Gate(None, secret=SECRET, rank=0, control=ToyControl(None), kv=left.source)
        server = uvicorn.Server(uvicorn.Config(gate, port=0, lifespan="off", log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        left.wanted = replace(left.wanted, address=replace(left.wanted.address, url=f"http://127.0.0.1:{port}"))
        try:
            yield left
        finally:
            server.should_exit = True
            await serving


async def fetch(wanted, tokens, limit=1 << 20, secret=SECRET, kind=KIND):
    search = Socket(secret, limit).search(wanted, tokens, kind)
    while (found := search.poll(0.0)) is None:
        await asyncio.sleep(0.01)
    return found


def test_blocks_come_over_a_socket_and_are_acknowledged():
    async def scenario():
        there = [Caches(rank=rank) for rank in (0, 1)]
        async with served(there) as left:
            found = await fetch(left.wanted, PREFIX)
            assert (found.tokens, found.slots) == (10, (0, 1, 2))
            while left.page().stage is Stage.READY:  # all was taken
                await asyncio.sleep(0.02)
            for source, target in zip(there, (Caches(rank=0), Caches(rank=1)), strict=True):
                target.worker.load([load_of(found, [(7, 0), (6, 1), (5, 2)])])
                assert target.worker.failed() == set()
                for mine, theirs in ((7, 5), (6, 3), (5, 1)):
                    assert all(map(torch.equal, target.block(mine), source.block(theirs)))
            found.close()

    asyncio.run(scenario())


def test_a_socket_gives_nothing_to_strangers_and_nothing_that_is_not_wanted():
    async def scenario():
        async with served([Caches()]) as left:
            for wrong in (
                {"secret": "x"},
                {"limit": 100},
                {"kind": Kind(b"x" * 16, SIZE)},
                {"wanted": replace(left.wanted, policy=1)},
                {"wanted": replace(left.wanted, address=replace(left.wanted.address, tag=b"x" * 16))},
            ):
                with pytest.raises(Unavailable):
                    await fetch(**{"wanted": left.wanted, "tokens": PREFIX, **wrong})
            assert left.page().stage is Stage.READY
            left.source.release("test")
            with pytest.raises(Unavailable, match="gone"):
                await fetch(left.wanted, PREFIX)
        with pytest.raises(Unavailable):
            await fetch(left.wanted, PREFIX)  # nobody listens any more

    asyncio.run(scenario())


def test_odd_requests_for_blocks_are_answered():
    async def ask(source, method, path, body=b""):
        sent = []
        message = {"type": "http.request", "body": body, "more_body": False}

        async def receive():
            return message

        async def send(message):
            sent.append(message)

        await source.http(method, path, receive, send)
        return sent[0]["status"]

    async def scenario():
        async with exported() as left:
            source = left.source
            assert await ask(source, "GET", "/gyre/kv/page") == 200
            assert await ask(source, "GET", "/gyre/kv/index/0") == 200
            for method, path in (("GET", "/gyre/kv/../x"), ("PUT", "/gyre/kv/page"), ("GET", "/gyre/kv/")):
                assert await ask(source, method, path) == 404
            for path in ("/gyre/kv/index/9", "/gyre/kv/index/-1"):
                assert await ask(source, "GET", path) == 410
            assert await ask(source, "GET", "/gyre/kv/index/x") == 400
            for body in (b"", b"[]", b"{", b"{}", *map(json.dumps, ({"shard": 0}, {"shard": "0", "slots": []}))):
                body = body if isinstance(body, bytes) else body.encode()
                assert await ask(source, "POST", "/gyre/kv/blocks", body) in (400, 410)
            for slots in ([3], [-1], ["0"], [True], 5):
                body = json.dumps({"shard": 0, "generation": 4, "slots": slots}).encode()
                assert await ask(source, "POST", "/gyre/kv/blocks", body) == 400
            late = json.dumps({"shard": 0, "generation": 3, "slots": [0]}).encode()
            assert await ask(source, "POST", "/gyre/kv/blocks", late) == 410
            assert await ask(source, "POST", "/gyre/kv/taken", late) == 200
            assert left.page().stage is Stage.READY
            assert await ask(source, "POST", "/gyre/kv/blocks", b"0" * (5 << 20)) == 413

    asyncio.run(scenario())


def test_entries_keep_their_tokens():
    assert Entry.of(ROOT, [1, 2]).tokens == array("i", [1, 2])


def test_engines_without_kv_cannot_hand_it_off():
    timed = {"engine": {"kind": "timed"}, "train": {"updates": 1, "kind": "timed"}, "serving": {"kv_handoff": True}}
    rest = {
        "model": {"path": "gyre:timed"},
        "tasks": {"path": "tasks.jsonl"},
        "harness": {"command": ["true"], "score": {"command": ["true"]}},
        "cells": {"count": 1, "slots": 1, "gpus": 0},
        "scheduler": {"batch_groups": 1, "group_size": 2},
    }
    with pytest.raises(UserError, match=r"engine.kind timed has no KV cache to hand off; set serving.kv_handoff=false"):
        configuration.build(timed | rest)
