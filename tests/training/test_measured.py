"""What an update is said to have cost, whoever computed it and in however many parts."""

from types import SimpleNamespace

import pytest

from gyre.events import UpdateDone
from gyre.training import part
from gyre.training.part import Finished, Part, Sum
from gyre.training.statistics import Statistics


def steps(count):
    """Answers to claims: micro-steps, and then nothing."""
    return iter([*(SimpleNamespace(steps=[SimpleNamespace(id=i)]) for i in range(count)), SimpleNamespace(steps=[])])


class Cell:
    """A cell whose micro-steps take as long as they are told to, on a clock of its own."""

    width = 1

    def __init__(self, monkeypatch):
        self.now, self.said, self.in_flight = 0.0, [], set()
        monkeypatch.setattr(part.time, "monotonic", lambda: self.now)

    def feed(self, steps):
        self.now += self.takes
        return [Finished(step.id, Statistics(tokens=10, weight=10)) for step in steps]

    def part(self, total, count, takes):
        self.takes, answers = takes, steps(count)

        def claim(number, finished, holding, want, wait):
            self.now += 1.0
            answer = next(answers)
            answer.word, answer.unfinished = "closed", 0
            return answer

        desk = SimpleNamespace(
            store=None,
            patience=30.0,
            member=(0, 1),
            claims=SimpleNamespace(claim=claim),
            pulse=SimpleNamespace(beat=lambda: None),
            emit=lambda event: self.said.append(event),
        )
        Part(desk, self, total).work()
        return [event for event in self.said if event["type"] == "progress"][-1]


def test_a_sum_keeps_the_time_of_all_its_parts(monkeypatch):
    cell, total = Cell(monkeypatch), Sum(1)
    before = cell.part(total, count=3, takes=2.0)
    cell.now += 100.0  # it is suspended
    after = cell.part(total, count=1, takes=4.0)
    assert total.clock.seconds == {"wait": 6.0, "compute": 10.0}
    assert (len(total.micro_steps), total.statistics.tokens) == (4, 40)
    wanted = [(3, 30, 6.0), (1, 10, 4.0)]  # of each part alone: whoever listens adds them up
    assert [(one["micro_steps"], one["tokens"], one["seconds"]) for one in (before, after)] == wanted


def test_a_part_without_a_micro_step_adds_none(monkeypatch):
    cell, total = Cell(monkeypatch), Sum(1)
    cell.part(total, count=2, takes=1.0)
    cell.part(total, count=0, takes=1.0)
    assert total.clock.computed == 2.0
    assert Sum(2).clock.computed == 0.0


@pytest.mark.parametrize("micro_steps", [{"0": 5, "1": 5}, {"0": 0, "1": 10}, {}])
def test_an_update_is_as_dear_as_it_was_measured(micro_steps):
    assert UpdateDone(1, 2, micro_steps, 9.0, {"seconds_compute": 3.0, "cell_seconds": 8.0}).cell_seconds == 8.0
    assert UpdateDone(1, 2, micro_steps, 9.0).cell_seconds == 0.0
