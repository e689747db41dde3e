"""Snapshots from a reader's side: found, identified, copied and verified, without asking anything of the core.

An announcement says which snapshot lies where, and the digest of its header; the header has the digests of all tensors
(`gyre.training.digest`). So each tensor can be verified by itself while it is copied, whichever of them a reader
wants and whatever way they come.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import torch

from gyre.errors import WeightsMismatch
from gyre.store import Store
from gyre.training.digest import ROW, digest_of, hashed, in_threads, raw, rows_of, sum_rows
from gyre.training.slots import PIECE, SHARED, Announcement, Place, mapped, metadata_of, places_of, pwrite
from gyre.training.transports import Shared, Socket, Transport

_STAGE = 32 << 20  # bytes of a buffer on the way to a device
_MADV_HUGEPAGE = 14
_WORTH_HUGE_PAGES = 64 << 20
_PAGE = 4096
_Thing, _Out = TypeVar("_Thing"), TypeVar("_Out")


def find(store: Store, snapshot: int, timeout: float) -> Announcement:
    """What was announced of a snapshot.

    Raises:
        WeightsMismatch: nothing within `timeout` seconds.
    """
    word = store.wait(f"snapshot/{snapshot}", timeout)
    if word is None:
        raise WeightsMismatch(f"snapshot {snapshot} was not announced within {timeout:g} s")
    return Announcement(**json.loads(word))


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
        self._transport.read(0, memoryview(header))
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
        _prefer_huge_pages(own.values())
        wanted = sorted((self._places[name] for name in own), key=lambda place: place.begin)
        direct = [(place, raw(own[place.spec.name])) for place in wanted if own[place.spec.name].device.type == "cpu"]
        self._receive(direct)
        for place in wanted:
            if (tensor := own[place.spec.name]).device.type != "cpu":
                self._stage(place, tensor.detach().view(-1).view(torch.uint8))

    def verify(self) -> None:
        """Read everything and compare it with what was announced.

        Raises:
            WeightsMismatch: it is something else.
        """
        buffer = torch.empty(PIECE, dtype=torch.uint8)
        for place in self._all():
            self._through(place, buffer, lambda at, piece: None)

    def save(self, descriptor: int) -> None:
        """Write the whole snapshot to a file, verified.

        Raises:
            WeightsMismatch: it is gone, or what came is not what was announced.
        """
        buffer = torch.empty(PIECE, dtype=torch.uint8)
        pwrite(descriptor, memoryview(self._header), 0)
        for place in self._all():
            self._through(place, buffer, lambda at, piece: pwrite(descriptor, piece.numpy().data, at))

    def _all(self) -> Iterable[Place]:
        self._transport.expect(len(self._header), self.bytes)
        return self._places.values()

    def _receive(self, wanted: Sequence[tuple[Place, torch.Tensor]]) -> None:
        """Read into memory; each piece is summed while it is in the cache."""
        sums = [torch.empty(rows_of(len(data)), dtype=torch.int64) for _, data in wanted]
        pieces = [(i, at) for i, (_, data) in enumerate(wanted) for at in range(0, len(data), PIECE)]

        def read(piece: tuple[int, int]) -> None:
            (place, data), at = wanted[piece[0]], piece[1]
            part = data[at : at + PIECE]
            self._transport.read(place.begin + at, part.numpy().data)
            sum_rows(part, sums[piece[0]][at // ROW :])

        if self._transport.threads:
            with in_threads() as run:
                for _ in run(read, pieces):
                    pass
        else:
            ends = _ends([place for place, _ in wanted])
            for i, at in pieces:
                self._transport.expect(wanted[i][0].begin + at, ends[i])
                read((i, at))
        for (place, _), found in zip(wanted, sums, strict=True):
            self._compare(place, found)

    def _stage(self, place: Place, data: torch.Tensor) -> None:
        """Read into a device's memory, through a buffer from which it is copied fast."""
        buffer = torch.empty(min(_STAGE, max(len(data), 1)), dtype=torch.uint8, pin_memory=True)
        self._transport.expect(place.begin, place.end)
        self._through(place, buffer, lambda at, piece: data[at - place.begin :][: len(piece)].copy_(piece))

    def _through(self, place: Place, buffer: torch.Tensor, use: Callable[[int, torch.Tensor], object]) -> None:
        """Read one tensor piece by piece; `use` gets each with where it lies in the file."""
        sums = torch.empty(rows_of(place.end - place.begin), dtype=torch.int64)
        for at in range(place.begin, place.end, len(buffer)):
            piece = buffer[: place.end - at]
            self._transport.read(at, piece.numpy().data)
            sum_rows(piece, sums[(at - place.begin) // ROW :])
            use(at, piece)
        self._compare(place, sums)

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


def reach(store: Store, snapshot: int, secret: str, address: str, timeout: float = 120.0) -> Source:
    """A snapshot to copy from: in shared memory where the core is on this host (`address`), else over a socket.

    Raises:
        WeightsMismatch: it was not announced in time, has been recycled, or is not what was announced.
    """
    announcement = find(store, snapshot, timeout)
    return _closing(_transport(announcement, secret, address, timeout), lambda way: Source(announcement, way))


def pull(
    store: Store,
    snapshot: int,
    scratch: Path | str | None,
    secret: str,
    address: str,
    timeout: float = 120.0,
    verify: bool = False,
) -> Pulled:
    """A snapshot as a file: the slot where the core is on this host (`address`), else a copy of it, verified.

    The copy lies in shared memory, or in `scratch` where that has no room. A slot is verified here with `verify`;
    without, it is the caller's business to compare checksums after loading.

    Raises:
        WeightsMismatch: it was not announced in time, has been recycled, or is not what was announced.
    """
    announcement = find(store, snapshot, timeout)
    transport = _transport(announcement, secret, address, timeout)
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


def _transport(announcement: Announcement, secret: str, address: str, timeout: float) -> Transport:
    """The best way that both ends have."""
    shared = Shared.reach(announcement) if announcement.node == address else None
    return shared or Socket(announcement, secret, timeout)


def _ends(places: Sequence[Place]) -> list[int]:
    """For each of some places, in the file's order: where the last one ends that follows without a gap."""
    ends = [place.end for place in places]
    for i in reversed(range(len(places) - 1)):
        if places[i + 1].begin == places[i].end:
            ends[i] = ends[i + 1]
    return ends


def _nameless(size: int, scratch: Path | str | None) -> int:
    """A file without a name, in shared memory or, where that has no room, in `scratch`; returns its descriptor."""
    status = os.statvfs(SHARED)
    room = scratch is None or status.f_bavail * status.f_frsize > 2 * size
    with tempfile.TemporaryFile(dir=SHARED if room else scratch) as file:
        return os.dup(file.fileno())


def _prefer_huge_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Have memory that was not touched yet come in large pages: the first write to it is several times as fast."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.device.type == "cpu"}
    for begin, storage in storages.items():
        first = -(-begin // _PAGE) * _PAGE
        if (size := begin + storage.nbytes() - first) >= _WORTH_HUGE_PAGES:
            with contextlib.suppress(AttributeError):
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_HUGEPAGE)
