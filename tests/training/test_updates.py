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
from tests.training.cells import Cells, Reference, make_config, make_model

EXACT = 1e-5


class Compared:
    """Checks an update's outcome against the reference."""

    def __init__(self, cells: Cells, reference: Reference) -> None:
        self.cells = cells
        self.reference = reference
        self.distances: dict[int, float] = {}

    def check(self, update: int, groups: list[int], answer: dict, micro_steps_of: set[str]) -> None:
        assert answer["how"] == "done", answer
        assert {rank for rank, count in answer["micro_steps"].items() if count} == micro_steps_of
        norm = self.reference.update(groups)
        assert answer["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert answer["metrics"]["groups"] == len(groups)
        distance = self.reference.distance(self.cells.weights_of(update))
        self.distances[update] = distance
        assert distance < EXACT, self.distances
        taken = sorted(e["group"] for e in self.cells.events if e["type"] == "taken" and e["update"] == update)
        assert taken == groups


async def three_cells_then_two_then_one(cells: Cells, compared: Compared) -> None:
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
        working = {rank for rank, count in core["micro_steps"].items() if count}
        compared.check(update, groups, core, working)
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
    os.kill(cells.trainers[0].pid, signal.SIGSTOP)
    await asyncio.sleep(1.2)  # the claim it had sent comes back empty
    await cells.feed(50, 51, 52)
    await idle(cells, 5, 3)
    os.kill(cells.trainers[0].pid, signal.SIGCONT)
    compared.check(5, [50, 51, 52], await core, {"1"})
    assert (await satellite)["how"] == "done"


async def idle(cells: Cells, update: int, taken: int) -> dict:
    """Wait until these groups are taken and every micro-step is finished; returns the feeder's event."""
    async with asyncio.timeout(30):
        while True:
            known = [e for e in cells.events if e["type"] == "stream" and e["update"] == update]
            if known and known[-1]["taken"] == taken and known[-1]["finished"] == known[-1]["published"]:
                return known[-1]
            await asyncio.sleep(0.02)


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
    assert {k: v for k, v in satellite.items() if k not in ("rss", "pss")} == {
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
    working = {rank for rank, count in answer["micro_steps"].items() if count}
    compared.check(6, groups, answer, working)
    await cells.trainers[0].call("park")
    memory = await cells.trainers[0].call("memory")
    assert (memory["gradients"], memory["accumulators"], memory["weights"]) == (0, 0, size)
    assert memory["optimizer"] >= 3 * size  # master weights and two moments


async def killed_in_the_middle(cells: Cells, compared: Compared) -> None:
    """Rank 1, between the others, dies with a claimed micro-step; the survivors are no prefix."""
    await cells.trainers[1].stop()
    await cells.spawn(1, GYRE_FAULT="update:7:claimed")
    cells.generation += 1
    members, groups = [0, 1, 2], [70, 71, 72, 73, 74, 75]
    for rank in members:
        await cells.trainers[rank].call("groups", generation=cells.generation, ranks=members)
    await cells.feeder.call("begin", update=7, groups=6)
    parts = [cells.train(7, rank, rank, members) for rank in members]
    await cells.seen(type="joined", update=7, position=2)
    await cells.feed(*groups)
    with pytest.raises(ChildFailed):
        await parts[1]
    died = time.monotonic()
    returned = (await cells.feeder.call("bar", rank=1, incarnation=cells.incarnations[1]))["returned"]["7"]
    assert len(returned) == 1
    answer, survivor = await parts[0], await parts[2]
    assert time.monotonic() - died < 10
    assert survivor["how"] == "done" and answer["members"] == 3
    working = {rank for rank, count in answer["micro_steps"].items() if count}
    assert "1" not in working
    compared.check(7, groups, answer, working)


async def killed_in_the_reduce(cells: Cells, compared: Compared) -> None:
    """Rank 1 finishes its micro-steps and dies as the reduce begins: all that it did is done again."""
    await cells.trainers[1].stop()
    await cells.spawn(1, GYRE_FAULT="update:8:reducing@1")
    cells.generation += 1
    members, groups = [0, 1, 2], [80, 81, 82, 83, 84, 85]
    await cells.feeder.call("begin", update=8, groups=6)
    parts = [cells.train(8, rank, rank, members) for rank in members]
    await cells.seen(type="joined", update=8, position=2)
    await cells.feed(*groups)
    with pytest.raises(ChildFailed):
        await parts[1]
    died = time.monotonic()
    await cells.feeder.call("bar", rank=1, incarnation=cells.incarnations[1])
    answer, survivor = await parts[0], await parts[2]
    assert time.monotonic() - died < 10
    assert survivor["how"] == "done"
    assert "1" not in {rank for rank, count in answer["micro_steps"].items() if count}
    compared.check(8, groups, answer, {rank for rank, count in answer["micro_steps"].items() if count})


async def another_host(cells: Cells, compared: Compared) -> None:
    """A satellite that does not share the core's memory pulls over HTTP."""
    await cells.trainers[1].stop()
    await cells.spawn(1, address="elsewhere")
    groups = [90, 91]
    await cells.feeder.call("begin", update=9, groups=2)
    parts = [cells.train(9, rank, rank, [0, 1]) for rank in (0, 1)]
    await cells.seen(type="joined", update=9, position=1)
    await cells.feed(*groups)
    answer, satellite = await asyncio.gather(*parts)
    assert satellite["how"] == "done"
    compared.check(9, groups, answer, {rank for rank, count in answer["micro_steps"].items() if count})


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_every_membership_gives_the_update_of_one_process(tmp_path, zero_stage):
    model = make_model(tmp_path / "model")
    config = make_config(zero_stage=zero_stage)

    async def scenario() -> None:
        async with Cells(tmp_path / "run", model, config) as cells:
            starts = await asyncio.gather(*(cells.spawn(rank) for rank in range(3)))
            compared = Compared(cells, Reference(model, config))
            assert starts[0]["snapshot"] == 0 and compared.reference.distance(cells.weights_of(0)) == 0
            await three_cells_then_two_then_one(cells, compared)
            if zero_stage == 2:
                await members_without_work(cells, compared)
                await suspended_and_resumed(cells, compared)
                await killed_in_the_middle(cells, compared)
                await killed_in_the_reduce(cells, compared)
                await another_host(cells, compared)
            print(compared.distances)

    try:
        asyncio.run(scenario())
    except BaseException:
        for log in sorted((tmp_path / "run").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-4000:]}")
        raise
