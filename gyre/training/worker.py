"""One worker of a cell: its part of the model, and what it does with it.

A cell has `stages x shards` workers; number w holds shard `w % shards` of stage `w // shards`. All of them carry the
same operations out in the same order, so that whoever has to meet another one does: the shards of a stage in the
default process group of torch, which is all that DeepSpeed sees; the stages over links of their own; and across cells
the workers of the same stage and shard in their prefix groups. Operations return what JSON can tell.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gyre import config as configuration
from gyre.checksum import sums
from gyre.errors import ReduceFailed
from gyre.faults import fault
from gyre.run_dir import RunDir
from gyre.store import Store
from gyre.training.batch import Batch
from gyre.training.core import CoreModel, begin_world
from gyre.training.gradients import Groups, reduce_to_root
from gyre.training.links import connect
from gyre.training.model import DTYPES, SatelliteModel, trim_heap, trimmed
from gyre.training.packing import MicroStep
from gyre.training.pipeline import Done, Pipeline, Shape
from gyre.training.pulling import reach
from gyre.training.slots import fill
from gyre.training.stages import EMBEDDING, has_tied_embeddings
from gyre.training.timed import TimedCore, TimedSatellite

log = logging.getLogger(__name__)

_GROUP_TIMEOUT = 60.0


@dataclass(frozen=True)
class Start:
    """What all workers of a cell are started with; see `gyre.training.trainer`."""

    run_dir: str
    rank: int
    store: tuple[str, int]
    prefix: str
    model: str  # directory of the model
    weights: str  # directory of the weights that the core begins with
    address: str


class Worker:
    """The operations of one worker."""

    def __init__(self, start: Start, number: int, meeting: dist.Store) -> None:
        """Build the model; `meeting` is a store that the workers of this cell share. `join` is what follows.

        Raises:
            UserError: this worker's part of the model cannot be trained like that.
        """
        self.config = configuration.load(RunDir(start.run_dir).config)
        train = self.config.train
        self.number, self.rank = number, start.rank
        self.stage, self.shard = divmod(number, self.config.shards)
        self._core = start.rank == 0
        self._address = start.address
        self._device = torch.device("cuda", number) if self.config.cells.gpus else torch.device("cpu")
        self._update = 0
        self._total: torch.Tensor | None = None  # of the last reduce, at the core
        torch.set_num_threads(train.threads)
        torch.manual_seed(self.config.seed)
        mine = dist.PrefixStore(f"stage{self.stage}", meeting)
        begin_world(self._device, self.config.network.interface, self.shard, self.config.shards, mine)
        store = Store.connect(start.prefix, start.store[0], int(start.store[1]))
        self._groups = Groups(
            lambda: store.clone().torch_store,
            start.rank,
            self._device,
            start.address,
            _GROUP_TIMEOUT,
            f"{self.stage}.{self.shard}",
        )
        self._meeting, self._directory = meeting, Path(start.model)
        self.model = self._build(self._directory, Path(start.weights))
        self._pipeline: Pipeline | None = None
        self._tied = False

    def _build(self, model: Path, weights: Path) -> CoreModel | SatelliteModel | TimedCore | TimedSatellite:
        config = self.config
        if config.train.kind == "timed":
            return TimedCore(weights, config) if self._core else TimedSatellite(model, config)
        if self._core:
            return CoreModel(weights, config, self._device, self.stage, model)
        return SatelliteModel(model, config, self._device, self.stage)

    def join(self) -> None:
        """Link this stage with its neighbours; when all are built, for until then one may have to say what is wrong."""
        stages, lanes = self.config.train.stages, 2 if self.config.train.kl else 1
        if stages == 1:
            return
        store = dist.PrefixStore(f"links/{self.shard}", self._meeting)
        links = connect(store, self.stage, stages, self._device, "127.0.0.1")  # a cell is on one host
        shape = Shape(self.model.scorer.hidden_size, DTYPES[self.config.model.dtype], lanes)
        self._pipeline = Pipeline(self.model, self.stage, stages, links, shape, self._device)
        self._tied = has_tied_embeddings(self._directory)

    # -- weights -----------------------------------------------------------------------------------------------------
    def specs(self) -> dict[str, Any]:
        """Name, type and shape of each tensor that this worker's stage has."""
        listed = [[spec.name, str(spec.dtype).removeprefix("torch."), list(spec.shape)] for spec in self.model.specs]
        return {"specs": listed}

    def sums(self) -> dict[str, Any]:
        """The checksum's sums of its weights."""
        return {"sums": {group: list(pair) for group, pair in sums(self.model.named()).items()}}

    def load(self, word: str, secret: str, file: str | None = None) -> None:
        """Take its weights out of the snapshot that `word` announced, or out of a pulled file of it, verified.

        Raises:
            WeightsMismatch: they do not fit the model, or are not what was announced.
        """
        with reach(word, secret, self._address, file, self.config.network.weights) as source:
            self.model.load(source)

    def fill(self, path: str) -> dict[str, Any]:
        """Write its weights into a slot; one shard of each stage does, and the others help it where it needs them."""
        if self.shard == 0:
            return asdict(fill(path, self.model.named()))
        for _ in self.model.named():
            pass
        return {"sums": {}, "digests": {}}

    # -- memory ------------------------------------------------------------------------------------------------------
    def wake(self) -> None:
        """Take device memory back; a satellite takes it with the weights that it loads."""
        if self._core:
            self.model.wake()

    def park(self, keep_sum: bool) -> None:
        """Give device memory back."""
        if self._core:
            self.model.park(keep_sum=keep_sum)
        else:
            self.model.park()

    def memory(self) -> dict[str, int]:
        """Bytes held by what for."""
        return self.model.memory()

    # -- updates -----------------------------------------------------------------------------------------------------
    def begin(self, update: int) -> None:
        """Start new sums from zero."""
        self._update = update
        self.model.accumulators.begin()

    def feed(self, step: MicroStep) -> dict[str, Any]:
        """Compute a micro-step: {"done": [[id, statistics or None], ...]}."""
        if self.number:
            fault(f"update:{self._update}:claimed", self.rank, self.number)
        if self._pipeline is None:
            return {"done": [[step.id, asdict(self.model.compute(step))]]}
        with trimmed():
            return _told(self._pipeline.feed(step.id, Batch.of(step, self._device)))

    def drain(self) -> dict[str, Any]:
        """Finish what is in flight."""
        return _told([] if self._pipeline is None else self._pipeline.drain())

    def fold(self) -> None:
        """Bring the two sums of tied embeddings that are on two stages together, on the first one."""
        if self._pipeline is not None and self._tied and self.model.shared is not None:
            self._pipeline.fold(self.model.accumulators.piece(self.model.shared))

    def groups(self, group: str, ranks: list[int]) -> dict[str, Any]:
        """Build the groups of all prefixes of `ranks` that this cell is in; {"failed": why, or None}."""
        try:
            self._groups.build_prefixes(group, ranks)
        except ReduceFailed as error:
            return {"failed": str(error)}
        return {"failed": None}

    def keep_only(self, group: str) -> None:
        """Drop the groups of other names."""
        self._groups.keep_only(group)

    def forget(self, group: str, ranks: list[int]) -> None:
        """Drop a group that failed."""
        self._groups.forget(group, ranks)

    def reduce(
        self,
        group: str,
        ranks: Sequence[int],
        called_off: Callable[[], bool],
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Add the sums of the same worker of all these ranks up, aside, at the first of them.

        Raises:
            ReduceFailed: it failed, or was called off.
        """
        if self.number:
            fault(f"update:{self._update}:reducing", self.rank, self.number)
        made = self._groups.get(group, ranks, called_off)
        source = self.model.accumulators.flat.data
        self._total = torch.empty_like(source) if self._core else None
        reduce_to_root(made, source, self._total, called_off, progress)

    def accept(self) -> None:
        """The total of the last reduce is the sum now."""
        self.model.accumulators.flat.data.copy_(self._total)
        self._total = None

    def discard(self) -> None:
        """The total of the last reduce is of no use: its memory is wanted for what is to be computed again."""
        self._total = None

    # -- the core's step and its state -------------------------------------------------------------------------------
    def square_sum(self) -> dict[str, float]:
        """Sum of the squares of what this worker owns of the gradients' sum: {"square_sum"}."""
        return {"square_sum": self.model.square_sum()}

    def step(self, scale: float, lr: float) -> None:
        """Take an optimizer step on the sum times `scale`, at a learning rate; none where the scale is 0."""
        self.model.step(scale, lr)

    def refresh(self, word: str, secret: str) -> None:
        """Take the copy of a tied embedding out of the snapshot that `word` announced, where this stage has one."""
        if self.config.train.stages > 1 and self.model.scorer.tied is not None:
            with reach(word, secret, self._address, how=self.config.network.weights) as source:
                source.copy_into({EMBEDDING: self.model.scorer.tied.data})

    def save(self, directory: str, tag: str) -> None:
        """Write weights and optimizer state under a tag."""
        self.model.save(Path(directory), self._tag(tag))
        trim_heap()

    def restore(self, directory: str, tag: str) -> None:
        """Load weights and optimizer state of a tag."""
        self.model.restore(Path(directory), self._tag(tag))

    def _tag(self, tag: str) -> str:
        return tag if self.config.train.stages == 1 else f"{tag}/stage{self.stage}"


def _told(done: Sequence[Done]) -> dict[str, Any]:
    return {"done": [[id, None if known is None else asdict(known)] for id, known in done]}
