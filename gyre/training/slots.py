"""Where snapshots lie: safetensors files in a few recycled slots in shared memory, written by the core.

The writer takes a slot's exclusive lock, readers hold its shared lock for as long as they read (`flock`): a slot that
is read is not overwritten, and the kernel drops the lock of a reader that dies. The file's metadata carries its
snapshot number, its checksum, the digests of its tensors and its generation (a count of writes), so that a slot which
was recycled between an announcement and a lock is noticed. Whoever has tensors writes them (`fill`): the workers of a
cell each their own, between the `begin` and the `seal` of their lead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gyre.checksum import Sums, add, combine, group_of, sums_of
from gyre.checksum_groups import MASK, accumulate
from gyre.errors import UserError, WeightsMismatch
from gyre.shared_memory import SHARED
from gyre.training.digest import ROW, digest_of, hashed, in_threads, raw, rows_of, sum_rows, threads_for
from gyre.training.snapshot_file import PIECE, Spec, make_header, places_of, pwrite, read_header

_NO_CHECKSUM = "0" * 32
_NO_DIGEST = "-" * 32


@dataclass(frozen=True)
class Announcement:
    """Store word `snapshot/<id>`: where a snapshot is and what it must be."""

    snapshot: int
    path: str
    bytes: int
    checksum: str
    generation: int
    header: int  # bytes of the header
    digest: str  # of the header, which has the digests of all tensors
    node: str
    url: str

    def encode(self) -> str:
        """As the store's JSON word."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, word: str) -> Announcement:
        """Of the store's JSON word."""
        return cls(**json.loads(word))


# -- names and clean-up ------------------------------------------------------------------------------------------------
def _allocate(descriptor: int, size: int) -> None:
    """Have the memory of a file: without room it is an error here, and not a SIGBUS when a page is touched."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(f"{SHARED} has no room for {size >> 20} MiB of weights; make it larger") from error


# -- writing -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Filled:
    """What somebody put into a slot: its share of the checksum's sums, and the digest of each tensor that it wrote.

    It travels as JSON: `asdict` there and `Filled(**fields)` here.
    """

    sums: Sums
    digests: dict[str, str]


def fill(path: Path | str, tensors: Iterable[tuple[str, torch.Tensor]]) -> Filled:
    """Write named tensors into a slot that was begun, from any process.

    Raises:
        WeightsMismatch: the slot has no such tensor.
    """
    total: Sums = {}
    digests: dict[str, str] = {}
    descriptor = os.open(path, os.O_RDWR)
    try:
        places = places_of(read_header(descriptor))
        with in_threads(threads_for(os.fstat(descriptor).st_size)) as run:
            for name, tensor in tensors:
                place = places.get(name)
                if place is None or place.spec != Spec(name, tensor.dtype, tuple(tensor.shape)):
                    raise WeightsMismatch(f"{path} has no place for {name}, {tensor.dtype} {list(tensor.shape)}")
                pair, digests[name] = _put(descriptor, place.begin, tensor.detach(), run)
                accumulate(total, group_of(name), pair)
    finally:
        os.close(descriptor)
    return Filled(total, digests)


def _put(
    descriptor: int, begin: int, tensor: torch.Tensor, run: Callable[..., Iterator[Any]]
) -> tuple[tuple[int, int], str]:
    """Write one tensor to its place; each piece is summed and written while it is in the cache."""
    on_device = None if tensor.device.type == "cpu" else sums_of(tensor)  # there it takes no time
    tensor = tensor.cpu().contiguous().view(-1)
    data = raw(tensor)
    rows = torch.empty(rows_of(len(data)), dtype=torch.int64)

    def put(at: int) -> tuple[int, int]:
        piece = data[at : at + PIECE]
        pair = sums_of(tensor[at // tensor.itemsize : (at + PIECE) // tensor.itemsize]) if on_device is None else (0, 0)
        sum_rows(piece, rows[at // ROW :])
        pwrite(descriptor, piece.numpy().data, begin + at)
        return pair

    pairs = list(run(put, range(0, len(data), PIECE)))
    plain, mixed = (sum(pair[i] for pair in pairs) for i in (0, 1))
    return on_device or (plain & MASK, mixed & MASK), hashed(rows)


class Writing:
    """A slot that is being written, under its exclusive lock: `fill(writing.path, ...)`, then `seal`.

    Leaving its `with` block without a seal gives the slot up: it holds no snapshot then.
    """

    def __init__(self, slot: _Slot, snapshot: int, generation: int, specs: Sequence[Spec]) -> None:
        self.path = slot.path
        self.snapshot = snapshot
        self._slot = slot
        self._generation = generation
        self._names = [spec.name for spec in specs]
        metadata = {"snapshot": f"{snapshot}", "generation": f"{generation}", "checksum": _NO_CHECKSUM}
        self._header = make_header(specs, {**metadata, "digests": _NO_DIGEST * len(specs)})
        self._size = len(self._header) + sum(spec.bytes for spec in specs)
        os.ftruncate(slot.descriptor, self._size)
        _allocate(slot.descriptor, self._size)
        os.pwrite(slot.descriptor, self._header, 0)

    def seal(self, filled: Iterable[Filled]) -> Announcement:
        """Put checksum and digests into the header and let readers in; `filled` is what all writers answered.

        Node and url of the announcement are left empty.

        Raises:
            WeightsMismatch: a tensor was not written, or by two.
        """
        total: Sums = {}
        digests: dict[str, str] = {}
        count = 0
        for part in filled:
            total = add(total, part.sums)
            digests |= part.digests
            count += len(part.digests)
        if count != len(self._names) or digests.keys() != set(self._names):
            odd = sorted(digests.keys() ^ set(self._names))
            raise WeightsMismatch(f"snapshot {self.snapshot}: {odd[0] if odd else 'a tensor'} was not written once")
        checksum = combine(total)
        header = self._header.replace(_NO_CHECKSUM.encode(), checksum.encode(), 1)
        found = "".join(digests[name] for name in self._names).encode()
        header = header.replace(_NO_DIGEST.encode() * len(self._names), found, 1)
        os.pwrite(self._slot.descriptor, header, 0)
        self._slot.snapshot = self.snapshot
        self.close()
        return Announcement(
            snapshot=self.snapshot,
            path=str(self.path),
            bytes=self._size,
            checksum=checksum,
            generation=self._generation,
            header=len(header),
            digest=digest_of(header),
            node="",
            url="",
        )

    def close(self) -> None:
        """Give the lock back."""
        if self._slot.descriptor >= 0:
            fcntl.flock(self._slot.descriptor, fcntl.LOCK_UN)

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class _Slot:
    path: Path
    descriptor: int
    snapshot: int = -1


class Slots:
    """The core's slots. `protected(snapshot, next)` says that a snapshot must stay while `next` is written.

    A slot that a reader sits on for `patience` seconds is left to it: the core has a step to go on with.
    """

    def __init__(self, prefix: str, count: int, protected: Callable[[int, int], bool], patience: float = 2.0) -> None:
        self._prefix = prefix
        self._count = count
        self._protected = protected
        self._patience = patience
        self._slots: list[_Slot] = []
        self._generation = 0

    def begin(self, snapshot: int, specs: Sequence[Spec]) -> Writing:
        """Take a slot for a snapshot: its memory is there and its header written, the weights are not yet.

        `specs` are all tensors of the model, in its order, whoever writes them.
        """
        self._generation += 1
        slot = self._acquire(snapshot)
        slot.snapshot = -1
        try:
            return Writing(slot, snapshot, self._generation, specs)
        except BaseException:
            fcntl.flock(slot.descriptor, fcntl.LOCK_UN)
            raise

    def write(self, snapshot: int, tensors: Iterable[tuple[str, torch.Tensor]], specs: Sequence[Spec]) -> Announcement:
        """Put a snapshot into a slot by oneself: `begin`, `fill` and `seal` in one."""
        with self.begin(snapshot, specs) as writing:
            return writing.seal([fill(writing.path, tensors)])

    def path_of(self, snapshot: int) -> Path | None:
        """Where a snapshot is, if a slot still has it."""
        return next((slot.path for slot in self._slots if slot.snapshot == snapshot), None)

    def _acquire(self, snapshot: int) -> _Slot:
        """A slot with its exclusive lock held: a new one while there may be more, else the oldest free one."""
        if len(self._slots) < self._count:
            return self._create(len(self._slots))
        deadline = time.monotonic() + self._patience
        victims = sorted(
            (slot for slot in self._slots if not self._protected(slot.snapshot, snapshot)), key=lambda s: s.snapshot
        )
        while True:
            for slot in victims:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(slot.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return slot
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        # a reader sits on the slot: it keeps what it has mapped, and the slot's name gets fresh memory
        number = self._slots.index(victims[0])
        self._drop(self._slots[number])
        return self._create(number)

    def _create(self, number: int) -> _Slot:
        path = SHARED / f"{self._prefix}slot{number}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        slot = _Slot(path, descriptor)
        self._slots[number : number + 1] = [slot]
        return slot

    @staticmethod
    def _drop(slot: _Slot) -> None:
        slot.path.unlink(missing_ok=True)
        os.close(slot.descriptor)

    def close(self) -> None:
        """Remove all slots."""
        for slot in self._slots:
            self._drop(slot)
        self._slots.clear()
