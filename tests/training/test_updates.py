"""Updates with changing members equal the update of one process, with real store, feeder, weight server and trainers.

The trainers are started once; one scenario takes them through every membership, and each step is compared with a
reference in plain torch that sees one sample at a time.
"""

import asyncio
import os
import signal
import time

import pytest

from gyre.errors import ChildFailed
from tests.training.cells import (
    PATIENCE,
    Cells,
    Compared,
    Reference,
    frozen,
    groups_of,
    idle,
    make_config,
    make_model,
    working,
)

STAGES = ("compute", "wait", "reduce", "step", "snapshot")
KILLED_AT_CLAIM, KILLED_AT_REDUCE, ELSEWHERE, FREEZING = 3, 4, 5, 6


async def three_cells_then_two_then_one(cells: Cells, compared: Compared) -> None:
    await cells.build_groups([0, 1, 2])
    for update, members in ((1, [0, 1, 2]), (2, [0, 1]), (3, [0])):
        groups = [10 * update + i for i in range(6)]
        await cells.feeder.call("begin", update=update, groups=6)
        await cells.feed(*groups[:2])
        parts = [cells.train(update, rank, rank, members) for rank in members]
        for rank in members[1:]:  # they join while the core computes
            await cells.seen(type="joined", update=update, position=rank)
        await cells.feed(*groups[2:])
        core, *satellites = await asyncio.gather(*parts)
        assert [part["how"] for part in satellites] == ["done"] * len(satellites)
        assert core["members"] == len(members)
        assert core["micro_steps"] == {"0": core["micro_steps"]["0"]} | {
            str(rank): part["micro_steps"] for rank, part in zip(members[1:], satellites, strict=True)
        }
        compared.check(update, groups, core, working(core))
    late = await cells.train(3, 1, 1, [0, 1])
    assert late["how"] == "missed"


async def members_without_work(cells: Cells, compared: Compared) -> None:
    """A satellite that finds nothing left, and a core that is too slow to get anything."""
    await cells.feeder.call("begin", update=4, groups=3)
    await cells.feed(40, 41)
    core = cells.train(4, 0, 0, [0, 1])
    await idle(cells, 4, 2)
    satellite = cells.train(4, 1, 1, [0, 1])
    await cells.seen(type="joined", update=4)
    assert (await cells.feeder.call("close_short", update=4))["groups"] == 2
    compared.check(4, [40, 41], await core, {"0"})
    assert await satellite | {"seconds": 0} == {"how": "done", "micro_steps": 0, "detail": "", "seconds": 0}

    await cells.feeder.call("begin", update=5, groups=3)
    core, satellite = cells.train(5, 0, 0, [0, 1]), cells.train(5, 1, 1, [0, 1])
    await cells.seen(type="joined", update=5)
    async with frozen(cells, 0):
        await cells.feed(50, 51, 52)
        await idle(cells, 5, 3)
    core, satellite = await core, await satellite
    compared.check(5, [50, 51, 52], core, {"1"})
    assert satellite["how"] == "done"
    assert core["metrics"]["cell_seconds"] == satellite["seconds"]["compute"] > 0


async def suspended_and_resumed(cells: Cells, compared: Compared) -> None:
    members = [0, 1, 2]
    groups = [60, 61, 62, 63, 64]
    await cells.feeder.call("begin", update=6, groups=5)
    parts = [cells.train(6, rank, rank, members) for rank in members]
    await cells.seen(type="joined", update=6, position=2)
    await cells.feed(*groups[:3])
    await idle(cells, 6, 3)
    await cells.feeder.call("suspend", update=6)
    assert [part["how"] for part in await asyncio.gather(*parts)] == ["suspended"] * 3
    for rank in members:
        await cells.trainers[rank].call("park")
    core, satellite = [await cells.trainers[rank].call("memory") for rank in (0, 1)]
    size = sum(t.numel() for t in cells.weights_of(5).values()) * 4
    assert satellite == {
        "weights": 0,
        "gradients": 0,
        "accumulators": 0,
        "optimizer": 0,
    }
    assert (core["gradients"], core["accumulators"]) == (0, size)  # the partial sum is all that it keeps
    await cells.feeder.call("resume", update=6)
    parts = [cells.train(6, rank, rank, [0, 1]) for rank in (0, 1)]
    await cells.seen(type="opened", update=6)
    await cells.feed(*groups[3:])
    answer, satellite = await asyncio.gather(*parts)
    assert satellite["how"] in ("done", "missed")
    compared.check(6, groups, answer, working(answer))
    assert_times_of_all_parts(cells, 6, answer)
    await cells.trainers[0].call("park")
    memory = await cells.trainers[0].call("memory")
    assert (memory["gradients"], memory["accumulators"], memory["weights"]) == (0, 0, size)
    assert memory["optimizer"] >= 3 * size  # master weights and two moments


def assert_times_of_all_parts(cells: Cells, update: int, answer: dict) -> None:
    """What the core says of an update's computing is the sum of what all parts of all members said meanwhile."""
    parts = {rank: cells.parts_of(update, rank) for rank in range(3)}
    counts = {str(rank): sum(part["micro_steps"] for part in parts[rank]) for rank in parts}
    assert {rank: count for rank, count in counts.items() if count} == {
        rank: count for rank, count in answer["micro_steps"].items() if count
    }
    seconds = {rank: sum(part["seconds"] for part in parts[rank]) for rank in parts}
    metrics = answer["metrics"]
    assert metrics.get("seconds_compute", 0.0) == pytest.approx(seconds[0])
    assert metrics["cell_seconds"] == pytest.approx(sum(seconds.values()))
    assert sum(part["tokens"] for each in parts.values() for part in each) == metrics["tokens"]
    assert answer["seconds"] > sum(metrics.get(f"seconds_{stage}", 0.0) for stage in STAGES) > seconds[0]


async def killed_in_the_middle(cells: Cells, compared: Compared) -> None:
    """A member between two others dies with a claimed micro-step; the survivors are no prefix."""
    answer = await one_dies(cells, 7, [0, KILLED_AT_CLAIM, 2], "the claim")
    assert answer["members"] == 3
    compared.check(7, groups_of(7), answer, working(answer))


async def killed_in_the_reduce(cells: Cells, compared: Compared) -> None:
    """A member finishes its micro-steps and dies as the reduce begins: all that it did is done again."""
    answer = await one_dies(cells, 8, [0, KILLED_AT_REDUCE, 2], "the reduce")
    compared.check(8, groups_of(8), answer, working(answer))


async def one_dies(cells: Cells, update: int, members: list[int], where: str) -> dict:
    """An update in which the member at position 1 kills itself; returns the core's answer."""
    cells.generation += 1
    victim = members[1]
    await cells.build_groups(members)
    await cells.feeder.call("begin", update=update, groups=6)
    parts = [cells.train(update, rank, position, members) for position, rank in enumerate(members)]
    await cells.seen(type="joined", update=update, position=2)
    async with frozen(cells, members[0], members[2]):  # so that the victim gets something
        await cells.feed(*groups_of(update)[:2])
        await cells.seen(type="stream", update=update, claimed=1)
    await cells.feed(*groups_of(update)[2:])
    with pytest.raises(ChildFailed):
        await parts[1]
    died = time.monotonic()
    while not (cells.store.get(f"stream/{update}/state") or "").startswith("closed"):
        assert time.monotonic() - died < 10, "the window never closed"
        await asyncio.sleep(0.02)  # barred before that, it would not be counted as a member
    returned = await cells.feeder.call("bar", rank=victim, incarnation=cells.incarnations[victim])
    assert returned["returned"][str(update)], f"it held nothing when it died at {where}"
    answer, survivor = await parts[0], await parts[2]
    assert time.monotonic() - died < 10
    assert survivor["how"] == "done"
    assert str(victim) not in working(answer)
    return answer


async def another_host(cells: Cells, compared: Compared) -> None:
    """A satellite that does not share the core's memory pulls over HTTP."""
    members = [0, ELSEWHERE]
    await cells.feeder.call("begin", update=9, groups=6)
    parts = [cells.train(9, rank, position, members) for position, rank in enumerate(members)]
    await cells.seen(type="joined", update=9, position=1)
    await cells.feed(*groups_of(9))
    answer, satellite = await asyncio.gather(*parts)
    assert satellite["how"] == "done"
    compared.check(9, groups_of(9), answer, working(answer))


async def stopped_and_barred(cells: Cells, compared: Compared) -> None:
    """A member freezes with a claimed micro-step and nobody says so: the core notices and bars it."""
    members = [0, 1, FREEZING]
    cells.generation += 1
    await cells.feeder.call("begin", update=10, groups=6)
    parts = [cells.train(10, rank, position, members) for position, rank in enumerate(members)]
    await cells.seen(type="joined", update=10, position=2)
    async with frozen(cells, 0, 1):
        await cells.feed(*groups_of(10)[:2])
        while not (cells.run_dir.path / "mark").exists():
            await asyncio.sleep(0.02)
    await cells.feed(*groups_of(10)[2:])
    os.kill(cells.trainers[FREEZING].pid, signal.SIGSTOP)
    stopped = time.monotonic()
    answer, survivor = await parts[0], await parts[1]
    assert PATIENCE - 1 <= time.monotonic() - stopped < 2 * PATIENCE + 10
    barred = await cells.seen(type="barred", update=10)
    assert (barred["rank"], barred["incarnation"]) == (FREEZING, cells.incarnations[FREEZING])
    assert survivor["how"] == "done"
    compared.check(10, groups_of(10), answer, working(answer))
    os.kill(cells.trainers[FREEZING].pid, signal.SIGKILL)
    with pytest.raises(ChildFailed):
        await parts[2]


async def start(cells: Cells) -> None:
    """Start the trainers side by side: the core, two satellites, and those with a fate of their own."""
    mark = str(cells.run_dir.path / "mark")
    core, *_ = await asyncio.gather(
        *(cells.spawn(rank) for rank in range(3)),
        cells.spawn(KILLED_AT_CLAIM, GYRE_FAULT="update:7:claimed"),
        cells.spawn(KILLED_AT_REDUCE, GYRE_FAULT=f"update:8:reducing@{KILLED_AT_REDUCE}"),
        cells.spawn(ELSEWHERE, address="localhost"),  # another name, so another host
        cells.spawn(FREEZING, GYRE_FAULT="update:10:claimed", GYRE_FAULT_MARK=mark),
    )
    assert core["snapshot"] == 0


def test_every_membership_gives_the_update_of_one_process(tmp_path, nest):
    model = make_model(tmp_path / "model")
    config = make_config()

    async def scenario() -> None:
        async with Cells(tmp_path / "run", model, config, nest=nest) as cells:
            await start(cells)
            compared = Compared(cells, Reference(model, config))
            assert compared.reference.distance(cells.weights_of(0)) == 0
            await three_cells_then_two_then_one(cells, compared)
            await members_without_work(cells, compared)
            await suspended_and_resumed(cells, compared)
            await killed_in_the_middle(cells, compared)
            await killed_in_the_reduce(cells, compared)
            await another_host(cells, compared)
            await stopped_and_barred(cells, compared)
            print(compared.distances)

    try:
        asyncio.run(scenario())
    except BaseException:
        for log in sorted((tmp_path / "run").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-4000:]}")
        raise
