"""Two shards of a stage, as two processes: sums, steps, checkpoints and weights are those of one process."""

import asyncio
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gyre.training.batch import Batch
from gyre.training.objectives import Objective, objective_loss
from gyre.training.stages import load_stage
from tests.training.cells import make_config, make_model
from tests.training.shards_program import CLIP, LR, UPDATES, micro_steps

PROGRAM = Path(__file__).with_name("shards_program.py")
EXACT = 1e-5


class Shards:
    """Processes that do everything together."""

    def __init__(self, nest, directory: Path, count: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._children = []
        for shard in range(count):
            words = [sys.executable, str(PROGRAM)]
            spawned = nest.spawn("shard", words, directory / f"shard-{shard}.log", env={"OMP_NUM_THREADS": "1"})
            self._children.append(self._loop.run_until_complete(spawned))
        self.do("start", each=[{"shard": shard} for shard in range(count)], shards=count, store=f"{directory}/store")

    def do(self, operation: str, each=None, **arguments) -> list[dict]:
        """Have all do something; what they answer, by shard."""
        each = each or [{}] * len(self._children)
        calls = [c.call(operation, 120, **arguments, **own) for c, own in zip(self._children, each, strict=True)]

        async def all_of_them() -> list[dict]:
            return await asyncio.gather(*calls)

        return self._loop.run_until_complete(all_of_them())

    def close(self) -> None:
        async def stop() -> None:
            await asyncio.gather(*(child.stop() for child in self._children))

        self._loop.run_until_complete(stop())
        self._loop.close()


@pytest.fixture(scope="module")
def two(nest, tmp_path_factory):
    shards = Shards(nest, tmp_path_factory.mktemp("two"), 2)
    yield shards
    shards.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Of odd sizes, so that shards have padding."""
    return make_model(tmp_path_factory.mktemp("model") / "model", hidden_size=45, intermediate_size=93)


@pytest.fixture(scope="module")
def expected(model):
    """Weights and norms of five updates in plain torch, one process."""
    config = make_config().train
    stage = load_stage(model, torch.float32, torch.device("cpu"), True)
    optimizer = torch.optim.AdamW(stage.parameters(), LR, config.betas, weight_decay=config.weight_decay)
    norms = []
    for update in range(1, UPDATES + 1):
        optimizer.zero_grad()
        weight = 0.0
        for step in micro_steps(update):
            batch = Batch.of(step, "cpu")
            loss, statistics = objective_loss(Objective.of(config), *stage(batch), batch)
            loss.backward()
            weight += statistics.weight
        for parameter in stage.parameters():
            parameter.grad.div_(weight)
        norms.append(float(torch.nn.utils.clip_grad_norm_(stage.parameters(), CLIP)))
        optimizer.step()
    return {name: parameter.detach() for name, parameter in stage.weights()}, norms


def distance(found: dict, wanted: dict) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name].float() - wanted[name].float()).abs().max()) for name in wanted)


@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 20])
def test_sums_of_shards_are_exact_whatever_comes_when(two, bucket_bytes):
    for seed in range(10):
        for answer in two.do("accumulate", seed=seed, bucket_bytes=bucket_bytes):
            assert answer == {"wrong": 0, "squares": True, "aside": True}


CASES = [
    pytest.param({"zero_stage": 2}, id="zero 2"),
    pytest.param({"zero_stage": 3}, id="zero 3"),
    pytest.param({"zero_stage": 2, "offload_optimizer": True}, id="zero 2, offload"),
    pytest.param({"zero_stage": 3, "offload_optimizer": True}, id="zero 3, offload", marks=pytest.mark.full),
]


@pytest.mark.parametrize("train", CASES)
def test_updates_are_those_of_one_process_and_go_on_from_a_checkpoint(two, model, expected, tmp_path, train):
    two.do("build", model=str(model), dtype="float32", train=train)
    norms = two.do("train", first=1, last=3)[0]["norms"]
    two.do("save", directory=str(tmp_path), tag="v1")
    norms += two.do("train", first=4, last=UPDATES)[0]["norms"]
    two.do("weights", file=str(tmp_path / "whole"))
    whole = load_file(tmp_path / "whole")
    assert norms == pytest.approx(expected[1], rel=EXACT)
    assert distance(whole, expected[0]) < EXACT

    two.do("build", model=str(model), dtype="float32", train=train)
    two.do("restore", directory=str(tmp_path), tag="v1")
    assert two.do("train", first=4, last=UPDATES)[0]["norms"] == norms[3:]
    two.do("weights", file=str(tmp_path / "again"))
    again = load_file(tmp_path / "again")
    assert all(torch.equal(again[name], whole[name]) for name in whole)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_satellite_computes_the_core_s_sums(two, model, zero_stage):
    train = {"zero_stage": zero_stage}
    two.do("build", model=str(model), dtype="float32", train=train)
    answers = two.do("satellite", model=str(model), train=train)
    for answer in answers:
        assert not answer["wrong"]
        assert answer["difference"] <= 1e-6 * answer["size"]
        assert not any(answer["parked"].values())
    size = 4 * sum(t.numel() for t in load_file(model / "model.safetensors").values())
    weights = sum(answer["held"]["weights"] for answer in answers)
    assert size <= weights <= size * (1.1 if zero_stage == 3 else 2.1)
    assert size <= sum(answer["held"]["accumulators"] for answer in answers) <= 1.1 * size
