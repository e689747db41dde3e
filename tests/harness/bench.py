"""A harness host with a real store, a real proxy child and a fake engine; harnesses are small Python programs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from gyre import config as configuration
from gyre.harness.host import HostSupervisor
from gyre.launch.identity import Identity
from gyre.run_dir import RunDir
from gyre.store import Store
from tests.proxy.fake_engine import SECRET, FakeEngine

#: What a harness program may use: ask(text) -> answer, and its task.
PRELUDE = """
import json, os, sys, time, urllib.request
task = json.load(open(os.environ["GYRE_TASK"]))
def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


@dataclass
class Context:
    """A host's place in a run."""

    config: configuration.Config
    run_dir: RunDir
    store: Store
    scratch: Path
    attempt: int = 1
    incarnation: int = 1
    secret: str = SECRET
    rank: int = 5
    identity: Identity = Identity(5, 6, 5, "key", "local", "1")

    def log(self, name: str) -> Path:
        return self.run_dir.attempt(self.attempt) / f"{name}-{self.rank}.log"


@dataclass
class Bench:
    """A host under test; `events` is all it reported."""

    context: Context
    engine: FakeEngine
    host: HostSupervisor
    events: list = field(default_factory=list)
    version: int = 0

    def send(self, **message) -> None:
        """A message to the host."""
        self.context.store.send(f"host/{self.context.rank}/{self.context.incarnation}", message)

    def routes(self, up: bool = True, moves: dict | None = None) -> None:
        """Publish the engine, or that there is none."""
        self.version += 1
        engines = {"0": self.engine.entry() if up else None}
        self.send(message="routes", version=self.version, engines=engines, moves=moves or {})

    def grant(self, n: int, program: str | None = None, number: int = 1, **task) -> None:
        """Write the spec and grant it; `program` is what the harness runs."""
        directory = self.context.run_dir.execution(n)
        directory.mkdir(parents=True, exist_ok=True)
        spec = {"n": n, "group": n, "member": 0, "task": {"id": str(n), "program": program, **task}, "attempt": 1}
        self.context.run_dir.spec(n).write_text(json.dumps(spec))
        self.send(message="grant", n=n, try_number=number, engine=0)

    async def event(self, kind: str, n: int | None = None, seconds: float = 20.0):
        """The first event of a kind (of an execution), waited for."""
        deadline = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < deadline:
            for event in self.events:
                if event.kind == kind and (n is None or event.n == n):
                    return event
            await asyncio.sleep(0.01)
        raise AssertionError(f"no {kind} of {n} in {self.events}")

    def outcome(self, n: int):
        """The outcome file of an execution."""
        return json.loads(self.context.run_dir.outcome(n).read_text())

    def log(self, n: int, number: int = 1) -> str:
        """What its harness printed."""
        return (self.context.run_dir.try_dir(n, number) / "harness.log").read_text()


def config(tmp_path: Path, **harness) -> configuration.Config:
    """A run whose harness runs the program that is in its task."""
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "x.safetensors").write_text("")
    (model / "tokenizer.json").write_text("{}")
    (tmp_path / "harness.py").write_text(PRELUDE + 'exec(task["program"])\n')
    (tmp_path / "score.py").write_text('def score(workspace, task):\n    return task.get("score", 0.5)\n')
    data = {
        "model": {"path": str(model), "dtype": "float32"},
        "tasks": {"path": "unused"},
        "harness": {
            "command": [sys.executable, "{root}/harness.py"],
            "timeout": 10.0,
            "score": {"function": "score.py:score"},
            **harness,
        },
        "cells": {"count": 1, "slots": 4, "gpus": 0},
        "scheduler": {"batch_groups": 1, "group_size": 2},
        "train": {"updates": 1},
        "root": str(tmp_path),
    }
    return configuration.build(data)


@contextlib.asynccontextmanager
async def bench(tmp_path: Path, engine: FakeEngine | None = None, **harness):
    """Start everything; ends with nothing left running."""
    run_dir = RunDir(tmp_path / "run")
    if not run_dir.path.exists():
        run_dir.create().attempt(1).mkdir()
    store = Store.host("gyre/run/1", "127.0.0.1")
    context = Context(config(tmp_path, **harness), run_dir, store, tmp_path / "scratch")
    context.scratch.mkdir(exist_ok=True)  # which a rank makes, and removes
    engine = await (engine or FakeEngine(0)).start()
    it = Bench(context, engine, None)
    it.host = HostSupervisor(context, it.events.append)
    await it.host.start()
    it.running = asyncio.create_task(it.host.run())
    it.routes()
    try:
        yield it
    finally:
        it.running.cancel()
        await asyncio.gather(it.running, return_exceptions=True)
        await it.host.stop()
        await engine.stop()
        shutil.rmtree(context.scratch)
    assert it.events[0].kind == "rank_ready" and it.events[0].node == "localhost"
