"""How an engine gets at KV blocks that another engine left for it: shared memory on one host, a socket between hosts.

Both find the prefix of a request in the other engine's index and hand over *shards*, memory that every worker of this
engine can map. On one host these are the source's own. Over a socket the blocks are copied into shards of our own
first, by a thread, so that neither scheduling nor computing waits for the network. The socket is that of the source's
gate, which wants the run's key.

A search is asked again and again until it has an answer; it waits, within bounds, for an export that is on its way.
Nothing here trusts the words it is given: an address is signed with the run's key, since the key is sent to it.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import os
import re
import struct
import time
import urllib.parse
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from gyre.cell.kv_index import Index, Match
from gyre.cell.kv_segment import (
    Header,
    Page,
    Stage,
    Unavailable,
    check,
    data_offset,
    mapped,
    nameless,
    path_of,
    read_index,
    read_page,
)

#: Seconds that a source may take from the request's arrival to the closing of its gate: its order is on the way.
BEGIN_SECONDS = 0.5
#: Seconds that an export may take.
EXPORT_SECONDS = 10.0
#: Seconds that one read from a socket, or a connection, may take.
SOCKET_SECONDS = 5.0
#: Seconds between two questions to a source that is not ready.
POLL_SECONDS = 0.02
#: Bytes of blocks that are asked for at once.
PIECE_BYTES = 8 << 20

_ADDRESS = re.compile(
    r"([0-9a-f-]{1,80})/(\d{1,9})/(\d{1,6})/([0-9a-f]{32})/([0-9a-f]{32})@(https?://[^/?#@\s]{1,200})"
)


def this_host() -> str:
    """What processes have in common that see each other's memory under /proc: the kernel, and the process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino:x}"


@dataclass(frozen=True)
class Address:
    """Where an engine leaves KV blocks: its host, the process and descriptor of its page, and its gate's URL."""

    host: str
    pid: int
    descriptor: int
    tag: bytes
    url: str

    def encode(self, secret: str) -> str:
        """One word, signed with the run's key."""
        place = f"{self.host}/{self.pid}/{self.descriptor}/{self.tag.hex()}"
        return f"{place}/{_signature(secret, f'{place}@{self.url}')}@{self.url}"

    @classmethod
    def decode(cls, text: str, secret: str) -> Address:
        """The address of its word.

        Raises:
            Unavailable: no engine of this run gave it out.
        """
        if not isinstance(text, str) or (found := _ADDRESS.fullmatch(text)) is None:
            raise Unavailable("no address of KV blocks")
        host, pid, descriptor, tag, signature, url = found.groups()
        if not hmac.compare_digest(signature, _signature(secret, f"{host}/{pid}/{descriptor}/{tag}@{url}")):
            raise Unavailable("an address that no engine of this run gave out")
        return cls(host, int(pid), int(descriptor), bytes.fromhex(tag), url)

    @property
    def page(self) -> str:
        """The path of its page, on its own host."""
        return path_of(self.pid, self.descriptor)


def _signature(secret: str, text: str) -> str:
    return blake2b(text.encode(), key=blake2b(secret.encode()).digest(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Wanted:
    """What a request says of its execution's earlier engine: where its blocks are, of which epoch and policy."""

    address: Address
    epoch: int
    policy: int

    @classmethod
    def of(cls, parameters: Any, secret: str) -> Wanted:
        """Of the value of ``kv_transfer_params["gyre"]``.

        Raises:
            Unavailable: it is not what a proxy sends.
        """
        fields = parameters if isinstance(parameters, dict) else {}
        epoch, policy = fields.get("epoch"), fields.get("policy")
        if type(epoch) is not int or type(policy) is not int:
            raise Unavailable("kv_transfer_params.gyre has no numbers epoch and policy")
        return cls(Address.decode(fields.get("address"), secret), epoch, policy)


@dataclass(frozen=True)
class Kind:
    """What blocks have to be to be of use here: of this model, so many tokens each."""

    model: bytes
    tokens: int


class Found:
    """Blocks that were found: where each worker reads them, which slots in order, and how many tokens they hold."""

    def __init__(
        self, wanted: Wanted, shards: tuple[str, ...], match: Match, generation: int, own: Sequence[int] = ()
    ) -> None:
        self.policy = wanted.policy
        self.generation = generation
        self.shards = shards
        self.slots, self.tokens = match.slots, match.tokens
        self._own = list(own)

    def close(self) -> None:
        """Give copies back; what is mapped stays."""
        while self._own:
            os.close(self._own.pop())


def ready(page: Page, wanted: Wanted, waited: float) -> bool:
    """Whether a source's blocks may be read; False if they may be soon. `waited` is in seconds since the first look.

    Raises:
        Unavailable: they never will.
    """
    if page.epoch != wanted.epoch:
        raise Unavailable(f"the source is in epoch {page.epoch}, not {wanted.epoch}")
    if page.policy != wanted.policy:
        raise Unavailable(f"the source serves policy {page.policy}, not {wanted.policy}")
    if page.stage is Stage.READY and page.generation == wanted.epoch and page.fds:
        return True
    if page.stage is Stage.SERVING and waited < BEGIN_SECONDS:
        return False
    if page.stage in (Stage.PINNING, Stage.EXPORTING) and waited < EXPORT_SECONDS:
        return False
    raise Unavailable(f"the source is {page.stage.name.lower()} after {waited:.1f} s")


class Search(Protocol):
    """A search for one request's prefix."""

    def poll(self, now: float) -> Found | None:
        """What was found, or None while it is not known. Raises `Unavailable` when there is nothing to be found."""

    def wait(self, seconds: float) -> None:
        """Pass the time until there may be news, or until `seconds` are over, without computing."""

    def close(self) -> None:
        """Nobody wants the answer any more."""


class Transport(Protocol):
    """A way to another engine's blocks."""

    def search(self, wanted: Wanted, tokens: Sequence[int], kind: Kind) -> Search:
        """Begin to look for the longest prefix of `tokens` among the blocks."""


# -- shared memory ---------------------------------------------------------------------------------------------------
class Shared:
    """The source's own shards, mapped."""

    def __init__(self) -> None:
        self._indices: OrderedDict[tuple[bytes, int], Index] = OrderedDict()

    def search(self, wanted: Wanted, tokens: Sequence[int], kind: Kind) -> Search:
        """Begin to look."""
        return _SharedSearch(self, wanted, tokens, kind)

    def index(self, wanted: Wanted, page: Page, kind: Kind) -> Index:
        """The index of a source's blocks; the latest few are remembered."""
        name = (page.tag, page.generation)
        with mapped(path_of(wanted.address.pid, page.fds[0])) as memory:
            header = check(memory, page.generation, wanted.policy, kind.model)
            if name not in self._indices:
                self._indices[name] = read_index(memory, header)
        while len(self._indices) > 4:
            self._indices.popitem(last=False)
        return self._indices[name]


class _SharedSearch:
    def __init__(self, transport: Shared, wanted: Wanted, tokens: Sequence[int], kind: Kind) -> None:
        self._transport = transport
        self._wanted = wanted
        self._tokens = tokens
        self._kind = kind
        self._began: float | None = None

    def poll(self, now: float) -> Found | None:
        wanted = self._wanted
        self._began = now if self._began is None else self._began
        page = read_page(wanted.address.page, wanted.address.tag)
        if not ready(page, wanted, now - self._began):
            return None
        found = self._transport.index(wanted, page, self._kind).match(self._tokens)
        shards = tuple(path_of(wanted.address.pid, descriptor) for descriptor in page.fds)
        return Found(wanted, shards, found, page.generation)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        return


# -- sockets ---------------------------------------------------------------------------------------------------------
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
                own.append(gate.copy(shard, header, found.slots))
            if gate.page(wanted.address.tag) != page:  # given up in the meantime
                raise Unavailable("the blocks were given up while they were fetched")
            gate.taken(page.generation, found.slots)
        except BaseException:
            for descriptor in own:
                os.close(descriptor)
            raise
        shards = tuple(path_of(os.getpid(), descriptor) for descriptor in own)
        return Found(wanted, shards, Match(tuple(range(len(found.slots))), found.tokens), page.generation, own)


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

    def copy(self, shard: int, header: Header, slots: Sequence[int]) -> int:
        """Fetch blocks into a shard of our own, in the order of `slots`; returns its descriptor."""
        mine = Header(
            header.generation,
            header.policy,
            header.model,
            header.layout,
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


# -- both ------------------------------------------------------------------------------------------------------------
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
