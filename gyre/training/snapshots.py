"""Snapshots of the weights: written by the core into shared memory, served to other hosts, pulled by whoever needs one.

A snapshot is a safetensors file with Hugging Face names in one of a few recycled slots in /dev/shm. Readers on the
same host map the slot itself, under a shared lock that is their lease: the writer takes the exclusive lock, so it
never overwrites a slot that is read, and the kernel drops the lock of a reader that dies. The core computes on while
others pull. Readers on other hosts get a copy over HTTP from `python -m gyre.training.snapshots`, a child of rank 0
that sends slots with sendfile. Either way the reader checks identity and checksum.

The file's metadata carries its snapshot number, its checksum and its generation (a count of writes), so a slot that
was recycled between an announcement and a lock is noticed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import mmap
import os
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from gyre.checksum import checksum as checksum_of
from gyre.child import Endpoint
from gyre.errors import WeightsMismatch
from gyre.store import Store

SHARED = Path("/dev/shm")
_NO_CHECKSUM = "0" * 32
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
}
_TYPES = {name: dtype for dtype, name in _DTYPES.items()}
_CHUNK = 8 << 20


@dataclass(frozen=True)
class Announcement:
    """Store word `snapshot/<id>`: where a snapshot is and what it must be."""

    snapshot: int
    path: str
    bytes: int
    checksum: str
    generation: int
    node: str
    url: str

    def encode(self) -> str:
        """As the store's JSON word."""
        return json.dumps(asdict(self))


# -- names and clean-up ------------------------------------------------------------------------------------------------
def shared_prefix(run_dir: Path | str, attempt: int | None = None) -> str:
    """Prefix of the names of shared memory of a run, of one attempt if given."""
    path = Path(run_dir).resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return f"gyre-{path.name[:64]}-{digest}-" + (f"{attempt}-" if attempt is not None else "")


def remove_shared(run_dir: Path | str, keep_attempt: int | None = None) -> list[str]:
    """Remove what this run left in this host's shared memory, except for one attempt's; returns the names removed."""
    kept = shared_prefix(run_dir, keep_attempt) if keep_attempt is not None else None
    removed = []
    for path in SHARED.glob(shared_prefix(run_dir) + "*"):
        if kept is None or not path.name.startswith(kept):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


# -- file format -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Spec:
    """Name, type and shape of one tensor of a snapshot."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _header(specs: Iterable[Spec], metadata: dict[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for spec in specs:
        end = offset + spec.bytes
        table[spec.name] = {"dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(descriptor: int) -> tuple[dict[str, Any], int]:
    """The table of a file and where its data begins.

    Raises:
        WeightsMismatch: it is not a whole snapshot.
    """
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    text = os.pread(descriptor, length, 8) if 0 < length < 1 << 28 else b""
    try:
        return json.loads(text), 8 + length
    except ValueError as error:
        raise WeightsMismatch("not a snapshot") from error


def _map(descriptor: int, writable: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a file, mapped; a private mapping where not writable."""
    table, start = _read_header(descriptor)
    memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY)
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        dtype = _TYPES[entry["dtype"]]
        count = (end - begin) // dtype.itemsize
        if count:
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start + begin)
        else:
            flat = torch.empty(0, dtype=dtype)
        yield name, flat.view(entry["shape"])


# -- writing -----------------------------------------------------------------------------------------------------------
@dataclass
class _Slot:
    path: Path
    descriptor: int
    snapshot: int = -1


class Slots:
    """The core's slots. `protected(snapshot, next)` says that a snapshot must stay while `next` is written."""

    def __init__(
        self, prefix: str, count: int, protected: Callable[[int, int], bool], patience: float = 30.0
    ) -> None:
        self._prefix = prefix
        self._count = count
        self._protected = protected
        self._patience = patience
        self._slots: list[_Slot] = []
        self._generation = 0

    def write(self, snapshot: int, specs: list[Spec], tensors: Iterable[torch.Tensor]) -> Announcement:
        """Put a snapshot into a slot; `tensors` come in the order of `specs`. Node and url are left empty."""
        self._generation += 1
        slot = self._acquire(snapshot)
        try:
            slot.snapshot = snapshot
            metadata = {"snapshot": f"{snapshot}", "generation": f"{self._generation}", "checksum": _NO_CHECKSUM}
            header = _header(specs, metadata)
            size = len(header) + sum(spec.bytes for spec in specs)
            os.ftruncate(slot.descriptor, size)
            os.posix_fallocate(slot.descriptor, 0, size)  # a full /dev/shm is an error here, not a SIGBUS later
            os.pwrite(slot.descriptor, header, 0)
            for (_, place), tensor in zip(_map(slot.descriptor, True), tensors, strict=True):
                place.copy_(tensor)
            checksum = checksum_of(_map(slot.descriptor, False))
            os.pwrite(slot.descriptor, checksum.encode(), header.index(_NO_CHECKSUM.encode()))
        finally:
            fcntl.flock(slot.descriptor, fcntl.LOCK_UN)
        return Announcement(snapshot, str(slot.path), size, checksum, self._generation, "", "")

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


# -- pulling -----------------------------------------------------------------------------------------------------------
class Pulled:
    """A snapshot that can be read until `close`: the slot itself under a lease, or a copy of its own."""

    def __init__(self, announcement: Announcement, path: Path, descriptor: int, copied: bool) -> None:
        self.snapshot = announcement.snapshot
        self.checksum = announcement.checksum
        self.path = path
        self.copied = copied
        self._descriptor = descriptor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors, mapped; they must not outlive `close`."""
        return _map(self._descriptor, False)

    def close(self) -> None:
        """Give the lease back, or remove the copy."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if self.copied:
                self.path.unlink(missing_ok=True)

    def __enter__(self) -> Pulled:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pull(
    store: Store,
    snapshot: int,
    scratch: Path | str | None,
    secret: str,
    address: str,
    timeout: float = 120.0,
    verify: bool = False,
) -> Pulled:
    """Get a snapshot: a lease on the slot where the core is on this host (`address`), else a copy over HTTP.

    The copy lies in shared memory, or in `scratch` where that has no room. With `verify` the checksum is computed
    here; without, it is the caller's business to compare it after loading.

    Raises:
        WeightsMismatch: it was not announced in time, has been recycled, or is not what was announced.
    """
    word = store.wait(f"snapshot/{snapshot}", timeout)
    if word is None:
        raise WeightsMismatch(f"snapshot {snapshot} was not announced within {timeout:g} s")
    announcement = Announcement(**json.loads(word))
    pulled = _lease(announcement) if announcement.node == address else None
    if pulled is None:
        pulled = _fetch(announcement, scratch, secret, timeout)
    try:
        if verify and (found := checksum_of(pulled.tensors())) != announcement.checksum:
            raise WeightsMismatch(f"snapshot {snapshot}: checksum {found}, announced {announcement.checksum}")
    except BaseException:
        pulled.close()
        raise
    return pulled


def _identify(descriptor: int, announcement: Announcement) -> None:
    found = _read_header(descriptor)[0]["__metadata__"]
    for key in ("snapshot", "generation", "checksum"):
        if found.get(key) != str(getattr(announcement, key)):
            raise WeightsMismatch(f"snapshot {announcement.snapshot} is gone: its slot has {key} {found.get(key)}")


def _lease(announcement: Announcement) -> Pulled | None:
    """The slot itself; None where this process does not see it (a container with a /dev/shm of its own)."""
    path = Path(announcement.path)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        _identify(descriptor, announcement)
    except BaseException:
        os.close(descriptor)
        raise
    return Pulled(announcement, path, descriptor, copied=False)


def _place(size: int, scratch: Path | str | None) -> Path:
    status = os.statvfs(SHARED)
    return SHARED if scratch is None or status.f_bavail * status.f_frsize > 2 * size else Path(scratch)


def _fetch(announcement: Announcement, scratch: Path | str | None, secret: str, timeout: float) -> Pulled:
    prefix = Path(announcement.path).name.rsplit("slot", 1)[0]
    name = f"{prefix}pulled-{announcement.snapshot}-{os.getpid()}-{time.monotonic_ns()}"
    path = _place(announcement.bytes, scratch) / name
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, announcement.bytes)
        os.posix_fallocate(descriptor, 0, announcement.bytes)
        try:
            _download(announcement, descriptor, secret, timeout)
        except (OSError, http.client.HTTPException) as error:
            raise WeightsMismatch(f"snapshot {announcement.snapshot} from {announcement.url}: {error}") from error
        _identify(descriptor, announcement)
    except BaseException:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    return Pulled(announcement, path, descriptor, copied=True)


def _download(announcement: Announcement, descriptor: int, secret: str, timeout: float) -> None:
    url = urllib.parse.urlsplit(announcement.url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=timeout)
    try:
        headers = {"Authorization": f"Bearer {secret}"}
        connection.request("GET", f"/snapshot/{announcement.snapshot}/{announcement.generation}", headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            raise http.client.HTTPException(f"{response.status} {response.reason}")
        with mmap.mmap(descriptor, announcement.bytes) as memory, memoryview(memory) as view:
            position = 0
            while position < announcement.bytes:
                got = response.readinto(view[position : position + _CHUNK])
                if not got:
                    raise http.client.IncompleteRead(b"", announcement.bytes - position)
                position += got
    finally:
        connection.close()


# -- serving -----------------------------------------------------------------------------------------------------------
class Server:
    """Serves the slots of one attempt over HTTP, one thread per reader."""

    def __init__(self, prefix: str, secret: str, address: str, port: int = 0) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, *_: Any) -> None:
                """Keep quiet: a line per pull is nobody's interest."""

        self._prefix = prefix
        self._authorization = f"Bearer {secret}"
        self._server = ThreadingHTTPServer((address, port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{address}:{self._server.server_port}"

    def serve(self) -> None:
        """Serve until the process ends."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        if request.headers.get("Authorization") != self._authorization:
            request.send_error(401)
            return
        _, kind, *rest = request.path.split("/")
        descriptor = self._open(rest) if kind == "snapshot" and len(rest) == 2 else None
        if descriptor is None:
            request.send_error(404)
            return
        try:
            size = os.fstat(descriptor).st_size
            request.send_response(200)
            request.send_header("Content-Length", str(size))
            request.end_headers()
            request.wfile.flush()
            position = 0
            while position < size:
                position += os.sendfile(request.connection.fileno(), descriptor, position, size - position)
        except OSError:
            request.close_connection = True  # the reader left
        finally:
            os.close(descriptor)

    def _open(self, wanted: list[str]) -> int | None:
        """The slot with this snapshot and generation, under a shared lock."""
        for path in SHARED.glob(self._prefix + "slot*"):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                metadata = _read_header(descriptor)[0]["__metadata__"]
                if [metadata["snapshot"], metadata["generation"]] == wanted:
                    return descriptor
            except WeightsMismatch:
                pass
            os.close(descriptor)
        return None


def main() -> None:
    """The weight server, a child of rank 0: start(run_dir, attempt, secret, address, port=0) -> {"url"}."""
    import threading

    endpoint = Endpoint()

    def start(run_dir: str, attempt: int, secret: str, address: str, port: int = 0) -> dict[str, Any]:
        server = Server(shared_prefix(run_dir, attempt), secret, address, port)
        threading.Thread(target=server.serve, daemon=True).start()
        return {"url": server.url}

    endpoint.serve({"start": start})


if __name__ == "__main__":
    main()
