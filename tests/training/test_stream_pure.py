"""What the pure half of the feeder does with groups, claims and ledgers, and the layout of micro-steps."""

import numpy as np
import pytest

from gyre.errors import InvariantBroken, StreamConflict
from gyre.training.ledger import Leases
from gyre.training.packing import Row, blank, decode, encode, lay_out
from gyre.training.supply import Supply
from tests.training.cells import make_sample

CORE = (0, 1)


def rows_of(group: int, size: int = 2) -> list[Row]:
    return [Row(make_sample(size * group + i, group), 1.0 - 2 * i) for i in range(size)]


def supply_with(*groups: int, budget: int = 96) -> Supply:
    supply = Supply(budget)
    for group in groups:
        supply.reserve(group)
        supply.fill(group, rows_of(group))
    return supply


def test_groups_stay_untaken_until_a_claim_needs_them():
    supply = supply_with(1, 2, 3, 4, budget=10)  # every row comes alone
    supply.begin(1, 2)
    assert supply.untaken == 4
    first = supply.claim(1, CORE)
    assert first.taken == (1,) and supply.untaken == 3
    second = supply.claim(1, CORE, [first.steps[0].id])
    assert second.taken == ()  # the other row of group 1
    supply.claim(1, CORE, [second.steps[0].id])
    assert supply.stream(1).taken == [1, 2]
    assert supply.drop(3) and not supply.drop(2)


def test_an_update_takes_its_groups_and_no_more():
    supply = supply_with(1, 2, 3)
    supply.begin(1, 2)
    finished = []
    while (claim := supply.claim(1, CORE, finished)).steps:
        finished = [claim.steps[0].id]
    assert claim.answer == "closed" and supply.stream(1).taken == [1, 2] and supply.untaken == 1
    assert supply.claim(2, CORE).answer == "wait"
    supply.begin(2, 1)
    assert supply.claim(2, CORE).taken == (3,)
    supply.committed(1)
    assert supply.claim(1, CORE).answer == "closed"


def test_a_group_is_fed_once_in_a_run():
    supply = Supply(96, trained=[7])
    supply.reserve(8)
    for group in (7, 8):
        with pytest.raises(InvariantBroken, match="invariant 12"):
            supply.reserve(group)
    assert supply.drop(8)
    supply.reserve(8)  # dropped untaken, it may come again


def test_a_group_with_nothing_to_teach_is_taken_and_gives_no_micro_step():
    supply = Supply(96)
    for group in (1, 2):
        supply.reserve(group)
        supply.fill(group, [])
    supply.begin(1, 2)
    claim = supply.claim(1, CORE)
    assert claim.answer == "closed" and claim.taken == (1, 2)
    assert supply.settle(1, {CORE: []}, CORE, final=True) is None


def test_a_group_that_is_loading_holds_up_those_behind_it():
    supply = Supply(96)
    supply.reserve(1)
    supply.reserve(2)
    supply.fill(2, rows_of(2))
    supply.begin(1, 2)
    assert supply.claim(1, CORE).answer == "wait"
    supply.fill(1, rows_of(1))
    assert supply.claim(1, CORE).taken[0] == 1


def test_the_same_calls_give_the_same_micro_steps():
    def history() -> list[bytes]:
        supply = supply_with(*range(6))
        supply.begin(1, 6)
        steps, finished = [], []
        while (claim := supply.claim(1, CORE, finished)).steps:
            finished = [claim.steps[0].id]
            steps.append(encode(claim.steps[0]))
        return steps

    assert history() == history()


def test_ledgers_that_do_not_partition_are_refused():
    supply = supply_with(1, 2, budget=40)
    supply.begin(1, 2)
    other = (1, 1)
    mine, theirs = (supply.claim(1, m).steps[0].id for m in (CORE, other))
    assert "not dry" in supply.settle(1, {CORE: [mine]}, CORE, final=True)
    rest = []
    while (claim := supply.claim(1, CORE, [mine, *rest])).steps:
        rest.append(claim.steps[0].id)
    own = [mine, *rest]
    assert "has not finished" in supply.settle(1, {CORE: own, other: [theirs]}, CORE, final=True)
    supply.claim(1, other, [theirs])
    assert "in no ledger" in supply.settle(1, {CORE: own}, CORE, final=True)
    assert "lists" in supply.settle(1, {CORE: own, other: [theirs, mine]}, CORE, final=True)
    assert "twice" in supply.settle(1, {CORE: [*own, mine], other: [theirs]}, CORE, final=True)
    assert supply.settle(1, {CORE: own, other: [theirs]}, CORE, final=True) is None
    assert supply.bar(other) == {}  # its sum is in: nothing goes back


@pytest.mark.parametrize("final", [True, False])
def test_settling_the_same_again_gets_the_same_answer(final):
    supply = supply_with(1, 2, budget=40)
    supply.begin(1, 2)
    other, ledgers = (1, 1), {CORE: [], (1, 1): []}
    while steps := [(m, c.steps[0].id) for m in (CORE, other) if (c := supply.claim(1, m, ledgers[m][-1:])).steps]:
        for member, step in steps:
            ledgers[member].append(step)
    assert all(ledgers.values())
    for _ in range(2):  # the first answer was lost on its way
        assert supply.settle(1, ledgers, CORE, final) is None
    assert "lists" in supply.settle(1, {CORE: ledgers[CORE]}, CORE, final)
    if not final:
        supply.resume(1)
        assert "lists" in supply.settle(1, ledgers, CORE, final)
        assert supply.settle(1, {CORE: ledgers[CORE] + ledgers[other]}, CORE, True) is None


def test_a_barred_member_stays_barred_in_later_updates():
    supply = supply_with(1)
    supply.bar((1, 1))
    supply.begin(1, 1)
    assert supply.claim(1, (1, 1)).answer == "barred"
    assert supply.claim(1, (1, 2)).answer == "step"


def test_words_out_of_turn_are_refused():
    supply = Supply(96)
    supply.begin(2, 1)
    with pytest.raises(StreamConflict):
        supply.begin(2, 1)
    with pytest.raises(StreamConflict):
        supply.begin(1, 1)
    leases = Leases()
    leases.publish(1)
    with pytest.raises(InvariantBroken, match="invariant 8"):
        leases.publish(1)
    with pytest.raises(InvariantBroken, match="invariant 8"):
        leases.finish(CORE, [1])


def test_micro_steps_survive_the_wire_and_hold_what_samples_say():
    rows = [Row(make_sample(n, n // 2), float(n), 1 / (n + 1)) for n in range(5)]
    step = decode(encode(lay_out(3, rows)))
    assert step.id == 3 and step.starts.tolist() == np.cumsum([0, *(len(row.sample) for row in rows)]).tolist()
    assert len(step.place) == sum(row.sample.trained.sum() for row in rows)
    for row, start, end in zip(rows, step.starts, step.starts[1:], strict=False):
        mine = (step.place >= start) & (step.place < end)
        own = step.place[mine] - start
        assert (step.tokens[start:end] == row.sample.tokens).all()
        assert (own == np.flatnonzero(row.sample.trained)).all() and (own > 0).all()
        assert (step.logprobs[mine] == row.sample.logprobs[own]).all()
        assert (step.temperatures[mine] == row.sample.temperatures[own]).all()
        assert (step.advantages[mine] == row.advantage).all()
        assert (step.weights[mine] == np.float32(row.weight)).all()


def test_a_blank_micro_step_weighs_nothing():
    step = decode(encode(blank(7)))
    assert step.id == 7 and len(step.tokens) == step.starts[-1] == 2 and step.place.tolist() == [1]
    assert not step.weights.any() and not step.advantages.any() and step.temperatures.tolist() == [1]
