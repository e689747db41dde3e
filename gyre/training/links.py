"""Links between the pipeline stages of a cell: tensors from one process to another, in order, in one direction each.

A link is a raw process group of two over a store's prefix. Each direction has one of its own: with NCCL the transfers
of a communicator queue behind each other, and those of the two directions must not. Sends do not wait: their tensors
are kept until they are through. Who waits for a tensor asks `called_off` now and then, and leaves the transfer behind
when told to. The workers of a cell need no telling: they end together, and one that is stuck is noticed by its pulse.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gyre.errors import LinkFailed

_MEETING = timedelta(seconds=300)  # for the other end to come; models load at different speeds
_FOR_EVER = timedelta(days=30)  # a pause may last; giving up is up to `called_off`
_ASK_SECONDS = 0.1
_POLL_SECONDS = 0.0002
_PIECE_BYTES = 32 << 20


class Transfer:
    """A send or a receive under way, and the tensor that it is of."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._work = work
        self._over = threading.Event()
        self._error: Exception | None = None

    def attend(self) -> None:
        """Wait for the work, whatever becomes of it. Gloo's neither say that they are done nor can be called off."""
        try:
            self._work.wait()
        except Exception as error:  # for whoever waits for the transfer
            self._error = error
        self._over.set()

    def finish(self, called_off: Callable[[], bool]) -> None:
        """Wait until it is through; on a GPU, later work of the current stream may use the tensor.

        Raises:
            LinkFailed: it failed, or was called off.
        """
        cuda = self.tensor.is_cuda
        asked = time.monotonic()
        while not (self._work.is_completed() if cuda else self._over.wait(_ASK_SECONDS)):
            if cuda:
                time.sleep(_POLL_SECONDS)
            if time.monotonic() - asked >= _ASK_SECONDS:
                if called_off():
                    raise LinkFailed("a transfer between stages was called off")
                asked = time.monotonic()
        error = self._work.exception() if cuda else self._error  # NCCL's wait only orders streams
        if error is not None:
            raise LinkFailed(f"the neighbouring stage is gone: {str(error).splitlines()[0]}") from error
        if cuda:
            self._work.wait()


class Link:
    """One direction between two processes; each of them either sends or receives on it."""

    def __init__(self, group: dist.ProcessGroup, cuda: bool, called_off: Callable[[], bool]) -> None:
        self._group = group
        self._peer = 1 - group.rank()
        self._called_off = called_off
        self._sent: deque[Transfer] = deque()
        self._attended: queue.SimpleQueue[Transfer] | None = None if cuda else queue.SimpleQueue()
        if not cuda:
            threading.Thread(target=self._attend, name="link", daemon=True).start()

    def _attend(self) -> None:
        assert self._attended is not None
        while True:
            self._attended.get().attend()

    def _begin(self, operation: Callable[..., dist.Work], tensor: torch.Tensor) -> Transfer:
        try:
            transfer = Transfer(operation([tensor], self._peer, 0), tensor)
        except RuntimeError as error:
            raise LinkFailed(f"the neighbouring stage is gone: {str(error).splitlines()[0]}") from error
        if self._attended is not None:
            self._attended.put(transfer)
        return transfer

    def send(self, tensor: torch.Tensor, most: int = 8) -> None:
        """Begin to send a contiguous tensor, which must not change any more; waits where over `most` are under way.

        Raises:
            LinkFailed: the other end is gone, or the wait was called off.
        """
        self._sent.append(self._begin(self._group.send, tensor))
        self.settle(most)

    def settle(self, most: int = 0) -> None:
        """Wait until at most so many of the sends are under way.

        Raises:
            LinkFailed: the other end is gone, or the wait was called off.
        """
        while len(self._sent) > most:
            self._sent.popleft().finish(self._called_off)

    def post(self, buffer: torch.Tensor) -> Transfer:
        """Begin to receive into a contiguous tensor of the shape and type of the one that is sent.

        Raises:
            LinkFailed: the other end is gone.
        """
        return self._begin(self._group.recv, buffer)

    def take(self, transfer: Transfer) -> torch.Tensor:
        """Wait for what was posted; returns the tensor.

        Raises:
            LinkFailed: the other end is gone, or the wait was called off.
        """
        transfer.finish(self._called_off)
        return transfer.tensor

    def send_pieces(self, flat: torch.Tensor) -> None:
        """Send a large flat tensor and wait until it is through.

        Raises:
            LinkFailed: the other end is gone, or the wait was called off.
        """
        for piece in _pieces(flat):
            self.send(piece)
        self.settle()

    def add_pieces(self, flat: torch.Tensor) -> None:
        """Receive what `send_pieces` sends and add it to a flat tensor of that size.

        Raises:
            LinkFailed: the other end is gone, or the wait was called off.
        """
        for piece in _pieces(flat):
            piece.add_(self.take(self.post(torch.empty_like(piece))))


def _pieces(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    return flat.split(max(1, _PIECE_BYTES // flat.element_size()))


@dataclass(frozen=True)
class Neighbour:
    """Both directions between this stage and another one."""

    to: Link
    back: Link  # from there to here


@dataclass(frozen=True)
class Links:
    """A stage's neighbours; `ends` joins the first and the last stage."""

    before: Neighbour | None = None
    after: Neighbour | None = None
    ends: Neighbour | None = None


def connect(
    store: dist.Store,
    stage: int,
    stages: int,
    device: torch.device | str,
    address: str,
    called_off: Callable[[], bool] = lambda: False,
) -> Links:
    """Meet the other stages, all of which do the same.

    Args:
        store: one that all of them reach, under a prefix that nobody else uses.
        stage: this one, from 0.
        stages: how many there are.
        device: where tensors are.
        address: this host's, as the other stages reach it.
        called_off: asked now and then by whoever waits; True ends the wait.

    Raises:
        LinkFailed: a neighbour did not come.
    """
    kind = torch.device(device)

    def join(lower: int, upper: int) -> Neighbour:
        end = int(stage == upper)
        try:
            groups = [
                _group(dist.PrefixStore(f"{lower}-{upper}/{way}", store), end, kind, address) for way in ("up", "down")
            ]
        except RuntimeError as error:
            other = lower if end else upper
            raise LinkFailed(f"stage {other} did not come: {str(error).splitlines()[0]}") from error
        up, down = (Link(group, kind.type == "cuda", called_off) for group in groups)
        made = Neighbour(down, up) if end else Neighbour(up, down)
        _greet(made, end, kind)
        return made

    before = join(stage - 1, stage) if stage > 0 else None
    after = join(stage, stage + 1) if stage < stages - 1 else None
    ends = before or after if stages == 2 else None
    if stages > 2 and stage in (0, stages - 1):
        ends = join(0, stages - 1)
    return Links(before, after, ends)


def _group(store: dist.Store, rank: int, device: torch.device, address: str) -> dist.ProcessGroup:
    store.set_timeout(_MEETING)
    if device.type == "cuda":
        return dist.ProcessGroupNCCL(store, rank, 2, timeout=_FOR_EVER)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = _FOR_EVER
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _greet(other: Neighbour, end: int, device: torch.device) -> None:
    """Use both directions once: NCCL makes a communicator at its first transfer, which blocks both sides until then."""
    for sends in (end == 0, end == 1):
        word = torch.zeros(1, device=device)
        if sends:
            other.to.send(word, most=0)
        else:
            other.back.take(other.back.post(word))
