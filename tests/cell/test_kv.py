"""KV handoff without an engine: what blocks are worth, the memory they go through, and who may not have them.

Every test ends with the check that no memory of a handoff is left open in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.cell.kv_index import ROOT, Chosen, Entry, Index, Ledger, extend, key
from gyre.cell.kv_segment import (
    INDEX_AT,
    Header,
    Page,
    Plan,
    Stage,
    Unavailable,
    check,
    data_offset,
    give_up,
    mapped,
    nameless,
    path_of,
    read_index,
    read_page,
)
from gyre.cell.kv_source import Source
from gyre.cell.kv_transport import Kind
from gyre.cell.kv_worker import Load
from tests.cell.kv_toys import (
    CHOSEN,
    MODEL,
    PREFIX,
    SECRET,
    SIZE,
    Caches,
    ToyCore,
    entries,
    exported,
    handoff_memory,
    load_of,
    look,
)

TOKENS = st.lists(st.integers(0, 3), max_size=24)


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert handoff_memory() == []


def common(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# -- what blocks are worth -------------------------------------------------------------------------------------------
@settings(max_examples=100, deadline=None)
@given(TOKENS, st.lists(st.integers(0, 24), max_size=6))
def test_a_chain_is_the_same_in_whatever_pieces_it_grows(tokens, lengths):
    grown: list[bytes] = []
    for length in sorted(min(each, len(tokens)) for each in lengths):
        extend(grown, tokens, SIZE, length)
    extend(grown, tokens, SIZE, len(tokens))
    assert grown == [each.key for each in entries(tokens) if len(each.tokens) == SIZE]


def test_a_key_stands_for_the_whole_prefix_and_for_how_much_of_a_block_is_there():
    assert key(ROOT, [1, 2, 3, 4]) != key(key(ROOT, [0, 0, 0, 0]), [1, 2, 3, 4])
    assert len({key(ROOT, [1, 0, 0][:n]) for n in (1, 2, 3)}) == 3


@settings(max_examples=100, deadline=None)
@given(st.lists(TOKENS, max_size=5), TOKENS)
def test_a_match_is_the_longest_prefix_that_any_request_left(held, wanted):
    left: dict[bytes, Entry] = {}
    for tokens in held:
        left.update({each.key: each for each in entries(tokens)})
    found = Index(list(left.values()), SIZE).match(wanted)
    assert found.tokens == max((common(tokens, wanted) for tokens in held), default=0)
    assert len(found.slots) == -(-found.tokens // SIZE)
    kept = [token for slot in found.slots for token in list(left.values())[slot].tokens]
    assert kept[: found.tokens] == wanted[: found.tokens]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_ledger_says_what_blocks_hold_and_plans_whole_prefixes(data):
    """Requests write blocks that others had; whatever is planned is what stands there, with all that precedes it."""
    blocks: dict[int, Entry] = {}
    ledger, latest = Ledger(), []
    for _ in range(data.draw(st.integers(0, 6))):
        wrote = entries(data.draw(TOKENS))
        places = data.draw(st.permutations(range(8)))[: len(wrote)]
        ledger.drop(places)
        for place in places:
            blocks.pop(place, None)
        for place, entry in zip(places, wrote, strict=False):
            ledger.hold(place, entry)
            blocks[place] = entry
        latest = wrote[: len(places)]
    limit = data.draw(st.integers(0, 8))
    plan = ledger.plan(limit)
    chosen = {each.entry.key for each in plan}
    assert len(plan) == len(chosen) <= limit
    for each in plan:
        assert blocks[each.block] == each.entry
        assert each.entry.parent == ROOT or each.entry.parent in chosen
        assert each.leaf == (each.entry.key not in {other.entry.parent for other in plan})
    assert {entry.key for entry in latest[:limit]} <= chosen, "the latest request comes first"


# -- memory ----------------------------------------------------------------------------------------------------------
PAGE = Page(b"t" * 16, Stage.READY, 3, 5, 7, 5, -1, (11, 12))


def test_pages_and_plans_are_what_they_were():
    assert Page.unpack(PAGE.pack()) == PAGE
    plan = Plan(MODEL, SIZE, [Chosen(e, 9 - n, n == 2) for n, e in enumerate(entries(list(range(11))))])
    assert Plan.unpack(plan.pack()) == plan
    assert Plan.unpack(Plan(MODEL, SIZE, []).pack()).chosen == []


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_bytes_that_are_no_page_plan_or_shard_are_refused_or_harmless(data):
    plan = Plan(MODEL, SIZE, [Chosen(e, n, True) for n, e in enumerate(entries(list(range(11))))]).pack()
    shard = Header(5, 7, MODEL, b"l" * 16, b"g" * 16, 64, SIZE, 3, data_offset(3, SIZE)).pack()
    for whole, unpack in ((PAGE.pack(), Page.unpack), (plan, Plan.unpack), (shard, Header.unpack)):
        bytes_ = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
        for at in data.draw(st.lists(st.integers(0, max(0, len(bytes_) - 1)), max_size=4)) if bytes_ else ():
            bytes_[at] = data.draw(st.integers(0, 255))
        with contextlib.suppress(Unavailable):
            unpack(bytes(bytes_))
        with pytest.raises(Unavailable):
            unpack(b"\0" * len(whole))


@pytest.mark.parametrize("halves", [False, True])
def test_blocks_arrive_as_they_were_on_every_worker(halves):
    async def scenario():
        there = [Caches(halves=halves, rank=rank) for rank in (0, 1)]
        async with exported(there) as left:
            found = look(left.wanted, [*PREFIX[:9], 99])
            assert (found.tokens, len(found.slots)) == (9, 3)
            here = [Caches(halves=halves, rank=rank, blocks=6 if not halves else 8) for rank in (0, 1)]
            pairs = list(zip((0, 4, 2), found.slots, strict=True))
            for source, target in zip(there, here, strict=True):
                untouched = target.block(1)
                target.worker.load([load_of(found, pairs)])
                assert target.worker.failed() == set()
                for mine, theirs in ((0, 5), (4, 3), (2, 1)):
                    assert all(map(torch.equal, target.block(mine), source.block(theirs)))
                assert all(map(torch.equal, target.block(1), untouched))

    asyncio.run(scenario())


def test_only_the_wanted_epoch_policy_and_kind_are_found():
    async def scenario():
        async with exported() as left:
            assert look(left.wanted, PREFIX).tokens == 10
            for other in (replace(left.wanted, epoch=3), replace(left.wanted, policy=1)):
                with pytest.raises(Unavailable, match="source"):
                    look(other, PREFIX)
            with pytest.raises(Unavailable, match="another model"):
                look(left.wanted, PREFIX, Kind(b"x" * 16, SIZE))
            assert look(left.wanted, [99, *PREFIX]).tokens == 0
            address = replace(left.wanted.address, tag=b"x" * 16)
            with pytest.raises(Unavailable, match="another engine"):
                look(replace(left.wanted, address=address), PREFIX)
            with pytest.raises(Unavailable):
                look(replace(left.wanted, address=replace(left.wanted.address, descriptor=99999)), PREFIX)

    asyncio.run(scenario())


def test_what_is_given_up_or_in_another_layout_is_computed():
    async def scenario():
        async with exported() as left:
            found = look(left.wanted, PREFIX)
            load = load_of(found, [(0, 0)])
            other = Caches(heads=1)
            other.worker.load([load])
            assert other.worker.failed() == {0}
            here = Caches()
            for wrong in (replace(load, policy=3), replace(load, generation=5), replace(load, pairs=[(0, 3)])):
                here.worker.load([wrong])
                assert here.worker.failed() == {0}
            Caches(rank=1).worker.load([load])  # a worker that the source has not
            with mapped(found.shards[0]) as late:  # it was mapped before, and so is still there
                left.source.release("test")
                with pytest.raises(Unavailable, match="given up"):
                    check(late, found.generation, found.policy, MODEL)
            here.worker.load([load])
            assert here.worker.failed() == {0}
            with pytest.raises(Unavailable):
                look(left.wanted, PREFIX)

    asyncio.run(scenario())


def test_a_descriptor_that_is_another_shards_by_now_is_not_read():
    """Paths are of descriptors: between the finding and the loading one may have been closed and used again."""

    async def scenario():
        async with exported() as left, exported() as other:
            found, shards = look(left.wanted, PREFIX), left.page().fds
            os.dup2(other.page().fds[0], shards[0])
            here = Caches()
            untouched = here.block(0)
            here.worker.load([load_of(found, [(0, 0)])])
            assert here.worker.failed() == {0} and all(map(torch.equal, here.block(0), untouched))

    asyncio.run(scenario())


def test_blocks_go_when_every_prefix_was_taken_by_every_worker():
    async def scenario():
        async with exported([Caches(rank=0), Caches(rank=1)]) as left:
            found = look(left.wanted, PREFIX)
            load = Load(
                found.generation, found.policy, found.tag, found.shards, [(n, s) for n, s in enumerate(found.slots)]
            )
            Caches(rank=0).worker.load([load])
            await asyncio.sleep(0.3)
            assert left.page().stage is Stage.READY
            Caches(rank=1).worker.load([load])
            while left.page().stage is Stage.READY:
                await asyncio.sleep(0.02)
            assert left.source.bytes == 0 and left.page().generation == -1

    asyncio.run(scenario())


def test_blocks_go_after_a_time_and_when_the_engine_serves():
    async def scenario():
        async with exported(timeout=0.05) as left:
            while left.page().stage is Stage.READY:
                await asyncio.sleep(0.02)
            assert left.source.bytes == 0
        async with exported() as left:
            turn = left.page().turn
            left.source.serve(5, 2)
            page = left.page()
            assert (page.stage, page.epoch, page.turn, page.fds) == (Stage.SERVING, 5, turn + 1, ())
            left.source.hold()
            assert left.page().policy == -1

    asyncio.run(scenario())


def test_an_export_that_fails_leaves_nothing_and_unpins():
    async def scenario():
        source = Source(SECRET, 30.0)
        core = ToyCore(source, [Caches()], CHOSEN)
        source.attach(core)
        source.serve(1, 0)
        assert (await source.export())["blocks"] == 0  # nobody was cut off
        source.pin()
        core.fault = OSError("no memory")
        with pytest.raises(OSError, match="no memory"):
            await source.export()
        assert read_page(source.path, source.tag).stage is Stage.GONE
        assert not [name for name in handoff_memory() if "page" not in name]
        source.serve(2, 0)
        source.pin()
        before = core.plans
        await source.settle()
        assert core.plans == before + 1
        source.close()

    asyncio.run(scenario())


def test_a_plan_that_fails_has_let_go_of_what_was_pinned():
    async def scenario():
        source = Source(SECRET, 30.0)
        core = ToyCore(source, [Caches()], CHOSEN)
        source.attach(core)
        source.serve(1, 0)
        source.pin()
        stages = []

        async def plan():
            stages.append(read_page(source.path, source.tag).stage)
            raise OSError("no plan")

        core.plan = plan
        with pytest.raises(OSError, match="no plan"):
            await source.export()
        assert stages == [Stage.EXPORTING, Stage.GONE]
        source.close()

    asyncio.run(scenario())


def test_blocks_go_in_time_when_nobody_can_tell_whether_they_were_taken(monkeypatch):
    async def scenario():
        async with exported(timeout=0.3) as left:
            monkeypatch.setattr(Source, "_taken", lambda self: 1 / 0)
            while left.page().stage is Stage.READY:
                await asyncio.sleep(0.02)
            assert left.source.bytes == 0

    asyncio.run(scenario())


def test_memory_that_is_short_is_an_error_and_no_signal():
    with pytest.raises(OSError):
        nameless("kv-much", 1 << 60)


def test_a_shard_says_where_its_blocks_are():
    index = entries(PREFIX)
    header = Header(1, 2, MODEL, b"l" * 16, b"g" * 16, 64, SIZE, 3, data_offset(3, SIZE))
    descriptor = nameless("kv-test", header.size)
    core = Plan(MODEL, SIZE, CHOSEN).pack()
    os.pwrite(descriptor, header.pack(), 0)
    os.pwrite(descriptor, core[56:][: header.taken_at - INDEX_AT], INDEX_AT)
    with mapped(path_of(os.getpid(), descriptor)) as memory:
        assert check(memory, 1, 2, MODEL) == header
        assert read_index(memory, header).match(PREFIX).slots == (0, 1, 2)
        assert len(read_index(memory, header)) == len(index)
        give_up(descriptor)
        with pytest.raises(Unavailable):
            check(memory, 1, 2, MODEL)
    os.ftruncate(descriptor, header.size - 1)
    os.pwrite(descriptor, header.pack(), 0)
    with mapped(path_of(os.getpid(), descriptor)) as memory, pytest.raises(Unavailable, match="without all"):
        check(memory, 1, 2, MODEL)
    os.close(descriptor)
