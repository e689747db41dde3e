"""Sums of gradients across cells: their reduction onto the core over a prefix of the cells.

Each cell has a default process group of its own, and DeepSpeed never sees the other cells. Across cells there are raw
process groups over the run's store, one per (name, members): those of every prefix of a generation's cells are built
ahead, so that a satellite that joins an update meets the others at once; those of a round that lost one are made in
that round. A group that failed is dead for good; the next one has another name.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from gyre.errors import ReduceFailed

log = logging.getLogger(__name__)

_BUCKET_BYTES = 32 << 20
_POLL_SECONDS = 0.001
_BUCKET_SECONDS = 120.0  # Gloo gives up by itself, earlier; NCCL never does


def open_group(
    store: dist.Store, rank: int, size: int, device: torch.device, address: str, timeout: timedelta
) -> dist.ProcessGroup:
    """A raw process group; it blocks until all its members are there. `address` is this node's, for Gloo."""
    if device.type == "cuda":
        group = dist.ProcessGroupNCCL(store, rank, size, timeout=timeout)
        # NCCL connects at the first collective, and blocks there: it shall be here, not in the midst of work
        _wait(group.reduce([torch.zeros(1, device=device)], _to_root()), lambda: False, True)
        return group
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


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
        self._connect = connect  # a group that waits blocks its client: only those made in a row share one
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
        store: dist.Store | None = None,
    ) -> dist.ProcessGroup:
        """The group of these ranks (the first is the root) under a name; all of them must ask for it.

        It is made until `deadline` (monotonic), by default the timeout from now; `called_off` is asked now and then.
        It meets over `store`, by default a client of its own.

        Raises:
            ReduceFailed: it did not come about in time, or was called off.
        """
        key = (name, tuple(ranks))
        if key not in self._groups:
            deadline = deadline or time.monotonic() + self._timeout.total_seconds()
            self._groups[key] = self._make_aside(name, list(ranks), called_off, deadline, store)
        return self._groups[key]

    def _make_aside(
        self,
        name: str,
        ranks: list[int],
        called_off: Callable[[], bool],
        deadline: float,
        client: dist.Store | None,
    ) -> dist.ProcessGroup:
        """Making a group blocks and cannot be called off, so a thread does it and may be left behind."""
        result: list[dist.ProcessGroup | BaseException] = []

        def make() -> None:
            try:
                own = client or self._connect()
                store = dist.PrefixStore(f"groups/{name}/{len(ranks)}/{self._worker}", own)
                result.append(
                    open_group(store, ranks.index(self._rank), len(ranks), self._device, self._address, self._timeout)
                )
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
        store = self._connect()  # groups keep theirs, and one for each would be thousands at the store's host
        for size in range(max(2, list(ranks).index(self._rank) + 1), len(ranks) + 1):
            self.get(name, ranks[:size], deadline=deadline, store=store)

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
