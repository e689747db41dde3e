"""Stages, shards, ZeRO stages, offload, joins, deaths and suspensions together: always the update of one process.

Each combination takes a core and a satellite, with all of their workers, through five updates, and compares the
gradient norm and the weights of each with a reference in plain torch that sees one sample at a time. A few of them run
in `make test`, all in `make test-full`.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gyre.errors import ChildFailed
from tests.training.cells import Cells, Compared, Reference, frozen, groups_of, idle, make_config, make_model, working


@dataclass(frozen=True)
class Combination:
    """What is configured, and what happens in each of the updates."""

    name: str
    happenings: str
    train: dict
    tied: bool = True
    short: bool = False


JOIN = "join join alone join join"
SUSPENSION = "join suspension alone suspension join"
DEATH = "join death join alone join"
BATCH = "join join alone join resumption"
OFFLOAD = {"offload_optimizer": True}
FOUR = {"updates_per_batch": 4}
COMBINATIONS = [
    Combination("stages 2, join", JOIN, {"stages": 2}),
    Combination("stages 2, untied, suspension", SUSPENSION, {"stages": 2}, tied=False, short=True),
    Combination("stages 2, offload, death", DEATH, {"stages": 2} | OFFLOAD),
    Combination("shards 2, join", JOIN, {"shards": 2}),
    Combination("shards 2, zero 3, suspension", SUSPENSION, {"shards": 2, "zero_stage": 3}, short=True),
    Combination("shards 2, offload, death", DEATH, {"shards": 2} | OFFLOAD, short=True),
    Combination("stages 2, shards 2, join", JOIN, {"stages": 2, "shards": 2}, short=True),
    Combination("stages 2, shards 2, suspension", SUSPENSION, {"stages": 2, "shards": 2}),
    Combination("stages 2, shards 2, offload, death", DEATH, {"stages": 2, "shards": 2} | OFFLOAD),
    Combination("one worker, offload, join", JOIN, OFFLOAD),
    Combination("one worker, zero 3, suspension", SUSPENSION, {"zero_stage": 3}),
    Combination("stages 2, zero 3, join", JOIN, {"stages": 2, "zero_stage": 3}),
    Combination("stages 2, shards 2, zero 3, suspension", SUSPENSION, {"stages": 2, "shards": 2, "zero_stage": 3}),
    Combination("stages 2, shards 2, several updates a batch, resumption", BATCH, {"stages": 2, "shards": 2} | FOUR),
    Combination("shards 2, zero 3, offload, resumption", BATCH, {"shards": 2, "zero_stage": 3} | OFFLOAD | FOUR),
]


async def feed_one_by_one(cells: Cells, groups: list[int]) -> None:
    """So that whoever waits gets something."""
    for group in groups:
        await cells.feed(group)


async def alone(cells: Cells, update: int) -> dict:
    await cells.feeder.call("begin", update=update, groups=6)
    core = cells.train(update, 0, 0, [0, 1])
    await cells.feed(*groups_of(update))
    return await core


async def join(cells: Cells, update: int) -> dict:
    """The satellite joins while the core computes."""
    await cells.feeder.call("begin", update=update, groups=6)
    await cells.feed(*groups_of(update)[:2])
    core, satellite = cells.train(update, 0, 0, [0, 1]), cells.train(update, 1, 1, [0, 1])
    await cells.seen(type="joined", update=update)
    await feed_one_by_one(cells, groups_of(update)[2:])
    assert (await satellite)["how"] == "done"
    return await core


async def suspension(cells: Cells, update: int) -> dict:
    """Both give the device memory back in the middle; the core goes on with the sum of both."""
    await cells.feeder.call("begin", update=update, groups=6)
    parts = [cells.train(update, rank, rank, [0, 1]) for rank in (0, 1)]
    await cells.seen(type="joined", update=update)
    await feed_one_by_one(cells, groups_of(update)[:4])
    await idle(cells, update, 4)
    await cells.feeder.call("suspend", update=update)
    assert [part["how"] for part in await asyncio.gather(*parts)] == ["suspended"] * 2
    for rank in (0, 1):
        await cells.trainers[rank].call("park")
    await cells.feeder.call("resume", update=update)
    core = cells.train(update, 0, 0, [0, 1])
    await cells.feed(*groups_of(update)[4:])
    return await core


async def death(cells: Cells, update: int) -> dict:
    """The satellite dies with what it has claimed and computed, and is back for the next update."""
    await cells.feeder.call("begin", update=update, groups=6)
    core, satellite = cells.train(update, 0, 0, [0, 1]), cells.train(update, 1, 1, [0, 1])
    await cells.seen(type="joined", update=update)
    async with frozen(cells, 0):
        await cells.feed(*groups_of(update)[:4])
        await cells.seen(type="progress", update=update, **{"from": 1})
        os.kill(cells.trainers[1].pid, signal.SIGKILL)
        with pytest.raises(ChildFailed):
            await satellite
        gone = await cells.feeder.call("bar", rank=1, incarnation=cells.incarnations[1])
        assert gone["returned"][str(update)]
    await cells.feed(*groups_of(update)[4:])
    answer = await core
    assert working(answer) == {"0"}
    await cells.spawn(1)
    cells.generation += 1
    await cells.build_groups([0, 1])
    return answer


async def resumption(cells: Cells, update: int) -> dict:
    """The core ends after a commit, and is started again from it."""
    version = (update - 1) // cells.config.train.updates_per_batch
    committed = await cells.trainers[0].call("commit", 60, version=version, update=update - 1, cursor=None)
    await cells.trainers[0].stop()
    again = await cells.spawn(0)
    assert (again["version"], again["snapshot"]) == (version, update - 1)
    assert again["checksum"] == committed["checksum"]
    cells.generation += 1
    await cells.build_groups([0, 1])
    return await join(cells, update)


HAPPENINGS = {"resumption": resumption, "alone": alone, "join": join, "suspension": suspension, "death": death}


async def five_updates(cells: Cells, check: Callable[..., object], happenings: list[str]) -> None:
    """Start what is needed, and have `check` see each update: number, groups, answer, ranks that computed."""
    ranks = [0] if set(happenings) == {"alone"} else [0, 1]
    await asyncio.gather(*(cells.spawn(rank) for rank in ranks))
    if len(ranks) > 1:
        await cells.build_groups(ranks)
    helped = 0
    for update, what in enumerate(happenings, 1):
        answer = await HAPPENINGS[what](cells, update)
        check(update, groups_of(update), answer, working(answer))
        helped += answer["micro_steps"].get("1", 0)
    assert helped or len(ranks) == 1, "the satellite computed nothing in five updates"


def selection() -> list:
    return [pytest.param(each, id=each.name, marks=[] if each.short else [pytest.mark.full]) for each in COMBINATIONS]


def play(scenario, run: Path) -> None:
    """Run a scenario; where it fails, show what its processes said."""
    try:
        asyncio.run(scenario())
    except BaseException:
        for log in sorted(run.rglob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-4000:]}")
        raise


@pytest.mark.parametrize("combination", selection())
def test_the_update_is_that_of_one_process(tmp_path, nest, combination):
    model = make_model(tmp_path / "model", tied=combination.tied)
    config = make_config(micro_tokens=64, **combination.train)

    async def scenario() -> None:
        async with Cells(tmp_path / "run", model, config, nest=nest) as cells:
            compared = Compared(cells, Reference(model, config))
            await five_updates(cells, compared.check, combination.happenings.split())
            print(f"{combination.name}: weights {max(compared.distances.values()):.1e}", end=", ")
            print(f"gradient norm {max(compared.norms.values()):.1e}")

    play(scenario, tmp_path / "run")


@pytest.mark.full
def test_in_bf16_it_is_as_near_to_one_process_as_that_is_to_itself(tmp_path, nest):
    """One worker alone is plain DeepSpeed (test_bf16), but no two ways of packing samples round alike in bf16."""
    model = make_model(tmp_path / "model")
    ways = {
        "one": (64, "alone alone alone alone alone", {}),
        "one, in smaller micro-steps": (40, "alone alone alone alone alone", {}),
        "one, in larger ones": (96, "alone alone alone alone alone", {}),
        "stages 2, shards 2": (64, JOIN, {"stages": 2, "shards": 2}),
    }
    start, ends, norms = load_file(model / "model.safetensors"), {}, {}

    async def scenario() -> None:
        for number, (way, (budget, happenings, train)) in enumerate(ways.items()):
            config = make_config(dtype="bfloat16", micro_tokens=budget, **train)
            async with Cells(tmp_path / f"run{number}", model, config, nest=nest) as cells:
                norms[way] = []
                await five_updates(
                    cells, lambda *done, way=way: norms[way].append(done[2]["metrics"]["grad_norm"]), happenings.split()
                )
                ends[way] = cells.weights_of(5)

    def apart(way: str) -> tuple[float, float]:
        moved = sum(float((ends["one"][n].float() - start[n].float()).square().sum()) for n in start)
        between = sum(float((ends["one"][n].float() - ends[way][n].float()).square().sum()) for n in start)
        return (between / moved) ** 0.5, max(abs(a / b - 1) for a, b in zip(norms[way], norms["one"], strict=True))

    play(scenario, tmp_path)
    combined = apart("stages 2, shards 2")
    itself = [max(one) for one in zip(apart("one, in smaller micro-steps"), apart("one, in larger ones"), strict=True)]
    print(f"bf16: weights {combined[0]:.1e} of the way, gradient norm {combined[1]:.1e}", end="; ")
    print(f"one process, packed otherwise: {itself[0]:.1e}, {itself[1]:.1e}")
    assert combined[0] <= 2 * itself[0] and combined[1] <= 2 * itself[1]
