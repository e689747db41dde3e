"""Pipeline stages as real processes, with pauses: gradients are those of one process, and nobody waits for ever."""

import asyncio
import random
import sys
from collections import deque
from pathlib import Path

import pytest
import torch.distributed as dist

from gyre.training.pipeline import going_back
from tests.training.cells import make_model

PROGRAM = Path(__file__).with_name("pipeline_program.py")
EXACT = 1e-5


# -- scheduling ------------------------------------------------------------------------------------------------------
class Told:
    """One stage of a simulated pipeline: a list of what it does, a receive being the only thing that it waits for."""

    def __init__(self, stage: int, stages: int, words: list) -> None:
        self.steps = deque(self._steps(stage, stages, words))
        self.most = 0

    def _steps(self, stage: int, stages: int, words: list):
        flying: deque[int] = deque()
        for word in words:
            if word is not None:
                yield from [("take", stage - 1, word)] if stage else []
                flying.append(word)
                yield from [("send", stage + 1, word)] if stage < stages - 1 else []
            for _ in range(going_back(len(flying), stage, stages, draining=word is None)):
                oldest = flying.popleft()
                yield from [("take", stage + 1, oldest)] if stage < stages - 1 else []
                yield "back", stage, oldest
                yield from [("send", stage - 1, oldest)] if stage else []
            assert len(flying) <= stages - stage - 1
            assert word is not None or not flying


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_stages_that_are_told_the_same_never_wait_for_each_other_in_a_circle(stages):
    for seed in range(40):
        draw = random.Random(seed)
        words = [None if draw.random() < 0.2 else number for number in range(draw.randint(0, 20))] + [None]
        told = [Told(stage, stages, words).steps for stage in range(stages)]
        mail: dict[tuple[int, int], deque] = {}
        back: list[list[int]] = [[] for _ in told]
        while any(told):
            able = [
                s for s, steps in enumerate(told) if steps and (steps[0][0] != "take" or mail.get((steps[0][1], s)))
            ]
            assert able, f"all stages wait: {[steps[0] for steps in told if steps]}"
            stage = draw.choice(able)  # any other may pause as long as it likes
            what, other, number = told[stage].popleft()
            if what == "send":
                mail.setdefault((stage, other), deque()).append(number)
            elif what == "take":
                assert mail[other, stage].popleft() == number
            else:
                back[stage].append(number)
        assert not any(mail.values())
        assert all(order == [word for word in words if word is not None] for order in back)


# -- processes -------------------------------------------------------------------------------------------------------
class Stages:
    """Processes, each of which becomes a stage of whatever pipeline is built."""

    def __init__(self, nest, directory: Path, count: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._built = 0
        self.children = []
        for number in range(count):
            words = [sys.executable, str(PROGRAM)]
            spawned = nest.spawn("stage", words, directory / f"stage-{number}.log", env={"OMP_NUM_THREADS": "1"})
            self.children.append(self._loop.run_until_complete(spawned))

    def build(self, model: Path, stages: int, dtype: str = "float32", what: str = "build", **train) -> None:
        self.stages = stages
        self._built += 1
        common = {"model": str(model), "stages": stages, "port": self._store.port, "name": str(self._built)}
        self.do([(what, {**common, "stage": stage, "dtype": dtype, **train}) for stage in range(stages)])

    def do(self, each: list) -> list[dict]:
        """Have the first ones do something each at the same time; None for one that does nothing."""
        calls = [c.call(one[0], 60, **one[1]) for c, one in zip(self.children, each, strict=False) if one]

        async def all_of_them() -> list:
            return await asyncio.gather(*calls, return_exceptions=True)

        answers = self._loop.run_until_complete(all_of_them())
        for answer in answers:
            if isinstance(answer, Exception) and ("die", {}) not in each:
                raise answer
        return answers

    def run(self, **arguments) -> list[dict]:
        return self.do([("run", arguments)] * self.stages)

    def close(self) -> None:
        async def stop() -> None:
            await asyncio.gather(*(child.stop() for child in self.children))

        self._loop.run_until_complete(stop())
        self._loop.close()


@pytest.fixture(scope="module")
def processes(nest, tmp_path_factory):
    made = Stages(nest, tmp_path_factory.mktemp("stages"), 3)
    yield made
    made.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {tied: make_model(directory / f"{tied}", tied=tied, num_hidden_layers=3) for tied in (True, False)}


def check(answers: list[dict], rounding: float = 0.0) -> None:
    """Sums and statistics; in half precision `rounding` bounds the norm of what is different."""
    stages = len(answers)
    for stage, answer in enumerate(answers):
        assert answer["error"] < rounding if rounding else answer["far"] < EXACT, answer
        assert answer["ids"] == answers[0]["ids"] == sorted(answer["ids"])
        assert answer["most"] <= stages - stage - 1
    names = [name for answer in answers for name in answer["names"]]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("runs", [pytest.param(20, id="20"), pytest.param(200, id="200", marks=pytest.mark.full)])
def test_a_pipeline_with_pauses_gives_the_gradients_of_one_process(processes, models, runs):
    processes.build(models[True], 2)
    for seed in range(runs):
        check(processes.run(seed=seed))


@pytest.mark.parametrize(
    ("stages", "tied", "train"),
    [
        pytest.param(3, True, {}, id="3 stages"),
        pytest.param(3, False, {}, id="3 stages, untied"),
        pytest.param(2, False, {"kl": 0.1}, id="2 stages, untied, reference"),
        pytest.param(1, True, {}, id="1 stage"),
    ],
)
def test_other_pipelines(processes, models, stages, tied, train):
    processes.build(models[tied], stages, **train)
    for seed in range(300, 303):
        check(processes.run(seed=seed))


def test_in_half_precision(processes, models):
    """What is passed on is rounded as it is within one process."""
    processes.build(models[True], 2, dtype="bfloat16")
    for seed in range(400, 403):
        check(processes.run(seed=seed), rounding=0.005)


ZERO, RECOMPUTED = {"zero_stage": 3}, {"zero_stage": 3, "checkpoint_activations": True}


@pytest.mark.parametrize(
    ("stages", "dtype", "train", "updates", "rounding"),
    [
        pytest.param(2, "float32", {}, 5, 0.0, id="2 stages"),
        pytest.param(2, "bfloat16", {}, 2, 0.005, id="2 stages, bfloat16"),
        pytest.param(3, "float32", ZERO, 5, 0.0, id="3 stages, zero 3", marks=pytest.mark.full),
        pytest.param(3, "float32", RECOMPUTED, 5, 0.0, id="3 stages, zero 3, checkpoints", marks=pytest.mark.full),
    ],
)
def test_updates_of_a_core_in_stages_are_those_of_one_process(
    processes, models, stages, dtype, train, updates, rounding
):
    """Norm and clipping are of all stages together, and each has its own optimizer.

    In half precision weights drift apart by what is rounded, so that later gradients are of other weights.
    """
    lr, clip = 1e-3, 0.005
    processes.build(models[True], stages, dtype, what="core", **train)
    for seed in range(500, 500 + updates):
        answers = processes.run(seed=seed)
        check(answers, rounding)
        if train:
            assert max(answer["whole"] for answer in answers) == 96 * 48, "the largest weight; one at a time is whole"
        squares = sum(answer["squares"] for answer in answers)
        stepped = processes.do(
            [("step", {"squares": squares, "weight": answers[0]["weight"], "clip": clip, "lr": lr})] * stages
        )
        for each in stepped:
            assert each["norms"][0] == pytest.approx(each["norms"][1], rel=rounding or EXACT)
            assert each["norms"][0] > clip, "otherwise nothing is clipped"
            if dtype == "float32":
                assert each["far"] < EXACT
            else:  # Adam's first steps are of the size of lr whatever the gradient's; few of them differ in their sign
                assert each["mean"] < 0.2 * lr


def test_a_wait_for_a_silent_neighbour_is_called_off(processes, models):
    processes.build(models[True], 2)
    [answer] = processes.do([("wait", {"off": True})])
    assert "called off" in answer["error"]


def test_a_killed_neighbour_is_noticed_by_both_sides(processes, models):
    """The last of the tests, since it ends a process; waits that are not called off end by themselves."""
    processes.build(models[True], 3)
    answers = processes.do([("half", {}), ("die", {}), ("half", {})])
    assert all("neighbouring stage is gone" in answer["error"] for answer in answers[::2])
