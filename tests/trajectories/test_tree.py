"""Calls merge into as few sequences as possible, and every sampled token is a sampled one exactly once."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.trajectories.tree import Turn, branches


def turn(prompt, sampled, trainable=True):
    n = len(sampled)
    return Turn(
        np.array(prompt, np.int32),
        np.array(sampled, np.int32),
        np.zeros(n, np.float32),
        np.zeros(n, np.int32),
        1.0,
        trainable,
    )


def lists(found):
    return [branch.tokens.tolist() for branch in found]


def test_a_conversation_is_one_sequence():
    turns = [turn([1, 2], [3]), turn([1, 2, 3, 4], [5, 6]), turn([1, 2, 3, 4, 5, 6, 7], [8])]
    (branch,) = branches(turns)
    assert branch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [start for start, _ in branch.turns] == [2, 4, 7]


def test_a_history_that_differs_forks():
    turns = [turn([1, 2], [3, 4]), turn([1, 2, 3, 9], [5])]  # the client rewrote the answer
    assert lists(branches(turns)) == [[1, 2, 3, 4], [1, 2, 3, 9, 5]]


def test_the_second_of_two_continuations_forks():
    turns = [turn([1], [2]), turn([1, 2, 3], [4]), turn([1, 2, 3], [5])]
    assert lists(branches(turns)) == [[1, 2, 3, 4], [1, 2, 3, 5]]


def test_the_longest_match_is_extended():
    turns = [turn([1], [2]), turn([1], [2, 3]), turn([1, 2, 3], [4])]
    assert lists(branches(turns)) == [[1, 2], [1, 2, 3, 4]]


def test_repeated_samples_are_sequences_of_their_own():
    assert len(branches([turn([1], [2])] * 4)) == 4


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_call_is_in_exactly_one_branch_at_its_place(data):
    turns: list[Turn] = []
    for _ in range(data.draw(st.integers(1, 8))):
        known = [turn.prompt.tolist() + turn.sampled.tolist() for turn in turns] or [[1]]
        base = data.draw(st.sampled_from(known))[: data.draw(st.integers(1, 12))] or [1]
        prompt = base + data.draw(st.lists(st.integers(1, 2), max_size=3))
        turns.append(turn(prompt, data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))))
    found = branches(turns)
    placed = [one for branch in found for _, one in branch.turns]
    assert len(placed) == len(turns) and {id(one) for one in placed} == {id(one) for one in turns}
    for branch in found:
        taken = np.zeros(len(branch.tokens), int)
        for start, one in branch.turns:
            assert branch.tokens[:start].tolist() == one.prompt.tolist()
            assert branch.tokens[start : start + len(one.sampled)].tolist() == one.sampled.tolist()
            taken[start : start + len(one.sampled)] += 1
        assert taken.max() == 1
