"""A small world without time: everything that may happen next, given what was ordered and what happened so far.

`Small` says what there is and what may go wrong, `Env` is all that is outside the scheduler as a value. `Env.moves`
lists what may happen next, `Env.make` makes one of these things happen and returns the words that the scheduler hears
at that moment. Cells, hosts and the feeder behave as in `tests.scheduler.world`: a cell obeys its orders one after the
other, words of one sender arrive in order, and nothing else is agreed on.

Where it makes no difference to what the scheduler can be told, things are one event:

* what a cell does alone and then says happens when the word arrives (`merged`), since nobody can see it earlier; a cell
  that dies may have said one more word. What others can see (a stream that opens, a part that ends) and its word are
  two events. A rank that is dead and not noticed is not different from a slow one, so it dies when it is noticed, or is
  back before that. `test_every_order` shows that this makes no difference;
* executions of one group that are in the same place are interchangeable, so the first of them ends first; so are
  neighbouring groups whose executions are all in the same place. With `whole_groups` all of a group that are served
  end at once;
* words of states that a cell only passes through are left out, but for `all_states`;
* nobody but members hears of micro-steps: a group has one, which the core claims and computes at once, and micro-steps
  that come back from a member that was lost are computed by the core before anyone looks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from gyre.scheduler import commands as c
from gyre.scheduler.settings import Settings
from tests.scheduler.memo import Step, Word

#: The epoch of a cell that has obeyed no order yet.
NONE = -99
#: What may count on a move: a world that is kind makes the first kind of moves only.
SURE, FAULT, LUCK = 0, 1, 2
#: What can go wrong.
KINDS = (
    "unusable", "try failed", "cell", "for good", "late", "host", "engine", "core engine", "part", "false loss",
    "twice",
)  # fmt: skip


#: Moves that tell the scheduler something.
SAYING = {"start", "start host", "restarted", "word", "feeder", "loop", "end", "step", "claim", "part ends"}

Label = tuple[Any, ...]


@dataclass(frozen=True)
class Small:
    """What there is in a small world, and what may go wrong in it."""

    settings: Settings
    faults: int = 0
    kinds: frozenset[str] = frozenset()
    merged: bool = True
    all_states: bool = False
    whole_groups: bool = False
    measured: tuple[float, float, float, float] = (0.0,) * 4  # see `memo.Measured`
    begun: bool = False  # the search starts when all ranks are ready


class Order(NamedTuple):
    """An order to a cell; `a` and `b` are its numbers."""

    kind: str
    epoch: int
    a: int
    b: int = 0


class Cell(NamedTuple):
    """A cell's supervisor with its engine and trainer."""

    alive: bool = False
    back: bool = True  # it will be started (again) if it is dead
    incarnation: int = 0
    state: str = "RESTARTING"
    restarting: bool = False
    epoch: int = NONE
    version: int = -1
    orders: tuple[Order, ...] = ()
    joined: bool = False  # it is a member of the update that its first order names
    built: int = 0
    words: tuple[Word, ...] = ()  # said and not heard


class Run(NamedTuple):
    """An execution on a host."""

    n: int
    try_number: int
    engine: int  # -1: held
    version: int


class Host(NamedTuple):
    """A harness host."""

    alive: bool = False
    incarnation: int = 0
    runs: tuple[Run, ...] = ()


class Stream(NamedTuple):
    """The micro-steps of the present update."""

    update: int
    groups: int
    taken: int = 0
    members: tuple[tuple[int, int], ...] = ()  # rank, incarnation
    barred: tuple[tuple[int, int], ...] = ()
    window: int = 0  # next position
    open: bool = False
    suspended: bool = False
    over: bool = False


class Env:
    """Everything outside the scheduler, at one moment."""

    __slots__ = (
        "small", "cells", "hosts", "routes", "fed", "feeder", "loop", "stream", "losses", "late", "disk", "version",
        "faults", "spoilt", "seen", "finished", "d",
    )  # fmt: skip
    small: Small
    cells: list[Cell]
    hosts: list[Host]
    routes: list[int | None]  # epoch
    fed: tuple[int, ...]
    feeder: tuple[Word, ...]  # its words, not heard
    loop: tuple[Word, ...]  # outcomes that are linked and not heard
    stream: Stream
    losses: tuple[Word, ...]  # not heard
    late: tuple[Word, ...]  # that may be heard at any time, or never
    disk: tuple[Word, ...]  # outcomes of hosts that died
    version: int  # committed
    faults: int  # left
    spoilt: int  # executions without a usable outcome
    seen: int  # groups ever fed, as bits
    finished: int  # executions, as bits
    d: int

    @classmethod
    def first(cls, small: Small) -> Env:
        """Before anything is started."""
        env, settings = cls(), small.settings
        env.small, env.cells = small, [Cell() for _ in range(settings.engines)]
        env.hosts, env.routes = [Host() for _ in range(settings.hosts)], [None] * settings.engines
        env.fed = env.feeder = env.loop = env.losses = env.late = env.disk = ()
        env.stream, env.faults = Stream(0, 0, over=True), small.faults
        env.version = env.spoilt = env.seen = env.finished = env.d = 0
        return env

    @property
    def key(self) -> tuple[Any, ...]:
        """The whole of it as a value."""
        return (
            tuple(self.cells), tuple(self.hosts), tuple(self.routes), self.fed, self.feeder, self.loop, self.stream,
            self.losses, self.late, self.disk, self.version, self.faults, self.spoilt, self.seen, self.finished, self.d,
        )  # fmt: skip

    @classmethod
    def of(cls, small: Small, key: tuple[Any, ...]) -> Env:
        """The other way round."""
        env = cls()
        env.small = small
        (
            cells, hosts, routes, env.fed, env.feeder, env.loop, env.stream, env.losses, env.late, env.disk,
            env.version, env.faults, env.spoilt, env.seen, env.finished, env.d,
        ) = key  # fmt: skip
        env.cells, env.hosts, env.routes = list(cells), list(hosts), list(routes)
        return env

    # -- what may happen ---------------------------------------------------------------------------------------------
    def moves(self, waits: bool) -> Iterator[tuple[Label, int]]:
        """What may happen next, and whether it is sure to, is a fault, or luck that nobody may count on.

        `waits`: whether the scheduler waits for time to pass.
        """
        repeated = self.faults and "twice" in self.small.kinds
        for label, sort in self._going_on(waits):
            yield label, sort
            if repeated and sort == SURE and label[0] in SAYING:
                yield ("twice", label), FAULT
        if self.faults:
            for label in self._faults():
                yield label, FAULT

    def _going_on(self, waits: bool) -> Iterator[tuple[Label, int]]:
        if waits:
            yield ("time",), SURE
        for rank, cell in enumerate(self.cells):
            yield from self._cell_moves(rank, cell)
        for i, host in enumerate(self.hosts):
            if not host.alive:
                yield ("start host", i), SURE
        if self.feeder:
            yield ("feeder",), SURE
        if self.loop:
            yield ("loop",), SURE
        for i in range(len(self.losses)):
            yield ("loss", i), SURE
        for i in range(len(self.late)):
            yield ("late", i), LUCK
        yield from self._endings()

    def _cell_moves(self, rank: int, cell: Cell) -> Iterator[tuple[Label, int]]:
        if not cell.alive:
            if cell.back:
                yield ("start", rank), SURE
            return
        if cell.words:
            yield ("word", rank), SURE
        if cell.restarting:
            if not cell.words or not self.small.merged:
                yield ("restarted", rank), SURE
        elif cell.joined:
            if rank == 0 and self._claimable(cell):
                yield ("claim",), LUCK if self.stream.suspended else SURE
            how = self._part(rank, cell)
            if how and not (how == "done" and cell.words and self.small.merged):
                yield ("part ends", rank), SURE
        elif cell.orders and (self._shared(cell) or not cell.words or not self.small.merged):
            yield ("step", rank), SURE

    @staticmethod
    def _shared(cell: Cell) -> bool:
        """Whether others can see the next step before its word is heard."""
        return cell.orders[0].kind == "train"

    def _runs(self) -> dict[int, tuple[int, Run]]:
        return {run.n: (i, run) for i, host in enumerate(self.hosts) for run in host.runs}

    def _served(self, run: Run) -> bool:
        if run.engine < 0 or self.routes[run.engine] is None:
            return False
        cell = self.cells[run.engine]
        return cell.alive and cell.state == "ROLLOUT" and cell.epoch == self.routes[run.engine]

    def _endings(self) -> Iterator[tuple[Label, int]]:
        """Executions that may end: sure if served, luck if held; one of each kind that cannot be told apart."""
        size, runs = self.small.settings.group_size, self._runs()
        previous: Any = None
        for group in sorted({n // size for n in runs}):
            members = [runs[n] for n in range(group * size, (group + 1) * size) if n in runs]
            places = [(i, run[1:]) for i, run in members]
            alike = previous == (group - 1, places) and len(places) == size
            previous = (group, places)
            if alike:
                continue
            if self.small.whole_groups:
                members = [(i, run) for i, run in members if self._served(run)][:1]
                places = [(i, run[1:]) for i, run in members]
            for j, (_, run) in enumerate(members):
                if places[j] in places[:j]:
                    continue
                sure = self._served(run)
                yield ("end", run.n), SURE if sure else LUCK
                if self.faults and sure and "unusable" in self.small.kinds:
                    yield ("spoil", run.n), FAULT
                if self.faults and "try failed" in self.small.kinds:
                    yield ("try fails", run.n), FAULT

    def _faults(self) -> Iterator[Label]:
        kinds = self.small.kinds
        for rank, cell in enumerate(self.cells):
            if not cell.alive:
                continue
            if rank and "cell" in kinds:
                yield "dies", rank
                if self.small.merged:
                    yield "dies unnoticed", rank
                if "late" in kinds and (cell.words or cell.orders):
                    yield "dies in mid-word", rank
            if rank and "for good" in kinds:
                yield "dies for good", rank
            if rank and "false loss" in kinds:
                yield "called lost", rank
            if ("engine" in kinds and rank or "core engine" in kinds and not rank) and self._can_fail(cell):
                yield "engine fails", rank
            if rank and "part" in kinds and cell.joined and self._member(rank, cell):
                yield "part fails", rank
        for i, host in enumerate(self.hosts):
            if host.alive and "host" in kinds:
                yield "host dies", i
                if self.small.merged:
                    yield "host dies unnoticed", i
                if "late" in kinds and host.runs:
                    yield "host dies in mid-word", i

    def _can_fail(self, cell: Cell) -> bool:
        if cell.words and self.small.merged:
            return False
        return not cell.restarting and cell.state not in ("TRAINING", "RESTARTING")

    # -- streams -----------------------------------------------------------------------------------------------------
    def _member(self, rank: int, cell: Cell) -> bool:
        """Whether a cell is in the present stream, and that goes on."""
        stream = self.stream
        return (rank, cell.incarnation) in stream.members and cell.orders[0].a == stream.update and not stream.over

    def _claimable(self, core: Cell) -> bool:
        stream, merged = self.stream, self.small.merged
        # A claim that is heard of when the update is suspended was made before that.
        goes_on = self._member(0, core) and (merged or not stream.suspended)
        return goes_on and stream.taken < stream.groups and bool(self.fed)

    def _part(self, rank: int, cell: Cell) -> str:
        """How a member's part ends now; empty where it goes on."""
        stream = self.stream
        if (rank, cell.incarnation) in stream.barred and cell.orders[0].a == stream.update:
            return "failed"
        if stream.update > cell.orders[0].a or stream.over:
            return "done"
        if stream.suspended:
            return "suspended" if rank or len(stream.members) == 1 else ""
        if rank or stream.taken + (len(self.fed) if self.small.merged else 0) < stream.groups:
            return ""
        alive = all(self.cells[r].alive and self.cells[r].incarnation == i for r, i in stream.members)
        return "step" if alive else ""

    def _bar(self, update: int, rank: int, incarnation: int) -> None:
        stream = self.stream
        if update != stream.update:
            return
        members = tuple(m for m in stream.members if m != (rank, incarnation))
        barred = tuple(sorted({*stream.barred, (rank, incarnation)}))
        self.stream = stream._replace(members=members, barred=barred)

    # -- making it happen --------------------------------------------------------------------------------------------
    def make(self, label: Label) -> list[Word]:
        """Something happens; returns the words that the scheduler hears."""
        return _MAKE[label[0]](self, *label[1:])

    def _set(self, rank: int, **fields: Any) -> None:
        self.cells[rank] = self.cells[rank]._replace(**fields)

    def _say(self, rank: int, *words: Word, local: bool = False) -> list[Word]:
        """A cell says something; what it did alone is heard at once."""
        if local and self.small.merged:
            return list(words)
        self._set(rank, words=self.cells[rank].words + words)
        return []

    def _time(self) -> list[Word]:
        return [("tick",)]

    def _start(self, rank: int) -> list[Word]:
        incarnation = self.cells[rank].incarnation + 1
        self.cells[rank] = Cell(alive=True, incarnation=incarnation)
        return self._say(rank, ("ready", rank, incarnation), local=True)

    def _start_host(self, i: int) -> list[Word]:
        incarnation = self.hosts[i].incarnation + 1
        self.hosts[i] = Host(True, incarnation)
        return [("ready", len(self.cells) + i, incarnation)]

    def _restarted(self, rank: int) -> list[Word]:
        self._set(rank, restarting=False)
        return self._say(rank, ("ready", rank, self.cells[rank].incarnation), local=True)

    def _word(self, rank: int) -> list[Word]:
        word, *rest = self.cells[rank].words
        self._set(rank, words=tuple(rest))
        return [word]

    def _feeder(self) -> list[Word]:
        word, *rest = self.feeder
        self.feeder = tuple(rest)
        return [word]

    def _loop(self) -> list[Word]:
        word, *rest = self.loop
        self.loop = tuple(rest)
        return [word]

    def _loss(self, i: int) -> list[Word]:
        word = self.losses[i]
        self.losses = self.losses[:i] + self.losses[i + 1 :]
        return [word]

    def _late(self, i: int) -> list[Word]:
        word = self.late[i]
        self.late = self.late[:i] + self.late[i + 1 :]
        return [word]

    def _end(self, n: int, usable: bool = True) -> list[Word]:
        size, runs = self.small.settings.group_size, self._runs()
        ended = [runs[n][1]]
        if self.small.whole_groups:
            ended = [run for _, run in runs.values() if run.n // size == n // size and self._served(run)]
        for i, host in enumerate(self.hosts):
            self.hosts[i] = host._replace(runs=tuple(run for run in host.runs if run not in ended))
        return [self._outcome(run, usable or run.n != n) for run in ended]

    @staticmethod
    def _outcome(run: Run, usable: bool) -> Word:
        return ("closed", run.n, run.try_number, usable, run.version if usable else -1)

    def _spoil(self, n: int) -> list[Word]:
        self.faults -= 1
        self.spoilt += 1
        return self._end(n, usable=False)

    def _try_fails(self, n: int) -> list[Word]:
        self.faults -= 1
        i, run = self._runs()[n]
        self.hosts[i] = self.hosts[i]._replace(runs=tuple(r for r in self.hosts[i].runs if r != run))
        return [("try failed", n, run.try_number)]

    # -- cells -------------------------------------------------------------------------------------------------------
    def _step(self, rank: int) -> list[Word]:
        """A cell takes the next step of its first order."""
        cell = self.cells[rank]
        order = cell.orders[0]
        cell = self.cells[rank] = cell._replace(epoch=order.epoch)
        rest = cell.orders[1:]
        match order.kind:
            case "training":
                return self._to_training(rank, cell, rest)
            case "rollout":
                return self._to_rollout(rank, cell, order.a, rest)
            case "sync":
                assert order.a <= self.version  # 15: engines load committed versions only
                self._set(rank, orders=rest, version=order.a)
                return self._say(rank, self._role(rank, "ROLLOUT", order.a), local=True)
            case "build":
                self._set(rank, orders=rest, built=max(cell.built, order.a))
                return self._say(rank, ("built", rank, cell.incarnation, order.a), local=True)
            case "commit":
                assert order.a == self.version + 1
                self._set(rank, orders=rest)
                self.version = order.a
                return self._say(rank, ("committed", rank, order.a), local=True)
            case "train":
                return self._enter_update(rank, cell, order, rest)
        raise AssertionError(order)

    def _role(self, rank: int, state: str, version: int = -1) -> Word:
        return ("role", rank, self.cells[rank].incarnation, self.cells[rank].epoch, state, version)

    def _enter(self, rank: int, state: str, **fields: Any) -> list[Word]:
        self._set(rank, state=state, **fields)
        version = self.cells[rank].version if state == "ROLLOUT" else -1
        return self._say(rank, self._role(rank, state, version), local=True)

    def _to_training(self, rank: int, cell: Cell, rest: tuple[Order, ...]) -> list[Word]:
        if cell.state not in ("ROLLOUT", "DRAINING", "RELEASING"):
            self._set(rank, orders=rest)
            return []
        assert self.routes[rank] != cell.epoch  # 6: who leaves rollout has no route
        if self.small.all_states and cell.state != "RELEASING":
            return self._enter(rank, "DRAINING" if cell.state == "ROLLOUT" else "RELEASING")
        return self._enter(rank, "TRAINING", orders=rest)

    def _to_rollout(self, rank: int, cell: Cell, version: int, rest: tuple[Order, ...]) -> list[Word]:
        assert version <= self.version  # 15
        if self.small.all_states and cell.state in ("TRAINING", "RESTORING", "RESTARTING"):
            return self._enter(rank, "RESTORING" if cell.state == "TRAINING" else "SYNCING")
        return self._enter(rank, "ROLLOUT", version=version, orders=rest)

    def _enter_update(self, rank: int, cell: Cell, order: Order, rest: tuple[Order, ...]) -> list[Word]:
        stream, update, position = self.stream, order.a, order.b % 100
        assert cell.state == "TRAINING" and cell.built == order.b // 100
        if rank == 0:
            assert position == 0 and not stream.open and stream.update == update
            self.stream = stream._replace(open=True, window=1, members=((0, cell.incarnation),))
            self._set(rank, joined=True)
            return self._say(rank, ("opened", rank, update))
        here = stream.update == update and stream.open and stream.window == position
        if not here or stream.over or stream.suspended:
            self._set(rank, orders=rest)
            return self._say(rank, ("ended", rank, cell.incarnation, update, "missed"))
        if (rank, cell.incarnation) in stream.barred:
            self._set(rank, orders=rest)
            return self._say(rank, ("ended", rank, cell.incarnation, update, "failed"))
        members = (*stream.members, (rank, cell.incarnation))
        self.stream = stream._replace(window=position + 1, members=members)
        self._set(rank, joined=True)
        return self._say(rank, ("joined", rank, update, position))

    def _claim(self, heard: bool = True) -> list[Word]:
        """The next group is taken. Where that is one event with its word, late words are those after the last step."""
        group, *rest = self.fed
        self.fed = tuple(rest)
        self.stream = self.stream._replace(taken=self.stream.taken + 1)
        word = ("taken", group, self.stream.update)
        if heard and self.small.merged:
            return [word]
        self.feeder += (word,)
        return []

    def _part_ends(self, rank: int) -> list[Word]:
        cell, stream = self.cells[rank], self.stream
        how, update = self._part(rank, cell), cell.orders[0].a
        self._set(rank, joined=False, orders=cell.orders[1:])
        words: tuple[Word, ...] = ()
        if how == "step":
            while self.stream.taken < stream.groups:
                self._claim(heard=False)
            stream = self.stream
            assert stream.taken > 0
            self.stream, how = stream._replace(over=True), "done"
            words = (("done", rank, update),)
        elif how == "suspended":
            members = tuple(m for m in stream.members if m[0] != rank)
            self.stream = stream._replace(members=members, open=stream.open and rank != 0)
        alone = how == "done" and not words  # the stream is over, and nobody looks
        return self._say(rank, *words, ("ended", rank, cell.incarnation, update, how), local=alone)

    # -- faults ------------------------------------------------------------------------------------------------------
    def _dies(self, rank: int, back: bool = True, late: tuple[Word, ...] = (), fault: int = 1) -> list[Word]:
        cell = self.cells[rank]
        self.cells[rank] = Cell(alive=False, back=back, incarnation=cell.incarnation)
        self.faults -= fault
        self.late = tuple(sorted(self.late + late))
        return self._lost(rank, cell.incarnation) if fault else []

    def _lost(self, rank: int, incarnation: int) -> list[Word]:
        """Somebody notices that a rank has died; until then it was only slow."""
        word = ("lost", rank, incarnation)
        if self.small.merged:
            return [word]
        self.losses += (word,)
        return []

    def _dies_unnoticed(self, rank: int) -> list[Word]:
        """It is back before its loss is heard of."""
        lost = self._dies(rank)
        return [*self._start(rank), *lost]

    def _dies_in_mid_word(self, rank: int) -> list[Word]:
        cell = self.cells[rank]
        said = cell.words
        if not said and not cell.joined and not cell.restarting:
            said = tuple(self._step(rank)) or self.cells[rank].words
        return self._dies(rank, late=said)

    def _dies_for_good(self, rank: int) -> list[Word]:
        return self._dies(rank, back=False)

    def _called_lost(self, rank: int) -> list[Word]:
        self.faults -= 1
        return [("lost", rank, self.cells[rank].incarnation)]

    def _engine_fails(self, rank: int) -> list[Word]:
        self.faults -= 1
        cell = self.cells[rank]
        begun = cell.state != "ROLLOUT"
        self._set(rank, state="RESTARTING", restarting=True, orders=cell.orders[1:] if begun else cell.orders)
        return self._say(rank, self._role(rank, "FAILED"), local=True)

    def _part_fails(self, rank: int) -> list[Word]:
        cell = self.cells[rank]
        update = cell.orders[0].a
        self._bar(update, rank, cell.incarnation)
        self.faults -= 1
        self._set(rank, joined=False, orders=cell.orders[1:])
        return self._say(rank, ("ended", rank, cell.incarnation, update, "failed"))

    def _twice(self, label: Label) -> list[Word]:
        """A word is heard again, at any time."""
        self.faults -= 1
        words = self.make(label)
        self.late = tuple(sorted((*self.late, *words)))
        return words

    def _host_dies(self, i: int, late: tuple[Word, ...] = (), fault: int = 1) -> list[Word]:
        self.faults -= fault
        incarnation = self.hosts[i].incarnation
        self.hosts[i] = Host(False, incarnation)
        self.late, self.disk = tuple(sorted(self.late + late)), self.disk + late
        return self._lost(len(self.cells) + i, incarnation) if fault else []

    def _host_dies_unnoticed(self, i: int) -> list[Word]:
        lost = self._host_dies(i)
        return [*self._start_host(i), *lost]

    def _host_dies_in_mid_word(self, i: int) -> list[Word]:
        """Its first execution had ended, and nobody has heard of it."""
        return self._host_dies(i, (self._outcome(self.hosts[i].runs[0], True),))

    # -- commands ----------------------------------------------------------------------------------------------------
    def obey(self, step: Step) -> None:
        """Carry out what the scheduler says."""
        for rank, by in enumerate(step.raised):
            if by:
                self._older(rank, by)
        for command in step.commands:
            self._obey(command, step.raised)

    def _older(self, rank: int, by: int) -> None:
        """The present epoch of a cell is 0 again: those that are known go down."""

        def older(word: Word) -> Word:
            return (*word[:3], word[3] - by, *word[4:]) if word[:2] == ("role", rank) else word

        cell = self.cells[rank]
        self.cells[rank] = cell._replace(
            epoch=cell.epoch if cell.epoch == NONE else cell.epoch - by,
            orders=tuple(order._replace(epoch=order.epoch - by) for order in cell.orders),
            words=tuple(map(older, cell.words)),
        )
        self.late = tuple(sorted(map(older, self.late)))
        if self.routes[rank] is not None:
            self.routes[rank] -= by

    def _order(self, rank: int, incarnation: int, order: Order) -> None:
        cell = self.cells[rank]
        if cell.alive and incarnation == cell.incarnation:
            self._set(rank, orders=(*cell.orders, order))

    def _obey(self, command: c.Command, raised: tuple[int, ...]) -> None:
        match command:
            case c.Dispatch():
                assert command.d == self.d + len(command.executions)
                self.d = command.d
            case c.Grant():
                self._grant(command)
            case c.CancelExecution():
                self._leave(command.host, command.n, command.incarnation)
            case c.Close():
                own = ("closed", command.n, command.try_number, False, -1)
                outcome = next((word for word in self.disk if word[1] == command.n), own)
                self.spoilt += outcome == own and command.outcome != "cancelled"
                self.loop += (outcome,)
            case c.Finished():
                assert not self.finished & 1 << command.n
                self.finished |= 1 << command.n
                self.disk = tuple(word for word in self.disk if word[1] != command.n)
            case c.Route():
                self._route(command, raised)
            case c.OrderRole():
                order = Order(command.target, command.epoch - raised[command.rank], command.version)
                self._order(command.rank, command.incarnation, order)
            case c.OrderSync():
                order = Order("sync", command.epoch - raised[command.rank], command.version)
                self._order(command.rank, command.incarnation, order)
            case c.Train():
                order = Order(
                    "train", command.epoch - raised[command.rank], command.update,
                    100 * command.generation + command.position,
                )  # fmt: skip
                assert command.members[command.position] == command.rank
                self._order(command.rank, command.incarnation, order)
            case c.Commit():
                self._order(0, command.incarnation, Order("commit", command.epoch - raised[0], command.version))
            case c.BuildGroups():
                for member in command.members:
                    order = Order("build", member.epoch - raised[member.rank], command.generation)
                    self._order(member.rank, member.incarnation, order)
            case c.Supersede():
                self._supersede(command)
            case c.PublishPolicy():
                assert command.version == self.version  # 15: committed before it is published
            case c.EndRun():
                if command.how == "completed":
                    assert self.version == self.small.settings.batches
                    assert self.finished == (1 << self.d) - 1
            case _:
                self._feed(command)
        # Nobody sees a cell throw away an order that came too late.
        for rank, cell in enumerate(self.cells):
            if cell.orders and not cell.joined and cell.orders[0].epoch < cell.epoch:
                self._set(rank, orders=cell.orders[1:])

    def _feed(self, command: c.Command) -> None:
        stream = self.stream
        match command:
            case c.Feed():
                assert not self.seen & 1 << command.group  # 12
                self.seen |= 1 << command.group
                self.fed += (command.group,)
            case c.DropGroup():
                assert command.group in self.fed
                self.fed = tuple(group for group in self.fed if group != command.group)
            case c.BeginUpdate():
                assert stream.over and stream.update < command.update
                self.stream = Stream(command.update, command.groups)
            case c.SuspendUpdate():
                assert not stream.suspended and stream.update == command.update
                self.stream = stream._replace(suspended=True)
            case c.ResumeUpdate():
                assert stream.suspended and not stream.open and stream.update == command.update
                self.stream = stream._replace(suspended=False)
            case c.CloseShort():
                assert stream.update == command.update
                self.stream = stream._replace(groups=command.groups)
            case c.BarMember():
                self._bar(command.update, command.rank, command.incarnation)
            case _:
                raise AssertionError(command)

    def _grant(self, grant: c.Grant) -> None:
        outcome = next((word for word in self.disk if word[1] == grant.n), None)
        if outcome is not None:
            self.loop += (outcome,)
            return
        i = grant.host - len(self.cells)
        host = self.hosts[i]
        assert grant.n not in self._runs() or not host.alive or host.incarnation != grant.incarnation  # 2
        if host.alive and host.incarnation == grant.incarnation:
            # Its first request comes at once, and so samples the policy that the engine serves.
            run = Run(grant.n, grant.try_number, grant.engine, self.cells[grant.engine].version)
            self.hosts[i] = host._replace(runs=tuple(sorted((*host.runs, run))))

    def _leave(self, rank: int, n: int, incarnation: int) -> None:
        i = rank - len(self.cells)
        if self.hosts[i].incarnation == incarnation:
            self.hosts[i] = self.hosts[i]._replace(runs=tuple(r for r in self.hosts[i].runs if r.n != n))

    def _route(self, route: c.Route, raised: tuple[int, ...]) -> None:
        for rank, entry in route.engines.items():
            cell = self.cells[rank]
            if entry is not None and cell.alive and cell.state != "RESTARTING":  # 6, but for a failure not heard of yet
                assert cell.state == "ROLLOUT" and cell.version >= entry.policy, f"cell {rank} is routed: {cell}"
            self.routes[rank] = None if entry is None else entry.epoch - raised[rank]
        moved = {move.n: -1 if move.engine is None else move.engine for move in route.moves}
        if moved:
            for i, host in enumerate(self.hosts):
                runs = tuple(r._replace(engine=moved.get(r.n, r.engine)) for r in host.runs)
                self.hosts[i] = host._replace(runs=runs)

    def _supersede(self, command: c.Supersede) -> None:
        if command.rank < len(self.cells):
            cell = self.cells[command.rank]
            if cell.alive and cell.incarnation == command.incarnation:
                self._dies(command.rank, fault=0)
        else:
            i = command.rank - len(self.cells)
            if self.hosts[i].alive and self.hosts[i].incarnation == command.incarnation:
                self._host_dies(i, fault=0)


_MAKE: dict[str, Any] = {
    "time": Env._time, "start": Env._start, "start host": Env._start_host, "restarted": Env._restarted,
    "word": Env._word, "feeder": Env._feeder, "loop": Env._loop, "loss": Env._loss, "late": Env._late, "end": Env._end,
    "spoil": Env._spoil, "try fails": Env._try_fails, "step": Env._step, "claim": Env._claim,
    "part ends": Env._part_ends, "dies": Env._dies, "dies unnoticed": Env._dies_unnoticed,
    "host dies unnoticed": Env._host_dies_unnoticed, "dies in mid-word": Env._dies_in_mid_word,
    "dies for good": Env._dies_for_good, "called lost": Env._called_lost, "engine fails": Env._engine_fails,
    "part fails": Env._part_fails, "twice": Env._twice, "host dies": Env._host_dies,
    "host dies in mid-word": Env._host_dies_in_mid_word,
}  # fmt: skip
