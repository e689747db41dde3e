"""Which rows go together: as full as can be, longest first, none starving, and no group taken before it is needed."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.training.choosing import Shelf
from gyre.training.filling import SLACK, fill_up, pack_all, pack_evenly
from gyre.training.packing import Row
from gyre.trajectories.sample import Sample

BUDGET = 100


def rows_of(lengths, group=0):
    arrays = [np.zeros(length, np.int32) for length in lengths]
    return [Row(Sample(i, group, a, a > 0, a, a, a), 1.0) for i, a in enumerate(arrays)]


class Feed:
    """A shelf with the groups that are ready for it."""

    def __init__(self, groups, *lengths):
        self.shelf = Shelf(groups, BUDGET)
        self.ready = {}
        self.fed = 0
        for group in lengths:
            self.feed(group)

    def feed(self, lengths):
        self.fed += 1
        self.ready[self.fed] = None if lengths is None else rows_of(lengths)

    def next(self):
        """Lengths of the next micro-step, and the groups that were taken for it."""
        rows, taken = self.shelf.next(self.ready)
        for group in taken:
            del self.ready[group]
        return [len(row.sample) for row in rows], taken

    def all(self):
        return list(iter(lambda: self.next()[0], []))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=9), st.integers(0, 150), st.integers(0, 10))
def test_no_other_subset_fills_better(lengths, room, slack):
    chosen = fill_up(lengths, room, slack)
    assert len(set(chosen)) == len(chosen)
    found = [lengths[i] for i in chosen]
    sums: dict[int, list] = {}
    for size in range(len(lengths) + 1):
        for subset in combinations(lengths, size):
            if sum(subset) <= room:
                sums.setdefault(sum(subset), []).append(subset)
    assert sum(found) in sums and sum(found) >= min(max(sums), room - slack)
    assert found == sorted(found, reverse=True)
    near = [sorted(s, reverse=True) for total in sums for s in sums[total] if total >= min(max(sums), room - slack)]
    assert found == max(near)  # of the longest rows


def test_very_many_short_ones_fill_a_micro_step_too():
    lengths = [int(n) for n in np.random.default_rng(3).integers(5, 60, 5000)]
    chosen = fill_up(lengths, 8192)
    assert sum(lengths[i] for i in chosen) == 8192 and len(set(chosen)) == len(chosen)
    assert len(pack_all(lengths, 8192)) == -(-sum(lengths) // 8192)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 120), max_size=60))
def test_all_are_packed_once_within_the_budget(lengths):
    packed = pack_all(lengths, BUDGET)
    assert sorted(i for step in packed for i in step) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in step) for step in packed]
    assert all(size <= BUDGET or len(step) == 1 for size, step in zip(sizes, packed, strict=True))
    assert sizes == sorted(sizes, reverse=True)
    small = [size for size in sizes if size <= BUDGET]
    slackest = sorted(small)[:2]
    assert len(slackest) < 2 or sum(slackest) > BUDGET * 0.9  # no two of them would have gone together


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 120), max_size=40))
def test_even_micro_steps_are_no_more_and_no_larger(lengths):
    packed, even = pack_all(lengths, BUDGET), pack_evenly(lengths, BUDGET)
    assert sorted(i for step in even for i in step) == list(range(len(lengths)))
    sizes = [[sum(lengths[i] for i in step) for step in steps] for steps in (packed, even)]
    assert len(even) <= len(packed) and max(sizes[1], default=0) <= max(sizes[0], default=0)
    assert all(size <= BUDGET or len(step) == 1 for size, step in zip(sizes[1], even, strict=True))


def test_two_cells_share_what_is_left_evenly():
    assert [sum([10] * len(step)) for step in pack_evenly([10] * 16, BUDGET)] == [80, 80]


def test_many_are_packed_too():
    lengths = [int(n) for n in np.clip(np.random.default_rng(1).lognormal(3, 0.8, 2000), 1, BUDGET)]
    packed = pack_all(lengths, BUDGET)
    assert sorted(i for step in packed for i in step) == list(range(2000))
    assert sum(lengths) / (BUDGET * len(packed)) > 0.97


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 130), max_size=6), max_size=12), st.lists(st.booleans(), min_size=30, max_size=30)
)
def test_every_row_goes_once_however_groups_come(groups, when):
    feed, given_rows = Feed(len(groups)), []
    waiting = iter(groups)
    for ready in when:
        if ready and (group := next(waiting, None)) is not None:
            feed.feed(group)
        given_rows.append(feed.next()[0])
    for group in waiting:
        feed.feed(group)
    given_rows += feed.all()
    assert feed.shelf.empty and not feed.ready
    assert sorted(n for step in given_rows for n in step) == sorted(n for group in groups for n in group)
    assert all(sum(step) <= BUDGET or len(step) == 1 for step in given_rows)
    assert sorted(feed.shelf.taken) == list(range(1, len(groups) + 1))


def test_no_further_group_is_taken_where_one_fills_a_micro_step():
    feed = Feed(50, [60, 40, 50], [50, 70], [30, 20])
    assert feed.next() == ([60, 40], [1])
    assert feed.next() == ([70, 30], [2, 3])
    assert feed.next() == ([50, 50], [])


def test_what_does_not_fill_a_micro_step_waits_for_more_and_is_taken():
    feed = Feed(30, [30, 20])
    assert feed.next() == ([], [1])  # a claim waits for it
    feed.feed(None)
    assert feed.next() == ([], [])
    feed.ready[2] = rows_of([50])
    assert feed.next() == ([50, 30, 20], [2])


def test_little_waits_where_little_is_to_come():
    feed = Feed(4, [30, 20], [25, 35])
    assert feed.next()[0] == [35, 30, 25]  # 110 tokens wait, about as many are to come
    feed.shelf.close(0)
    assert feed.next() == ([20], []) and feed.shelf.empty


def test_rows_that_go_with_no_other_are_not_waited_with():
    feed = Feed(1000)
    for _ in range(5):
        feed.feed([70])
        assert feed.next()[0] == [70]
    feed.feed([30])
    assert feed.next() == ([], [6])  # one of 70 may come
    feed.feed([70])
    assert feed.next() == ([70, 30], [7])


def test_a_row_that_fits_nowhere_well_does_not_starve():
    feed, steps = Feed(1000, [60, 40, 33]), []
    while not any(33 in step for step in steps):
        feed.feed([60, 40])
        steps += feed.all()
        assert len(steps) < 30
    assert len(steps) > 10  # what fills a micro-step goes first


def test_a_row_over_the_budget_goes_alone_and_at_once():
    feed = Feed(9, [60, 30], [20, BUDGET + 1])
    assert feed.next() == ([BUDGET + 1], [2])
    assert feed.next()[0] == []
    assert feed.shelf.taken == [2, 1]


def test_a_group_without_rows_is_taken_in_passing():
    feed = Feed(3, [], [60, 40])
    assert feed.next() == ([60, 40], [1, 2])
    feed.feed([])
    assert feed.next() == ([], [3]) and feed.shelf.empty


def test_a_plan_for_the_rest_is_made_anew_where_a_group_of_it_is_gone():
    feed = Feed(8, *([[100]] * 6))
    assert len(feed.all()) == 6
    feed.feed([60, 40])
    feed.feed([75, 25])
    first, taken = feed.next()
    assert sum(first) == 100 and len(taken) == 1 and len(feed.ready) == 1  # the plan takes no group before its turn
    feed.ready.clear()  # it was dropped
    assert feed.next() == ([], [])
    feed.feed([80, 20])
    assert feed.next() == ([80, 20], [9]) and feed.shelf.empty


@pytest.mark.parametrize("budget", [8192, 512])
def test_real_lengths_need_hardly_more_than_their_tokens_do(budget):
    lengths = [int(n) for n in np.clip(np.random.default_rng(2).lognormal(7, 0.8, 80) * budget / 8192, 2, budget)]
    assert len(pack_all(lengths, budget)) == -(-sum(lengths) // budget)
    assert SLACK < budget / 100
