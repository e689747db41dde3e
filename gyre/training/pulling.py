"""Snapshots from a reader's side: found, identified, copied and verified, without asking anything of the core.

An announcement says which snapshot lies where, and the digest of its header; the header has the digests of all tensors
(`gyre.training.digest`). So each tensor can be verified by itself while it is copied, whichever of them a reader
wants and whatever way they come.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from gyre.errors import WeightsMismatch
from gyre.shared_memory import SHARED
from gyre.store import Store
from gyre.training import nixl_transport
from gyre.training.digest import ROW, WORD, digest_of, hashed, in_threads, raw, rows_of, sum_rows, threads_for
from gyre.training.slots import Announcement
from gyre.training.snapshot_file import Place, mapped, metadata_of, places_of, pwrite
from gyre.training.transports import Shared, Socket, Transport

log = logging.getLogger(__name__)

_MADV_HUGEPAGE = 14
_WORTH_HUGE_PAGES = 8 << 20
_PAGE = 4096
_Thing, _Out = TypeVar("_Thing"), TypeVar("_Out")


def _find(store: Store, snapshot: int, timeout: float) -> Announcement:
    """What was announced of a snapshot.

    Raises:
        WeightsMismatch: nothing within `timeout` seconds.
    """
    word = store.wait(f"snapshot/{snapshot}", timeout)
    if word is None:
        raise WeightsMismatch(f"snapshot {snapshot} was not announced within {timeout:g} s")
    return Announcement.decode(word)


class Source:
    """A snapshot that can be read from here, until `close`."""

    def __init__(self, announcement: Announcement, transport: Transport) -> None:
        self.snapshot = announcement.snapshot
        self.checksum = announcement.checksum
        self.bytes = announcement.bytes
        self._transport = transport
        self._header = self._identified(announcement)
        self._places = places_of(self._header)

    def _identified(self, announcement: Announcement) -> bytes:
        """The header, which is exactly the announced one."""
        header = bytearray(announcement.header)
        self._transport.expect(0, len(header))
        self._transport.read(0, [memoryview(header)])
        if digest_of(header) == announcement.digest:
            return bytes(header)
        found: dict[str, str] = {}
        with contextlib.suppress(WeightsMismatch):
            found = metadata_of(bytes(header))
        for key in ("snapshot", "generation"):
            if found.get(key) != str(getattr(announcement, key)):
                raise WeightsMismatch(f"snapshot {self.snapshot} is gone: its slot has {key} {found.get(key)}")
        raise WeightsMismatch(f"snapshot {self.snapshot}: its header was altered")

    def copy_into(self, own: Mapping[str, torch.Tensor]) -> None:
        """Copy named tensors to where they are wanted, on any device, and verify them; all of `own`, and no others.

        Raises:
            WeightsMismatch: the snapshot has no such tensor, is gone, or what came is not what was announced.
        """
        for name, tensor in own.items():
            place = self._places.get(name)
            if place is None:
                raise WeightsMismatch(f"snapshot {self.snapshot} lacks {name}")
            if (place.spec.dtype, place.spec.shape) != (tensor.dtype, tuple(tensor.shape)):
                raise WeightsMismatch(f"snapshot {self.snapshot} does not fit the model: {name}")
        wanted = sorted((self._places[name] for name in own), key=lambda place: place.begin)
        here = [place for place in wanted if own[place.spec.name].device.type == "cpu"]
        memory = [raw(own[place.spec.name]) for place in here]
        _prefer_huge_pages(memory)
        with in_threads(threads_for(sum(map(len, memory))) if self._transport.threads else 1) as run:
            self._read(here, lambda part: memory[part.index][part.begin : part.end], lambda part, data: None, run)
        if there := [place for place in wanted if own[place.spec.name].device.type != "cpu"]:
            device = [own[place.spec.name].detach().view(-1).view(torch.uint8) for place in there]
            buffer = torch.empty(self._transport.piece, dtype=torch.uint8, pin_memory=True)
            self._through(there, buffer, lambda part, data: device[part.index][part.begin : part.end].copy_(data))

    def verify(self) -> None:
        """Read everything and compare it with what was announced.

        Raises:
            WeightsMismatch: it is something else.
        """
        buffer = torch.empty(self._transport.piece, dtype=torch.uint8)
        self._through(list(self._places.values()), buffer, lambda part, data: None)

    def save(self, descriptor: int) -> None:
        """Write the whole snapshot to a file, verified.

        Raises:
            WeightsMismatch: it is gone, or what came is not what was announced.
        """
        places = list(self._places.values())

        def write(part: _Part, data: torch.Tensor) -> None:
            pwrite(descriptor, data.numpy().data, places[part.index].begin + part.begin)

        pwrite(descriptor, memoryview(self._header), 0)
        self._through(places, torch.empty(self._transport.piece, dtype=torch.uint8), write)

    def _through(
        self, places: Sequence[Place], buffer: torch.Tensor, use: Callable[[_Part, torch.Tensor], Any]
    ) -> None:
        """Read tensors through a buffer, out of which `use` takes each part."""
        with in_threads(1) as run:
            self._read(places, lambda part: buffer[part.at : part.at + part.end - part.begin], use, run)

    def _read(
        self,
        places: Sequence[Place],
        memory: Callable[[_Part], torch.Tensor],
        use: Callable[[_Part, torch.Tensor], Any],
        run: Callable[..., Iterator[None]],
    ) -> None:
        """Read and verify tensors: each part to where `memory` has room for it; then `use` gets it."""
        sums = [torch.empty(rows_of(place.end - place.begin), dtype=torch.int64) for place in places]

        def read(batch: _Batch) -> None:
            data = [memory(part) for part in batch.parts]
            self._transport.expect(batch.begin, batch.until)
            self._transport.read(batch.begin, [each.numpy().data for each in data])
            for part, each in zip(batch.parts, data, strict=True):
                sum_rows(each, sums[part.index][part.begin // ROW :])  # while it is in the cache
                use(part, each)

        for _ in run(read, _batches(places, self._transport.piece)):
            pass
        for place, found in zip(places, sums, strict=True):
            self._compare(place, found)

    def _compare(self, place: Place, sums: torch.Tensor) -> None:
        if (found := hashed(sums)) != place.digest:
            name = place.spec.name
            raise WeightsMismatch(f"snapshot {self.snapshot}: {name} has digest {found}, announced {place.digest}")

    def close(self) -> None:
        """Give the lease back, or end the connection."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pulled(Source):
    """A snapshot that is a file here, at `path`, until `close`: the slot under a lease, or a copy without a name.

    A copy is gone when nobody has it open any more, so whatever dies leaves nothing behind.
    """

    def __init__(self, announcement: Announcement, file: Shared, path: Path, copied: bool) -> None:
        super().__init__(announcement, file)
        self.path = path
        self.copied = copied
        self._file = file

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors, mapped; they must not outlive `close`."""
        return mapped(self._file.descriptor)


def reach(
    word: str, secret: str, address: str, file: Path | str | None = None, how: str = "auto", timeout: float = 120.0
) -> Source:
    """A snapshot to copy from, of the `word` that announced it: its `file` where somebody here has pulled it, the slot
    where the core is on this host (`address`), else the weight server, over what `how` says (`network.weights`).

    Raises:
        WeightsMismatch: it has been recycled, or is not what was announced.
    """
    announcement = Announcement.decode(word)
    if file is not None:
        way: Transport = Shared(os.open(file, os.O_RDONLY))
    else:
        way = _transport(announcement, secret, address, how, timeout)
    return _closing(way, lambda way: Source(announcement, way))


def pull(
    store: Store,
    snapshot: int,
    scratch: Path | str | None,
    secret: str,
    address: str,
    timeout: float = 120.0,
    verify: bool = False,
    how: str = "auto",
) -> Pulled:
    """A snapshot as a file: the slot where the core is on this host (`address`), else a copy of it, verified.

    The copy lies in shared memory, or in `scratch` where that has no room. A slot is verified here with `verify`;
    without, it is the caller's business to compare checksums after loading.

    Raises:
        WeightsMismatch: it was not announced in time, has been recycled, or is not what was announced.
    """
    announcement = _find(store, snapshot, timeout)
    transport = _transport(announcement, secret, address, how, timeout)
    if isinstance(transport, Shared):
        pulled = _closing(transport, lambda slot: Pulled(announcement, slot, Path(announcement.path), copied=False))
        if verify:
            _closing(pulled, Pulled.verify)
        return pulled
    with _closing(transport, lambda way: Source(announcement, way)) as source:
        return _closing(Shared(_nameless(announcement.bytes, scratch)), lambda file: _saved(source, announcement, file))


def _saved(source: Source, announcement: Announcement, file: Shared) -> Pulled:
    source.save(file.descriptor)
    path = Path(f"/proc/{os.getpid()}/fd/{file.descriptor}")  # good for other processes of this user too
    return Pulled(announcement, file, path, copied=True)


def _closing(thing: _Thing, use: Callable[[_Thing], _Out]) -> _Out:
    """What `use` makes of something, which is closed where that fails."""
    try:
        return use(thing)
    except BaseException:
        thing.close()
        raise


def _transport(announcement: Announcement, secret: str, address: str, how: str, timeout: float) -> Transport:
    """The best way that both ends have; between hosts `how` says: auto, socket or nixl."""
    if announcement.node == address and (shared := Shared.reach(announcement)) is not None:
        return shared
    if how == "nixl":
        return nixl_transport.Nixl(announcement, secret, timeout)
    if how == "auto" and nixl_transport.worth_it():
        try:
            return nixl_transport.Nixl(announcement, secret, timeout)
        except WeightsMismatch as error:
            log.warning("%s; over a socket then", error)
    return Socket(announcement, secret, timeout)


@dataclass(frozen=True)
class _Part:
    """Bytes `begin` to `end` of the tensor with this index, which come `at` bytes after the batch's beginning."""

    index: int
    begin: int
    end: int
    at: int


@dataclass
class _Batch:
    """What is read at once: bytes from `begin` on, and until where more without a gap is going to be read after it."""

    begin: int
    until: int = 0
    parts: list[_Part] = field(default_factory=list)


def _batches(places: Sequence[Place], limit: int) -> list[_Batch]:
    """The bytes of tensors, in the file's order, in batches without gaps of at most `limit` bytes."""
    batches: list[_Batch] = []
    size = end = 0
    for index, place in enumerate(places):
        done, length = 0, place.end - place.begin
        while done < length:
            size += -size % WORD  # words are summed where they lie; the gap is in the buffer alone
            room = max(0, limit - size) // ROW * ROW
            if not batches or place.begin + done != end or not room:
                batches.append(_Batch(place.begin + done))
                size, room = 0, limit
            count = min(length - done, room)
            batches[-1].parts.append(_Part(index, done, done + count, size))
            done, size = done + count, size + count
            end = place.begin + done
            batches[-1].until = end
    for batch, after in zip(reversed(batches[:-1]), reversed(batches[1:]), strict=True):
        if batch.until == after.begin:
            batch.until = after.until
    return batches


def _nameless(size: int, scratch: Path | str | None) -> int:
    """A file without a name, in shared memory or, where that has no room, in `scratch`; returns its descriptor."""
    status = os.statvfs(SHARED)
    room = scratch is None or status.f_bavail * status.f_frsize > 2 * size
    with tempfile.TemporaryFile(dir=SHARED if room else scratch) as file:
        return os.dup(file.fileno())


def _prefer_huge_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Have memory that was not touched yet come in large pages: the first write to it is several times as fast."""
    runs: list[list[int]] = []
    for tensor in sorted((t for t in tensors if len(t)), key=torch.Tensor.data_ptr):
        begin, end = tensor.data_ptr(), tensor.data_ptr() + len(tensor)
        if runs and begin == runs[-1][1]:
            runs[-1][1] = end
        else:
            runs.append([begin, end])
    for begin, end in runs:
        first = -(-begin // _PAGE) * _PAGE
        if end - first >= _WORTH_HUGE_PAGES:
            with contextlib.suppress(AttributeError):
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_HUGEPAGE)
