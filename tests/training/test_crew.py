"""A crew whose workers compute nothing: what its lead makes of their answers."""

import asyncio
import itertools
import math
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from gyre.errors import ChildFailed, ReduceFailed, UserError
from gyre.training import crew
from gyre.training.crew import Crew, Link
from gyre.training.follower import Follower
from gyre.training.frames import Frames
from gyre.training.packing import MicroStep, encode
from gyre.training.part import Desk, Finished, Part, Sum
from gyre.training.statistics import Statistics
from gyre.training.stream import Answer
from tests.training.cells import Cells, make_config, make_model


class Fake:
    """A worker: of a stage that is the last, or of one that has micro-steps back one feed later."""

    def __init__(self, last=True):
        self.last, self.flying, self.fate, self.off, self.did = last, [], "wait", False, []
        self.squares, self.steps = 1.0, []

    def feed(self, step):
        self.flying.append(step.id)
        return self._back(0 if self.last else 1)

    def drain(self):
        return self._back(0)

    def _back(self, left):
        done = []
        while len(self.flying) > left:
            id = self.flying.pop(0)
            done.append([id, {"tokens": float(id)} if self.last else None])
        return {"done": done}

    def reduce(self, group, ranks, called_off, progress=None):
        self.off = False
        if self.fate == "fail":
            raise ReduceFailed("its group is dead")
        while self.fate == "wait":
            if called_off():
                self.off = True
                raise ReduceFailed("called off")

    def fold(self):
        self.did.append("fold")

    def accept(self):
        self.did.append("accept")

    def square_sum(self):
        return {"square_sum": self.squares}

    def step(self, scale, lr):
        self.steps.append(scale)


class Thread:
    """A follower in a thread, in place of a process."""

    def __init__(self, worker, descriptor):
        follower = Follower(Frames(socket.socket(fileno=descriptor)))
        follower._worker = worker
        self.thread = threading.Thread(target=follower.serve, daemon=True)
        self.thread.start()

    def wait(self, timeout=None):
        self.thread.join()
        return 0


@pytest.fixture
def made(monkeypatch):
    """Makes a crew of fakes."""
    crews = []

    def make(stages, shards):
        fakes = [Fake(last=number // shards == stages - 1) for number in range(stages * shards)]
        monkeypatch.setattr(crew, "spawn", lambda number, own: Thread(fakes[number], socket.dup(own)))
        links = [Link(number) for number in range(1, len(fakes))]
        crews.append(Crew(fakes[0], links, stages, shards))
        return crews[-1], fakes

    yield make
    for each in crews:
        each.close()


def step(id):
    none = np.zeros(1, np.float32)
    return MicroStep(
        id, np.zeros(2, np.int32), np.array([0, 2], np.int32), np.ones(1, np.int32), none, none, none, none
    )


def finished(*ids):
    return [Finished(id, Statistics(tokens=id)) for id in ids]


def never():
    return False


def test_a_micro_step_is_finished_when_all_stages_have_it(made):
    pair, _ = made(stages=2, shards=2)
    early = pair.feed([step(1), step(2)])
    assert early == [] and pair.in_flight == {1, 2}
    rest = pair.feed([step(3)])  # and a blank
    assert {one.id for one in rest} <= {1, 2}
    rest += pair.drain()
    assert sorted(rest) == finished(1, 2, 3)
    assert pair.in_flight == set()


def test_an_update_that_fails_leaves_nothing_in_flight(made):
    """The next one's sums would have its gradients, and its claims would say that they hold what they do not."""
    pair, fakes = made(stages=2, shards=1)

    class Claims:
        answers = [Answer("open", [step(1)], 1), Answer("open", [step(2)], 2)]

        def claim(self, *known):
            if not self.answers:
                raise ChildFailed("the feeder does not answer")
            return self.answers.pop(0)

    part = Part(Desk(SimpleNamespace(), Claims(), (1, 1), lambda event: None), pair, Sum(1))
    with pytest.raises(ChildFailed, match="does not answer"):
        part.work()
    assert pair.in_flight == set() and not any(fake.flying for fake in fakes)
    assert sorted(part.sum.micro_steps) == [1, 2]  # they are in the sums
    assert pair.feed([step(3)]) + pair.drain() == finished(3)


def test_a_micro_step_that_fails_is_not_in_flight(made):
    (fake,) = made(stages=1, shards=1)[1]
    alone = Crew(fake, [], 1, 1)
    fake.drain = lambda: {"done": []}

    def feed(step):
        raise RuntimeError("out of memory")

    fake.feed = feed
    with pytest.raises(RuntimeError):
        alone.feed([step(1)])
    assert alone.abandon() == [] and alone.in_flight == set()


def test_blanks_are_no_micro_steps_and_their_answers_disturb_nobody(made):
    pair, fakes = made(stages=1, shards=3)
    assert pair.feed([step(1)]) == finished(1)
    assert pair.in_flight == set()
    for fake in fakes:
        fake.fate = "through"
    pair.reduce("g1", [0, 1], never, lambda: None)
    pair.accept()
    assert [fake.did for fake in fakes] == [["accept"]] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_reduce_that_fails_for_one_is_called_off_for_all(made, failing):
    trio, fakes = made(stages=1, shards=3)
    fakes[failing].fate = "fail"
    with pytest.raises(ReduceFailed, match="its group is dead"):
        trio.reduce("g1", [0, 1], never, lambda: None)
    assert [fake.off for fake in fakes] == [number != failing for number in range(3)]
    for fake in fakes:  # and all are in step for the next one
        fake.fate = "through"
    trio.reduce("u1r1", [0, 1], never, lambda: None)
    assert sorted(trio.feed([step(1), step(2), step(3)]) + trio.drain()) == finished(1, 2, 3)


def test_a_reduce_is_called_off_from_outside_also_when_the_lead_is_through(made):
    pair, fakes = made(stages=1, shards=2)
    fakes[0].fate = "through"
    asked = iter([False, False, True])
    with pytest.raises(ReduceFailed, match="called off"):
        pair.reduce("g1", [0, 1], lambda: next(asked, True), lambda: None)
    assert fakes[1].off


def test_a_reduce_asks_seldom_whether_it_is_called_off(made):
    """Each time reads a word of each member of the store that all cells share."""
    pair, fakes = made(stages=1, shards=2)
    fakes[0].fate = "through"
    asked = []

    def called_off():
        asked.append(time.monotonic())
        if len(asked) == 4:
            fakes[1].fate = "through"
        return False

    pair.reduce("g1", [0, 1], called_off, lambda: None)
    assert all(later - earlier > 0.05 for earlier, later in itertools.pairwise(asked)) and len(asked) >= 4


def test_sums_are_folded_before_a_reduce_where_there_are_stages(made):
    pair, fakes = made(stages=2, shards=1)
    for fake in fakes:
        fake.fate = "through"
    pair.reduce("g1", [0, 1], never, lambda: None)
    assert [fake.did for fake in fakes] == [["fold"], ["fold"]]


@pytest.mark.parametrize("squares", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_no_worker_steps_where_the_gradient_is_not_finite(made, squares, where):
    """The stages do not know of each other's gradients: one of them would step, and the other would not."""
    pair, fakes = made(stages=2, shards=1)
    assert pair.step(0.5, clip_norm=0.25, lr=1.0) == pytest.approx(math.sqrt(2) / 2)
    fakes[where].squares = squares
    assert not math.isfinite(pair.step(0.5, clip_norm=0.25, lr=1.0))
    assert [fake.steps for fake in fakes] == [[pytest.approx(0.25 / math.sqrt(2)), 0.0]] * 2


def test_a_follower_that_finds_the_input_wrong_lets_its_lead_come_to_that(monkeypatch):
    def start(self, **known):
        raise UserError("model.path: a weight is missing")

    monkeypatch.setattr(Follower, "_start", start)
    monkeypatch.setattr("os._exit", lambda code: pytest.fail("its death would end the lead before it has read why"))
    monkeypatch.setattr(crew, "spawn", lambda number, own: Thread(Fake(), socket.dup(own)))
    link = Link(1)
    link.send("start")
    link.send("drain")
    with pytest.raises(UserError, match="a weight is missing"):
        link.answer()
    assert link.answer() == {"done": []}
    link.close()


@pytest.mark.full
def test_what_one_worker_finds_wrong_with_the_input_is_said(tmp_path, nest):
    """The first stage, which is whole, does not wait for its neighbour meanwhile: it would be ended with that one."""
    model = make_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]  # of the last stage
    save_file(weights, model / "model.safetensors")

    async def started():
        async with Cells(tmp_path / "run", model, make_config(stages=2), nest=nest) as cells:
            await cells.spawn(0)

    with pytest.raises(UserError, match=r"no weight model\.norm\.weight"):
        asyncio.run(started())


def test_frames_carry_what_they_were_given():
    ours, theirs = (Frames(end) for end in socket.socketpair())
    data = encode(step(7))
    ours.send({"do": "feed", "arguments": {}}, data)
    ours.send({"do": "drain", "arguments": {"name": "é"}})
    assert theirs.ready()
    assert theirs.receive() == ({"do": "feed", "arguments": {}}, data)
    assert theirs.receive() == ({"do": "drain", "arguments": {"name": "é"}}, b"")
    assert not theirs.ready()
    ours.close()
    assert theirs.ready() and theirs.receive() is None
