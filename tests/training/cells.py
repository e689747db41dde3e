"""A small world for tests of training: a store, a feeder and trainers, all real, around a tiny random model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

from gyre import config as configuration
from gyre.child import Child
from gyre.run_dir import RunDir
from gyre.shared_memory import remove_shared
from gyre.store import Store
from gyre.training import snapshots
from gyre.trajectories.sample import Sample
from tests.training.nest import Nest

SECRET = "open sesame"
VOCABULARY = 96
EXACT = 1e-5
PATIENCE = 8.0  # seconds until a silent member is barred
FEEDER = Path(__file__).with_name("feeder_program.py")


def make_model(directory: Path, seed: int = 0, tied: bool = True, **sizes: int) -> Path:
    """A random Qwen3 of 50 thousand parameters, in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    usual = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
    }
    shape = Qwen3Config(**usual | sizes)
    Qwen3ForCausalLM(shape).save_pretrained(directory)
    return directory


def make_config(dtype: str = "float32", **train) -> configuration.Config:
    """A configuration for these tests."""
    options = {"updates": 20, "lr": 1e-3, "clip_norm": 0.5, "weight_decay": 0.01, "micro_tokens": 96, **train}
    return configuration.build(
        {
            "name": "cells",
            "seed": 3,
            "model": {"path": "unused", "dtype": dtype},
            "tasks": {"path": "unused"},
            "harness": {"command": ["true"], "score": {"command": ["true"]}},
            "cells": {"count": 3, "slots": 1, "gpus": 0},
            "scheduler": {"batch_groups": 4, "group_size": 2},
            "train": options,
        }
    )


def make_sample(n: int, group: int, version: int = 0) -> Sample:
    """The sample of execution n: a function of n alone."""
    random = np.random.default_rng(n)
    length = int(random.integers(8, 40))
    trained = random.random(length) < 0.5
    trained[0], trained[-1] = False, True
    return Sample(
        execution=n,
        group=group,
        tokens=random.integers(0, VOCABULARY, length).astype(np.int32),
        trained=trained,
        logprobs=np.where(trained, -random.uniform(3.5, 5.5, length), 0).astype(np.float32),
        versions=np.where(trained, version, -1).astype(np.int32),
        temperatures=np.where(trained, random.uniform(0.7, 1.3, length), 1).astype(np.float32),
    )


class Cells:
    """The world; `async with`."""

    def __init__(
        self, path: Path, model: Path, config: configuration.Config, attempt: int = 1, nest: Nest | None = None
    ) -> None:
        self.run_dir = RunDir(path).create()
        self.model = model
        self.config = config
        self.attempt = attempt
        self.run_dir.config.write_text(configuration.dump(config))
        self.prefix = f"gyre/{path.name}/{attempt}"
        self.trainers: dict[int, Child] = {}
        self.incarnations: dict[int, int] = {}
        self.events: list[dict] = []
        self.generation = 1
        self._spawn = nest.spawn if nest else Child.spawn
        self._event = asyncio.Event()

    async def __aenter__(self) -> Cells:
        self.store = Store.host(self.prefix, "127.0.0.1")
        self.feeder = await self._spawn(
            "feeder", [sys.executable, str(FEEDER), str(self.run_dir.path)], self.log("feeder"), self.on_event("feeder")
        )
        url = (await self.feeder.call("start", 60, secret=SECRET, address="127.0.0.1"))["url"]
        self.store.set("feeder", url)
        self.weights = await self._spawn(
            "snapshots", [sys.executable, "-m", "gyre.training.snapshots"], self.log("snapshots")
        )
        answer = await self.weights.call(
            "start", 60, run_dir=str(self.run_dir.path), attempt=self.attempt, secret=SECRET, address="127.0.0.1"
        )
        self.store.set("snapshots", answer["url"])
        return self

    async def __aexit__(self, *_) -> None:
        children = [*self.trainers.values(), self.feeder, self.weights]
        await asyncio.gather(*(child.stop() for child in children))
        remove_shared(self.run_dir.path)

    def log(self, name: str) -> Path:
        return self.run_dir.path / f"{name}.log"

    def on_event(self, source):
        def on_event(event):
            self.events.append({"from": source, **event})
            self._event.set()

        return on_event

    async def seen(self, timeout: float = 30, **wanted) -> dict:
        """Wait for an event with these fields; a function says which values of a field are meant."""

        def meant(found, value) -> bool:
            return bool(found is not None and value(found)) if callable(value) else found == value

        async with asyncio.timeout(timeout):
            while True:
                for event in self.events:
                    if all(meant(event.get(key), value) for key, value in wanted.items()):
                        return event
                self._event.clear()
                await self._event.wait()

    def parts_of(self, update: int, rank: int) -> list[dict]:
        """The last word of each part that a member took in an update, where it computed anything."""
        said = [e for e in self.events if (e["from"], e["type"], e.get("update")) == (rank, "progress", update)]
        return [e for i, e in enumerate(said) if i + 1 == len(said) or said[i + 1]["micro_steps"] == 1]

    async def spawn(self, rank: int, address: str = "127.0.0.1", **env: str) -> dict:
        """Start (or restart) a trainer."""
        self.incarnations[rank] = self.store.add(f"incarnation/{rank}", 1)
        child = await self._spawn(
            "trainer",
            [sys.executable, "-m", "gyre.training.trainer"],
            self.log(f"trainer-{rank}"),
            self.on_event(rank),
            {"OMP_NUM_THREADS": "1", **env},
        )
        self.trainers[rank] = child
        return await child.call(
            "start",
            120,
            run_dir=str(self.run_dir.path),
            attempt=self.attempt,
            rank=rank,
            incarnation=self.incarnations[rank],
            store=["127.0.0.1", self.store.port],
            prefix=self.prefix,
            secret=SECRET,
            model=str(self.model),
            address=address,
            scratch=str(self.run_dir.path),
            patience=PATIENCE,
        )

    def train(self, update: int, rank: int, position: int, members: list[int]) -> asyncio.Task:
        """Order a cell into an update."""
        call = self.trainers[rank].call(
            "train", 60, update=update, position=position, generation=self.generation, members=members
        )
        return asyncio.create_task(call)

    async def build_groups(self, members: list[int]) -> None:
        """Have the groups of all prefixes of these cells built, by all of them at once."""
        calls = [self.trainers[rank].call("groups", 30, generation=self.generation, ranks=members) for rank in members]
        await asyncio.gather(*calls)
        assert self.store.get(f"groups/g{self.generation}/dead") is None

    def close_execution(self, n: int, score: float) -> None:
        """The outcome file that the feeder reads."""
        self.run_dir.execution(n).mkdir(parents=True, exist_ok=True)
        self.run_dir.outcome(n).write_text(json.dumps({"n": n, "score": score}))

    async def feed(self, *groups: int) -> None:
        """Feed groups of two executions, scored 0 and 1."""
        for group in groups:
            for n, score in zip(executions_of(group), (0.0, 1.0), strict=True):
                self.close_execution(n, score)
            await self.feeder.call("feed", 30, group=group, executions=executions_of(group))

    def weights_of(self, snapshot: int) -> dict:
        """A copy of a snapshot's tensors."""
        with snapshots.pull(self.store, snapshot, None, SECRET, "127.0.0.1", 10, verify=True) as pulled:
            return {name: tensor.clone() for name, tensor in pulled.tensors()}


class Compared:
    """Checks an update's outcome against the reference."""

    def __init__(self, cells: Cells, reference: Reference) -> None:
        self.cells = cells
        self.reference = reference
        self.distances: dict[int, float] = {}
        self.norms: dict[int, float] = {}  # relative distances

    def check(self, update: int, groups: list[int], answer: dict, micro_steps_of: set[str]) -> None:
        assert answer["how"] == "done", answer
        assert {rank for rank, count in answer["micro_steps"].items() if count} == micro_steps_of
        norm = self.reference.update(groups)
        self.norms[update] = abs(answer["metrics"]["grad_norm"] / norm - 1)
        self.distances[update] = self.reference.distance(self.cells.weights_of(update))
        assert self.norms[update] < EXACT, self.norms
        assert self.distances[update] < EXACT, self.distances
        assert answer["metrics"]["groups"] == len(groups)
        taken = sorted(e["group"] for e in self.cells.events if e["type"] == "taken" and e["update"] == update)
        assert taken == groups


@contextlib.asynccontextmanager
async def frozen(cells: Cells, *ranks: int):
    """Stop these trainers, all their workers, for a while; the claims that they had sent come back empty first."""
    for rank in ranks:
        os.killpg(cells.trainers[rank].pid, signal.SIGSTOP)
    await asyncio.sleep(1.2)
    try:
        yield
    finally:
        for rank in ranks:
            os.killpg(cells.trainers[rank].pid, signal.SIGCONT)


async def idle(cells: Cells, update: int, taken: int) -> dict:
    """Wait until these groups are taken and every micro-step is finished; returns the feeder's event."""
    async with asyncio.timeout(30):
        while True:
            known = [e for e in cells.events if e["type"] == "stream" and e["update"] == update]
            if known and known[-1]["taken"] == taken and known[-1]["finished"] == known[-1]["published"]:
                return known[-1]
            await asyncio.sleep(0.02)


def groups_of(update: int) -> list[int]:
    """The six groups of an update."""
    return [10 * update + i for i in range(6)]


def working(answer: dict) -> set[str]:
    """Ranks that have micro-steps in an update."""
    return {rank for rank, count in answer["micro_steps"].items() if count}


def executions_of(group: int) -> list[int]:
    """The executions of a group in these tests."""
    return [2 * group, 2 * group + 1]


class Reference:
    """The update that one process computes, in plain torch: one sample at a time, full logits, AdamW."""

    def __init__(self, directory: Path, config: configuration.Config) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.config = config.train
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.config.lr, betas=self.config.betas, weight_decay=self.config.weight_decay
        )

    def update(self, groups: list[int]) -> float:
        """Train on groups of two executions with advantages -1 and 1 (scaled as `group_relative` does)."""
        from gyre.trajectories.advantages import group_relative

        torch, total = self.torch, 0.0
        self.optimizer.zero_grad()
        for group in groups:
            for n, advantage in zip(executions_of(group), group_relative([0.0, 1.0]), strict=True):
                sample = make_sample(n, group)
                tokens = torch.from_numpy(sample.tokens).long()
                logits = self.model(input_ids=tokens[None]).logits[0].double()
                logits = logits / torch.from_numpy(sample.temperatures).double().roll(-1)[:, None]
                current = torch.log_softmax(logits, -1)[:-1].gather(1, tokens[1:, None])[:, 0]
                ratio = (current - torch.from_numpy(sample.logprobs).double()[1:]).exp()
                clip, most = self.config.clip_ratio or 0.2, self.config.truncation or float("inf")
                truncated = ratio * (most / ratio.detach()).clamp(max=1)
                value = torch.minimum(truncated * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
                mask = torch.from_numpy(sample.trained)[1:]
                share = 1.0 if self.config.averaging == "token" else 1.0 / float(mask.sum())
                (-value[mask].sum() * share).backward()
                total += float(mask.sum()) * share
        for parameter in self.model.parameters():
            parameter.grad.div_(total)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        return float(norm)

    def distance(self, weights: dict) -> float:
        """Largest difference to named weights."""
        own = dict(self.model.named_parameters())
        assert own.keys() == weights.keys()
        return max(float((own[name].data - tensor).abs().max()) for name, tensor in weights.items())
