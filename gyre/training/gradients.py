"""Sums of gradients: fp32 accumulators of a cell, and their reduction onto the core over a prefix of the cells.

Each cell has a default process group of its own, and DeepSpeed never sees the other cells. Across cells there are raw
process groups over the run's store, one per (name, members): those of every prefix of a generation's cells are built
ahead, so that a satellite that joins an update meets the others at once; those of a round that lost one are made in
that round. A group that failed is dead for good; the next one has another name.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gyre.errors import ReduceFailed

log = logging.getLogger(__name__)

_BUCKET_BYTES = 32 << 20
_POLL_SECONDS = 0.001
_BUCKET_SECONDS = 120.0  # Gloo gives up by itself, earlier; NCCL never does


class Flat:
    """One buffer for the tensors of a list of shapes, whose memory can be given back and taken again.

    All views share one storage, so giving memory back is one call and returns it to the system at once.
    """

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device | str) -> None:
        sizes = [shape.numel() for shape in shapes]
        self.data = torch.empty(sum(sizes), dtype=dtype, device=device)
        parts = self.data.split(sizes)
        self.views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._bytes = self.data.untyped_storage().nbytes()

    @property
    def held(self) -> int:
        """Bytes held now."""
        return self.data.untyped_storage().nbytes()

    def release(self) -> None:
        """Give the memory back; the contents are gone."""
        self.data.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take memory again; the contents are undefined."""
        if self.held == 0:
            self.data.untyped_storage().resize_(self._bytes)


@dataclass
class _Bucket:
    """Parameters whose gradients are reduced over the shards together; each shard owns an equal piece of the sum."""

    members: list[int]  # indices of parameters, in order
    size: int  # elements, padded so that every shard's piece is as long
    missing: int = 0  # parameters whose gradients of this micro-step are still to come
    buffer: torch.Tensor | None = None


class Accumulators:
    """The fp32 sums of one worker's gradients in one update.

    With one shard they are the whole of its stage. With more, each shard computes micro-steps of its own, and owns a
    piece of every bucket of the stage's gradients: as soon as a bucket is complete it is added up over the shards
    and each takes its piece. Buckets go in strict order, last parameters first, so that the shards meet in it.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        device: torch.device | str,
        shards: int = 1,
        alone: Sequence[torch.Tensor] = (),
    ) -> None:
        """`shards` is the size of the default process group; parameters in `alone` have a bucket each."""
        # ZeRO-3 leaves a parameter empty between uses; its whole shape is then in ds_shape
        self._parameters = list(parameters)
        self._device = torch.device(device)
        self._shards = shards
        self._shapes = [torch.Size(getattr(p, "ds_shape", p.shape)) for p in self._parameters]
        self._index = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        if shards == 1:
            self.flat = Flat(self._shapes, torch.float32, device)
            self._buckets: list[_Bucket] = []
        else:
            self._buckets = self._in_buckets({id(parameter) for parameter in alone})
            pieces = [torch.Size((bucket.size // shards,)) for bucket in self._buckets]
            self.flat = Flat(pieces, torch.float32, device)
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.members}
        self._next = len(self._buckets) - 1  # the bucket whose turn it is
        self.flat.release()

    def _in_buckets(self, alone: set[int]) -> list[_Bucket]:
        buckets: list[_Bucket] = []
        room = 0
        for i, (parameter, shape) in enumerate(zip(self._parameters, self._shapes, strict=True)):
            if id(parameter) in alone or shape.numel() > room:
                buckets.append(_Bucket([], 0))
                room = max(_BUCKET_BYTES // 4, shape.numel())
            buckets[-1].members.append(i)
            buckets[-1].size += shape.numel()
            room = 0 if id(parameter) in alone else room - shape.numel()
        for bucket in buckets:
            bucket.size += -bucket.size % self._shards
            bucket.missing = len(bucket.members)
        return buckets

    def begin(self) -> None:
        """Take memory and start from zero."""
        self.flat.restore()
        self.flat.data.zero_()

    def absorb(self, parameter: torch.nn.Parameter) -> None:
        """Move a parameter's gradient into its sum, or into its bucket on the way there."""
        if parameter.grad is None:
            return
        index = self._index[id(parameter)]
        if self._shards == 1:
            view = self.flat.views[index]
            view.add_(parameter.grad.view_as(view))
        else:
            bucket = self._bucket_of[index]
            self._view(bucket, index).copy_(parameter.grad.reshape(-1))
            bucket.missing -= 1
            while self._next >= 0 and not self._buckets[self._next].missing:
                self._reduce(self._buckets[self._next])
        parameter.grad = None

    def flush(self) -> None:
        """The backward pass is over: what got no gradient adds nothing."""
        while self._next >= 0:
            self._reduce(self._buckets[self._next])
        self._next = len(self._buckets) - 1

    def _view(self, bucket: _Bucket, index: int) -> torch.Tensor:
        if bucket.buffer is None:
            bucket.buffer = torch.zeros(bucket.size, dtype=torch.float32, device=self._device)
        start = sum(self._shapes[i].numel() for i in bucket.members[: bucket.members.index(index)])
        return bucket.buffer[start : start + self._shapes[index].numel()]

    @torch.no_grad()
    def _reduce(self, bucket: _Bucket) -> None:
        """Add a bucket up over the shards, whose turn it is."""
        self._view(bucket, bucket.members[0])
        piece = torch.empty(bucket.size // self._shards, dtype=torch.float32, device=self._device)
        dist.reduce_scatter_single(piece, bucket.buffer)
        self.flat.views[self._next].add_(piece)
        bucket.buffer = None
        bucket.missing = len(bucket.members)
        self._next -= 1

    def gather(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Every parameter with the sum of its gradients, whole; all shards do it together, a bucket at a time."""
        if self._shards == 1:
            yield from zip(self._parameters, self.flat.views, strict=True)
            return
        for bucket, piece in zip(self._buckets, self.flat.views, strict=True):
            whole = torch.empty(bucket.size, dtype=torch.float32, device=self._device)
            dist.all_gather_single(whole, piece)
            sizes = [self._shapes[i].numel() for i in bucket.members]
            for i, part in zip(bucket.members, whole[: sum(sizes)].split(sizes), strict=True):
                yield self._parameters[i], part.view(self._shapes[i])

    def piece(self, parameter: torch.Tensor) -> torch.Tensor:
        """What this shard owns of the sum of a parameter that is alone in its bucket, flat."""
        index = self._index[id(parameter)]
        if self._shards == 1:
            return self.flat.views[index].view(-1)
        return self.flat.views[self._buckets.index(self._bucket_of[index])]

    def hook(self) -> None:
        """Have every gradient moved as soon as it is complete, so that they are never all there at once."""
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self.absorb)


@torch.no_grad()
def square_sum(flat: torch.Tensor) -> float:
    """Sum of the squares of a flat tensor, in float64 piece by piece: a float64 copy of all would be huge."""
    squares = [torch.dot(part, part) for part in (p.double() for p in flat.split(1 << 20))]
    return float(torch.stack(squares).sum()) if squares else 0.0


class Groups:
    """The raw process groups of one rank with other cells; `address` is this node's, as the others reach it."""

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        rank: int,
        device: torch.device | str,
        address: str,
        timeout: float,
        worker: str = "0.0",
    ) -> None:
        """`worker` names the stage and shard of this worker: it meets its equals of the other cells."""
        self._connect = connect  # a client of its own for each group: a group that waits blocks its client
        self._rank = rank
        self._address = address
        self._device = torch.device(device)
        self._worker = worker
        self._timeout = timedelta(seconds=timeout)
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}

    def get(
        self,
        name: str,
        ranks: Sequence[int],
        called_off: Callable[[], bool] = lambda: False,
        deadline: float | None = None,
    ) -> dist.ProcessGroup:
        """The group of these ranks (the first is the root) under a name; all of them must ask for it.

        It is made until `deadline` (monotonic), by default the timeout from now; `called_off` is asked now and then.

        Raises:
            ReduceFailed: it did not come about in time, or was called off.
        """
        key = (name, tuple(ranks))
        if key not in self._groups:
            deadline = deadline or time.monotonic() + self._timeout.total_seconds()
            self._groups[key] = self._make_aside(name, list(ranks), called_off, deadline)
        return self._groups[key]

    def _make_aside(
        self, name: str, ranks: list[int], called_off: Callable[[], bool], deadline: float
    ) -> dist.ProcessGroup:
        """Making a group blocks and cannot be called off, so a thread does it and may be left behind."""
        result: list[dist.ProcessGroup | BaseException] = []

        def make() -> None:
            try:
                store = dist.PrefixStore(f"groups/{name}/{len(ranks)}/{self._worker}", self._connect())
                result.append(self._make(store, ranks.index(self._rank), len(ranks)))
            except BaseException as error:  # handed to the caller
                result.append(error)

        thread = threading.Thread(target=make, name=f"group {name}", daemon=True)
        thread.start()
        while not result:
            thread.join(0.05)
            if not result and called_off():
                raise ReduceFailed("called off")
            if not result and time.monotonic() > deadline:
                raise ReduceFailed(f"group {name} of ranks {ranks} did not come about in time")
        made = result[0]
        if isinstance(made, (RuntimeError, ValueError)):
            raise ReduceFailed(f"group {name} of ranks {ranks}: {str(made).splitlines()[0]}") from made
        if isinstance(made, BaseException):
            raise made
        return made

    def build_prefixes(self, name: str, ranks: Sequence[int]) -> None:
        """Build the groups of all prefixes of `ranks` that this rank is in, smallest first.

        Raises:
            ReduceFailed: they did not all come about within the timeout.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        for size in range(max(2, list(ranks).index(self._rank) + 1), len(ranks) + 1):
            self.get(name, ranks[:size], deadline=deadline)

    def _make(self, store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
        if self._device.type == "cuda":
            group = dist.ProcessGroupNCCL(store, rank, size, timeout=self._timeout)
            # NCCL connects at the first collective, and blocks there: it shall be here, not in the main thread
            _wait(group.reduce([torch.zeros(1, device=self._device)], _to_root()), lambda: False, True)
            return group
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = self._timeout
        return dist.ProcessGroupGloo(store, rank, size, options)

    def forget(self, name: str, ranks: Sequence[int]) -> None:
        """Drop a group that failed, calling off what still runs on it."""
        group = self._groups.pop((name, tuple(ranks)), None)
        if group is not None:
            try:
                group.abort()
            except RuntimeError as error:
                log.info("abort of group %s: %s", name, error)

    def keep_only(self, keep: str) -> None:
        """Drop the groups of another name: of earlier generations and of single rounds."""
        for name, ranks in [key for key in self._groups if key[0] != keep]:
            del self._groups[name, ranks]


def reduce_to_root(
    group: dist.ProcessGroup,
    source: torch.Tensor,
    target: torch.Tensor | None,
    called_off: Callable[[], bool],
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Add `source` (flat) of all members up in the root's `target`; other members give no target.

    It goes bucket by bucket through a copy, since a backend may scribble on what it was given: `source` stays intact
    on every member, so that a failed reduce can be repeated on another group. `called_off` is asked now and then;
    `progress` is called with every bucket.

    Raises:
        ReduceFailed: the group failed or the reduce was called off; the contents of `target` are then undefined.
    """
    size = max(1, _BUCKET_BYTES // source.element_size())
    bucket = torch.empty(min(size, source.numel()), dtype=source.dtype, device=source.device)
    for start in range(0, source.numel(), size):
        part = source[start : start + size]
        copy = bucket[: part.numel()]
        copy.copy_(part)
        try:
            _wait(group.reduce([copy], _to_root()), called_off, copy.is_cuda)
        except RuntimeError as error:
            raise ReduceFailed(str(error).splitlines()[0]) from error
        if target is not None:
            target[start : start + size].copy_(copy)
        progress()


def _to_root() -> dist.ReduceOptions:
    options = dist.ReduceOptions()
    options.rootRank = 0
    return options


def _wait(work: dist.Work, called_off: Callable[[], bool], cuda: bool) -> None:
    patience = time.monotonic() + 0.1
    deadline = time.monotonic() + _BUCKET_SECONDS
    while not work.is_completed():
        time.sleep(_POLL_SECONDS)
        if time.monotonic() > patience:
            if called_off():
                raise ReduceFailed("called off")
            patience = time.monotonic() + 0.1
        if time.monotonic() > deadline:
            raise ReduceFailed(f"a bucket did not come through within {_BUCKET_SECONDS:g} s")
    if cuda and (error := work.exception()) is not None:  # NCCL's wait only orders streams, and does not raise it
        raise ReduceFailed(str(error).splitlines()[0])
    work.wait()
