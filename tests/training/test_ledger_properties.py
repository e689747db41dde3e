"""Every micro-step counts exactly once in its update, whatever its members do: the pure half of the feeder under random
histories, with gradients of whole numbers, so that nothing rounds.

The law: at the end of an update the core's sum is the sum over all rows of the groups that it took, each once; every
row is in one micro-step, every group in one update. Members join, hold several micro-steps, lose answers, repeat
requests late, die, come back under another incarnation, bring wrong ledgers, suspend and go on, or leave early with
their partial sum merged; groups come in any size, with rows of any length, load late, or are dropped.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from gyre.errors import InvariantBroken
from gyre.training.choosing import Shelf
from gyre.training.ledger import Leases
from gyre.training.packing import Row, decode_all, encode_all
from gyre.training.supply import Supply
from gyre.trajectories.sample import Sample

CORE = (0, 1)
BUDGET = 24
GROUPS = 6
RANKS = (1, 2, 3)


def row_of(number: int, group: int, length: int) -> Row:
    """A row whose every token is its number."""
    trained = np.arange(length) > 0
    zeros = np.zeros(length, np.float32)
    tokens = np.full(length, number, np.int32)
    return Row(Sample(number, group, tokens, trained, zeros, np.where(trained, 0, -1), zeros + 1), 1.0)


def gradient(number: int) -> np.ndarray:
    """Of a row: whole numbers in which no two rows are alike."""
    return np.array([1, number, number**2 + 7, (number * 2654435761) % 2**31], np.int64)


def rows_in(step) -> list[int]:
    return step.tokens[step.starts[:-1]].tolist()


class Cell:
    """A member of an update: its sum, what is in it, and what it has in hand."""

    def __init__(self, member):
        self.member = member
        self.sum = np.zeros(4, np.int64)
        self.ledger: list[int] = []
        self.unsaid: list[int] = []
        self.hand: dict = {}
        self.asked = ((), ())  # the last claim

    def compute(self):
        step = self.hand.pop(min(self.hand))
        self.sum += sum(gradient(number) for number in rows_in(step))
        self.ledger.append(step.id)
        self.unsaid.append(step.id)


class Updates(RuleBasedStateMachine):
    """A feeder's supply and the cells of one update after another."""

    def __init__(self):
        super().__init__()
        self.supply = Supply(BUDGET)
        self.update = 0
        self.rows = 0
        self.groups = 0
        self.loading: dict[int, list[Row]] = {}
        self.fed: dict[int, list[int]] = {}  # rows of the groups that are here
        self.trained: dict[int, int] = {}  # the update of each group
        self.incarnations = dict.fromkeys(RANKS, 0)
        self.cells: dict = {}
        self.ghosts: list[Cell] = []  # barred, and not aware of it
        self.begin()

    @property
    def stream(self):
        return self.supply.stream(self.update)

    def begin(self):
        self.update += 1
        self.supply.begin(self.update, GROUPS)
        self.cells = {CORE: Cell(CORE)}
        self.ghosts = []
        self.join([1, 2], False)
        self.feed([[9, 5, 14, 3, 21], [7, 7, 30], [12, 2, 11, 4]], False)

    # -- groups --------------------------------------------------------------------------------------------------------
    @rule(groups=st.lists(st.lists(st.integers(2, BUDGET + 6), max_size=5), min_size=1, max_size=3), late=st.booleans())
    def feed(self, groups, late):
        for lengths in groups:
            self.reserve(lengths)
        if not late:
            self.load()

    def reserve(self, lengths):
        group = self.groups = self.groups + 1
        rows = [row_of(self.rows + i, group, length) for i, length in enumerate(lengths)]
        self.rows += len(rows)
        self.fed[group] = [row.sample.execution for row in rows]
        self.supply.reserve(group)
        self.loading[group] = rows

    @precondition(lambda self: self.loading)
    @rule()
    def load(self):
        for group, rows in self.loading.items():
            self.supply.fill(group, rows)
        self.loading = {}

    @rule(back=st.integers(0, 3))
    def drop(self, back):
        group = self.groups - back
        gone = self.supply.drop(group)
        assert gone == (group in self.fed and group not in self.trained)
        if gone:
            del self.fed[group]
            self.loading.pop(group, None)

    # -- members -------------------------------------------------------------------------------------------------------
    def some(self, which):
        """One of the members."""
        return list(self.cells.values())[which % len(self.cells)]

    @precondition(lambda self: not self.stream.suspended)
    @rule(ranks=st.lists(st.sampled_from(RANKS), unique=True), again=st.booleans())
    def join(self, ranks, again):
        """Satellites come, perhaps under the incarnation under which they left."""
        for rank in set(ranks) - {member[0] for member in self.cells}:
            member = rank, self.incarnations[rank]
            if not again or not member[1] or member in self.stream.leases.barred:
                self.incarnations[rank] += 1
                member = rank, self.incarnations[rank]
            self.cells[member] = Cell(member)

    def claim(self, cell, want, lost=False):
        cell.asked = tuple(cell.unsaid), tuple(cell.hand)
        claim = self.supply.claim(self.update, cell.member, *cell.asked, want)
        for group in claim.taken:
            assert self.trained.setdefault(group, self.update) == self.update
        assert len(claim.steps) <= want and (claim.answer == "step") == bool(claim.steps)
        if lost:
            return claim
        cell.unsaid = []
        for step in decode_all(encode_all(claim.steps)):
            assert step.id not in cell.hand and step.id not in cell.ledger
            cell.hand[step.id] = step
        return claim

    @rule(which=st.integers(0, 3), want=st.integers(1, 4), lost=st.booleans())
    def claims(self, which, want, lost):
        self.claim(self.some(which), want, lost)

    @rule(which=st.integers(0, 3))
    def comes_late(self, which):
        """A request that was sent twice comes a second time; nobody gets its answer."""
        cell = self.some(which)
        try:
            claim = self.supply.claim(self.update, cell.member, *cell.asked, 2)
        except InvariantBroken:
            assert not set(cell.asked[0]) <= self.stream.leases.held(cell.member)  # merged since
            return
        for group in claim.taken:
            self.trained.setdefault(group, self.update)

    @rule(which=st.integers(0, 3), most=st.integers(1, 4))
    def computes(self, which, most):
        cell = self.some(which)
        for _ in range(min(most, len(cell.hand))):
            cell.compute()

    @rule(whiches=st.lists(st.integers(0, 3), min_size=2, max_size=6), want=st.integers(1, 3))
    def work(self, whiches, want):
        for which in whiches:
            self.computes(which, want)
            self.claim(self.some(which), want)

    @precondition(lambda self: len(self.cells) > 1)
    @rule(which=st.integers(0, 2), work=st.integers(0, 3))
    def dies(self, which, work):
        which = 1 + which % (len(self.cells) - 1)
        self.work([which] * work, 2)
        cell = self.cells.pop(self.some(which).member)
        back = self.supply.bar(cell.member)[self.update]
        assert set(back) >= {*cell.ledger, *cell.hand}
        self.ghosts.append(cell)

    @precondition(lambda self: self.ghosts)
    @rule()
    def haunts(self):
        for ghost in self.ghosts:
            while ghost.hand:
                ghost.compute()
            assert self.supply.claim(self.update, ghost.member, ghost.unsaid).answer == "barred"
            self.refused({CORE: self.cells[CORE].ledger, ghost.member: ghost.ledger}, False)

    # -- sums ----------------------------------------------------------------------------------------------------------
    def drain(self, cells):
        """They finish what they have in hand, and what they did not hear of, and say so."""
        suspended = self.stream.suspended
        self.supply.suspend(self.update)
        for cell in cells:
            for _ in range(1000):
                if not self.claim(cell, 4).steps and not cell.hand:
                    break
                while cell.hand:
                    cell.compute()
            else:
                raise AssertionError("it does not end")
        self.stream.suspended = suspended

    def settle(self, cells, final, twice):
        """Bring these sums together at the core."""
        ledgers = {cell.member: list(cell.ledger) for cell in cells}
        for _ in range(1 + twice):
            assert self.supply.settle(self.update, ledgers, CORE, final) is None
        core, *others = cells
        for cell in others:
            core.sum += cell.sum
            core.ledger += cell.ledger
            del self.cells[cell.member]

    @precondition(lambda self: not self.stream.suspended)
    @rule(twice=st.booleans())
    def suspend(self, twice):
        self.supply.suspend(self.update)
        cells = list(self.cells.values())
        self.drain(cells)
        self.settle(cells, False, twice)
        assert self.claim(self.cells[CORE], 2).answer == "suspended"

    @precondition(lambda self: self.stream.suspended)
    @rule()
    def resume(self):
        self.supply.resume(self.update)

    @precondition(lambda self: len(self.cells) > 1)
    @rule(which=st.integers(0, 2), twice=st.booleans())
    def gives_back(self, which, twice):
        """One satellite leaves early, and its partial sum is the core's."""
        cells = [self.cells[CORE], list(self.cells.values())[1 + which % (len(self.cells) - 1)]]
        self.drain(cells)
        self.settle(cells, False, twice)

    @rule(which=st.integers(0, 3), kind=st.sampled_from(["short", "twice", "stranger"]), final=st.booleans())
    def brings_a_wrong_ledger(self, which, kind, final):
        wrong = self.some(which)
        ledgers = {cell.member: list(cell.ledger) for cell in self.cells.values()}
        if kind == "stranger":
            ledgers[wrong.member].append(len(self.stream.steps) + 1)
        elif not wrong.ledger:
            return
        elif kind == "twice":
            ledgers[wrong.member].append(wrong.ledger[0])
        else:
            ledgers[wrong.member].pop()
        self.refused(ledgers, final)

    def refused(self, ledgers, final):
        """These sums may not be added up; unless it was agreed when they could be, and is only asked again."""
        listed = {member: sorted(ids) for member, ids in ledgers.items()}
        if self.stream.agreed != (listed, final):
            assert self.supply.settle(self.update, ledgers, CORE, final) is not None

    @rule()
    def end(self):
        """The update ends with the groups it has; its sum is that of one process, and the next one begins."""
        self.load()
        self.supply.resume(self.update)
        self.supply.close_short(self.update, min(GROUPS, len(self.stream.taken) + self.supply.untaken))
        rounds, claims = 0, []
        while not claims or any(claim.answer != "closed" or claim.unfinished for claim in claims):
            claims = []
            for cell in self.cells.values():
                claims.append(self.claim(cell, 2))
                while cell.hand:
                    cell.compute()
            rounds += 1
            assert rounds < 1000 and not {claim.answer for claim in claims} & {"wait", "barred"}, "it does not end"
        core = self.cells[CORE]
        self.settle(list(self.cells.values()), True, True)
        rows = sorted(row for group in self.stream.taken for row in self.fed[group])
        assert sorted(row for step in self.stream.steps.values() for row in rows_in(step)) == rows
        assert core.sum.tolist() == sum((gradient(row) for row in rows), np.zeros(4, np.int64)).tolist()
        assert sorted(core.ledger) == sorted(self.stream.steps)
        assert self.supply.bar((9, 9)) == {}  # nothing goes back any more
        self.supply.committed(self.update)
        self.begin()

    # -- always --------------------------------------------------------------------------------------------------------
    @invariant()
    def every_micro_step_is_somewhere_once(self):
        stream = self.stream
        stream.leases.check()
        for cell in self.cells.values():
            held = stream.leases.held(cell.member)
            assert held >= {*cell.ledger, *cell.hand}
        packed = [row for step in stream.steps.values() for row in rows_in(step)]
        waiting = [waiting.row.sample.execution for waiting in stream.shelf.waiting]
        assert sorted(packed + waiting) == sorted(row for group in stream.taken for row in self.fed[group])
        assert all(len(step.tokens) <= BUDGET or len(step.starts) == 2 for step in stream.steps.values())
        assert {group for group, update in self.trained.items() if update == self.update} == set(stream.taken)

    def teardown(self):
        self.end()


def check(examples: int, steps: int, **more) -> None:
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    chosen = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=quiet, **more
    )
    run_state_machine_as_test(Updates, settings=chosen)


def test_every_micro_step_counts_exactly_once():
    check(40, 40)


@pytest.mark.full
def test_every_micro_step_counts_exactly_once_in_long_histories():
    check(500, 80)


# -- the law can be broken ---------------------------------------------------------------------------------------------
def finished_ones_stay(leases, member):
    """A dead member's finished micro-steps are thought to be in some sum."""
    leases.barred.add(member)
    back = [step for step in sorted(leases._held.pop(member, ())) if step not in leases.finished]
    leases._open.pop(member, None)
    for step in back:
        del leases._holder[step]
    leases.free.extend(back)
    return back


def nobody_is_barred(leases, member):
    """What it held goes back, but it may go on."""
    back = Leases_bar(leases, member)
    leases.barred.discard(member)
    return back


Leases_bar = Leases.bar


def forgets_to_take_rows_away(shelf, chosen, looked=()):
    """A row may be given again."""
    waiting = list(shelf.waiting)
    given = Shelf_give(shelf, chosen, looked)
    shelf.waiting = waiting + [w for w in shelf.waiting if w not in waiting]
    return given


Shelf_give = Shelf._give

MUTANTS = {
    "finished micro-steps of the dead stay": (Leases, "bar", finished_ones_stay),
    "the dead may go on": (Leases, "bar", nobody_is_barred),
    "a lost answer stays lost": (Leases, "missed", lambda leases, member, holding: []),
    "what is in hand is given again": (Leases, "missed", lambda leases, member, holding: [*leases._open[member]]),
    "any ledger will do": (Leases, "fault", lambda leases, ledgers, final: None),
    "leases do not follow a merged sum": (Leases, "merge", lambda leases, members, into: None),
    "rows are given twice": (Shelf, "_give", forgets_to_take_rows_away),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_ledger_is_found_out(mutant, monkeypatch):
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises((AssertionError, InvariantBroken, KeyError, ExceptionGroup)):
        check(200, 40, database=None, phases=[Phase.generate])
