"""Timed trainers in the real stream: the time they take, and sums that show whether each micro-step counted once."""

import asyncio
import math

import pytest
import torch
from safetensors.torch import save_file

from gyre import models
from gyre.config import build, dump
from gyre.config_train import TimedTrainConfig
from gyre.training.packing import Row, lay_out
from gyre.training.timed import TimedCore, seconds
from tests.training.cells import Cells, make_config, make_sample

SIZE = 1024  # weights of gyre:timed


def timed_config(**timed):
    data = make_config().model_dump()
    data["model"]["path"] = "gyre:timed"
    data["engine"]["kind"] = "timed"
    data["train"] |= {"kind": "timed", "timed": timed, "micro_tokens": 32, "lr": 1e-2}
    return build(data)


def assert_every_micro_step_counted_once(answer):
    """Gradients were reduced over the prefix group, losses travelled with the ledgers; both are sums of the ids."""
    metrics = answer["metrics"]
    count = sum(answer["micro_steps"].values())
    assert metrics["loss"] == pytest.approx(count * (count + 1) / 2 / metrics["weight"])
    assert metrics["grad_norm"] == pytest.approx(math.sqrt(SIZE) * metrics["loss"], rel=1e-5)


async def updates(path, nest):
    async with Cells(path, models.resolve("gyre:timed"), timed_config(seconds_per_micro_step=0.1), nest=nest) as cells:
        started = await asyncio.gather(*(cells.spawn(rank) for rank in (0, 1, 2)))
        assert {one["parameters"] for one in started} == {SIZE}
        await cells.build_groups([0, 1, 2])
        for update, members in ((1, [0, 1, 2]), (2, [0, 1])):
            await cells.feeder.call("begin", update=update, groups=5)
            parts = [cells.train(update, rank, rank, members) for rank in members]
            for rank in members[1:]:
                await cells.seen(type="joined", update=update, position=rank)
            await cells.feed(*range(10 * update, 10 * update + 5))
            core, *satellites = await asyncio.gather(*parts)
            assert [one["how"] for one in (core, *satellites)] == ["done"] * len(members)
            assert core["members"] == len(members) and all(core["micro_steps"].values())
            assert_every_micro_step_counted_once(core)
            computed = core["metrics"]["seconds_compute"]
            assert computed == pytest.approx(0.1 * core["micro_steps"]["0"], rel=0.5)
        before, after = cells.weights_of(1), cells.weights_of(2)
        assert not torch.equal(before["weights.weight"], after["weights.weight"])
        committed = await cells.trainers[0].call("commit", version=2, update=2, cursor={"at": 2})
        for rank in (0, 1):
            await cells.trainers[rank].call("park")
        held = [await cells.trainers[rank].call("memory") for rank in (0, 1)]
        names = ("weights", "gradients", "accumulators", "optimizer")
        assert [[one[name] for name in names] for one in held] == [[4 * SIZE, 0, 0, 8 * SIZE], [0, 0, 0, 0]]
        await cells.trainers[0].stop()
        again = await cells.spawn(0)
        assert (again["version"], again["checksum"]) == (2, committed["checksum"])


def test_updates_of_timed_cells(tmp_path, nest):
    asyncio.run(updates(tmp_path / "cells", nest))


async def suspended(path, nest):
    """An update without a suspension, and two with one: by the core alone, and with a satellite before it."""
    async with Cells(path, models.resolve("gyre:timed"), timed_config(seconds_per_micro_step=0.1), nest=nest) as cells:
        await asyncio.gather(*(cells.spawn(rank) for rank in (0, 1)))
        await cells.build_groups([0, 1])
        await cells.feeder.call("begin", update=1, groups=5)
        core = cells.train(1, 0, 0, [0, 1])
        await cells.feed(*range(5))
        assert_measured(await core)
        for update, members in ((2, [0]), (3, [0, 1])):
            await cells.feeder.call("begin", update=update, groups=5)
            parts = [cells.train(update, rank, rank, [0, 1]) for rank in members]
            for rank in members[1:]:
                await cells.seen(type="joined", update=update, position=rank)
            await cells.feed(*range(10 * update, 10 * update + 4))
            await all_taken(cells, update, 4)
            await cells.feeder.call("suspend", update=update)
            assert [one["how"] for one in await asyncio.gather(*parts)] == ["suspended"] * len(members)
            await asyncio.sleep(1)  # no time of the update
            await cells.feeder.call("resume", update=update)
            core = cells.train(update, 0, 0, [0])
            await cells.feed(10 * update + 4)
            answer = await core
            assert_every_micro_step_counted_once(answer)
            assert all(answer["micro_steps"][str(rank)] for rank in members)
            assert_measured(answer)


def assert_measured(answer):
    """Every micro-step took its time, in the core and in all cells; the time between two parts belongs to none."""
    metrics = answer["metrics"]
    own, count = answer["micro_steps"]["0"], sum(answer["micro_steps"].values())
    for measured, steps in ((metrics["seconds_compute"], own), (metrics["cell_seconds"], count)):
        assert 0.1 * steps <= measured < 0.15 * steps
    assert answer["seconds"] == pytest.approx(sum(v for k, v in metrics.items() if k.startswith("seconds_")), abs=0.5)


async def all_taken(cells, update, groups):
    """Wait until the micro-steps of so many groups are finished."""
    async with asyncio.timeout(30):
        while not any(
            (e["type"], e.get("update"), e.get("taken")) == ("stream", update, groups)
            and e["finished"] == e["published"]
            for e in cells.events
        ):
            await asyncio.sleep(0.02)


def test_an_update_that_was_suspended_is_measured_whole(tmp_path, nest):
    asyncio.run(suspended(tmp_path / "cells", nest))


def test_the_weights_of_any_model_are_moved(tmp_path):
    """Tensors of many shapes, which share buckets in the sums."""
    weights = {"a": torch.zeros(3, 5), "b": torch.zeros(7), "c": torch.zeros(1, 1), "d": torch.zeros(5, 3)}
    save_file(weights, tmp_path / "model.safetensors")
    core = TimedCore(tmp_path, timed_config())
    core.accumulators.begin()
    for id in (1, 2):
        core.compute(lay_out(id, [Row(make_sample(1, 0), 1.0)]))
    core.step(0.5, 1e-2)
    moved = dict(core.named())
    assert {name: tensor.shape for name, tensor in moved.items()} == {n: t.shape for n, t in weights.items()}
    assert all(torch.allclose(tensor, torch.tensor(-1.5e-2)) for tensor in moved.values())


def test_what_a_micro_step_takes():
    samples = [make_sample(n, 0) for n in (1, 2, 3)]
    step = lay_out(1, [Row(sample, 1.0) for sample in samples])
    each = TimedTrainConfig(seconds_per_micro_step=1.0, seconds_per_row=0.5, seconds_per_token=0.25)
    assert seconds(step, each) == 1.0 + 3 * 0.5 + sum(map(len, samples)) * 0.25


def test_the_kind_is_saved_with_the_run():
    assert "kind: timed" in dump(timed_config())
