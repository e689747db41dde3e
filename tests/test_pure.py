"""The modules that have to be pure say so, and whatever they import, however deep, is pure or harmless.

`test_rooms` checks each module that calls itself pure; here is the list that must, and the way a fault came in.
"""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.test_rooms import IMPURE, MODULES, PURE, ROOT, imports

#: By room, as in docs/architecture.md: everything that a simulator has to be able to drive, or a test to predict.
MUST_BE_PURE = {
    "gyre.config",
    "gyre.config_section",
    "gyre.config_train",
    "gyre.errors",
    "gyre.events",
    "gyre.figures",
    "gyre.selftest",
    "gyre.splice",
    "gyre.cell.kv_index",
    "gyre.cell.machine",
    "gyre.cell.stand_in_request",
    "gyre.cell.stand_in_script",
    "gyre.cell.stand_in_text",
    "gyre.launch.identity",
    "gyre.launch.plan",
    "gyre.launch.script",
    "gyre.proxy.chat",
    "gyre.proxy.encoding",
    "gyre.proxy.history",
    "gyre.proxy.routing",
    "gyre.proxy.sound",
    "gyre.timeline",
    "gyre.timeline_cells",
    "gyre.simulate.candidate",
    "gyre.simulate.plan",
    "gyre.simulate.workload",
    "gyre.training.choosing",
    "gyre.training.filling",
    "gyre.training.ledger",
    "gyre.training.packing",
    "gyre.training.schedule",
    "gyre.training.statistics",
    "gyre.training.supply",
    "gyre.trajectories.advantages",
    "gyre.trajectories.sample",
    "gyre.trajectories.tree",
    *(name for name in MODULES if name.startswith("gyre.proxy.dialects.")),
    *(name for name in MODULES if name.startswith("gyre.scheduler.") and name != "gyre.scheduler.loop"),
}
HEAVY = {"torch", "vllm", "deepspeed", "aiohttp", "transformers", "submitit", "rich"}


@pytest.mark.parametrize("name", sorted(MUST_BE_PURE))
def test_it_says_that_it_is_pure(name: str) -> None:
    assert name in MODULES, f"{name} has moved: renew the list"
    assert name in PURE, f'the docstring of {name} must say "Pure."'


def impure_path(name: str, seen: set[str]) -> list[str]:
    """The imports that lead from a module to an impure one; empty where none do."""
    if name.split(".")[0] in IMPURE or name in IMPURE:
        return [name]
    if name not in MODULES or name in seen:
        return []
    seen.add(name)
    for imported in sorted(imports(ast.parse(MODULES[name].read_text()))):
        if path := impure_path(imported, seen):
            return [name, *path]
    return []


@pytest.mark.parametrize("name", sorted(MUST_BE_PURE))
def test_nothing_impure_is_behind_it(name: str) -> None:
    assert not (path := impure_path(name, set())), " imports ".join(path)


def test_the_walk_finds_what_is_impure() -> None:
    assert impure_path("gyre.scheduler.loop", set())
    assert impure_path("gyre.cell.supervisor", set())


def test_the_scheduler_loads_nothing_heavy() -> None:
    code = "import sys, gyre.scheduler.state; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & HEAVY
