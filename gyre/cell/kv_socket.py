"""KV blocks of an engine on another host: fetched from its gate by a thread, into shards of our own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import struct
import time
import urllib.parse
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from gyre.cell.kv_index import Index, Match
from gyre.cell.kv_segment import Header, Page, Unavailable, data_offset, fresh_tag, nameless, path_of, read_index
from gyre.cell.kv_transport import Found, Kind, Search, Wanted, ready

#: Seconds that one read from a socket, or a connection, may take.
SOCKET_SECONDS = 5.0
#: Seconds between two questions to a source that is not ready.
POLL_SECONDS = 0.02
#: Bytes of blocks that are asked for at once.
PIECE_BYTES = 8 << 20


class Socket:
    """The blocks are fetched from the source's gate; `limit` is the most bytes that one request may bring."""

    def __init__(self, secret: str, limit: int) -> None:
        self._secret = secret
        self._limit = limit
        self._threads = ThreadPoolExecutor(4, "kv-fetch")

    def search(self, wanted: Wanted, tokens: Sequence[int], kind: Kind) -> Search:
        """Begin to look, and to fetch what is found."""
        search = _SocketSearch()
        search.future = self._threads.submit(self._fetch, wanted, array("i", tokens), kind, lambda: search.closed)
        return search

    def _fetch(self, wanted: Wanted, tokens: Sequence[int], kind: Kind, closed: Callable[[], bool]) -> Found:
        gate = _Gate(wanted.address.url, self._secret)
        try:
            return self._fetch_from(gate, wanted, tokens, kind, closed)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unavailable(f"{wanted.address.url}/{gate.asked}: {type(error).__name__}: {error}") from error
        finally:
            gate.close()

    def _fetch_from(
        self, gate: _Gate, wanted: Wanted, tokens: Sequence[int], kind: Kind, closed: Callable[[], bool]
    ) -> Found:
        began = time.monotonic()
        while not ready(page := gate.page(wanted.address.tag), wanted, time.monotonic() - began):
            if closed():
                raise Unavailable("nobody wants it any more")
            time.sleep(POLL_SECONDS)
        own: list[int] = []
        tag = fresh_tag()  # of the copy, which has slots of its own
        try:
            header, index = gate.index(0)
            if (header.generation, header.policy, header.model) != (page.generation, wanted.policy, kind.model):
                raise Unavailable("blocks of another generation, policy or model")
            found = index.match(tokens)
            if len(found.slots) * header.block_bytes * len(page.fds) > self._limit:
                raise Unavailable("more blocks than serving.kv_limit_mib lets in")
            for shard in range(len(page.fds)):
                if shard:
                    header, _ = gate.index(shard)
                own.append(gate.copy(shard, header, found.slots, tag))
            if gate.page(wanted.address.tag) != page:  # given up in the meantime
                raise Unavailable("the blocks were given up while they were fetched")
            gate.taken(page.generation, found.slots)
        except BaseException:
            for descriptor in own:
                os.close(descriptor)
            raise
        shards = tuple(path_of(os.getpid(), descriptor) for descriptor in own)
        return Found(wanted, shards, Match(tuple(range(len(found.slots))), found.tokens), page.generation, tag, own)


class _SocketSearch:
    def __init__(self) -> None:
        self.future: Future[Found] | None = None
        self.closed = False

    def poll(self, now: float) -> Found | None:
        assert self.future is not None
        return self.future.result() if self.future.done() else None

    def wait(self, seconds: float) -> None:
        assert self.future is not None
        wait([self.future], seconds)

    def close(self) -> None:
        self.closed = True
        assert self.future is not None
        self.future.add_done_callback(_discard)


def _discard(future: Future[Found]) -> None:
    with contextlib.suppress(Exception):
        future.result().close()


class _Gate:
    """A source's gate, as one that fetches blocks sees it."""

    def __init__(self, url: str, secret: str) -> None:
        parts = urllib.parse.urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=SOCKET_SECONDS)
        self._headers = {"Authorization": f"Bearer {secret}"}
        self.asked = ""  # the latest question

    def close(self) -> None:
        self._connection.close()

    def _ask(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        self.asked, data = path, None if body is None else json.dumps(body)
        self._connection.request(method, f"/gyre/kv/{path}", data, self._headers)
        response = self._connection.getresponse()
        if response.status != 200:
            raise Unavailable(f"the source answers {response.status}: {response.read(500).decode(errors='replace')}")
        return response

    def page(self, tag: bytes) -> Page:
        page = Page.unpack(self._ask("GET", "page").read())
        if page.tag != tag:
            raise Unavailable("another engine answers there now")
        return page

    def index(self, shard: int) -> tuple[Header, Index]:
        data = self._ask("GET", f"index/{shard}").read()
        header = Header.unpack(data)
        return header, read_index(data, header)

    def copy(self, shard: int, header: Header, slots: Sequence[int], tag: bytes) -> int:
        """Fetch blocks into a shard of our own, in the order of `slots`; returns its descriptor."""
        mine = Header(
            header.generation,
            header.policy,
            header.model,
            header.layout,
            tag,
            header.block_bytes,
            header.tokens,
            len(slots),
            data_offset(len(slots), header.tokens),
        )
        descriptor = nameless("kv-fetched", mine.size)
        try:
            at, step = mine.data, max(1, PIECE_BYTES // header.block_bytes)
            for first in range(0, len(slots), step):
                body = {"shard": shard, "generation": header.generation, "slots": slots[first : first + step]}
                at = self._receive(self._ask("POST", "blocks", body), descriptor, at, header)
            if at != mine.size:
                raise Unavailable("the source sent fewer blocks than were asked for")
            os.pwrite(descriptor, mine.pack(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @staticmethod
    def _receive(response: http.client.HTTPResponse, descriptor: int, at: int, header: Header) -> int:
        """Write what comes to `at`; after the blocks the generation comes, as it was when they had been read."""
        tail = b""
        while piece := response.read(1 << 20):
            tail, piece = (tail + piece)[-8:], (tail + piece)[:-8]
            at += os.pwrite(descriptor, piece, at) if piece else 0
        if len(tail) != 8 or struct.unpack("<q", tail)[0] != header.generation:
            raise Unavailable("the blocks were given up while they were read")
        return at

    def taken(self, generation: int, slots: Sequence[int]) -> None:
        """Say what is not needed there any more."""
        self._ask("POST", "taken", {"generation": generation, "slots": list(slots)}).read()
