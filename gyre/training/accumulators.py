"""Sums of gradients: what a worker holds of an update while it is computed, in fp32.

With one shard every gradient is added to its sum as soon as it is complete. With several, the shards of a stage compute
different micro-steps, and each holds its part of the sum over all of them: parameters are put together in *buckets*, a
bucket's gradients are added up over the shards as soon as all of them are there, and each shard keeps its share of
the result. Shards must do so in the same order, whatever order gradients come in and whether all come: it is the
reverse of the parameters', which is about that of a backward pass, and a bucket that is ready early waits for its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

_BUCKET_BYTES = 32 << 20
_RUNNING = 2  # buckets that are added up at once, while others fill


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


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients are added up together; padded, so that all shards have shares of the same size."""

    parameters: list[torch.nn.Parameter]
    shapes: list[torch.Size]
    size: int  # elements, with padding
    own: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # this shard's share of the sum
    gradients: torch.Tensor | None = None  # of one micro-step, while they come
    missing: set[int] = field(default_factory=set)  # places of parameters whose gradients have not come

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A flat tensor of this bucket's size as tensors of its parameters' shapes."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = flat[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Accumulators:
    """The fp32 sums of one worker's parameters in one update.

    `flat.data` is this shard's share of them; over the shards of a stage the shares add up to the whole, padding being
    zero. `aside` is the share of parameters that count elsewhere (an output layer tied to another stage's embeddings):
    it is in no norm and no reduce.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        alone: Iterable[torch.nn.Parameter] = (),
        aside: Iterable[torch.nn.Parameter] = (),
    ) -> None:
        """Lay the sums out.

        Args:
            parameters: those whose gradients are summed.
            device: where the sums are.
            group: the shards of this stage, in their order; None for one shard.
            alone: which of the parameters have a bucket of their own (`piece`).
            aside: further parameters, which are summed aside, each in a bucket of its own.
        """
        self._group = group
        self._shards = group.size() if group else 1
        self._device = torch.device(device)
        lonely = {id(parameter) for parameter in alone}
        buckets = self._buckets(parameters, lonely)
        apart = [self._bucket([parameter]) for parameter in aside]
        self.flat = self._hold(buckets)
        self.aside = self._hold(apart)
        self._main = buckets
        self._order = [*apart, *reversed(buckets)]  # the order in which they are added up
        self._place = {
            id(parameter): (bucket, place)
            for bucket in self._order
            for place, parameter in enumerate(bucket.parameters)
        }
        self._views = {
            id(parameter): view
            for bucket in self._order
            if self._shards == 1
            for parameter, view in zip(bucket.parameters, bucket.views(bucket.own), strict=True)
        }
        self._next = 0  # in `_order`
        self._running: deque[tuple[_Bucket, list[dist.Work], torch.Tensor]] = deque()
        for bucket in self._order:
            self._expect(bucket)
        self.release()

    # -- layout ------------------------------------------------------------------------------------------------------
    def _buckets(self, parameters: Iterable[torch.nn.Parameter], alone: set[int]) -> list[_Bucket]:
        groups: list[list[torch.nn.Parameter]] = []
        room = 0
        for parameter in parameters:
            size = 4 * _shape(parameter).numel()
            if not groups or size > room or id(parameter) in alone:
                groups.append([])
                room = _BUCKET_BYTES
            groups[-1].append(parameter)
            room = 0 if id(parameter) in alone else room - size
        return [self._bucket(group) for group in groups]

    def _bucket(self, parameters: list[torch.nn.Parameter]) -> _Bucket:
        shapes = [_shape(parameter) for parameter in parameters]
        size = sum(shape.numel() for shape in shapes)
        return _Bucket(parameters, shapes, -(-size // self._shards) * self._shards)

    def _hold(self, buckets: list[_Bucket]) -> Flat:
        flat = Flat([torch.Size([bucket.size // self._shards]) for bucket in buckets], torch.float32, self._device)
        for bucket, own in zip(buckets, flat.views, strict=True):
            bucket.own = own
        return flat

    def piece(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """This shard's share of a parameter's sum, flat; the parameter is one that has a bucket of its own.

        Wherever a parameter of this shape is alone, with as many shards, shares are the same pieces of it.
        """
        bucket, _ = self._place[id(parameter)]
        if len(bucket.parameters) != 1:
            raise ValueError("the parameter shares its bucket with others")
        return bucket.own

    # -- memory ------------------------------------------------------------------------------------------------------
    @property
    def held(self) -> int:
        """Bytes held now."""
        return self.flat.held + self.aside.held

    def begin(self) -> None:
        """Take memory and start from zero."""
        for flat in (self.flat, self.aside):
            flat.restore()
            flat.data.zero_()

    def release(self) -> None:
        """Give the memory back; the sums are gone."""
        self.flat.release()
        self.aside.release()

    # -- gradients ---------------------------------------------------------------------------------------------------
    def hook(self) -> None:
        """Have every gradient moved as soon as it is complete, so that they are never all there at once."""
        for bucket in self._order:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self.absorb)

    @torch.no_grad()
    def absorb(self, parameter: torch.nn.Parameter) -> None:
        """Move a parameter's gradient into its sum."""
        gradient = parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        if self._shards == 1:
            view = self._views[id(parameter)]
            view.add_(gradient.view_as(view))
            return
        bucket, place = self._place[id(parameter)]
        if place not in bucket.missing:
            raise RuntimeError("a second gradient of a parameter in one backward pass")
        if bucket.gradients is None:
            bucket.gradients = torch.empty(bucket.size, dtype=torch.float32, device=self._device)
        bucket.views(bucket.gradients)[place].copy_(gradient.view(bucket.shapes[place]))
        bucket.missing.remove(place)
        while self._next < len(self._order) and not self._order[self._next].missing:
            self._start()

    @torch.no_grad()
    def flush(self) -> None:
        """The backward pass is over: gradients that did not come are zero. With several shards, all must do it."""
        if self._shards == 1:
            return
        while self._next < len(self._order):
            self._start()
        while self._running:
            self._finish()
        self._next = 0

    def _expect(self, bucket: _Bucket) -> None:
        bucket.gradients = None
        bucket.missing = set(range(len(bucket.parameters)))

    def _start(self) -> None:
        """Begin to add the next bucket up over the shards."""
        bucket = self._order[self._next]
        self._next += 1
        flat = bucket.gradients
        if flat is None:
            flat = torch.zeros(bucket.size, dtype=torch.float32, device=self._device)
        else:
            views = bucket.views(flat)
            for place in bucket.missing:
                views[place].zero_()
            flat[sum(shape.numel() for shape in bucket.shapes) :].zero_()
        self._expect(bucket)
        self._running.append((bucket, *reduce_scatter(self._group, flat)))
        if len(self._running) > _RUNNING:
            self._finish()

    def _finish(self) -> None:
        bucket, works, share = self._running.popleft()
        for work in works:
            work.wait()
        bucket.own.add_(share)

    # -- sums --------------------------------------------------------------------------------------------------------
    def square_sum(self) -> float:
        """Sum of the squares of this shard's share."""
        return square_sum(self.flat.data)

    def gather(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Each parameter with its whole sum, which is good until the next one. With several shards, all must do it.

        At most one bucket is held beside the shares.
        """
        for bucket in self._main:
            flat = bucket.own
            if self._group:
                flat = torch.empty(bucket.size, dtype=torch.float32, device=self._device)
                all_gather(self._group, flat, bucket.own)
            yield from zip(bucket.parameters, bucket.views(flat), strict=True)


def _shape(parameter: torch.nn.Parameter) -> torch.Size:
    # ZeRO-3 leaves a parameter empty between uses; its whole shape is then in ds_shape
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def reduce_scatter(group: dist.ProcessGroup, flat: torch.Tensor) -> tuple[list[dist.Work], torch.Tensor]:
    """Begin to add `flat` up over a group, of which each member gets its piece: what to wait for, and the piece.

    The contents of `flat` are undefined afterwards; it is held until the last of the works is waited for.
    """
    pieces = flat.view(group.size(), -1)
    if flat.is_cuda:
        piece = torch.empty_like(pieces[0])
        return [group._reduce_scatter_base(piece, flat)], piece
    works = []  # Gloo's own reduce-scatter is several times as slow
    for owner, piece in enumerate(pieces):
        options = dist.ReduceOptions()
        options.rootRank = owner
        works.append(group.reduce([piece], options))
    return works, pieces[group.rank()]


def all_gather(group: dist.ProcessGroup, flat: torch.Tensor, piece: torch.Tensor) -> None:
    """Put the pieces of all members of a group together in `flat`."""
    if flat.is_cuda:
        group._allgather_base(flat, piece).wait()
    else:
        group.allgather([list(flat.view(group.size(), -1))], [piece]).wait()


@torch.no_grad()
def square_sum(flat: torch.Tensor) -> float:
    """Sum of squares of a flat tensor, in float64 piece by piece: a float64 copy of all would be huge."""
    squares = [torch.dot(part, part) for part in (p.double() for p in flat.split(1 << 20))]
    return float(torch.stack(squares).sum()) if squares else 0.0
