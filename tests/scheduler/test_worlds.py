"""Random worlds, kind and unkind: all invariants hold after every event, and every run ends."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from gyre.events import Tick
from gyre.scheduler import commands as c
from gyre.scheduler.policy import Async, Colocate, Elastic
from gyre.scheduler.settings import Settings
from gyre.scheduler.state import SchedulerState
from tests.scheduler.world import Chances, World

KINDS = ("kind", "failing", "faulty")
SEEDS = 120


def settings(random: Random) -> Settings:
    groups = random.choice([1, 2, 3, 4, 6])
    per_batch = random.choice([u for u in (1, 2, 3) if groups % u == 0])
    lookahead = random.choice([0, 0.25, 0.5, 1.0, 2.0])
    return Settings(
        cells=random.randint(1, 4),
        slots=random.randint(1, 4),
        batch_groups=groups,
        group_size=random.randint(2, 4),
        updates=per_batch * random.randint(1, 4),
        standalone=random.choice([0, 0, 1, 2]),
        hosts=random.randint(1, 3),
        host_executions=random.choice([2, 5, 256]),
        tries=random.randint(1, 3),
        lookahead=lookahead,
        supply_hold=random.choice([0, 2, 10]),
        top_ups=random.randint(0, 3),
        updates_per_batch=per_batch,
        max_staleness=random.choice([v for v in (0, 1, 2, 3) if v >= lookahead]),
        max_lag=random.choice([1, 2]),
    )


def chances(random: Random, kind: str) -> Chances:
    given = Chances(impatient=random.random() < 0.5)
    if kind == "kind":
        return given
    given.unusable = random.choice([0, 0.1, 0.5])
    given.try_failed = random.choice([0, 0.1])
    given.repeated = random.choice([0, 0.2])
    given.delay = random.choice([0, 0.3, 5])
    if kind == "faulty":
        given.micro_seconds = random.choice([(1, 6), (5, 40)])
        given.horizon = random.choice([100, 300, 900])
        given.cell_deaths = random.randint(0, 10)
        given.engine_failures = random.randint(0, 6)
        given.host_deaths = random.randint(0, 4)
        given.false_losses = random.randint(0, 5)
        given.never_back = random.choice([0, 0, 0.5, 1])
        given.part_failed = random.choice([0, 0, 0.1])
    return given


#: Every policy, and how many of the cells only train under it.
POLICIES = {
    "plain": (Elastic.plain(), lambda cells: 0),
    "elastic": (Elastic(), lambda cells: 0),
    "colocate": (Colocate(), lambda cells: 0),
    "async": (Async(), lambda cells: max(1, cells // 2)),
    "async-stream": (Async(streaming=True), lambda cells: max(1, cells // 2)),
}


def world(seed: int, name: str = "elastic") -> World:
    random = Random(seed)
    policy, trainers = POLICIES[name]
    chosen = settings(random)
    if trainers(chosen.cells):
        chosen = replace(chosen, cells=max(2, chosen.cells), trainers=trainers(max(2, chosen.cells)))
    unkind = chances(random, KINDS[seed % 3])
    if chosen.trainers:
        unkind.never_back = 0.0  # nobody takes the place of the cells that roll out
    return World(chosen, seed, unkind, SchedulerState(chosen, policy, lambda group: group % 3))


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("name", POLICIES)
def test_every_run_ends_and_no_invariant_breaks(name, block):
    for seed in range(block * SEEDS // 4, (block + 1) * SEEDS // 4):
        ended = world(seed, name).start().run(limit=30_000).ended
        # A run may end early only by having used up its top-ups.
        assert ended.how == "completed" or "top-ups" in ended.detail, (seed, ended)


def test_the_same_seed_gives_the_same_commands():
    logs = [[repr(command) for _, command in world(seed).start().run().log] for seed in (17, 17)]
    assert logs[0] == logs[1]


def test_worlds_reach_what_they_are_meant_to_reach():
    """The random worlds above are worth their time: every kind of command and of trouble occurs in them."""
    seen = Counter()
    for seed in range(200):
        driven = world(seed).start().run(limit=30_000)
        seen.update(type(command).__name__ for _, command in driven.log)
    kinds = {kind.__name__ for kind in c.Command.__subclasses__()}
    assert kinds - set(seen) == set()


@pytest.mark.parametrize("name", POLICIES)
def test_time_that_passes_is_not_logged(name):
    """A run ticks several times a second; a reason is logged when it changes, whoever else has one."""
    driven = world(3 * 7, name).start()
    for moment in range(1, 40):
        driven.run(until=10.0 * moment)
        if driven.ended:
            break
        driven.state.handle(Tick(), driven.now)
        logged = [command for _ in range(20) for command in driven.state.handle(Tick(), driven.now)]
        assert logged == [], (driven.now, logged)
    assert moment > 5
