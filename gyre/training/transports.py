"""Ways to the bytes of a snapshot. All are one-sided: whoever holds it computes on, and is asked for nothing.

On the core's host the slot itself is read, under a shared lock that is the reader's lease. Other hosts read over a
socket from the weight server (`gyre.training.snapshots`), which holds the lock for as long as it sends. What came is
compared with what was announced by whoever reads it (`gyre.training.pulling`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import time
import urllib.parse
from collections.abc import Sequence
from typing import Protocol

from gyre.errors import WeightsMismatch
from gyre.training.slots import Announcement

_TRIES = 3  # of one range, over a connection that breaks
_PAUSE_SECONDS = 0.2
_VIEWS = 64  # pieces of memory that one call takes
_HEAD_LIMIT = 16 << 10
_END_OF_HEAD = b"\r\n\r\n"


def _advance(into: list[memoryview], count: int) -> None:
    """Leave out the first `count` bytes."""
    while into and count >= len(into[0]):
        count -= len(into.pop(0))
    if count:
        into[0] = into[0][count:]


def time_value(seconds: float) -> bytes:
    """A time as the kernel's socket options want it."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


class Transport(Protocol):
    """One-sided reads of a snapshot's bytes, in pieces of `piece` bytes; `threads`: whether by several at once."""

    threads: bool
    piece: int

    def expect(self, begin: int, end: int) -> None:
        """The bytes from `begin` to `end` are going to be read, from the first to the last."""

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """Fill `into`, one after the other, with the bytes from `offset` on.

        Raises:
            WeightsMismatch: they cannot be had any more.
        """

    def close(self) -> None:
        """Give back what is held for it."""


class Shared:
    """The slot on this host, under a lease."""

    threads = True
    piece = 2 << 20

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def reach(cls, announcement: Announcement) -> Shared | None:
        """The slot; None where this process does not see it (a container with a /dev/shm of its own).

        Raises:
            WeightsMismatch: the slot is being written again.
        """
        try:
            descriptor = os.open(announcement.path, os.O_RDONLY)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise WeightsMismatch(f"snapshot {announcement.snapshot} is gone: its slot is being written") from error
        return cls(descriptor)

    def expect(self, begin: int, end: int) -> None:
        """Nothing has to be asked for."""

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """Copy from the slot. The kernel copies: a mapping would fault on every page first."""
        into = list(into)
        while into:
            got = os.preadv(self.descriptor, into[:_VIEWS], offset)
            if not got:
                raise WeightsMismatch("the slot ends too early")
            offset += got
            _advance(into, got)

    def close(self) -> None:
        """Give the lease back."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Socket:
    """The weight server of the core's host. A connection that breaks is made again, and goes on where it was."""

    threads = False
    piece = 4 << 20  # the kernel copies small pieces at a lower rate

    def __init__(self, announcement: Announcement, secret: str, timeout: float) -> None:
        url = urllib.parse.urlsplit(announcement.url)
        self._address = (url.hostname or "", url.port or 80)
        self._name = f"snapshot {announcement.snapshot} from {announcement.url}"
        self._request = (
            f"GET /snapshot/{announcement.snapshot}/{announcement.generation} HTTP/1.1\r\nHost: {url.netloc}\r\n"
            f"Authorization: Bearer {secret}\r\nRange: bytes="
        )
        self._timeout = timeout
        self._socket: socket.socket | None = None
        self._at = self._end = 0  # what the server is sending: bytes from here to there
        self._until = 0  # what is expected to be read

    def expect(self, begin: int, end: int) -> None:
        """Remember how much to ask for at once."""
        self._until = end

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """Receive what is there, or ask for it."""
        into, tries = list(into), _TRIES
        while into:
            try:
                if self._socket is None or offset != self._at or self._at == self._end:
                    self._ask(offset, max(self._until, offset + sum(map(len, into))))
                got = self._socket.recvmsg_into(into[:_VIEWS], 0, socket.MSG_WAITALL)[0]
                if not got:
                    raise ConnectionResetError("it closed the connection")
            except (BlockingIOError, TimeoutError) as error:
                self._drop()
                raise WeightsMismatch(f"{self._name}: nothing came in {self._timeout:g} s, at byte {offset}") from error
            except OSError as error:
                self._drop()
                tries -= 1
                if not tries:
                    raise WeightsMismatch(f"{self._name}: {error}, at byte {offset}") from error
                time.sleep(_PAUSE_SECONDS)
                continue
            tries = _TRIES
            self._at += got
            offset += got
            _advance(into, got)

    def _ask(self, begin: int, end: int) -> None:
        if self._at != self._end:
            self._drop()  # it is sending something else
        if self._socket is None:
            self._socket = socket.create_connection(self._address, self._timeout)
            self._socket.settimeout(None)  # the kernel's own timeout: with it, one call can fill a whole buffer
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, time_value(self._timeout))
        self._socket.sendall(f"{self._request}{begin}-{end - 1}\r\n\r\n".encode())
        status = self._head().split(b"\r\n", 1)[0].decode(errors="replace")
        if status.split()[1:2] != ["206"]:
            self._drop()
            raise WeightsMismatch(f"{self._name}: {status.partition(' ')[2]}")
        self._at, self._end = begin, end

    def _head(self) -> bytes:
        """The head of an answer, and not a byte of what follows."""
        head = b""
        while not head.endswith(_END_OF_HEAD):
            seen = self._socket.recv(_HEAD_LIMIT, socket.MSG_PEEK)
            if not seen or len(head) > _HEAD_LIMIT:
                raise ConnectionResetError("it ended without an answer")
            found = (head + seen).find(_END_OF_HEAD)
            head += self._socket.recv(len(seen) if found < 0 else found + len(_END_OF_HEAD) - len(head))
        return head

    def _drop(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None
        self._at = self._end = 0

    def close(self) -> None:
        """End the connection."""
        self._drop()
