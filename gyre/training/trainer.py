"""The trainer child of a cell: the same program for the core and for satellites.

    python -m gyre.training.trainer            (spawned with `gyre.child.Child`; OMP_NUM_THREADS = train.threads and,
                                                on a GPU cell, CUDA_VISIBLE_DEVICES are set by the parent)

It stays alive across role changes. Operations, their arguments and what they return (times in seconds, sizes in
bytes); an operation that fails is answered with an error, and its effect on an update is nil (invariant 8):

start(run_dir, attempt, rank, incarnation, store=[host, port], prefix, secret, model, address, scratch, patience=30,
      work_limit=600)
    Builds the model of directory `model` under the run directory's configuration, and parks. Rank 0 is the core: it
    loads the latest commit (or the model's weights where there is none), wraps them in DeepSpeed, and writes and
    announces snapshot `version * updates_per_batch`. A satellite has no weights before its first update. `prefix` is
    that of the store's keys, `address` this node's, as other ranks reach it; `patience` the seconds without a life
    sign after which the core bars a member, `work_limit` those after which one piece of work counts as stuck: a
    satellite then gives no more life signs, and the core ends its process. On GPUs where `cells.gpus` > 0, a worker to
    each. This process is the lead of the cell's workers (`gyre.training.crew`): it starts the others, which end with
    it, and it ends when one of them does.
    -> {"seconds", "parameters", "version", "snapshot", "checksum"}     (the last three from the core alone)
wake()       take device memory back, before the first train after a park -> {"seconds"}
park()       give device memory back: a satellite's weights, gradients and accumulators; the core's gradients and
             accumulators (and on a GPU its weights and optimizer state go to CPU memory); a partial sum of a
             suspended update is kept. A no-op while parked -> {"seconds"}
groups(generation, ranks)
    Build the process groups of a generation: one for every prefix of `ranks` (all living cells, in prefix order) that
    this cell is in. All its cells must do it at about the same time. -> {}
train(update, position, generation, members)
    This cell's part in an update; it returns when that is over. `position` is this cell's place in the prefix (0: the
    core), `members` are the ranks of the generation in prefix order. Wakes by itself where wake was not called.
    Satellites need not wait for UpdateOpened. For the core
    -> {"how": "done", "members": k, "micro_steps": {rank: count}, "snapshot", "checksum", "seconds",
        "metrics": {"grad_norm", "skipped", "lr", what `Statistics.metrics` names, "cell_seconds", "seconds_compute",
                    "seconds_wait", "seconds_reduce", "seconds_step", "seconds_snapshot"}}
       or {"how": "suspended", "members": k}: train the same update again to go on, its partial sum is kept
       `seconds` is the core's time in the update, without that between a suspension and going on; those in `metrics`
       are of all its parts too: what it did itself, and in `cell_seconds` the computing of all members.
       `metrics` has what the feeder says of the data besides: "groups", "sequence_tokens", "fill", "staleness_mean",
       "staleness_max", "reward".
    For a satellite -> {"how": "done" | "suspended" | "missed" | "failed", "micro_steps": count, "detail", "seconds"}
       missed: the window had closed, it took no part; failed: it was barred, its micro-steps went to others.
commit(version, update, cursor)
    Core only, after the last update of a batch: makes policy `version` durable with `cursor` (any JSON) beside it.
    -> {"version", "update", "checksum", "bytes", "seconds"}
memory()     -> {"weights", "gradients", "accumulators", "optimizer"}, bytes held now by all workers
checksum()   -> {"checksum", "snapshot"} of the weights held now (`gyre.checksum`); snapshot -1 where there are none
stop()       removes this process's shared memory; the process ends when the parent closes -> {}

Where `train.kind` is timed the model computes nothing (`gyre.training.timed`), and all this is the same.

Events: {"type": "opened", "update"}             the core opened the stream (or opened it again)
        {"type": "joined", "update", "position"} this satellite is in
        {"type": "progress", "update", "micro_steps", "tokens", "seconds"}
                                                 after each micro-step; totals of this member's part
        {"type": "stage", "stage", "update"}     pulling, training, waiting, reducing, stepping, writing; for people

It connects to the store itself, with `Store.connect(prefix, host, port)`, and finds the feeder's URL in the store
word `feeder` and the weight server's in `snapshots`. Shared memory is `/dev/shm/gyre-<run>-<hash>-<attempt>-slot<i>`.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gyre import checkpoint
from gyre import config as configuration
from gyre.checksum import add, combine
from gyre.child import Endpoint
from gyre.errors import ChildFailed, InvariantBroken, StreamConflict, WeightsMismatch
from gyre.faults import fault
from gyre.run_dir import RunDir
from gyre.shared_memory import remove_shared, shared_prefix
from gyre.store import Store
from gyre.training import snapshots
from gyre.training.crew import Crew
from gyre.training.objectives import Objective, gradient_scale
from gyre.training.part import Desk, Sum
from gyre.training.schedule import lr_at
from gyre.training.slots import Filled, Slots, Spec
from gyre.training.stream import WORK_SECONDS, Claims, Pulse, beating
from gyre.training.update import CorePart, SatellitePart
from gyre.training.worker import Start

log = logging.getLogger(__name__)

_JOIN_TIMEOUT = 600.0
_PULL_TIMEOUT = 120.0


class Trainer:
    """The operations of the module's docstring, by the lead of a cell's workers."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._crew: Crew | None = None
        self._specs: list[Spec] = []  # of the whole model
        self._snapshot = -1  # the one whose weights are held; -1 for none
        self._sum: Sum | None = None  # of a suspended update, at the core
        self._slots: Slots | None = None
        self._claims: Claims | None = None
        self._checksum = ""

    # -- start -------------------------------------------------------------------------------------------------------
    def start(
        self,
        run_dir: str,
        attempt: int,
        rank: int,
        incarnation: int,
        store: list[Any],
        prefix: str,
        secret: str,
        model: str,
        address: str,
        scratch: str | None = None,
        patience: float = 30.0,
        work_limit: float = WORK_SECONDS,
    ) -> dict[str, Any]:
        """Build the model; see the module's docstring."""
        begun = time.monotonic()
        self._run_dir = RunDir(run_dir)
        self._config = configuration.load(self._run_dir.config)
        self._attempt, self._member, self._secret = attempt, (rank, incarnation), secret
        self._address, self._scratch, self._directory = address, scratch, Path(model)
        self._patience, self._work_limit = patience, work_limit
        self._core = rank == 0
        commit = None
        if self._core:
            remove_shared(self._run_dir.path, keep_attempt=attempt)
            checkpoint.clean(self._run_dir)
            checkpoint.check_division(self._run_dir, self._config)
            commit = checkpoint.latest(self._run_dir)
        weights = commit.model(self._run_dir) if commit else self._directory
        start = Start(run_dir, rank, (store[0], int(store[1])), prefix, model, str(weights), address)
        self._crew = Crew.start(start, self._config.train.stages, self._config.shards)
        self._store = Store.connect(prefix, *start.store)
        self._specs = self._all_specs()
        answer = self._start_core(commit) if self._core else {}
        self.park()  # torch keeps freed device memory for itself until it is told to give it back
        answer["parameters"] = sum(spec.bytes // spec.dtype.itemsize for spec in self._specs)
        return answer | {"seconds": time.monotonic() - begun}

    def _all_specs(self) -> list[Spec]:
        """The tensors of all stages, in their order."""
        shards = self._config.shards
        listed = [spec for answer in self._crew.order("specs")[::shards] for spec in answer["specs"]]
        return [Spec(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in listed]

    def _start_core(self, commit: checkpoint.Commit | None) -> dict[str, Any]:
        if commit:
            checkpoint.restore(self._run_dir, commit, self._restore_state, self._checksum_held)
        version = commit.version if commit else 0
        per_batch = self._config.train.updates_per_batch
        # the newest snapshot stays, and so does the policy that is announced; with one update a batch they agree
        self._slots = Slots(
            shared_prefix(self._run_dir.path, self._attempt),
            2 if per_batch == 1 else 3,
            lambda held, new: held == new - 1 or held == (new - 1) // per_batch * per_batch,
        )
        self._publish(version * per_batch)
        return {"version": version, "snapshot": self._snapshot, "checksum": self._checksum}

    # -- weights -----------------------------------------------------------------------------------------------------
    def _publish(self, snapshot: int) -> None:
        """Write the core's weights into a slot, each worker its own, and announce them."""
        with self._slots.begin(snapshot, self._specs) as writing:
            filled = self._crew.order("fill", path=str(writing.path))
            announcement = writing.seal([Filled(**answer) for answer in filled])
        url = self._store.get("snapshots") or ""
        announcement = replace(announcement, node=self._address, url=url)
        if self._config.train.stages > 1:
            self._crew.order("refresh", word=announcement.encode(), secret=self._secret)
        self._snapshot, self._checksum = snapshot, announcement.checksum
        self._store.set(f"snapshot/{snapshot}", announcement.encode())

    def _pull(self, snapshot: int, part: SatellitePart) -> bool:
        """Have the weights of a snapshot; False where the update ended while waiting for them."""
        if self._snapshot == snapshot:
            return True
        part.stage("pulling")
        deadline = time.monotonic() + _JOIN_TIMEOUT
        while (word := self._store.get(f"snapshot/{snapshot}")) is None:
            if part.ended() or time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        self._snapshot = -1
        if self._config.shards == 1:
            self._crew.order("load", word=word, secret=self._secret)
        else:  # shards want the same tensors: they come to this host once
            how = self._config.network.weights
            with snapshots.pull(self._store, snapshot, self._scratch, self._secret, self._address, how=how) as pulled:
                self._crew.order("load", word=word, secret=self._secret, file=str(pulled.path))
        self._snapshot = snapshot
        return True

    def _checksum_held(self) -> str:
        """Checksum of what the workers hold.

        Raises:
            WeightsMismatch: the shards of a stage do not hold the same.
        """
        shards, total = self._config.shards, {}
        answers = [answer["sums"] for answer in self._crew.order("sums")]
        for stage in range(self._config.train.stages):
            first, *others = answers[stage * shards : (stage + 1) * shards]
            if any(other != first for other in others):
                raise WeightsMismatch(f"the shards of stage {stage} hold different weights")
            total = add(total, first)
        return combine(total)

    # -- memory ------------------------------------------------------------------------------------------------------
    def wake(self) -> dict[str, Any]:
        """Take device memory back; a satellite takes it with the weights it pulls."""
        begun = time.monotonic()
        self._crew.order("wake")
        return {"seconds": time.monotonic() - begun}

    def park(self) -> dict[str, Any]:
        """Give device memory back."""
        begun = time.monotonic()
        self._crew.order("park", keep_sum=self._sum is not None)
        if not self._core:
            self._snapshot = -1
        return {"seconds": time.monotonic() - begun}

    def memory(self) -> dict[str, Any]:
        """What is held now, by all workers together."""
        answers = self._crew.order("memory")
        if len(answers) > 1:
            log.info("memory by worker: %s", answers)
        return {name: sum(answer[name] for answer in answers) for name in answers[0]}

    def checksum(self) -> dict[str, Any]:
        """Checksum of the weights held now."""
        if self._snapshot < 0:
            return {"checksum": "", "snapshot": -1}
        self.wake()
        return {"checksum": self._checksum_held(), "snapshot": self._snapshot}

    # -- updates -----------------------------------------------------------------------------------------------------
    def groups(self, generation: int, ranks: list[int]) -> None:
        """Build this cell's groups of a generation; all its cells do it at once, each from the smallest one on.

        A generation whose groups do not come about is dead: rounds then make groups of their own, at some cost.
        """
        name = f"g{generation}"
        self._crew.order("keep_only", group=name)
        for answer in self._crew.order("groups", group=name, ranks=ranks):
            if answer["failed"]:
                log.warning("generation %d: %s", generation, answer["failed"])
                self._store.set(f"groups/{name}/dead", "1")

    def _desk(self) -> Desk:
        if self._claims is None:
            url = self._store.wait("feeder", _PULL_TIMEOUT)
            if url is None:
                raise ChildFailed("the feeder was not announced")
            self._claims = Claims(url, self._secret, self._member)
        pulse = Pulse(self._work_limit)
        return Desk(self._store, self._claims, self._member, self._endpoint.emit, pulse, self._patience)

    def train(self, update: int, position: int, generation: int, members: list[int]) -> dict[str, Any]:
        """This cell's part in an update."""
        begun = time.monotonic()
        self.wake()
        self._crew.order("keep_only", group=f"g{generation}")
        if position == 0:
            return self._train_core(update, generation, members, begun)
        return self._train_satellite(update, position)

    def _train_satellite(self, update: int, position: int) -> dict[str, Any]:
        if self._core:
            raise InvariantBroken(5, f"the core cannot be member {position} of an update")
        part = SatellitePart(self._desk(), self._crew, update, position, self._core_member())
        if not self._pull(update - 1, part):
            return {"how": "missed", "micro_steps": 0, "detail": "the window closed before the weights came"}
        self._crew.begin(update)
        how = part.run(_JOIN_TIMEOUT)
        detail = {"missed": "the window had closed", "failed": "barred from the update"}.get(how, "")
        return {"how": how, "micro_steps": len(part.sum.micro_steps), "detail": detail, "seconds": part.clock.seconds}

    def _core_member(self) -> tuple[int, int]:
        return 0, self._store.add("incarnation/0", 0)

    def _train_core(self, update: int, generation: int, members: list[int], begun: float) -> dict[str, Any]:
        if not self._core or self._snapshot != update - 1:
            raise StreamConflict(f"update {update} needs the weights of update {update - 1}, not {self._snapshot}")
        if self._sum is None or self._sum.update != update:
            self._sum = Sum(update)
            self._crew.begin(update)
        total = self._sum
        part = CorePart(self._desk(), self._crew, total, generation, members)
        if part.run() == "suspended":
            total.seconds += time.monotonic() - begun
            return {"how": "suspended", "members": total.most}
        with beating(self._store, update, self._member, part.desk.pulse):
            metrics = self._step(part)
        self._sum = None
        return {
            "how": "done",
            "members": total.most,
            "micro_steps": {str(rank): count for rank, count in sorted(total.by_rank.items())},
            "snapshot": self._snapshot,
            "checksum": self._checksum,
            "seconds": total.seconds + time.monotonic() - begun,
            "metrics": metrics,
        }

    def _step(self, part: CorePart) -> dict[str, float]:
        """The optimizer step and the new snapshot; returns what is worth knowing about the update."""
        update, sums, clock = part.update, part.sum.statistics, part.clock
        begun = time.monotonic()
        part.stage("stepping")
        fault(f"update:{update}:stepping", 0)
        train = self._config.train
        lr = lr_at(train.schedule, train.lr, update, train.updates)
        norm = self._crew.step(gradient_scale(Objective.of(train), sums), train.clip_norm, lr)
        clock.add("step", begun)
        if not math.isfinite(norm):
            log.warning("update %d: the gradient's norm is %s; no step is taken", update, norm)
        part.desk.pulse.beat()
        begun = time.monotonic()
        part.stage("writing")
        self._publish(update)
        clock.add("snapshot", begun)
        return {
            **sums.metrics(),
            "grad_norm": norm,
            "skipped": float(not math.isfinite(norm)),
            "lr": lr,
            **part.sum.numbers,
            "cell_seconds": clock.computed + part.sum.collected,
            **{f"seconds_{stage}": seconds for stage, seconds in clock.seconds.items()},
        }

    # -- commits -----------------------------------------------------------------------------------------------------
    def commit(self, version: int, update: int, cursor: Any) -> dict[str, Any]:
        """Make a policy version durable."""
        self.wake()
        begun = time.monotonic()
        if not self._core or self._snapshot != update:
            raise StreamConflict(f"commit {version} is of update {update}; the weights are those of {self._snapshot}")
        tag = f"v{version}-a{self._attempt}"
        keep, division = self._config.checkpoint.keep, checkpoint.division(self._config)
        record = checkpoint.Commit(version, update, self._attempt, tag, self._checksum, division)
        size = checkpoint.write(self._run_dir, record, cursor, self._save_state, self._export, keep)
        seconds = time.monotonic() - begun
        return {"version": version, "update": update, "checksum": self._checksum, "bytes": size, "seconds": seconds}

    def _save_state(self, directory: Path, tag: str) -> None:
        self._crew.order("save", directory=str(directory), tag=tag)

    def _restore_state(self, directory: Path, tag: str) -> None:
        self._crew.order("restore", directory=str(directory), tag=tag)

    def _export(self, directory: Path) -> None:
        """The newest snapshot as a Hugging Face model."""
        shutil.copyfile(self._slots.path_of(self._snapshot), directory / "model.safetensors")
        for path in self._directory.iterdir():
            if path.suffix in (".json", ".jinja", ".txt", ".model") and not path.name.endswith("index.json"):
                shutil.copyfile(path, directory / path.name)

    def stop(self) -> None:
        """End the other workers and remove shared memory."""
        if self._crew is not None:
            self._crew.close()
        if self._slots is not None:
            self._slots.close()


def main() -> None:
    """Entry point: a child of a supervisor."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    endpoint = Endpoint()
    trainer = Trainer(endpoint)
    operations = (
        trainer.start,
        trainer.wake,
        trainer.park,
        trainer.groups,
        trainer.train,
        trainer.commit,
        trainer.memory,
        trainer.checksum,
        trainer.stop,
    )
    try:
        endpoint.serve({operation.__name__: operation for operation in operations})
    finally:
        trainer.stop()


if __name__ == "__main__":
    main()
