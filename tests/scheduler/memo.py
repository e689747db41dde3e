"""The scheduler's state as a value: what a word makes of it is worked out once and remembered.

A search over event orders meets the same state of the scheduler in many states of the world. `Memo` numbers the
states, and keeps for each (state, word) the next state and the commands. Numbers that only grow, and by which nothing
is decided but whether one is older than another, are taken out of the states, so that those which differ in nothing
else are one:

* epochs count from the cell's present one, which is 0; older ones are negative, and `Step.raised` says how many epochs
  a word added to each cell, which the world subtracts from the epochs it knows;
* route versions begin anew with every word (that they rise within one is checked);
* it is always 0 o'clock: time passes by a `("tick",)` at the moment the scheduler asked for, and clocks go back by as
  much. How long something has lasted is forgotten beyond what it has to last;
* nothing is measured: what the scheduler would measure is what the world says (`Measured`);
* reasons (for people), stale entries of heaps and the order of dictionaries that are used as sets are dropped.
"""

from __future__ import annotations

import marshal
import pickle
from collections import deque
from enum import Enum
from hashlib import blake2b
from typing import Any, NamedTuple

from gyre import events as e
from gyre.scheduler import commands as c
from gyre.scheduler.invariants import check_thoroughly
from gyre.scheduler.policy import Decision, Policy
from gyre.scheduler.settings import Settings
from gyre.scheduler.slots import Slots
from gyre.scheduler.state import SchedulerState

#: A word to the scheduler: its kind and numbers, see `event`.
Word = tuple[Any, ...]
#: Epochs that a failure may lag behind; more orders than these cannot cross one word.
LAG = 4
#: Dictionaries whose order means something.
ORDERED = {"held"}
#: What is for people, or holds no state.
SKIPPED = {
    "settings", "decision", "said", "_commands", "_settings", "_queue", "_emit", "emit", "measures",
    "_measures", "policy",
}  # fmt: skip
#: What is a value as it is.
PLAIN = {int, str, float, bool, type(None)}


def event(word: Word) -> e.Event:
    """The event that a word stands for."""
    match word:
        case ("ready", rank, incarnation):
            return e.RankReady(rank, incarnation, "node", f"http://{rank}")
        case ("lost", rank, incarnation):
            return e.RankLost(rank, incarnation, "silent")
        case ("role", rank, incarnation, epoch, state, version):
            return e.RoleReached(rank, incarnation, epoch, state, version=version)
        case ("closed", n, try_number, usable, version):
            outcome = "completed" if usable else "failed"
            return e.ExecutionClosed(n, try_number, outcome, 1.0 if usable else None, usable, version, 1.0)
        case ("try failed", n, try_number):
            return e.TryFailed(n, try_number, "the sandbox broke")
        case ("taken", group, update):
            return e.GroupTaken(group, update)
        case ("opened", _, update):
            return e.UpdateOpened(update)
        case ("joined", rank, update, position):
            return e.CellJoined(rank, update, position)
        case ("ended", rank, incarnation, update, how):
            return e.TrainingEnded(rank, incarnation, update, how)
        case ("done", _, update):
            return e.UpdateDone(update, 1, {}, 1.0)
        case ("committed", _, version):
            return e.PolicyCommitted(version, "sum", 1.0)
        case ("built", rank, incarnation, generation):
            return e.GroupsBuilt(rank, incarnation, generation)
        case ("tick",):
            return e.Tick()
    raise AssertionError(word)


class Measured:
    """Measures that stay what they are."""

    def __init__(self, slot_s: float, group_work: float, to_training_s: float, to_rollout_s: float) -> None:
        """All in seconds; 0 for the first two: not measured."""
        self.now = 0.0
        self.slot_s, self.group_work = slot_s or None, group_work or None
        self.to_training_s, self.to_rollout_s = to_training_s, to_rollout_s

    def execution(self, group: int, seconds: float) -> None:
        pass

    def update(self, groups: int, cell_seconds: float) -> None:
        pass

    def moved(self, target: str, since: float) -> None:
        pass

    def expected(self, group: int) -> float | None:
        return self.slot_s and self.slot_s + group % 2


class Step(NamedTuple):
    """What a word led to."""

    state: int
    commands: tuple[c.Command, ...]
    raised: tuple[int, ...]  # epochs per cell


class Memo:
    """All states of the scheduler that were met, by number."""

    def __init__(
        self, settings: Settings, policy: Policy | None = None, measured: tuple[float, float, float, float] = (0,) * 4
    ) -> None:
        self._numbers: dict[bytes, int] = {}
        self._pickles: list[bytes] = []
        self._steps: dict[tuple[int, Word], Step] = {}
        self.ended: list[str] = []  # by number: how the attempt ended
        self.waits: list[bool] = []  # by number: whether time alone may lead to something
        state = SchedulerState(settings, policy)
        state.measures = state.fleet._measures = Measured(*measured)
        state.executions.hosts._preference = _by_rank  # a lambda cannot be copied by pickling
        self.first = self._add(state, state.start(0.0))

    def __len__(self) -> int:
        return len(self._pickles)

    def handle(self, number: int, word: Word) -> Step:
        """The step from a state by a word; raises what the scheduler or its invariants raise."""
        step = self._steps.get((number, word))
        if step is None:
            state = self.state(number)
            now = state.wake_at() or 0.0 if word == ("tick",) else 0.0
            step = self._steps[number, word] = self._add(state, state.handle(event(word), now), now)
        return step

    def state(self, number: int) -> SchedulerState:
        """A copy of a state."""
        return pickle.loads(self._pickles[number])

    def digest(self, number: int) -> bytes:
        """What tells a state from others, in any search."""
        return _digest(self.state(number))

    def _add(self, state: SchedulerState, commands: list[c.Command], now: float = 0.0) -> Step:
        check_thoroughly(state)
        if state.ended == "completed":
            level = state.level
            assert level.d == level.p == level.f and state.committed == state.settings.batches
        versions = [command.version for command in commands if isinstance(command, c.Route)]
        assert versions == sorted(set(versions))
        raised = normalise(state, now)
        digest = _digest(state)
        number = self._numbers.setdefault(digest, len(self._pickles))
        if number == len(self._pickles):
            self._pickles.append(pickle.dumps(state, -1))
            self.ended.append(state.ended)
            self.waits.append(state.wake_at() is not None)
        for part in (state.executions, state):
            vars(part).clear()  # a state refers to itself, and a search cannot afford to look for such things
        return Step(number, tuple(x for x in commands if not isinstance(x, c.Log)), raised)


def normalise(state: SchedulerState, now: float) -> tuple[int, ...]:
    """Take out what only grows; returns by how much the epoch of each cell was raised."""
    raised = []
    for cell in state.fleet.cells.values():
        raised.append(cell.epoch)
        cell.floor = max(cell.floor - cell.epoch, -LAG)
        cell.epoch, cell.ordered_at = 0, 0.0
    state.fleet._routes = 0
    state.said, state.decision = {}, Decision(False, "", "")
    state.measures.now = 0.0
    state.lookahead._at, state.lookahead._idle, state.lookahead._total = None, 0.0, 0.0
    state.lookahead._idle_cells = 0.0
    if state.update.dry_since is not None:
        switches = state.measures.to_training_s + state.measures.to_rollout_s
        state.update.dry_since = max(state.update.dry_since - now, -switches)
    if state.supply.since is not None:
        state.supply.since = max(state.supply.since - now, -state.settings.supply_hold)
    executions = state.executions
    for execution in executions.open.values():
        execution.granted_at = 0.0
    executions._queue = sorted((executions.open[n].priority, n) for n in executions._queued)
    for slots in (executions.engines, executions.hosts):
        slots._levels, slots._listed = [[] for _ in slots._levels], set()
        for rank in sorted(slots):
            slots._list(rank)
    return tuple(raised)


def _by_rank(rank: int) -> tuple[int, int]:
    return (0, rank)


def _digest(state: SchedulerState) -> bytes:
    return blake2b(marshal.dumps(_frozen(state), 2), digest_size=16).digest()


def _frozen(thing: Any, ordered: bool = False) -> Any:
    """A value of tuples that is the same for states that cannot be told apart."""
    kind = type(thing)
    if kind is dict:
        items = thing.items() if ordered else sorted(thing.items())
        return tuple([(key, value if type(value) in PLAIN else _frozen(value)) for key, value in items])
    if kind in (list, tuple, deque):
        return tuple([value if type(value) in PLAIN else _frozen(value) for value in thing])
    if kind in (set, frozenset):
        return tuple(sorted(thing))
    if isinstance(thing, Enum):
        return thing.value
    if kind is e.ExecutionClosed:
        return (thing.n, thing.usable, thing.oldest_version)
    if kind is Slots:
        return (_frozen(thing._size), _frozen(thing._held))
    if hasattr(kind, "__slots__"):
        return tuple([getattr(thing, slot) for slot in kind.__slots__])
    return tuple(
        [
            value if type(value) in PLAIN else _frozen(value, name in ORDERED)
            for name, value in getattr(thing, "__dict__", {}).items()
            if name not in SKIPPED
        ]
    )
