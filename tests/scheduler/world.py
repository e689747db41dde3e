"""A small deterministic world around the scheduler's state: cells, hosts and a feeder that answer its commands.

Time is virtual and everything random comes from one seed. Cells obey orders one after the other through the real
machine of `gyre.cell.machine`; words can be delayed and repeated, ranks can die and come back. After every event all
invariants are checked, and at the end what must hold for a whole run.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from gyre import events as e
from gyre.cell.machine import Machine, State
from gyre.scheduler import commands as c
from gyre.scheduler.groups import Ranges
from gyre.scheduler.invariants import awaited, check_thoroughly
from gyre.scheduler.settings import Settings
from gyre.scheduler.state import SchedulerState

Process = Generator[Any, None, None]


@dataclass
class Chances:
    """How unkind a world is: probabilities per occasion, and numbers of faults over a run."""

    unusable: float = 0.0  # an execution fails, or is timed out, without a usable outcome
    try_failed: float = 0.0
    repeated: float = 0.0  # a word arrives a second time, late
    delay: float = 0.3  # longest delay of a word, seconds
    cell_deaths: int = 0
    engine_failures: int = 0
    host_deaths: int = 0
    false_losses: int = 0  # a living rank is called lost
    never_back: float = 0.0  # a dead satellite stays dead
    horizon: float = 300.0  # faults happen before this time
    part_failed: float = 0.0  # a satellite's part in an update fails
    impatient: bool = False  # supervisors take an order back in mid-move
    seconds: tuple[float, float] = (5.0, 60.0)  # of an execution
    micro_seconds: tuple[float, float] = (1.0, 6.0)


class Signal:
    """Wakes the processes that wait for it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.waiting: list[Callable[[], None]] = []

    def fire(self) -> None:
        waiting, self.waiting = self.waiting, []
        for wake in waiting:
            self.world.after(0.0, wake)


@dataclass
class Stream:
    """The micro-steps of one update."""

    update: int
    groups: int
    taken: list[int] = field(default_factory=list)
    free: list[tuple[int, int]] = field(default_factory=list)
    claims: dict[tuple[int, int], set[tuple[int, int]]] = field(default_factory=dict)  # member -> all it claimed
    kept: set[tuple[int, int]] = field(default_factory=set)  # in the core's partial sum
    barred: set[tuple[int, int]] = field(default_factory=set)
    busy: set[tuple[int, int]] = field(default_factory=set)  # members that compute
    steps: set[tuple[int, int]] = field(default_factory=set)
    suspended: bool = False
    open: bool = False
    window: int = 0  # next position
    over: bool = False


class CellSim:
    """A cell's supervisor with its engine and trainer."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.incarnation = 0
        self.alive = False

    def start(self) -> None:
        self.incarnation += 1
        self.alive, self.epoch, self.version = True, 0, -1
        self.machine = Machine(State.RESTARTING)
        self.orders: deque[c.Command] = deque()
        self.news = Signal(self.world)
        self.restarting = False
        self.groups: set[int] = set()
        self.ready()
        self.world.spawn(self.work(), self.life())

    def life(self) -> Callable[[], bool]:
        incarnation = self.incarnation
        return lambda: self.alive and self.incarnation == incarnation

    def ready(self) -> None:
        self.say(e.RankReady(self.rank, self.incarnation, f"node{self.rank}", f"http://{self.rank}"))

    def say(self, event: e.Event) -> None:
        self.world.send(("cell", self.rank, self.incarnation), event)

    def die(self) -> None:
        self.alive = False

    def order(self, command: c.Command, incarnation: int) -> None:
        if self.alive and incarnation == self.incarnation:
            self.orders.append(command)
            self.news.fire()

    def enter(self, state: State, version: int = -1) -> None:
        self.machine.enter(state)
        if state not in (State.ROLLOUT, State.FAILED, State.RESTARTING):  # 6: who left rollout has no route
            cell = self.world.state.fleet.cells[self.rank]
            assert not cell.routed or cell.incarnation != self.incarnation
        self.say(e.RoleReached(self.rank, self.incarnation, self.epoch, state.value, version=version))

    def fail_engine(self) -> None:
        if not self.alive or self.restarting or self.machine.state in (State.TRAINING, State.RESTARTING):
            return
        self.restarting = True
        self.enter(State.FAILED)
        self.enter(State.RESTARTING)
        self.world.after(self.world.random.uniform(1, 20), self.restarted, self.life())

    def restarted(self) -> None:
        self.restarting = False
        self.ready()
        self.news.fire()

    def work(self) -> Process:
        while True:
            while not self.orders or self.restarting:
                yield self.news
            order = self.orders.popleft()
            epoch = getattr(order, "epoch", None)
            if isinstance(order, c.BuildGroups):
                epoch = next(m.epoch for m in order.members if m.rank == self.rank)
            if epoch < self.epoch:
                continue
            self.epoch = epoch
            match order:
                case c.OrderRole(target="training"):
                    yield from self.to_training()
                case c.OrderRole():
                    yield from self.to_rollout(order.version)
                case c.OrderSync():
                    yield self.pause(0.5, 3)
                    if not self.restarting:
                        self.world.check_version(order.version)
                        self.version = order.version
                        self.say(self.reached(State.ROLLOUT, order.version))
                case c.BuildGroups():
                    yield self.pause(0.1, 2)
                    self.groups.add(order.generation)
                    self.say(e.GroupsBuilt(self.rank, self.incarnation, order.generation))
                case c.Train():
                    yield from self.train(order)
                case c.Commit():
                    yield self.pause(0.5, 3)
                    self.world.committed(order)
                    self.say(e.PolicyCommitted(order.version, "sum", 1.0))

    def reached(self, state: State, version: int) -> e.RoleReached:
        return e.RoleReached(self.rank, self.incarnation, self.epoch, state.value, version=version)

    def pause(self, low: float, high: float) -> float:
        return self.world.random.uniform(low, high)

    def taken_back(self) -> bool:
        return self.world.chances.impatient and any(
            isinstance(o, c.OrderRole) and o.target == "rollout" for o in self.orders
        )

    def to_training(self) -> Process:
        if self.machine.state is not State.ROLLOUT:
            return  # the engine died before the order came; a later order follows
        self.enter(State.DRAINING)
        yield self.pause(0.1, 3)
        if self.machine.state is not State.DRAINING or self.taken_back():
            return
        self.enter(State.RELEASING)
        yield self.pause(0.5, 4)
        if self.machine.state is not State.RELEASING or self.taken_back():
            return
        self.enter(State.TRAINING)

    def to_rollout(self, version: int) -> Process:
        if self.machine.state is State.DRAINING:
            self.enter(State.ROLLOUT, self.version)
            return
        if self.machine.state is State.ROLLOUT:  # it has restarted and come back under an earlier order
            yield self.pause(0.2, 2)
            if self.machine.state is State.ROLLOUT:
                self.version = version
                self.enter(State.ROLLOUT, version)
            return
        if self.machine.state in (State.TRAINING, State.RELEASING):
            self.enter(State.RESTORING)
            yield self.pause(0.5, 4)
        if self.machine.state not in (State.RESTORING, State.RESTARTING) or self.restarting:
            return
        self.enter(State.SYNCING)
        yield self.pause(0.2, 2)
        if self.machine.state is not State.SYNCING:
            return
        self.world.check_version(version)
        self.version = version
        self.enter(State.ROLLOUT, version)

    def train(self, order: c.Train) -> Process:
        world, stream = self.world, self.world.streams[order.update]
        member = (self.rank, self.incarnation)
        assert order.members[order.position] == self.rank and self.machine.state is State.TRAINING
        assert order.generation in self.groups
        if self.rank == 0:
            assert order.position == 0 and not stream.open
            yield self.pause(0.1, 1)
            stream.open, stream.window = True, 1
            self.say(e.UpdateOpened(order.update))
        else:
            yield self.pause(0.2, 4)
            if not stream.open or stream.window != order.position or stream.over or stream.suspended:
                self.say(e.TrainingEnded(self.rank, self.incarnation, order.update, "missed"))
                return
            if member in stream.barred:
                self.say(e.TrainingEnded(self.rank, self.incarnation, order.update, "failed"))
                return
            stream.window += 1
            self.say(e.CellJoined(self.rank, order.update, order.position))
        stream.claims[member] = set()
        how = yield from self.compute(stream, member)
        if how == "suspended":
            stream.kept |= stream.claims.pop(member)
            if self.rank == 0:
                while stream.claims:  # the others' partial sums
                    yield world.feeder_news
                stream.open = False
        elif self.rank == 0:
            world.stepped(stream)
            counts = {str(r): len(steps) for (r, _), steps in stream.claims.items()}
            self.say(e.UpdateDone(order.update, len(stream.claims), counts, 1.0))
        world.feeder_news.fire()
        self.say(e.TrainingEnded(self.rank, self.incarnation, order.update, how))

    def compute(self, stream: Stream, member: tuple[int, int]) -> Generator[Any, None, str]:
        world = self.world
        while True:
            if member in stream.barred:
                return "failed"
            if stream.over:
                return "done"
            if stream.suspended:
                return "suspended"
            step = world.claim(stream, member)
            if step is not None:
                stream.busy.add(member)
                yield self.pause(*world.chances.micro_seconds)
                stream.busy.discard(member)
                if self.rank != 0 and world.random.random() < world.chances.part_failed:
                    world.bar(stream, member)
                    return "failed"
                world.feeder_news.fire()
            elif self.rank == 0 and world.complete(stream):
                stream.over = True
                world.feeder_news.fire()
            else:
                yield world.feeder_news


class HostSim:
    """A harness host."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.incarnation = 0
        self.alive = False

    def start(self) -> None:
        self.incarnation += 1
        self.alive = True
        self.engine: dict[int, int | None] = {}
        self.routes: dict[int, c.EngineRoute] = {}
        self.version = 0
        self.world.send(("host", self.rank, self.incarnation), e.RankReady(self.rank, self.incarnation, "host"))

    def die(self) -> None:
        self.alive = False

    def grant(self, grant: c.Grant) -> None:
        if not self.alive or grant.incarnation != self.incarnation:
            return
        assert grant.n not in self.engine and len(self.engine) < self.world.settings.host_executions
        self.engine[grant.n] = grant.engine
        incarnation = self.incarnation
        self.world.spawn(
            self.run(grant), lambda: self.alive and self.incarnation == incarnation and grant.n in self.engine
        )

    def route(self, route: c.Route) -> None:
        assert route.version > self.version
        self.version = route.version
        for rank, entry in route.engines.items():
            if entry is None:
                self.routes.pop(rank, None)
            else:
                self.routes[rank] = entry
        for move in route.moves:
            if move.host == self.rank and move.n in self.engine:
                self.engine[move.n] = move.engine

    def served(self, n: int) -> bool:
        rank = self.engine[n]
        if rank is None or rank not in self.routes:
            return False
        cell = self.world.cells[rank]
        return cell.alive and cell.epoch == self.routes[rank].epoch and cell.machine.state is State.ROLLOUT

    def run(self, grant: c.Grant) -> Process:
        world, n = self.world, grant.n
        sender = ("host", self.rank, self.incarnation)
        version = None
        for _ in range(4):  # requests: each needs an engine
            while not self.served(n):
                yield 0.7
            version = self.routes[self.engine[n]].policy if version is None else version
            yield world.random.uniform(*world.chances.seconds) / 4
        if world.random.random() < world.chances.try_failed:
            del self.engine[n]
            world.send(sender, e.TryFailed(n, grant.try_number, "the sandbox broke"))
            return
        usable = world.random.random() >= world.chances.unusable and world.fate(n)
        outcome = "completed" if usable else world.random.choice(["failed", "timed_out"])
        score = world.random.random() if usable else None
        event = e.ExecutionClosed(n, grant.try_number, outcome, score, usable, version if usable else -1, 1.0)
        del self.engine[n]
        world.send(sender, world.outcomes.setdefault(n, event))


class World:
    """Everything outside the scheduler's state."""

    def __init__(
        self, settings: Settings, seed: int = 0, chances: Chances | None = None, state: SchedulerState | None = None
    ) -> None:
        self.settings, self.chances, self.random = settings, chances or Chances(), Random(seed)
        self.state = state or SchedulerState(settings)
        self.now, self._sequence = 0.0, 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._last_word: dict[Any, float] = defaultdict(float)
        self.log: list[tuple[float, c.Command]] = []
        self.facts: list[tuple[float, e.Event]] = []
        self.specs: dict[int, c.Planned] = {}
        self.tries: dict[int, int] = {}
        self.outcomes: dict[int, e.ExecutionClosed] = {}
        self.closed = Counter()
        self.cursor: dict[str, Any] | None = None
        self.version = 0  # committed
        self.fed: deque[int] = deque()
        self.streams: dict[int, Stream] = {}
        self.trained: dict[int, int] = {}  # group -> update
        self.d = self.p = self.f = 0
        self.ended: c.EndRun | None = None
        self.on_event: Callable[[e.Event], None] = lambda event: None
        self.fate: Callable[[int], bool] = lambda n: True  # whether execution n comes to something
        self.feeder_news = Signal(self)
        self.cells = {rank: CellSim(self, rank) for rank in range(settings.engines)}
        first = settings.engines
        self.hosts = {rank: HostSim(self, rank) for rank in range(first, first + settings.hosts)}

    # -- time --------------------------------------------------------------------------------------------------------
    def after(self, delay: float, call: Callable[[], None], alive: Callable[[], bool] = lambda: True) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay, self._sequence, lambda: call() if alive() else None))

    def spawn(self, process: Process, alive: Callable[[], bool]) -> None:
        def step() -> None:
            try:
                wait = next(process)
            except StopIteration:
                return
            if isinstance(wait, Signal):
                wait.waiting.append(lambda: step() if alive() else None)
            else:
                self.after(wait, step, alive)

        self.after(0.0, step, alive)

    def send(self, sender: Any, event: e.Event) -> None:
        """A word to the scheduler: words of one sender keep their order, but for late repetitions."""
        at = max(self._last_word[sender], self.now + self.random.uniform(0, self.chances.delay))
        self._last_word[sender] = at
        self.after(at - self.now, lambda: self.deliver(event))
        if self.random.random() < self.chances.repeated:
            self.after(at - self.now + self.random.uniform(0, 30), lambda: self.deliver(event))

    def deliver(self, event: e.Event) -> None:
        if self.ended:
            return
        self.execute(self.state.handle(event, self.now))
        check_thoroughly(self.state)
        self.on_event(event)

    def _tick(self) -> None:
        self.deliver(e.Tick())
        if not self.ended:
            self.after(1.0, self._tick)

    # -- the run -----------------------------------------------------------------------------------------------------
    def start(self) -> World:
        level = self.state.level
        self.d, self.p, self.f = 0, level.p, level.f
        for rank in (*self.cells, *self.hosts):
            self.after(self.random.uniform(0, 5), (self.cells.get(rank) or self.hosts[rank]).start)
        self._plan_faults()
        self.execute(self.state.start(0.0))
        self.after(0.5, self._tick)
        return self

    def run(self, until: float = float("inf"), limit: float = 50_000.0) -> World:
        """Go on until the run ends, or until a time."""
        while self._heap and not self.ended and self._heap[0][0] <= until:
            self.now, _, call = heapq.heappop(self._heap)
            assert self.now < limit, f"not ended after {limit} s: {awaited(self.state)} {self.state.snapshot()}"
            call()
        if self.ended and self.ended.how == "completed":
            self.check_end()
        return self

    def run_until(self, condition: Callable[[], bool], limit: float = 20_000.0) -> World:
        """Go on until something holds."""
        while not condition():
            assert self._heap and not self.ended and self.now < limit, f"never came: {self.state.snapshot()}"
            self.now, _, call = heapq.heappop(self._heap)
            call()
        return self

    def check_end(self) -> None:
        """What must hold when a run has completed."""
        assert self.version == self.settings.batches
        assert self.d == self.p == self.f == len(self.specs)
        assert set(self.closed) == set(self.specs) and set(self.closed.values()) <= {1}
        assert len(set(self.trained)) == len(self.trained)

    # -- faults ------------------------------------------------------------------------------------------------------
    def _plan_faults(self) -> None:
        chances, satellites = self.chances, [rank for rank in self.cells if rank]

        def when() -> float:
            return self.random.uniform(5, chances.horizon)

        for _ in range(chances.cell_deaths if satellites else 0):
            self.after(when(), lambda: self.kill(self.random.choice(satellites)))
        for _ in range(chances.engine_failures):
            self.after(when(), lambda: self.fail_engine(self.random.choice(list(self.cells))))
        for _ in range(chances.host_deaths):
            self.after(when(), lambda: self.kill(self.random.choice(list(self.hosts))))
        for _ in range(chances.false_losses):
            self.after(when(), lambda: self.call_lost(self.random.choice([*satellites, *self.hosts])))

    def rank(self, rank: int) -> CellSim | HostSim:
        return self.cells.get(rank) or self.hosts[rank]

    def kill(self, rank: int, back: bool | None = None) -> None:
        """A rank dies; its loss is noticed later, and it comes back, or not."""
        sim = self.rank(rank)
        if not sim.alive:
            return
        sim.die()
        incarnation = sim.incarnation
        self.after(
            self.random.uniform(0.1, 10), lambda: self.send("watch", e.RankLost(rank, incarnation, "it was killed"))
        )
        if back is None:
            back = rank in self.hosts or self.random.random() >= self.chances.never_back
        if back:
            self.after(self.random.uniform(1, 30), lambda: None if sim.alive else sim.start())

    def call_lost(self, rank: int) -> None:
        sim = self.rank(rank)
        if sim.alive:
            self.send("watch", e.RankLost(rank, sim.incarnation, "silent"))

    def fail_engine(self, rank: int) -> None:
        if self.cells[rank].alive:
            self.cells[rank].fail_engine()

    # -- commands ----------------------------------------------------------------------------------------------------
    def execute(self, commands: list[c.Command]) -> None:
        for command in commands:
            self.log.append((self.now, command))
            self._execute(command)

    def _execute(self, command: c.Command) -> None:
        match command:
            case c.Log():
                self.facts.append((self.now, command.event))
            case c.Dispatch():
                for planned in command.executions:
                    assert planned.n not in self.specs
                    self.specs[planned.n] = planned
                self.d = command.d
                assert self.d == len(self.specs)
            case c.Grant():
                self._grant(command)
            case c.CancelExecution():
                host = self.hosts[command.host]
                if host.incarnation == command.incarnation and host.alive:
                    host.engine.pop(command.n, None)
            case c.Close():
                event = e.ExecutionClosed(
                    command.n, command.try_number, command.outcome, None, False, -1, 0.0, reason=command.reason
                )
                self.send("loop", self.outcomes.setdefault(command.n, event))
            case c.Finished():
                self.closed[command.n] += 1
                self.p = command.p
                self.f = command.f
            case c.Route():
                for rank, host in self.hosts.items():
                    if host.alive and command.host in (None, rank):
                        host.route(command)
            case c.OrderRole() | c.OrderSync() | c.Train():
                self.cells[command.rank].order(command, command.incarnation)
            case c.Commit():
                self.cells[0].order(command, command.incarnation)
            case c.BuildGroups():
                for member in command.members:
                    self.cells[member.rank].order(command, member.incarnation)
            case c.Supersede():
                self.after(self.random.uniform(0, 5), lambda: self._supersede(command))
            case c.PublishPolicy():
                assert command.version == self.version  # 15: committed before it is published
            case c.EndRun():
                self.ended = command
            case _:
                self._feeder(command)

    def _supersede(self, command: c.Supersede) -> None:
        sim = self.rank(command.rank)
        if sim.alive and sim.incarnation == command.incarnation:
            sim.die()
            self.after(self.random.uniform(1, 20), lambda: None if sim.alive else sim.start())

    def _grant(self, command: c.Grant) -> None:
        self.p = self.p if command.p is None else command.p
        self.tries[command.n] = command.try_number
        if command.n in self.outcomes:
            self.send("loop", self.outcomes[command.n])
        else:
            self.hosts[command.host].grant(command)

    # -- feeder ------------------------------------------------------------------------------------------------------
    def _feeder(self, command: c.Command) -> None:
        match command:
            case c.Feed():
                assert command.group not in self.trained and command.group not in self.fed
                self.fed.append(command.group)
            case c.DropGroup():
                self.fed.remove(command.group)
            case c.BeginUpdate():
                assert command.update not in self.streams
                self.streams[command.update] = Stream(command.update, command.groups)
            case c.SuspendUpdate():
                assert not self.streams[command.update].suspended
                self.streams[command.update].suspended = True
            case c.ResumeUpdate():
                assert self.streams[command.update].suspended and not self.streams[command.update].open
                self.streams[command.update].suspended = False
            case c.CloseShort():
                self.streams[command.update].groups = command.groups
            case c.BarMember():
                self.bar(self.streams[command.update], (command.rank, command.incarnation))
            case _:
                raise AssertionError(command)
        self.feeder_news.fire()

    def bar(self, stream: Stream, member: tuple[int, int]) -> None:
        stream.barred.add(member)
        stream.free += sorted(stream.claims.pop(member, set()))
        stream.busy.discard(member)
        self.feeder_news.fire()

    def claim(self, stream: Stream, member: tuple[int, int]) -> tuple[int, int] | None:
        if not stream.free and len(stream.taken) < stream.groups and self.fed:
            group = self.fed.popleft()
            stream.taken.append(group)
            stream.free += [(group, i) for i in range(self.random.randint(1, 3))]
            stream.steps |= set(stream.free)
            self.send("feeder", e.GroupTaken(group, stream.update))
        if not stream.free:
            return None
        step = stream.free.pop(0)
        stream.claims[member].add(step)
        return step

    def complete(self, stream: Stream) -> bool:
        """Whether the core may close the update: every micro-step is in the sum of a living member."""
        members = {(r, i) for r, i in stream.claims if self.cells[r].alive and self.cells[r].incarnation == i}
        whole = len(stream.taken) == stream.groups and not stream.free and not stream.busy
        return whole and members == set(stream.claims)

    def stepped(self, stream: Stream) -> None:
        parts = [*stream.claims.values(), stream.kept]
        assert sum(map(len, parts)) == len(stream.steps) and set().union(*parts) == stream.steps  # 8
        assert stream.taken
        for group in stream.taken:
            assert group not in self.trained  # 12
            self.trained[group] = stream.update

    # -- versions ----------------------------------------------------------------------------------------------------
    def committed(self, commit: c.Commit) -> None:
        assert commit.version == self.version + 1
        self.version, self.cursor = commit.version, commit.cursor

    def check_version(self, version: int) -> None:
        assert version <= self.version  # 15: engines load committed versions only

    def crashed(self, seed: int = 0, chances: Chances | None = None, lost_specs: int = 0) -> World:
        """The world of the next attempt after everything died at this moment; only what is on disk is left.

        The last `lost_specs` specs had not been written yet.
        """
        specs = dict(self.specs)
        for n in sorted(specs, reverse=True)[:lost_specs]:
            if n not in self.tries:
                del specs[n]
        issued = {n: self.tries.get(n, 0) for n in specs}
        outcomes = [self.outcomes[n] for n in specs if n in self.outcomes]
        state = SchedulerState.resume(self.settings, self.cursor, issued, outcomes)
        world = World(self.settings, seed, chances or self.chances, state)
        world.specs, world.tries, world.outcomes = specs, dict(self.tries), dict(self.outcomes)
        world.closed = Counter(outcome.n for outcome in outcomes)
        world.cursor, world.version, world.fate = self.cursor, self.version, self.fate
        trained = Ranges(self.cursor["trained"]) if self.cursor else Ranges()
        world.trained = {group: update for group, update in self.trained.items() if group in trained}
        return world

    # -- what happened -----------------------------------------------------------------------------------------------
    def commands(self, kind: type[c.Command]) -> list[Any]:
        return [command for _, command in self.log if isinstance(command, kind)]

    def events(self, kind: type[e.Event]) -> list[Any]:
        return [event for _, event in self.facts if isinstance(event, kind)]
