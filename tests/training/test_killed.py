"""kill -9 of one worker of a satellite of two: the cell fails as a whole, the update does not, and the cell comes back.

The core is told of the death by nobody in these tests but the feeder, which the test tells, as a supervisor would.
"""

import asyncio
import os
import signal
import time

import pytest

from gyre.errors import ChildFailed
from tests.training.cells import Cells, Compared, Reference, frozen, groups_of, make_config, make_model, working

VICTIM, SURVIVOR = 1, 2
FAULTS = {"claimed": "update:1:claimed@1.1", "reducing": "update:1:reducing@1.1", "joined": ""}


def follower_of(pid: int) -> int:
    """The process id of the only follower of a trainer."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        (child,) = file.read().split()
    return int(child)


async def update_with_a_death(cells: Cells, where: str) -> tuple[dict, float]:
    """Returns the core's answer and the seconds from the death to the update's end."""
    members = [0, VICTIM, SURVIVOR]
    await cells.build_groups(members)
    await cells.feeder.call("begin", update=1, groups=6)
    core, victim, survivor = (cells.train(1, rank, position, members) for position, rank in enumerate(members))
    await cells.seen(type="joined", update=1, position=2)
    if where == "joined":
        os.kill(follower_of(cells.trainers[VICTIM].pid), signal.SIGKILL)
    else:
        async with frozen(cells, 0, SURVIVOR):  # so that the victim gets something
            await cells.feed(*groups_of(1)[:2])
            await cells.seen(type="stream", update=1, claimed=bool)
        await cells.feed(*groups_of(1)[2:])
    with pytest.raises(ChildFailed):
        await victim
    died = time.monotonic()
    returned = await cells.feeder.call("bar", rank=VICTIM, incarnation=cells.incarnations[VICTIM])
    assert bool(returned["returned"]["1"]) == (where != "joined")
    await cells.feed(*(groups_of(1) if where == "joined" else []))
    answer = await core
    seconds = time.monotonic() - died
    assert (await survivor)["how"] == "done"
    return answer, seconds


async def next_update(cells: Cells) -> dict:
    """The cell is back, under a new incarnation."""
    await cells.spawn(VICTIM)
    cells.generation += 1
    await cells.build_groups([0, VICTIM])
    await cells.feeder.call("begin", update=2, groups=6)
    core, back = (cells.train(2, rank, rank, [0, VICTIM]) for rank in (0, VICTIM))
    await cells.seen(type="joined", update=2)
    async with frozen(cells, 0):
        await cells.feed(*groups_of(2)[:2])
        await cells.seen(type="stream", update=2, claimed=bool)
    await cells.feed(*groups_of(2)[2:])
    assert (await back)["how"] == "done"
    return await core


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("claimed", marks=pytest.mark.full),
        "reducing",
        pytest.param("joined", marks=pytest.mark.full),
    ],
)
def test_the_update_goes_on_without_a_cell_that_lost_a_worker(tmp_path, nest, where):
    model = make_model(tmp_path / "model")
    config = make_config(micro_tokens=64, shards=2)

    async def scenario() -> None:
        async with Cells(tmp_path / "run", model, config, nest=nest) as cells:
            starting = (cells.spawn(0), cells.spawn(VICTIM, GYRE_FAULT=FAULTS[where]), cells.spawn(SURVIVOR))
            await asyncio.gather(*starting)
            compared = Compared(cells, Reference(model, config))
            answer, seconds = await update_with_a_death(cells, where)
            assert str(VICTIM) not in working(answer)
            compared.check(1, groups_of(1), answer, working(answer))
            print(f"killed when it had {where}: the update ended {seconds:.2f} s later", end=", ")
            print(f"weights {compared.distances[1]:.1e}, gradient norm {compared.norms[1]:.1e}")
            assert seconds < 60  # in a crowd; 10 are what it may take
            answer = await next_update(cells)
            assert answer["micro_steps"][str(VICTIM)]
            compared.check(2, groups_of(2), answer, working(answer))

    try:
        asyncio.run(scenario())
    except BaseException:
        for log in sorted((tmp_path / "run").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-4000:]}")
        raise
