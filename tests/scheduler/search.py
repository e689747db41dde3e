"""Every order of events in a small world: all states that can be reached, and whether each leads to the end."""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gyre.errors import GyreError
from gyre.scheduler.policy import Policy
from tests.scheduler.memo import Memo, Word
from tests.scheduler.small_world import SURE, Env, Label, Small


class Counterexample(Exception):
    """Something that must not be, and the shortest way there."""

    def __init__(self, what: str, path: list[Label], words: list[Word]) -> None:
        steps = "\n".join(f"  {' '.join(map(str, label))}" for label in path)
        said = "\n".join(f"  {word}" for word in words)
        super().__init__(f"{what}\nwhat happened:\n{steps}\nwhat the scheduler heard:\n{said}")
        self.what, self.path, self.words = what, path, words


@dataclass
class Found:
    """How much there was."""

    states: int
    moves: int
    scheduler_states: int
    seconds: float
    ends: dict[str, int]
    digests: Callable[[], set[bytes]]

    def __str__(self) -> str:
        return (
            f"{self.states:,} states ({self.scheduler_states:,} of the scheduler), {self.moves:,} moves, "
            f"{self.seconds:.1f} s; ends: {self.ends}"
        )


class Search:
    """Breadth first over the states of a small world and of the scheduler in it."""

    def __init__(self, small: Small, policy: Policy | None = None, limit: int = 10_000_000) -> None:
        self.small, self.limit = small, limit
        self.memo = Memo(small.settings, policy, small.measured)
        self._envs: list[tuple] = []
        self._env_numbers: dict[tuple, int] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._states: list[tuple[int, int]] = []  # of the scheduler, of the world
        self._parents = array("q")
        self._labels: list[Label | None] = []
        self._sources, self._targets = array("q"), array("q")  # sure moves
        self._good: list[int] = []
        self._ends: dict[str, int] = {}
        self._moves = 0

    def run(self) -> Found:
        """Look at everything.

        Raises:
            Counterexample: an invariant does not hold, or a state does not lead to the end.
        """
        gc.disable()  # nothing here refers to itself, and there is much to look through
        try:
            return self._run(time.perf_counter())
        finally:
            gc.enable()

    def _run(self, began: float) -> Found:
        env = Env.first(self.small)
        env.obey(self.memo.first)
        state = self.memo.first.state
        if self.small.begun:
            state = self._begin(state, env)
        self._add(state, env, -1, None)
        at = 0
        while at < len(self._states):
            self._expand(at)
            at += 1
        self._check_ends()
        seconds = time.perf_counter() - began
        numbers = {state for state, _ in self._states}
        return Found(
            len(self._states), self._moves, len(numbers), seconds, self._ends,
            lambda: {self.memo.digest(number) for number in numbers},
        )  # fmt: skip

    def _begin(self, state: int, env: Env) -> int:
        """All ranks start, and nothing else happens."""
        starts = ("start", "start host", "step", "word", "restarted")
        while label := next((x for x, _ in env.moves(False) if x[0] in starts), None):
            state = self._make(state, env, label, [])
        return state

    def _make(self, state: int, env: Env, label: Label, words: list[Word]) -> int:
        for word in env.make(label):
            words.append(word)
            if self.memo.ended[state]:
                break
            step = self.memo.handle(state, word)
            state = step.state
            env.obey(step)
        return state

    def _expand(self, at: int) -> None:
        state, number = self._states[at]
        if how := self.memo.ended[state]:
            self._ended(at, how, number)
            return
        key = self._envs[number]
        for label, sort in Env.of(self.small, key).moves(self.memo.waits[state]):
            env = Env.of(self.small, key)
            try:
                after = self._make(state, env, label, [])
            except (AssertionError, GyreError, LookupError, TypeError, AttributeError) as error:
                self._fail(f"{type(error).__name__}: {error}", at, label)
            self._moves += 1
            reached = self._add(after, env, at, label)
            if sort == SURE:
                self._sources.append(at)
                self._targets.append(reached)

    def _ended(self, at: int, how: str, number: int) -> None:
        spoilt = self._envs[number][1]
        if how == "failed" and spoilt <= self.small.settings.top_ups:
            self._fail("the run failed, and not for want of executions that come to something", at)
        self._ends[how] = self._ends.get(how, 0) + 1
        self._good.append(at)

    def _add(self, state: int, env: Env, parent: int, label: Label | None) -> int:
        key = env.key if not self.memo.ended[state] else (self.memo.ended[state], env.spoilt)
        number = self._env_numbers.get(key)
        if number is None:
            number = len(self._envs)
            self._envs.append(key)
            self._env_numbers[key] = number
        pair = (state, number)
        reached = self._numbers.setdefault(pair, len(self._states))
        if reached == len(self._states):
            self._states.append(pair)
            self._parents.append(parent)
            self._labels.append(label)
            if reached >= self.limit:
                raise RuntimeError(f"more than {self.limit} states")
        return reached

    def _check_ends(self) -> None:
        """From every state sure moves lead to the end."""
        leads = np.zeros(len(self._states), dtype=bool)
        leads[self._good] = True
        sources, targets = np.array(self._sources), np.array(self._targets)
        before = -1
        while (count := int(leads.sum())) != before:
            before = count
            leads[sources[leads[targets]]] = True
        if count < len(leads):
            stuck = int(np.argmin(leads))
            what = f"{len(leads) - count} states do not lead to the end; the first: "
            self._fail(what + str(self.memo.state(self._states[stuck][0]).snapshot()), stuck)

    def _fail(self, what: str, at: int, label: Label | None = None) -> None:
        path = [] if label is None else [label]
        while at >= 0 and self._labels[at] is not None:
            path.append(self._labels[at])
            at = self._parents[at]
        path.reverse()
        raise Counterexample(what, path, self._heard(path)) from None

    def _heard(self, path: list[Label]) -> list[Word]:
        """The words of a path from the start."""
        words: list[Word] = []
        env, state = Env.first(self.small), self.memo.first.state
        env.obey(self.memo.first)
        try:
            if self.small.begun:
                state = self._begin(state, env)
            for label in path:
                state = self._make(state, env, label, words)
        except (AssertionError, GyreError, LookupError, TypeError, AttributeError):
            pass
        return words


def search(small: Small, policy: Policy | None = None, limit: int = 10_000_000) -> Found:
    """Look at every order of events."""
    return Search(small, policy, limit).run()
