"""Which way an engine's KV blocks come: over shared memory on one host, over a socket between hosts."""

from __future__ import annotations

from collections.abc import Sequence

from gyre.cell.kv_shared import Shared
from gyre.cell.kv_socket import Socket
from gyre.cell.kv_transport import Kind, Search, Transport, Wanted, this_host


def transport(name: str, secret: str, limit: int) -> Transport:
    """The transport that is configured: ``auto``, ``shared`` or ``socket``."""
    socket = Socket(secret, limit)
    return {"auto": _Auto(socket), "shared": Shared(), "socket": socket}[name]


class _Auto:
    """Shared memory where the source is on this host, a socket elsewhere."""

    def __init__(self, socket: Socket) -> None:
        self._host = this_host()
        self._socket = socket
        self._shared = Shared()

    def search(self, wanted: Wanted, tokens: Sequence[int], kind: Kind) -> Search:
        there = self._shared if wanted.address.host == self._host else self._socket
        return there.search(wanted, tokens, kind)
